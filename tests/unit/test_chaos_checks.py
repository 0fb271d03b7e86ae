"""What the judge says of a history: that of real workers, who tell one after the other."""

from dataclasses import replace

import pytest
from core_kit import plan

from chaos.case import Case
from chaos.checks import (
    TOLD_S,
    a_hang_is_ended,
    a_job_ends_for_a_reason,
    known,
    no_sealed_step_is_lost,
    one_plan_per_generation,
    only_who_has_joined_commits,
    the_innocent_are_not_quarantined,
)
from chaos.demands import what_was_expected
from chaos.history import (
    Began,
    Committed,
    Confined,
    Died,
    Eased,
    Fact,
    Halted,
    Inspected,
    Planned,
    Resumed,
    Sealed,
    Struck,
)
from chaos.scenario import Expect, Scenario, Shape
from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.model import Member, Phase, Rung
from elasticrl.contract.settings import Recovery, Settings

NODES = ("n00", "n01", "n02")


def going_back(*between: Fact, nodes: tuple[str, ...]) -> list[tuple[float, str]]:
    """A gang that had sealed 40 at 10.0 s goes on from 20 at 12.0 s, on these nodes."""

    def resumed(at: float, generation: int, version: int, on: tuple[str, ...]) -> tuple[Fact, Fact]:
        whole = Resumed(
            at=at, generation=generation, version=version, digest="", source="", whole=-1, nodes=on, ranges=()
        )
        return Planned(at=at, plan=plan(generation, *on), by="n00/1", committed=0, paused_s=0.0), whole

    history = (*resumed(0.0, 1, 0, NODES), sealed(10.0), *between, *resumed(12.0, 2, 20, nodes))
    scenario = Scenario(name="made up", shape=Shape(nodes=3, settings=Settings(lanes=6)))
    return list(no_sealed_step_is_lost(Case(scenario, history)))


def sealed(at: float, version: int = 40) -> Sealed:
    return Sealed(at=at, generation=1, version=version, step=version, digest="d")


def lost(at: float, *nodes: str) -> Struck:
    return Struck(at=at, number=0, kind="lose_vault", nodes=nodes)


def test_a_step_whose_every_shard_had_a_living_copy_is_missed():
    ((at, said),) = going_back(nodes=("n00", "n01"))
    assert (at, said) == (12.0, "generation 2 goes back from 40 to 20; missing ['n02']")
    assert going_back(lost(11.0, "n01"), nodes=("n00", "n02")), "one copy of each was still there"


@pytest.mark.parametrize("late", [sealed(11.05), sealed(11.05, 41)])
def test_what_a_slow_worker_tells_after_two_copies_were_lost_brings_none_of_them_back(late: Sealed):
    """Found live (seed 80): the version was told once more after the vault had gone that held it."""
    assert not going_back(lost(11.0, "n01"), late, nodes=("n00", "n01"))


def test_a_version_that_is_sealed_long_after_a_vault_was_lost_does_not_lie_there():
    assert going_back(lost(11.0, "n01"), sealed(11.0 + 2 * TOLD_S, 41), nodes=("n00", "n01"))


def test_a_version_that_is_told_when_the_step_was_cut_may_have_lain_on_what_was_lost_meanwhile():
    """Found live (seed 97): voted for before a power cut, a vault was lost, and told a second later, as the gang broke."""
    late = replace(sealed(11.0 + 2 * TOLD_S, 41), after=10.0)
    assert not going_back(lost(11.0, "n01"), late, nodes=("n00", "n01"))
    assert going_back(lost(9.9, "n01"), late, nodes=("n00", "n01")), "it was lost before"


