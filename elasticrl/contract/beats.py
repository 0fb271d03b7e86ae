"""What a worker says of itself, in a page of shared memory: its generation, step, phase, since when, last collective.

The one idea: the training thread writes into memory that others have mapped too, so a beat costs a microsecond and no
system call, and because only the training thread writes, a beat is progress and not mere life. Two copies are written in
turn, each with a count and a checksum; a reader takes the newer whole one. So a worker may be killed in the middle of a
write and its last beat is still there.

    beat = Beat(path)                     # in the worker
    beat.phase("rollout"); beat.sealed(1284)

    page = Page(path)                     # anywhere else
    page.read()                           # Snapshot(generation=14, step=1284, phase="rollout", ...) or None
"""

import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Final

from elasticrl.contract.model import LOADING, MEETING, OUTSIDE

MAGIC: Final = b"elbeat06"
# count, generation, born, step, saved, pid, state, waiting, since, waited_s, restore_s, nearer, collective, bytes, phase, op,
# manifest, and what it has spent in phases: name and seconds, PHASES times
PHASES: Final = 12  # of a name more nothing is told
BODY: Final = struct.Struct("<QqqqqIBBxxddddqq32s32s160s" + "20sd" * PHASES)
SUM: Final = struct.Struct("<I")
HALF: Final = 704
SIZE: Final = 2 * HALF + 64
RESTORES_S: Final = 1.0  # nobody need know of state that is put back in less
NEARER_S: Final = 0.2  # that it comes nearer is told no more often
FIRST: Final = 64  # where the first copy begins; before it only the magic
COUNTS: Final = struct.Struct(f"<{FIRST + SUM.size}xQ{HALF - 8}xQ")  # of both copies, each the first field of its body


class Stage(IntEnum):
    """Where a worker is between two generations."""

    WARM = 0  # started, without a rank
    JOINING = 1  # has a rank, not yet through its first collective
    TRAINING = 2
    PARKED = 3  # out of its group, state in hand, waiting for the next generation
    DONE = 4  # all steps made


