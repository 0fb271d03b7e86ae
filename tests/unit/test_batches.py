"""A loop over batches: any world sees the same samples, a restored one goes on, and an exhausted one is no success."""

from collections.abc import Iterator
from itertools import pairwise

import pytest

from elasticrl.runtime.data.batches import Batches
from elasticrl.runtime.data.cursor import Cursor, Walk
from elasticrl.runtime.data.loader import Loader, StreamLoader
from elasticrl.runtime.vault.errors import DataError

WALK = Walk(
    name="d", size=50, lanes=4, per_lane=3, seed=1, epochs=2
)  # 8 whole steps, the epoch's edge within the fifth


@pytest.fixture
def loader() -> Iterator[Loader]:
    made = Loader(list(range(50)), Cursor(WALK))
    yield made
    made.close()


def everything(loader: Loader, world: int, *, first: int = 0) -> list[dict[int, tuple[int, ...]]]:
    """What all ranks of a world see, step by step."""
    ends = [rank * WALK.lanes // world for rank in range(world + 1)]
    ranks = []
    for low, high in pairwise(ends):
        batches = Batches(loader, lambda lanes=range(low, high): lanes, steps=8)
        batches.load_state_dict({"step": first})
        ranks.append([{lane: tuple(batch.data) for lane, batch in found.items()} for found in batches])
    return [{lane: data for rank in ranks for lane, data in rank[step].items()} for step in range(8 - first)]


def test_every_world_sees_the_same_and_each_sample_once_an_epoch(loader: Loader):
    alone = everything(loader, 1)
    assert len(alone) == 8
    for world in (2, 3, 4):
        assert everything(loader, world) == alone
    row = [sample for step in alone for lane in sorted(step) for sample in step[lane]]
    assert sorted(row[:50]) == list(range(50))


def test_a_restored_one_goes_on_in_another_world(loader: Loader):
    alone = everything(loader, 1)
    batches = Batches(loader, lambda: range(4), steps=8)
    for number, _ in enumerate(batches, 1):
        if number == 5:
            state = batches.state_dict()
            break
    assert state == {"step": 5}
    assert everything(loader, 3, first=state["step"]) == alone[5:]
    batches.load_state_dict(state)
    assert len(batches) == 3


def test_lanes_that_are_dealt_anew_are_followed(loader: Loader):
    carried = [range(2)]
    seen = []
    for found in Batches(loader, lambda: carried[0], steps=4):
        seen.append(sorted(found))
        carried[0] = range(2, 4) if len(seen) == 2 else carried[0]
    assert seen == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_an_exhausted_one_does_not_look_like_a_finished_one(loader: Loader):
    batches = Batches(loader, lambda: range(4), steps=8)
    assert len(list(batches)) == 8
    with pytest.raises(DataError, match="All 8 steps of the data have been used"):
        iter(batches)
    with pytest.raises(DataError, match="look finished"):
        for _ in batches:
            pass


def test_a_stream_has_no_length_and_goes_over_its_edges():
    loader = StreamLoader(list(range(10)), Walk(name="s", lanes=2, per_lane=2, shuffle=False))
    batches = Batches(loader, lambda: range(2))
    with pytest.raises(TypeError, match="no end"):
        len(batches)
    found = [[*step[0].data, *step[1].data] for step, _ in zip(batches, range(5), strict=False)]
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [2, 3, 4, 5], [6, 7, 8, 9]]
    loader.close()
