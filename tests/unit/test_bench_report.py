"""What benches say of their figures: how sure a median is, who is faster, whether the machine was theirs. None is run."""

import json
from argparse import ArgumentTypeError
from pathlib import Path
from statistics import median

import pytest

from bench.ppo import Found, beside_trl, pairs
from bench.race.judge import Outcome
from bench.race.race import recorded
from bench.race.results import figures, noise
from bench.report import BLIPS, LOOK_S, QUIET, STOLEN, Ticks, Watch, against, interval, noisy, some_of, summary

FEW, ENOUGH = 5, 6  # rounds: the range of five holds the median with 94 %


@pytest.mark.parametrize(
    ("looks", "stolen", "said"),
    [
        ([0.0, 0.0], 0.0, ""),
        ([QUIET, QUIET], STOLEN, ""),
        ([0.6, 0.0], 0.0, "others took up to 60 % of the processors at 1 of 2 looks"),  # before
        ([0.0, 0.6], 0.0, "others took up to 60 % of the processors at 1 of 2 looks"),  # what came while it ran
        ([0.0] * 30 + [0.9, 0.6, 0.5, 0.5], 0.0, "others took up to 90 % of the processors at 4 of 34 looks"),
        ([0.0] * 30 + [0.9, 0.6, 0.5], 0.0, ""),  # a blip in a long run
        ([0.0, 0.0], 0.2, "the hypervisor gave 20 % of the processors' time to others"),
        ([1.0], 0.2, "others took up to 100 % of the processors at 1 of 1 looks and the hypervisor gave 20 %"),
        ([], 0.0, ""),
    ],
)
def test_a_machine_that_others_used_before_or_meanwhile_is_said_to_be_too_noisy(
    looks: list[float], stolen: float, said: str
) -> None:
    assert 3 / 33 <= BLIPS < 4 / 34
    found = noisy(looks, stolen)
    assert found.startswith(f"too noisy to tell: {said}") if said else found == ""