STAGES: Final = tuple(Stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One beat. Times are on the machine's monotonic clock, which all its processes share.

    Example: Snapshot(generation=14, step=1283, phase="rollout", since=812.4, state=Stage.TRAINING)
    """

    generation: int = 0
    born: int = 0
    step: int = 0  # newest sealed
    saved: int = 0  # newest step whose disk checkpoint is whole
    manifest: str = ""  # of `saved`
    pid: int = 0
    state: Stage = Stage.WARM
    waiting: bool = False  # in a collective: somebody else may be the cause
    since: float = 0.0  # when it came into this phase
    waited_s: float = 0.0  # of that time, what it has waited for others so far
    nearer: float = 0.0  # when the state that is put back came nearer last; 0: none is, or not for long yet
    restore_s: float = 0.0  # how long putting its state back took in this generation
    phase: str = LOADING
    collective: int = 0  # number of the newest
    op: str = ""  # of the newest collective
    bytes: int = 0  # moved by collectives so far
    spent: tuple[tuple[str, float], ...] = ()  # seconds of its own work so far, by phase: without what it has waited


def pack(count: int, beat: Snapshot) -> bytes:
    """One copy, with its checksum in front."""
    spent = [*beat.spent[:PHASES], *[("", 0.0)] * PHASES][:PHASES]
    body = BODY.pack(
        count, beat.generation, beat.born, beat.step, beat.saved, beat.pid, beat.state, beat.waiting, beat.since,
        beat.waited_s, beat.restore_s, beat.nearer, beat.collective, beat.bytes,
        short(beat.phase, 32), short(beat.op, 32), short(beat.manifest, 160),
        *(part for name, seconds in spent for part in (short(name, 20), seconds)),
    )  # fmt: skip
    return SUM.pack(zlib.crc32(body)) + body


def unpack(data: bytes) -> tuple[int, Snapshot] | None:
    """A copy's count and what it says; None if it was being written, or never was."""
    (checksum,) = SUM.unpack_from(data)
    body = data[SUM.size : SUM.size + BODY.size]
    if zlib.crc32(body) != checksum:
        return None
    count, generation, born, step, saved, pid, state, waiting, since, waited_s, restore_s, nearer, *rest = BODY.unpack(
        body
    )
    collective, moved, phase, op, manifest, *spent = rest
    if count == 0:
        return None
    return count, Snapshot(
        generation=generation, born=born, step=step, saved=saved, pid=pid, state=STAGES[state], waiting=bool(waiting),
        since=since, waited_s=waited_s, restore_s=restore_s, nearer=nearer, collective=collective, bytes=moved,
        phase=text(phase), op=text(op), manifest=text(manifest),
        spent=tuple((text(name), seconds) for name, seconds in zip(spent[::2], spent[1::2], strict=True) if name[0]),
    )  # fmt: skip


def short(value: str, size: int) -> bytes:
    """As many whole characters as fit."""
    data = value.encode()
    return data if len(data) <= size else data[:size].decode(errors="ignore").encode()


@lru_cache(256)  # a handful of names, read twenty times a second
def text(data: bytes) -> str:
    """The string in a padded field."""
    return data.rstrip(b"\0").decode(errors="replace")


class Beat:
    """The writing end. Call it from the training thread only: a helper thread that beats would hide a hang."""

    def __init__(self, path: Path | None = None) -> None:
        # Without a path (a program that runs under nobody's eyes) the page is private memory, and everything else the same.
        self._memory = mmap.mmap(-1, SIZE) if path is None else _map(path, create=True)
        self.changed: Callable[[], None] | None = None  # called when the state changes, or there is something to commit
        self._memory[: len(MAGIC)] = MAGIC
        before = _newest(self._memory)
        self._count = before[0] if before else 0
        self.now = Snapshot(pid=os.getpid(), since=time.monotonic())
        self._spent: dict[str, float] = {}
        self._worked = time.monotonic()  # up to then its work is in `_spent`
        self._formed: float | None = None  # since when its state is put back
        self._depth = 0  # of `waiting`: more than 0 while others are waited for, whatever collectives come through
        self._left = ""  # the phase that goes on when what is waited for outside of the gang is there; "" if nothing is
        self._told = (self.now.state, self.now.saved)
        self._write()

    def phase(self, name: str) -> None:
        """What begins now: rollout, reward, update, sync, save, ..."""
        self._account()
        self._left = ""
        self.now = replace(self.now, phase=name, since=time.monotonic(), waited_s=0.0, waiting=self._depth > 0)
        self._write()

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Inside, it is this phase; then the one before begins again."""
        self.back()
        before = self.now.phase
        self.phase(name)
        try:
            yield
        finally:
            self.phase(before)

    def still(self, phase: str = "") -> None:
        """What is waited for lies outside of the gang, under a deadline of its own: the phase's budget counts from here. Others
        that wait for this worker are excused as long as it is in `phase` OUTSIDE, which lasts until `back`, or until the next
        phase or wait for others begins.
        """
        if phase and phase != self.now.phase:
            self._account()
            self._left = self.now.phase
            self.now = replace(self.now, phase=phase, waiting=False)
        self.now = replace(self.now, since=time.monotonic(), waited_s=0.0)
        self._write()

    def back(self) -> None:
        """What was waited for outside of the gang is there: the phase goes on that was left for it.

        Found by reading: what a worker did after such a wait was measured by how often it had said that it waits, so it was
        ended; and as others were excused meanwhile, a network that fell silent there was not seen.
        """
        if self._left:
            self.phase(self._left)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, something outside of the gang is waited for, as `still` says if it takes long."""
        try:
            yield
        finally:
            self.back()

    def _account(self) -> None:
        """What was done until now goes to the phase that it was done in; waiting is nobody's work."""
        now, beat = time.monotonic(), self.now
        idle = beat.waiting or beat.phase in {MEETING, LOADING, OUTSIDE}
        if not idle and (beat.phase in self._spent or len(self._spent) < PHASES):
            self._spent[beat.phase] = self._spent.get(beat.phase, 0.0) + now - self._worked
        if beat.waiting:
            self.now = replace(beat, waited_s=beat.waited_s + now - max(self._worked, beat.since))
        self._worked = now

    def sealed(self, step: int, moved: int = 0) -> None:
        """A step is done everywhere. The first sign that a new generation works. `moved`: bytes sent that no beat has told."""
        self.back()
        self._account()
        if self.now.state is Stage.JOINING:
            self._begin()
        self.now = replace(self.now, step=step, since=time.monotonic(), waited_s=0.0, bytes=self.now.bytes + moved)
        self._write()

    def saved(self, step: int, manifest: str) -> None:
        """A disk checkpoint is whole and waits for its commit. Only rank 0 says so."""
        assert len(manifest.encode()) <= 160, f"manifest name {manifest!r} is over 160 bytes"
        self.now = replace(self.now, saved=step, manifest=manifest)
        self._write()

    def collective(self, number: int, op: str, moved: int = 0) -> None:
        """A collective begins: until `arrived`, others may be what we wait for."""
        self.back()
        self._account()
        self.now = replace(self.now, collective=number, op=op, bytes=self.now.bytes + moved, waiting=True)
        self._write()

    def arrived(self) -> None:
        """The collective is through."""
        self._account()
        self.now = replace(self.now, waiting=self._depth > 0)
        self._write()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, it is others who are waited for, as when a group is formed: also after a collective there is through."""
        self.back()
        self._account()
        self._depth += 1
        self.now = replace(self.now, waiting=True)
        self._write()
        try:
            yield
        finally:
            self._depth -= 1
            self.arrived()

    def joining(self, generation: int, born: int, resume: int) -> None:
        """A rank in a new generation was taken."""
        step = max(resume, self.now.step) if self.now.generation else resume
        self.now = replace(
            self.now, generation=generation, born=born, step=step, state=Stage.JOINING, phase=MEETING,
            since=time.monotonic(), waited_s=0.0, waiting=False, restore_s=0.0, nearer=0.0,
        )  # fmt: skip
        self._formed, self._left = None, ""
        self._write()

    def restoring(self) -> None:
        """The group is formed: what follows, until `training`, is state being put back."""
        self._formed = time.monotonic()

    def nearer(self) -> None:
        """More of the state that is put back is there. How long all of it takes depends on how large it is, so the phase's
        budget counts from here, and the plan's deadline waits for it. Called for each part of it, so mostly it does nothing.
        """
        if self._formed is None or self.now.state is not Stage.JOINING:
            return
        now = time.monotonic()
        if now >= max(self._formed + RESTORES_S, self.now.nearer + NEARER_S):
            self.now = replace(self.now, nearer=now, since=now, waited_s=0.0)
            self._write()

    def training(self) -> None:
        """The first collective of this generation went through, and the state is there."""
        self._begin()
        self._write()

    def _begin(self) -> None:
        now = time.monotonic()
        self._spent, self._worked = {}, now  # this generation's
        if self.now.state is Stage.JOINING and self._formed is not None:
            self.now = replace(self.now, restore_s=now - self._formed)
        self.now = replace(self.now, state=Stage.TRAINING, since=now, waited_s=0.0, waiting=False, nearer=0.0)

    def parked(self, generation: int) -> None:
        """Out of the group, state in hand. `generation` is the newest that this worker was told of."""
        generation = max(generation, self.now.generation)
        self._left = ""
        self.now = replace(
            self.now,
            generation=generation,
            state=Stage.PARKED,
            phase="parked",
            since=time.monotonic(),
            waited_s=0.0,
            waiting=False,
            nearer=0.0,
        )
        self._write()

    def done(self) -> None:
        """All steps are made."""
        self._left = ""
        self.now = replace(
            self.now, state=Stage.DONE, phase="done", since=time.monotonic(), waited_s=0.0, waiting=False
        )
        self._write()

    def _write(self) -> None:
        self._count += 1
        self.now = replace(self.now, spent=tuple(self._spent.items()))
        copy = pack(self._count, self.now)
        start = FIRST + HALF * (self._count % 2)
        self._memory[start : start + len(copy)] = copy
        told = (self.now.state, self.now.saved)
        if told != self._told:
            self._told = told
            if self.changed is not None:
                self.changed()


class Page:
    """The reading end. The worker may be alive, stopped or dead. FileNotFoundError: its agent has forgotten it already, whose
    page it is: that one alone has it made (`create`), and removes it.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path
        self._memory = _map(path, create=create)
        self._read: tuple[int, Snapshot] | None = None  # last

    def read(self) -> Snapshot | None:
        """The newest whole beat; None before the first. It is the same object until the worker writes another."""
        for _ in range(3):  # a writer that is being read can tear one copy at a time
            newest = _newest(self._memory, self._read)
            if newest is not None:
                self._read = newest
                return newest[1]
        return None

    def close(self) -> None:
        """Forget the page and remove its file."""
        self._memory.close()
        self.path.unlink(missing_ok=True)


def _map(path: Path, *, create: bool) -> mmap.mmap:
    handle = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0) | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(handle).st_size < SIZE:
            try:
                os.posix_fallocate(
                    handle, 0, SIZE
                )  # a hole that a full disk cannot fill would end the worker with SIGBUS
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(path)) from None
        return mmap.mmap(handle, SIZE)
    finally:
        os.close(handle)


def _newest(memory: mmap.mmap, known: tuple[int, Snapshot] | None = None) -> tuple[int, Snapshot] | None:
    """The newer whole copy; `known` itself if it still is. A count may be read while it is written, and be nonsense: it only
    says which copy to look at first.
    """
    first, second = COUNTS.unpack_from(memory)
    if known is not None and known[0] == max(first, second):
        return known
    newer, older = (FIRST, FIRST + HALF) if first > second else (FIRST + HALF, FIRST)
    return unpack(memory[newer : newer + HALF]) or unpack(memory[older : older + HALF])
