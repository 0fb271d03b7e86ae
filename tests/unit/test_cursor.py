"""Which samples a lane gets: exact across worlds, epoch edges and restarts."""

from collections import Counter
from itertools import chain, islice, pairwise
from typing import Any

import pytest

from elasticrl.runtime.data.cursor import Cursor, SampleId, Segment, Walk, join_on, order_key, permuted
from elasticrl.runtime.vault.errors import CheckpointRefused, DataError


def deal(lanes: int, world: int) -> list[range]:
    """Contiguous ranges of lanes, as a gang deals them."""
    ends = [rank * lanes // world for rank in range(world + 1)]
    return [range(a, b) for a, b in pairwise(ends)]


def row(cursor: Cursor, steps: range, update: int = 0) -> list[SampleId]:
    """All samples of some steps, in lane order."""
    return [sample for step in steps for lane in range(cursor.walk.lanes) for sample in cursor.ids(step, update, lane)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 100, 1000, 4096, 4097])
def test_a_permutation_has_every_index_once(size: int):
    key = order_key(7, 3)
    assert sorted(permuted(i, size, key) for i in range(size)) == list(range(size))


def test_orders_differ_by_epoch_and_seed_and_never_change_between_releases():
    first = [permuted(i, 10, order_key(7, 0)) for i in range(10)]
    assert first == [6, 3, 1, 9, 4, 7, 8, 0, 5, 2]
    assert first != [permuted(i, 10, order_key(7, 1)) for i in range(10)]
    assert first != [permuted(i, 10, order_key(8, 0)) for i in range(10)]


def test_the_order_is_fair():
    """Over many epochs each sample comes to each place about equally often (chi-squared, far from its 1e-6 bounds)."""
    size, epochs = 11, 4000
    counts = Counter(
        (place, permuted(place, size, order_key(1, epoch))) for epoch in range(epochs) for place in range(size)
    )
    expected = epochs / size
    for place in range(size):
        statistic = sum((counts[place, index] - expected) ** 2 / expected for index in range(size))
        assert statistic < 45  # 10 degrees of freedom


def test_neighbours_are_not_kept_together():
    size = 10_000
    order = [permuted(i, size, order_key(3, 0)) for i in range(size)]
    assert sum(abs(a - b) == 1 for a, b in pairwise(order)) < 10


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
def test_the_samples_of_a_step_do_not_depend_on_the_number_of_workers(world: int):
    cursor = Cursor(Walk(size=1000, lanes=8, per_lane=4, seed=7))
    whole = row(cursor, range(3))
    dealt = [s for step in range(3) for lanes in deal(8, world) for lane in lanes for s in cursor.ids(step, 0, lane)]
    assert dealt == whole


@pytest.mark.parametrize("size", [7, 24, 25, 31, 100])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_has_every_sample_once_wherever_its_edges_fall(size: int, shuffle: bool):
    cursor = Cursor(Walk(size=size, lanes=4, per_lane=6, seed=1, shuffle=shuffle))
    steps = 5 * size // 24 + 1
    samples = row(cursor, range(steps))
    assert len(samples) == 24 * steps
    assert len(set(samples)) == len(samples)
    for epoch in range(5):
        assert sorted(s.index for s in samples if s.epoch == epoch) == list(range(size))


def test_dropping_leaves_out_less_than_a_batch_of_each_epoch_and_not_always_the_same():
    cursor = Cursor(Walk(size=50, lanes=4, per_lane=4, seed=1, edge="drop", epochs=4))
    assert cursor.steps == 12
    samples = row(cursor, range(12))
    left = [set(range(50)) - {s.index for s in samples if s.epoch == epoch} for epoch in range(4)]
    assert [len(rest) for rest in left] == [2, 2, 2, 2]
    assert len({frozenset(rest) for rest in left}) > 1


def test_a_run_resumed_exactly_at_an_epochs_edge_goes_on_with_the_next_one():
    """The bug it guards against: a loader restored as exhausted yields nothing, and the job ends with exit code 0."""
    walk = Walk(size=48, lanes=4, per_lane=6, seed=1)
    before = Cursor(walk)
    before.advance(1)
    after = Cursor(walk)
    after.load_state_dict(before.state_dict())
    assert after.ids(2, 0, 0)[0].epoch == 1
    assert row(after, range(2, 4)) == row(before, range(2, 4))


