"""Faults that end at a deadline: a short selection, and that a case is what it says."""

from dataclasses import replace

import pytest

from chaos.faults import KINDS
from chaos.history import Eased, Struck
from chaos.mutate import breaking, mutants
from chaos.scenario import load, save
from chaos.sim.drive import run
from chaos.spans import EACH, LASTING, LEFT_OUT, OF_A_DAEMON, case, cost, judged, main, moments, world

SOME = 4 * EACH
TOUCHY = 692  # a node is cut off no more as it tests itself


@pytest.mark.long
def test_a_short_selection_holds():
    assert not [(number, found) for number in range(SOME) if (found := judged(number))]


def test_the_fault_ends_when_it_is_to_and_until_then_it_is_the_run_in_which_it_does_not_end():
    number = next(
        n for n in range(200) if case(n).deadline in moments(n // EACH) and case(n).first.for_s and not case(n).nuisance
    )
    span, here = case(number), world(number // EACH)
    for_good = replace(span.scenario, faults=(here.fault,))
    found, plain = (run(each, here.seed).history for each in (span.scenario, for_good))
    (ends,) = (fact.at for fact in found if isinstance(fact, Eased) and fact.number == 0)
    assert ends == pytest.approx((span.first.at or 0.0) + (span.first.for_s or 0.0))
    before = [[f for f in history if f.at < ends and not isinstance(f, Struck)] for history in (found, plain)]
    assert before[0] == before[1]
    assert any(fact.at > (span.first.at or 0.0) for fact in before[0])


def test_a_case_is_its_number_and_a_scenario(tmp_path):
    save(case(TOUCHY).scenario, tmp_path / "one.yaml")
    assert replace(load(tmp_path / "one.yaml"), name="") == replace(case(TOUCHY).scenario, name="")
    assert main(["--one", str(TOUCHY), "--save", str(tmp_path / "again.yaml")]) == 0
    assert (tmp_path / "again.yaml").read_text() == (tmp_path / "one.yaml").read_text()


def test_what_it_found_it_finds_again_where_the_guard_is_broken():
    (broken,) = (m for m in mutants() if m.name == "probing._disagreeing: if not doubtful -> if True")
    assert not judged(TOUCHY)
    with breaking(broken):
        assert any("the_innocent_keep_their_seats" in found for found in judged(TOUCHY))


def test_a_plan_that_a_daemon_cost_is_told():
    number = next(n for n in range(2000) if case(n).costs_nothing and not case(n).nuisance)
    span = case(number)
    history = run(span.scenario, span.scenario.seed).history
    assert cost(history, span.first.at or 0.0) is None
    assert cost(history, 0.0) is not None, "the first plan"


def test_all_that_lasts_is_drawn():
    assert {*LASTING, *LEFT_OUT} == {kind for kind, known in KINDS.items() if known.for_s}
    assert set(OF_A_DAEMON) <= set(LASTING)
    assert {world(n).fault.kind for n in range(800)} >= set(LASTING)
