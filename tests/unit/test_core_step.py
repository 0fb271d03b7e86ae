"""Lives of one node, told event by event; what the core decides is compared with the golden text beside this file.

After a wanted change of behaviour: `GOLDEN=write pytest tests/unit/test_core_step.py`, then read the diff.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from elasticrl.core import events
from elasticrl.core.cause import Cause, Why
from elasticrl.core.events import Asked, Found, Leased, Probed, Seen, Suspected, Tick, Workers
from elasticrl.core.evidence import Evidence, Kind, Sign
from elasticrl.core.follow import report_every
from elasticrl.core.model import (
    OUTSIDE,
    Commit,
    Exit,
    Intent,
    Member,
    Phase,
    Plan,
    Quarantine,
    Record,
    Rung,
    Seat,
    Stall,
    Verb,
    View,
    Work,
)
from elasticrl.core.settings import Membership, Recovery, Settings
from elasticrl.core.state import State
from elasticrl.core.step import step

GOLDEN = Path(__file__).parent / "golden"
SETTINGS = Settings(lanes=6, steps=0, membership=Membership(min_nodes=2), recovery=Recovery(no_progress_limit=3))


def member(name):
    node, _, life = name.partition("/")
    return Member(node=node, incarnation=int(life or 1))


def seat(name, born=1):
    return Seat(member=member(name), born=born, beat=f"{member(name).node}:7461")


def plan(generation, *names, phase=Phase.TRAIN, **more):
    return Plan(
        generation=generation,
        phase=phase,
        seats=tuple(seat(n) for n in names),
        lanes=6,
        causes=(Cause(why=Why.POLICY, said="as told"),),
        **more,
    )


def record(name, **more):
    who = member(name)
    fields = {"beat": f"{who.node}:7461", "endpoint": f"{who.node}:29500", "bits": "x", "warm": True, **more}
    return Record(member=who, **fields)


class Life:
    """One node's core and the store as it sees it; every line is an event and what was decided."""

    def __init__(self, name="n00/1", settings=SETTINGS):
        self.state = State(
            settings=settings, me=member(name), card=Record(member=member(name), beat=f"{name[:3]}:7461", bits="x")
        )
        self.view = View(revision=1)
        self.lines = []
        self.now = 0.0

    def at(self, now, event, label=None):
        self.now = now
        decision = step(self.state, replace(event, now=now))
        self.state = decision.state
        self.lines.append(f"{now:7.2f} {label or self.name(event)}")
        self.lines += [
            f"            {self.show(action)}" for action in decision.actions if not isinstance(action, events.Say)
        ]
        for action in decision.actions:
            if isinstance(
                action, events.Publish
            ):  # the store answers at once, so that the next line is about the next thing
                records = {**(self.view.records or {}), self.state.me.node: action.record}
                self.view = replace(
                    self.view, own=action.record, records=records if self.view.records is not None else None
                )
        return decision

    def leased(self, now):
        self.at(now, Leased(now=now, sent=now))

    def seen(self, now, label, **changes):
        self.view = replace(self.view, **{"revision": self.view.revision + 1, **changes})
        self.at(now, Seen(now=now, view=self.view), f"Seen: {label}")

    def told(self, now, *records):
        """The leader is shown these records."""
        names = ", ".join(f"{r.member} {r.work.value}{' warm' if r.warm else ''}" for r in records)
        everyone = {**(self.view.records or {}), **{r.member.node: r for r in records}}
        self.seen(now, names, records=everyone)

    @staticmethod
    def name(event):
        match event:
            case Workers():
                return f"Workers: {event.work.value} {event.generation}{' warm' if event.warm else ''}"
            case Suspected(node=node):
                return f"Suspected: {node}"
            case Asked(verb=verb, node=node):
                return f"Asked: {verb.value} {node or ''}".rstrip()
            case _:
                return type(event).__name__

    @staticmethod
    def show(action):
        match action:
            case events.Publish(record=r):
                parts = [f"{r.work.value} {r.generation} born {r.born} step {r.step}"]
                parts += ["warm"] * r.warm + ["leaving"] * r.leaving + ([f"exit {r.exit.cause!r}"] if r.exit else [])
                parts += [f"suspects {' '.join(r.suspects)}"] * bool(r.suspects) + [f"stall {r.stall}"] * bool(r.stall)
                parts += [f"evidence {'; '.join(map(str, r.evidence))}"] * bool(r.evidence)
                return f"Publish {', '.join(parts)}"
            case events.Propose(plan=p, if_plan=a, if_commit=b, if_leader=c):
                seats = " ".join(f"{s.member}:{s.born}" for s in p.seats)
                code = f" exit {p.exit_code}" if p.exit_code is not None else ""
                text = f"Propose {p.generation} {p.phase.value} {p.rung.name} [{seats}] from {p.resume}{code}"
                return f"{text} if {a}/{b}/{c}: {p.reason}"
            case events.Commit(step=s, generation=g, if_plan=a, if_commit=b):
                return f"Commit step {s} under {g} if {a}/{b}"
            case events.Launch(plan=p) | events.Reform(plan=p) | events.Park(plan=p):
                return f"{type(action).__name__} {p.generation}"
            case events.Halt(save=save, reason=reason):
                return f"Halt{' and save' if save else ''}: {reason}"
            case events.Confine(quarantine=q):
                return f"Confine {q.member} {'held' if q.held else 'let go'}: {q.reason}"
            case _:
                fields = [f"{name}={getattr(action, name)}" for name in action.__dataclass_fields__]
                return f"{type(action).__name__} {' '.join(fields)}".rstrip()


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


def leads(life, now=0.0):
    life.leased(now)
    life.seen(now, "empty store")
    life.at(now + 0.1, Workers(now=0, warm=True, endpoint="n00:29500"))
    life.at(now + 0.6, Tick(now=0))
    life.seen(now + 0.7, "the office is ours", leader=life.state.me, leader_revision=3, records={}, quarantines={})


def trains(life, now, generation, *names, **more):
    life.seen(now, f"plan {generation} written", plan=plan(generation, *names, **more), plan_revision=10 * generation)
    life.at(
        now + 0.1, Workers(now=0, work=Work.TRAINING, generation=generation, born=1, warm=True, endpoint="n00:29500")
    )
    rows = [record(n, work=Work.TRAINING, generation=generation, born=1) for n in names if n != "n00"]
    life.told(now + 0.2, life.view.own, *rows)


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
    assert "waiting for the one that is to blame" in life.state.reason


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
    assert "the vault of n01/1 answers at another port" in line


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
    assert "2 of the 3 nodes it needs are ready; 1 node of another wire" in life.state.reason


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