def test_processors_time_is_read_without_counting_guests_twice() -> None:
    before = Ticks.read("cpu  100 10 20 1000 5 1 2 3 50 4\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
    assert before == Ticks(busy=133, stolen=3, idle=1005)
    passed = Ticks(busy=183, stolen=13, idle=1045).since(before)
    assert passed == Ticks(busy=50, stolen=10, idle=40)
    assert passed.share(passed.stolen) == 0.1
    assert Ticks(busy=0, stolen=0, idle=0).share(0) == 0.0


def test_a_bench_tells_the_load_before_it_and_what_others_took() -> None:
    watch = Watch()
    watch.load = 7.5
    assert 0.0 <= watch.look() <= 1.0
    machine = watch.machine()
    assert machine["load"] == 7.5
    assert machine["others"]["count"] == 2
    assert machine.keys() >= {"cores", "cpu", "load_after", "stolen", "python", "torch", "elasticrl", "commit"}
    json.dumps(machine)
    assert 0 < LOOK_S <= 1


def test_an_interval_holds_the_median_with_95_per_cent_or_is_none() -> None:
    assert [interval(range(n)) for n in (0, 1, FEW)] == [None, None, None]
    assert interval(range(ENOUGH)) == (0, 5)
    assert interval([3.0, 1.0, 2.0, 9.0, 5.0, 4.0, 8.0, 7.0, 6.0]) == (2.0, 8.0)  # 9: the second of each end
    assert interval(range(100)) == (39, 60)  # as tables have it, counted from zero


@pytest.mark.parametrize(
    ("between", "most", "least"),
    [
        ((2.0, 3.0), "met", "too noisy to tell"),  # at the goal itself it is met, whichever way
        ((3.0, 4.0), "too noisy to tell", "met"),
        ((3.0, 3.0), "met", "met"),
        ((3.1, 4.0), "missed", "met"),
        ((2.0, 2.9), "met", "missed"),
        ((2.0, 4.0), "too noisy to tell", "too noisy to tell"),
        (None, "too few to tell", "too few to tell"),
    ],
)
def test_a_goal_is_met_or_missed_by_a_whole_interval(
    between: tuple[float, float] | None, most: str, least: str
) -> None:
    assert (against(between, 3.0), against(between, 3.0, least=True)) == (most, least)


def rounds(**sides: list[float]) -> dict[tuple[str, int], Found]:
    return {(name.replace("_", "-"), 2): Found(rounds=times) for name, times in sides.items()}


@pytest.mark.parametrize(
    ("ratio", "count", "verdict"),
    [
        ([1.2], FEW, "never slower: too few to tell; 3 times its samples: too few to tell"),
        ([1.2], ENOUGH, "never slower: met; 3 times its samples: missed"),
        ([0.8], ENOUGH, "never slower: missed; 3 times its samples: missed"),
        ([3.5], ENOUGH, "never slower: met; 3 times its samples: met"),
        ([3.5], FEW, "never slower: too few to tell; 3 times its samples: too few to tell"),
        ([0.9, 1.2], ENOUGH, "never slower: too noisy to tell; 3 times its samples: missed"),
        ([2.5, 3.5], ENOUGH, "never slower: met; 3 times its samples: too noisy to tell"),
    ],
)
@pytest.mark.parametrize("side", ["elasticrl", "daemon-each"])
def test_who_is_slower_than_trl_is_told_of_six_rounds_and_not_of_five(
    side: str, ratio: list[float], count: int, verdict: str
) -> None:
    ratios = (ratio * count)[:count]
    found = rounds(trl=ratios, **{side.replace("-", "_"): [1.0] * count})
    beside = beside_trl(found, 2, side)
    assert beside["verdict"] == verdict
    assert beside["pairs"] == ratios
    assert beside["ratio"] == median(ratios)
    assert (beside["ratio_95"] is None) == (count == FEW)


def test_a_side_that_did_not_run_is_not_put_beside_trl() -> None:
    found = rounds(trl=[1.0] * 6, elasticrl=[1.0] * 6)
    assert beside_trl(found, 2, "daemon-each") == {}
    assert beside_trl(found, 1, "elasticrl") == {}
    assert beside_trl(rounds(elasticrl=[1.0]), 2, "elasticrl") == {}


@pytest.mark.parametrize(
    ("ratio", "count", "verdict"),
    [
        ([1.01], ENOUGH, "met"),
        ([1.05], ENOUGH, "missed"),
        ([1.01, 1.05], ENOUGH, "too noisy to tell"),
        ([1.01], FEW, "too few to tell"),
    ],
)
def test_what_daemons_cost_is_told_round_by_round(ratio: list[float], count: int, verdict: str) -> None:
    ratios = (ratio * count)[:count]
    cost = pairs(rounds(plain=[1.0] * count, daemon_each=ratios), 2, "daemon-each")
    assert (cost["verdict"], cost["pairs"]) == (verdict, ratios)
    assert pairs(rounds(daemon=[1.0]), 2, "daemon") == {}


def test_a_trial_of_before_its_place_and_commit_were_told_is_read(tmp_path: Path) -> None:
    old = '{"side": "a", "fault": "worker", "survivors_s": 1.0, "full_s": 2.0, "load": 3.0, "day": "2026-11-23"}'
    (tmp_path / "trials.jsonl").write_text(old + "\n")
    (trial,) = recorded(tmp_path / "trials.jsonl")
    assert (trial.others, trial.commit, trial.machine) == (None, "", "")
    assert noise([trial]) == ""


def test_a_race_tells_medians_ranges_and_counts_and_whether_others_ran_beside_it() -> None:
    trials = [
        Outcome(side="a", fault="worker", survivors_s=1.0, full_s=2.0, steps_lost=3, others=0.0),
        Outcome(side="a", fault="worker", survivors_s=2.0, end="not within 60 s", others=0.9),
        Outcome(side="a", fault="worker", end="did not start: late", others=0.9),
    ]
    told = figures(trials)["worker"]["a"]
    assert (told["trials"], told["ends"]) == (2, {"not within 60 s": 1})
    assert told["survivors_s"] == summary([1.0, 2.0]) == {"median": 1.5, "min": 1.0, "max": 2.0, "count": 2}
    assert told["full_s"]["count"] == 1
    assert "up to 90 % of the processors at 1 of 2 looks" in noise(trials)


def test_an_option_that_names_some_refuses_all_that_it_does_not_know_at_once() -> None:
    read = some_of(("worker", "node"))
    assert read("node,worker") == ["node", "worker"]
    with pytest.raises(ArgumentTypeError, match=r"unknown: 'kill', ''; known: worker, node"):
        read("kill,node,")
