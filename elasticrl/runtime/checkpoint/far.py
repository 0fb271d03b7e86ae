"""A checkpoint at a URL: of its data files only those blocks are read in which something lies that is wanted.

The one idea: each file has a place in memory that is as large as itself and empty. What is read comes there first, block by
block, each compared with its checksum; so the tensors over that memory are those of a file that was read whole.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from math import inf
from threading import Event
from typing import TYPE_CHECKING, Any, Final, TypeVar

from elasticrl.base.pauses import pause
from elasticrl.runtime.checkpoint.shelf import Problem
from elasticrl.runtime.vault.errors import CheckpointCorrupt
from elasticrl.runtime.vault.piece import ITEMSIZE, Box, Piece

if TYPE_CHECKING:
    from elasticrl.runtime.checkpoint.manifest import ShardTable
    from elasticrl.runtime.checkpoint.place import Url

REQUEST: Final = (
    16 << 20
)  # bytes that are asked for at once: a store takes some hundredths of a second before the first
AT_ONCE: Final = 8  # requests
LOOKS: Final = 2  # at what is not what was written: the first may have been hurt on its way
FIRST_S, MOST_S = 0.5, 10.0  # pauses before a store that has failed is asked again
SLICE_S: Final = 0.2  # between two looks whether somebody wants us elsewhere
_NORESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it from 3.13 on

_T = TypeVar("_T")
Span = tuple[int, int]
"""First byte, and the one after the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a store that fails is asked again, and what may end that sooner, by raising.

    Example: Patience(wait_s=600.0, check=lambda: flag.check("reading a checkpoint"))
    """

    wait_s: float = 0.0
    check: Callable[[], None] = lambda: None


class Absent(OSError):
    """A store has not, or not all of, what a manifest lists: of some stores that passes, as of one that has just come back.
    Only who has asked again for long enough takes it for damage, of which the message is the sentence.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(errno.ESTALE, sentence)


@dataclass(frozen=True, slots=True)
class _Range:
    """Neighbouring blocks of one file, for one request."""

    file: FarFile
    first: int
    stop: int  # the block after the last


