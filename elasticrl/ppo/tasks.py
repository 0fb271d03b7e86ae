"""Rewards by a rule, and an environment with a tool, for trials: something to learn in seconds, with nothing to download.

The one idea: each token is scored by itself, so that half an answer has half of the reward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticrl.ppo.environments import Message, Reply, Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticrl.ppo.rewards import Answer, Score


def reverse(answers: Sequence[Answer]) -> list[Score]:
    """The prompt read backwards."""
    return [_right(answer.pieces, answer.prompt[::-1]) for answer in answers]


def sort(answers: Sequence[Answer]) -> list[Score]:
    """The prompt's digits in rising order."""
    return [_right(answer.pieces, "".join(sorted(answer.prompt))) for answer in answers]


class Calculator:
    """The prompt is a product, say 6*7. The first message must be a call of the calculator, which is the product word for word;
    its result is shown, and the second message must say it. Each turn has half of the reward.
    """

    def __init__(self) -> None:
        self.asked = ""

    def reset(self, task: Task) -> None:
        """A new product."""
        self.asked = task.prompt

    def step(self, message: Message) -> Reply:
        """The result of a call, or the verdict on an answer."""
        result = calculated(self.asked)
        if message.turn == 0:
            right = message.text == self.asked and message.whole
            return Reply(observation=f"={result}=", reward=halved(message, self.asked), done=not right)
        return Reply(reward=halved(message, result), done=True)

    def save(self) -> str:
        """All that it has to know."""
        return self.asked

    def load(self, state: str) -> None:
        """The reverse of `save`."""
        self.asked = state


def calculated(product: str) -> str:
    """With as many digits as it may have, or the tokens of an answer would say how large it is.

    >>> calculated("6*7"), calculated("2*3")
    ('42', '06')
    """
    one, _, other = product.partition("*")
    return f"{int(one) * int(other):0{len(one) + len(other)}}"


def halved(message: Message, wanted: str) -> list[float]:
    """Half of a reward of 1, for each token its share; the last is the end."""
    given = [*message.text] + [""] * (len(message.tokens) - len(message.text))
    share = 0.5 / (len(wanted) + 1)
    right = [i < len(wanted) and piece == wanted[i] for i, piece in enumerate(given)]
    if message.whole and len(message.text) == len(wanted):
        right[-1] = True
    return [share * each for each in right]


def _right(given: Sequence[str], wanted: str) -> Score:
    """Each token's share of a perfect answer, which makes 1 in all.

    >>> _right("1243", "1234"), _right("12345", "1234"), _right("", "1234")
    ([0.25, 0.25, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25, 0.0], [])
    """
    return [(i < len(wanted) and piece == wanted[i]) / len(wanted) for i, piece in enumerate(given)]
