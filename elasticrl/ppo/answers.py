"""Answers that are given: pairs of a better and a worse one for DPO, single ones with a verdict for KTO, single ones for SFT.

The idea: a record becomes one or two answers to its prompt, in tokens; a record that does not fit is left out and counted, like
a prompt that is too long. Which record comes when is the cursor's affair, and its name is in its answers', for the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from elasticrl.ppo.preferences import Given
from elasticrl.ppo.prompts import encoded, said, templated
from elasticrl.ppo.records import DataError, Record, records
from elasticrl.ppo.tokens import Row, Table, name_of, table

if TYPE_CHECKING:
    from pathlib import Path

    from elasticrl.config.training import Data
    from elasticrl.runtime.data.cursor import Cursor

PER_RECORD = {"dpo": 2, "kto": 1, "sft": 1}  # answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A record's answers, without names. Example: Answered(prompt=(12, 3, 13), answers=((3, 11),), good=(True,))"""

    prompt: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    good: tuple[bool, ...]


class Answers:
    """A data set. `left_out` were too long."""

    def __init__(self, rows: Table, algorithm: str) -> None:
        self._rows, self._algorithm = rows, algorithm
        self.left_out, self.content = rows.left_out, rows.content

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Answered:
        prompt, *rest = self._rows[number]
        if self._algorithm == "dpo":
            return Answered(prompt=prompt, answers=tuple(rest), good=(True, False))
        answer, label = (*rest, (1,))[:2]
        return Answered(prompt=prompt, answers=(answer,), good=(bool(label[0]),))


class Feed:
    """Which answers a lane gets in a step: those of the cursor's records."""

    def __init__(self, cursor: Cursor, data: Answers) -> None:
        self._cursor, self._data = cursor, data

    def __call__(self, step: int, lane: int) -> list[Given]:
        """A pair's two follow each other; the first stands for the record in the ledger."""
        found = []
        for sample in self._cursor.ids(step, 0, lane):
            told = self._data[sample.index]
            for i, (answer, good) in enumerate(zip(told.answers, told.good, strict=True)):
                name = f"{sample}.{i}" if len(told.answers) > 1 else str(sample)
                found.append(Given(id=name, prompt=told.prompt, answer=answer, good=good))
        return found


def load(
    data: Data,
    tokenizer: Any,
    *,
    algorithm: str,
    answer_tokens: int,
    ends: Sequence[int] = (),
    keep: Path | None = None,
) -> Answers:
    """What `data` of the configuration names, for dpo, kto or sft; each answer ends with one of the tokens that end one
    (`ends`, the tokenizer's if empty), which is what the policy should say there. Tokens are kept in the folder `keep`, for
    the next process that wants them.
    """
    ends = tuple(ends) or (tokenizer.eos_token_id,)
    found = records(data)
    read = {"dpo": _pair, "kto": _single, "sft": _plain}[algorithm]
    work = partial(
        _told, data=data, tokenizer=tokenizer, read=read, answer_tokens=answer_tokens,
        ends=ends, turn=turn_end(tokenizer, ends),
    )  # fmt: skip
    fields = (data.prompt, data.chosen, data.rejected, data.completion, data.label)
    settings = (algorithm, answer_tokens, ends, *fields, data.chat_template, data.max_prompt)
    rows = table(found, work, data, keep=keep, name=name_of(found, tokenizer, *settings))
    if not len(rows):
        raise DataError(
            f"{data.path} has no record with a prompt of at most {data.max_prompt} tokens and answers of at most "
            f"{answer_tokens} ({rows.left_out} were left out); raise data.max_prompt or rollout.max_tokens"
        )
    return Answers(rows, algorithm)


def turn_end(tokenizer: Any, ends: Sequence[int]) -> int:
    """Which of `ends` the chat template puts after an assistant's answer; the tokenizer's if it puts none."""
    if len(ends) > 1 and tokenizer.chat_template is not None:
        one, other = (
            templated(
                tokenizer, [{"role": "user", "content": "0"}, {"role": "assistant", "content": answer}], answer=False
            )
            for answer in "01"
        )
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(one), reversed(other), strict=False))
        after = [token for token, _ in alike if token in ends]  # from the last on
        return int(after[-1] if after else tokenizer.eos_token_id)
    return int(tokenizer.eos_token_id)


def _told(
    place: int,
    record: Record,
    *,
    data: Data,
    tokenizer: Any,
    read: Callable[[Record, int, Data], tuple[tuple[str, ...], Row]],
    answer_tokens: int,
    ends: Sequence[int],
    turn: int,
) -> Row | None:
    asked = _field(record, data.prompt, "prompt", place, data)
    prompt = encoded(place, asked, data, tokenizer)
    texts, more = read(record, place, data)
    end = tokenizer.eos_token_id if isinstance(asked, str) and not data.chat_template else turn
    tokens = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    answers = tuple(answer if answer and answer[-1] in ends else (*answer, end) for answer in tokens)
    if not 0 < len(prompt) <= data.max_prompt or max(map(len, answers)) > answer_tokens:
        return None
    return (prompt, *answers, *more)


def _pair(record: Record, place: int, data: Data) -> tuple[tuple[str, ...], Row]:
    chosen = said(_field(record, data.chosen, "chosen", place, data))
    rejected = said(_field(record, data.rejected, "rejected", place, data))
    return (chosen, rejected), ()


def _single(record: Record, place: int, data: Data) -> tuple[tuple[str, ...], Row]:
    label = _field(record, data.label, "label", place, data)
    if not isinstance(label, bool | int):
        raise DataError(f"record {place} of {data.path} has the label {label!r}; it must be true or false")
    return (said(_field(record, data.completion, "completion", place, data)),), ((int(bool(label)),),)


def _plain(record: Record, place: int, data: Data) -> tuple[tuple[str, ...], Row]:
    return (said(_field(record, data.completion, "completion", place, data)),), ()


def _field(record: Mapping[str, Any], name: str, key: str, place: int, data: Data) -> Any:
    if name not in record:
        raise DataError(
            f"record {place} of {data.path} has no field {name!r}, only {sorted(record)}; set data.{key} to one"
        )
    return record[name]
