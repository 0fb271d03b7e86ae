"""A gang that is to grow trains on until the newcomers are there: what ends that, and for whom nobody waits."""

from dataclasses import replace

import pytest
from core_kit import SETTINGS, Life, leads, member, plan, record, seat, sent_quarantines, trains

from elasticrl.contract import events
from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.events import Tick, Workers
from elasticrl.contract.level import Level
from elasticrl.contract.model import LOADING, MEETING, OUTSIDE, Commit, Exit, Intent, Lap, Phase, Rung, Stall, Work
from elasticrl.contract.settings import Membership
from elasticrl.core.lead.scene import BACK_TTLS
from elasticrl.core.node.follow import trains_on
from elasticrl.core.node.state import Lead

WAITS = Stall(slot=0, step=9, phase="update", for_s=5.0, budget_s=4.0, waiting=True)
GROWN = replace(
    plan(2, "n00", "n01"), seats=(seat("n00"), seat("n01"), seat("n02", born=2)), gang=("n00", "n01"), resume=0
)


def growing(phase=LOADING, least=2):
    """A leader of two that train, and to whom a third was added, which is so far. So many nodes are needed."""
    life = Life("n00/1", replace(SETTINGS, membership=Membership(min_nodes=least)))
    leads(life)
    life.told(1.0, record("n00"), record("n01"))
    life.at(2.1, Tick(now=0))
    trains(life, 3.0, 1, "n00", "n01")
    life.leased(4.0)
    life.seen(4.1, "plan 2: it grows", plan=GROWN, plan_revision=20)
    life.at(4.2, Workers(now=0, work=Work.JOINING, generation=2, born=1, warm=True, step=8, phase="update"))
    life.told(4.3, life.view.own, old("n01"), record("n02", work=Work.JOINING, generation=2, born=2, phase=phase))
    assert proposed(life) is None
    return life


def old(name, **more):
    """What one of those says who train on."""
    return record(name, **{"work": Work.JOINING, "generation": 2, "born": 1, "phase": "update", "step": 8, **more})


def proposed(life):
    """The newest plan that it wants to write."""
    plans = [action.plan for action, _ in life.state.sent.values() if isinstance(action, events.Propose)]
    return max(plans, key=lambda each: each.generation) if plans else None


def seated(found):
    return [str(each.member.node) for each in found.seats]


def until(life, now):
    """Let time pass; the store answers meanwhile."""
    while life.now < now:
        life.leased(life.now + 1.0)
        life.at(life.now + 0.01, Tick(now=0))


def test_only_a_plan_that_adds_to_a_gang_grows_it():
    assert GROWN.grows
    assert not plan(1, "n00", "n01").grows, "a first start"
    assert not replace(GROWN, rung=Rung.REFORM).grows
    assert not replace(GROWN, phase=Phase.HOLD).grows


@pytest.mark.parametrize(
    ("work", "generation", "phase", "expected"),
    [
        (Work.TRAINING, 1, "update", True),  # it has not been told yet
        (Work.JOINING, 2, "update", True),
        (Work.JOINING, 2, OUTSIDE, True),
        (Work.JOINING, 2, MEETING, False),
        (Work.TRAINING, 2, "update", False),
        (Work.FAILED, 2, "update", False),
    ],
)
def test_a_vault_keeps_the_ring_of_the_gang_in_which_its_workers_train(work, generation, phase, expected):
    life = growing()
    life.at(4.5, Workers(now=0, work=work, generation=generation, born=1, phase=phase))
    assert trains_on(life.state) is expected


def test_a_newcomer_s_vault_has_the_new_ring_at_once():
    life = Life("n02/1")
    life.leased(0.1)
    life.seen(0.2, "plan 2", leader=member("n00"), leader_revision=3, plan=GROWN, plan_revision=20)
    life.at(0.3, Workers(now=0, work=Work.JOINING, generation=2, born=2, phase=LOADING))
    assert not trains_on(life.state)


def test_a_stall_ends_it_when_nobody_was_found_to_blame():
    life = growing()
    life.told(6.0, old("n01", stall=WAITS))
    life.at(6.5, Tick(now=0))
    assert proposed(life) is None, "the one that is to blame may be found yet"
    until(life, 6.0 + SETTINGS.timeouts.confirm_s)
    found = proposed(life)
    assert (found.rung, seated(found)) == (Rung.REFORM, ["n00", "n01"])
    assert (found.causes[0].why, found.causes[0].who) == (Why.STALLED_GROWING, (member("n01"),))


