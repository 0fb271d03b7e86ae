"""A run with a gang that never changes: the trainer without a daemon, alone or under a plain process group.

The idea: it does what the elastic runtime does, with the same lanes, streams, strategies and digests, and leaves out all that
is about faults. So its bits are the bits an undisturbed elastic run must have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from elasticrl.ppo.run import Buffer
from elasticrl.runtime.agree import exchange
from elasticrl.runtime.alike import not_finite
from elasticrl.runtime.lanes import Deal
from elasticrl.runtime.replicated import Replicated
from elasticrl.runtime.rng import Streams
from elasticrl.runtime.spikes import Past, check, seen

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import nn

    from elasticrl.ppo.flow import Keeps
    from elasticrl.ppo.prompts import Prompt
    from elasticrl.ppo.run import Joins
    from elasticrl.runtime.asked import Kind
    from elasticrl.runtime.audited import Result
    from elasticrl.runtime.optim import Rule
    from elasticrl.runtime.scalars import Tally
    from elasticrl.runtime.shard import Shard
    from elasticrl.runtime.spikes import Guard, Spike
    from elasticrl.runtime.strategy import Reduced

T = TypeVar("T")
Entry = tuple[int, int, int, int, str]  # step, update, epoch, lane, sample


class FixedRun:
    """`roles` are the trained models with their optimizer's rules; `parts` is the micro-batches of a lane in an update.
    The methods are those of `Run`.

    Example: FixedRun({"actor": (model, lambda name: AdamW(lr=1e-3))}, deal=Deal.contiguous(4, 1), seed=7)
    """

    lockstep = False
    joins: Joins = "none"

    def __init__(
        self,
        roles: Mapping[str, tuple[nn.Module, Callable[[str], Rule]]],
        *,
        deal: Deal,
        seed: int,
        parts: int = 1,
        rank: int = 0,
        group: dist.ProcessGroup | None = None,
        on_phase: Callable[[str], None] = lambda _name: None,
    ) -> None:
        leaves = tuple(tuple(lane * parts + i for lane in mine for i in range(parts)) for mine in deal.carried)
        leafwise = Deal(lanes=deal.lanes * parts, carried=leaves)

        def strategy(role: str, shard: Shard | None = None) -> Replicated:
            model, rule = roles[role]
            return Replicated(model, rule, deal=leafwise, rank=rank, group=group, shard=shard)

        self._strategy = strategy
        self.strategies = {role: strategy(role) for role in sorted(roles)}
        self.streams = Streams(seed=seed)
        self.buffer = Buffer()
        self.lanes: Sequence[int] = deal.carried[rank]
        self.seconds: dict[str, float] = {}
        self.ledger: list[Entry] = []
        self.past = Past()
        self._parts = parts
        self._pending: list[Entry] = []
        self._on_phase = on_phase
        self._gang: Any = group and SimpleNamespace(rank=rank, world=deal.world, group=group, backend="gloo")

    @property
    def version(self) -> int:
        """Updates sealed."""
        return self._any.shard.version

    def begin(self, step: int) -> None:
        """A step that was begun before goes on where it was cut short, with new strategies around the shards there are."""
        if step != self.buffer.step:
            self.streams = self.streams.at(step=step, update=0)
        else:
            for spent in self.strategies.values():
                spent.close()
            self.strategies = {role: self._strategy(role, spent.shard) for role, spent in self.strategies.items()}
        self.buffer.begin(step)
        self.seconds = {}
        self._pending = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Timed."""
        start = time.perf_counter()
        self._on_phase(name)
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @contextmanager
    def part(self, name: str) -> Iterator[None]:  # noqa: ARG002
        """Not told apart."""
        yield

    def keep(self, stage: str, *, how: Keeps = "never") -> None:  # noqa: ARG002 - all is alike in memory
        """In this process's memory only."""
        self.buffer.done.append(stage)

    def exchange(self, tallies: Mapping[int, Tally]) -> Tally:
        """A lane's tally goes with its first leaf, and nothing with the others."""
        sample = next(iter(tallies.values()))
        zero = sample.like([0.0] * len(sample.row()))
        leaves = {
            lane * self._parts + i: zero if i else tally for lane, tally in tallies.items() for i in range(self._parts)
        }
        return self._any.exchange(leaves)

    def gather(self, numbers: Mapping[int, Sequence[float]]) -> dict[int, Sequence[float]]:
        """As JSON, as the elastic run does it."""
        if self._gang is None:
            return dict(numbers)
        told = exchange(self._gang, {str(lane): list(its) for lane, its in numbers.items()})
        return {int(lane): its for words in told for lane, its in words.items()}

    def passes(self, role: str) -> Iterator[tuple[int, int, Tally]]:
        """One after the other."""
        strategy = self.strategies[role]
        for turn in strategy.turns:
            tally = strategy.begin(turn)
            self._present = strategy
            yield *divmod(turn.lane, self._parts), tally
            strategy.done()

    @property
    def asks(self) -> bool:
        """There are no teams."""
        return True

    def ask_once(self, ask: Callable[[], T], kind: Kind[T]) -> T:  # noqa: ARG002
        """Each for itself."""
        return ask()

    def twice(self, what: str, result: Callable[[int], Result], *, lends: bool = False) -> None:
        """There is nobody elsewhere."""

    def leave_out(self) -> None:
        """The pass that is under way is none."""
        self._present.leave_out()

    def used(self, lane: int, epoch: int, ids: Sequence[str], *, filtered: bool = False) -> None:  # noqa: ARG002
        """Into the ledger with the next update."""
        self._pending += [(self.streams.step, self.streams.update, epoch, lane, sample) for sample in ids]

    def update(
        self,
        *,
        lr_factor: float,
        max_norm: float | None,
        keeps: bool = True,  # noqa: ARG002
        skips: bool = False,
        guard: Guard | None = None,
    ) -> Mapping[str, Reduced]:
        """All roles reduce before any applies."""
        found = {role: strategy.reduce() for role, strategy in self.strategies.items()}
        skipped = bool(not_finite(found, losses=True))
        assert skips or not skipped, not_finite(found, losses=True)
        jumps: tuple[Spike, ...] = ()
        if guard is not None and not skipped:
            now = seen(found, guard)
            jumps = self.past.spikes(now, guard)
            check(jumps, self.past, guard, step=self.streams.step, update=self.streams.update)
            self.past.add(now, guard, spiked=bool(jumps), step=self.streams.step)
            skipped = bool(jumps) and guard.does == "skip"
        for strategy in self.strategies.values():
            if skipped:
                strategy.skip()
            else:
                strategy.apply(lr_factor=lr_factor, max_norm=max_norm)
            strategy.publish()
        for strategy in self.strategies.values():
            strategy.seal()
        self.ledger += self._pending
        self._pending = []
        self.streams = self.streams.at(update=self.streams.update + 1)
        return {role: replace(reduced, skipped=skipped, spikes=jumps) for role, reduced in found.items()}

    def digest(self) -> str:
        """Of all trained roles' parameters and optimizer state. Collective."""
        return " ".join(f"{role}:{strategy.digest().hex}" for role, strategy in self.strategies.items())

    @property
    def _any(self) -> Replicated:
        return next(iter(self.strategies.values()))


