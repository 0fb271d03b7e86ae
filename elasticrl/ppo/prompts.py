"""Prompts: records of a file, put through the chat template, tokenized, and left out where they are too long.

The idea: a data set is a fixed list with places, nothing more. Which place comes when, in which lane, is the cursor's affair,
so that it can be exact; here a place always gives the same prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from elasticrl.base.parsed import parsed
from elasticrl.ppo.records import DataError, Record, Records, records
from elasticrl.ppo.tokens import Row, Table, name_of, table

if TYPE_CHECKING:
    from pathlib import Path

    from elasticrl.config.training import Data


# What chat templates that print the day are told: data would be other data from one day to the next.
TODAY = date(2026, 1, 1)
NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Example: Prompt(place=17, tokens=(12, 3, 1, 4, 1, 13), text="3141", record={"prompt": "3141"})"""

    place: int  # in the data; what the ledger knows a sample by
    tokens: tuple[int, ...]
    text: str  # as it was written, for the reward
    record: Record = field(default_factory=dict)  # all fields, for the reward


class Prompts(Sequence[Prompt]):
    """A data set. `left_out` were too long. With a curriculum its levels follow each other, `levels` are their sizes, and
    `content` has their names. Example: prompts.load(tree.data, tokenizer)[0].text
    """

    def __init__(self, found: Records, rows: Table, asked: str, names: Sequence[str] = ()) -> None:
        self._found, self._rows, self._asked = found, rows, asked
        self.left_out, self.content = rows.left_out, rows.content
        self.levels: tuple[int, ...] = ()
        self._order: np.ndarray[Any, np.dtype[np.int64]] | None = None
        if names:
            marks = rows.arrays["bounds"][1:-1:2]  # where each row's second list begins, which is its level's number
            numbers = rows.arrays["tokens"][marks]
            self._order = np.argsort(numbers, kind="stable")
            self.levels = tuple(np.bincount(numbers, minlength=len(names)).tolist())
            self.content = sha256("\n".join([rows.content, *names]).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: Any) -> Any:
        if self._order is not None:
            number = int(self._order[number])
        tokens, *_ = self._rows[number]
        place = self._rows.place(number)
        record = self._found[place]
        return Prompt(place=place, tokens=tokens, text=said(record[self._asked]), record=record)


def load(data: Data, tokenizer: Any, keep: Path | None = None, *, tools: Sequence[Any] = ()) -> Prompts:
    """What `data` of the configuration names. A prompt that is too long is left out and counted, its place is not given to
    another. Tokens are kept in the folder `keep`, for the next process that wants them. The chat template is told of `tools`.
    """
    found = records(data)
    told = arguments_of(data, tools)
    settings = (
        data.prompt,
        data.chat_template,
        data.max_prompt,
        TODAY.isoformat(),
        *([json.dumps(told)] if told else []),
        *([data.curriculum.field, *data.curriculum.levels] if data.curriculum.field else []),
    )
    work = partial(_tokens, data=data, tokenizer=tokenizer, told=told)
    rows = table(found, work, data, keep=keep, name=name_of(found, tokenizer, "prompts", *settings))
    if not len(rows):
        raise DataError(
            f"{data.path} has no prompt of 1 to {data.max_prompt} tokens ({rows.left_out} were left out); raise data.max_prompt"
        )
    names = data.curriculum.levels if data.curriculum.field else ()
    loaded = Prompts(found, rows, data.prompt, names)
    if empty := [name for name, size in zip(names, loaded.levels, strict=True) if not size]:
        raise DataError(
            f"{data.path} has no record of the level {empty[0]!r} that fits; name its levels as the field "
            f"{data.curriculum.field!r} has them in data.curriculum.stages"
        )
    return loaded


def fitting(data: Data, *, kept: int, left_out: int) -> str:
    """What a worker's log says of the data. Example: a.jsonl: 4,988 records fit; left out: 12 (of no tokens, or too many)"""
    return f"{data.path}: {kept:,} records fit; left out: {left_out:,} (of no tokens, or too many)"


def arguments_of(data: Data, tools: Sequence[Any] = ()) -> dict[str, Any]:
    """What the chat template is told beside the messages: functions become what OpenAI's API says of them."""
    found: dict[str, Any] = {name: _meant(text) for name, text in data.template_arguments.items()}
    if tools:
        from transformers.utils.chat_template_utils import get_json_schema  # a slow import

        found["tools"] = [tool if isinstance(tool, Mapping) else get_json_schema(tool) for tool in tools]
    return found


def _meant(text: str) -> Any:
    """A value written as text. Example: False of "false", "deep" of "deep"."""
    try:
        return parsed(text)
    except ValueError:
        return text


def _tokens(place: int, record: Record, *, data: Data, tokenizer: Any, told: Mapping[str, Any] = NOTHING) -> Row | None:
    if data.prompt not in record:
        raise DataError(
            f"record {place} of {data.path} has no field {data.prompt!r}, only {sorted(record)}; set data.prompt to one"
        )
    tokens = encoded(place, record[data.prompt], data, tokenizer, told)
    level = () if data.curriculum.field is None else ((_level(place, record, data),),)
    return (tokens, *level) if 0 < len(tokens) <= data.max_prompt else None


def _level(place: int, record: Record, data: Data) -> int:
    """The number of a record's level."""
    field, names = str(data.curriculum.field), data.curriculum.levels
    level = record.get(field)
    if not isinstance(level, str | int) or isinstance(level, bool) or str(level) not in names:
        raise DataError(
            f"record {place} of {data.path} has the level {level!r} in the field {field!r}, and data.curriculum.stages names "
            f"{', '.join(names)}; name it there, with weight 0 if it is not to be used"
        )
    return names.index(str(level))


def encoded(place: int, asked: Any, data: Data, tokenizer: Any, told: Mapping[str, Any] = NOTHING) -> tuple[int, ...]:
    """A record's prompt as tokens, or DataError: of a million records it says which one is at fault."""
    try:
        return encode(asked, tokenizer, chat=data.chat_template, told=told)
    except DataError:
        raise
    except Exception as error:  # tokenizers and templates raise whatever they like
        raise DataError(
            f"the prompt of record {place} of {data.path}, {str(asked)[:80]!r}, is none to the tokenizer or its chat template: "
            f"{error}"
        ) from error


def templated(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, answer: bool, told: Mapping[str, Any] = NOTHING
) -> tuple[int, ...]:
    """Messages in the chat template, with the beginning of an answer or without."""
    made = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=answer, tokenize=True, strftime_now=TODAY.strftime, **told
    )
    return tuple(made["input_ids"])


def encode(
    asked: str | Sequence[Mapping[str, str]], tokenizer: Any, *, chat: bool, told: Mapping[str, Any] = NOTHING
) -> tuple[int, ...]:
    """A text, or a list of chat messages, as tokens."""
    if isinstance(asked, str) and not chat:
        return tuple(tokenizer(asked)["input_ids"])
    if tokenizer.chat_template is None:
        raise DataError("the tokenizer has no chat template; set data.chat_template to false, or give it one")
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
    return templated(tokenizer, messages, answer=True, told=told)


def said(asked: str | Sequence[Mapping[str, str]]) -> str:
    """The text of a prompt: of a chat, its last message."""
    return asked if isinstance(asked, str) else str(asked[-1]["content"])
