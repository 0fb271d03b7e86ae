"""Which rows go into which update and pass: an order of seed, step and lane alone, each row once an epoch, cut to size."""

import random
from dataclasses import replace
from itertools import chain

import pytest
import torch

from elasticrl.ppo.batches import blocks, lengths, nothing, take, updates
from elasticrl.ppo.roles import response
from elasticrl.ppo.sizes import Sizes, width_of
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


SIZES = Sizes(tokens=200, sample=96, answer=40)


def lane(rows, seed=0):
    """Samples of all lengths: prompts padded on the left, answers on the right, as a rollout leaves them."""
    g = torch.Generator().manual_seed(100 * rows + seed)
    before, after = SIZES.prompt, SIZES.answer
    prompts, answers = (
        torch.randint(1, before + 1, (rows, 1), generator=g),
        torch.randint(0, after + 1, (rows, 1), generator=g),
    )
    seen, mask = (
        torch.arange(before).expand(rows, -1) >= before - prompts,
        torch.arange(after).expand(rows, -1) < answers,
    )
    attention = torch.cat([seen, mask], 1)
    tokens = torch.where(attention, torch.randint(1, 10, attention.shape, generator=g), 0)
    return {"tokens": tokens, "attention": attention, "mask": mask, "values": torch.rand(mask.shape, generator=g)}


@pytest.mark.parametrize("unit", [1, 2])
@pytest.mark.parametrize("rows", [0, 2, 6, 8, 32])
def test_blocks_hold_each_row_once_within_their_tokens_the_longest_first(rows, unit):
    sizes = replace(SIZES, unit=unit)
    index, all_rows = torch.randperm(rows, generator=torch.Generator().manual_seed(rows)), lane(rows)
    index = index if unit == 1 else torch.arange(rows)
    found = blocks(index, all_rows, sizes)
    total, answer = lengths(all_rows)
    assert sorted(torch.cat([block.index for block in found]).tolist()) == list(range(rows))
    assert 1 <= len(found) <= sizes.parts(rows)
    assert all(block.places <= sizes.tokens or len(block.index) == unit for block in found)
    assert [block.width for block in found] == sorted((block.width for block in found), reverse=True)
    for block in found:
        assert (total[block.index] <= block.width).all()
        assert (answer[block.index] <= block.answer).all()
        assert unit == 1 or torch.equal(block.index[::2] + 1, block.index[1::2])
    assert blocks(index, all_rows, sizes)[0].index.tolist() == found[0].index.tolist()


def test_long_rows_share_passes_with_long_ones_and_little_is_padding():
    rows = lane(64)
    total = lengths(rows)[0].sum().item()
    sizes = replace(SIZES, tokens=600)
    places = sum(block.places for block in blocks(torch.arange(64), rows, sizes))
    assert total < places < 1.3 * total < 0.8 * rows["attention"].numel()


def test_a_device_that_is_quick_with_short_passes_gets_more_of_them_and_less_padding():
    rows = lane(64)
    total = lengths(rows)[0].sum().item()
    cut = [blocks(torch.arange(64), rows, replace(SIZES, tokens=600, fine=fine)) for fine in (False, True)]
    assert len(cut[0]) < len(cut[1]) <= replace(SIZES, tokens=600, fine=True).parts(64)
    assert sum(block.places for block in cut[1]) < 1.06 * total
    assert all(sum(block.tokens for block in its) == total for its in cut)


def test_widths_are_few_and_none_is_far_from_the_length():
    widths = {width_of(length, 4096) for length in range(1, 4097)}
    assert len(widths) == 56
    for length in range(1, 4097):
        assert length <= width_of(length, 4096) <= max(length + 7, 1.125 * length)
    assert width_of(95, 100) == 96
    assert width_of(99, 100) == 100, "never wider than a sample can be"


def test_the_blocks_of_uneven_lanes_count_all_tokens_of_an_update_once():
    """What a loss is divided by is counted from the orders; what it sums is what the blocks' masks let through."""
    lanes = [lane(rows) for rows in (8, 5, 1, 0)]
    for number in range(4):
        entries = told = 0
        for place, rows in enumerate(lanes):
            index = updates(len(rows["mask"]), 4, 2, 2, Streams(seed=3, lane=place))[number]
            entries += rows["mask"][index].sum().item()
            told += sum(take(rows, block)["mask"].sum().item() for block in blocks(index, rows, SIZES))
        assert told == entries
        assert entries > 0


def test_a_block_s_rows_have_no_gap_and_keep_what_belongs_to_each_token():
    rows = lane(16)
    for block in blocks(torch.arange(16), rows, SIZES):
        found = take(rows, block)
        assert found["tokens"].shape == found["attention"].shape == (len(block.index), block.width)
        assert found["mask"].shape == found["values"].shape == (len(block.index), block.answer)
        for i, row in enumerate(block.index.tolist()):
            real = rows["tokens"][row][rows["attention"][row]]
            assert torch.equal(found["tokens"][i, : len(real)], real)
            assert found["attention"][i].tolist() == [place < len(real) for place in range(block.width)]
            said = rows["tokens"][row, SIZES.prompt :][rows["mask"][row]]
            assert torch.equal(response(found)[i][found["mask"][i]], said)
            assert torch.equal(found["values"][i], rows["values"][row, : block.answer])


@pytest.mark.parametrize("rows", [0, 3])
def test_a_pass_of_nothing_has_a_row_that_a_model_can_read_and_that_counts_for_nothing(rows):
    found = take(lane(rows), nothing(SIZES))
    assert {name: tuple(value.shape) for name, value in found.items()} == {
        "tokens": (1, 8), "attention": (1, 8), "mask": (1, 8), "values": (1, 8), "start": (1,),
    }  # fmt: skip
    assert not found["mask"].any()
    assert found["attention"].all()
    assert [len(block.index) for block in blocks(torch.empty(0, dtype=torch.long), lane(0), SIZES)] == [0]
