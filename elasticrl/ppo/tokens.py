"""A data set in tokens: made once by each node, and kept in files that whoever comes later maps into its memory.

The idea: a gang waits for the worker that takes a dead one's place, and to tokenize a million prompts takes most of a minute.
So what came of it lies beside the node's state, under a name that is a digest of all that it depends on: of the records, of
the settings, of the tokenizer, of the packages' versions. Each row has a check sum: a damaged file is noticed, not trained on.
And all records together have one, by which a job that goes on knows its data again.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

import numpy as np

from elasticrl.ppo.records import DataError, Record, Records

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from elasticrl.config.training import Data

Row = tuple[tuple[int, ...], ...]  # one or more lists of tokens
Work = Callable[[int, Record], Row | None]  # what a record comes to; None if it is left out
Chunk = list[tuple[int, Record]]

CHUNK: Final = 256  # records that a process is given at once
PATIENCE_S: Final = 120.0  # for one chunk, with the process's start
TABLES: Final = (
    2  # of a job that are kept on a node: this one's, and another's for who changes a setting and changes it back
)
ABANDONED_S: Final = 3600.0  # a table that took longer to write was left by somebody who died
PACKAGES: Final = ("elasticrl", "transformers", "tokenizers")
OWN: Final = ("places", "bounds", "tokens", "sums")  # the arrays of a table
FACTS: Final = "facts"  # the file with the rest of it
INDEX: Final = "records."  # and what the names of others begin with, which are the records' index


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Rows of token lists, as many in each row, and the place of each row's record. Example: table[17] == ((12, 3, 1, 13),)"""

    arrays: Mapping[str, NDArray[Any]]
    left_out: int
    content: str  # a digest of all records, left out or not, and of their tokens

    def __len__(self) -> int:
        return len(self.arrays["places"])

    def place(self, row: int) -> int:
        """Of its record in the data."""
        return int(self.arrays["places"][row])

    def __getitem__(self, row: int) -> Row:
        if not 0 <= row < len(self):
            raise IndexError(row)
        bounds, tokens = self.arrays["bounds"], self.arrays["tokens"]
        lists = (len(bounds) - 1) // len(self)
        marks = bounds[row * lists : (row + 1) * lists + 1].tolist()
        if crc32(tokens[marks[0] : marks[-1]].data, self.place(row)) != self.arrays["sums"][row]:
            raise DataError(
                f"the tokens of record {self.place(row)} are not what was written ({self.folder}); remove that "
                "folder, and have the node's disk tested"
            )
        return tuple(tuple(tokens[start:stop].tolist()) for start, stop in pairwise(marks))

    @property
    def folder(self) -> str:
        """Where it lies, if it was mapped."""
        tokens = self.arrays["tokens"]
        return str(Path(tokens.filename).parent) if isinstance(tokens, np.memmap) and tokens.filename else "in memory"


def table(found: Records, work: Work, data: Data, *, keep: Path | None, name: str | None) -> Table:
    """What `work` makes of the records: what is kept of it in `keep` under this name, or a new one, which is kept from now on.

    Without a name it cannot be told from another, and is not kept.
    """
    if keep is None or name is None:
        return _made(found, work, data)
    known = _mapped(keep / name)
    if known is None:
        made = _made(found, work, data)
        _store(keep, name, made, found)
        known = _mapped(keep / name) or made  # the disk may be full, or not ours to write to
    else:
        found.index = {part.removeprefix(INDEX): known.arrays[part] for part in known.arrays if part.startswith(INDEX)}
    return known