def test_what_a_gang_seals_after_a_later_one_has_formed_is_missed_by_nobody():
    """Found by seed 46000054: one that was cut from the store alone trained on, and its steps were to be there afterwards."""

    def resumed(at: float, generation: int, version: int, *nodes: str) -> tuple[Fact, Fact]:
        formed = Resumed(
            at=at, generation=generation, version=version, digest="", source="", whole=-1, nodes=nodes, ranges=()
        )
        return Planned(at=at, plan=plan(generation, *nodes), by="n01/1", committed=0, paused_s=0.0), formed

    def going_on(at: float, *nodes: str) -> list[tuple[float, str]]:
        cut = Struck(at=1.0, number=0, kind="cut_store", nodes=nodes)
        history = (*resumed(0.0, 1, 0, "n00"), *resumed(5.0, 2, 0, "n01"), *resumed(12.0, 3, 20, *NODES))
        history = tuple(sorted((*history, cut, sealed(at)), key=lambda fact: fact.at))
        return list(no_sealed_step_is_lost(Case(Scenario(name="made up", shape=Shape(nodes=3)), history)))

    assert not going_on(10.0, "n00")
    assert going_on(10.0, "n01"), "it knew of the later one"
    assert not going_on(4.0, "n00"), "n00 was not among those who went on"
    history = (*resumed(0.0, 1, 0, "n00"), sealed(4.0), *resumed(5.0, 2, 20, "n00", "n01"))
    assert list(no_sealed_step_is_lost(Case(Scenario(name="made up", shape=Shape(nodes=3)), history)))


@pytest.mark.parametrize("number", [1, 3])
def test_a_gang_of_who_began_beside_an_empty_store_hides_no_step_that_is_lost_afterwards(number: int):
    def resumed(at: float, generation: int, version: int, *nodes: str) -> tuple[Fact, Fact]:
        formed = Resumed(
            at=at, generation=generation, version=version, digest="", source="", whole=-1, nodes=nodes, ranges=()
        )
        return Planned(at=at, plan=plan(generation, *nodes), by="n01/1", committed=0, paused_s=0.0), formed

    gang = (*resumed(0.0, 3, 0, *NODES), replace(sealed(4.0), generation=3))
    history = (*gang, *resumed(5.0, number, 0, "n03"), *resumed(9.0, 103, 20, *NODES))
    assert list(no_sealed_step_is_lost(Case(Scenario(name="made up", shape=Shape(nodes=4)), history)))


def test_a_plan_that_the_store_lost_before_anybody_could_see_it_was_never_written():
    shape = Shape(nodes=3, watch_s=0.05)

    def written(at: float, generation: int = 1) -> Planned:
        return Planned(at=at, plan=plan(generation, *NODES), by="n00/1", committed=0, paused_s=0.0)

    def twice(*between: Fact, **more: object) -> int:
        history = (written(1.0), *between, replace(written(2.0), **more))
        return len(
            [fact for fact in known(Scenario(name="made up", shape=shape), history) if isinstance(fact, Planned)]
        )

    def wiped(at: float) -> Struck:
        return Struck(at=at, number=0, kind="store_wiped", nodes=())

    began = Began(at=1.04, node="n00", generation=1, fresh=True)
    assert twice(wiped(1.05)) == 1
    assert twice() == 2, "nothing was lost"
    assert twice(wiped(1.2)) == 2, "its news had come by then"
    other = plan(1, *NODES[:2])
    assert twice(wiped(1.05), plan=other) == 1
    assert twice(began, wiped(1.05), plan=other) == 2, "a worker was told of it"
    assert twice(began, wiped(1.05)) == 1, "the very same one tells it nothing new"
    assert twice(wiped(1.05), plan=plan(2, *NODES)) == 2, "its number is not used again"
    assert twice(wiped(1.05), plan=replace(plan(1, *NODES), again=True)) == 2


