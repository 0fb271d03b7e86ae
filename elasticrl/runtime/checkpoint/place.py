"""Where checkpoints are: a directory of this machine (or of a network file system), or any URL that fsspec knows.

The one idea: a checkpoint is staged under a name that no reader looks at, and published in one act. On a file system that act
is a rename, after everything below it has been flushed; in an object store, where nothing can be renamed at once, it is the
arrival of the manifest, which is written last.
"""

import errno
import hashlib
import mmap
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Final, Protocol, TypeVar

from elasticrl.base.owned import made_closed
from elasticrl.base.regular import open_regular, read_regular
from elasticrl.runtime.checkpoint.manifest import MANIFEST, FileEntry, parse_name
from elasticrl.runtime.vault import faults
from elasticrl.runtime.vault.errors import CheckpointStorage

STAGING = ".saving-"
TRASH = ".removing-"
SMALL = 1 << 14  # bytes
ANSWER_S = 60.0  # for one answer of a store at a URL, where no configuration says it (checkpoint.answer)
WAIT_S = 180.0  # for which it is asked again while it fails, likewise (checkpoint.wait)

_T = TypeVar("_T")


class Output:
    """A file that is being written; it knows the checksum of what went in."""

    def __init__(self, put: Any) -> None:
        self._put = put
        self._sha = hashlib.sha256()
        self._small = bytearray()  # torch.save writes forty morsels around each tensor
        self._blocks: Blocks | None = None
        self.nbytes = 0

    def cut(self, block: int) -> None:
        """From its first byte on also have the checksum of each block of so many bytes."""
        assert not self.nbytes, "something was written already"
        self._blocks = Blocks(block)

    @property
    def sums(self) -> tuple[str, ...]:
        """Those checksums, of what was written until now."""
        return self._blocks.sums if self._blocks else ()

    def write(self, data: bytes | memoryview) -> int:
        """All of `data`; what is small waits for `flush`."""
        self._sha.update(data)
        if self._blocks is not None:
            self._blocks.update(data)
        self.nbytes += len(data)
        if len(data) + len(self._small) < SMALL:
            self._small += data
        else:
            self.flush()
            faults.write("checkpoint.write", self._put, data)
        return len(data)

    def flush(self) -> None:
        """Hand on what has been waiting."""
        if self._small:
            small, self._small = self._small, bytearray()
            faults.write("checkpoint.write", self._put, memoryview(small))

    def entry(self, name: str, *, shard: int | None = None, node: str = "") -> FileEntry:
        """What the manifest says of it."""
        return FileEntry(name=name, nbytes=self.nbytes, sha256=self._sha.hexdigest(), shard=shard, node=node)