class FarFile:
    """One data file, of which blocks come."""

    def __init__(self, place: Url, name: str, table: ShardTable) -> None:
        self.table = table = table.in_blocks()
        self.in_parts = True  # as far as anybody knows yet
        self._place, self._name = place, name
        self._there: set[int] = set()
        size = table.data.nbytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE  # what is not read takes no memory
        try:
            self.memory: Any = mmap.mmap(-1, size, flags=flags) if size else bytearray()
        except (OSError, ValueError, OverflowError) as error:
            why = f"has {size} bytes by its table, for which there is no room in memory ({error})"
            raise CheckpointCorrupt(self._sentence(why)) from error

    def lacking(self, spans: Iterable[Span]) -> Iterator[_Range]:
        """The requests for what is not here yet of these bytes."""
        size = self.table.block
        blocks = {at for start, stop in spans for at in range(start // size, -(-stop // size))} - self._there
        most, first, last = max(1, REQUEST // size), -1, -1
        for at in sorted(blocks):
            if first >= 0 and (at != last + 1 or at - first == most):
                yield _Range(self, first, last + 1)
                first = at
            first, last = (at if first < 0 else first), at
        if first >= 0:
            yield _Range(self, first, last + 1)

    def bring(self, first: int, stop: int) -> int:
        """These blocks into memory; the bytes that came. CheckpointCorrupt if they are not what was written."""
        if self._there.issuperset(range(first, stop)):
            return 0
        size, whole = self.table.block, self.table.data.nbytes
        start, end = first * size, min(stop * size, whole)
        came, why = 0, ""
        for _ in range(LOOKS):
            try:
                data = memoryview(self._place.part(self._name, self.table.data.name, start, end))
            except FileNotFoundError:
                raise Absent(self._sentence("is missing")) from None
            came += len(data)
            if len(data) == whole > end - start:
                self.in_parts = False  # all of it came, and is not asked for again
                first, stop, start, end = 0, len(self.table.sums), 0, whole
            if len(data) != end - start:
                there = f"of {end - start} bytes from byte {start} on {len(data)} are there"
                raise Absent(self._sentence(f"was cut off: {there}"))
            if not (why := self._damage(first, data)):
                self.memory[start:end] = data
                self._there.update(range(first, stop))
                return came
        raise CheckpointCorrupt(self._sentence(why))

    def _sentence(self, why: str) -> str:
        table = self.table
        return Problem(name=self._name, file=table.data.name, shard=table.shard, node=table.node, why=why).sentence

    def _damage(self, first: int, data: memoryview) -> str:
        size = self.table.block
        for at in range(0, len(data), size):
            number = first + at // size
            found, wanted = hashlib.sha256(data[at : at + size]).hexdigest(), self.table.sums[number]
            if found != wanted:
                end = min((number + 1) * size, self.table.data.nbytes)
                return (
                    f"was changed: block {number} (bytes {number * size} to {end}) has the sha256 {found[:12]}... instead of "
                    f"{wanted[:12]}..."
                )
        return ""


class Far:
    """The data files of one checkpoint, in the order of its shards."""

    def __init__(self, files: Sequence[FarFile], patience: Patience) -> None:
        self.read = 0  # bytes that came
        self._files = tuple(files)
        self._patience = patience
        self._rows = [(file, row) for file in files for row in file.table.rows]

    def bring(self, boxes: Iterable[tuple[int, Box]]) -> None:
        """Make these boxes of the pieces with these numbers readable. OSError where the store fails for too long."""
        wanted: dict[FarFile, list[Span]] = {}
        for number, box in boxes:
            file, row = self._rows[number]
            found = spans(box, row.piece, file.table.block)
            wanted.setdefault(file, []).extend((row.raw_at + start, row.raw_at + stop) for start, stop in found)
        ranges = [one for file, some in wanted.items() for one in file.lacking(some)]
        if not ranges:
            return
        self._get(ranges[:1], 1)  # alone: now we know whether this store gives parts
        self._get(ranges[1:], AT_ONCE if all(file.in_parts for file in self._files) else 1)

    def _get(self, ranges: Sequence[_Range], at_once: int) -> None:
        asks = [partial(one.file.bring, one.first, one.stop) for one in ranges]
        for _, came in answers(asks, self._patience, at_once=at_once):
            self.read += came


def answers(
    asks: Sequence[Callable[[], _T]], patience: Patience, *, at_once: int = AT_ONCE
) -> Iterator[tuple[int, _T]]:
    """What a store says to each, with its number, as they come. The first that fails for too long ends all, and so may
    `patience.check`, however long an answer takes.
    """
    over = Event()
    pool = ThreadPoolExecutor(at_once, thread_name_prefix="far")
    try:
        number = {pool.submit(_again, ask, patience, over): at for at, ask in enumerate(asks)}
        todo = set(number)
        while todo:
            done, todo = wait(todo, timeout=SLICE_S, return_when=FIRST_COMPLETED)
            for each in done:
                yield number[each], each.result()
            patience.check()
    finally:
        over.set()
        pool.shutdown(wait=False, cancel_futures=True)  # what was asked already has its deadline


def _again(ask: Callable[[], _T], patience: Patience, over: Event) -> _T:
    """What a store answers, which is asked again after each failure: until it has failed for too long, or it is `over`."""
    pause_s, failed_at = 0.0, inf
    while True:
        try:
            return ask()
        except FileNotFoundError:
            raise
        except OSError as error:
            failed_at = min(failed_at, time.monotonic())
            pause_s = pause(pause_s, 0.0, first_s=FIRST_S, most_s=MOST_S, steady_s=MOST_S)
            if time.monotonic() + pause_s > failed_at + patience.wait_s or over.wait(pause_s):
                if isinstance(error, Absent):
                    raise CheckpointCorrupt(error.strerror) from error
                raise


def spans(box: Box, piece: Piece, gap: int) -> list[Span]:
    """The bytes of a piece in which a box of its tensor lies. What is less than `gap` apart is one: it is read at once anyway.

    >>> spans(((2, 0), (2, 3)), Piece("w", "uint8", (8, 3), (0, 0), (8, 3)), gap=1)
    [(6, 12)]
    >>> spans(((0, 1), (3, 2)), Piece("w", "uint8", (3, 100), (0, 0), (3, 100)), gap=50)
    [(1, 3), (101, 103), (201, 203)]
    """
    found: list[Span] = [(0, ITEMSIZE[piece.dtype])]
    stride = ITEMSIZE[piece.dtype]
    for start, count, base, length in reversed([*zip(box[0], box[1], piece.offset, piece.lengths, strict=True)]):
        first = (start - base) * stride
        hull = found[0][0], found[-1][1]
        if len(found) == 1 and stride - (hull[1] - hull[0]) < gap:
            found = [(first + hull[0], first + (count - 1) * stride + hull[1])]
        else:
            found = [
                (first + at * stride + low, first + at * stride + high) for at in range(count) for low, high in found
            ]
        stride *= length
    return found
