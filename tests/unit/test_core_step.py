"""Lives of one node, told event by event; what the core decides is compared with the golden text beside this file.

After a wanted change of behaviour: `GOLDEN=write pytest tests/unit/test_core_step.py`, then read the diff.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from core_kit import SETTINGS, Life, leads, member, plan, record, seat, trains

from elasticrl.contract import events
from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.events import Asked, Found, Leased, Probed, Seen, Suspected, Tick, Workers
from elasticrl.contract.evidence import Evidence, Kind, Sign
from elasticrl.contract.model import (
    OUTSIDE,
    Commit,
    Exit,
    Intent,
    Phase,
    Quarantine,
    Rung,
    Stall,
    Verb,
    Work,
)
from elasticrl.contract.settings import Membership, Settings
from elasticrl.core.node.follow import report_every
from elasticrl.core.node.state import State

GOLDEN = Path(__file__).parent / "golden"


def a_followers_life():
    life = Life("n01/1")
    life.at(0.0, Tick(now=0))
    life.leased(0.1)
    life.seen(0.2, "empty store")
    life.at(2.0, Workers(now=0, warm=True, endpoint="n01:29500"))
    life.seen(
        3.0, "plan 1", leader=member("n00"), leader_revision=3, plan=plan(1, "n00", "n01", "n02"), plan_revision=4
    )
    life.at(3.1, Workers(now=0, work=Work.JOINING, generation=1, born=1, endpoint="n01:29500"))
    life.leased(3.2)
    life.at(4.0, Workers(now=0, work=Work.TRAINING, generation=1, born=1, endpoint="n01:29500"))
    life.at(5.0, Suspected(now=0, node="n00"))
    life.at(5.1, events.Cleared(now=0, node="n00"))
    life.at(6.0, Workers(now=0, work=Work.PARKED, generation=1, born=1, warm=True, step=3))
    life.seen(6.1, "plan 2: reform", plan=plan(2, "n00", "n01"), plan_revision=9)
    life.at(6.2, Workers(now=0, work=Work.JOINING, generation=2, born=1, warm=True, step=3))
    life.leased(6.3)
    stall = Stall(slot=0, step=4, phase="rollout", for_s=9, budget_s=8, waiting=False)
    life.at(9.0, Workers(now=0, work=Work.TRAINING, generation=2, born=1, warm=True, step=4, stall=stall))
    where = Evidence(kind=Kind.STACK, sign=Sign.ELSEWHERE, rank=1, node="n01", generation=2, detail="in its dataloader")
    life.at(9.05, Found(now=0, evidence=(where,), scene=0))
    died = Exit(generation=2, slot=0, step=4, cause="stalled in rollout", own=False, sign=Sign.HOST_STUCK)
    life.at(9.1, Workers(now=0, work=Work.FAILED, generation=2, warm=True, step=4, exit=died))
    fresh = replace(plan(3, "n00"), seats=(seat("n00"), seat("n01", born=3)))
    life.seen(9.3, "plan 3: this node starts afresh", plan=fresh, plan_revision=12)
    life.at(9.5, Workers(now=0, work=Work.JOINING, generation=3, born=3, step=4))
    life.leased(9.6)
    life.seen(10.0, "an older view", revision=-1)
    life.seen(11.0, "plan 4: out of the plan", revision=40, plan=plan(4, "n00", "n02"), plan_revision=14)
    life.at(11.1, Workers(now=0, warm=True))
    life.at(12.0, Asked(now=0, verb=Verb.DRAIN))
    return life.lines


def the_store_falls_silent():
    life = Life("n00/1")
    life.leased(0.0)
    life.seen(0.1, "empty store")
    life.seen(0.2, "plan 1", plan=plan(1, "n00", "n01"), plan_revision=4, leader=member("n01"), leader_revision=3)
    life.at(0.3, Workers(now=0, work=Work.TRAINING, generation=1, born=1, warm=True))
    life.at(9.0, Tick(now=0))
    life.at(10.5, Tick(now=0), "Tick: the lease may be lost")
    life.lines.append(f"            reason: {life.state.reason}")
    life.at(11.0, Workers(now=0, work=Work.TRAINING, generation=1, born=1, warm=True, step=9, saved=9, manifest="m9"))
    life.at(12.0, Leased(now=0, sent=0.0, held=False))
    life.at(30.0, Leased(now=0, sent=29.9))
    life.seen(30.1, "own record gone with the lease", own=None)
    life.seen(30.3, "committed", commit=Commit(step=9, generation=1, manifest="m9"), commit_revision=31)
    return life.lines


def a_leaders_life():
    life = Life("n00/1")
    leads(life)
    life.told(1.0, record("n00"), record("n01"))
    life.told(1.5, record("n02"))
    life.at(2.5, Tick(now=0), "Tick: nobody else comes")
    trains(life, 2.6, 1, "n00", "n01", "n02")
    life.leased(2.9)
    died = Exit(generation=1, slot=0, step=5, cause="signal 9 (SIGKILL)", own=False, signal=9)
    life.told(4.0, record("n02", work=Work.FAILED, generation=1, exit=died))
    trains(life, 4.1, 2, "n00", "n01", "n02")
    life.leased(5.0)
    suspicious = record("n01", work=Work.TRAINING, generation=2, born=1, suspects=("n02/1",))
    life.told(6.0, suspicious)
    life.at(6.1, Suspected(now=0, node="n02"))
    life.told(6.2, life.view.own)
    life.view = replace(
        life.view, quarantines={"n02": Quarantine(member=member("n02"), cause=Cause(why=Why.POLICY, said="not heard"))}
    )
    trains(life, 6.4, 3, "n00", "n01")
    life.leased(8.0)
    life.told(9.0, record("n01", work=Work.STALLED, generation=3, born=1))
    life.at(10.0, Tick(now=0), "Tick: nobody to blame, and nobody looked at")
    life.seen(10.01, "all are to be looked at", look=3, look_revision=41)
    life.at(10.05, Found(now=0, scene=41))
    life.told(10.1, record("n01", work=Work.STALLED, generation=3, born=1, looked=41), life.view.own)
    life.seen(10.2, "plan 4 written", plan=plan(4, "n00", "n01", phase=Phase.PROBE), plan_revision=40)
    life.at(10.5, Probed(now=0, generation=4, unreachable=()))
    life.told(10.6, record("n01", work=Work.PARKED, generation=4, born=1, unreachable=(), answered=4))
    return life.lines


def beside_one_outside():
    """A leader of three that train, and what the third says of itself: it waits outside of the gang."""
    life = Life("n00/1")
    leads(life)
    life.told(1.0, record("n00"), record("n01"))
    life.at(2.1, Tick(now=0))
    trains(life, 3.0, 1, "n00", "n01", "n02")
    outside = record("n02", work=Work.TRAINING, generation=1, born=1, phase=OUTSIDE)
    return life, outside


def test_who_waits_for_one_that_waits_outside_of_the_gang_is_no_victim() -> None:
    life, outside = beside_one_outside()
    life.told(10.0, record("n01", work=Work.STALLED, generation=1, born=1), outside)
    for second in range(11, 70):
        life.leased(second)
        decision = life.at(second + 0.1, Tick(now=0))
        assert not [a for a in decision.actions if isinstance(a, events.Inspect | events.Propose)], life.lines[-3:]
    life.told(70.2, replace(outside, phase="rollout"))  # it is back, and still keeps the others waiting
    decision = life.at(70.3 + SETTINGS.timeouts.confirm_s, Tick(now=0))
    assert any(isinstance(a, events.Inspect | events.Propose) for a, _ in life.state.sent.values())


@pytest.mark.parametrize("budget_s", [5.0, 30.0])  # the second is longer than a look at all workers is waited for
def test_who_is_back_from_outside_has_as_long_as_those_who_wait_for_it_may_take(budget_s: float) -> None:
    life, outside = beside_one_outside()
    stall = Stall(slot=0, step=0, phase="reward", for_s=20.0, budget_s=budget_s, waiting=True)
    life.told(10.0, record("n01", work=Work.STALLED, generation=1, born=1, stall=stall), outside)
    for tenth in range(110, 700):
        life.leased(tenth / 10)
        if tenth == 200:
            life.told(20.05, replace(outside, phase="reward"))
        life.at(tenth / 10 + 0.06, Tick(now=0))
        acts = any(isinstance(a, events.Inspect) for a, _ in life.state.sent.values())
        assert not any(isinstance(a, events.Propose) for a, _ in life.state.sent.values()), (
            "before anybody was looked at"
        )
        assert acts == (tenth / 10 + 0.06 >= 20.05 + budget_s), life.lines[-3:]
        if acts:
            break
    assert acts


def test_who_has_left_a_broken_group_waits_for_nobody_s_engine() -> None:
    life, outside = beside_one_outside()
    life.leased(9.9)
    life.told(10.0, record("n01", work=Work.PARKED, generation=1, born=1), outside)
    assert "waiting to learn which one is at fault" in life.state.reason


def test_that_a_worker_waits_outside_of_the_gang_is_written_at_once_and_so_is_its_return() -> None:
    life = Life("n01/1")
    life.leased(0.1)
    life.seen(0.2, "plan 1", leader=member("n00"), leader_revision=3, plan=plan(1, "n00", "n01"), plan_revision=4)
    said = []
    for now, phase in ((1.0, "rollout"), (1.1, OUTSIDE), (1.2, "rollout"), (1.3, "update")):
        work = Workers(now=0, work=Work.TRAINING, generation=1, born=1, phase=phase)
        decision = life.at(now, work)
        said.append([a.record.phase for a in decision.actions if isinstance(a, events.Publish)])
        life.seen(now, "as written", own=life.view.own)
    assert said == [["rollout"], [OUTSIDE], ["rollout"], []]


def a_crash_loop():
    life = Life("n00/1")
    leads(life)
    life.told(1.0, record("n00"), record("n01"))
    life.at(2.1, Tick(now=0))
    for generation in (1, 2, 3):
        now = 3.0 * generation
        trains(life, now, generation, "n00", "n01", **({"strike": life.strike} if generation > 1 else {}))
        died = Exit(generation=generation, slot=0, step=7, cause="exit code 1: ValueError", own=True)
        life.leased(now + 0.5)
        life.told(now + 1.0, record("n01", work=Work.FAILED, generation=generation, exit=died))
        life.strike = next(a for a, _ in life.state.sent.values() if isinstance(a, events.Propose)).plan.strike
        life.lines.append(f"            {life.strike.count} x at step {life.strike.step}: {life.strike.cause}")
    return life.lines


def what_operators_ask():
    life = Life("n00/1")
    leads(life)
    life.told(1.0, record("n00"), record("n01"), record("n02"))
    life.at(2.1, Tick(now=0))
    trains(life, 2.2, 1, "n00", "n01", "n02")
    life.at(2.5, Asked(now=0, verb=Verb.DRAIN, node="n01"))
    life.at(2.6, Asked(now=0, verb=Verb.PAUSE))
    life.seen(2.7, "paused", intent=Intent.PAUSE, intent_generation=1, intent_by="alice on n01")
    paused = replace(
        plan(2, "n00", "n01", "n02", phase=Phase.HOLD), causes=(Cause(why=Why.PAUSED, nodes=("alice on n01",)),)
    )
    life.seen(2.8, "plan 2 written", plan=paused, plan_revision=20)
    life.at(2.9, Workers(now=0, work=Work.PARKED, generation=2, born=1, warm=True, endpoint="n00:29500"))
    held = [record(n, work=Work.PARKED, generation=2, born=1) for n in ("n01", "n02")]
    life.told(3.0, life.view.own, *held)
    life.seen(3.1, "to go on", intent=Intent.RUN, intent_by="")
    life.at(4.5, Tick(now=0))
    trains(life, 4.6, 3, "n00", "n01", "n02")
    life.told(5.0, record("n01", work=Work.TRAINING, generation=3, born=1, leaving=True))
    life.leased(5.1)
    trains(life, 5.2, 4, "n00", "n02")
    life.seen(6.0, "to stop", intent=Intent.STOP, intent_generation=4)
    stop = plan(5, "n00", "n02", phase=Phase.STOP, exit_code=75)
    life.seen(6.1, "plan 5 written", plan=stop, plan_revision=50)
    saved = {"saved": 12, "manifest": "m12", "generation": 5}
    life.at(7.0, Workers(now=0, warm=True, **saved))
    life.seen(7.1, "committed", commit=Commit(step=12, generation=5, manifest="m12"), commit_revision=51)
    return life.lines


@pytest.mark.parametrize(
    "script", [a_followers_life, the_store_falls_silent, a_leaders_life, a_crash_loop, what_operators_ask]
)
def test_the_core_decides_as_it_did(script):
    told = "\n".join(script()) + "\n"
    path = GOLDEN / f"{script.__name__}.txt"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(told)
    assert told == path.read_text()


@pytest.mark.parametrize(("born", "suspects"), [(1, ("n02",)), (2, ())], ids=["the same life", "the next one"])
def test_suspicion_ends_with_the_life_that_it_was_of(born, suspects):
    life, _ = beside_one_outside()
    life.at(5.0, Suspected(now=0, node="n02"))
    after = plan(2, "n00", "n01", f"n02/{born}")
    life.seen(5.1, "plan 2", plan=after, plan_revision=20)
    assert life.state.suspects == frozenset(suspects)


def test_of_thousands_each_tells_its_step_less_often():
    def every(nodes):
        state = State(me=member("n00"), card=record("n00"), settings=Settings(membership=Membership(report_s=5.0)))
        names = (f"n{number:02}" for number in range(nodes))
        return report_every(state.but(view=replace(state.view, plan=plan(1, *names))))

    assert [every(nodes) for nodes in (1, 1000, 4096)] == [5.0, 5.0, 20.48]


def test_a_vault_that_answers_elsewhere_is_told_to_all_once_the_gang_trains():
    def proposed(vault):
        life = Life("n00/1")
        leads(life)
        life.told(1.0, record("n00"), record("n01", vault="n01:7000"))
        life.at(2.5, Tick(now=0))
        trains(life, 2.6, 1, "n00", "n01")
        seats = tuple(replace(s, vault="n01:7000") if s.member.node == "n01" else s for s in life.view.plan.seats)
        life.seen(2.9, "with a vault", plan=replace(life.view.plan, seats=seats))
        life.leased(3.0)
        before = len(life.lines)
        life.told(4.0, record("n01", work=Work.TRAINING, generation=1, born=1, vault=vault))
        return [line.strip() for line in life.lines[before:] if "Propose" in line]

    assert proposed("n01:7000") == []
    (line,) = proposed("n01:7999")
    assert line.startswith("Propose 2 train REFORM [n00/1:1 n01/1:1]")
    assert "the vault of n01/1 moved to another port" in line


def test_a_plan_for_another_reason_says_where_each_vault_and_daemon_is_now():
    """Found live (seed 47): a gang that could not form, as a vault had moved, never trained, and so never heard of it."""
    life = Life("n00/1")
    leads(life)
    life.told(1.0, record("n00"), record("n01", vault="n01:7000"), record("n02"))
    life.at(2.5, Tick(now=0))
    trains(life, 2.6, 1, "n00", "n01", "n02")
    life.leased(2.9)
    died = Exit(generation=1, slot=0, step=5, cause="signal 9 (SIGKILL)", own=False, signal=9)
    moved = record("n01", work=Work.JOINING, generation=1, born=1, vault="n01:7999", beat="n01:7555")
    life.told(4.0, moved, record("n02", work=Work.FAILED, generation=1, exit=died))
    proposed = next(a for a, _ in life.state.sent.values() if isinstance(a, events.Propose)).plan
    assert proposed.causes[0].signal == 9
    assert [seat.vault for seat in proposed.seats] == ["", "n01:7999", ""]
    assert proposed.seats[1].beat == "n01:7555", "who is let in knows a daemon by the plan alone"


@pytest.mark.parametrize(("work", "rung"), [(Work.TRAINING, Rung.REFORM), (Work.JOINING, Rung.REPLACE)])
def test_a_gang_that_forms_hears_at_once_where_a_vault_has_moved_and_goes_on_as_it_was_to(work, rung):
    life = Life("n00/1")
    leads(life)
    life.told(1.0, record("n00"), record("n01"))
    life.at(2.5, Tick(now=0))
    life.seen(2.6, "plan 1 written", plan=plan(1, "n00", "n01", rung=Rung.REPLACE), plan_revision=10)
    life.at(2.7, Workers(now=0, work=work, generation=1, born=1, warm=True, endpoint="n00:29500"))
    life.told(2.8, life.view.own, record("n01", work=work, generation=1, born=1, vault="n01:7999"))
    proposed = next(a for a, _ in life.state.sent.values() if isinstance(a, events.Propose)).plan
    assert Cause(why=Why.VAULT_MOVED, who=(member("n01"),)) in proposed.causes
    assert proposed.rung is rung
    assert [(seat.born, seat.vault) for seat in proposed.seats] == [(1, ""), (1, "n01:7999")]


def test_who_speaks_another_wire_gets_no_seat_beside_the_others_and_why_is_said():
    life = Life("n00/1", settings=replace(SETTINGS, membership=replace(SETTINGS.membership, min_nodes=3)))
    leads(life)
    spoken = {"n00": "1", "n01": "2", "n02": "2"}
    life.told(1.0, *(record(name, versions=json.dumps({"wire": wire})) for name, wire in spoken.items()))
    life.at(2.5, Tick(now=0))
    assert not [a for a, _ in life.state.sent.values() if isinstance(a, events.Propose)]
    assert "2 of the 3 required nodes are ready; 1 node of another wire" in life.state.reason


@pytest.mark.parametrize(
    ("exact", "says"),
    [("require", False), ("warn", True), ("off", False)],
)
def test_a_plan_that_lets_other_bits_in_says_so_once_and_only_where_that_is_wanted(exact, says):
    life = Life("n00/1", settings=replace(SETTINGS, exact=exact))
    leads(life)
    life.told(1.0, record("n00"), record("n01"), record("n02", bits="y"))
    life.at(2.5, Tick(now=0))
    (proposed,) = (a.plan for a, _ in life.state.sent.values() if isinstance(a, events.Propose))
    assert (Cause(why=Why.UNLIKE, nodes=("n02",)) in proposed.causes) is says
    assert (member("n02") in proposed.seat_of) is (exact != "require")
    if not says:
        return
    trains(life, 2.6, 1, "n00", "n01", "n02")
    life.leased(2.9)
    died = Exit(generation=1, slot=0, step=5, cause="signal 9 (SIGKILL)", own=False, signal=9)
    life.told(4.0, record("n02", bits="y", work=Work.FAILED, generation=1, exit=died))
    (proposed,) = (a.plan for a, _ in life.state.sent.values() if isinstance(a, events.Propose))
    assert proposed.causes[0].signal == 9
    assert not proposed.says(Why.UNLIKE)


def test_where_no_record_offers_a_place_to_meet_the_gang_meets_where_it_met_before():
    """A node's first record may come to the store once more, late: it knew no place yet."""
    life = Life("n00/1", replace(SETTINGS, membership=replace(SETTINGS.membership, min_nodes=1)))
    leads(life)
    trains(life, 1.0, 1, "n00", "n01", endpoint="n00:29500")
    old = replace(life.view.own, endpoint="", warm=False, work=Work.NONE, generation=0, born=0)
    life.view = replace(life.view, own=old, records={"n00": old}, revision=life.view.revision + 1)
    decision = life.at(3.0, Seen(now=3.0, view=life.view))
    proposed = [action.plan for action in decision.actions if isinstance(action, events.Propose)]
    assert [(p.phase, [str(s.member) for s in p.seats], p.endpoint) for p in proposed] == [
        (Phase.TRAIN, ["n00/1"], "n00:29500")
    ]
