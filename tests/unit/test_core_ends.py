"""How a job ends, and what it says when its last checkpoint does not get through."""

from dataclasses import replace

import pytest
from core_kit import Life, leads, plan, record, seat, trains

from elasticrl.contract import events
from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.events import Seen, Suspected, Tick, Workers
from elasticrl.contract.model import OUTSIDE, Commit, Phase, Work
from elasticrl.contract.settings import Membership, Recovery, Settings
from elasticrl.core.node.follow import unsaved

SETTINGS = Settings(lanes=4, steps=20, membership=Membership(min_nodes=2), recovery=Recovery(drain_s=10.0))


def done(now=4.0):
    """A leader whose gang has made all its steps."""
    life = Life("n00/1", SETTINGS)
    leads(life)
    trains(life, 2.6, 1, "n00", "n01")
    life.leased(3.5)
    life.at(now, Workers(now=0, work=Work.DONE, generation=1, born=1, step=20, saved=20, manifest="m20"))
    life.told(now + 0.1, life.view.own, record("n01", work=Work.DONE, generation=1, born=1, step=20))
    return life


def test_a_job_whose_last_commit_does_not_come_says_so_in_time():
    life = done()
    assert life.state.reason.endswith("all steps are made; the last checkpoint is being committed")
    for now in (7.0, 10.0, 13.0, 14.2):
        life.leased(now)
    assert "step 20 was not committed within 10 s: rank 0's log (n00/1) says more" in life.state.reason
    assert not any(isinstance(action, events.Propose) for action, _ in life.state.sent.values())


def test_a_job_is_finished_when_the_last_step_is_committed():
    life = done()
    life.seen(5.0, "committed", commit=Commit(step=20, generation=1, manifest="m20"), commit_revision=30)
    made = next(a.plan for a, _ in life.state.sent.values() if isinstance(a, events.Propose))
    assert (made.phase, made.exit_code, made.resume) == (Phase.STOP, 0, 20)


@pytest.mark.parametrize(("ended", "lost"), [(7.0, False), (15.2, True)], ids=["by themselves", "killed"])
def test_who_leaves_with_workers_that_did_not_end_says_that_their_last_step_is_in_memory_alone(
    ended: float, lost: bool
):
    life = done()
    stop = replace(
        plan(2, "n00", "n01", phase=Phase.STOP, exit_code=75), causes=(Cause(why=Why.STOPPED, nodes=("an operator",)),)
    )
    life.seen(5.0, "stop", plan=stop, plan_revision=40)
    life.at(5.1, Workers(now=0, generation=1, work=Work.TRAINING, step=20, born=1))
    decision = life.at(ended, Workers(now=0, generation=2, step=20))
    (left,) = [action for action in decision.actions if isinstance(action, events.Leave)]
    assert ("did not end with a save within 10 s, so step 20 is in memory alone" in left.reason) == lost
    assert unsaved(life.state, ended) == lost


def test_who_leaves_without_its_last_commit_says_so():
    life = done()
    stop = replace(
        plan(2, "n00", "n01", phase=Phase.STOP, exit_code=75), causes=(Cause(why=Why.STOPPED, nodes=("an operator",)),)
    )
    life.seen(5.0, "stop", plan=stop, plan_revision=40)
    life.at(6.0, Workers(now=0, generation=2, step=20, saved=20, manifest="m20"))
    assert any(isinstance(action, events.WriteCommit) for action, _ in life.state.sent.values())
    decision = life.at(25.1, Tick(now=0))
    (left,) = [action for action in decision.actions if isinstance(action, events.Leave)]
    assert left.code == 75
    assert left.reason == (
        "stopped by an operator; step 20 is saved, but the store has not taken its commit within 20 s"
    )


def test_a_job_that_begins_again_says_from_where_and_after_what():
    # Found by a reader of `status`, to whom "begun again" said neither.
    life = Life("n00/2", SETTINGS)
    ended = replace(
        plan(7, "n00", "n01", phase=Phase.STOP, exit_code=75),
        causes=(Cause(why=Why.STOPPED, nodes=("an operator",)), Cause(why=Why.WITHOUT_LOADING)),
    )
    commit = Commit(step=20, generation=6)
    life.leased(0.0)
    life.seen(0.0, "the run before", plan=ended, plan_revision=70, commit=commit, commit_revision=71)
    life.at(0.1, Workers(now=0, warm=True, endpoint="n00:29500"))
    life.at(0.6, Tick(now=0))
    life.seen(0.7, "the office is ours", leader=life.state.me, leader_revision=3, records={}, quarantines={})
    life.told(1.0, replace(record("n00"), member=life.state.me), record("n01"))
    life.at(8.0, Tick(now=0))
    made = next(a.plan for a, _ in life.state.sent.values() if isinstance(a, events.Propose))
    assert [(cause.why, cause.step) for cause in made.causes] == [(Why.BEGUN_AGAIN, 20)]
    assert made.reason == "started again from step 20 (it had ended: stopped by an operator); training on 2 nodes"