class Blocks:
    """The SHA-256 of each block of what goes by; the last block may be shorter."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._whole: list[str] = []
        self._sha, self._room = hashlib.sha256(), size

    def update(self, data: bytes | memoryview) -> None:
        """What comes next."""
        view = memoryview(data).cast("B")
        while view:
            part = view[: self._room]
            self._sha.update(part)
            view, self._room = view[len(part) :], self._room - len(part)
            if not self._room:
                self._whole.append(self._sha.hexdigest())
                self._sha, self._room = hashlib.sha256(), self.size

    @property
    def sums(self) -> tuple[str, ...]:
        """Of what has gone by until now."""
        return (*self._whole, *([self._sha.hexdigest()] if self._room < self.size else []))


class Place(Protocol):
    """What a checkpoint needs of the place it is in. OSError where the world fails."""

    def __str__(self) -> str:
        """As the operator wrote it."""

    def names(self) -> list[str]:
        """The published checkpoints."""

    def begin(self, name: str) -> None:
        """Have somewhere to stage; several writers of one gang share it."""

    def output(self, name: str, file: str) -> AbstractContextManager[Output]:
        """A new staged file, on the disk and under its name when the block is left."""

    def staged(self, name: str, file: str) -> bytes | None:
        """A small file that another writer has staged, if it is whole."""

    def unstage(self, name: str, file: str) -> None:
        """Remove one staged file, if it is there."""

    def publish(self, name: str) -> None:
        """Make what is staged a checkpoint, all at once."""

    def abandon(self, name: str) -> None:
        """Remove what is staged."""

    def read(self, name: str, file: str) -> bytes:
        """A small file of a published checkpoint."""

    def size(self, name: str, file: str) -> int | None:
        """How long a file is, of which nothing is read; None: nobody says. FileNotFoundError if it is not there."""

    def digest(self, name: str, file: str) -> tuple[int, str]:
        """Size and SHA-256 of a file as it can be read now."""

    def buffer(self, name: str, file: str) -> Any:
        """A large file of a published checkpoint; writable in memory only, because tensors want that."""

    def put(self, name: str, file: str, data: bytes) -> None:
        """A small file into a published checkpoint, whole or not at all."""

    def remove(self, name: str) -> None:
        """Out of sight in one act, then gone: a removal that is killed leaves no half checkpoint under its name."""

    def leftovers(self) -> list[str]:
        """What interrupted saves and removals have left."""

    def idle_s(self, leftover: str) -> float | None:
        """For how long nothing has been written into it; None where nobody knows."""


class Local:
    """A directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __str__(self) -> str:
        return str(self.root)

    def names(self) -> list[str]:
        """The published checkpoints."""
        return sorted(entry.name for entry in self._entries() if parse_name(entry.name) and entry.is_dir())

    def _entries(self) -> list[os.DirEntry[str]]:
        """What lies here; nothing only where there is no such folder: one that is away raises."""
        faults.reach("checkpoint.list", str(self.root))
        try:
            with os.scandir(self.root) as found:
                return list(found)
        except FileNotFoundError:
            return []

    def begin(self, name: str) -> None:
        """Have a staging directory; several writers of one gang share it."""
        faults.reach("checkpoint.begin", name)
        made_closed(self.root)
        (self.root / f"{STAGING}{name}").mkdir(exist_ok=True)

    @contextmanager
    def output(self, name: str, file: str) -> Iterator[Output]:
        """A new file in the staging directory, flushed to the disk before it has its name. If that fails nothing of it stays:
        it would keep a full disk full.
        """
        path = self.root / f"{STAGING}{name}" / file
        temporary = path.with_name(f".{file}.writing")
        try:
            with temporary.open("wb", buffering=0) as raw:
                out = Output(lambda data: _write_all(raw.fileno(), data))
                yield out
                out.flush()
                faults.reach("checkpoint.fsync", str(temporary))
                os.fsync(raw.fileno())
            faults.reach("checkpoint.rename", f"{temporary} {path}")
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise

    def staged(self, name: str, file: str) -> bytes | None:
        """What another writer has put there, if it is whole."""
        with suppress(FileNotFoundError):
            return read_regular(self.root / f"{STAGING}{name}" / file)
        return None

    def unstage(self, name: str, file: str) -> None:
        """Remove one staged file, if it is there."""
        (self.root / f"{STAGING}{name}" / file).unlink(missing_ok=True)

    def publish(self, name: str) -> None:
        """All at once, under its name."""
        staging = self.root / f"{STAGING}{name}"
        faults.reach("checkpoint.fsync_dir", str(staging))
        _sync_directory(staging)
        faults.reach("checkpoint.publish", f"{staging} {self.root / name}")
        staging.rename(self.root / name)
        faults.reach("checkpoint.fsync_dir", str(self.root))
        _sync_directory(self.root)
        faults.reach("checkpoint.published", name)

    def abandon(self, name: str) -> None:
        """Remove what was staged."""
        shutil.rmtree(self.root / f"{STAGING}{name}", ignore_errors=True)

    def read(self, name: str, file: str) -> bytes:
        """A whole small file."""
        return read_regular(self.root / name / file)

    def digest(self, name: str, file: str) -> tuple[int, str]:
        """Read, not mapped: a bad sector is then an error and not a SIGBUS."""
        with open_regular(self.root / name / file) as raw:
            found = hashlib.file_digest(raw, "sha256").hexdigest()
            return raw.tell(), found

    def size(self, name: str, file: str) -> int | None:
        """How long a file is, of which nothing is read. FileNotFoundError."""
        with open_regular(self.root / name / file) as raw:
            return os.fstat(raw.fileno()).st_size

    def buffer(self, name: str, file: str) -> Any:
        """A large file, mapped; writable in memory only, because tensors want that."""
        with open_regular(self.root / name / file) as raw:
            size = os.fstat(raw.fileno()).st_size
            return mmap.mmap(raw.fileno(), size, access=mmap.ACCESS_COPY) if size else bytearray()

    def put(self, name: str, file: str, data: bytes) -> None:
        """A small file into a published checkpoint, whole or not at all."""
        path = self.root / name / file
        temporary = path.with_name(f".{file}.writing")
        with temporary.open("wb", buffering=0) as raw:
            faults.write("checkpoint.put", lambda part: _write_all(raw.fileno(), part), data)
            faults.reach("checkpoint.fsync", str(temporary))
            os.fsync(raw.fileno())
        faults.reach("checkpoint.rename", f"{temporary} {path}")
        temporary.replace(path)
        faults.reach("checkpoint.fsync_dir", str(path.parent))
        _sync_directory(path.parent)

    def remove(self, name: str) -> None:
        """Out of sight in one act, then gone: a removal that is killed leaves no half checkpoint under its name."""
        trash = self.root / (name if name.startswith(TRASH) else f"{TRASH}{name}")
        if trash.name != name:
            faults.reach("checkpoint.trash", name)
            with suppress(FileNotFoundError):
                (self.root / name).rename(trash)
        faults.reach("checkpoint.remove", name)
        shutil.rmtree(trash, ignore_errors=True)

    def leftovers(self) -> list[str]:
        """What interrupted saves and removals have left."""
        return sorted(entry.name for entry in self._entries() if entry.name.startswith((STAGING, TRASH)))

    def idle_s(self, leftover: str) -> float | None:
        """By the newest of what is in it. A shard that is being written grows all the while."""
        with suppress(OSError):  # it has just gone, or is published
            folder = self.root / leftover
            return time.time() - max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
        return None


