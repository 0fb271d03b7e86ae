"""Where the milliseconds of a recovery go, as one node saw it: scripts of events, and what is told of them."""

from elasticrl.core.events import Event, Seen, Suspected, Workers
from elasticrl.core.model import Member, Phase, Plan, Rung, Seat, View, Work
from elasticrl.daemon.recovery import Done, Watch

ME, OTHER = Member(node="a", incarnation=1), Member(node="b", incarnation=1)


def plan(generation: int, *members: Member, rung: Rung = Rung.REFORM) -> Plan:
    return Plan(
        generation=generation, phase=Phase.TRAIN, rung=rung, seats=tuple(Seat(member=m, born=1) for m in members)
    )


def told(*script: tuple[Event, Plan | None]) -> list[Done]:
    watch, found = Watch(), []
    for event, now in script:
        watch, done = watch.after(event, now, ME)
        found += [done] if done else []
    return found


def works(now: float, work: Work, generation: int, step: int) -> Workers:
    return Workers(now=now, work=work, generation=generation, step=step)


FIRST, SECOND = plan(1, ME, OTHER, rung=Rung.START), plan(2, ME)


def test_a_recovery_is_cut_into_what_was_waited_for():
    (done,) = told(
        (Seen(now=0.0, view=View(plan=FIRST)), FIRST),
        (works(1.0, Work.PARKED, 1, 7), FIRST),
        (Suspected(now=1.05, node="b"), FIRST),
        (Seen(now=1.1, view=View(plan=SECOND)), SECOND),
        (works(1.3, Work.TRAINING, 2, 7), SECOND),
        (works(1.4, Work.TRAINING, 2, 8), SECOND),
    )
    assert done.generation == 2
    assert {name: round(seconds, 3) for name, seconds in done.stages.items()} == {
        "decide": 0.1,
        "reform": 0.2,
        "first_step": 0.1,
    }


def test_a_nodes_own_way_in_is_no_recovery():
    others = plan(2, OTHER)
    both = plan(3, ME, OTHER, rung=Rung.START)
    assert not told(
        (Seen(now=0.0, view=View(plan=others)), others),
        (Seen(now=9.0, view=View(plan=both)), both),
        (works(10.0, Work.TRAINING, 3, 40), both),
        (works(10.1, Work.TRAINING, 3, 41), both),
    )


ONE = plan(2, ME, rung=Rung.START)


def test_a_gang_that_parts_to_grow_recovers_from_nothing():
    both = plan(3, ME, OTHER, rung=Rung.START)
    assert not told(
        (Seen(now=0.0, view=View(plan=ONE)), ONE),
        (Seen(now=9.0, view=View(plan=both)), both),
        (works(9.02, Work.PARKED, 2, 40), both),
        (works(10.0, Work.TRAINING, 3, 40), both),
        (works(10.1, Work.TRAINING, 3, 41), both),
    )


def test_a_death_while_a_gang_grows_is_recovered_from_by_the_plan_that_follows():
    both, alone = plan(3, ME, OTHER, rung=Rung.START), plan(4, ME)
    (done,) = told(
        (Seen(now=0.0, view=View(plan=ONE)), ONE),
        (Seen(now=9.0, view=View(plan=both)), both),
        (Suspected(now=9.1, node="b"), both),
        (Seen(now=9.2, view=View(plan=alone)), alone),
        (works(9.4, Work.TRAINING, 4, 40), alone),
        (works(9.5, Work.TRAINING, 4, 41), alone),
    )
    assert (done.generation, round(done.total_s, 3)) == (4, 0.4)
