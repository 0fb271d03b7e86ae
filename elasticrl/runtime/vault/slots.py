"""The files of a vault directory: which may be written, which must stay.

The one idea: a writer (a worker of this node, or a worker elsewhere whose copies we keep) owns a few files and writes its next
version into whichever of them is neither pinned nor one of the `keep` whole ones that stay (`base.keeping`). A pin is a shared
`flock`: it ends with the process that holds it, so a killed reader pins nothing. Files are used again because fresh memory
costs page faults.
"""

import errno
import fcntl
import mmap
import os
import re
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from elasticrl.base.address import CONTROL
from elasticrl.base.keeping import stays
from elasticrl.base.owned import foreign, shared
from elasticrl.runtime.vault import faults, layout
from elasticrl.runtime.vault.errors import NoRoom, VaultError
from elasticrl.runtime.vault.layout import Sealed, Torn
from elasticrl.runtime.vault.version import Made, Version

RING = "ring.json"  # what was told of the ring last
BESIDE = "beside"  # without a daemon: which run it was made beside
SUFFIX = ".shard"
PART = "part-"  # before a writer's name: only the blocks that one worker asked for
FETCHED = "fetch-"  # a whole shard, fetched from another vault
_NAME = re.compile(r"(?P<origin>[A-Za-z0-9_.-]+)\+(?P<writer>[A-Za-z0-9_-]+)\+(?P<number>\d+)\.shard")
_WORD = re.compile(r"[A-Za-z0-9_.-]+")
SLACK = 16 << 20  # a file may be this much larger than twice what it holds
PAUSE_S = 0.05  # between looks for a file that is let go of
MAX_FILES = 12  # of one writer; more means that pins are never released


def prepare(directory: Path) -> Path:
    """The directory, made if need be; refused unless it is ours alone (tmpfs is open to everyone on the machine)."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if why := foreign(directory):
        raise VaultError(
            f"{why}: somebody could put another {directory.name} in the vault's place. Set vault.dir to another place."
        )
    if why := shared(directory):
        raise VaultError(f"{why}. Remove it, or set vault.dir to another place.")
    return directory


def word(name: str) -> str:
    """A node's or writer's name that is safe in a file name; anything else is refused."""
    if not _WORD.fullmatch(name):
        raise VaultError(f"{name!r} cannot name a node or writer in the vault: only letters, digits, '.', '_' and '-'.")
    return name


_open: "weakref.WeakSet[Slot]" = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked child (a data loader's worker) must not keep its parent's locks alive after the parent is killed."""
    for slot in list(_open):
        slot.close()


os.register_at_fork(after_in_child=_forget_in_child)


