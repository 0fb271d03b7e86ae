"""Prompts: records of a file, put through the chat template, tokenized, and left out where they are too long.

The idea: a data set is a fixed list with places, nothing more. Which place comes when, in which lane, is the cursor's affair,
so that it can be exact; here a place always gives the same prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elasticrl.config.training import Data

Record = Mapping[str, Any]


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


def records(data: Data) -> Iterator[Record]:
    """The records of what `data` names, in order."""
    if data.path is None:
        raise DataError("data.path is not set; name a file of prompts, or a synthetic task")
    readers = {"jsonl": read_jsonl, "parquet": read_parquet}
    return readers[data.format](data.path) if data.format in readers else read_datasets(data.path, data.split)


def tokenized(found: Iterator[Record], data: Data, tokenizer: Any) -> Prompts:
    """Prompts from records. A prompt that is too long is left out and counted, its place is not given to another."""
    items: list[Prompt] = []
    left_out = 0
    for place, record in enumerate(found):
        if data.prompt not in record:
            raise DataError(
                f"record {place} of {data.path} has no field {data.prompt!r}, only {sorted(record)}; set data.prompt to one"
            )
        asked = record[data.prompt]
        tokens = encode(asked, tokenizer, chat=data.chat_template)
        if 0 < len(tokens) <= data.max_prompt:
            items.append(Prompt(place=place, tokens=tokens, text=said(asked), record=record))
        else:
            left_out += 1
    if not items:
        raise DataError(
            f"{data.path} has no prompt of 1 to {data.max_prompt} tokens ({left_out} were left out); raise data.max_prompt"
        )
    return Prompts(items, left_out)


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
    parquet = _package("pyarrow.parquet", "parquet files need pyarrow: pip install pyarrow")
    for file in _files(path, ".parquet"):
        for batch in parquet.ParquetFile(file).iter_batches():
            yield from batch.to_pylist()


def read_datasets(path: str, split: str) -> Iterator[Record]:
    """What the package datasets calls `path`."""
    yield from _package("datasets", "data.format is datasets: pip install datasets").load_dataset(path, split=split)


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
