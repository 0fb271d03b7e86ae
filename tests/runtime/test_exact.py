"""The same bits for every number of workers, for both strategies, through resizes and deaths. Real processes, real gloo."""

import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import exact_job
import pytest
import torch
from forked_workers import Workers
from torch.torch_version import TorchVersion

from elasticrl.runtime.strategy import POINTS

GENERATION = count(1)
KINDS = ("replicated", "fsdp", "fsdp-contiguous")


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    gang = Workers(4)
    yield gang
    gang.close()


@pytest.fixture(scope="module")
def alone(workers: Workers) -> dict[int, dict[str, object]]:
    """Each job's outcome in one process without any group: what all others are held against."""
    return {
        lanes: workers.run(exact_job.segment, 1, generation=0, kind="replicated", lanes=lanes, until=4, groupless=True)[
            0
        ]
        for lanes in (4, 5, 8)
    }


def run(workers: Workers, world: int, **kwargs: object) -> dict[str, object]:
    results = workers.run(exact_job.segment, world, generation=next(GENERATION), **kwargs)
    assert all(result == results[0] for result in results), "ranks disagree"
    return results[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lanes", [4, 5, 8])
def test_any_number_of_workers_computes_the_same_bits(workers: Workers, alone, lanes: int, kind: str):
    for world in (1, 2, 3, 4):
        result = run(workers, world, kind=kind, lanes=lanes, until=4)
        assert result == alone[lanes], f"{world} workers"


def test_gradients_that_are_computed_narrow_give_the_same_bits_too(workers: Workers):
    results = [run(workers, world, kind="fsdp-narrow", lanes=8, until=2) for world in (1, 2, 3)]
    assert all(result == results[0] for result in results)


def test_another_number_of_lanes_is_another_job(alone):
    assert len({result["sha256"] for result in alone.values()}) == 3


def test_sgd_with_momentum_is_exact_too(workers: Workers):
    results = [
        run(workers, world, kind=kind, lanes=5, until=3, rule=exact_job.sgd) for kind in KINDS[:2] for world in (1, 3)
    ]
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("rule", [exact_job.amsgrad, exact_job.lion])
def test_optimizers_of_torch_and_of_a_script_are_exact_too(workers: Workers, tmp_path: Path, rule):
    results = [
        run(workers, world, kind=kind, lanes=5, until=3, rule=rule)
        for kind, worlds in (("replicated", (1, 2, 3)), ("fsdp", (1, 2, 3)))
        for world in worlds
    ]
    assert all(result == results[0] for result in results)
    for kind in ("replicated", "fsdp"):
        (tmp_path / kind).mkdir()
        options = {"kind": kind, "lanes": 5, "until": 3, "vault": str(tmp_path / kind), "rule": rule}
        generation = next(GENERATION)
        next(GENERATION)
        killed = {"victim": 1, "at_step": 1, "point": "apply"}
        found = workers.run(exact_job.through_a_death, 3, generation=generation, **options, **killed)
        workers.replace(1)
        assert found[1] is None, "the fault never fired"
        assert [one["sha256"] for one in (found[0], found[2])] == [results[0]["sha256"]] * 2


def test_a_job_that_is_resized_and_changes_its_strategy_ends_with_the_same_bits(
    workers: Workers, alone, tmp_path: Path
):
    for version, (world, kind) in enumerate([(4, "replicated"), (3, "fsdp"), (1, "replicated"), (2, "fsdp")], start=1):
        result = run(workers, world, kind=kind, lanes=8, until=version, vault=str(tmp_path))
    assert result["sha256"] == alone[8]["sha256"]


@pytest.mark.parametrize(
    ("kind", "point"), [*(("replicated", point) for point in POINTS), *(("fsdp", point) for point in POINTS[::3])]
)
def test_a_death_at_any_point_of_an_update_costs_no_bit(workers: Workers, alone, tmp_path: Path, kind: str, point: str):
    options = {"kind": kind, "lanes": 8, "until": 4, "vault": str(tmp_path), "victim": 1, "at_step": 2, "point": point}
    generation = next(GENERATION)
    next(GENERATION)
    results = workers.run(exact_job.through_a_death, 3, generation=generation, **options)
    workers.replace(1)
    assert results[1] is None, f"the fault at {point} never fired"
    for survivor in (results[0], results[2]):
        assert survivor["sha256"] == alone[8]["sha256"]
        assert survivor["resumed"] == (3 if point == "before_seal" else 2)


def test_a_flipped_bit_in_one_replica_is_found_and_the_rank_named(workers: Workers):
    assert workers.run(exact_job.corrupt, 3, generation=next(GENERATION), victim=1) == [((), (1,))] * 3


# Found by reading: what a policy has computed in bfloat16 was added up in it, too.
@pytest.mark.parametrize("kind", [*KINDS, "fsdp-narrow"])
def test_every_lane_counts_exactly_once_in_integers(workers: Workers, kind: str):
    for world, lanes in ((1, 3), (2, 5), (3, 8), (4, 4), (4, 7)):
        results = workers.run(exact_job.count_lanes, world, generation=next(GENERATION), kind=kind, lanes=lanes)
        assert results == [True] * world, f"{lanes} lanes on {world} workers"


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_that_all_leave_out_counts_as_zero(workers: Workers, kind: str):
    for world, lanes in ((1, 3), (2, 5), (3, 8)):
        job = {"kind": kind, "lanes": lanes, "left_out": 1}
        results = workers.run(exact_job.count_lanes, world, generation=next(GENERATION), **job)
        assert results == [True] * world, f"{lanes} lanes on {world} workers"


def test_a_lane_without_a_backward_pass_that_nobody_has_left_out_is_told(workers: Workers):
    job = {"kind": "fsdp", "lanes": 2, "forgotten": 1}
    with pytest.raises(AssertionError, match="had no backward pass in lane 1; every lane runs every unit once"):
        workers.run(exact_job.count_lanes, 1, generation=next(GENERATION), **job)


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.13", reason="this torch cannot: the next test")
@pytest.mark.parametrize("world", [1, 2])
def test_a_parameter_that_a_lane_leaves_out_counts_as_zero_under_fsdp_too(workers: Workers, world: int):
    results = workers.run(exact_job.leave_out_a_parameter, world, generation=next(GENERATION))
    assert sorted(row for rows in results for row in rows) == [("a", 10.0)] * 6 + [("b", 1.0)] * 4


@pytest.mark.parametrize("world", [1, 2])
def test_a_torch_that_cannot_sum_what_is_left_out_is_told_of(workers: Workers, world: int):
    told = workers.run(exact_job.leave_out_a_parameter, world, generation=next(GENERATION), as_old_torch=True)
    assert any(
        re.search(r"'unit' took no part in this pass: torch .* Install torch 2\.13 or later", each) for each in told
    )


def test_ranks_that_tally_other_names_are_all_told_so(workers: Workers):
    first, last = workers.run(exact_job.tally_otherwise, 2, generation=next(GENERATION))
    assert "rank 1 tallied under other names than those of rank 0 (loss)" in first
    assert "rank 0 tallied under other names than those of rank 1 (entropy)" in last
