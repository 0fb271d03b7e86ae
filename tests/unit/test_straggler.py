"""Slow ranks by robust statistics; a noisy healthy run gives nothing."""

from random import Random

import pytest

from elasticrl.contract.verdict import Fault
from elasticrl.core.judge import straggler
from elasticrl.core.judge.judge import judge
from elasticrl.core.judge.straggler import Step, slow

PHASES = {"rollout": 3.0, "update": 1.0, "reward": 0.004}


def run(
    world: int, steps: int, *, noise: float, seed: int, factor: dict[tuple[int, str], float] | None = None
) -> list[Step]:
    """A gang whose times scatter by `noise` (log-normal), some ranks slower by a factor in a phase."""
    chance = Random(seed)
    factor = factor or {}
    return [
        {
            rank: {p: s * factor.get((rank, p), 1.0) * chance.lognormvariate(0, noise) for p, s in PHASES.items()}
            for rank in range(world)
        }
        for _ in range(steps)
    ]


def hits(history: list[Step], *, z: float = 4.0, steps: int = 5) -> list[tuple[int, str]]:
    return [(hit.rank, hit.phase) for hit in slow(history, z=z, steps=steps)]


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 3, 8, 64])
@pytest.mark.parametrize("noise", [0.01, 0.1, 0.3])
def test_a_noisy_healthy_run_gives_nothing(world: int, noise: float) -> None:
    history = run(world, 60 if world > 8 else 300, noise=noise, seed=world)
    for end in range(5, len(history)):
        assert hits(history[max(0, end - 20) : end]) == []


@pytest.mark.parametrize("world", [2, 3, 8, 64])
@pytest.mark.parametrize(("noise", "times"), [(0.01, 1.3), (0.05, 1.5), (0.1, 2.5)])
def test_a_slow_rank_is_named_with_its_phase_amid_noise(world: int, noise: float, times: float) -> None:
    history = run(world, 20, noise=noise, seed=7, factor={(1, "update"): times})
    assert hits(history) == [(1, "update")]


def test_it_has_to_be_slow_in_every_one_of_the_last_steps() -> None:
    fast, late = run(4, 10, noise=0.01, seed=1), run(4, 5, noise=0.01, seed=2, factor={(2, "rollout"): 2.0})
    for count in range(5):
        assert hits([*fast, *late[:count]]) == []
    assert hits([*fast, *late]) == [(2, "rollout")]
    assert hits([*fast, *late, *fast[:1]]) == [], "once as fast as the others, and it is well again"
    assert hits(late[:4]) == [], "not enough is known"


def test_one_slow_rank_does_not_hide_another_and_half_a_gang_is_nobody() -> None:
    two = {(1, "update"): 5.0, (6, "update"): 1.8}
    assert hits(run(8, 10, noise=0.01, seed=3, factor=two)) == [(1, "update"), (6, "update")]
    half = {(rank, "update"): 2.0 for rank in range(5)}
    assert hits(run(8, 10, noise=0.01, seed=3, factor=half)) == []


def test_a_tight_gang_does_not_turn_a_millisecond_into_an_alarm() -> None:
    still = [{rank: {"update": 1.0 + 0.001 * (rank == 3)} for rank in range(8)}] * 10
    assert hits(still) == []
    tiny = [{rank: {"advantage": 0.0001 + 0.0004 * (rank == 3)} for rank in range(8)}] * 10
    assert hits(tiny) == []


def test_less_z_reports_more() -> None:
    history = run(8, 10, noise=0.02, seed=5, factor={(4, "update"): 1.25})
    assert hits(history, z=3.0) == [(4, "update")]
    assert hits(history, z=8.0) == []


@pytest.mark.parametrize(
    "history", [[], [{}] * 5, [{0: {}}] * 5, [{0: {"a": 1.0}}] * 5, [{0: {"a": 1.0}, 1: {"b": 1.0}}] * 5]
)
def test_too_little_gives_nothing(history: list[Step]) -> None:
    assert slow(history, z=4.0, steps=5) == ()


def test_the_slowest_is_the_culprit_of_the_verdict() -> None:
    history = run(8, 10, noise=0.01, seed=3, factor={(1, "update"): 5.0, (1, "reward"): 3.0})
    verdict = judge(straggler.evidence(slow(history, z=4.0, steps=5), {rank: f"n{rank // 4}" for rank in range(8)}))
    assert (verdict.fault, verdict.ranks, verdict.nodes) == (Fault.STRAGGLER, (1,), ("n0",))
    assert "update takes" in verdict.cause
