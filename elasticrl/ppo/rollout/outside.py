"""The trainer's end of engines that are processes of their own, beside the worker or on other nodes.

The idea: this keeps what is finished. An engine that dies in the middle takes with it the time of the samples that it had not
finished, and nothing else: they are asked for again, by the same ids and seeds, from the next one, and are the same. So too
when a peer's death cuts the step short: the gang that comes back to it finds what was finished here.
"""

from __future__ import annotations

import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Final

import torch

from elasticrl.ppo.rollout import weights
from elasticrl.ppo.rollout.engine import Request, Samples, Sampling, StaleWeights, whole_blocks
from elasticrl.ppo.rollout.inline import left_padded
from elasticrl.ppo.rollout.process import Said

if TYPE_CHECKING:
    from elasticrl.ppo.rollout.wire import Talk

Source = Callable[[int], "Iterable[weights.Bucket]"]  # of a version
SIGN_S: Final = 1.0  # between signs that this worker waits, and does not hang


class Outside(ABC):
    """An `Engine`. Each new generation of the gang calls `enter` before anything else.

    `writes`: this worker is the one that hands the weights over, of its node or of the gang; the others wait for it.
    """

    by_lane = False

    def __init__(
        self, sampling: Sampling, *, check: Callable[[], None] = lambda: None, waits: Callable[[], None] = lambda: None
    ) -> None:
        """`check` raises if somebody wants us elsewhere; `waits` is called now and then while all that is done is to wait."""
        self.sampling, self.check = sampling, check
        self.alike = sampling.blocks  # the torch engine's code
        self._waits, self._signed = waits, 0.0
        self.version = -1
        self.found: dict[Request, Said] = {}  # finished, by the weights of `_kept`
        self._kept = -1
        self._life = ""
        self._source: Source = lambda _version: ()
        self._writes, self._gathers = True, False

    def crowds(self, sizes: Sequence[int]) -> list[list[int]]:
        """All at once."""
        return [list(range(len(sizes)))] if sizes else []

    def enter(self, *, life: str, source: Source, writes: bool, gathers: bool) -> None:
        """Another life of the gang, whose `source` brings the weights bucket by bucket. With `gathers` that is a collective, in
        which all join.
        """
        self._life, self._source, self._writes, self._gathers = life, source, writes, gathers
        self.version = -1  # whatever the engine has: all ranks must come to the same conclusion

    def publish(self, version: int) -> None:
        """Has the weights brought to where engines take them."""
        if version != self._kept:
            self.found, self._kept = {}, version
        if self._writes:
            self._bring(self._tag(version), self._source(version))
        elif self._gathers:
            for _ in self._source(version):
                pass
        self.version = version

    def generate(self, requests: Sequence[Request], *, version: int) -> Samples:
        """From whichever engine lives, until all are there."""
        if version != self.version:
            raise StaleWeights(
                f"weights of version {version} were asked for, those published are of {self.version}; publish them first"
            )
        self._gather(self._tag(version), requests)
        return samples([self.found[request] for request in requests], requests, self.sampling, version)

    def wait(self, done: Callable[[], bool]) -> None:
        """Looks whether the gang goes on until it is done."""
        while not done():
            self.check()

    @abstractmethod
    def end(self) -> None:
        """This node has no more to generate."""

    @abstractmethod
    def _bring(self, tag: weights.Tag, buckets: Iterable[weights.Bucket]) -> None:
        """These weights to where engines take them."""

    @abstractmethod
    def _gather(self, tag: weights.Tag, requests: Sequence[Request]) -> None:
        """All of these into `found`."""

    def _wanted(self, tag: weights.Tag) -> None:
        """Once in every turn of waiting for samples. StaleWeights: another life of the gang has begun, and this thread has
        missed the `check` that would have told it so.
        """
        if tag.life != self._life:
            raise StaleWeights(
                f"another life of the gang has begun: nobody waits for version {tag.version} of {tag.life!r}"
            )

    def _sign(self) -> None:
        """Once in every turn of waiting."""
        now = time.monotonic()
        if now > self._signed + SIGN_S and here():
            self._signed = now
            self._waits()

    def _missing(self, requests: Sequence[Request]) -> list[Request]:
        return whole_blocks([request for request in requests if request not in self.found], requests)

    def _tag(self, version: int) -> weights.Tag:
        return weights.Tag(life=self._life, version=version)


def here() -> bool:
    """Whether this is the training thread, which alone may beat."""
    return threading.current_thread() is threading.main_thread()


def collect(talk: Talk, tag: weights.Tag, missing: Sequence[Request], found: dict[Request, Said]) -> None:
    """Has the engine at the other end generate these; each is found as soon as it is finished."""
    names = {str(i): request for i, request in enumerate(missing)}  # ids of a job may repeat among steps
    prompts = list(chain.from_iterable(request.prompt for request in missing))
    talk.send(
        "generate", struct.pack(f"<{len(prompts)}i", *prompts), tag=asdict(tag), ids=list(names),
        seeds=[request.seed for request in missing], lengths=[len(request.prompt) for request in missing],
        widths=[request.width for request in missing], blocks=[request.block for request in missing],
        draws=[request.draw and asdict(request.draw) for request in missing],
    )  # fmt: skip
    while names:
        frame = talk.receive()  # a sign of life at least, in every `health_timeout`
        if frame.says["op"] != "sample":
            continue
        count = len(frame.raw) // 8
        values = struct.unpack(f"<{count}i{count}f", frame.raw)
        request = names.pop(frame.says["id"])
        found[request] = Said(
            key=request.id, tokens=values[:count], logprobs=values[count:], ended=bool(frame.says["ended"])
        )


def samples(said: Sequence[Said], requests: Sequence[Request], sampling: Sampling, version: int) -> Samples:
    """Answers as tensors."""
    s, count = sampling, len(said)
    prompts, seen = left_padded([request.prompt for request in requests], s.prompt_tokens, s.pad)
    response = torch.full((count, s.max_tokens), s.pad)
    mask = torch.zeros(count, s.max_tokens, dtype=torch.bool)
    scores = torch.zeros(count, s.max_tokens)
    for i, one in enumerate(said):
        length = len(one.tokens)
        response[i, :length] = torch.tensor(one.tokens, dtype=response.dtype)
        scores[i, :length] = torch.tensor(one.logprobs)
        mask[i, :length] = True
    return Samples(
        ids=tuple(request.id for request in requests),
        tokens=torch.cat([prompts, response], 1),
        attention=torch.cat([seen, mask], 1),
        mask=mask,
        logprobs=scores,
        ended=torch.tensor([one.ended for one in said], dtype=torch.bool),
        version=version,
    )
