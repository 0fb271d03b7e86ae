"""What a rollout engine is: requests in, samples out, by weights of a known version.

The idea: a request carries all the chance it will ever need, the seed of its own noise. So what comes back depends on the
request and the weights, not on who generates it, when, or beside which others; a sample lost with its engine is generated
again elsewhere, the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Protocol, TypeVar, runtime_checkable

import torch

K = TypeVar("K")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn, and the fixed shapes that this happens in. Constants of a job: other shapes compute other bits.

    Example: Sampling(prompt_tokens=512, max_tokens=256, rows=16, eos=(151645,), pad=151643)
    """

    prompt_tokens: int  # no prompt is longer; in samples prompts are padded to this on the left
    max_tokens: int
    rows: int  # samples generated at once
    eos: tuple[int, ...]
    pad: int
    temperature: float = 1.0  # 0 takes the likeliest
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    blocks: bool = True  # the requests of a block are generated together: an answer may depend on those beside it


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How the tokens of a request are drawn that is not trained on, in place of `Sampling`'s own. Its tokens are no more.

    Example: Draw(tokens=256, temperature=0.0)
    """

    tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sample to be generated. Example: Request(id="0/17", prompt=(3, 1, 4, 1), seed=5577006791947779410, width=16)"""

    id: str
    prompt: tuple[int, ...]
    seed: int
    width: int = (
        0  # to which its prompt is padded while it is generated, and a function of the data alone; 0: prompt_tokens
    )
    block: str = (
        ""  # generated together with the others of this name; a function of the data alone. "": with any others
    )
    draw: Draw | None = None  # of engines apart; None: as all that is trained on


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """What was generated, in the order of the requests. P prompt tokens padded left, R response tokens padded right.

    Example: Samples(ids=("0/17",), tokens=tensor[1, P+R], ...)
    """

    ids: tuple[str, ...]
    tokens: torch.Tensor  # [B, P + R] int64
    attention: torch.Tensor  # [B, P + R] bool: all but padding
    mask: torch.Tensor  # [B, R] bool: what was generated, the end-of-sequence token included
    logprobs: torch.Tensor  # [B, R] float32: of each token by the engine, at the temperature, before top_p and top_k
    ended: torch.Tensor  # [B] bool: by an end-of-sequence token, not by max_tokens
    version: int  # of the weights


def drawn(sampling: Sampling, draw: Draw | None) -> Sampling:
    """How a request's tokens are drawn."""
    if draw is None:
        return sampling
    return replace(sampling, max_tokens=draw.tokens, temperature=draw.temperature, top_p=draw.top_p, top_k=draw.top_k)


def odd_draw(draw: Draw, most: int) -> str:
    """Why tokens cannot be drawn so where a request has no more than `most`; "" if they can.

    >>> odd_draw(Draw(tokens=64, temperature=0.0), 256), odd_draw(Draw(tokens=512), 256)
    ('', '512 tokens were asked for, where 1 to 256 fit')
    """
    if type(draw.tokens) is not int or not 1 <= draw.tokens <= most:
        return f"{draw.tokens!r} tokens were asked for, where 1 to {most} fit"
    numbers = type(draw.temperature) in (int, float) and type(draw.top_p) in (int, float)
    if not numbers or not (isfinite(draw.temperature) and draw.temperature >= 0 and 0 < draw.top_p <= 1):
        return f"nothing is drawn at temperature {draw.temperature!r} and top_p {draw.top_p!r}"
    if type(draw.top_k) is not int or draw.top_k < 0:
        return f"its top_k {draw.top_k!r} is no whole number from 0 on"
    return ""


def whole_blocks(lacking: Sequence[K], wanted: Sequence[K]) -> list[K]:
    """Of what is wanted all that must be asked for where these lack: their blocks, whole.

    >>> asked = [Request(id=name, prompt=(1,), seed=0, block=name[:-1]) for name in ("a0", "a1", "b0", "b1", "2", "3")]
    >>> [request.id for request in whole_blocks([asked[1], asked[4]], asked)]
    ['a0', 'a1', '2']
    """
    lacks, blocks = set(lacking), {block_of(one) for one in lacking}
    return [one for one in wanted if one in lacks or (block_of(one) and block_of(one) in blocks)]


def block_of(asked: object) -> str:
    """Of a request; nothing else has one."""
    return asked.block if isinstance(asked, Request) else ""


class StaleWeights(RuntimeError):
    """The engine has other weights than was asked for."""


class EngineFailed(RuntimeError):
    """There is no engine, and none can be had; the sentence says why."""


class Engine(Protocol):
    """Anything that generates."""

    sampling: Sampling

    @property
    def alike(self) -> bool:
        """It computes as a trainer in float32 does: its log-probabilities are the trainer's, but for the last bits."""

    @property
    def by_lane(self) -> bool:
        """It is asked for few lanes at once, in lockstep for each by itself; else for all that are missing."""

    def crowds(self, sizes: Sequence[int]) -> list[list[int]]:
        """Of so many lanes, of so many samples, those that are best asked for at once where it is not in lockstep, by place."""

    @property
    def version(self) -> int:
        """Of the weights it has."""

    def publish(self, version: int) -> None:
        """From now on generate with the actor's present weights, under this version. Raises if that cannot be made sure."""

    def generate(self, requests: Sequence[Request], *, version: int) -> Samples:
        """By weights of this version and no other: StaleWeights else."""


@runtime_checkable
class Apart(Engine, Protocol):
    """One that is a process of its own: it generates while the worker does other things."""

    def wait(self, done: Callable[[], bool]) -> None:
        """The training thread waits for another that is in `generate`; `done` takes a moment to tell. Raises if somebody wants
        us elsewhere.
        """