class InOrder:
    """Which prompts a lane gets in a step: place after place, epoch after epoch, in a new order each epoch if asked.

    Example: InOrder(prompts, per_lane=16, lanes=4, seed=7)(step=3, lane=1)
    """

    def __init__(
        self, prompts: Sequence[Prompt], *, per_lane: int, lanes: int, seed: int, shuffle: bool = False, spans: int = 1
    ) -> None:
        self.prompts, self.per_lane, self.lanes, self.seed, self.shuffle = prompts, per_lane, lanes, seed, shuffle
        self.spans = spans  # lanes that have the same prompts
        self._order: tuple[int, torch.Tensor] = (-1, torch.empty(0))

    def __call__(self, step: int, lane: int) -> list[tuple[str, Prompt]]:
        """(sample id, prompt): the id has the epoch in it, so that no two samples of a job share one."""
        first = (step * self.lanes + lane) // self.spans * self.per_lane
        found: list[tuple[str, Prompt]] = []
        for number in range(first, first + self.per_lane):
            epoch, index = divmod(number, len(self.prompts))
            prompt = self.prompts[self._place(epoch, index)]
            found.append((f"{epoch}/{prompt.place}", prompt))
        return found

    def made_of(self, step: int) -> str:
        """All their ids."""
        return " ".join(name for lane in range(self.lanes) for name, _ in self(step, lane))

    def _place(self, epoch: int, index: int) -> int:
        if not self.shuffle:
            return index
        if self._order[0] != epoch:
            generator = Streams(seed=self.seed).torch(f"order of epoch {epoch}")
            self._order = (epoch, torch.randperm(len(self.prompts), generator=generator))
        return int(self._order[1][index])
