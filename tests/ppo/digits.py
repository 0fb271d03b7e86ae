"""Synthetic prompts: place n is a function of n, so every worker has the same data without a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from elasticrl.ppo.prompts import Prompt, encode
from elasticrl.runtime.rng import seed


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