def test_the_end_of_the_last_epoch_is_a_number_and_beyond_it_an_error():
    cursor = Cursor(Walk(size=100, lanes=4, per_lane=4, epochs=3))
    assert cursor.steps == 18
    assert len(cursor.ids(17, 0, 3)) == 4
    with pytest.raises(DataError, match=r"18 steps in all\. Raise epochs"):
        cursor.ids(18, 0, 0)
    assert Cursor(Walk(size=100)).steps is None


@pytest.mark.parametrize(
    ("walk", "sentence"),
    [
        (Walk(size=0), "has no samples"),
        (Walk(size=10, lanes=4, per_lane=4, edge="drop"), "every epoch would be empty"),
        (Walk(size=10, lanes=4, per_lane=4, epochs=1), "end without a step and look finished"),
        (Walk(size=10, lanes=0), r"lanes=0.*at least 1"),
        (Walk(size=None), "needs to know the number of samples"),
    ],
)
def test_data_that_can_make_no_step_is_refused_at_the_start(walk: Walk, sentence: str):
    with pytest.raises(DataError, match=sentence):
        Cursor(walk)


def test_updates_that_draw_get_samples_of_their_own_and_others_none():
    cursor = Cursor(Walk(size=1000, lanes=2, per_lane=5, draws=3))
    samples = list(chain.from_iterable(row(cursor, range(4), update) for update in range(3)))
    assert len(set(samples)) == 2 * 5 * 3 * 4
    with pytest.raises(DataError, match="takes no samples"):
        cursor.ids(0, 3, 0)
    with pytest.raises(DataError, match="no lane 2"):
        cursor.ids(0, 0, 2)


def resumed(walk: Walk, cursor: Cursor, *allow: str) -> Cursor:
    after = Cursor(walk, allow=allow)
    after.load_state_dict(cursor.state_dict())
    return after


WALK = Walk(name="d", size=100, lanes=4, per_lane=5, seed=1)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"lanes": 8}, "lanes"),
        ({"per_lane": 3}, "batch"),
        ({"size": 90}, "data"),
        ({"seed": 2}, "data"),
        ({"name": "e"}, "data"),
        ({"content": "9f86"}, "data"),
        ({"shuffle": False}, "data"),
    ],
)
def test_another_batch_lane_count_or_data_is_refused_unless_allowed(change: dict[str, Any], name: str):
    from dataclasses import replace

    before = Cursor(WALK)
    before.advance(6)
    ((part, value),) = change.items()
    with pytest.raises(CheckpointRefused, match=f"was .* and is {value if part != 'per_lane' else 12}.*--allow {name}"):
        resumed(replace(WALK, **change), before)
    resumed(replace(WALK, **change), before, "lanes", "batch", "data")


def test_the_same_prompts_in_another_layout_are_another_batch_unless_lanes_changed():
    # Found by reading: ppo.batch 64 -> 32 with gen_batch 128, groups of 16 and 8 lanes, and nobody said a word.
    before = Cursor(Walk(size=100, lanes=8, per_lane=2, spans=2, seed=1), group=16)
    walk = Walk(size=100, lanes=8, per_lane=4, spans=4, seed=1)
    before.advance(6)
    state = before.state_dict()
    with pytest.raises(CheckpointRefused, match=r"spans was 2 and is 4, per_lane was 2 and is 4.*--allow batch"):
        Cursor(walk, group=16).load_state_dict(state)
    after = Cursor(walk, group=16, allow=("batch",))
    after.load_state_dict(state)
    assert sorted({*row(after, range(7, 9))}) == sorted({*row(before, range(7, 9))})
    wider = Cursor(Walk(size=100, lanes=16, per_lane=2, spans=4, seed=1), group=16, allow=("lanes",))
    wider.load_state_dict(state)
    assert sorted({*row(wider, range(7, 9))}) == sorted({*row(before, range(7, 9))})