def test_those_who_are_there_by_then_are_let_in():
    life = growing(phase=MEETING)
    life.told(6.0, old("n01", stall=WAITS))
    until(life, 6.0 + SETTINGS.timeouts.confirm_s)
    assert seated(proposed(life)) == ["n00", "n01", "n02"]


def test_who_waits_for_one_that_waits_outside_does_not_end_it():
    life = growing()
    life.at(5.9, Workers(now=0, work=Work.JOINING, generation=2, born=1, warm=True, step=8, phase=OUTSIDE))
    life.told(5.95, life.view.own)
    life.told(6.0, old("n01", stall=WAITS))
    until(life, 30.0)
    assert proposed(life) is None
    life.at(30.1, Workers(now=0, work=Work.JOINING, generation=2, born=1, warm=True, step=8, phase="update"))
    life.told(30.2, life.view.own)
    until(life, 30.1 + WAITS.budget_s)
    assert proposed(life) is None, "it is on its way to those who wait"
    until(life, 32.0 + WAITS.budget_s + SETTINGS.timeouts.confirm_s)
    assert proposed(life).rung is Rung.REFORM


def test_a_gang_that_breaks_up_does_not_wait_for_who_loads():
    life = growing()
    life.told(6.0, old("n01", phase=MEETING))  # it has left, and nobody has died
    until(life, 6.0 + SETTINGS.timeouts.confirm_s + 1.0)
    found = proposed(life)
    assert (found.rung, seated(found)) == (Rung.REFORM, ["n00", "n01"])
    assert found.causes[0].why is Why.BROKE_GROWING


def test_when_all_are_there_the_gang_has_as_long_as_its_step_takes():
    life = growing(phase=MEETING)
    until(life, 4.1 + 3 * SETTINGS.recovery.start_s)
    assert proposed(life) is None, "a step of minutes"
    life.told(life.now, old("n01", step=11))
    life.at(life.now + 0.01, Tick(now=0))
    assert proposed(life).causes[0].why is Why.UNPARTED


def test_a_job_that_is_done_ends_before_it_has_grown():
    life = growing()
    life.at(6.0, events.Configured(now=0, settings=replace(SETTINGS, steps=9)))
    life.at(6.1, Workers(now=0, work=Work.DONE, generation=2, born=1, step=9, saved=9, manifest="m9"))
    life.told(6.2, life.view.own, old("n01", work=Work.DONE, step=9))
    life.seen(6.3, "committed", commit=Commit(step=9, generation=2, manifest="m9"), commit_revision=30)
    assert (proposed(life).phase, proposed(life).exit_code) == (Phase.STOP, 0)


def test_a_newcomer_that_fails_is_no_failure_of_the_job():
    life = growing()
    died = Exit(generation=2, slot=0, step=0, cause="exit code 1: RuntimeError: no such model", own=True)
    life.told(6.0, record("n02", work=Work.FAILED, generation=2, exit=died))
    found = proposed(life)
    assert (found.rung, seated(found), found.strike) == (Rung.REFORM, ["n00", "n01"], None)


def test_who_does_not_come_in_time_is_kept_out_and_the_others_go_on():
    life = growing()
    until(life, 4.1 + SETTINGS.recovery.start_s)
    found = proposed(life)
    assert (found.rung, seated(found)) == (Rung.REFORM, ["n00", "n01"])
    assert (found.causes[0].why, found.causes[0].setting) == (Why.UNJOINED, "recovery.start")
    assert found.causes[0].who == (member("n02"),)
    confined = sent_quarantines(life)
    assert [str(each.member) for each in confined] == ["n02/1"]


@pytest.mark.parametrize(("least", "expected"), [(1, ["n00"]), (2, ["n00", "n02"])])
def test_after_a_death_nobody_waits_for_who_loads_but_where_it_is_needed(least, expected):
    life = growing(least=least)
    died = Exit(generation=2, slot=0, step=8, cause="signal 9 (SIGKILL)", own=False, signal=9)
    life.told(6.0, old("n01", work=Work.FAILED, exit=died, warm=False))
    found = proposed(life)
    assert (found.phase, found.rung, seated(found)) == (Phase.TRAIN, Rung.REFORM, expected), found.reason


def test_a_stop_waits_for_nobody_to_load():
    life = growing()
    life.seen(6.0, "stop", intent=Intent.STOP, intent_generation=2)
    found = proposed(life)
    assert (found.phase, seated(found)) == (Phase.STOP, ["n00", "n01", "n02"])


