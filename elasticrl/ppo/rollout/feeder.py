"""The weights on their way to the engines of rollout nodes: to all at once where that is quicker, or to each by itself.

The idea: one thread keeps one engine's connection, and its weights those that were offered last. Where a group with all of
them is quicker (`circle`), one more thread sends through that, and tells the engines what to do by way of the threads that have
their connections. Whoever has not got a set that way gets it piece by piece, so a circle that breaks, or cannot be formed,
costs time and nothing else; and an engine that comes late, or comes back empty, is fed without the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from elasticrl.ppo.rollout import weights
from elasticrl.ppo.rollout.circle import FAILURES, PROBE, Circle, Transport, open_store
from elasticrl.ppo.rollout.wire import TURN_S, Lost, Refused, Remote, Talk
from elasticrl.runtime.interrupt import Interrupt

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from elasticrl.ppo.rollout.attend import Limits

LOOK_S: Final = 0.1
REST_S: Final = 0.5  # before an engine is asked again whose connection broke
FORMING: Final = 0.25  # of rollout.sync_timeout, for one circle to form
SENDING: Final = 0.5  # of it, for one set through a circle: enough is left to send it another way


def transports(asked: str, *, engines: int, cards: bool) -> Sequence[Transport]:
    """Which circles to try, in this order, before each engine is fed by itself.

    >>> transports("auto", engines=3, cards=True), transports("auto", engines=3, cards=False)
    (('nccl', 'gloo'), ('gloo',))
    >>> transports("auto", engines=1, cards=False), transports("nccl", engines=1, cards=False)
    ((), ('gloo',))
    """
    if asked == "tcp" or not engines or (asked == "auto" and engines == 1 and not cards):
        return ()
    return ("nccl", "gloo") if cards and asked != "gloo" else ("gloo",)


@dataclass(slots=True, kw_only=True, eq=False)
class Line:
    """One engine's connection, while it holds."""

    remote: Remote
    host: str  # this end's address
    card: bool  # the engine computes on a GPU
    rate: float  # bytes a second, by a probe
    has: weights.Tag | None  # the engine's weights
    doubted: bool = False  # somebody says that it has not


