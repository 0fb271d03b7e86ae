"""Which rows go into which update: an order of seed, step and lane alone, each row once an epoch, and padding for nothing."""

import random
from itertools import chain

import pytest
import torch

from elasticrl.ppo.batches import blocks, take, updates
from elasticrl.runtime.rng import Streams


def order(rows=12, size=4, count=3, epochs=2, *, seed=1, step=5, lane=2, unit=1):
    streams = Streams(seed=seed, step=step, lane=lane)
    return [found.tolist() for found in updates(rows, size, count, epochs, streams, unit=unit)]


def test_the_order_is_a_function_of_seed_step_and_lane_and_of_nothing_else():
    first = order()
    torch.manual_seed(99)
    random.seed(99)
    torch.randperm(7)
    assert order() == first
    others = [order(seed=2), order(step=6), order(lane=3)]
    assert first not in others
    assert len({str(found) for found in others}) == 3
    assert first[:3] != first[3:], "each epoch has an order of its own"


def test_another_number_of_updates_cuts_the_same_order():
    assert list(chain(*order(size=3, count=4))) == list(chain(*order())) == list(chain(*order(size=12, count=1)))


@pytest.mark.parametrize("rows", [12, 11, 8, 5, 4, 1, 0])
def test_a_lane_of_any_length_has_each_row_once_an_epoch_in_as_many_updates_as_the_others(rows):
    found = order(rows, epochs=3)
    assert len(found) == 9
    for epoch in range(3):
        made = found[3 * epoch : 3 * epoch + 3]
        assert sorted(chain(*made)) == list(range(rows))
        assert [len(update) for update in made] == [max(0, min(4, rows - 4 * i)) for i in range(3)]


@pytest.mark.parametrize("rows", [12, 6, 0])
def test_units_stay_together_and_are_shuffled(rows):
    for update in order(rows, unit=2):
        assert len(update) % 2 == 0
        assert all(
            first % 2 == 0 and second == first + 1 for first, second in zip(update[::2], update[1::2], strict=True)
        )
    assert rows < 12 or order(rows, unit=2)[:3] != order(rows, unit=1)[:3]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"rows": 13}, "13 rows do not fit into 3 updates of 4"),
        ({"size": 3, "count": 4, "unit": 2}, "3 rows of an update are not whole units of 2"),
        ({"rows": 11, "unit": 2}, "11 rows are not whole units of 2"),
    ],
)
def test_what_would_leave_a_row_out_is_refused(given, sentence):
    with pytest.raises(AssertionError, match=sentence):
        order(**given)


@pytest.mark.parametrize(("rows", "size", "count"), [(6, 3, 2), (6, 4, 2), (5, 4, 1), (2, 4, 3), (1, 1, 1), (0, 4, 2)])
def test_blocks_have_one_shape_and_hold_each_row_once(rows, size, count):
    index = torch.randperm(rows) + 10
    found = blocks(index, size, count)
    assert len(found) == max(count, -(-rows // size))
    assert {(len(place), len(real)) for place, real in found} == {(size, size)}
    assert torch.equal(torch.cat([place[real] for place, real in found]), index)
    padding = torch.cat([place[~real] for place, real in found])
    assert set(padding.tolist()) <= ({index[0].item()} if rows else {0}), "it repeats a row that is there"


def lane(rows, width=5):
    g = torch.Generator().manual_seed(rows)
    mask = torch.rand(rows, width, generator=g) < 0.6
    attention = torch.cat([torch.ones(rows, 3, dtype=torch.bool), mask], 1)
    return {"mask": mask, "attention": attention, "values": torch.rand(rows, width, generator=g)}


def test_the_blocks_of_uneven_lanes_count_all_tokens_of_an_update_once():
    """What a loss is divided by is counted from the orders; what it sums is what the blocks' masks let through."""
    lanes = [lane(rows) for rows in (8, 5, 1, 0)]
    for number in range(4):
        entries = told = 0
        for place, rows in enumerate(lanes):
            index = updates(len(rows["mask"]), 4, 2, 2, Streams(seed=3, lane=place))[number]
            entries += rows["mask"][index].sum().item()
            told += sum(take(rows, *block)["mask"].sum().item() for block in blocks(index, 3, 2))
        assert told == entries
        assert entries > 0


def test_a_block_has_its_rows_in_order_and_an_empty_lane_has_rows_that_a_model_can_read():
    rows = lane(6)
    found = take(rows, torch.tensor([4, 1, 4]), torch.tensor([True, True, False]))
    assert torch.equal(found["values"], rows["values"][[4, 1, 4]])
    assert torch.equal(found["mask"][:2], rows["mask"][[4, 1]])
    assert not found["mask"][2].any()
    [(index, real)] = blocks(torch.empty(0, dtype=torch.long), 3)
    empty = take(lane(0), index, real)
    assert {name: tuple(value.shape) for name, value in empty.items()} == {
        "mask": (3, 5), "attention": (3, 8), "values": (3, 5),
    }  # fmt: skip
    assert not empty["mask"].any()
    assert empty["attention"].all(), "a row that attends to nothing would be NaN"
