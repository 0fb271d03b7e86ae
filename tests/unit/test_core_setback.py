"""What a node does when the store has lost what it knew: it goes on by what it has seen, and writes that again."""

from dataclasses import replace

import pytest
from core_kit import SETTINGS, Life, leads, record, trains

from elasticrl.contract import events, orders
from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.events import Tick, Workers
from elasticrl.contract.level import Level
from elasticrl.contract.model import Commit, Intent, Member, Phase, Rung, Verb, View, Work
from elasticrl.core.lead.scene import Scene
from elasticrl.core.node.adopt import AHEAD
from elasticrl.core.node.setback import better
from elasticrl.core.node.state import Lead


def training(member="n00/1"):
    """A gang of two in its third generation, with a commit, as this member knows it."""
    life = Life(member)
    leads(life)
    trains(life, 2.6, 3, "n00", "n01")
    commit = Commit(step=5, generation=3, manifest="m5")
    life.seen(3.0, "committed", commit=commit, commit_revision=40, look_revision=41)
    life.leased(3.5)
    return life


def lost(life, now, **knows):
    """The store comes back with this knowledge and no more."""
    life.view = View(epoch=life.view.epoch + 1, revision=2, **knows)
    return life.at(now, events.Seen(now=now, view=life.view), "the store has lost its data")


def restored(life):
    return next((action for action, _ in life.state.sent.values() if isinstance(action, events.Restore)), None)


def test_what_the_store_has_lost_is_written_again_above_all_that_anybody_has_seen():
    life = training()
    before = life.view.plan
    lost(life, 4.0)
    again = restored(life)
    assert (again.if_plan, again.if_commit) == (0, 0), "fenced by what the store has now"
    assert again.commit == Commit(step=5, generation=3, manifest="m5")
    assert again.plan.generation == before.generation + AHEAD
    assert (again.plan.seats, again.plan.rung, again.plan.resume) == (before.seats, Rung.REFORM, 5)
    assert again.plan.again
    assert [(cause.why, cause.nodes) for cause in again.plan.causes] == [(Why.STORE_LOST, ("n00",))]
    life.seen(4.1, "written", plan=again.plan, plan_revision=3, commit=again.commit, commit_revision=3)
    assert life.state.lost_since is None
    life.at(6.5, Tick(now=0))
    assert restored(life) is None


@pytest.mark.parametrize(
    ("seats", "offer", "rung", "meets"),
    [
        (("n00", "n01"), "n00:29501", Rung.START, "n00:29501"),
        (("n00", "n01"), "", Rung.RESTART, "n00:29500"),  # its agent is away
        (("n01", "n02"), "n00:29501", Rung.RESTART, "n00:29500"),  # its agent is told nothing, and would offer it again
    ],
)
def test_a_script_starts_again_and_meets_where_no_gang_has_met(seats, offer, rung, meets):
    life = Life("n00/1", replace(SETTINGS, level=Level.TOLD))
    leads(life)
    trains(life, 2.6, 3, *seats, endpoint="n00:29500")
    life.at(3.0, Workers(now=0, work=Work.TRAINING, generation=3, born=3, warm=True, endpoint=offer))
    before = life.view.plan
    assert before.endpoint == "n00:29500"
    lost(life, 4.0)
    life.leased(6.0)
    life.at(4.0 + life.state.settings.membership.lease_ttl_s + 2.0, Tick(now=0))  # who has no seat lets others go first
    again = restored(life).plan
    assert (again.rung, again.endpoint, again.again) == (rung, meets, True)
    assert {seat.born for seat in again.seats} == {again.generation}


def test_an_older_plan_in_a_store_that_was_set_back_is_not_followed():
    life = training()
    older = replace(life.view.plan, generation=2)
    lost(life, 4.0, plan=older, plan_revision=2)
    assert life.state.view.generation == 3
    assert restored(life).if_plan == 2
    assert restored(life).plan.says(Why.STORE_SET_BACK)


def test_who_stands_far_from_the_office_leaves_it_to_others_first():
    life = training("n09/1")
    office = life.state.settings.membership.deputies + 1
    lost(life, 4.0)
    assert office < 9
    assert restored(life) is None
    life.leased(6.0)
    life.at(4.0 + life.state.settings.membership.lease_ttl_s + 2.0, Tick(now=0))
    assert restored(life) is not None