class Url:
    """Anything that fsspec can open: s3://, gs://, memory://, ... There a checkpoint exists from its manifest on.

    It is far: what is read is asked for in parts, and each question has a deadline, `answer_s`. However a store fails, it is
    away, as far as anybody here can tell: its libraries have EBUSY, EIO or words of their own for a 503, and none of these
    says anything of what it holds. At file:// the kernel's word counts, as in a directory.

    Threads share a file system of fsspec's if that is made for it (`async_impl`). Of others, as of ftp's with its one
    connection, each question has one to itself, and one that has failed is not asked again.
    """

    def __init__(self, url: str, *, answer_s: float = ANSWER_S, wait_s: float = WAIT_S) -> None:
        import fsspec  # type: ignore[import-untyped]
        from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

        self.url = url
        self.answer_s = answer_s
        self.wait_s = wait_s  # for who opens a checkpoint alone
        self._fs, path = fsspec.core.url_to_fs(url)
        self._another = partial(fsspec.core.url_to_fs, url, skip_instance_cache=True)
        self._idle: deque[Any] = deque()  # file systems like it that nobody is asking
        self._mounted = isinstance(self._fs, LocalFileSystem)
        self._root = str(path).rstrip("/")

    def __str__(self) -> str:
        return self.url

    def _at(self, *parts: str) -> str:
        return "/".join((self._root, *parts))

    def _asked(self, ask: Callable[[Any], _T]) -> _T:
        """What the store answers to who asks a file system of it, in time."""
        with self._lent() as fs:
            return self._answer(partial(ask, fs))

    @contextmanager
    def _lent(self) -> Iterator[Any]:
        """A file system that nobody else is asking, if it is not made for that."""
        if self._fs.async_impl:
            yield self._fs
            return
        try:
            fs = self._idle.pop()
        except IndexError:
            fs = self._answer(self._another)[0]  # it may connect as it is made
        try:
            yield fs
        except (FileNotFoundError, NotImplementedError):
            self._idle.append(fs)
            raise
        self._idle.append(fs)

    def _answer(self, ask: Callable[[], _T]) -> _T:
        """What is answered, in time. A question that hangs stays behind in its thread, which ends with the process."""
        answers: list[_T] = []
        failures: list[Exception] = []

        def run() -> None:
            try:
                answers.append(ask())
            except Exception as error:  # noqa: BLE001 - each kind of store raises what it likes; it is raised below
                failures.append(error)

        thread = Thread(target=run, name="store", daemon=True)
        thread.start()
        thread.join(self.answer_s)
        if answers:
            return answers[0]
        if not failures:
            raise OSError(errno.ETIMEDOUT, f"there was no answer within {self.answer_s:g} s (checkpoint.answer)")
        error = failures[0]
        kernels = self._mounted and isinstance(error, OSError) and error.errno
        if isinstance(error, FileNotFoundError | NotImplementedError) or is_away(error) or kernels:
            raise error
        raise OSError(errno.ECONNABORTED, f"{type(error).__name__}: {error}") from error

    def names(self) -> list[str]:
        """The checkpoints that have a manifest."""
        return sorted(name for name in self._folders() if self._there(name, MANIFEST))

    def _folders(self) -> list[str]:
        try:
            listed = self._asked(lambda fs: _listed(fs, self._root, detail=False))
        except FileNotFoundError:
            return []
        found = [str(path).rstrip("/").rsplit("/", 1)[-1] for path in listed]
        return [name for name in found if parse_name(name)]

    def _there(self, *parts: str) -> bool:
        """Fsspec's `exists` takes whatever goes wrong for an answer."""
        try:
            self._asked(lambda fs: fs.info(self._at(*parts)))
        except FileNotFoundError:
            return False
        return True

    def sizes(self, name: str) -> dict[str, int | None]:
        """The files of a checkpoint, of which nothing is read. None: its store does not say in a listing how long they are."""
        listed = self._asked(lambda fs: _listed(fs, self._at(name), detail=True))
        return {str(row["name"]).rsplit("/", 1)[-1]: row.get("size") for row in listed}

    def size(self, name: str, file: str) -> int | None:
        """The same of one file, of which the store is asked by its name: a listing may be older. FileNotFoundError."""

        def ask(fs: Any) -> int | None:
            fs.invalidate_cache()
            found: int | None = fs.info(self._at(name, file)).get("size")
            return found

        return self._asked(ask)

    def part(self, name: str, file: str, start: int, stop: int) -> bytes:
        """These bytes of a file; all that it has from a store that gives no parts, which the length tells."""
        path = self._at(name, file)
        try:
            return self._asked(lambda fs: bytes(fs.cat_file(path, start=start, end=stop)))
        except NotImplementedError:
            return self.read(name, file)

    def begin(self, name: str) -> None:
        """Directories are a fiction there, but some file systems want them."""
        faults.reach("checkpoint.begin", name)
        self._fs.makedirs(self._at(name), exist_ok=True)

    @contextmanager
    def output(self, name: str, file: str) -> Iterator[Output]:
        """A new object; it appears when it is complete."""
        with self._fs.open(self._at(name, file), "wb") as raw:
            out = Output(raw.write)
            yield out
            out.flush()

    def staged(self, name: str, file: str) -> bytes | None:
        """What another writer has put there."""
        with suppress(FileNotFoundError):
            return self.read(name, file)
        return None

    def unstage(self, name: str, file: str) -> None:
        """Remove one staged object, if it is there."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._at(name, file))

    def publish(self, name: str) -> None:
        """Nothing is left to do: the manifest is there."""
        faults.reach("checkpoint.published", name)

    def abandon(self, name: str) -> None:
        """Remove what was staged; here what was published lies in the same place, and stays."""
        if name in self.names():
            return
        with suppress(FileNotFoundError):
            self._fs.rm(self._at(name), recursive=True)

    def read(self, name: str, file: str) -> bytes:
        """A whole small file."""
        return self._asked(lambda fs: bytes(fs.cat_file(self._at(name, file))))

    def digest(self, name: str, file: str) -> tuple[int, str]:
        """Read once through."""
        sha, size = hashlib.sha256(), 0
        with self._lent() as fs, self._answer(lambda: fs.open(self._at(name, file), "rb")) as raw:
            while data := self._answer(lambda: raw.read(1 << 20)):
                sha.update(data)
                size += len(data)
        return size, sha.hexdigest()

    def buffer(self, name: str, file: str) -> Any:
        """A large file, in memory."""
        return bytearray(self._fs.cat_file(self._at(name, file)))

    def put(self, name: str, file: str, data: bytes) -> None:
        """A small object."""
        faults.reach("checkpoint.put", file)
        self._fs.pipe_file(self._at(name, file), data)

    def remove(self, name: str) -> None:
        """The manifest first: without it the rest is no checkpoint."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._at(name, MANIFEST))
        self.abandon(name)

    def leftovers(self) -> list[str]:
        """Directories without a manifest."""
        return sorted(name for name in self._folders() if not self._there(name, MANIFEST))

    def idle_s(self, leftover: str) -> float | None:  # noqa: ARG002 # each kind of store has other words for it, or none
        """Not known."""
        return None


