"""A second fault at every place of a recovery: the short selection, and that places and cases are what they say."""

from dataclasses import replace
from itertools import islice, pairwise

import pytest

from chaos import history
from chaos.everywhere import BASES, FIRST_S, SECONDS, SEED, batch, case, cases, judged, mark, places
from chaos.faults import KINDS
from chaos.history import Struck
from chaos.mutate import breaking, mutants
from chaos.scenario import Scenario, load, save
from chaos.sim.drive import Run, run

EVERY = 499  # one case of so many: some 200


@pytest.mark.long
def test_a_short_selection_holds():
    found = batch(tuple(islice(cases(BASES, ()), EVERY // 2, None, EVERY)))
    assert not found.failed, "\n".join(map(str, found.failed))
    assert found.runs.total() >= 150
    assert set(found.runs) == set(BASES)


@pytest.mark.parametrize("name", BASES)
def test_every_first_fault_strikes_and_the_job_recovers_by_itself(name):
    scenario = BASES[name].scenario
    result = run(scenario, SEED)
    assert not result.violations
    assert [f.at for f in result.history if isinstance(f, Struck)] == [FIRST_S] * len(scenario.faults)
    assert len(places(name)) >= 20


def test_the_vocabulary_is_whole():
    nothing_new = {"clock_step", "admit", "crash_loop", "ask_drain"}
    other_shapes = {"late_ways", "nccl_breaks", "part_ways", "quiet_log", "start_again", "stray_worker", "wait_outside"}
    unlike = {"reset_links", "disk_line", "versions_line"}
    assert {fault.kind for fault in SECONDS.values()} == set(KINDS) - nothing_new - other_shapes - unlike


def test_places_are_moments_between_which_something_has_changed():
    run = Run(BASES["leader"].scenario, SEED)
    run.cluster.start()
    marks = []
    for at in places("leader"):
        run.world.run(at)
        marks.append(mark(run.cluster))
    assert all(before != after for before, after in pairwise(marks))


def test_up_to_the_second_fault_a_case_is_the_run_without_it():
    name, place = "node", 40
    at = places(name)[place]

    def before(scenario: Scenario) -> list[str]:
        return [history.line(fact) for fact in run(scenario, SEED).history if fact.at < at]

    assert before(BASES[name].scenario) == before(case(name, "kill_worker:n00", place))


def test_a_case_is_a_scenario_file(tmp_path):
    scenario = case("worker", "cut_store:n02:in", 20)
    save(scenario, tmp_path / "case.yaml")
    again = load(tmp_path / "case.yaml")
    assert replace(again, name=scenario.name) == scenario
    assert sum(isinstance(fact, Struck) for fact in run(again, again.seed).history) == 2


def test_a_fault_with_nothing_to_act_on_is_no_run():
    assert judged("node", "kill_worker:n01", 3) is None  # its node has just been killed


def test_a_broken_guard_shows():
    some = [("drain-needed", "store_compaction", 10)]
    assert not batch(some).failed
    with breaking(next(m for m in mutants() if m.name == "scene.Scene._fate: if record.member != member -> if False")):
        assert batch(some).failed
