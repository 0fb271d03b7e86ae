"""The ledger: which samples entered which update, written down as it happens.

The one idea: nothing is ever erased. Each worker process appends to a file of its own; a generation says from which version it
goes on, and what earlier generations wrote beyond that is superseded, not wrong. `audit` reads it all and proves, or disproves,
that on the history that counts every sample was used exactly once.

A line is a checksum and a JSON object. Lines since the last commit travel in the vault as well (`values`), because a node that
loses its power loses what its disk had not yet taken; whoever carries its lanes afterwards writes them again, under the same
serial number, so that they count once.
"""

import errno
import json
import os
import secrets
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticrl.base.owned import made_closed
from elasticrl.base.parsed import parsed
from elasticrl.runtime.data.cursor import SampleId, Segment
from elasticrl.runtime.vault import faults
from elasticrl.runtime.vault.errors import DataError
from elasticrl.runtime.vault.version import Lineage, Version

FOLDER = "ledger"
SUFFIX = ".jsonl"
#: What a disk says that is full, ill or away: its lines wait. Anything else is a mistake, which waiting does not mend.
ILL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENODEV, errno.ETIMEDOUT})
AGAIN_S = 5.0  # between attempts to make a file there: each may take as long as the disk hangs


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One lane's samples in one update. `serial` is unique: the writer's name and a number.

    Example: Record(serial=("n03-w0-5f1c", 17), generation=14, version=Version(1284, 2), lane=3, turn=0, ids=(...))
    """

    serial: tuple[str, int]
    generation: int
    version: Version
    lane: int
    turn: int
    ids: tuple[SampleId, ...]
    skipped: bool = False  # the update was left out, as something in it was not finite
    filtered: bool = False  # the update was made without them, as there was nothing to learn from them

    def to_json(self) -> list[Any]:
        """One row, short because there are many."""
        ids = [[sample.epoch, sample.index] for sample in self.ids]
        row = [*self.serial, self.generation, self.version.step, self.version.update, self.lane, self.turn, ids]
        marks = {"skipped": self.skipped, "filtered": self.filtered}
        return [*row, *(mark for mark, holds in marks.items() if holds)]

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> "Record":
        """The reverse of `to_json`."""
        writer, number, generation, step, update, lane, turn, ids, *marks = row
        return cls(
            serial=(str(writer), int(number)),
            generation=int(generation),
            version=Version(int(step), int(update)),
            lane=int(lane),
            turn=int(turn),
            ids=tuple(SampleId(int(epoch), int(index)) for epoch, index in ids),
            skipped="skipped" in marks,
            filtered="filtered" in marks,
        )


class Ledger:
    """One worker process's ledger. Register it as a part of the run's state (it is a `Sharded` part without tensors).

    OSError where no file can be made, but for a disk that is ill: there it is made as soon as it can be. Found live: the worker
    that took a dead one's place on a node whose disk had turned read-only died of it, three times, and with it the job.
    """

    def __init__(self, run_dir: Path, *, writer: str) -> None:
        self.directory = run_dir / FOLDER
        self.writer = f"{writer}-{secrets.token_hex(4)}"  # every process is a writer of its own: no file has two
        self.nodes: tuple[str, ...] = ()  # where each node has a ledger of its own: those of the generation that begins
        self._path = self.directory / f"{self.writer}{SUFFIX}"
        self._file: int | None = None
        self._ill: OSError | None = None  # why there is none
        self._again = 0.0  # when it may be tried again
        self._flushed: set[Version] = set()  # what a save was begun of with all lines in the file that it flushes
        try:
            self._file = self._made()
        except OSError as error:
            if error.errno not in ILL:
                raise
        self._count = 0
        self._unwritten: list[bytes] = []  # lines that the disk did not take; few, as a commit needs them on it
        self._generation = 0
        self._tail: dict[int, list[tuple[Version, str]]] = {}  # as text, because it is asked for at every step

    def begin(self, *, generation: int, lineage: Lineage, segments: Iterable[Segment], lanes: Iterable[int]) -> None:
        """A generation starts: on which history, with which data, and which lanes this worker carries in it.

        Lanes that it no longer carries are dropped from its tail; those that it now carries come with `restored`.
        """
        self._generation = generation
        carried = set(lanes)
        self._tail = {lane: rows for lane, rows in self._tail.items() if lane in carried}
        for lane in carried:
            self._tail.setdefault(lane, [])
        self._append(
            {
                "generation": generation,
                "lineage": [cut.to_json() for cut in lineage],
                "segments": [segment.to_json() for segment in segments],
                **({"nodes": self.nodes} if self.nodes else {}),
            }
        )

    def record(
        self,
        version: Version,
        lane: int,
        ids: Iterable[SampleId],
        *,
        turn: int = 0,
        skipped: bool = False,
        filtered: bool = False,
    ) -> None:
        """These samples of `lane` are part of the update that leads to `version`: or were, if it was `skipped`, or were looked
        at and left out of it (`filtered`).
        """
        if lane not in self._tail:
            raise DataError(
                f"Lane {lane} is not carried here in generation {self._generation}: its samples belong in another ledger."
            )
        self._count += 1
        row = Record(
            serial=(self.writer, self._count),
            generation=self._generation,
            version=version,
            lane=lane,
            turn=turn,
            ids=tuple(ids),
            skipped=skipped,
            filtered=filtered,
        )
        text = json.dumps(row.to_json(), separators=(",", ":"))
        self._tail[lane].append((version, text))
        self._append_text(f'{{"record":{text}}}')

    @property
    def files(self) -> tuple[int, ...]:
        """The file; none as long as it could not be made."""
        return () if self._file is None else (self._file,)

    def flushing(self, version: Version) -> tuple[int, ...]:
        """The files, for somebody else to flush before `version` is saved: `Saver.save(flush=...)`."""
        if self.files and not self._unwritten:
            self._flushed.add(version)
        return self.files

    def committed(self, version: Version) -> None:
        """What led to `version` is on disks: it need not travel in the vault. But where the ledger was not flushed with it, as
        its disk was full and the checkpoint's was not, it must.
        """
        if version not in self._flushed:
            return
        self._flushed = {other for other in self._flushed if other > version}
        for lane, rows in self._tail.items():
            self._tail[lane] = [row for row in rows if row[0] > version]

    def close(self) -> None:
        """The file is complete."""
        for file in self.files:
            os.close(file)

    # -- state

    def pieces(self) -> Iterator[Any]:
        """No tensors."""
        return iter(())

    def values(self) -> dict[str, Any]:
        """The rows since the last commit, by lane: one line each."""
        return {f"lane.{lane}": "\n".join(text for _, text in rows) for lane, rows in self._tail.items()}

    def restored(self, values: Mapping[str, Any], /) -> None:
        """All lanes' rows as of the version that is gone on from. Rows that others wrote for our lanes are written again, now
        or when there is room.
        """
        again = []
        for lane in self._tail:
            self._tail[lane] = []
            for text in str(values.get(f"lane.{lane}", "")).splitlines():
                row = Record.from_json(parsed(text))
                self._tail[lane].append((row.version, text))
                if row.serial[0] != self.writer:
                    again.append(_line(f'{{"record":{text}}}'.encode()))
        # All at once. Found live: the first line that found no room was an error, and the other lines were forgotten.
        self._unwritten += again[:-1]
        for line in again[-1:]:
            faults.write("ledger.write", self._put, line)

    def _append(self, body: Mapping[str, Any]) -> None:
        self._append_text(json.dumps(body, separators=(",", ":")))

    def _append_text(self, text: str) -> None:
        faults.write("ledger.write", self._put, _line(text.encode()))

    def _put(self, data: bytes | memoryview) -> None:
        self._unwritten.append(bytes(data))
        self.catch_up()

    def catch_up(self) -> None:
        """Every line is in the file; DataError if it takes no more."""
        try:
            file = self._file = self._made() if self._file is None else self._file
            while self._unwritten:  # what found no room before comes first
                before = os.fstat(file).st_size
                if os.write(file, self._unwritten[0]) != len(self._unwritten[0]):
                    with suppress(OSError):  # half a line is taken back, or the next one would be glued to it
                        os.ftruncate(file, before)
                    raise OSError(errno.ENOSPC, "no space for a whole line")
                self._unwritten.pop(0)
        except OSError as error:
            raise DataError(
                f"The ledger {self.directory} takes no more lines ({error.strerror}): free some space. "
                "What was used since the last commit is still in the vault."
            ) from error

    def _made(self) -> int:
        """The file, made if it is time to try; a disk that has said it failed may have made it all the same."""
        if self._ill is not None and time.monotonic() < self._again:
            raise OSError(self._ill.errno, self._ill.strerror)
        first = os.O_EXCL if self._ill is None else 0
        try:
            made_closed(self.directory.parent)
            self.directory.mkdir(exist_ok=True)
            return os.open(self._path, os.O_WRONLY | os.O_CREAT | first | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            self._ill, self._again = error, time.monotonic() + AGAIN_S
            raise


def files_of(run_dir: Path, folder: str) -> tuple[Path, ...]:
    """All writers' files of a run: in its directory, or in those of its nodes that were put side by side in one."""
    return tuple(sorted([*run_dir.glob(f"{folder}/*{SUFFIX}"), *run_dir.glob(f"*/{folder}/*{SUFFIX}")]))


def encode(body: Mapping[str, Any]) -> bytes:
    """One line."""
    return _line(json.dumps(body, separators=(",", ":")).encode())


def _line(text: bytes) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(text), text)


def decode(line: bytes) -> dict[str, Any] | None:
    """The reverse; None for a line that is torn or changed."""
    try:
        body = parsed(line[9:])
        whole = line[8:9] == b" " and zlib.crc32(line[9:]) == int(line[:8], 16) and isinstance(body, dict)
    except ValueError:
        return None
    return dict(body) if whole else None