def test_nothing_is_committed_and_nothing_planned_while_the_store_knows_less():
    life = training()
    lost(life, 4.0)
    life.at(4.1, Workers(now=0, work=Work.TRAINING, generation=3, born=1, warm=True, step=12, saved=10, manifest="m10"))
    me, back = Member(node="n00", incarnation=1), replace(record("n01"), member=Member(node="n01", incarnation=2))
    life.leased(4.15)
    lost(life, 4.2, leader=me, leader_revision=2, records={"n00": life.state.view.own, "n01": back}, quarantines={})
    life.leased(4.3)
    sent = [action for action, _ in life.state.sent.values()]
    assert not [a for a in sent if isinstance(a, events.WriteCommit | events.Propose)]


def test_an_ended_job_that_is_wanted_again_is_not_written_again():
    life = Life("n00/1")
    stop = replace(training().view.plan, phase=Phase.STOP, exit_code=75)
    life.leased(1.0)
    life.seen(1.1, "it has ended", plan=stop, plan_revision=9)
    lost(life, 2.0)
    assert restored(life) is None


def test_what_operators_wanted_is_written_again_too():
    life = training()
    life.seen(3.6, "pause", intent=Intent.PAUSE, intent_generation=3)
    lost(life, 4.0)
    assert restored(life).intent is Intent.PAUSE
    assert restored(life).intent_generation == 3


def test_what_operators_ask_of_an_emptied_store_is_what_they_want():
    life = training()
    life.seen(3.6, "pause", intent=Intent.PAUSE, intent_generation=3, intent_revision=45)
    lost(life, 4.0, intent=Intent.RUN, intent_revision=2)
    assert (restored(life).intent, restored(life).if_intent) == (Intent.RUN, 2)


def test_what_operators_ask_of_an_emptied_store_outlives_its_next_loss():
    life = training()
    life.seen(3.6, "resume", intent=Intent.RUN, intent_generation=3, intent_revision=45)
    lost(life, 4.0, intent=Intent.PAUSE, intent_revision=2)
    assert (restored(life).intent, restored(life).intent_generation) == (Intent.PAUSE, 3)
    lost(life, 4.2)
    assert life.state.view.intent is Intent.PAUSE


def test_what_operators_ask_of_a_store_that_was_set_back_is_what_they_want():
    life = training()
    older = replace(life.view.plan, generation=2)
    life.seen(3.6, "pause", intent=Intent.PAUSE, intent_generation=3, intent_revision=45)
    lost(life, 4.0, plan=older, plan_revision=2, intent=Intent.RUN, intent_generation=1, intent_revision=1)
    assert (restored(life).intent, restored(life).if_intent) == (Intent.PAUSE, 1)
    life.seen(4.1, "stop", intent=Intent.STOP, intent_generation=2, intent_revision=9)
    assert (restored(life).intent, restored(life).if_intent) == (Intent.STOP, 9)


def test_a_view_of_before_the_loss_that_comes_late_is_passed_over():
    life = training()
    old = life.view
    lost(life, 4.0)
    life.at(4.1, events.Seen(now=4.1, view=old), "late")
    assert life.state.view.epoch == 1


def test_a_question_of_before_the_loss_does_not_answer_one_of_after_it():
    life = training()
    life.state = life.state.but(looked=41)
    lost(life, 4.0)
    assert life.state.looked == 0, "else no question is answered until the store's revisions are as high as before"


def test_a_lost_lease_is_asked_for_again_at_once():
    life = training()
    life.at(10.0, Tick(now=0))  # asks for its lease
    decision = life.at(10.01, events.Leased(now=10.01, sent=0.0, held=False))
    assert any(isinstance(action, events.KeepAlive) for action in decision.actions)


def test_who_is_not_back_yet_after_the_loss_is_waited_for():
    life = training()
    lost(life, 4.0)
    again = restored(life)
    me = Member(node="n00", incarnation=1)
    life.leased(4.1)
    life.seen(
        4.2, "written", plan=again.plan, plan_revision=3, leader=me, leader_revision=4, quarantines={}, records={}
    )
    life.told(4.3, record("n00"))
    assert not [a for a, _ in life.state.sent.values() if isinstance(a, events.Propose)], life.state.reason