@pytest.mark.parametrize(
    ("seated", "by", "between", "beside"),
    [
        (("n03",), "n03/1", (), ()),
        (("n00", "n03"), "n03/1", (), ("n00",)),
        (("n03",), "n01/1", (), ("n01",)),
        (("n00", "n03"), "n03/1", (Died(at=9.0, node="n00", generation=9, step=4, cause="", own=True),), ()),
        (("n00", "n03"), "n03/1", (Struck(at=9.0, number=1, kind="kill_agent", nodes=("n00",)),), ()),
    ],
)
def test_a_row_of_plans_that_begins_anew_is_not_written_beside_workers_of_a_later_gang(seated, by, between, beside):
    def written(at: float, generation: int, by: str, *names: str) -> Planned:
        return Planned(at=at, plan=plan(generation, *names), by=by, committed=0, paused_s=0.0)

    gang = [Began(at=1.0, node=node, generation=generation, fresh=True) for generation in range(1, 4) for node in NODES]
    rows = [written(0.1 * generation, generation, "n00/1", *NODES) for generation in range(1, 4)]
    wiped = Struck(at=10.0, number=0, kind="store_wiped", nodes=())
    history = (*rows, *gang, *between, wiped, *(written(11.0 + n, n, by, *seated) for n in range(1, 3)))
    said = [what for _, what in one_plan_per_generation(Case(Scenario(name="made up", shape=Shape(nodes=4)), history))]
    expected = [
        f"generation {n} was written beside workers of {node} in generation 3" for n in (1, 2) for node in beside
    ]
    assert said == expected


@pytest.mark.parametrize("again", [True, False])
def test_a_hang_in_a_job_that_was_begun_again_is_none_of_the_stop_before(again: bool):
    end = replace(plan(2, *NODES), phase=Phase.STOP, exit_code=75)
    settings = Settings(lanes=6)
    resumed = Resumed(at=3.0, generation=3, version=0, digest="", source="", whole=-1, nodes=NODES, ranges=())
    history = [
        Planned(at=1.0, plan=end, by="n00/1", committed=0, paused_s=0.0),
        *((Planned(at=2.0, plan=plan(3, *NODES), by="n00/1", committed=0, paused_s=0.0), resumed) if again else ()),
        Struck(at=5.0, number=0, kind="hang_worker", nodes=("n01",)),
        Halted(at=6.0, node="n01", generation=3, under=2),
        Eased(at=1000.0, number=0, kind=""),
    ]
    assert (
        bool(list(a_hang_is_ended(Case(Scenario(name="made up", shape=Shape(nodes=3, settings=settings)), history))))
        is again
    )


def stopped(*deaths: Died, between: tuple[Fact, ...] = ()) -> list[tuple[float, str]]:
    """The job is ended for a crash loop at 20.0 s by generation 4, where three failures are allowed."""
    end = replace(plan(4, *NODES), phase=Phase.STOP, exit_code=70, causes=(Cause(why=Why.POLICY, said="crash loop"),))
    told = (*deaths, *between, Planned(at=20.0, plan=end, by="n00/1", committed=0, paused_s=0.0))
    settings = Settings(lanes=6, recovery=Recovery(no_progress_limit=3))
    scenario = Scenario(name="made up", shape=Shape(nodes=3, settings=settings))
    return list(a_job_ends_for_a_reason(Case(scenario, tuple(sorted(told, key=lambda fact: fact.at)))))


def failed(at: float, generation: int, step: int = 40) -> Died:
    return Died(at=at, node="n01", generation=generation, step=step, cause="bad prompt", own=True)


def test_a_failure_that_is_told_after_the_stop_which_answers_it_counts():
    assert not stopped(failed(10.0, 1), failed(12.0, 2), failed(20.3, 3))
    assert stopped(failed(10.0, 1), failed(12.0, 2)), "two are not three"
    assert stopped(failed(10.0, 1), failed(12.0, 2), failed(20.3, 4)), "it came after"


def test_a_step_that_others_have_sealed_meanwhile_is_no_progress_of_the_one_who_fails():
    assert not stopped(failed(10.0, 1), failed(12.0, 2), failed(14.0, 3), between=(sealed(11.0, 41),))
    assert stopped(failed(10.0, 1), failed(12.0, 2, step=41), failed(14.0, 3, step=42)), "it got further each time"