def test_a_program_that_loads_has_as_long_as_at_a_first_start():
    life = Life("n00/1")
    leads(life)
    life.told(1.0, record("n00"), record("n01"))
    life.at(2.1, Tick(now=0))
    trains(life, 3.0, 1, "n00", "n01")
    life.leased(4.0)
    again = replace(plan(2, "n00", "n01", rung=Rung.REPLACE), seats=(seat("n00"), seat("n01", born=2)))
    life.seen(4.1, "plan 2: n01 in a fresh process", plan=again, plan_revision=20)
    life.at(4.2, Workers(now=0, work=Work.JOINING, generation=2, born=1, warm=True, step=8, phase=MEETING))
    life.told(4.3, life.view.own, record("n01", work=Work.JOINING, generation=2, born=2, phase=LOADING))
    until(life, 4.1 + SETTINGS.recovery.replace_s + 5.0)
    assert proposed(life) is None
    loaded = life.now
    life.told(loaded, record("n01", work=Work.JOINING, generation=2, born=2, phase=MEETING))
    until(life, loaded + SETTINGS.recovery.replace_s - 2.0)
    assert proposed(life) is None, "the rung's time begins when it has loaded"
    until(life, loaded + SETTINGS.recovery.replace_s + 2.0)
    assert proposed(life).phase is Phase.PROBE, "and then the gang does not form"


def test_state_that_comes_nearer_has_as_long_as_it_takes_and_no_longer():
    life = Life("n00/1")
    leads(life)
    life.told(1.0, record("n00"), record("n01"))
    life.at(2.1, Tick(now=0))
    trains(life, 3.0, 1, "n00", "n01")
    life.leased(4.0)
    life.seen(4.1, "plan 2", plan=plan(2, "n00", "n01", rung=Rung.REFORM), plan_revision=20)
    forms = {"work": Work.JOINING, "generation": 2, "born": 1, "phase": MEETING}
    life.at(4.2, Workers(now=0, warm=True, step=8, **forms))
    life.told(4.3, life.view.own, record("n01", **forms))
    life.told(6.0, life.view.own, record("n01", restores=True, **forms))
    until(life, 4.1 + 3 * SETTINGS.recovery.start_s)
    assert proposed(life) is None, "a state of any size comes back"
    silent = life.now
    life.told(silent, record("n01", **forms))
    until(life, silent + SETTINGS.recovery.reform_s - 2.0)
    assert proposed(life) is None
    until(life, silent + SETTINGS.recovery.reform_s + 2.0)
    assert proposed(life).phase is Phase.PROBE, "no more of it comes"


def grown(life):
    """All have parted, and train in the new gang."""
    life.at(5.0, Workers(now=0, work=Work.TRAINING, generation=2, born=1, warm=True, step=9, phase="update"))
    new = record("n02", work=Work.TRAINING, generation=2, born=2, phase="update", step=9)
    life.told(5.1, life.view.own, old("n01", work=Work.TRAINING, step=9), new)


@pytest.mark.parametrize("then", [Work.TRAINING, Work.PARKED])
def test_who_has_joined_once_is_never_again_taken_for_one_that_loads(then):
    # Found by reading: hours later the loss of another's record put the newcomer out as well.
    life = growing(MEETING, least=1)
    grown(life)
    if then is Work.PARKED:  # nobody trains at that moment: all have left a broken group
        life.at(7.0, Workers(now=0, work=then, generation=2, born=1, warm=True, step=9, phase="update"))
        life.told(7.05, life.view.own)
    new = record("n02", work=then, generation=2, born=2, phase="update", step=9)
    life.seen(7.1, "n01 has left the store", records={"n00": life.view.own, "n02": new})
    until(life, 7.1 + 3 * SETTINGS.membership.lease_ttl_s)
    assert seated(proposed(life)) == ["n00", "n02"], proposed(life).reason


def test_a_gang_that_has_parted_has_the_time_of_a_first_start_to_form():
    # Found by reading: after a step of minutes it was formed anew in the very moment in which it parted.
    life = growing(MEETING)
    until(life, 4.1 + 3 * SETTINGS.recovery.start_s)
    life.told(life.now, old("n01", phase=MEETING))
    parted = life.now
    until(life, parted + SETTINGS.recovery.start_s - 2.0)
    assert proposed(life) is None
    until(life, parted + SETTINGS.recovery.start_s + 2.0)
    assert proposed(life).phase is Phase.PROBE
    assert [(cause.why, cause.setting) for cause in proposed(life).causes] == [(Why.UNFORMED, "recovery.start")]


