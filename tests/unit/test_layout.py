"""Layouts: whoever owns which elements, the sums over them come out the same."""

import random
from itertools import pairwise
from math import prod

import pytest

from elasticrl.runtime.lanes import Fold, Node
from elasticrl.runtime.layout import UNIT, Layout, Piece, blocks, buckets, halving, striped, sum_plan, up

PARAMS = [
    ("a.weight", (37, 13)),
    ("b.weight", (64, 8)),
    ("b.bias", (7,)),
    ("c", ()),
    ("d.weight", (130, 3)),
    ("e", (1, 1)),
]


def chunked(world: int) -> Layout:
    """As FSDP2 cuts: equal rows of the first dimension, packed without any alignment."""
    ranks: list[list[Piece]] = [[] for _ in range(world)]
    at = 0
    for name, shape in PARAMS:
        if not shape:
            continue
        height, row = -(-shape[0] // world), prod(shape[1:])
        for rank in range(world):
            start, stop = min(rank * height, shape[0]) * row, min((rank + 1) * height, shape[0]) * row
            if start < stop:
                ranks[rank].append(Piece(name=name, shape=shape, start=start, stop=stop, at=at))
        at += height * row
    return Layout(size=up(at), pieces=tuple(tuple(mine) for mine in ranks))


def stripes(world: int, elements: int = 600) -> Layout:
    return striped(buckets(PARAMS, elements), world)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("elements", [1, 600, 10**6])
def test_stripes_hold_every_element_once_at_aligned_places(world: int, elements: int):
    layout = stripes(world, elements)
    seen: dict[str, list[int]] = {}
    for mine in layout.pieces:
        for piece in mine:
            seen.setdefault(piece.name, []).extend(range(piece.start, piece.stop))
            assert piece.at % UNIT == 0
            assert piece.start % UNIT == 0
            assert piece.there.stop <= layout.size
        for a, b in pairwise(sorted(mine, key=lambda piece: piece.at)):
            assert a.there.stop <= b.at
    assert {name: sorted(found) for name, found in seen.items()} == {n: list(range(prod(s))) for n, s in PARAMS}


def test_buckets_do_not_depend_on_the_world_and_keep_the_order():
    found = buckets(PARAMS, 600)
    assert [name for bucket in found for name, _, _ in bucket.params] == [name for name, _ in PARAMS]
    assert len(found) > 2
    assert all(begin % UNIT == 0 for bucket in found for _, _, begin in bucket.params)


def block_sums(layout: Layout, rank: int, values: dict[str, list[float]]) -> list[float]:
    """What `Shard.squares` does, in plain Python and for plain sums: follows the halving's instructions."""
    memory = [0.0] * layout.size
    for piece in layout.pieces[rank]:
        memory[piece.there] = values[piece.name][piece.start : piece.stop]
    plan = halving(layout.pieces[rank], layout.size)
    row = [memory[i] for part in plan.bodies for i in part]
    for _ in range(UNIT.bit_length() - 1):
        row = [left + right for left, right in zip(row[::2], row[1::2], strict=True)]
    found: list[float] = []
    for level in plan.levels:
        found += [row[place] for place in level.done]
        row = [row[place] for part in level.go_on for place in part]
        row = [left + right for left, right in zip(row[::2], row[1::2], strict=True)]
    assert not row
    for edge in plan.edges:
        for block in blocks(edge.start, edge.stop):
            part = memory[edge.at + block.lo - edge.start : edge.at + block.hi - edge.start]
            while len(part) > 1:
                part = [left + right for left, right in zip(part[::2], part[1::2], strict=True)]
            found += part
    assert len(found) == len(plan.order)
    return found


def totals(layout: Layout, values: dict[str, list[float]]) -> dict[str, float]:
    plan = sum_plan(layout)
    parts = [block_sums(layout, rank, values) for rank in range(len(layout.pieces))]
    assert tuple(map(len, parts)) == plan.counts
    row = [value for part in parts for value in part]
    for left, right in plan.adds:
        row[left] += row[right]
    return dict(zip(layout.shapes, [row[root] for root in plan.roots], strict=True))


def test_sums_over_parameters_have_the_same_bits_for_every_world_and_either_way_of_cutting():
    chance = random.Random(5)
    values = {
        name: [chance.uniform(0, 1) * 10.0 ** chance.randrange(-9, 9) for _ in range(prod(shape))]
        for name, shape in PARAMS
    }
    expected = totals(stripes(1), values)
    for world in (2, 3, 4, 7):
        for elements in (1, 300, 10**6):
            assert totals(stripes(world, elements), values) == expected
    del expected["c"]  # FSDP2 refuses scalars
    for world in (1, 2, 3, 4, 7):
        assert totals(chunked(world), values) == expected


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 130, 191, 1000])
def test_blocks_are_subtrees_of_the_tree_over_any_number_of_elements(count: int):
    chance = random.Random(count)
    for _ in range(10):
        edges = sorted({0, count, *(chance.randrange(count + 1) for _ in range(3))})
        fold = Fold[None](count, lambda _left, _right: None)
        for start, stop in pairwise(edges):
            for block in blocks(start, stop):
                fold.put(block, None)
        assert list(fold.parts) == [Node(0, count)]