@pytest.mark.parametrize(
    ("expect", "said"),
    [
        (Expect(rungs_at_least=3), "rung 1 was taken, expected at least 3"),
        (Expect(rungs_at_least=1), ""),
        (Expect(seated=("n00", "n02")), "seats of n00, n01 at the end, expected n00, n02"),
        (Expect(seated=("n00", "n01")), ""),
        (Expect(looks_at_most=0), "all were looked at 1 times, expected at most 0"),
        (Expect(looks_at_least=2), "all were looked at 1 times, expected at least 2"),
        (Expect(looks_at_least=1, looks_at_most=1), ""),
        (Expect(caused="stalled; reborn n02"), ""),
        (Expect(caused="stalled + reborn n02"), "no plan was caused by 'stalled + reborn n02'"),
        (Expect(caused="reborn n02 + joined"), ""),
        (Expect(caused="reborn -n02"), "no plan was caused by 'reborn -n02'"),
    ],
)
def test_what_a_scenario_demands_is_asked_for(expect: Expect, said: str):
    stalled = replace(plan(1, "n00", "n01"), causes=(Cause(why=Why.STALLED),), rung=Rung.REFORM)
    reborn = Cause(why=Why.REBORN, who=(Member(node="n02", incarnation=1),))
    after = replace(plan(2, "n00", "n01"), causes=(reborn, Cause(why=Why.JOINED)), rung=Rung.REFORM)
    plans = [Planned(at=at, plan=p, by="n00/1", committed=0, paused_s=0.0) for at, p in ((1.0, stalled), (3.0, after))]
    history = [plans[0], Inspected(at=2.0, generation=1), plans[1]]
    scenario = Scenario(name="made up", shape=Shape(nodes=3, settings=Settings(lanes=6)), expect=expect)
    assert [what for _, what in what_was_expected(Case(scenario, history))] == ([said] if said else [])


def committed_as_it_would_grow(*made: int) -> list[tuple[float, str]]:
    """Generation 1 has made these of ten steps as a plan adds n02 to it; step 8 ends to be saved then, and is committed."""
    first = plan(1, "n00", "n01")
    more = replace(plan(2, *NODES), seats=(*first.seats, replace(plan(2, "n02").seats[0], born=2)))
    assert more.grows
    history = (
        Planned(at=0.0, plan=first, by="n00/1", committed=0, paused_s=0.0),
        *(Began(at=0.1, node=node, generation=1, fresh=True) for node in ("n00", "n01")),
        *(sealed(float(step), step) for step in made),
        Planned(at=10.5, plan=more, by="n00/1", committed=0, paused_s=0.0),
        Committed(at=11.0, step=8, generation=2, manifest="step-00000008"),
    )
    scenario = Scenario(name="made up", shape=Shape(nodes=3, settings=Settings(lanes=6, steps=10)))
    return list(only_who_has_joined_commits(Case(scenario, history)))


def test_a_gang_that_is_done_commits_what_it_saves_under_the_plan_that_would_add_to_it():
    assert not committed_as_it_would_grow(8, 9, 10)
    assert committed_as_it_would_grow(8, 9), "it trains still, and has not heard of that plan"


def put_out(*faults: Fact) -> list[tuple[float, str]]:
    """n00, which nothing befell, is kept out of three nodes at 40.0 s, after these faults of the others."""
    cause = Cause(why=Why.SILENT)
    history = (
        Planned(at=0.0, plan=plan(1, *NODES), by="n00/1", committed=0, paused_s=0.0),
        *faults,
        Confined(at=40.0, node="n00", member="n00/1", cause=cause, strikes=1, held=True),
    )
    scenario = Scenario(name="made up", shape=Shape(nodes=3, settings=Settings(lanes=6)))
    return list(the_innocent_are_not_quarantined(Case(scenario, history)))


def test_one_beside_others_that_lose_messages_may_pass_for_the_silent_one_while_they_do():
    lossy = [Struck(at=10.0, number=i, kind="lossy_node", nodes=(node,)) for i, node in enumerate(NODES[1:])]
    assert not put_out(*lossy)
    assert put_out(lossy[0]), "two of three hear well"
    assert put_out(*lossy, Eased(at=20.0, number=0, kind="lossy_node")), "one hears well again"
