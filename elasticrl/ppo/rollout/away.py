"""The trainer's end of engines on nodes of their own: samples are asked of all that live, weights brought to all of them.

The idea: what is finished is kept, and a request has all its chance with it. So how the missing samples are split over the
engines decides nothing but the time: an engine that dies, with its node or alone, costs what it had not finished, which is
asked of another; one that comes is asked from then on.

Who there is says this node's daemon, in a file (`Roll`). The weights lie in the memory of the one worker that writes them, as
they would for an engine beside it; from there they go to the engines (`feeder`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from elasticrl.base.parsed import parsed
from elasticrl.base.pauses import doubled
from elasticrl.ppo.rollout import weights
from elasticrl.ppo.rollout.engine import EngineFailed, Request, Sampling, block_of, whole_blocks
from elasticrl.ppo.rollout.feeder import REST_S, Feeder, hello_of
from elasticrl.ppo.rollout.judges import Case, verdicts
from elasticrl.ppo.rollout.outside import Outside, Source, collect, here
from elasticrl.ppo.rollout.wire import TURN_S, Lost, Refused, Remote, Talk
from elasticrl.runtime.vault.slots import prepare

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import torch

    from elasticrl.ppo.batches import Rows
    from elasticrl.ppo.rollout.attend import Limits

K = TypeVar("K")  # what is wanted: a request, a case
ROLL: Final = "ELASTICRL_ROLLOUTS"  # in the environment: where the daemon writes who there is
REST_MAX_S: Final = 30.0  # before an engine that failed again and again is asked once more: each failure doubles REST_S
AGAIN_S: Final = 0.1  # before an engine is asked again that has no weights yet


class Roll:
    """Which engines there are, by node, as this node's daemon knows it. A file that is not there yet names none."""

    def __init__(self, path: Path, *, job: str, node: str) -> None:
        self._path, self._job, self._node = path, job, node
        self._seen: tuple[int, int] | None = None
        self._found: dict[str, Remote] = {}

    def __call__(self) -> Mapping[str, Remote]:
        """As it is now."""
        try:
            status = self._path.stat()
            if (seen := (status.st_mtime_ns, status.st_ino)) != self._seen:
                plain = parsed(self._path.read_text(encoding="ascii"))
                key = str(plain["key"]).encode()
                self._found = {
                    node: Remote(address=address, job=self._job, node=self._node, key=key)
                    for node, address in sorted(plain["engines"].items())
                }
                self._seen = seen
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # what was known last may still be true
        return self._found


def shares(missing: Sequence[K], engines: Iterable[str]) -> dict[str, list[K]]:
    """Who is asked for which: in turn, so that long and short prompts are spread alike. A block stays together.

    >>> asked = shares([Request(id=str(i), prompt=(1,), seed=i) for i in range(5)], ["r0", "r1"])
    >>> {engine: [request.id for request in share] for engine, share in asked.items()}
    {'r0': ['0', '2', '4'], 'r1': ['1', '3']}
    """
    names, blocks = sorted(engines), dict[object, list[K]]()
    for one in missing:
        blocks.setdefault(block_of(one) or one, []).append(one)
    parts = list(blocks.values())
    return {name: list(chain.from_iterable(part)) for i, name in enumerate(names) if (part := parts[i :: len(names)])}


