"""Prompts: records of a file, put through the chat template, tokenized, and left out where they are too long.

The idea: a data set is a fixed list with places, nothing more. Which place comes when, in which lane, is the cursor's affair,
so that it can be exact; here a place always gives the same prompt.
"""

from __future__ import annotations

import json
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from elasticrl.config.training import Data

Record = Mapping[str, Any]
Chunk = list[tuple[int, Record]]
T = TypeVar("T")

CHUNK: Final = 256  # records that a process is given at once
PATIENCE_S: Final = 120.0  # for one chunk, with the process's start


class DataError(ValueError):
    """A data file that cannot be used: where, what, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Example: Prompt(place=17, tokens=(12, 3, 1, 4, 1, 13), text="3141", record={"prompt": "3141"})"""

    place: int  # in the data; what the ledger knows a sample by
    tokens: tuple[int, ...]
    text: str  # as it was written, for the reward
    record: Record = field(default_factory=dict)  # all fields, for the reward


@dataclass(frozen=True, slots=True)
class Prompts(Sequence[Prompt]):
    """A data set. `left_out` were too long. Example: Prompts(items, left_out=3)[0]"""

    items: Sequence[Prompt]
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: Any) -> Any:
        return self.items[place]


def load(data: Data, tokenizer: Any) -> Prompts:
    """What `data` of the configuration names."""
    return tokenized(records(data), data, tokenizer)


def fitting(data: Data, *, kept: int, left_out: int) -> str:
    """What a worker's log says of the data. Example: a.jsonl: 4,988 records fit; left out: 12 (of no tokens, or too many)"""
    return f"{data.path}: {kept:,} records fit; left out: {left_out:,} (of no tokens, or too many)"


def records(data: Data) -> Iterator[Record]:
    """The records of what `data` names, in order."""
    if data.path is None:
        raise DataError("data.path is not set; name a file of prompts, or a synthetic task")
    readers = {"jsonl": read_jsonl, "parquet": read_parquet}
    return readers[data.format](data.path) if data.format in readers else read_datasets(data.path, data.split)


def tokenized(found: Iterator[Record], data: Data, tokenizer: Any) -> Prompts:
    """Prompts from records. A prompt that is too long is left out and counted, its place is not given to another."""
    items, left_out = kept(found, partial(_prompt, data=data, tokenizer=tokenizer), data)
    if not items:
        raise DataError(
            f"{data.path} has no prompt of 1 to {data.max_prompt} tokens ({left_out} were left out); raise data.max_prompt"
        )
    return Prompts(items, left_out)


def _prompt(place: int, record: Record, *, data: Data, tokenizer: Any) -> Prompt | None:
    if data.prompt not in record:
        raise DataError(
            f"record {place} of {data.path} has no field {data.prompt!r}, only {sorted(record)}; set data.prompt to one"
        )
    asked = record[data.prompt]
    tokens = encode(asked, tokenizer, chat=data.chat_template)
    if not 0 < len(tokens) <= data.max_prompt:
        return None
    return Prompt(place=place, tokens=tokens, text=said(asked), record=record)


def kept(found: Iterator[Record], work: Callable[[int, Record], T | None], data: Data) -> tuple[list[T], int]:
    """(what `work` made of the records, in their order; how many it made nothing of), by `data.workers` processes.

    `work` goes to each of them once, so it must be picklable. Nothing is forked: a trainer has threads.
    """
    numbered = enumerate(found)
    chunks = iter(lambda: list(islice(numbered, CHUNK)), [])
    if not data.workers:
        made = [item for chunk in chunks for item in _chunk(chunk, work)]
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(data.workers, mp_context=context, initializer=_adopt, initargs=(work,)) as pool:
            made = [item for part in _in_order(pool, chunks, data.workers * data.prefetch) for item in part]
    items = [item for item in made if item is not None]
    return items, len(made) - len(items)


def _in_order(pool: Executor, chunks: Iterator[Chunk], at_once: int) -> Iterator[list[Any]]:
    """The results of all chunks, of which so many are in hand at a time."""
    running: deque[Future[list[Any]]] = deque()
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


_work: list[Callable[[int, Record], Any]] = []


def _adopt(work: Callable[[int, Record], Any]) -> None:
    """In a process: what it will do."""
    _work[:] = [work]


def _chunk_adopted(chunk: Chunk) -> list[Any]:
    return _chunk(chunk, _work[0])


def _chunk(chunk: Chunk, work: Callable[[int, Record], Any]) -> list[Any]:
    return [work(place, record) for place, record in chunk]


def encode(asked: str | Sequence[Mapping[str, str]], tokenizer: Any, *, chat: bool) -> tuple[int, ...]:
    """A text, or a list of chat messages, as tokens."""
    if isinstance(asked, str) and not chat:
        return tuple(tokenizer(asked)["input_ids"])
    if tokenizer.chat_template is None:
        raise DataError("the tokenizer has no chat template; set data.chat_template to false, or give it one")
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
    return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)["input_ids"])


def said(asked: str | Sequence[Mapping[str, str]]) -> str:
    """The text of a prompt: of a chat, its last message."""
    return asked if isinstance(asked, str) else str(asked[-1]["content"])


def read_jsonl(path: str) -> Iterator[Record]:
    """One JSON object per line; of a folder, all its .jsonl files in the order of their names."""
    for file in _files(path, ".jsonl"):
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise DataError(f"{file}:{number} is not JSON ({error}); each line must be one object") from error
                if not isinstance(record, dict):
                    raise DataError(f"{file}:{number} is a {type(record).__name__}; each line must be one object")
                yield record


def read_parquet(path: str) -> Iterator[Record]:
    """Rows of a file, or of a folder's .parquet files in the order of their names."""
    parquet = _package("pyarrow.parquet", "data.format is parquet: pip install 'elasticrl[data]'")
    for file in _files(path, ".parquet"):
        for batch in parquet.ParquetFile(file).iter_batches():
            yield from batch.to_pylist()


def read_datasets(path: str, split: str) -> Iterator[Record]:
    """What the package datasets calls `path`."""
    yield from _package("datasets", "data.format is datasets: pip install 'elasticrl[data]'").load_dataset(
        path, split=split
    )


def _files(path: str, ending: str) -> list[Path]:
    root = Path(path)
    files = sorted(root.glob(f"*{ending}")) if root.is_dir() else [root]
    missing = [file for file in files if not file.is_file()]
    if missing or not files:
        raise DataError(
            f"{missing[0] if missing else f'{root}/*{ending}'} does not exist; check data.path and data.format"
        )
    return files


def _package(name: str, remedy: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise DataError(f"{name} is not installed; {remedy}") from error
