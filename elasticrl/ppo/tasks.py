"""Rewards by a rule, for trials: something to learn in seconds, with nothing to download.

The one idea: each token is scored by itself, so that half an answer has half of the reward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticrl.ppo.rewards import Answer, Score


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