class Slot:
    """One file of one writer, open and mapped for writing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _open.add(self)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._map: mmap.mmap | None = None
        self._known: tuple[int, Made] | None = None  # a seal, and what is under it
        self._map_open()

    @property
    def memory(self) -> memoryview:
        """The whole file. Views of it must be dropped before the slot can be closed."""
        return memoryview(self._map) if self._map is not None else memoryview(bytearray())

    @property
    def mapping(self) -> mmap.mmap:
        """The mapping itself, for libraries that keep the buffer alive."""
        assert self._map is not None, "reserve() comes first"
        return self._map

    def lock(self) -> bool:
        """Take the file for writing; False while a reader pins it or if it was removed under us."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        # A file without a seal and without a lock looks like a dead writer's, and a restarting server removes those.
        with suppress(FileNotFoundError):
            if self.path.stat().st_ino == os.fstat(self._fd).st_ino:
                return True
        self.unlock()
        return False

    def unlock(self) -> None:
        """Writing is over."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def reserve(self, nbytes: int) -> bool:
        """Have at least that much memory behind the file; True if the mapping is a new one.

        The memory is taken here, where a full tmpfs is an error with a name; a store into a page that tmpfs can't give
        would be a SIGBUS that ends the worker.
        """
        if self._map is not None and nbytes <= len(self._map) <= 2 * nbytes + SLACK:
            return False
        if self._map is not None and len(self._map) > nbytes:
            # The world has grown and shards are smaller now: memory of the larger ones goes back to the machine.
            os.ftruncate(self._fd, nbytes)
            self._map_open()
            return True
        self._allocate([(0, nbytes)])
        self._map_open()
        return True

    def reserve_only(self, nbytes: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Make a new file that long, with memory behind these ranges (start and stop) alone.

        The rest is a hole: reading from it would take memory too, and where there is none would be a SIGBUS. So nobody may.
        """
        os.ftruncate(self._fd, nbytes)
        self._allocate(ranges)
        self._map_open()

    def _allocate(self, ranges: Sequence[tuple[int, int]]) -> None:
        try:
            faults.reach("vault.reserve", self.path.name)
            for start, stop in ranges:
                if start < stop:
                    os.posix_fallocate(self._fd, start, stop - start)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG):
                raise
            nbytes = sum(stop - start for start, stop in ranges)
            raise NoRoom(
                f"The vault needs {nbytes / 1e9:.2f} GB for {self.path.name} and {self.path.parent} does not have them "
                f"({error.strerror}). Enlarge that tmpfs, or lower vault.copies."
            ) from error

    def sealed(self) -> Sealed | Torn:
        """What the file holds now."""
        return layout.read(self.memory)

    def version(self) -> Made | None:
        """The version and generation that the file holds, or None if it holds none.

        A header is parsed once: a model's thousand tensors would cost the training thread milliseconds of interpreter lock.
        """
        memory = self.memory
        if self._known is not None and memory and layout.seal_now(memory) == self._known[0]:
            return self._known[1]
        found = self.sealed()
        self._known = (found.seal, (found.stamp.version, found.stamp.generation)) if isinstance(found, Sealed) else None
        return self._known[1] if self._known else None

    def remember(self, seal: int, version: Version, generation: int) -> None:
        """What was just sealed."""
        self._known = (seal, (version, generation))

    def _map_open(self) -> None:
        size = os.fstat(self._fd).st_size
        # The old mapping lives on as long as somebody holds a view of it, and then is unmapped by itself.
        self._map = _map(self._fd, size) if size else None

    def close(self) -> None:
        """Give up the descriptor; the mapping goes when the last view of it does."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._map = None


class Slots:
    """The files of one writer. Those that an earlier process of the same writer left are taken over, with what they hold."""

    def __init__(self, directory: Path, *, origin: str, writer: str, keep: int = 2) -> None:
        self.directory = prepare(directory)
        self.stem = f"{word(origin)}+{word(writer)}+"
        self.keep = keep
        self._slots: dict[int, Slot] = {}
        self._read = False  # one that could have been written into was being read, when one was taken last
        for path in sorted(self.directory.glob(f"{self.stem}*{SUFFIX}")):
            if match := _NAME.fullmatch(path.name):
                self._slots[int(match["number"])] = Slot(path)

    def take(
        self, nbytes: int, *, below: Made | None = None, sealed: Sequence[Made] = (), within_s: float = 0.0
    ) -> Slot:
        """A locked slot with room for `nbytes`, not sealed any more. Anything not older than `below` is void, and no reason to
        keep a file; what the gang has `sealed` last is one until a newer version is. What has room already goes first.
        Where there is no memory for another file, one that is being read (by a save) is waited for, for `within_s`.

        `below` is the version and generation about to be written: what is there under a later number was made by a
        generation that had no future. The same version of an earlier generation is *not* void: after a reform the gang
        writes the version it resumed from again, cut for its new world, and until that is whole it must have the old one.
        """
        limit = time.monotonic() + within_s
        while True:
            try:
                return self._take(nbytes, below, sealed)
            except NoRoom:
                if not self._read or time.monotonic() > limit:
                    raise
                time.sleep(PAUSE_S)  # whoever reads may have ended by itself, and tells nobody

    def _take(self, nbytes: int, below: Made | None, sealed: Sequence[Made]) -> Slot:
        self._read = False
        versions = {number: slot.version() for number, slot in self._slots.items()}
        valid = sorted({v for v in versions.values() if v is not None and (below is None or v < below)}, reverse=True)
        stay = set(stays(valid, sealed, self.keep))

        def age(number: int) -> tuple[bool, bool, Made]:
            version = versions[number]
            small = len(self._slots[number].memory) < nbytes  # others take no more memory than they have
            return (small, version is not None, version or (Version(0), 0))

        for number in sorted(self._slots, key=age):
            slot = self._slots[number]
            if versions[number] in stay:
                stay.discard(versions[number])  # of two files with one version, one may go
                continue
            if slot.lock():
                return self._begin(slot, nbytes)
            if slot.path.exists():
                self._read = True
            else:
                self._slots.pop(number).close()
        for number in (n for n in range(MAX_FILES) if n not in self._slots):
            slot = self._make(number)
            if slot.lock():
                try:
                    return self._begin(slot, nbytes)
                except NoRoom:
                    self._slots.pop(number).close()
                    slot.path.unlink(missing_ok=True)
                    raise
            # A vault that looked around pinned it as it appeared; the next time it is free. One that started may have swept it.
            if not slot.path.exists():
                self._slots.pop(number).close()
        raise VaultError(
            f"All {MAX_FILES} files of {self.stem} in {self.directory} are pinned: a reader has not let go of any of them, or "
            "two workers have one name on this node."
        )

    def _make(self, number: int) -> Slot:
        """A new file. A directory that somebody has cleared away is made again: its loss shall not cost the worker too."""
        prepare(self.directory)
        slot = self._slots[number] = Slot(self.directory / f"{self.stem}{number}{SUFFIX}")
        return slot

    def _begin(self, slot: Slot, nbytes: int) -> Slot:
        try:
            if slot.memory:
                layout.unseal(slot.memory)
            slot.reserve(nbytes)
        except BaseException:
            slot.unlock()
            raise
        faults.reach("vault.begin", slot.path.name)
        return slot

    def mend(self) -> tuple[str, ...]:
        """Write again what somebody has cleared away: the memory of a removed file is still ours. Names, the newest last."""
        found: list[tuple[Made, str]] = []
        for number, lost in list(self._slots.items()):
            held = lost.version()
            if lost.path.exists() or held is None:
                continue
            slot, whole = self._make(number), False
            try:
                whole = _refill(slot, lost.memory)
            finally:
                if not whole:  # the memory of the removed file is all that there is of it: it stays for the next try
                    self._slots[number] = lost
                    slot.path.unlink(missing_ok=True)
                    slot.close()
            if whole:
                found.append((held, slot.path.name))
                lost.close()
        return tuple(name for _, name in sorted(found))

    def void_after(self, version: Version, generation: int) -> None:
        """Unseal whatever is newer: the gang has agreed to go on from `version` as `generation` left it."""
        for slot in self._slots.values():
            held = slot.version()
            if (
                held is not None
                and (held[0] > version or (held[0] == version and held[1] > generation))
                and slot.lock()
            ):
                layout.unseal(slot.memory)
                slot.unlock()

    def close(self) -> None:
        """Let go of all files; they stay."""
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()


def _refill(slot: Slot, memory: memoryview) -> bool:
    """Write what was in a removed file into this one; False if somebody is just looking at it."""
    if not slot.lock():
        return False
    try:
        slot.reserve(len(memory))
        layout.copy(memory, slot.memory)
    finally:
        slot.unlock()
    return True


def part(
    directory: Path, *, origin: str, writer: str, number: int, nbytes: int, ranges: Sequence[tuple[int, int]]
) -> Slot:
    """A locked new file that is `nbytes` long and has memory for `ranges` alone. What is left of this writer's others goes.

    Always a new one: a file that was used before has memory behind other ranges, and to give that back would take it from
    under whoever still looks at it.
    """
    stem = f"{word(origin)}+{word(writer)}+"
    prepare(directory)
    for left in directory.glob(f"{stem}*{SUFFIX}"):
        left.unlink(missing_ok=True)
    slot = Slot(directory / f"{stem}{number}{SUFFIX}")
    try:
        if not slot.lock():
            raise VaultError(f"{slot.path} was removed before anything was in it.")
        slot.reserve_only(nbytes, ranges)
    except BaseException:
        slot.path.unlink(missing_ok=True)
        slot.close()
        raise
    return slot


@dataclass(frozen=True, slots=True)
class FileName:
    """What a file's name tells. Example: FileName("n03", "w0", 1) is n03+w0+1.shard."""

    origin: str
    writer: str
    number: int