def test_a_newcomer_that_fails_each_time_is_kept_out_however_far_the_job_gets_meanwhile():
    # Found by reading: a step further each time, it was each time the first failure.
    life = growing(least=1)
    for number, step in enumerate((8, 12, 16)):
        generation = 2 + 2 * number
        if number:
            life.at(
                life.now + 1.0,
                Workers(now=0, work=Work.TRAINING, generation=generation - 1, born=1, warm=True, step=step),
            )
            life.told(
                life.now + 0.1, life.view.own, old("n01", work=Work.TRAINING, generation=generation - 1, step=step)
            )
            again = replace(
                GROWN, generation=generation, seats=(seat("n00"), seat("n01"), seat("n02", born=generation))
            )
            life.seen(life.now + 0.1, "it grows again", plan=again, plan_revision=20 + generation)
            life.at(
                life.now + 0.1, Workers(now=0, work=Work.JOINING, generation=generation, born=1, warm=True, step=step)
            )
            life.told(life.now + 0.1, life.view.own, old("n01", generation=generation, step=step))
        died = Exit(
            generation=generation, slot=0, step=step, cause="exit code 1: RuntimeError: out of memory", own=True
        )
        life.told(life.now + 1.0, record("n02", work=Work.FAILED, generation=generation, exit=died))
        found = proposed(life)
        assert seated(found) == ["n00", "n01"]
        confined = sent_quarantines(life)
        assert [str(each.member) for each in confined] == ["n02/1"] * (number == 2)
        life.seen(life.now + 0.1, "they go on", plan=found, plan_revision=21 + generation)
    assert (confined[0].cause.why, confined[0].cause.count) == (Why.FAILED_AGAIN, 3)


def test_a_newcomer_that_is_killed_as_it_loads_stops_no_job_even_where_a_death_shall():
    life = growing()
    settings = replace(life.state.settings, policy={"dead_rank": "stop", "dead_node": "stop"})
    life.at(5.5, events.Configured(now=0, settings=settings))
    died = Exit(generation=2, slot=0, step=0, cause="signal 9 (SIGKILL)", own=False, signal=9)
    life.told(6.0, record("n02", work=Work.FAILED, generation=2, exit=died, warm=False))
    until(life, 8.0)
    assert (proposed(life).phase, seated(proposed(life))) == (Phase.TRAIN, ["n00", "n01"])


def test_a_stop_after_the_gang_has_broken_up_saves_without_who_loads():
    life = growing()
    life.told(6.0, old("n01", phase=MEETING))
    life.seen(6.1, "stop", intent=Intent.STOP, intent_generation=2)
    found = proposed(life)
    assert (found.phase, found.rung, found.saves, seated(found)) == (Phase.TRAIN, Rung.REFORM, True, ["n00", "n01"])


def test_a_job_is_stopped_with_all_seats_those_who_leave_as_well():
    life = growing()
    life.told(6.0, old("n01", leaving=True))
    life.seen(6.1, "stop", intent=Intent.STOP, intent_generation=2)
    found = proposed(life)
    assert (found.phase, seated(found)) == (Phase.STOP, ["n00", "n01", "n02"])


def test_a_gang_that_has_lost_one_is_mended_before_it_is_stopped_as_long_as_it_has_time():
    life = Life("n00/1", replace(SETTINGS, membership=Membership(min_nodes=2)))
    leads(life)
    life.told(1.0, record("n00"), record("n01"), record("n02"))
    life.at(2.1, Tick(now=0))
    trains(life, 3.0, 1, "n00", "n01", "n02")
    life.leased(5.9)
    died = Exit(generation=1, slot=0, step=8, cause="signal 9 (SIGKILL)", own=False)
    life.told(6.0, record("n02", work=Work.FAILED, generation=1, step=8, exit=died, warm=False))
    life.seen(6.1, "stop", intent=Intent.STOP, intent_generation=1)
    found = proposed(life)
    assert (found.phase, seated(found)) == (Phase.TRAIN, ["n00", "n01"]), found.reason
    until(life, 6.1 + SETTINGS.recovery.drain_s)
    found = proposed(life)
    assert (found.phase, seated(found)) == (Phase.STOP, ["n00", "n01", "n02"])
    assert Cause(why=Why.UNSAVED, step=0, count=8) in found.causes


