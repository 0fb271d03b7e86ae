"""The workers' logs as evidence while they are written.

The one idea: `look` is called now and then and never blocks: it reads what each file has gained, up to a bound, and hands it to
that file's parser; of a file that is silent, as most are, it asks the size and nothing else. A parser keeps the last lines back
for those that may follow; after a moment of silence they are all there is. Log rotation renames a file: the rest of the old one
is read before the new one is begun.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Final

from elasticrl.base.regular import regular_handle
from elasticrl.base.value import dataclass
from elasticrl.contract.evidence import Evidence

if TYPE_CHECKING:  # a daemon follows its workers' logs from its start, and has seldom anything to read that soon
    from elasticrl.diagnose.logs import Parser

SILENCE_S: Final = 0.2  # after which the last lines are not waited for any longer
BOUND: Final = 4 << 20  # bytes of one file in one look: 40 ms of work
PIECE: Final = 1 << 16  # bytes that are read at once
MANY: Final = (
    200  # facts of one file in one look. Of a worker that prints faults without end only the newest are read then:
)
# four megabytes of them take seconds, in which this node's daemon would be silent, and be taken for dead


@dataclass(slots=True)
class Growing:
    """A file that somebody writes to its end, and may rename to begin anew. Example: Growing(Path("rank_0.log")).gained()"""

    path: Path
    stream: FileIO | None = None
    identity: tuple[int, int] = (0, 0)  # of the open file: its path may name another one by now
    read: int = 0  # bytes of it

    def open(self, *, begin: bool) -> None:
        """From its beginning, or from where it ends now. One that is not there yet will be read from its beginning."""
        try:
            self.stream = FileIO(regular_handle(self.path))
        except OSError:
            return
        self.identity = _identity(os.fstat(self.stream.fileno()))
        self.read = 0 if begin else self.stream.seek(0, os.SEEK_END)

    def gained(self) -> bytes:
        """What it has gained since it was last asked, up to a bound."""
        if self.stream is None:
            self.open(begin=True)
            if self.stream is None:
                return b""
        try:
            there = os.stat(self.path)  # noqa: PTH116 - five times a second for each worker
        except OSError:
            there = None  # renamed, and there is no new one yet
        if there is not None and there.st_size == self.read and _identity(there) == self.identity:
            return b""
        if data := self._rest():
            return data
        if there is not None and _identity(there) != self.identity:
            self.close()
            self.open(begin=True)
            return self._rest()
        if there is not None and there.st_size < self.read:
            self.read = self.stream.seek(0)  # cut short in place
        return b""

    def close(self) -> None:
        """Let go of it."""
        if self.stream is not None:
            self.stream.close()
            self.stream = None

    def _rest(self) -> bytes:
        """What has not been read of the open file, up to the bound."""
        try:
            data = self.stream.read(BOUND) if self.stream else b""
        except OSError:
            return b""
        self.read += len(data)
        return data


@dataclass(slots=True)
class _File:
    growing: Growing
    rank: int
    parser: "Parser | None" = None  # once there is something to read
    grown: float = 0.0  # when it last did
    pending: bool = False  # lines are kept back


class Tail:
    """Some files, each one rank's."""

    def __init__(self, *, node: str | None = None) -> None:
        self._node = node
        self._files: dict[int, _File] = {}
        self._rest: list[Evidence] = []  # of files that are not followed any more

    @property
    def files(self) -> int:
        """How many are followed."""
        return len(self._files)

    def follow(self, paths: Mapping[int, Path], *, begin: bool = False) -> None:
        """From now on these (rank -> file), and no others. What is in a new one already is history, and is not read, unless its
        process was just started (`begin`).
        """
        for rank in set(self._files) - set(paths):
            self._finish(self._files.pop(rank))
        for rank, path in paths.items():
            known = self._files.get(rank)
            if known is not None and known.growing.path == path:
                continue
            if known is not None:
                self._finish(known)
            file = _File(Growing(path), rank)
            file.growing.open(begin=begin)
            self._files[rank] = file

    def look(self, now: float, *, over: bool = False) -> list[Evidence]:
        """What the files have gained, as evidence of the core's clock (`now`, monotonic). `over`: no more lines are awaited."""
        found, self._rest = self._rest, []
        for _, file in sorted(self._files.items()):
            data = file.growing.gained()
            if data:
                file.grown, file.pending = now, True
                found += _facts(self._parser(file), data)
            if file.pending and (over or (not data and now - file.grown >= SILENCE_S)):
                file.pending = False
                found += self._parser(file).flush()
        # The lines' own clocks are those of several libraries; what the core compares is when it learned of them.
        return [replace(fact, when=now, clock="core") for fact in found]

    @property
    def ways(self) -> frozenset[str]:
        """Which ways NCCL says it has chosen, in the files that are followed."""
        return frozenset(way for file in self._files.values() if file.parser for way in file.parser.ways.chosen)

    def close(self) -> None:
        """Let go of the files."""
        self.follow({})
        self._rest.clear()

    def _parser(self, file: _File) -> "Parser":
        if file.parser is None:
            from elasticrl.diagnose.logs import Parser

            # Beside a training job only lines with a word of the sieve are looked at: it must cost next to nothing.
            file.parser = Parser(source=str(file.growing.path), rank=file.rank, node=self._node, whole=0)
        return file.parser

    def _finish(self, file: _File) -> None:
        """A dead worker's last words are the ones that count."""
        if data := file.growing.gained():
            self._rest += _facts(self._parser(file), data)
        if file.parser is not None:
            self._rest += file.parser.flush()
        file.growing.close()


def _facts(parser: "Parser", data: bytes) -> list[Evidence]:
    """What these bytes give; where they are full of faults, the first of them and the last."""
    found: list[Evidence] = []
    for at in range(0, len(data), PIECE):
        last = len(data) - PIECE
        if len(found) > MANY and at < last:
            return [*found, *parser.skip(data[at:last]), *parser.feed(data[last:])]
        found += parser.feed(data[at : at + PIECE])
    return found


def _identity(of: os.stat_result) -> tuple[int, int]:
    return of.st_ino, of.st_dev
