"""A step's samples: what was generated ahead for it, and the rest now.

The idea: a sample's noise is keyed by its id and its own step, so who generates it, when, and beside which others changes
nothing; only the weights do, and which those are follows from the step's number (`staleness`). Where the engine is a process of
its own, a thread waits for what is generated ahead, beside training: the engine gets no new weights before all of it is there.
Else it is generated at once, before the first update.

No weights that are gone are ever asked for. In periods of one step, no state from within the update lacks samples that a step
could be taken up from (`flow.again`). In longer ones the weights that the period began with are a part of the state (`Begun`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

import torch

from elasticrl.ppo.groups import Groups
from elasticrl.ppo.handed import SAMPLES
from elasticrl.ppo.rollout.begun import Begun
from elasticrl.ppo.rollout.engine import Apart, Engine, Request, Samples
from elasticrl.ppo.run import Ahead
from elasticrl.ppo.sizes import width_of
from elasticrl.ppo.staleness import ON_TIME, Staleness
from elasticrl.runtime.rng import Streams

if TYPE_CHECKING:
    from elasticrl.ppo.batches import Rows
    from elasticrl.ppo.prompts import Prompt
    from elasticrl.ppo.run import Run

ALONE = Groups()
SAMPLED = ("tokens", "mask", "rollout_logprobs", "ended")
TURN_S = 0.05  # between looks whether somebody wants us elsewhere
Weights = tuple[int, int]  # the step that began with them, and their version
Flight = tuple[Weights, "Future[dict[int, Samples]]"]


class Feed(Protocol):
    """The data's cursor."""

    def __call__(self, step: int, lane: int) -> Sequence[tuple[str, Prompt]]:
        """(sample id, prompt) of each that a lane has in a step."""

    def made_of(self, step: int) -> str:
        """Stands for the samples of all lanes in a step. No prompt is read."""