def test_a_newcomer_s_vault_that_has_moved_costs_the_gang_that_trains_no_step():
    life = growing(MEETING)
    there = record("n02", work=Work.JOINING, generation=2, born=2, phase=MEETING)
    life.told(6.0, replace(there, vault="10.0.0.3:4711"))
    until(life, 8.0)
    assert proposed(life) is None


def test_a_newcomer_that_fails_as_the_gang_forms_is_no_failure_of_the_job_either():
    # Found by reading: the others had left the broken group by then, which counted as a gang that had trained.
    life = growing(MEETING)
    life.told(6.0, old("n01", phase=MEETING))
    life.at(6.2, Workers(now=0, work=Work.PARKED, generation=2, born=1, warm=True, step=8, phase="parked"))
    life.told(6.3, life.view.own, old("n01", work=Work.PARKED, phase="parked"))
    died = Exit(generation=2, slot=0, step=8, cause="exit code 1: RuntimeError: out of memory", own=True)
    life.told(6.6, record("n02", work=Work.FAILED, generation=2, exit=died))
    found = proposed(life)
    assert (found.rung, seated(found), found.strike) == (Rung.REFORM, ["n00", "n01"], None), found.reason


def test_a_newcomer_that_fails_while_one_is_done_is_no_failure_of_the_job():
    life = growing()
    life.told(6.0, old("n01", work=Work.DONE, step=9))
    died = Exit(generation=2, slot=0, step=0, cause="exit code 1: RuntimeError: no such model", own=True)
    life.told(6.1, record("n02", work=Work.FAILED, generation=2, exit=died))
    found = proposed(life)
    assert (seated(found), found.strike) == (["n00", "n01"], None), found.reason


def test_a_new_leader_knows_who_has_joined_by_the_steps_that_were_sealed_with_it():
    life = growing(MEETING, least=1)
    lap = Lap(generation=2, seconds=1.0, bytes=1)
    parked = {"work": Work.PARKED, "generation": 2, "step": 9, "phase": "parked", "lap": lap}
    life.at(7.0, Workers(now=0, work=Work.PARKED, generation=2, born=1, warm=True, step=9, phase="parked", lap=lap))
    new = record("n02", born=2, **parked)
    life.state = life.state.but(lead=Lead(since=life.now))
    life.seen(7.1, "n01 is gone with its lease", records={"n00": life.view.own, "n02": new})
    until(life, 7.1 + 3 * SETTINGS.membership.lease_ttl_s)
    assert seated(proposed(life)) == ["n00", "n02"], proposed(life).reason


def ends_with_a_save(work):
    """A leader of two that hold, as n01 leaves and its gang ends with a save; n02 is ready. So its workers are."""
    life = Life("n00/1")
    leads(life)
    life.told(1.0, record("n00"), record("n01"), record("n02"))
    held = replace(
        plan(2, "n00", "n01", phase=Phase.HOLD, saves=True), causes=(Cause(why=Why.UNSPARED, who=(member("n01"),)),)
    )
    life.seen(3.0, "plan 2: it holds to save", plan=held, plan_revision=20)
    life.at(3.1, Workers(now=0, work=work, generation=2, born=1, warm=True, step=8))
    life.told(3.2, life.view.own, record("n01", work=work, generation=2, born=1, step=8, leaving=True))
    until(life, 10.0)
    return life


def test_no_gang_is_formed_of_workers_that_end_with_a_save():
    life = ends_with_a_save(Work.TRAINING)
    assert proposed(life) is None
    assert "waiting for the last save of n00/1 and n01/1" in life.state.reason
    due = 3.0 + 2 * SETTINGS.recovery.drain_s
    until(life, due - 2.0)
    assert proposed(life) is None
    until(life, due + 2.0)
    found = proposed(life)
    assert found is not None, "they have had their time"
    assert (found.phase, seated(found)) == (Phase.TRAIN, ["n00", "n02"])


def test_a_gang_is_formed_when_the_workers_have_ended_that_saved():
    found = proposed(ends_with_a_save(Work.NONE))
    assert found is not None
    assert (found.phase, seated(found)) == (Phase.TRAIN, ["n00", "n02"])


def test_a_leader_whose_own_workers_were_in_the_gang_leaves_no_newcomer_behind():
    """Its records are of before that: n02 has not come yet, by what they say."""
    life = growing(least=1)
    for number, work in enumerate((Work.TRAINING, Work.PARKED)):
        life.at(5.0 + number / 10, Workers(now=0, work=work, generation=2, born=1, step=9, endpoint="n00:29500"))
    lost = record("n01", work=Work.FAILED, generation=2, born=1, warm=False)
    life.told(5.2, replace(lost, exit=Exit(generation=2, slot=0, step=9, cause="signal 9", own=False, signal=9)))
    found = proposed(life)
    assert found is not None
    assert "n02" in seated(found)