def stops_as_a_node_falls_silent(*, exit_code=75, n01=None, n02=None, n03=None, sealed=7):
    """A leader that has stopped its job when two hold the third for dead; what it proposes then."""
    life = Life("n00/1", SETTINGS)
    leads(life)
    trains(life, 2.6, 1, "n00", "n01", "n02")
    asked = (Cause(why=Why.STOPPED, nodes=("ada",)),)
    stop = replace(plan(2, "n00", "n01", "n02", phase=Phase.STOP, exit_code=exit_code), causes=asked)
    life.seen(5.0, "stop", plan=stop, plan_revision=40)
    life.at(5.1, Workers(now=0, generation=2, work=Work.TRAINING, step=sealed, born=1))
    life.leased(5.2)
    life.told(5.3, record("n01", work=Work.TRAINING, generation=2, born=1, step=sealed))
    life.told(5.3, record("n02", work=Work.TRAINING, generation=2, born=1, step=sealed))
    life.state = life.state.but(sent={})
    life.at(6.0, Suspected(now=0, node="n02"))
    fields = {"work": Work.TRAINING, "generation": 2, "born": 1, "step": sealed}
    decision = life.at(6.1, Tick(now=0))
    records = dict(life.view.records or {})
    records["n01"] = record("n01", **{**fields, "suspects": ("n02/1",), **(n01 or {})})
    records |= {"n02": record("n02", **{**fields, **(n02 or {})})}
    if n02 == {}:
        del records["n02"]
    if n03 is not None:
        records["n03"] = record("n03", **n03)
    life.view = replace(life.view, revision=life.view.revision + 1, records=records)
    decision = life.at(6.2, Seen(now=0, view=life.view))
    return [action for action in decision.actions if isinstance(action, events.Propose)]


def test_a_gang_that_breaks_as_it_is_to_end_forms_once_more_and_the_stop_is_asked_for_again():
    (made,) = stops_as_a_node_falls_silent()
    assert (made.plan.phase, made.plan.seated, made.plan.saves) == (Phase.TRAIN, ("n00", "n01"), True)
    assert made.stops == "ada"
    assert "n02/1 stopped responding" in made.plan.reason
    assert "stopped by ada" in made.plan.reason


@pytest.mark.parametrize(
    "told",
    [
        {"n01": {"work": Work.NONE}},
        {"n02": {"work": Work.NONE}},
        {"n02": {}},
        {"n01": {"phase": OUTSIDE}},
        {"n02": {"phase": OUTSIDE}},
        {"n01": {"leaving": True}},
        {"exit_code": 70},
        {"sealed": 0},
        {"n03": {"since": 40}},
    ],
    ids=[
        "ended",
        "the silent one ended",
        "gone",
        "saves",
        "the silent one saves",
        "leaves",
        "a crash loop",
        "all saved",
        "begun again",
    ],
)
def test_a_stop_is_final_once_anybody_has_ended_or_saves(told):
    assert not stops_as_a_node_falls_silent(**told)


@pytest.mark.parametrize(
    "told",
    [{"n03": {"since": 39}}, {"n01": {"since": 41}}],
    ids=["a spare that was there", "a daemon that was started again"],
)
def test_who_was_there_before_the_stop_asks_for_no_other_run(told):
    assert len(stops_as_a_node_falls_silent(**told)) == 1


@pytest.mark.parametrize(
    ("told", "waits"),
    [
        ({}, True),
        ({"step": 0}, False),
        ({"generation": 1}, False),
        ({"suspects": ()}, False),
        ({"suspects": ("n02",)}, False),
    ],
)
def test_a_node_whose_gang_has_broken_unsaved_stays_to_form_it_once_more(told, waits):
    life = done()
    asked = (Cause(why=Why.STOPPED, nodes=("ada",)),)
    stop = replace(plan(2, "n00", "n01", phase=Phase.STOP, exit_code=75), causes=asked, spares=(seat("n02"),))
    life.seen(5.0, "stop", plan=stop, plan_revision=40)
    told = dict(told)
    for node in told.pop("suspects", ("n01",)):
        life.at(5.5, Suspected(now=0, node=node))
        assert node in life.state.suspects
    decision = life.at(6.0, Workers(now=0, **{"generation": 2, "step": 20, **told}))
    assert any(isinstance(action, events.Leave) for action in decision.actions) is not waits
    late = life.at(15.1, Tick(now=0))
    assert not waits or any(isinstance(action, events.Leave) for action in late.actions)
