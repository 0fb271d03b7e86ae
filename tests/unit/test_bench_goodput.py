"""What bench/goodput.py reckons from the moments of steps: on lines of a job that stood still for a while."""

import pytest

from bench.goodput import BUDGETS, LEEWAY, Pace, Struck, moments, within
from chaos.live.local import Sealed


def lines(times: dict[int, float], *, rank: int = 0, generation: int = 1) -> list[Sealed]:
    return [
        Sealed(at=at, node=f"n{rank}", pid=1, step=step, generation=generation, rank=rank, world=3, digest="d")
        for step, at in times.items()
    ]


def steady(steps: int, step_s: float, *, begin: float = 0.0) -> list[float]:
    return [begin + number * step_s for number in range(steps)]


def test_a_step_counts_once_and_when_it_was_first_known_to_be_sealed() -> None:
    told = lines({1: 0.1, 2: 0.2, 3: 0.3}) + lines({1: 0.05, 2: 0.25}, rank=1) + lines({3: 0.9, 4: 1.0}, generation=2)
    assert moments(told) == [0.05, 0.2, 0.3, 1.0]


def test_a_window_has_its_end_and_not_its_beginning() -> None:
    assert within([1.0, 2.0, 3.0], 1.0, 3.0) == 2


def test_a_job_that_stands_still_for_a_tenth_has_nine_tenths_of_the_goodput() -> None:
    pace = Pace.of([steady(200, 0.05), steady(200, 0.05, begin=500.0)])
    assert pace.goodput == pytest.approx(1.0)
    assert not pace.noise
    times = [at for at in steady(2001, 0.05) if not 30.0 < at <= 40.0]
    struck = Struck(begun=0.0, ended=100.0, faults=[(0.0, "worker"), (30.0, "node"), (60.0, "worker")], times=times)
    assert struck.goodput(pace) == pytest.approx(0.9, abs=0.001)
    assert struck.lost_s(pace) == pytest.approx(10.0, abs=0.1)
    assert struck.lost_by_kind(pace)["node"] == pytest.approx([10.0], abs=0.1)
    assert struck.lost_by_kind(pace)["worker"] == pytest.approx([0.0, 0.0], abs=0.1)
    assert struck.budget_s == pytest.approx(LEEWAY * (2 * BUDGETS["worker"] + BUDGETS["node"]))


def test_an_undisturbed_job_that_goes_by_fits_and_starts_says_that_nothing_can_be_told() -> None:
    jerky = [at + (1.0 if number > 50 else 0.0) for number, at in enumerate(steady(100, 0.05))]
    assert "own goodput" in Pace.of([jerky, steady(100, 0.05)]).noise
    assert "median step" in Pace.of([steady(500, 0.05), steady(500, 0.06)]).noise
