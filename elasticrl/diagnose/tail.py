"""The workers' logs as evidence while they are written.

The one idea: `look` is called now and then and never blocks: it reads what each file has gained, up to a bound, and hands it to
that file's parser. A parser keeps the last lines back for those that may follow; after a moment of silence they are all there
is. Log rotation renames a file: the rest of the old one is read before the new one is begun.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final

from elasticrl.core.evidence import Evidence
from elasticrl.diagnose.logs import Parser

SILENCE_S: Final = 0.2  # after which the last lines are not waited for any longer
BOUND: Final = 4 << 20  # bytes of one file in one look: 40 ms of work


@dataclass(slots=True)
class _File:
    path: Path
    parser: Parser
    stream: BinaryIO | None = None
    grown: float = 0.0  # when it last did
    pending: bool = False  # lines are kept back


class Tail:
    """Some files, each one rank's. What was in them before the first look is history, and is not read."""

    def __init__(self, *, node: str | None = None) -> None:
        self._node = node
        self._files: dict[int, _File] = {}
        self._rest: list[Evidence] = []  # of files that are not followed any more

    def follow(self, paths: Mapping[int, Path], *, begin: bool = False) -> None:
        """From now on these (rank -> file), and no others. `begin`: from their beginning, as for a process just started."""
        for rank in set(self._files) - set(paths):
            self._finish(self._files.pop(rank))
        for rank, path in paths.items():
            known = self._files.get(rank)
            if known is not None and known.path == path:
                continue
            if known is not None:
                self._finish(known)
            file = _File(path, Parser(source=str(path), rank=rank, node=self._node))
            self._open(file, begin=begin)
            self._files[rank] = file

    def look(self, now: float) -> list[Evidence]:
        """What the files have gained, as evidence of the core's clock (`now`, monotonic)."""
        found, self._rest = self._rest, []
        for _, file in sorted(self._files.items()):
            data = self._gained(file)
            if data:
                file.grown, file.pending = now, True
                found += file.parser.feed(data)
            elif file.pending and now - file.grown >= SILENCE_S:
                file.pending = False
                found += file.parser.flush()
        # The lines' own clocks are those of several libraries; what the core compares is when it learned of them.
        return [replace(fact, when=now, clock="core") for fact in found]

    @property
    def ways(self) -> frozenset[str]:
        """Which ways NCCL says it has chosen, in the files that are followed."""
        return frozenset(way for file in self._files.values() for way in file.parser.ways.chosen)

    def close(self) -> None:
        """Let go of the files."""
        self.follow({})
        self._rest.clear()

    def _open(self, file: _File, *, begin: bool) -> None:
        try:
            file.stream = file.path.open("rb")
        except OSError:
            return  # not there yet
        if not begin:
            file.stream.seek(0, os.SEEK_END)

    def _gained(self, file: _File) -> bytes:
        if file.stream is None:
            self._open(file, begin=True)
            if file.stream is None:
                return b""
        try:
            data = file.stream.read(BOUND)
            if data:
                return data
            there, here = file.path.stat(), os.fstat(file.stream.fileno())
        except OSError:
            return b""
        if (there.st_ino, there.st_dev) != (here.st_ino, here.st_dev):
            self._close(file)
            self._open(file, begin=True)
            return file.stream.read(BOUND) if file.stream else b""
        if there.st_size < file.stream.tell():
            file.stream.seek(0)  # cut short in place
        return b""

    def _finish(self, file: _File) -> None:
        """A dead worker's last words are the ones that count."""
        if data := self._gained(file):
            self._rest += file.parser.feed(data)
        self._rest += file.parser.flush()
        self._close(file)

    def _close(self, file: _File) -> None:
        if file.stream is not None:
            file.stream.close()
            file.stream = None
