"""Where a job is, what of it is safe, and where the milliseconds of a generation's beginning went."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticrl.runtime.chain import Chain
from elasticrl.runtime.rng import Streams
from elasticrl.runtime.spikes import Past


@dataclass(slots=True)
class Progress:
    """Where the job is. A part of its state."""

    step: int = 0  # to be made next, or half made
    update: int = 0  # of that step: so many are applied
    mark: int = 0  # of that step: so many states of it were kept
    count: int = 0  # updates in all
    frozen: Mapping[str, int] = field(default_factory=dict)  # sums of what no update changes, as it was until now
    facts: Mapping[str, Any] = field(default_factory=dict)  # of the run that made it: whoever goes on is compared
    chain: Chain = field(default_factory=Chain)  # of the digests up to there
    score: tuple[int, float] | None = (
        None  # of the newest evaluation: the steps that made what it was of, and what it came to
    )
    past: Past = field(default_factory=Past)  # by which a guard tells spikes

    def streams(self, seed: int) -> Streams:
        """The job's random streams there."""
        return Streams(seed=seed, step=self.step, update=self.update)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        numbers = {"step": self.step, "update": self.update, "mark": self.mark, "count": self.count}
        chain = [self.chain.step, self.chain.head]
        score = None if self.score is None else list(self.score)
        more = {"frozen": dict(self.frozen), "facts": dict(self.facts), "past": self.past.state_dict()}
        return {**numbers, **more, "chain": chain, "score": score}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Back to there."""
        self.step, self.update = int(state["step"]), int(state["update"])
        self.mark, self.count = int(state["mark"]), int(state["count"])
        self.frozen, self.facts = dict(state.get("frozen", {})), dict(state.get("facts", {}))  # older ones have none
        self.past.load_state_dict(state.get("past", {}))
        score = state.get("score")
        self.score = None if score is None else (int(score[0]), float(score[1]))
        step, head = state["chain"]
        self.chain.go_to(int(step), str(head))


@dataclass(slots=True)
class Sealed:
    """What no single fault can take back."""

    steps: int = 0
    digest: str | None = None  # of the state after them; None where none was made (see lanes.digest)

    def add(self, steps: int, digest: str | None) -> None:
        """So many are, or the digest of as many has come."""
        if steps > self.steps or (steps == self.steps and digest is not None):
            self.steps, self.digest = steps, digest


@dataclass(slots=True)
class Timeline:
    """The newest beginning, by stage."""

    at: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    read: int = 0  # bytes of kept state
    had: tuple[float, int] = (0.0, 0)  # seconds of processors and page faults of this process when it began
    hears: Callable[[str], None] | None = None  # is told as each stage ends

    def begin(self) -> None:
        """Now."""
        self.at, self.stages, self.read, self.had = time.monotonic(), {}, 0, _used()

    def mark(self, stage: str) -> None:
        """The stage ends here."""
        now = time.monotonic()
        self.stages[stage] = now - self.at
        self.at = now
        if self.hears is not None:
            self.hears(stage)

    def __str__(self) -> str:
        stages = ", ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in self.stages.items())
        (busy_s, faults), (before_s, before) = _used(), self.had
        return f"{stages}, read {self.read} bytes, used {busy_s - before_s:.2f} s of processors, {faults - before} page faults"


def _used() -> tuple[float, int]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_minflt
