"""The trainer's end of an engine that is a process beside it: what `Attendant` keeps alive, reached through a socket."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING

from elasticrl.ppo.rollout import weights
from elasticrl.ppo.rollout.engine import EngineFailed, Request, Sampling, StaleWeights
from elasticrl.ppo.rollout.outside import Outside, collect, here
from elasticrl.ppo.rollout.wire import TURN_S, Lost, Refused, Talk

if TYPE_CHECKING:
    from elasticrl.ppo.rollout.attend import Attendant


SILENT_S = 1.0  # an engine that is at work says more often that it lives, most of the time


class Served(Outside):
    """Of each node one worker writes. Who has to wait for its engine, or hears nothing of it, says so until it has its samples:
    the others are through with theirs, and wait for it. It does so inside of `alone`, behind which it is at work again.
    """

    def __init__(
        self,
        attendant: Attendant,
        sampling: Sampling,
        *,
        check: Callable[[], None] = lambda: None,
        waits: Callable[[], None] = lambda: None,
        alone: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        super().__init__(sampling, check=check, waits=waits)
        self.attendant = attendant
        self._alone = alone
        self._missed = False  # there was no engine when it was wanted
        self._quiet = False  # it is there, and says nothing

    def wait(self, done: Callable[[], bool]) -> None:
        """Takes what the engine says until it is done."""
        with self._alone():
            while not done():
                self._turn()

    def _bring(self, tag: weights.Tag, buckets: Iterable[weights.Bucket]) -> None:
        """Puts them where the engine finds them, and has it take them if it is up; else it will when it comes."""
        start, limit_s = time.monotonic(), self.attendant.limits.sync_s
        self._signed = start  # an engine that is well is through before the first sign
        try:
            nbytes = self._write(tag, buckets, limit_s)
        except Lost as lost:  # before the first bucket: whoever has read for that long will not run on
            self.attendant.lost(str(lost))
            try:
                nbytes = self._write(tag, buckets, self.attendant.limits.start_s)
            except Lost as still:
                raise EngineFailed(f"{still}, though the rollout engine was to be ended for it") from still
        written = time.monotonic() - start
        with self._alone():
            self._hand_over(tag)
        total = time.monotonic() - start
        self.attendant.say(
            f"weights of version {tag.version}: {nbytes / 1e6:.1f} MB, "
            f"written in {written:.3f} s, taken in {total - written:.3f} s"
        )

    def _write(self, tag: weights.Tag, buckets: Iterable[weights.Bucket], within_s: float) -> int:
        """Writes them where the engine reads, a sign of life after each bucket; how many bytes."""
        home = self.attendant.home
        return weights.write(home, tag, buckets, within_s=within_s, check=self._sync_turn, alone=self._alone)

    def _gather(self, tag: weights.Tag, requests: Sequence[Request]) -> None:
        with self._alone() if here() else nullcontext():
            self._ask_all(tag, requests)

    def _ask_all(self, tag: weights.Tag, requests: Sequence[Request]) -> None:
        barren, self._missed = 0, False  # engines in a row that finished nothing
        talk: Talk | None = None

        def turn() -> None:
            self._turn()
            self._wanted(tag)
            self._hear(talk)

        while missing := self._missing(requests):
            lacking = [request for request in missing if request not in self.found]
            try:
                with self.attendant.talk(turn) as talk:
                    self._agree(talk, tag)
                    collect(talk, tag, missing, self.found)
            except Lost as lost:
                talk = None
                self.attendant.lost(str(lost))
                barren = 0 if any(request in self.found for request in lacking) else barren + 1
                if barren >= self.attendant.limits.starts:
                    raise EngineFailed(
                        f"{barren} rollout engines in a row finished none of {len(lacking)} samples, the last because: {lost}"
                    ) from lost
            except Refused as refused:
                if refused.kind == "other":
                    raise EngineFailed(f"the rollout engine will not do what it is asked: {refused}") from refused
                self._await_orders()
                raise StaleWeights(str(refused)) from refused

    def end(self) -> None:
        """This node has no more to generate."""
        if self._writes:
            self.attendant.end()
        else:
            self.attendant.close()

    def _hear(self, talk: Talk | None) -> None:
        """Who hears nothing of its engine waits for it; as soon as that says something, this worker is at work again."""
        quiet, before = talk is not None and talk.quiet_for(SILENT_S), self._quiet
        self._quiet = quiet
        if quiet:
            self._sign()
        elif before and not self._missed and here():
            with self._alone():
                pass  # behind it this worker is back

    def _turn(self) -> None:
        """Once in every turn of waiting."""
        self.check()
        self._missed = self._missed or not self.attendant.up
        if self._missed:
            self._sign()

    def _sync_turn(self) -> None:
        """Once in every turn of waiting in the phase `sync`."""
        self.check()
        self._sign()

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
            with self.attendant.talk(self._sync_turn) as talk:
                self._load(talk, tag)
        except Lost as lost:
            self.attendant.lost(str(lost))
        except Refused as refused:
            raise StaleWeights(str(refused)) from refused

    def _agree(self, talk: Talk, tag: weights.Tag) -> None:
        """The engine has these weights, or takes them now, or Refused."""
        deadline = time.monotonic() + self.attendant.limits.sync_s
        while not self._writes and weights.tag_of(self.attendant.home) != tag:
            talk.check()
            if time.monotonic() > deadline:
                raise StaleWeights(
                    f"the worker of this node that hands weights over has not handed over version {tag.version} within "
                    f"{self.attendant.limits.sync_s:g} s"
                )
            time.sleep(TURN_S)
        self._load(talk, tag)

    def _load(self, talk: Talk, tag: weights.Tag) -> None:
        """At once, if it has them. One that is silent though it takes none is not waited for as long as one that does."""
        talk.ask("load", within_s=self.attendant.limits.sync_s, busy=self.attendant.loads, tag=asdict(tag))