def test_a_daemon_that_knows_no_more_than_a_set_back_store_leaves_newer_workers_alone():
    life = Life("n00/1")
    life.leased(1.0)
    life.at(1.0, Workers(now=0, work=Work.TRAINING, generation=9, born=1, warm=True, step=12))
    life.seen(1.1, "an older plan", plan=replace(training().view.plan, generation=4, phase=Phase.STOP, exit_code=75))
    assert not [a for a, _ in life.state.sent.values() if isinstance(a, orders.Halt | events.Leave | orders.Launch)]
    assert "follow generation 9, of which the store knows nothing (it shows 4)" in life.state.reason


def test_workers_whose_plan_nobody_knows_are_held_above_it_and_no_first_plan_is_written():
    life = Life("n00/1")
    life.leased(1.0)
    life.at(1.0, Workers(now=0, work=Work.TRAINING, generation=9, born=7, warm=True, step=12))
    trains_too = record("n01", work=Work.TRAINING, generation=9, born=8)
    others = {"n01": trains_too, "n02": record("n02", work=Work.TRAINING, generation=8, born=1), "n03": record("n03")}
    own = replace(trains_too, member=life.state.me, born=7)
    shown = {"leader": life.state.me, "leader_revision": 3, "records": {"n00": own, **others}, "quarantines": {}}
    life.seen(1.1, "an empty store", **shown)
    assert (restored(life), proposed(life)) == (None, None), "somebody may know it"
    due = life.state.lead.since + 2 * life.state.settings.membership.lease_ttl_s
    life.leased(due - 1.0)
    life.at(due, Tick(now=0))
    held = restored(life).plan
    assert (held.generation, held.phase, held.again) == (9 + AHEAD, Phase.HOLD, True)
    assert [(str(seat.member), seat.born) for seat in held.seats] == [("n00/1", 7), ("n01/1", 8)]
    assert held.says(Why.STORE_LOST)
    assert proposed(life) is None


def test_a_leader_without_workers_writes_no_first_plan_over_those_who_train():
    life = Life("n02/1")
    life.leased(1.0)
    life.at(1.0, Workers(now=0, warm=True, endpoint="n02:29500"))
    trains_on = [record(name, work=Work.TRAINING, generation=9, born=7, bits="y") for name in ("n00", "n01")]
    late = record("n03", work=Work.PARKED, generation=8, born=7, bits="y")
    shown = {"leader": life.state.me, "leader_revision": 3, "quarantines": {}}
    life.seen(1.1, "an empty store", records={r.member.node: r for r in (*trains_on, late)}, **shown)
    last = life.state.lead.since + 2 * life.state.settings.membership.lease_ttl_s
    for now in (2.0, 3.0, last - 0.1):
        life.leased(now)
        life.at(now, Tick(now=0))
    assert (restored(life), proposed(life)) == (None, None), "somebody may know it"
    life.at(last, Tick(now=0))
    held = restored(life).plan
    assert (held.generation, held.phase, restored(life).if_plan) == (9 + AHEAD, Phase.HOLD, 0)
    assert [(str(seat.member), seat.born) for seat in held.seats] == [("n00/1", 7), ("n01/1", 7)]
    assert held.bits == "y", "the job's, not this node's"


def test_a_leader_whose_own_record_is_stale_keeps_its_seat():
    life = Life("n00/1")
    life.leased(1.0)
    life.at(1.0, Workers(now=0, work=Work.TRAINING, generation=9, born=7, warm=True, step=12))
    stale = record("n00", work=Work.TRAINING, generation=8, born=7)
    shown = {"leader": life.state.me, "leader_revision": 3, "quarantines": {}, "own": stale}
    life.seen(1.1, "an empty store", records={"n00": stale}, **shown)
    due = life.state.lead.since + 2 * life.state.settings.membership.lease_ttl_s
    life.leased(due - 1.0)
    life.at(due, Tick(now=0))
    assert [(str(seat.member), seat.born) for seat in restored(life).plan.seats] == [("n00/1", 7)]


