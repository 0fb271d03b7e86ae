"""Synthetic tasks with a rule for a reward: something to learn in seconds, with nothing to download.

The idea: place n of a task is a function of n, so that every worker has the same data without a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elasticrl.ppo.prompts import Prompt, encode
from elasticrl.runtime.rng import seed

if TYPE_CHECKING:
    from elasticrl.ppo.rewards import Answer, Score


@dataclass(frozen=True, slots=True)
class Digits(Sequence[Prompt]):
    """Prompts of so many random digits. Example: Digits(tokenizer, digits=4)[17].text is "5032"."""

    tokenizer: Any
    digits: int
    size: int = 1_000_000

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, place: Any) -> Any:
        if not 0 <= place < self.size:
            raise IndexError(place)
        text = f"{seed('digits', self.digits, int(place)) % 10**self.digits:0{self.digits}}"
        return Prompt(place=place, tokens=encode(text, self.tokenizer, chat=True), text=text, record={"prompt": text})


def reverse(answers: Sequence[Answer]) -> list[Score]:
    """The prompt read backwards."""
    return [_right(answer.pieces, answer.prompt[::-1]) for answer in answers]


def sort(answers: Sequence[Answer]) -> list[Score]:
    """The prompt's digits in rising order."""
    return [_right(answer.pieces, "".join(sorted(answer.prompt))) for answer in answers]


def _right(given: Sequence[str], wanted: str) -> Score:
    """Each token's share of a perfect answer, which makes 1 in all.

    >>> _right("1243", "1234"), _right("12345", "1234"), _right("", "1234")
    ([0.25, 0.25, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25, 0.0], [])
    """
    return [(i < len(wanted) and piece == wanted[i]) / len(wanted) for i, piece in enumerate(given)]