def parse_name(name: str) -> FileName | None:
    """The reverse of how files are named; None for anything else."""
    match = _NAME.fullmatch(name)
    return FileName(match["origin"], match["writer"], int(match["number"])) if match else None


class Pinned:
    """A sealed file, mapped privately and pinned: nobody writes into it until `close`.

    The mapping is copy-on-write, because tensor libraries want writable memory; what is written there reaches nobody.
    """

    def __init__(self, path: Path, fd: int, sealed: Sealed, memory: mmap.mmap) -> None:
        self.path = path
        self.fd = fd
        self.sealed = sealed
        self.mapping = memory

    @property
    def memory(self) -> memoryview:
        """The whole file."""
        return memoryview(self.mapping)

    def open(self) -> IO[bytes]:
        """The file itself, for reading."""
        return Path(f"/proc/self/fd/{self.fd}").open("rb", buffering=0)

    def view(self, piece: int) -> memoryview:
        """The bytes of piece number `piece`."""
        start = self.sealed.shape.data_start + self.sealed.table.starts[piece]
        return self.memory[start : start + self.sealed.table.pieces[piece].nbytes]

    def verify(self) -> None:
        """VaultError if a block of the data is not what was written."""
        if bad := layout.damage(self.memory, self.sealed):
            raise VaultError(
                f"{self.path}: {len(bad)} of {self.sealed.shape.blocks} blocks of step {self.sealed.stamp.version} changed "
                f"after they were sealed (first: block {bad[0]}). Use another copy."
            )

    def close(self) -> None:
        """Let go of the pin. Views of the memory keep what they show."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _map(fd: int, size: int, access: int = mmap.ACCESS_WRITE) -> mmap.mmap:
    """A mapping through a descriptor of its own.

    `mmap` keeps a duplicate of the descriptor it is given, and a duplicate keeps the lock: as long as any tensor showed the
    memory (in a forked child, too), the file would stay locked.
    """
    own = os.open(f"/proc/self/fd/{fd}", (os.O_RDONLY if access == mmap.ACCESS_COPY else os.O_RDWR) | os.O_CLOEXEC)
    try:
        return mmap.mmap(own, size, access=access)
    finally:
        os.close(own)


def hold(path: Path, seal: int) -> int | Torn:
    """A descriptor that pins the version with this seal, unread: for a thread that can't wait for a header to be parsed."""
    fd = _open_shared(path)
    if isinstance(fd, Torn):
        return fd
    prelude = os.pread(fd, layout.HEADER_AT, 0)
    if len(prelude) == layout.HEADER_AT and layout.seal_now(memoryview(prelude)) == seal:
        return fd
    os.close(fd)
    return Torn("another version by now")


