"""Which part of which tensor some bytes are: the arithmetic of sharding, without any tensor library.

The one idea: every shard is a list of boxes of named tensors, and any range of a tensor's elements is a few boxes (`boxes`).
So a shard written by rank 2 of 3 can be read by rank 0 of 4: intersect boxes (`reads`). The world size never matters.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

ITEMSIZE: Mapping[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4,
    "int64": 8, "uint64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Bytes per element, by torch's name of the dtype."""

ALIGN = 64  # elements at shard boundaries, bytes at the start of each piece in a file

MOST = 1 << 63  # elements or bytes: no file has a place beyond, and no tensor library a number

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and lengths of an n-dimensional block of a tensor."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a named tensor. Example: Piece("model.w", "float32", (8, 4), (2, 0), (3, 4)), rows 2 to 4 of an 8 x 4 tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return prod(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes in the box."""
        return self.numel * ITEMSIZE[self.dtype]

    @property
    def box(self) -> Box:
        """Where it lies."""
        return self.offset, self.lengths

    def to_json(self) -> list[object]:
        """One row of a table."""
        return [self.name, self.dtype, list(self.shape), list(self.offset), list(self.lengths)]

    @classmethod
    def from_json(cls, row: Sequence[object]) -> "Piece":
        """The reverse of `to_json`; a malformed row raises ValueError."""
        name, dtype, *boxes = row
        if not (isinstance(name, str) and isinstance(dtype, str) and dtype in ITEMSIZE and len(boxes) == 3):
            raise ValueError(f"not a piece: {row!r}")
        dims: list[tuple[int, ...]] = []
        for numbers in boxes:
            if not isinstance(numbers, list) or not all(isinstance(n, int) and 0 <= n < MOST for n in numbers):
                raise ValueError(f"not a piece: {row!r}")
            dims.append(tuple(numbers))
        shape, offset, lengths = dims
        if not len(shape) == len(offset) == len(lengths) or any(
            o + n > s for s, o, n in zip(shape, offset, lengths, strict=True)
        ):
            raise ValueError(f"a piece outside its tensor: {row!r}")
        # Also of what is empty: torch has a stride for each of its other dimensions.
        if prod(max(n, 1) for n in shape) * ITEMSIZE[dtype] >= MOST:
            raise ValueError(f"a piece of more than there can be: {row!r}")
        return cls(name, dtype, shape, offset, lengths)


def whole(name: str, dtype: str, shape: tuple[int, ...]) -> Piece:
    """The piece that is the whole tensor."""
    return Piece(name, dtype, shape, (0,) * len(shape), shape)


def boxes(shape: tuple[int, ...], start: int, stop: int) -> tuple[Box, ...]:
    """The elements `start` to `stop` (row by row) as boxes, in order; each is contiguous in a row-major tensor.

    >>> boxes((4, 5), 3, 17)
    (((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 2)))
    """
    if start >= stop:
        return ()
    if not shape:
        return (((), ()),)
    if len(shape) == 1:
        return (((start,), (stop - start,)),)
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row

    def within(index: int, low: int, high: int) -> tuple[Box, ...]:
        return tuple(((index, *offset), (1, *lengths)) for offset, lengths in boxes(shape[1:], low, high))

    if first == last:
        if stop - start == row:
            return (((first, *(0,) * (len(shape) - 1)), (1, *shape[1:])),)
        return within(first, start - first * row, stop - first * row)
    head: tuple[Box, ...] = ()
    tail: tuple[Box, ...] = ()
    if start % row:
        head = within(first, start % row, row)
        first += 1
    if stop % row:
        tail = within(last, 0, stop % row)
        last -= 1
    middle: tuple[Box, ...] = ()
    if first <= last:
        middle = (((first, *(0,) * (len(shape) - 1)), (last - first + 1, *shape[1:])),)
    return head + middle + tail


def share(numel: int, rank: int, world: int, *, align: int = ALIGN) -> tuple[int, int]:
    """The elements that `rank` of `world` keeps of a tensor that all ranks have; boundaries are multiples of `align`.

    >>> [share(300, rank, 3) for rank in range(3)]
    [(0, 128), (128, 256), (256, 300)]
    """
    chunk = -(-numel // (world * align)) * align
    return min(rank * chunk, numel), min((rank + 1) * chunk, numel)


def overlap(a: Box, b: Box) -> Box | None:
    """The common part of two boxes of one tensor, or None."""
    offset = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    stop = tuple(min(x + n, y + m) for x, n, y, m in zip(a[0], a[1], b[0], b[1], strict=True))
    if any(low >= high for low, high in zip(offset, stop, strict=True)):
        return None
    return offset, tuple(high - low for low, high in zip(offset, stop, strict=True))


@dataclass(frozen=True, slots=True)
class Read:
    """Copy `box` of the tensor from source number `source` into target number `target`."""

    target: int
    source: int
    box: Box


@dataclass(frozen=True, slots=True)
class Reads:
    """How targets are put together, and what is missing: (target, elements that no source has)."""

    reads: tuple[Read, ...] = ()
    missing: tuple[tuple[int, int], ...] = field(default=())


def reads(targets: Sequence[Piece], sources: Sequence[Piece]) -> Reads:
    """Which box of which source fills which target. Earlier sources are preferred, so list the nearest ones first.

    Sources may repeat a box (replicas) but not overlap in part: pieces of one version are cut by one rule.
    """
    by_name: dict[str, list[int]] = {}
    for number, source in enumerate(sources):
        by_name.setdefault(source.name, []).append(number)
    found: list[Read] = []
    missing: list[tuple[int, int]] = []
    for number, target in enumerate(targets):
        left = target.numel
        taken: list[Box] = []
        for candidate in by_name.get(target.name, ()) if left else ():
            source = sources[candidate]
            if source.dtype != target.dtype or source.shape != target.shape:
                continue
            box = overlap(target.box, source.box)
            if box is None or any(overlap(box, other) for other in taken):
                continue
            taken.append(box)
            found.append(Read(number, candidate, box))
            left -= prod(box[1])
            if left == 0:
                break
        if left:
            missing.append((number, left))
    return Reads(tuple(found), tuple(missing))


def within(box: Box, piece: Piece) -> tuple[slice, ...]:
    """The box as slices of an array that holds `piece`."""
    return tuple(
        slice(start - base, start - base + length)
        for start, length, base in zip(box[0], box[1], piece.offset, strict=True)
    )


def starts(pieces: Iterable[Piece]) -> tuple[int, ...]:
    """Where each piece starts in a file that holds them one after another, aligned; the last number is the total."""
    at = [0]
    for piece in pieces:
        at.append(at[-1] + -(-piece.nbytes // ALIGN) * ALIGN)
    return tuple(at)
