"""The records of a data set (JSON lines, Parquet, what the package datasets loads), each read when its place is asked for.

The idea: who holds no records in memory starts at once, however many there are. Where each line of JSON begins is found in one
pass and can be kept; so is its check sum, by which a file that was changed under a running job is noticed, and not trained on.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from elasticrl.base.parsed import parsed

if TYPE_CHECKING:
    from elasticrl.config.training import Data

Record = Mapping[str, Any]


class DataError(ValueError):
    """A data file that cannot be used: where, what, and what to do."""


class Records(ABC):
    """By place: `records[17]`; or all in order. `identity` is another where the records may be others."""

    identity: str
    #: What `__getitem__` needs, once all have been read; a later process may be given it in place of reading.
    index: Mapping[str, Any] = {}

    @abstractmethod
    def __iter__(self) -> Iterator[Record]: ...

    @abstractmethod
    def __getitem__(self, place: int) -> Record: ...


def records(data: Data) -> Records:
    """What `data` of the configuration names."""
    if data.path is None:
        raise DataError("data.path is not set; name a file of prompts, or a synthetic task")
    if data.format == "datasets":
        return Dataset(data.path, data.split)
    return {"jsonl": JsonLines, "parquet": Parquet}[data.format](data.path)


class JsonLines(Records):
    """One object per line; of a folder, all its .jsonl files in the order of their names."""

    def __init__(self, path: str) -> None:
        self._files = _files(path, ".jsonl")
        self.identity = _identity(self._files)

    def __iter__(self) -> Iterator[Record]:
        starts, sums, firsts = array("q"), array("q"), array("q")
        for file in self._files:
            firsts.append(len(starts))
            at = 0
            with file.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        starts.append(at)
                        sums.append(crc32(line.rstrip()))
                        yield _object(line, file, number)
                    at += len(line)
        self.index = {"starts": starts, "sums": sums, "firsts": firsts}

    def __getitem__(self, place: int) -> Record:
        file = self._files[bisect_right(self.index["firsts"], place) - 1]
        try:
            with file.open("rb") as lines:
                lines.seek(self.index["starts"][place])
                line = lines.readline()
        except OSError as error:
            raise DataError(f"record {place} cannot be read from {file}: {error}; is its disk there?") from error
        if crc32(line.rstrip()) != self.index["sums"][place]:
            raise DataError(
                f"{file} is not what it was when this job began (record {place}): the steps so far were trained on other data. "
                "Put the file back, or start a new job for the new data"
            )
        return _object(line, file, place)


class Parquet(Records):
    """Rows of a file, or of a folder's .parquet files in the order of their names."""

    def __init__(self, path: str) -> None:
        self._parquet = _package("pyarrow.parquet", "data.format is parquet: pip install 'elasticrl[data]'")
        self._files = _files(path, ".parquet")
        self._tables: dict[Path, Any] = {}
        self._firsts = [0]
        for file in self._files:
            self._firsts.append(self._firsts[-1] + self._parquet.read_metadata(file).num_rows)
        self.identity = _identity(self._files)

    def __iter__(self) -> Iterator[Record]:
        for file in self._files:
            for batch in self._parquet.ParquetFile(file).iter_batches():
                yield from batch.to_pylist()

    def __getitem__(self, place: int) -> Record:
        number = bisect_right(self._firsts, place) - 1
        file = self._files[number]
        if file not in self._tables:
            self._tables[file] = self._parquet.read_table(file, memory_map=True)
        row: Record = self._tables[file].slice(place - self._firsts[number], 1).to_pylist()[0]
        return row


class Dataset(Records):
    """What the package datasets calls `path`."""

    def __init__(self, path: str, split: str) -> None:
        package = _package("datasets", "data.format is datasets: pip install 'elasticrl[data]'")
        self._set = package.load_dataset(path, split=split)
        self.identity = self._set._fingerprint  # noqa: SLF001 - its only name for what is in it

    def __iter__(self) -> Iterator[Record]:
        return iter(self._set)

    def __getitem__(self, place: int) -> Record:
        row: Record = self._set[place]
        return row


def _object(line: bytes, file: Path, number: int) -> Record:
    try:
        record = parsed(line)
    except ValueError as error:
        raise DataError(f"{file}:{number} is not JSON ({error}); each line must be one object") from error
    if not isinstance(record, dict):
        raise DataError(f"{file}:{number} is a {type(record).__name__}; each line must be one object")
    return record


def _files(path: str, ending: str) -> list[Path]:
    root = Path(path)
    files = sorted(root.glob(f"*{ending}")) if root.is_dir() else [root]
    missing = [file for file in files if not file.is_file()]
    if missing or not files:
        raise DataError(
            f"{missing[0] if missing else f'{root}/*{ending}'} does not exist; check data.path and data.format"
        )
    return files


def _identity(files: Sequence[Path]) -> str:
    """Their names, sizes and times: to read all of them takes too long for what is waited for by a gang."""
    found = [(str(file.absolute()), stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()]]
    return json.dumps(found)


def _package(name: str, remedy: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise DataError(f"{name} is not installed; {remedy}") from error
