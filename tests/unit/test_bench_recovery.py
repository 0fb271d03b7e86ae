"""What bench/recovery.py reckons as the least that a recovery has to move, and what it holds a recovery against."""

import pytest

from bench.recovery import FLOORS, SLACK_S, Cost, judged, must_move
from elasticrl.runtime.layout import Piece, buckets, common, striped

SPEEDS = {"memory": 1e9, "loopback": 5e8}


def lacks(before: int, now: int) -> list[float]:
    """Of a model, the part that each rank of a gang lacks that was cut otherwise before, as the runtime cuts it."""
    cut = buckets([(f"p{number}", (1_000_000,)) for number in range(12)], 2_000_000)
    old, new = striped(cut, before), striped(cut, now)
    sizes: list[float] = []
    for rank, mine in enumerate(new.pieces):
        had: tuple[Piece, ...] = old.pieces[rank] if rank < min(before, now) else ()
        sizes.append(sum(piece.count for piece in common(mine, had)[1]) / 12_000_000)
    return sizes


@pytest.mark.parametrize(("fault", "before", "now"), [("node", 3, 2), ("join", 2, 3), ("node", 5, 4), ("join", 7, 8)])
def test_a_new_cut_moves_what_each_rank_of_the_runtime_lacks(fault: str, before: int, now: int) -> None:
    state = sum(lacks(before, now)) * 12 * 1000
    params = 4 * 1000 if fault == "join" else 0
    must = must_move(fault, params=1000, world=max(before, now))
    assert must["loopback"] == pytest.approx(state + params, rel=1e-3)
    assert must["memory"] == 0


def test_a_fresh_worker_takes_its_part_from_its_node_and_the_parameters_from_the_others() -> None:
    assert must_move("worker", params=900, world=3) == {"memory": 3600, "loopback": 3600}
    assert must_move("worker", params=900, world=9) == {"memory": 1200, "loopback": 3600}


def test_a_state_without_gradients_is_put_back_on_all_ranks() -> None:
    assert must_move("worker", state=300, world=3) == {"memory": 1200, "loopback": 2400}
    assert must_move("node", state=300, world=3) == {"memory": 1200, "loopback": 1200}


def test_moving_more_makes_no_goal_easier() -> None:
    def row(moved: int) -> dict[str, object]:
        cost = Cost(took_s=5.0, again_s=1.0, moved={"restore": {"memory": moved, "loopback": moved}})
        return judged("", "worker", [cost], SPEEDS, {"params": 100_000_000})

    little, much = row(10**9), row(10**10)
    assert little["goal_s"] == much["goal_s"] == pytest.approx(SLACK_S + FLOORS * (0.4 + 0.8))
    assert (little["moved_s"], much["moved_s"]) == pytest.approx((3.0, 30.0))
    assert not much["met"]
