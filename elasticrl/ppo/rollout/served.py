"""The trainer's end of an engine that is a process beside it.

The idea: this keeps what is finished. An engine that dies in the middle takes with it the time of the samples that it had not
finished, and nothing else: they are asked for again, by the same ids and seeds, from the next one, and are the same. So too
when a peer's death cuts the step short: the gang that comes back to it finds what was finished here.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING

import torch

from elasticrl.ppo.rollout import weights
from elasticrl.ppo.rollout.engine import EngineFailed, Request, Samples, Sampling, StaleWeights
from elasticrl.ppo.rollout.inline import left_padded
from elasticrl.ppo.rollout.process import Said
from elasticrl.ppo.rollout.wire import TURN_S, Lost, Refused, Talk

if TYPE_CHECKING:
    from elasticrl.ppo.rollout.attend import Attendant

Source = Callable[[], "Iterable[weights.Bucket]"]


class Served:
    """An `Engine`. Each new generation of the gang calls `enter` before anything else.

    `writes`: this worker is the one of its node that hands the weights over; the others wait for it.
    """

    by_lane = False

    def __init__(self, attendant: Attendant, sampling: Sampling, *, check: Callable[[], None] = lambda: None) -> None:
        self.attendant, self.sampling, self.check = attendant, sampling, check
        self.version = -1
        self.found: dict[Request, Said] = {}  # finished, by the weights of `_kept`
        self._kept = -1
        self._life = ""
        self._source: Source = tuple
        self._writes, self._gathers = True, False

    def enter(self, *, life: str, source: Source, writes: bool, gathers: bool) -> None:
        """Another life of the gang, whose `source` brings the weights bucket by bucket. With `gathers` that is a collective, in
        which all join.
        """
        self._life, self._source, self._writes, self._gathers = life, source, writes, gathers
        self.version = -1  # whatever the engine has: all ranks must come to the same conclusion

    def publish(self, version: int) -> None:
        """Puts the weights where the engine finds them, and has it take them if it is up; else it will when it comes."""
        tag, limits = weights.Tag(life=self._life, version=version), self.attendant.limits
        if version != self._kept:
            self.found, self._kept = {}, version
        if self._writes:
            start = time.monotonic()
            nbytes = weights.write(self.attendant.home, tag, self._source(), within_s=limits.sync_s, check=self.check)
            written = time.monotonic() - start
            self._hand_over(tag)
            total = time.monotonic() - start
            self.attendant.say(
                f"weights of version {version}: {nbytes / 1e6:.1f} MB, "
                f"written in {written:.3f} s, taken in {total - written:.3f} s"
            )
        elif self._gathers:
            for _ in self._source():
                pass
        self.version = version

    def generate(self, requests: Sequence[Request], *, version: int) -> Samples:
        """From whichever engine lives, until all are there."""
        if version != self.version:
            raise StaleWeights(
                f"weights of version {version} were asked for, the engine was given {self.version}; publish them first"
            )
        tag = weights.Tag(life=self._life, version=version)
        barren = 0  # engines in a row that finished nothing
        while missing := [request for request in requests if request not in self.found]:
            try:
                with self.attendant.talk(self.check) as talk:
                    self._agree(talk, tag)
                    collect(talk, tag, missing, self.found)
            except Lost as lost:
                self.attendant.lost(str(lost))
                barren = 0 if any(request in self.found for request in missing) else barren + 1
                if barren >= self.attendant.limits.starts:
                    raise EngineFailed(
                        f"{barren} rollout engines in a row finished none of {len(missing)} samples, the last because: {lost}"
                    ) from lost
            except Refused as refused:
                self._await_orders()
                raise StaleWeights(str(refused)) from refused
        return samples([self.found[request] for request in requests], requests, self.sampling, version)

    def end(self) -> None:
        """This node has no more to generate."""
        if self._writes:
            self.attendant.end()
        else:
            self.attendant.close()

    def _await_orders(self) -> None:
        """The engine may have another life's weights already, from a worker of this node that was told of it before we were:
        then our own orders are on their way, and `check` raises.
        """
        deadline = time.monotonic() + self.attendant.limits.sync_s
        there = weights.tag_of(self.attendant.home)
        while there is not None and there.life != self._life and time.monotonic() < deadline:
            self.check()
            time.sleep(TURN_S)

    def _hand_over(self, tag: weights.Tag) -> None:
        """In the phase `sync` an engine that is not up is not waited for: it reads the weights when it starts."""
        if not self.attendant.up:
            return
        try:
            with self.attendant.talk(self.check) as talk:
                talk.ask("load", within_s=self.attendant.limits.sync_s, tag=asdict(tag))
        except Lost as lost:
            self.attendant.lost(str(lost))
        except Refused as refused:
            raise StaleWeights(str(refused)) from refused

    def _agree(self, talk: Talk, tag: weights.Tag) -> None:
        """The engine has these weights, or takes them now, or Refused."""
        deadline = time.monotonic() + self.attendant.limits.sync_s
        while not self._writes and weights.tag_of(self.attendant.home) != tag:
            self.check()
            if time.monotonic() > deadline:
                raise StaleWeights(
                    f"the worker of this node that hands weights over has not handed over version {tag.version} within "
                    f"{self.attendant.limits.sync_s:g} s"
                )
            time.sleep(TURN_S)
        talk.ask("load", within_s=self.attendant.limits.sync_s, tag=asdict(tag))


def collect(talk: Talk, tag: weights.Tag, missing: Sequence[Request], found: dict[Request, Said]) -> None:
    """Has the engine at the other end generate these; each is found as soon as it is finished."""
    names = {str(i): request for i, request in enumerate(missing)}  # ids of a job may repeat among steps
    prompts = list(chain.from_iterable(request.prompt for request in missing))
    talk.send(
        "generate", struct.pack(f"<{len(prompts)}i", *prompts), tag=asdict(tag), ids=list(names),
        seeds=[request.seed for request in missing], lengths=[len(request.prompt) for request in missing],
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