def name_of(found: Records, tokenizer: Any, *settings: object) -> str | None:
    """What a table is called that was made of these records, with this tokenizer and these settings; None if nobody can say."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # written in Python: what it does is nowhere written down
        return None
    said = [
        [_version(package) for package in PACKAGES], found.identity, repr(settings), backend.to_str(),
        repr(tokenizer.chat_template), repr(tokenizer.eos_token_id), type(tokenizer).__name__,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _made(found: Records, work: Work, data: Data) -> Table:
    """By `data.workers` processes. `work` goes to each of them once, so it must be picklable. Nothing is forked: a trainer has
    threads.
    """
    places, bounds, tokens, sums = array("q"), array("q", [0]), array("i"), array("q")
    digest = hashlib.sha256()
    numbered = enumerate(_told(found, digest.update))
    seen = 0
    for row in _rows(iter(lambda: list(islice(numbered, CHUNK)), []), work, data):
        if row is not None:
            begun = len(tokens)
            for one in row:
                tokens.extend(one)
                bounds.append(len(tokens))
            places.append(seen)
            sums.append(crc32(tokens[begun:], seen))
        seen += 1
    digest.update(places)
    digest.update(sums)
    own = {"places": places, "bounds": bounds, "tokens": tokens, "sums": sums}
    arrays = {name: np.asarray(numbers) for name, numbers in own.items()}
    return Table(arrays, left_out=seen - len(places), content=digest.hexdigest()[:16])


def _told(found: Records, tell: Callable[[bytes], None]) -> Iterator[Record]:
    """The records; `tell` is told of each as it passes. Of what JSON does not know, an image perhaps, only the kind counts: it
    may say of itself where it lies in memory.
    """
    for record in found:
        tell(json.dumps(record, sort_keys=True, default=lambda value: type(value).__name__).encode())
        yield record


def _rows(chunks: Iterator[Chunk], work: Work, data: Data) -> Iterator[Row | None]:
    if not data.workers:
        for chunk in chunks:
            yield from _chunk(chunk, work)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(data.workers, mp_context=context, initializer=_adopt, initargs=(work,))
    try:
        for part in _in_order(pool, chunks, data.workers * data.prefetch):
            yield from part
    except BaseException:
        _end(pool)
        raise
    pool.shutdown()


def _end(pool: ProcessPoolExecutor) -> None:
    """At once, its processes too: to leave it in order would wait for one that hangs."""
    children = list((pool._processes or {}).values())  # noqa: SLF001 - Python 3.14 has kill_workers
    pool.shutdown(wait=False, cancel_futures=True)
    for child in children:
        child.kill()


def _in_order(pool: Executor, chunks: Iterator[Chunk], at_once: int) -> Iterator[list[Row | None]]:
    """The results of all chunks, of which so many are in hand at a time."""
    running: deque[Future[list[Row | None]]] = deque()
    try:
        for chunk in chunks:
            running.append(pool.submit(_chunk_adopted, chunk))
            if len(running) >= at_once:
                yield running.popleft().result(PATIENCE_S)
        while running:
            yield running.popleft().result(PATIENCE_S)
    except BrokenExecutor as error:
        raise DataError(
            f"a process that tokenizes died ({error}): is there memory for it? Lower data.workers, or set it to 0"
        ) from error
    except TimeoutError as error:
        raise DataError(f"{CHUNK} records were not tokenized within {PATIENCE_S:g} s; set data.workers to 0") from error


_work: list[Work] = []


def _adopt(work: Work) -> None:
    """In a process: what it will do."""
    _work[:] = [work]


def _chunk_adopted(chunk: Chunk) -> list[Row | None]:
    return _chunk(chunk, _work[0])


def _chunk(chunk: Chunk, work: Work) -> list[Row | None]:
    return [work(place, record) for place, record in chunk]


def _mapped(folder: Path) -> Table | None:
    """The table in this folder; None if there is none that is whole."""
    try:
        left_out, content = (folder / FACTS).read_text().split()
        arrays = {file.stem: np.load(file, mmap_mode="r", allow_pickle=False) for file in sorted(folder.glob("*.npy"))}
        os.utime(folder)  # it was used: others are removed before it
        return Table(arrays, int(left_out), content) if arrays.keys() >= set(OWN) else None
    except (OSError, ValueError):
        return None


def _store(keep: Path, name: str, made: Table, found: Records) -> None:
    """As a whole or not at all; a node that has no room for it tokenizes again when a worker starts."""
    fresh = keep / f".{name}.{os.getpid()}"
    try:
        fresh.mkdir(parents=True)
        index = {f"{INDEX}{part}": numbers for part, numbers in found.index.items()}
        for part, numbers in {**made.arrays, **index}.items():
            with (fresh / f"{part}.npy").open("wb") as file:
                np.save(file, np.asarray(numbers), allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        (fresh / FACTS).write_text(f"{made.left_out} {made.content}")
        if _mapped(keep / name) is None:  # nobody else was faster; but it may lie there damaged
            shutil.rmtree(keep / name, ignore_errors=True)
            fresh.rename(keep / name)
    except OSError as error:
        print(f"tokens are not kept in {keep} ({error}): a worker that is replaced makes them anew", flush=True)
    shutil.rmtree(fresh, ignore_errors=True)
    _forget(keep)


def _forget(keep: Path) -> None:
    """Tables that were not used for longest, and what somebody left half written."""
    with suppress(OSError):
        aged = sorted((folder.stat().st_mtime, folder) for folder in keep.iterdir())
        old = [folder for _, folder in aged if not folder.name.startswith(".")][:-TABLES]
        left = [folder for at, folder in aged if folder.name.startswith(".") and at < time.time() - ABANDONED_S]
        for folder in old + left:
            shutil.rmtree(folder, ignore_errors=True)