def test_what_a_step_is_made_of_is_told_by_all_of_its_lanes():
    its = {"size": 100, "lanes": 4, "per_lane": 3, "levels": (50, 50)}
    cursor = Cursor(Walk(**its, stages=((0, 1, 1),)))
    other = Cursor(Walk(**its, stages=((0, 1, 1), (9, 1, 2))))
    again = Cursor(Walk(**its, stages=((0, 1, 1),)))
    assert [cursor.made_of(step) for step in range(20)] == [again.made_of(step) for step in range(20)]
    assert len({cursor.made_of(step) for step in range(20)}) == 20
    assert cursor.made_of(3) != other.made_of(3)
    assert cursor.made_of(3) != Cursor(Walk(**its, stages=((0, 1, 1),)), group=8).made_of(3)


def test_another_part_of_as_many_prompts_is_another_batch():
    # Found by reading: with ppo.gen_batch the walk has what is generated, so ppo.batch alone changed without a word.
    before = Cursor(WALK, trained=64)
    before.advance(6)
    state = before.state_dict()
    with pytest.raises(CheckpointRefused, match=r"64 of each step's samples were trained on and 32 are.*--allow batch"):
        Cursor(WALK, trained=32).load_state_dict(state)
    Cursor(WALK, trained=32, allow=("batch",)).load_state_dict(state)
    Cursor(WALK, trained=64).load_state_dict(state)
    Cursor(WALK, trained=32).load_state_dict({k: v for k, v in state.items() if k != "trained"})  # an earlier version's
    assert Cursor(WALK, trained=32).recipe() != Cursor(WALK, trained=64).recipe()
    assert "trained" not in Cursor(WALK).state_dict()


def test_as_many_prompts_in_groups_of_another_size_are_another_batch():
    # Found by reading: ppo.batch and ppo.group changed together leave the walk as it was, and nobody said a word.
    before = Cursor(WALK, group=4)
    before.advance(6)
    state = before.state_dict()
    with pytest.raises(CheckpointRefused, match=r"group was 4 and is 8.*--allow batch"):
        Cursor(WALK, group=8).load_state_dict(state)
    after = Cursor(WALK, group=8, allow=("batch",))
    after.load_state_dict(state)
    assert row(after, range(7, 9)) == row(before, range(7, 9))
    del state["group"]  # as an earlier version kept it: nothing is known
    Cursor(WALK, group=8).load_state_dict(state)


def test_another_number_of_epochs_needs_no_permission():
    from dataclasses import replace

    before = Cursor(replace(WALK, epochs=2))
    before.advance(3)
    after = resumed(replace(WALK, epochs=3), before)
    assert after.steps == 15


def test_with_another_batch_no_sample_is_repeated_or_left_out():
    from dataclasses import replace

    before = Cursor(WALK)
    used = row(before, range(7))
    before.advance(6)
    after = resumed(replace(WALK, lanes=2, per_lane=13), before, "lanes", "batch")
    samples = used + row(after, range(7, 20))
    assert len(set(samples)) == len(samples)
    for epoch in range(4):
        assert sorted(s.index for s in samples if s.epoch == epoch) == list(range(100))
    again = resumed(replace(WALK, lanes=2, per_lane=13), after)
    assert row(again, range(7, 9)) == row(after, range(7, 9))
    assert again.ids(3, 0, 1) == before.ids(3, 0, 1)  # what came before the joint is still known


def test_other_data_begin_at_their_own_beginning():
    from dataclasses import replace

    before = Cursor(WALK)
    before.advance(6)
    after = resumed(replace(WALK, name="new", size=40), before, "data")
    samples = row(after, range(7, 9))
    assert {s.epoch for s in samples} == {2}
    assert sorted(s.index for s in samples) == list(range(40))


def test_joining_on_is_pure_and_segments_survive_json():
    segments = (Segment(first=0, epoch=0, offset=0, walk=WALK),)
    assert join_on(segments, WALK, 5, ()) == segments
    assert Segment.from_json(segments[0].to_json()) == segments[0]


def test_a_billion_samples_cost_no_memory():
    cursor = Cursor(Walk(size=10**9, lanes=4, per_lane=8, seed=5))
    samples = list(islice(row(cursor, range(10**6, 10**6 + 2)), 64))
    assert len(set(samples)) == 64
    assert all(0 <= s.index < 10**9 for s in samples)