def pin(path: Path) -> Pinned | Torn:
    """Open a sealed file and keep it from being written; Torn says why that can't be."""
    fd = _open_shared(path)
    if isinstance(fd, Torn):
        return fd
    adopted: Pinned | Torn | None = None
    try:
        adopted = adopt(path, fd)
    finally:
        if not isinstance(adopted, Pinned):
            os.close(fd)
    return adopted


def _open_shared(path: Path) -> int | Torn:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        return Torn(error.strerror or str(error))
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return Torn("being written")
    return fd


def adopt(path: Path, fd: int) -> Pinned | Torn:
    """As `pin`, for a descriptor that holds the lock already (it may have come from another process)."""
    found = _content(fd)
    return found if isinstance(found, Torn) else Pinned(path, fd, *found)


def _content(fd: int) -> tuple[Sealed, mmap.mmap] | Torn:
    size = os.fstat(fd).st_size
    if not size:
        return Torn("empty")
    memory = _map(fd, size, mmap.ACCESS_COPY)
    found = layout.read(memoryview(memory))
    return found if isinstance(found, Torn) else (found, memory)


def files(directory: Path) -> Iterator[tuple[Path, FileName]]:
    """The vault's files, by name."""
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        if name := parse_name(path.name):
            yield path, name


def sweep(directory: Path) -> tuple[str, ...]:
    """Remove files that nobody writes and that are not whole; their names are returned. For a server that starts."""
    gone: list[str] = []
    for path, name in files(directory):
        fd = _open_shared(path)
        if isinstance(fd, Torn):
            continue  # it is being written; or it could not be opened, which says nothing of what is in it
        try:
            found = Torn("a part") if name.writer.startswith(PART) else _content(fd)
            if isinstance(found, Torn):
                path.unlink(missing_ok=True)  # while it is pinned: nobody has begun to write into it
                gone.append(path.name)
        finally:
            os.close(fd)
    return tuple(gone)


def drop(path: Path) -> bool:
    """Remove a file unless somebody reads or writes it; whether it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(fd)


def clean(directory: Path) -> None:
    """Remove a vault: its job has ended, and memory that nobody will read must go back to the machine."""
    for path, _ in files(directory):
        path.unlink(missing_ok=True)
    for name in ("lock", CONTROL, RING, BESIDE):
        (directory / name).unlink(missing_ok=True)
    with suppress(OSError):
        directory.rmdir()