def _listed(fs: Any, path: str, *, detail: bool) -> Any:
    """What is there now, and not when it was asked before."""
    fs.invalidate_cache()
    return fs.ls(path, detail=detail)


def place(where: str | Path, *, answer_s: float = ANSWER_S, wait_s: float = WAIT_S) -> Place:
    """A directory, or a URL, whose store has so long for an answer, and is asked again for so long while it fails."""
    return Url(str(where), answer_s=answer_s, wait_s=wait_s) if "://" in str(where) else Local(Path(where))


#: What a file server says that is away, as after a loss of power; a disk that has lost what was on it says other things.
AWAY: Final = frozenset({errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH,
                         errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED})  # fmt: skip


def is_away(error: BaseException) -> bool:
    """It says that the place is away, and so nothing of what is there."""
    return isinstance(error, OSError) and error.errno in AWAY


UNWRITTEN: Final = (
    "Training goes on and older checkpoints are untouched; the newest commit ages until the place takes files again (free "
    "space, mount options, permissions)."
)
UNREAD: Final = "See that the place is mounted here and answers; nothing was changed."


@contextmanager
def explained(what: str, where: object, then: str = UNWRITTEN) -> Iterator[None]:
    """Turn the disk's refusals into CheckpointStorage with a sentence."""
    try:
        yield
    except OSError as error:
        raise CheckpointStorage(f"{what} at {where} failed: {error.strerror or error}. {then}") from error


def _write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(fd, view) :]


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