def test_members_without_a_record_have_their_time_to_come_back_before_nobody_knows_the_plan():
    slow = replace(SETTINGS, membership=replace(SETTINGS.membership, rejoin_s=60.0))
    life = Life("n00/1", slow)
    life.leased(1.0)
    life.at(1.0, Workers(now=0, work=Work.TRAINING, generation=9, born=7, warm=True, step=12))
    life.seen(1.1, "an empty store", leader=life.state.me, leader_revision=3, records={}, quarantines={})
    for now in (59.0, 61.5):
        life.leased(now)
        life.at(now, Tick(now=0))
        assert (restored(life) is None) is (now < 61.0)


def test_who_leaves_alone_beside_an_empty_store_with_workers_that_go_on_leaves_in_its_time():
    life = Life("n00/1")
    life.leased(1.0)
    life.at(1.0, Workers(now=0, work=Work.TRAINING, generation=9, born=7, warm=True, step=12))
    life.seen(
        1.1, "an empty store, where somebody else leads", leader=Member(node="n01", incarnation=1), leader_revision=3
    )
    life.at(2.0, events.Asked(now=2.0, verb=Verb.DRAIN))
    due = 2.0 + life.state.settings.recovery.drain_s
    life.leased(due - 1.0)
    assert left(life) is None, "somebody may know what it is to leave"
    woken = life.at(due - 0.5, Tick(now=0)).wake_at
    assert woken <= due
    life.at(due, Tick(now=0))
    assert left(life) is not None


@pytest.mark.parametrize("there", [True, False])
def test_a_stop_is_not_answered_before_anybody_is_known_to_be_there(there):
    view = View(intent=Intent.STOP, intent_revision=5, records={"n00": record("n00", since=9)} if there else {})
    scene = Scene(SETTINGS, view, None, Lead(since=0.0), Member(node="n00", incarnation=1), 1.0)
    assert scene.stop_answered is there


def left(life):
    return next((action for action, _ in life.state.sent.values() if isinstance(action, events.Leave)), None)


@pytest.mark.parametrize("same", [True, False])
def test_of_two_plans_of_one_number_the_one_that_was_followed_counts(same):
    known = training().view
    other = (
        known.plan
        if same
        else replace(known.plan, causes=(Cause(why=Why.POLICY, said="by who began beside the empty store"),))
    )
    found = better(known, View(epoch=1, revision=3, plan=other, plan_revision=3, commit=known.commit))
    assert found.lost is not same
    assert found.plan == known.plan


def proposed(life):
    return next((action.plan for action, _ in life.state.sent.values() if isinstance(action, events.Propose)), None)


@pytest.mark.parametrize("again", [True, False])
def test_who_has_no_record_yet_is_waited_for_where_the_store_had_lost_all(again):
    life = training()
    plan = replace(life.view.plan, generation=4, again=again)
    me = Member(node="n00", incarnation=1)
    own = replace(life.view.own, work=Work.TRAINING, generation=4, suspects=("n01/1",))
    life.leased(4.1)
    life.state = life.state.but(lead=None)
    life.seen(
        4.2,
        "a new leader",
        plan=plan,
        plan_revision=50,
        leader=me,
        leader_revision=51,
        records={"n00": own},
        quarantines={},
    )
    assert (proposed(life) is None) is again, life.state.reason


def test_a_record_of_a_life_before_the_seated_one_is_none():
    life = training()
    plan = life.view.plan
    seats = tuple(
        replace(s, member=replace(s.member, incarnation=2)) if s.member.node == "n01" else s for s in plan.seats
    )
    me = Member(node="n00", incarnation=1)
    own = replace(life.view.own, work=Work.TRAINING, generation=4)
    life.leased(4.1)
    life.state = life.state.but(lead=None)
    shown = {"n00": own, "n01": record("n01")}
    life.seen(
        4.2, "set back", plan=replace(plan, generation=4, seats=seats, again=True), plan_revision=50, leader=me,
        leader_revision=51, records=shown, quarantines={},
    )  # fmt: skip
    assert proposed(life) is None, proposed(life).reason
