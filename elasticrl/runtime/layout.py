"""Which part of which parameter lies where, for every rank. Pure: no torch, so any rank knows all the others' share.

The idea: each parameter is a flat row of elements, and a rank's shard is one flat row of memory with pieces of them. All that
must come out the same for any world (norms, digests, files) speaks of elements of parameters, never of places in a shard.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from elasticrl.runtime.lanes import Fold, Node

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
    def size(self) -> int:
        """Of the whole parameter."""
        return prod(self.shape)

    @property
    def there(self) -> slice:
        """Its place in the shard."""
        return slice(self.at, self.at + self.count)

    def part(self, start: int, stop: int) -> Piece:
        """Elements start <= i < stop of it."""
        return replace(self, start=start, stop=stop, at=self.at + start - self.start)


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

    def gaps(self, size: int) -> Iterator[slice]:
        """Of so much memory what no parameter lies in.

        >>> list(Bucket(params=(("a", (3, 2), 0), ("b", (5,), 8)), size=13).gaps(16))
        [slice(6, 8, None), slice(13, 16, None)]
        """
        at = 0
        for _, shape, begin in self.params:
            if at < begin:
                yield slice(at, begin)
            at = begin + prod(shape)
        if at < size:
            yield slice(at, size)


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


def common(pieces: Sequence[Piece], others: Sequence[Piece]) -> tuple[list[tuple[Piece, Piece]], list[Piece]]:
    """What both have, as parts of the ones and of the others, by name and place; and what the first have alone. Neither has an
    element twice.
    """
    there: dict[str, list[Piece]] = {}
    for other in sorted(others, key=lambda other: other.start):
        there.setdefault(other.name, []).append(other)
    starts = {name: [other.start for other in found] for name, found in there.items()}
    both: list[tuple[Piece, Piece]] = []
    alone: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: (piece.name, piece.start)):
        at, found = piece.start, there.get(piece.name, [])
        for other in found[max(0, bisect_right(starts.get(piece.name, ()), at) - 1) :]:
            start, stop = max(at, other.start), min(piece.stop, other.stop)
            if other.start >= piece.stop:
                break
            if start < stop:
                alone += [piece.part(at, start)] if at < start else []
                both.append((piece.part(start, stop), other.part(start, stop)))
                at = stop
        alone += [piece.part(at, piece.stop)] if at < piece.stop else []
    return both, alone


class Edge(NamedTuple):
    """Elements start <= i < stop of a parameter, at `at` in the shard, that fill no whole unit."""

    name: str
    start: int
    stop: int
    at: int

    @property
    def there(self) -> slice:
        """Its place in the shard."""
        return slice(self.at, self.at + self.stop - self.start)


class Level(NamedTuple):
    """One halving: of the present row of values, these are done, and these are added in pairs. Places in the row."""

    done: tuple[int, ...]
    go_on: tuple[range, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Halving:
    """How a rank adds up the values of its pieces, as far as it can: units of 64 elements first, then pair by pair, all pieces
    at once. What has no neighbour here is a block that other ranks will finish.

    Every block is a subtree of the tree over the parameter's elements, so it does not matter who owned what.
    """

    bodies: tuple[range, ...]  # whole units, as places in the shard
    levels: tuple[Level, ...]
    edges: tuple[Edge, ...]
    order: tuple[tuple[str, Node], ...]  # which blocks come out, in order: of each level, then of the edges


def halving(pieces: Sequence[Piece], room: int) -> Halving:
    """For one rank's pieces in a shard of `room` elements. A parameter's last unit counts as whole if it is padded to one:
    the zeros change no bit.
    """
    bodies: list[range] = []
    edges: list[Edge] = []
    spans: list[_Span] = []
    ends = [*sorted(piece.at for piece in pieces), room]
    for piece in pieces:
        padded = ends[bisect_right(ends, piece.at)] - piece.at >= up(piece.stop) - piece.start
        stop = up(piece.stop) if padded and piece.stop == piece.size else piece.stop
        lo = min(up(piece.start), piece.stop)
        hi = max(lo, stop - stop % UNIT) if lo < piece.stop else lo
        if lo < hi:
            bodies.append(range(piece.at + lo - piece.start, piece.at + hi - piece.start))
            spans.append(_Span(name=piece.name, size=piece.size, start=lo // UNIT, stop=hi // UNIT))
        for start, end in ((piece.start, lo), (hi, piece.stop)):
            if start < end:
                edges.append(Edge(name=piece.name, start=start, stop=end, at=piece.at + start - piece.start))
    levels: list[Level] = []
    order: list[tuple[str, Node]] = []
    width = UNIT
    while spans:
        level, found = _level(spans)
        levels.append(level)
        order += [(name, Node(n * width, min((n + 1) * width, size))) for name, size, n, _ in found]
        spans = [span._replace(start=up(span.start, 2) // 2, stop=span.stop // 2) for span in spans]
        spans = [span for span in spans if span.start < span.stop]
        width *= 2
    order += [(edge.name, block) for edge in edges for block in blocks(edge.start, edge.stop)]
    return Halving(bodies=tuple(bodies), levels=tuple(levels), edges=tuple(edges), order=tuple(order))


class _Span(NamedTuple):
    """Neighbouring blocks of one parameter at one level: their numbers."""

    name: str
    size: int  # of the parameter
    start: int
    stop: int


def _level(spans: Sequence[_Span]) -> tuple[Level, list[_Span]]:
    """One halving, and the blocks that are done with."""
    done: list[int] = []
    go_on: list[range] = []
    found: list[_Span] = []
    at = 0
    for span in spans:
        lone, lo, hi = _pairs(span.start, span.stop)
        for number in lone:
            done.append(at + number - span.start)
            found.append(span._replace(start=number, stop=number + 1))
        if lo < hi:
            go_on.append(range(at + lo - span.start, at + hi - span.start))
        at += span.stop - span.start
    return Level(done=tuple(done), go_on=tuple(go_on)), found


def _pairs(start: int, stop: int) -> tuple[list[int], int, int]:
    """Of blocks numbered start <= n < stop: those without their neighbour, and the range of those that have it."""
    lo, hi = up(start, 2), stop - stop % 2
    lone = ([start] if start < lo and start < stop else []) + ([hi] if lo <= hi < stop else [])
    return lone, lo, hi


def blocks(start: int, stop: int) -> list[Node]:
    """The aligned power-of-two blocks that make up start <= i < stop, smallest first: what halving a row leaves over.

    >>> blocks(3, 9)
    [Node(lo=3, hi=4), Node(lo=8, hi=9), Node(lo=4, hi=8)]
    """
    found: list[Node] = []
    size = 1
    while start < stop:
        lone, lo, hi = _pairs(start, stop)
        found += [Node(n * size, (n + 1) * size) for n in lone]
        start, stop, size = lo // 2, hi // 2, size * 2
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
        order = halving(mine, layout.size).order
        for name, block in order:
            folds[name].put(block, place)
            place += 1
        counts.append(len(order))
    return SumPlan(counts=tuple(counts), adds=tuple(adds), roots=tuple(fold.total() for fold in folds.values()))