class Generator:
    """`steps` is the job's length, 0 for no end; `groups` how the samples of each prompt lie in lanes. `begun` keeps the
    weights that a period of several steps began with, for an engine that must be fed again in the middle of it.
    """

    def __init__(
        self, run: Run, engine: Engine, feed: Feed, *, groups: Groups = ALONE, steps: int = 0,
        staleness: Staleness = ON_TIME, begun: Begun | None = None,
    ) -> None:  # fmt: skip
        self.run, self.engine, self.feed = run, engine, feed
        self.groups, self.steps, self.staleness = groups, steps, staleness
        self.begun = begun
        self._pool: ThreadPoolExecutor | None = None
        self._flights: dict[int, Flight] = {}  # by the step that they are for

    def rollout(self) -> None:
        """All samples of this step, for the lanes that lack them."""
        step, buffer = self.run.streams.step, self.run.buffer
        for one in [one for one in buffer.ahead if one < step]:
            del buffer.ahead[one]
        early = buffer.ahead.get(step)
        if early is not None and early.of != self._samples(step):
            early = None  # another batch, or another bound: so are those of later steps
            buffer.ahead.clear()
        if early is not None:
            buffer.facts |= behind(self.run.version, early.version)  # alike on all ranks, as are those samples' weights
            if not set(self.run.lanes) <= early.rows.keys():
                early = None  # of this rank alone, so nothing that all ranks have alike hangs on it
        if early is not None and self.staleness.share == 1.0:
            for lane in dict.fromkeys(self.run.lanes):
                buffer.ids[lane] = list(early.ids[lane])
                buffer.put(lane, **early.rows[lane])
        else:
            self._now(step, early)
        if self.engine.by_lane and not self.staleness and not self.run.lockstep:
            self.run.twice("samples", lambda lane: partial(self._came_to, step, lane))
        buffer.ahead.pop(step, None)
        self.begin()

    def begin(self) -> None:
        """Where the engine is a process of its own: from now on it generates for later steps, beside this worker. Once is
        enough.
        """
        step, buffer = self.run.streams.step, self.run.buffer
        missing = [one for one in self.staleness.ahead(step, self.steps) if one not in buffer.ahead]
        if not missing or self.engine.by_lane:
            return
        by = self._weights()
        _, version = by
        if self.engine.version != version:  # another life of the gang: what is in the air is nobody's
            self._land()
            self.engine.publish(version)
        for one in missing:
            if one not in self._flights:
                wanted = {lane: self._early(one, lane) for lane in dict.fromkeys(self.run.lanes)}
                self._flights[one] = by, self._begun(wanted, version)

    def ahead(self) -> None:
        """What the next step has of samples that are generated before it begins is here."""
        step, buffer = self.run.streams.step, self.run.buffer
        missing = [one for one in self.staleness.ahead(step, self.steps) if one not in buffer.ahead]
        if self.engine.by_lane:  # it has the weights of now alone
            for one in missing:
                self._publish()
                buffer.ahead[one] = its = Ahead(self.run.version, self._samples(one))
                for wanted in self._together(its.ids.__contains__, partial(self._early, one)):
                    self._take(its, self._generate(wanted), by=step)
        elif missing and missing[0] == step + 1:
            (by, version), flight = self._flights[step + 1]  # `begin` comes first
            self._over(flight)
            del self._flights[step + 1]
            its = Ahead(version, self._samples(step + 1))
            # Raises what the engine raised; its waits have deadlines of their own.
            self._take(its, self.run.ask_once(flight.result, SAMPLES), by=by)
            buffer.ahead[step + 1] = its

    def sync(self) -> None:
        """The new weights to the engine, if it is their turn."""
        if self.staleness.renews(self.run.streams.step):
            self.engine.publish(self.run.version)

    def _now(self, step: int, early: Ahead | None) -> None:
        """The samples that nobody has generated yet, by the weights of now."""
        buffer = self.run.buffer
        self._land()
        self._publish()
        there = {lane: early.ids.get(lane, []) if early else [] for lane in self.run.lanes}
        lacks = {lane: self._requests(step, lane)[len(there[lane]) :] for lane in there}
        for wanted in self._together(lambda lane: buffer.has(lane, ("tokens",)), lacks.__getitem__):
            for lane, samples in self._came(wanted).items():
                rows = kept_of(samples, by=step)
                if early and there[lane]:
                    rows = {name: torch.cat([early.rows[lane][name], value]) for name, value in rows.items()}
                buffer.ids[lane] = [*there[lane], *samples.ids]
                buffer.put(lane, **rows)

    def _came_to(self, step: int, lane: int, *, again: bool) -> str:
        """All bits of a lane's samples, as they are here, or generated again."""
        kept = self.run.buffer.rows.get(lane, {})
        rows = rows_of(self._generate({lane: self._requests(step, lane)})[lane]) if again else kept
        words = blake2b(digest_size=8)
        for name in SAMPLED:
            words.update(rows[name].contiguous().numpy().tobytes())
        return words.hexdigest()

    def _came(self, wanted: dict[int, list[Request]]) -> dict[int, Samples]:
        """What is wanted now: an engine apart is asked by one member of a team, and others generate together."""
        if self.engine.by_lane:
            return self._generate(wanted)
        return self.run.ask_once(partial(self._generate, wanted), SAMPLES)

    def _begun(self, wanted: dict[int, list[Request]], version: int) -> Future[dict[int, Samples]]:
        """What is generated ahead, beside this worker. Of a team one member has it in the air, and the others get it later."""
        if not self.run.asks:
            none: Future[dict[int, Samples]] = Future()
            none.set_result({})
            return none
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="ahead")
        return self._pool.submit(self._generate, wanted, version)

    def _weights(self) -> Weights:
        """Those that generate what is generated ahead now: this period began with them."""
        step = self.run.streams.step
        if self.begun is None:
            return step, self.run.version
        self.begun.at(self.staleness.period(step), step, self.run.version)
        return self.begun.step, self.begun.version

    def _publish(self) -> None:
        if self.engine.version != self.run.version:  # a fresh engine, or one that missed an update
            self.engine.publish(self.run.version)

    def _land(self) -> None:
        """A step that was cut short may have left something in the air: an engine is asked one thing at a time."""
        flights, self._flights = self._flights, {}  # whatever they bring or raise: the gang they were for is gone
        for step, (by, flight) in flights.items():
            if not flight.cancel():
                self._flights[step] = by, flight
                self._over(flight)
                del self._flights[step]

    def _over(self, flight: Future[dict[int, Samples]]) -> None:
        """Wait until it has ended. Raises if somebody wants us elsewhere."""
        assert isinstance(self.engine, Apart)
        self.engine.wait(lambda: bool(wait([flight], TURN_S).done))

    def _take(self, its: Ahead, found: dict[int, Samples], *, by: int) -> None:
        for lane, samples in ((lane, samples) for lane, samples in found.items() if samples.ids):
            its.ids[lane], its.rows[lane] = list(samples.ids), kept_of(samples, by=by)

    def _generate(self, wanted: dict[int, list[Request]], version: int | None = None) -> dict[int, Samples]:
        """Each lane's samples, asked for in one go."""
        return by_lane(self.engine, wanted, self.run.version if version is None else version)

    def _samples(self, step: int) -> str:
        """Stands for what a step is made of, alike on all ranks: all lanes' samples by name, and how they lie in lanes. The
        first lane's requests, whoever carries it, and the engine's sampling, which are as wide as the rows. And how old samples
        may be: what was made under a wider bound is not taken under a narrower one.
        """
        made = (
            self.feed.made_of(step),
            self.groups,
            self._requests(step, 0),
            self.engine.sampling,
            self.staleness,
        )
        return blake2b(repr(made).encode(), digest_size=8).hexdigest()

    def _early(self, step: int, lane: int) -> list[Request]:
        """What is generated ahead."""
        asked = self._requests(step, lane)
        return asked[: self.staleness.part(len(asked), self.groups.part)]

    def _together(
        self, there: Callable[[int], bool], of: Callable[[int], list[Request]]
    ) -> list[dict[int, list[Request]]]:
        """What lanes lack, by what goes to the engine at once. In lockstep each lane by itself, and all of them: nobody may
        leave a collective out.
        """
        lanes = self.run.lanes
        if self.engine.by_lane and self.run.lockstep:
            return [{lane: of(lane)} for lane in lanes]
        todo = {lane: of(lane) for lane in dict.fromkeys(lanes) if not there(lane)}
        order = list(todo)
        return [{order[at]: todo[order[at]] for at in some} for some in self.engine.crowds([*map(len, todo.values())])]

    def _requests(self, step: int, lane: int) -> list[Request]:
        most, streams = self.engine.sampling.prompt_tokens, Streams(seed=self.run.streams.seed, step=step)
        return requests_of(self.feed(step, lane), self.groups, lane, streams, most)