def test_a_worker_that_fails_between_two_plans_is_told_of_under_both_and_counted_once():
    life = growing()
    counts = []

    def fails(now, generation):
        exit_ = Exit(generation=generation, slot=0, step=8, cause="exit code 1: ValueError", own=True)
        life.told(now, record("n01", work=Work.FAILED, generation=generation, step=8, exit=exit_))
        counts.append(life.state.lead.custody.failures["n01"].count)

    trains(life, 5.0, 3, "n00", "n01")
    fails(5.1, 3)
    life.seen(5.2, "plan 4 was on its way", plan=replace(GROWN, generation=4), plan_revision=40)
    fails(5.3, 4)
    life.seen(5.4, "plan 5", plan=replace(plan(5, "n00"), seats=(seat("n00"), seat("n01", born=5))), plan_revision=50)
    fails(5.5, 5)
    assert counts == [1, 1, 2]


@pytest.mark.parametrize(
    ("born", "own", "launched"),
    [(1, True, False), (3, True, False), (4, True, True), (1, False, True)],
)
def test_a_program_that_raised_is_told_of_before_its_seat_is_filled_unless_a_plan_has_answered_it(born, own, launched):
    """Generation 3 was the last that it heard of, and its worker is gone; generation 5 is the next."""
    life = Life("n01/1")
    life.leased(0.0)
    life.seen(0.1, "plan 3", plan=plan(3, "n00", "n01"), plan_revision=30)
    left = Exit(generation=3, slot=0, step=8, cause="exit code 1: ValueError", own=own)
    life.at(0.2, Workers(now=0, work=Work.TRAINING, generation=3, born=1, warm=True, step=8))
    life.at(0.3, Workers(now=0, work=Work.FAILED, generation=3, warm=True, step=8, exit=left))
    seats = (seat("n00"), seat("n01", born=born), seat("n02", born=5))
    life.seen(0.4, "plan 5", plan=replace(plan(5, "n00"), seats=seats), plan_revision=50)
    assert any(line.strip().startswith("Launch 5") for line in life.lines) is launched
    assert (life.view.own.work, life.view.own.generation) == ((Work.FAILED, 3) if launched else (Work.FAILED, 5))


def test_who_waits_for_a_member_without_a_lease_is_not_woken_at_the_moment_that_it_is() -> None:
    """Found by simulation: two sums of the same times were unlike in their last bit."""
    life = Life()
    leads(life)
    waits_s = BACK_TTLS * life.state.settings.membership.lease_ttl_s
    went = next(t for i in range(100) if (t := 10 + i / 10) > (t + waits_s) - waits_s)
    names = ("n00", "n01", "n02")
    trains(life, 2.0, 1, *names)
    training = {name: record(name, generation=1, born=1, work=Work.TRAINING) for name in names}
    life.at(2.5, Workers(now=0, generation=1, work=Work.TRAINING, warm=True, endpoint="n00:29500"))
    life.seen(3.0, "all train", records=training)
    life.leased(went - 0.5)
    life.seen(went, "n01 has no lease", records={name: it for name, it in training.items() if name != "n01"})
    for after_s in range(2, int(waits_s), 2):
        life.leased(went + after_s)
    decision = life.at(went + waits_s, Tick(now=0))
    assert decision.wake_at > life.now


def test_a_scripts_node_that_does_not_start_again_is_left_out_when_that_has_had_its_time():
    """A script trains from its first line, as far as is known: that the others do says nothing of it. Found by reading."""
    life = Life(settings=replace(SETTINGS, level=Level.SUPERVISED, recovery=replace(SETTINGS.recovery, restart_s=8.0)))
    leads(life)
    trains(life, 2.0, 2, "n00", "n01", "n02")
    life.seen(5.0, "all start again", plan=replace(plan(3, "n00", "n01", "n02"), rung=Rung.RESTART), plan_revision=30)
    life.at(5.1, Workers(now=0, work=Work.TRAINING, generation=3, born=3, warm=True, endpoint="n00:29500"))
    life.told(5.2, record("n02", work=Work.TRAINING, generation=3, born=3))
    until(life, 5.0 + 8.0 + 1.0)
    assert proposed(life).causes[0].who == (member("n01"),)
