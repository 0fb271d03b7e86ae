"""Who keeps which shards, and for whom the leader holds before it goes back to an older step."""

from dataclasses import replace

import pytest
from core_kit import Life, leads, member, plan, quarantines, record, trains

from elasticrl.contract import events
from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.events import Tick, Workers
from elasticrl.contract.model import Commit, Lap, Phase, Work
from elasticrl.contract.settings import Membership, Settings
from elasticrl.core.lead.shards import lost

FOUR = ("n00", "n01", "n02", "n03")
SETTINGS = Settings(lanes=8, copies=1, membership=Membership(min_nodes=2, lease_ttl_s=10.0))


@pytest.mark.parametrize(
    ("gang", "here", "copies", "missing"),
    [
        (FOUR, FOUR, 1, []),
        (FOUR, ("n00", "n01", "n02"), 1, []),
        (FOUR, ("n00", "n02"), 1, []),  # each of the others has a neighbour here
        (FOUR, ("n00", "n01"), 1, [{"n02", "n03"}]),
        (FOUR, ("n01", "n02"), 1, [{"n03", "n00"}]),  # around the end of the ring
        (FOUR, ("n00", "n01"), 2, []),
        (FOUR, ("n00",), 0, [{"n01"}, {"n02"}, {"n03"}]),
        (("n00", "n01"), ("n00",), 5, []),  # more copies than nodes
        ((), ("n00",), 1, []),
    ],
)
def test_a_shard_is_lost_with_all_who_keep_it(gang, here, copies, missing):
    assert lost(gang, here, copies) == tuple(map(frozenset, missing))


def proposed(decision):
    return next((a.plan for a in decision.actions if isinstance(a, events.Propose)), None)


def four_train(*, steps=7):
    """A leader of four that has been told of a step beyond the newest commit, and then that two are not heard any more."""
    life = Life("n00/1", SETTINGS)
    leads(life)
    trains(life, 2.6, 1, *FOUR)
    life.told(3.0, *(record(n, work=Work.TRAINING, generation=1, born=1, step=steps) for n in FOUR[1:]))
    life.leased(4.0)
    return life


def cut_off(life, now, *nodes):
    for node in nodes:
        life.at(now, events.Suspected(now=0, node=node))
    mine = record(
        "n01", work=Work.TRAINING, generation=1, born=1, step=7, suspects=tuple(f"{node}/1" for node in nodes)
    )
    life.view = replace(
        life.view, records={**life.view.records, "n01": mine, "n00": life.view.own}, revision=life.view.revision + 1
    )
    return life.at(now + 0.1, events.Seen(now=0, view=life.view))


def held(life, now, made):
    life.seen(now, "the hold", plan=made, plan_revision=60)


def test_the_job_holds_for_those_who_alone_keep_a_shard():
    made = proposed(cut_off(four_train(), 5.0, "n02", "n03"))
    assert made.phase is Phase.HOLD
    assert [seat.member.node for seat in made.seats] == list(FOUR)
    sole = Cause(why=Why.SOLE_KEEPERS, nodes=("n02", "n03"), step=0, seconds=10.0)
    assert sole in made.causes


def test_nobody_is_quarantined_while_he_is_waited_for():
    decision = cut_off(four_train(), 5.0, "n02", "n03")
    assert not [q for q in quarantines(decision.actions) if q.held]


def test_it_goes_on_with_all_when_they_are_heard_again():
    life = four_train()
    held(life, 5.2, proposed(cut_off(life, 5.0, "n02", "n03")))
    life.leased(6.0)
    assert life.state.reason.endswith("holding for n02 and n03, who alone had what was made since step 0")
    for node in ("n02", "n03"):
        life.at(8.0, events.Cleared(now=0, node=node))
    life.told(8.1, life.view.own, record("n01", work=Work.PARKED, generation=2, born=1, step=7))
    made = proposed(life.at(8.9, Tick(now=0))) or next(
        a.plan for a, _ in life.state.sent.values() if isinstance(a, events.Propose)
    )
    assert made.phase is Phase.TRAIN
    assert len(made.seats) == 4


def test_it_goes_on_without_them_after_a_lease():
    life = four_train()
    held(life, 5.2, proposed(cut_off(life, 5.0, "n02", "n03")))
    for now in (8.0, 11.0, 14.0):
        life.leased(now)
        assert life.state.view.plan.phase is Phase.HOLD
    life.leased(15.1)
    made = proposed(life.at(15.3, Tick(now=0)))
    assert made.phase is Phase.TRAIN
    assert [seat.member.node for seat in made.seats] == ["n00", "n01"]
    assert Cause(why=Why.FORGONE, nodes=("n02", "n03"), step=0) in made.causes


@pytest.mark.parametrize("case", ["nothing newer", "one is left", "gone for good", "waited before"])
def test_it_does_not_hold_in_vain(case):
    life = four_train()
    nodes = ("n02", "n03")
    if case == "nothing newer":
        life.seen(4.5, "committed", commit=Commit(step=7, generation=1, manifest="m7"), commit_revision=50)
    elif case == "one is left":
        nodes = ("n03",)
    elif case == "gone for good":
        records = {name: r for name, r in life.view.records.items() if name not in nodes}
        life.view = replace(life.view, records=records)
    else:
        life.seen(4.5, "plan 1", plan=plan(1, *FOUR, waited=0), plan_revision=10)
    made = proposed(cut_off(life, 5.0, *nodes))
    assert made.phase is Phase.TRAIN
    assert member("n03/1") not in made.seat_of


def test_who_keeps_what_goes_by_the_gang_that_has_sealed_a_step_also_where_a_record_is_missing():
    # Found by reading: n03 had joined, and kept n02's shard; it was looked for where the gang before had kept it.
    life = four_train()
    lap = Lap(generation=2, seconds=1.0, bytes=1)
    grown = plan(2, *FOUR, gang=("n00", "n01", "n02"))
    life.seen(4.2, "n03 has joined", plan=grown, plan_revision=20)
    life.at(4.3, Workers(now=0, work=Work.TRAINING, generation=2, born=1, warm=True, step=9, lap=lap))
    rows = [record(n, work=Work.TRAINING, generation=2, born=1, step=9, lap=lap) for n in FOUR[1:]]
    life.told(4.4, life.view.own, *rows)
    life.at(5.0, events.Suspected(now=0, node="n03"))
    mine = replace(rows[0], suspects=("n02/1", "n03/1"))  # one alone convicts nobody: n02 is lost for want of a record
    records = {"n00": life.view.own, "n01": mine, "n03": rows[2]}
    life.view = replace(life.view, records=records, revision=life.view.revision + 1)
    made = proposed(life.at(5.1, events.Seen(now=0, view=life.view)))
    assert made.phase is Phase.HOLD, made.reason
    assert [cause.nodes for cause in made.causes if cause.why is Why.SOLE_KEEPERS] == [("n03",)]