def requests_of(
    fed: Sequence[tuple[str, Prompt]], groups: Groups, lane: int, streams: Streams, most: int
) -> list[Request]:
    """What is asked for of a lane's prompts: its samples of each, with noise of their own. `most`: tokens of a prompt."""
    width = width_of(max((len(p.tokens) for _, p in fed), default=1), most)
    return [
        Request(id=name, prompt=p.tokens, seed=streams.number(f"sample {name}"), width=width)
        for sample, p in fed
        for name in ([f"{sample}.{i}" for i in groups.members(lane)] if groups.size > 1 else [sample])
    ]


def by_lane(engine: Engine, wanted: Mapping[int, list[Request]], version: int) -> dict[int, Samples]:
    """What an engine makes of lanes' requests, each lane's a block where the engine has these."""
    if engine.sampling.blocks:
        wanted = {lane: block(requests, lane) for lane, requests in wanted.items()}
    asked = [request for requests in wanted.values() for request in requests]
    if not asked and not engine.by_lane:  # else it may be a collective, which no rank may leave out
        return {}
    samples, found, at = engine.generate(asked, version=version), dict[int, Samples](), 0
    for lane, requests in wanted.items():
        found[lane] = cut(samples, slice(at, at + len(requests)))
        at += len(requests)
    return found


def block(requests: Sequence[Request], lane: int) -> list[Request]:
    """What is asked for of a lane at once, as one block."""
    return [replace(request, block=f"lane {lane}") for request in requests]


def behind(version: int, ahead: int) -> dict[str, float]:
    """A fact of a step: by how many updates the weights that generated ahead are older than those that it begins with.

    >>> behind(12, 8)
    {'ahead_behind': 4.0}
    """
    return {"ahead_behind": float(version - ahead)}


def kept_of(samples: Samples, *, by: int) -> Rows:
    """What a lane keeps of its samples. `by`: the step that began with the weights that have generated them."""
    return {**rows_of(samples), "by": by_of(len(samples.ids), by)}


def rows_of(samples: Samples) -> Rows:
    """What is used of samples, on the host."""
    found = {
        "tokens": samples.tokens,
        "attention": samples.attention,
        "mask": samples.mask,
        "rollout_logprobs": samples.logprobs,
        "ended": samples.ended,
    }
    return {name: value.detach().cpu() for name, value in found.items()}


def by_of(count: int, by: int) -> torch.Tensor:
    """[samples]: which weights have generated each. It goes where the sample goes, and into the ledger.

    >>> by_of(2, 12)
    tensor([12, 12], dtype=torch.int32)
    """
    return torch.full((count,), by, dtype=torch.int32)


def cut(samples: Samples, part: slice) -> Samples:
    """Some of them."""
    return Samples(
        ids=samples.ids[part],
        tokens=samples.tokens[part],
        attention=samples.attention[part],
        mask=samples.mask[part],
        logprobs=samples.logprobs[part],
        ended=samples.ended[part],
        version=samples.version,
    )
