"""Boxes: any range of a tensor, any sharding into any other."""

from itertools import pairwise, product
from math import prod

import pytest

from elasticrl.runtime.vault.piece import Piece, boxes, overlap, reads, share, starts, whole, within

SHAPES = [(), (1,), (7,), (4, 5), (3, 1, 4), (2, 3, 4), (5, 2, 1, 3)]


def elements(shape: tuple[int, ...], box: tuple[tuple[int, ...], tuple[int, ...]]) -> list[int]:
    """Row-major numbers of the elements in a box."""
    numbers = []
    for index in product(*(range(o, o + n) for o, n in zip(*box, strict=True))):
        flat = 0
        for size, at in zip(shape, index, strict=True):
            flat = flat * size + at
        numbers.append(flat)
    return numbers


@pytest.mark.parametrize("shape", SHAPES)
def test_every_range_is_its_boxes_in_order(shape: tuple[int, ...]):
    for start in range(prod(shape) + 1):
        for stop in range(start, prod(shape) + 1):
            found = boxes(shape, start, stop)
            assert [n for box in found for n in elements(shape, box)] == list(range(start, stop))
            assert len(found) <= max(2 * len(shape) - 1, 1)


@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 1000, 4096])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_shares_tile_a_tensor_at_aligned_boundaries(numel: int, world: int):
    parts = [share(numel, rank, world) for rank in range(world)]
    assert parts[0][0] == 0
    assert parts[-1][1] == numel
    assert all(a[1] == b[0] for a, b in pairwise(parts))
    assert all(start % 64 == 0 or start == numel for start, _ in parts)


def cut(name: str, shape: tuple[int, ...], rank: int, world: int, align: int) -> list[Piece]:
    low, high = share(prod(shape), rank, world, align=align)
    return [Piece(name, "float32", shape, offset, lengths) for offset, lengths in boxes(shape, low, high)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("old", "new"), list(product(range(1, 5), repeat=2)))
def test_any_world_reads_what_any_other_wrote(shape: tuple[int, ...], old: int, new: int):
    sources = [piece for rank in range(old) for piece in cut("w", shape, rank, old, 2)]
    for rank in range(new):
        targets = cut("w", shape, rank, new, 2)
        plan = reads(targets, sources)
        assert not plan.missing
        for number, target in enumerate(targets):
            got = sorted(n for r in plan.reads if r.target == number for n in elements(shape, r.box))
            assert got == sorted(elements(shape, target.box))  # each element once


def test_a_missing_source_is_counted():
    sources = cut("w", (100,), 0, 2, 1)
    plan = reads([whole("w", "float32", (100,)), whole("v", "float32", (3,))], sources)
    assert plan.missing == ((0, 50), (1, 3))


def test_replicas_are_read_once_and_the_first_is_preferred():
    one = whole("w", "float32", (4, 4))
    plan = reads([one], [one, one])
    assert [r.source for r in plan.reads] == [0]


def test_a_tensor_of_another_shape_or_dtype_is_not_read():
    target = whole("w", "float32", (4, 4))
    assert reads([target], [whole("w", "float32", (2, 8))]).missing == ((0, 16),)
    assert reads([target], [whole("w", "bfloat16", (4, 4))]).missing == ((0, 16),)


def test_a_box_becomes_slices_of_the_piece_that_holds_it():
    piece = Piece("w", "float32", (8, 8), (2, 0), (4, 8))
    box = overlap(piece.box, ((3, 4), (9, 4)))
    assert box == ((3, 4), (3, 4))
    assert within(box, piece) == (slice(1, 4), slice(4, 8))


def test_pieces_start_at_64_bytes():
    pieces = [
        whole("a", "bfloat16", (3,)),
        whole("b", "float64", (9,)),
        whole("c", "bool", ()),
        whole("d", "bool", (0,)),
    ]
    assert starts(pieces) == (0, 64, 192, 256, 256)


@pytest.mark.parametrize(
    "row",
    [
        ["w", "float32", [4], [0]],
        ["w", "float99", [4], [0], [4]],
        ["w", "float32", [4], [1], [4]],
        ["w", "float32", [4], [-1], [2]],
        ["w", "float32", [4], [0, 0], [4]],
        [3, "float32", [4], [0], [4]],
        ["w", "float32", "4", [0], [4]],
    ],
)
def test_a_malformed_piece_is_refused(row: list[object]):
    with pytest.raises(ValueError, match="piece"):
        Piece.from_json(row)


def test_a_piece_survives_json():
    piece = Piece("w", "float32", (8, 8), (2, 0), (4, 8))
    assert Piece.from_json(piece.to_json()) == piece
