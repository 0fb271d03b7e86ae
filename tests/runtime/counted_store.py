"""A store that is reached by a URL, counts what is read of it, and fails as it is told to: `counted://`."""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

Span = tuple[int, int]


class Trouble(Exception):
    """What a store's own library raises: nothing of Python's."""


class Counted(MemoryFileSystem):
    """fsspec's memory, with an eye on it."""

    protocol = ("counted",)
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    spans: ClassVar[dict[str, list[Span]]] = defaultdict(list)  # what was read, by file
    parts: ClassVar[str] = "known"  # to be asked for parts: known, ignored or refused
    failing: ClassVar[int] = 0  # answers that are still to fail
    raising: ClassVar[dict[str, list[Exception | None]]] = {}  # by file what reading it raises next; None: it is read
    asked: ClassVar[list[Any]] = []  # the file systems, in turn
    clashes: ClassVar[int] = 0  # how often one was asked by two threads at once
    slow_s: ClassVar[float] = 0.0
    busy = False
    short: ClassVar[int] = 0  # answers that lack their last byte
    listed: ClassVar[str] = (
        "whole"  # in a listing: whole, unsized, stale (sizes of before) or late (files are not in it yet)
    )
    hangs: ClassVar[threading.Event] = threading.Event()  # set: it answers
    hangs.set()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("counted://", "memory://", 1))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        cls = type(self)
        with cls._lock:
            cls.asked.append(self)
            cls.clashes += self.busy
        self.busy = True
        try:
            cls.hangs.wait(10)
            time.sleep(cls.slow_s)
            return self._read(path, start, end, **kwargs)
        finally:
            self.busy = False

    def _read(self, path: str, start: int | None, end: int | None, **kwargs: Any) -> bytes:
        cls = type(self)
        with cls._lock:
            if cls.failing:
                cls.failing -= 1
                raise Trouble("503 slow down")
            if (due := cls.raising.get(path.rsplit("/", 1)[-1])) and (error := due.pop(0)):
                raise error
        if start is not None and cls.parts == "refused":
            raise NotImplementedError
        if cls.parts != "known":
            start = end = None
        data = super().cat_file(path, start, end, **kwargs)
        with cls._lock:
            if cls.short:
                cls.short, data = cls.short - 1, data[:-1]
            cls.spans[path.rsplit("/", 1)[-1]].append((start or 0, (start or 0) + len(data)))
        return data

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        found = super().ls(path, detail=detail, **kwargs)
        if not detail or self.listed == "whole":
            return found
        if self.listed == "late":
            return [row for row in found if not _is_data(row["name"].rsplit("/", 1)[-1])]
        return [{**row, "size": None if self.listed == "unsized" else 7} for row in found]

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode == "rb":  # all of it, as far as anybody here can tell
            if (due := self.raising.get(path.rsplit("/", 1)[-1])) and (error := due.pop(0)):
                raise error
            self.spans[path.rsplit("/", 1)[-1]].append((0, self.size(path)))
        return super()._open(path, mode, **kwargs)

    @classmethod
    def fresh(cls) -> None:
        """Empty, well, and nothing read."""
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]
        cls.well()

    @classmethod
    def well(cls) -> None:
        """Nothing read, and nothing fails."""
        cls.spans.clear()
        cls.parts, cls.failing, cls.short, cls.listed = "known", 0, 0, "whole"
        cls.raising.clear()
        cls.asked.clear()
        cls.clashes, cls.slow_s = 0, 0.0
        cls.hangs.set()

    @classmethod
    def data(cls) -> int:
        """Bytes of state that were read."""
        return sum(stop - start for file, some in cls.spans.items() if _is_data(file) for start, stop in some)

    @classmethod
    def tables(cls) -> int:
        """How often a table was read."""
        return sum(len(some) for file, some in cls.spans.items() if file.startswith("data-") and file.endswith(".json"))

    @classmethod
    def flip(cls, name: str, file: str, at: int) -> None:
        """A bit of one byte."""
        (path,) = (path for path in cls.store if PurePosixPath(path).parts[-2:] == (name, file))
        view = cls.store[path].getbuffer()
        view[at] ^= 0x10


def _is_data(file: str) -> bool:
    return file.startswith("data-") and file.endswith(".distcp")


@contextmanager
def hanging() -> Iterator[float]:
    """It does not answer until the block is left; when it began is given."""
    Counted.hangs.clear()
    try:
        yield time.monotonic()
    finally:
        Counted.hangs.set()


fsspec.register_implementation("counted", Counted, clobber=True)
