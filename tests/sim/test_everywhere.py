"""A second fault at every place of a recovery: the short selection, and that places and cases are what they say."""

from dataclasses import replace
from itertools import islice, pairwise

import pytest

from chaos import everywhere, history
from chaos.everywhere import (
    BASES,
    FIRST_S,
    SECONDS,
    SEED,
    Unit,
    begun,
    case,
    cases,
    cover,
    judged,
    main,
    mark,
    places,
    result,
    units,
)
from chaos.faults import KINDS
from chaos.history import Struck
from chaos.mutate import breaking, mutants
from chaos.scenario import Scenario, load, save
from chaos.sim.drive import Run, run
from chaos.sim.twin import twin

EVERY = 499  # one case of so many: some 200


@pytest.mark.long
def test_a_short_selection_holds():
    found = [cover(unit) for unit in units(islice(cases(BASES, ()), EVERY // 2, None, EVERY))]
    assert not [(each.base, each.place, *failed) for each in found for failed in each.failed]
    assert sum(each.ran for each in found) >= 150
    assert {each.base for each in found} == set(BASES)


@pytest.mark.parametrize("name", BASES)
def test_every_first_fault_strikes_and_the_job_recovers_by_itself(name):
    scenario = BASES[name].scenario
    result = run(scenario, SEED)
    assert not result.violations
    assert [f.at for f in result.history if isinstance(f, Struck)] == [FIRST_S] * len(scenario.faults)
    assert len(places(name)) >= 20


def test_the_vocabulary_is_whole():
    nothing_new = {"clock_step", "admit", "crash_loop", "ask_drain", "reset_links"}
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


def told(run: Run) -> list[str]:
    """All that happens in a case."""
    found = result(run)
    return [] if found is None else [history.line(fact) for fact in found.history]


ALIKE = [
    ("worker", 21, ("kill_node:n00", "store_loss", "partition", "drain:n02", "kill_worker:n01")),
    ("drain-needed", 40, ("store_set_back", "lossy_node:n01", "stop")),
    ("save", 3, ("torn_save", "late_commit")),
]


@pytest.mark.parametrize(("name", "place", "seconds"), ALIKE)
def test_cases_that_share_their_beginning_are_those_that_are_run_from_it(name, place, seconds):
    shared = begun(name, place)
    so_far = len(shared.world.history)
    for second in seconds:
        scenario = case(name, second, place)
        alone, other = Run(scenario, SEED), twin(shared)
        alone.cluster.start()
        other.become(scenario)
        assert told(other) == told(alone)
    assert len(shared.world.history) == so_far


@pytest.mark.parametrize("name", BASES)
def test_a_run_has_a_copy_at_every_place(name):
    run = Run(BASES[name].scenario, SEED)
    run.cluster.start()
    for at in places(name):
        run.world.run(at)
        assert twin(run).world.now == at


def test_what_cannot_be_copied_is_named():
    shared = begun("worker", 21)
    shared.world.later(1.0, print, object())
    with pytest.raises(TypeError, match="nobody knows how to copy a object"):
        twin(shared)


def test_a_case_that_crashes_is_a_finding(monkeypatch):
    monkeypatch.setattr("chaos.sim.drive.judge", lambda *_: 1 // 0)
    found = cover(Unit(base="worker", place=21, seconds=("stop",)))
    assert "ZeroDivisionError" in found.failed[0][1]


def test_sittings_and_parts_make_a_whole(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("chaos.everywhere.SECONDS", {"lose_lease:n00": SECONDS["lose_lease:n00"]})
    some = places("save")[:8]
    monkeypatch.setattr("chaos.everywhere.places", lambda _: some)
    whole = [unit.key for unit in units(cases(["save"], ()))]
    file = tmp_path / "results"
    arguments = ["--base", "save", "--to", str(file), "--workers", "1"]
    assert main([*arguments, "--part", "1/2"]) == 0
    assert set(everywhere.load(file)) == set(whole[::2])
    before = file.read_text()
    assert main([*arguments, "--part", "1/2"]) == 0
    assert file.read_text() == before  # there was nothing left to do
    assert main([*arguments, "--minutes", "0"]) == 0
    assert len(whole[::2]) < len(everywhere.load(file)) < len(whole)
    assert f"{len(everywhere.load(file))} of {len(whole)} places covered" in capsys.readouterr().out


def test_half_a_line_of_who_was_killed_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr("chaos.everywhere.SECONDS", {})
    file = tmp_path / "results"
    file.write_text('{"base": "save", "pla')
    arguments = ["--base", "save", "--to", str(file), "--workers", "1", "--minutes", "0"]
    assert everywhere.load(file) == {}
    main(arguments)
    assert file.read_text().endswith("\n"), "else the next result is none either"


@pytest.mark.parametrize("part", ["0/4", "5/4"])
def test_a_part_that_there_is_not_is_refused(part, capsys):
    with pytest.raises(SystemExit):
        main(["--part", part])
    assert "there is no such part" in capsys.readouterr().err


def test_a_broken_guard_shows():
    unit = Unit(base="drain-needed", place=10, seconds=("store_compaction",))
    assert not cover(unit).failed
    with breaking(next(m for m in mutants() if m.name == "scene.Scene._fate: if record.member != member -> if False")):
        assert cover(unit).failed
