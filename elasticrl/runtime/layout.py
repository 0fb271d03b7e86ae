"""Which part of which parameter lies where, for every rank. Pure: no torch, so any rank knows all the others' share.

The idea: each parameter is a flat row of elements, and a rank's shard is one flat row of memory with pieces of them. All that
must come out the same for any world (norms, digests, files) speaks of elements of parameters, never of places in a shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from elasticrl.runtime.lanes import Fold, Node, cut

if TYPE_CHECKING:
    from collections.abc import Sequence

UNIT = 64  # elements; every parameter and shard begins at a multiple of it: cache lines and vector registers stay whole


def up(number: int, unit: int = UNIT) -> int:
    """The next multiple.

    >>> up(65), up(64)
    (128, 64)
    """
    return -(-number // unit) * unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements start <= i < stop of a flattened parameter, at `at` in a rank's shard.

    Example: Piece(name="fc.weight", shape=(33, 7), start=128, stop=231, at=64)
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    at: int

    @property
    def count(self) -> int:
        """How many elements."""
        return self.stop - self.start

    @property
    def there(self) -> slice:
        """Its place in the shard."""
        return slice(self.at, self.at + self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Every rank's shard.

    Example: Layout(size=128, pieces=((Piece(...),), (Piece(...),)))
    """

    size: int  # elements of a shard, the same for all ranks; what no piece covers is padding and stays zero
    pieces: tuple[tuple[Piece, ...], ...]  # by rank

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter, by name, sorted."""
        found = {piece.name: piece.shape for mine in self.pieces for piece in mine}
        return {name: found[name] for name in sorted(found)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters that travel together: name, shape and place of each in the bucket's flat row.

    Example: Bucket(params=(("fc.bias", (7,), 0), ("fc.weight", (7, 33), 64)), size=320)
    """

    params: tuple[tuple[str, tuple[int, ...], int], ...]
    size: int  # a multiple of UNIT


def buckets(params: Sequence[tuple[str, tuple[int, ...]]], elements: int) -> tuple[Bucket, ...]:
    """Parameters in the order given, in buckets of about `elements`. The same for any world."""
    found: list[Bucket] = []
    current: list[tuple[str, tuple[int, ...], int]] = []
    size = 0
    for name, shape in params:
        if current and size + prod(shape) > elements:
            found.append(Bucket(params=tuple(current), size=size))
            current, size = [], 0
        current.append((name, shape, size))
        size += up(prod(shape))
    return (*found, Bucket(params=tuple(current), size=size)) if current else tuple(found)


def striped(all_buckets: Sequence[Bucket], world: int) -> Layout:
    """Every bucket cut into `world` equal parts of whole units; a rank's shard is its part of each, one after the other."""
    parts = [up(bucket.size, UNIT * world) // world for bucket in all_buckets]
    ranks: list[tuple[Piece, ...]] = []
    for rank in range(world):
        mine: list[Piece] = []
        at = 0
        for bucket, part in zip(all_buckets, parts, strict=True):
            lo, hi = rank * part, (rank + 1) * part
            for name, shape, begin in bucket.params:
                start, stop = max(lo, begin), min(hi, begin + prod(shape))
                if start < stop:
                    piece = Piece(name=name, shape=shape, start=start - begin, stop=stop - begin, at=at + start - lo)
                    mine.append(piece)
            at += part
        ranks.append(tuple(mine))
    return Layout(size=sum(parts), pieces=tuple(ranks))


def blocks(start: int, stop: int) -> list[Node]:
    """The aligned power-of-two blocks that make up start <= i < stop, small ones at the edges: in the order in which halving
    a row of values, level by level, leaves them over at its left or right end. Each is a subtree of the tree over any number of
    elements.

    >>> blocks(3, 9)
    [Node(lo=3, hi=4), Node(lo=8, hi=9), Node(lo=4, hi=8)]
    """
    found: list[Node] = []
    size = 1
    while start < stop:
        if start & 1:
            found.append(Node(start * size, (start + 1) * size))
            start += 1
        if stop & 1 and start < stop:
            stop -= 1
            found.append(Node(stop * size, (stop + 1) * size))
        start, stop, size = start >> 1, stop >> 1, size << 1
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SumPlan:
    """How to finish, on any rank, sums over whole parameters from all ranks' blocks: additions to make, in order.

    Example: SumPlan(counts=(3, 1), adds=((0, 1), (2, 3), (0, 2)), roots=(0,))
    """

    counts: tuple[int, ...]  # how many blocks each rank sends
    adds: tuple[tuple[int, int], ...]  # values[left] += values[right], the ranks' values one after the other
    roots: tuple[int, ...]  # where each parameter's sum ends up, in the order of their names


def sum_plan(layout: Layout) -> SumPlan:
    """Fixed-tree sums over each parameter's elements, in whatever way these are spread over the ranks."""
    adds: list[tuple[int, int]] = []

    def add(left: int, right: int) -> int:
        adds.append((left, right))
        return left

    folds = {name: Fold[int](prod(shape), add) for name, shape in layout.shapes.items()}
    counts: list[int] = []
    place = 0
    for mine in layout.pieces:
        before = place
        for piece in mine:
            for block in blocks(piece.start, piece.stop):
                folds[piece.name].put(block, place)
                place += 1
        counts.append(place - before)
    return SumPlan(counts=tuple(counts), adds=tuple(adds), roots=tuple(fold.total() for fold in folds.values()))


def boxes(shape: Sequence[int], start: int, stop: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The rectangular blocks (offsets, sizes) that make up elements start <= i < stop of a row-major tensor, in order: what
    torch.distributed.checkpoint can name. At most two per dimension, less one.

    >>> boxes((4, 3), 2, 10)
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [((start,) * len(shape), (stop - start,) * len(shape))]
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row

    def inside(index: int, lo: int, hi: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return [((index, *offset), (1, *size)) for offset, size in boxes(shape[1:], lo, hi)]

    if first == last and (start > first * row or stop < (first + 1) * row):
        return inside(first, start - first * row, stop - first * row)
    head = inside(first, start - first * row, row) if start > first * row else []
    tail = inside(last, 0, stop - last * row) if stop < (last + 1) * row else []
    lo, hi = first + bool(head), last + 1 - bool(tail)
    body = [((lo,) + (0,) * (len(shape) - 1), (hi - lo, *shape[1:]))] if lo < hi else []
    return head + body + tail


__all__ = [
    "UNIT",
    "Bucket",
    "Layout",
    "Piece",
    "SumPlan",
    "blocks",
    "boxes",
    "buckets",
    "cut",
    "striped",
    "sum_plan",
    "up",
]