class Cast(threading.Thread):
    """One set, sent to all engines of a circle at once. `orders` are what each engine is to be told, in turn."""

    def __init__(
        self, home: Path, tag: weights.Tag, lines: Mapping[str, Line], circle: Circle | None, probed: float,
        tries: Sequence[Transport], *, asked: bool, sync_s: float, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        super().__init__(name=f"casts version {tag.version}", daemon=True)
        self.tag, self.lines, self.circle = tag, lines, circle
        self.ranks = {line: rank for rank, line in enumerate(lines.values(), 1)}
        self.orders: list[dict[str, Any]] = []
        self.over = threading.Event()
        self.given = False
        self.hopeless = False  # with these engines: none forms, none holds, or none is quicker
        self.told = ""  # what it took, in words
        self.probed = probed  # seconds of a probe through the circle
        self.flag = Interrupt()
        self._within = circle.flag if circle is not None else Interrupt()  # what waits in a circle looks at this one
        self._home, self._tries, self._asked, self._sync_s, self._say = home, tries, asked, sync_s, say

    def run(self) -> None:
        """To its end, which is soon after `end`."""
        try:
            with weights.outgoing(self._home, self.tag, within_s=self._sync_s) as (page, pieces):
                nbytes = sum(bucket["bytes"] for bucket in page["buckets"])
                self.circle = self.circle or self._formed(nbytes)
                if self.circle is not None:
                    start = time.monotonic()
                    self.orders.append({"op": "cast", "page": page, "within_s": SENDING * self._sync_s})
                    self.circle.give(self._until(pieces, start + SENDING * self._sync_s))
                    self.told = (
                        f"{nbytes / 1e6:.1f} MB over {self.circle.transport}, to {len(self.lines)} engines at once, in "
                        f"{time.monotonic() - start:.3f} s ({self.probed * nbytes / PROBE:.3f} s by the probe)"
                    )
                    self.given = True
        except (*FAILURES, weights.Torn, Lost) as error:
            self._say(f"weights of version {self.tag.version} go to each engine by itself: {error}")
        self.hopeless = not self.given and self.flag.reason is None
        if not self.given:
            self.leave()
        self.over.set()

    def end(self, why: str) -> None:
        """From any thread."""
        self.flag.set(why)
        self._within.set(why)

    def leave(self) -> None:
        """The circle is not needed any more."""
        circle, self.circle = self.circle, None
        if circle is not None:
            with suppress(*FAILURES):
                circle.leave()

    def _formed(self, nbytes: int) -> Circle | None:
        """The first that forms and is no slower than a connection to each, or that was asked for."""
        apart_s = sum(nbytes / line.rate for line in self.lines.values())
        for transport in self._tries:
            self._within = Interrupt()
            self.flag.check("forming a circle")
            try:
                circle = self._form(transport)
                self.probed = circle.probe()
            except FAILURES as error:
                self._within.set("it did not form")
                self.flag.check("forming a circle")
                self._say(f"no circle over {transport} with {len(self.lines)} engines: {error}")
                continue
            within = self.probed * nbytes / PROBE
            chosen = self._asked or within <= apart_s
            self._say(
                f"weights go {f'through a circle over {transport}' if chosen else 'over TCP, to each by itself'}: "
                f"{nbytes / 1e6:.1f} MB to {len(self.lines)} engines take {within:.3f} s by a probe of {transport}, "
                f"{apart_s:.3f} s by those of TCP"
            )
            if chosen:
                return circle
            circle.leave()
        return None

    def _form(self, transport: Transport) -> Circle:
        host, limit_s = next(iter(self.lines.values())).host, FORMING * self._sync_s
        store, at = open_store(host)
        world = 1 + len(self.lines)
        self.orders.append({"op": "meet", "transport": transport, "store": at, "world": world, "within_s": limit_s})
        return Circle(transport, store, 0, world, host=host, within_s=limit_s, flag=self._within)

    def _until(self, pieces: Any, deadline: float) -> Any:
        for piece in pieces:
            self.flag.check("sending weights")
            if time.monotonic() > deadline:
                raise Lost(f"a circle took longer than half of {self._sync_s:g} s (rollout.sync_timeout)")
            yield piece


def _tag_of(hello: Mapping[str, Any]) -> weights.Tag | None:
    return weights.Tag(**hello["tag"]) if hello["tag"] else None


class Feeder:
    """Keeps every engine's weights those that lie in `home` under the tag that was offered: one thread for each engine."""

    def __init__(
        self, roll: Callable[[], Mapping[str, Remote]], home: Path, makes: str, limits: Limits, say: Callable[[str], None], *,
        transport: str = "auto",
    ) -> None:  # fmt: skip
        self._roll, self._home, self._makes, self._limits, self._say = roll, home, makes, limits, say
        self._transport = transport
        self._tag: weights.Tag | None = None
        self._lines: dict[str, Line] = {}  # by node
        self._failed: dict[str, str] = {}  # why there is none
        self._cast: Cast | None = None  # the newest
        self._threads: dict[str, threading.Thread] = {}
        self._closing = threading.Event()
        self._looking = threading.Thread(target=self._look, name="feeds engines", daemon=True)
        self._looking.start()

    def offer(self, tag: weights.Tag | None) -> None:
        """These lie there now; None: nothing does that anybody should read."""
        if self._cast is not None and not self._cast.over.is_set():
            self._cast.end("other weights are offered")
        if tag is not None:
            self._begin(tag)
        self._tag = tag

    def settled(self, tag: weights.Tag) -> bool:
        """Every engine has them, or is known not to answer."""
        lines = self._lines  # of which other threads take out those that end
        return all(
            node in self._failed or ((line := lines.get(node)) is not None and line.has == tag) for node in self._roll()
        )

    def doubt(self, node: str) -> None:
        """It says that it has other weights: somebody who has been replaced may have brought it his once more."""
        if (line := self._lines.get(node)) is not None:
            line.doubted = True

    def close(self) -> None:
        """Whatever is under way ends within a turn."""
        self._closing.set()
        self._looking.join()
        if self._cast is not None:
            self._cast.end("this worker has nothing to bring any more")
            self._cast.over.wait(self._limits.sync_s)
            self._cast.leave()

    def _begin(self, tag: weights.Tag) -> None:
        """A cast of this set, if one is worth trying with the engines that are there."""
        before, lines = self._cast, dict(sorted(self._lines.copy().items()))
        circle, probed = None, 0.0
        if before is not None:
            before.over.wait(self._limits.sync_s)
            same = list(before.lines.values()) == list(lines.values())
            if same and before.hopeless:
                return
            if same and before.circle is not None and before.circle.flag.reason is None:
                circle, probed = before.circle, before.probed
            else:
                before.leave()
        cards = torch.cuda.is_available() and all(line.card for line in lines.values())
        tries = transports(self._transport, engines=len(lines), cards=cards)
        if tries:
            self._cast = Cast(
                self._home, tag, lines, circle, probed, tries, asked=self._transport != "auto", sync_s=self._limits.sync_s,
                say=self._say,
            )  # fmt: skip
            self._cast.start()

    def _look(self) -> None:
        while not self._closing.wait(LOOK_S):
            for node, remote in self._roll().items():
                thread = self._threads.get(node)
                if thread is None or not thread.is_alive():
                    self._threads[node] = threading.Thread(
                        target=self._feed, args=(node, remote), name=f"feeds {node}", daemon=True
                    )
                    self._threads[node].start()
        for thread in self._threads.values():
            thread.join()

    def _feed(self, node: str, remote: Remote) -> None:
        """One connection, for as long as it holds and the engine is where it was."""
        line: Line | None = None
        try:
            with Talk(remote, within_s=self._limits.health_s, check=self._check) as talk:
                line = self._lines[node] = self._begun(talk, remote)
                while self._roll().get(node) == remote:
                    tag = self._tag
                    if line.doubted:
                        line.doubted, line.has = False, _tag_of(hello_of(talk, self._makes))
                    if tag is not None and line.has != tag:
                        line.has = tag if self._bring(node, talk, line, tag) else None
                    if line.has == tag:
                        self._failed.pop(node, None)
                    talk.wait(LOOK_S)
        except (Lost, Refused, weights.Torn, OSError) as error:
            why = f"weights do not reach the engine of {node} at {remote}: {error}"
            if not self._closing.is_set() and self._failed.get(node) != why:
                self._say(why)
            self._failed[node] = why
            self._closing.wait(REST_S)
        finally:
            self._lines.pop(node, None)
            if line is not None and (cast := self._cast) is not None and line in cast.ranks:
                cast.end(f"the connection to {node} ended")

    def _begun(self, talk: Talk, remote: Remote) -> Line:
        hello = hello_of(talk, self._makes)
        start = time.monotonic()
        talk.send("probe", bytes(PROBE))
        talk.receive()
        rate = PROBE / max(time.monotonic() - start, 1e-6)
        return Line(remote=remote, host=talk.host, card=hello["card"], rate=rate, has=_tag_of(hello))

    def _bring(self, node: str, talk: Talk, line: Line, tag: weights.Tag) -> bool:
        """These weights to that engine. False: others have come meanwhile."""
        cast = self._cast
        if cast is not None and cast.tag == tag and line in cast.ranks and self._follow(node, talk, line, cast):
            return True
        return self._push(node, talk, line, tag)

    def _follow(self, node: str, talk: Talk, line: Line, cast: Cast) -> bool:
        """Tells the engine what the cast says. False: it came to nothing."""
        told = 0
        while True:
            over = cast.over.is_set()
            for order in cast.orders[told:]:
                talk.send(**order, rank=cast.ranks[line])
                told += 1
            if over:
                break
            talk.wait(TURN_S)
        if not cast.given:
            return False
        talk.ask("whole", within_s=self._limits.sync_s)
        moved = time.monotonic()
        talk.ask("load", within_s=self._limits.sync_s, tag=asdict(cast.tag))
        self._say(
            f"weights of version {cast.tag.version} to {node}: {cast.told}, taken in {time.monotonic() - moved:.3f} s"
        )
        return True

    def _push(self, node: str, talk: Talk, line: Line, tag: weights.Tag) -> bool:
        """These weights there, and taken. False: others have come meanwhile."""
        limit_s = self._limits.sync_s
        start, sent = time.monotonic(), 0
        try:
            with weights.outgoing(self._home, tag, within_s=limit_s) as (page, pieces):
                talk.send("put", page=page)
                for piece in pieces:
                    if self._tag != tag:
                        return False
                    if time.monotonic() > start + limit_s:
                        raise Lost(f"version {tag.version} had not arrived after {limit_s:g} s (rollout.sync_timeout)")
                    talk.send("piece", piece)
                    sent += len(piece)
        except weights.Torn:
            if self._tag == tag:
                raise
            return False
        talk.ask("whole", within_s=limit_s)
        moved = time.monotonic()
        talk.ask("load", within_s=limit_s, tag=asdict(tag))
        self._say(
            f"weights of version {tag.version} to {node}: {sent / 1e6:.1f} MB over TCP in {moved - start:.3f} s "
            f"({sent / line.rate:.3f} s by the probe), taken in {time.monotonic() - moved:.3f} s"
        )
        return True

    def _check(self) -> None:
        if self._closing.is_set():
            raise Lost("this worker has nothing to bring any more")


def hello_of(talk: Talk, makes: str) -> dict[str, Any]:
    """What an engine says of itself. Refused if its samples would be others than those of this configuration."""
    hello = talk.ask("hello")
    if hello.get("makes") != makes:
        raise Refused(
            "its samples would not be those of this configuration: model.dtype, model.attention, lanes, data.max_prompt, "
            "ppo.logits_mib or rollout.* differ; give all nodes one file"
        )
    return hello