class Away(Outside):
    """Those of all rollout nodes; of the whole gang one worker writes. `outside` is entered while others generate.

    Long because most of it is what every engine outside of the workers needs (`Outside`).
    """

    def __init__(
        self, roll: Callable[[], Mapping[str, Remote]], home: Path, sampling: Sampling, makes: str, limits: Limits, *,
        wait_s: float, say: Callable[[str], None], transport: str = "auto", check: Callable[[], None] = lambda: None,
        waits: Callable[[], None] = lambda: None, outside: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:  # fmt: skip
        super().__init__(sampling, check=check, waits=waits)
        self.roll, self.home, self.limits, self.say = roll, home, limits, say
        self.rest = Rest()
        self._makes, self._wait_s = makes, wait_s
        self._outside, self._transport = outside, transport
        self._feeder: Feeder | None = None

    def enter(self, *, life: str, source: Source, writes: bool, gathers: bool) -> None:
        """Another life of the gang. Who wrote in the last may not write in this."""
        super().enter(life=life, source=source, writes=writes, gathers=gathers)
        if writes:
            prepare(self.home)
            self._feeder = self._feeder or Feeder(
                self.roll, self.home, self._makes, self.limits, self.say, transport=self._transport
            )
            self._feeder.offer(None)
        else:
            self._forget()

    def tidy(self) -> None:
        """Nobody on this node writes: what a worker that wrote here, and died, has left in memory goes."""
        weights.forget(self.home)

    def end(self) -> None:
        """The engines are not ours."""
        self._forget()

    def _bring(self, tag: weights.Tag, buckets: Iterable[weights.Bucket]) -> None:
        """Writes them down, and waits until every engine that answers has taken them, or its time is up."""
        assert self._feeder is not None, "enter comes first"
        self._feeder.offer(None)  # nobody reads what is written anew
        weights.write(self.home, tag, buckets, within_s=self.limits.sync_s, check=self._turn)
        self._feeder.offer(tag)
        deadline = time.monotonic() + self.limits.sync_s
        while not self._feeder.settled(tag) and time.monotonic() < deadline:
            self._turn()
            time.sleep(TURN_S)  # between looks that end with `sync_timeout`, or as soon as `check` raises

    def _gather(self, tag: weights.Tag, requests: Sequence[Request]) -> None:
        self._have_all(
            Question("samples", lambda talk, part: collect(talk, tag, part, self.found), self.found, tag), requests
        )

    def wait(self, done: Callable[[], bool]) -> None:
        """As Engine's. It is others that work."""
        with self._outside():
            while not done():
                self._turn()

    def judge(self, role: str, blocks: Sequence[Rows]) -> list[torch.Tensor]:
        """What the rollout nodes' model in that role says of each block."""
        cases = [Case(role, rows) for rows in blocks]
        found: dict[Case, torch.Tensor] = {}
        self._have_all(Question("blocks", lambda talk, part: verdicts(talk, part, found), found), cases)
        return [found[case] for case in cases]

    def _have_all(self, question: Question[K], wanted: Sequence[K]) -> None:
        stop = threading.Event()
        asks: dict[str, Ask[K]] = {}
        try:
            with self._outside() if here() else nullcontext():
                self._ask_all(question, wanted, asks, stop)
        finally:
            stop.set()
            for node, ask in asks.items():
                ask.join()
                if ask.failure is None:
                    self.rest.well(node)

    def _forget(self) -> None:
        if self._feeder is not None:
            self._feeder.close()
            self._feeder = None
            weights.forget(self.home)

    def _ask_all(
        self, question: Question[K], wanted: Sequence[K], asks: dict[str, Ask[K]], stop: threading.Event
    ) -> None:
        heard, barren, why = time.monotonic(), 0, "none was there"
        while missing := [one for one in wanted if one not in question.found]:
            self._turn()
            if question.tag is not None:
                self._wanted(question.tag)
            for node, ask in [(node, ask) for node, ask in asks.items() if not ask.is_alive()]:
                del asks[node]
                if ask.failure is None:
                    self.rest.well(node)
                else:
                    self._failed(node, ask)
                    why = f"{node}: {ask.failure}"
                    barren = 0 if ask.finished else barren + ask.asked
            # Not of who greets us and lacks the weights: those may never come.
            heard = max([heard, *(ask.heard for ask in asks.values() if ask.asked)])
            engines = self.roll()
            if barren >= self.limits.starts * max(1, len(engines)):
                raise EngineFailed(
                    f"{barren} times in a row a rollout engine ended without any of the {question.what}, lastly {why}"
                )
            if time.monotonic() > heard + self._wait_s:
                raise EngineFailed(
                    f"no rollout node has said anything for {self._wait_s:g} s (rollout.wait); {len(missing)} "
                    f"{question.what} are missing; of {len(engines)} nodes with an engine, lastly {why}"
                )
            taken = {one for ask in asks.values() for one in ask.part}
            idle = [node for node, at in engines.items() if node not in asks and self.rest.over(node, at.address)]
            free = whole_blocks([one for one in missing if one not in taken], wanted)
            for node, part in shares(free, idle).items():
                asks[node] = Ask(engines[node], question, self._makes, part, self.limits, stop)
                asks[node].start()
            time.sleep(TURN_S)

    def _failed(self, node: str, ask: Ask[K]) -> None:
        if isinstance(ask.failure, Refused) and ask.failure.kind == "stale":
            self.rest.shortly(node)  # they are on their way to it
            if self._feeder is not None:
                self._feeder.doubt(node)
            return
        self.rest.begin(node, ask.remote.address)
        left, what = len(ask.lacking) - ask.finished, ask.question.what
        self.say(f"rollout engine of {node} at {ask.remote}: {ask.failure}; {left} {what} are asked of whoever lives")

    def _turn(self) -> None:
        """Once in every turn of waiting."""
        self.check()
        self._sign()


@dataclass(slots=True)
class Rest:
    """Whom not to ask for a while: who failed, the longer the oftener. A new address is a new engine."""

    until: dict[str, float] = field(default_factory=dict)
    failures: dict[str, tuple[str, int]] = field(default_factory=dict)  # address, times in a row

    def begin(self, node: str, address: str) -> None:
        """It has failed."""
        before, times = self.failures.get(node, (address, 0))
        times = times + 1 if before == address else 1
        self.failures[node] = (address, times)
        self.until[node] = time.monotonic() + doubled(REST_S, times - 1, REST_MAX_S)

    def well(self, node: str) -> None:
        """It has answered: its next failure is its first in a row."""
        self.failures.pop(node, None)

    def shortly(self, node: str) -> None:
        """It is well, and has nothing to go by yet."""
        self.well(node)
        self.until[node] = time.monotonic() + AGAIN_S

    def over(self, node: str, address: str) -> bool:
        """Whether it may be asked."""
        if self.failures.get(node, (address, 0))[0] != address:
            return True
        return time.monotonic() >= self.until.get(node, 0.0)


@dataclass(frozen=True)
class Question(Generic[K]):
    """What engines are asked for, and where the answers are put. With a `tag`: by those weights."""

    what: str  # in words
    ask: Callable[[Talk, Sequence[K]], None]
    found: Mapping[K, object]
    tag: weights.Tag | None = None


class Ask(threading.Thread, Generic[K]):
    """One conversation with one engine about a share of what is wanted."""

    def __init__(
        self, remote: Remote, question: Question[K], makes: str, part: list[K], limits: Limits, stop: threading.Event
    ) -> None:
        super().__init__(name=f"asks {remote}", daemon=True)
        self.remote, self.question, self.part = remote, question, part
        self.lacking = [one for one in part if one not in question.found]  # the others are of the same blocks
        self.failure: Exception | None = None
        self.asked = False  # it got as far as that
        self._makes, self._limits, self._given_up = makes, limits, stop
        self._talk: Talk | None = None

    def run(self) -> None:
        """To its end."""
        try:
            with Talk(self.remote, within_s=self._limits.health_s, check=self._check) as talk:
                self._talk = talk
                hello = hello_of(talk, self._makes)
                tag = self.question.tag
                if tag is not None and hello["tag"] != asdict(tag):
                    raise Refused(f"it has other weights than version {tag.version}", "stale")
                self.asked = True
                self.question.ask(talk, self.part)
        except (Lost, Refused) as failure:
            self.failure = failure
        except Exception as failure:  # noqa: BLE001 - what it said makes no sense; whoever asked is told, as of any other end
            self.failure = Lost(f"what it said makes no sense ({failure!r})")

    @property
    def heard(self) -> float:
        """When it last gave a sign of life."""
        return self._talk.heard if self._talk else 0.0

    @property
    def finished(self) -> int:
        """How much of its share is there."""
        return sum(one in self.question.found for one in self.lacking)

    def _check(self) -> None:
        if self._given_up.is_set():
            raise Lost("it is not waited for any more")
