"""Rules of thumb about a step, as advice with its numbers in it. Pure: what was measured in, sentences out.

The idea: one slow step says nothing, so every rule looks at the medians of the last steps; and advice that was given is not
given again until it has been untrue for as long. A rule is one function of the steps `Seen`; to add one, add it to RULES.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import median

from elasticrl.core.judge.straggler import slow

WINDOW = 10  # steps that the medians are of
USUAL = 50  # steps that a rolling baseline is of
SYNC_SHARE = 0.3
PADDING_SHARE = 0.5
LITTLE = {"cpu": 64, "cuda": 2048}  # tokens of a pass below which a device waits for its next kernel most of the time
SLOWED = 1.5  # times what collectives took before
JUMP = 4.0  # times as far from the median as any of the last steps was
LEAST_S = 0.05  # a step's parts that are shorter are not worth advice


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is known of a step. `own` are each rank's seconds by phase, less what it waited for others.

    Example: Seen(step=7, seconds={"rollout": 1.2}, own=[{"rollout": 1.2}], padding=0.1, micro_tokens=4096, lane_batch=16)
    """

    step: int
    seconds: Mapping[str, float]  # of this rank's phases
    own: Sequence[Mapping[str, float]] = ()
    padding: float = 0.0  # the share of what passes compute that is padding
    micro_tokens: int = 1
    lane_batch: int = 1  # a lane's samples in an update
    width: int = 1  # tokens of a sample at most
    device: str = "cpu"
    loss: float | None = None
    comm_s: float = 0.0  # in collectives, waits for others among them
    quicker: Sequence[str] = ()  # what could generate samples sooner, and is not set


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Example: Advice(rule="sync", numbers={"sync_s": 0.61, "step_s": 1.5, "share": 0.41}, text="sync takes 610ms, ...")"""

    rule: str
    numbers: Mapping[str, float]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowness:
    """What the configuration says of slow ranks: `health.straggler_z` and `health.straggler_steps`."""

    z: float = 4.0
    steps: int = 5


def sync_is_dear(past: Sequence[Seen], _limits: Slowness) -> Advice | None:
    """Weights to the engine take more than 30 % of the step."""
    sync, step = _usual(past, "sync"), _whole(past)
    if step < LEAST_S or sync <= SYNC_SHARE * step:
        return None
    share = sync / step
    return Advice(
        rule="sync",
        numbers={"sync_s": sync, "step_s": step, "share": share},
        text=f"sync takes {ms(sync)}, {share:.0%} of a step of {ms(step)}: raise rollout.sync_bucket, or "
        "train more per rollout (ppo.batch, ppo.epochs)",
    )


def rollout_is_dear(past: Sequence[Seen], _limits: Slowness) -> Advice | None:
    """Generating takes longer than training."""
    rollout, quicker = _usual(past, "rollout"), past[-1].quicker
    update = median(
        sum(took for name, took in seen.seconds.items() if name.endswith("update")) for seen in past[-WINDOW:]
    )
    if rollout < LEAST_S or rollout <= update:
        return None
    return Advice(
        rule="rollout",
        numbers={"rollout_s": rollout, "update_s": update},
        text=f"rollout takes {ms(rollout)}, update {ms(update)}: the trainers wait for samples; "
        + (f"use {', or '.join(quicker)}" if quicker else "more rollout nodes or cards generate sooner"),
    )


def a_rank_is_slow(past: Sequence[Seen], limits: Slowness) -> Advice | None:
    """One rank's own work takes longer than the others', step after step."""
    history = [dict(enumerate(seen.own)) for seen in past if len(seen.own) == len(past[-1].own)]
    found = slow(history, z=limits.z, steps=limits.steps)
    if not found:
        return None
    hit = found[0]
    return Advice(
        rule="rank",
        numbers={"rank": hit.rank, "seconds": hit.seconds, "usual_s": hit.usual, "z": hit.z},
        text=f"rank {hit.rank} is slow: {hit} (z {hit.z:g}); everybody waits for it: look at its node",
    )


def padding_is_much(past: Sequence[Seen], _limits: Slowness) -> Advice | None:
    """More than half of what is computed is padding."""
    share = median(seen.padding for seen in past[-WINDOW:])
    if share <= PADDING_SHARE:
        return None
    seen = past[-1]
    return Advice(
        rule="padding",
        numbers={"share": share, "micro_tokens": seen.micro_tokens, "lane_batch": seen.lane_batch},
        text=f"{share:.0%} of what passes compute is padding: the {seen.lane_batch} samples of a lane in an update are too "
        f"unlike to share passes of {seen.micro_tokens} tokens; lower ppo.micro_tokens, or raise ppo.mini_batch",
    )


def passes_are_small(past: Sequence[Seen], _limits: Slowness) -> Advice | None:
    """A pass has so few tokens that the device mostly waits, and a lane has more samples to give."""
    seen = past[-1]
    could = seen.lane_batch * seen.width
    least = LITTLE.get(seen.device, LITTLE["cuda"])
    if seen.micro_tokens >= min(least, could):
        return None
    return Advice(
        rule="micro_tokens",
        numbers={"tokens": seen.micro_tokens, "could": could},
        text=f"a pass has {seen.micro_tokens} tokens, under {least}: ppo.micro_tokens may be {could}, all of a lane's samples "
        "in an update, where memory allows it; a change of it changes the bits",
    )


def comm_has_slowed(past: Sequence[Seen], _limits: Slowness) -> Advice | None:
    """Collectives take longer than they did. No figure in milliseconds would do: what is slow here is fast elsewhere."""
    before, now = past[:-WINDOW], past[-WINDOW:]
    if len(before) < WINDOW:
        return None
    usual, comm = median(seen.comm_s for seen in before), median(seen.comm_s for seen in now)
    if comm < LEAST_S or comm <= SLOWED * usual:
        return None
    return Advice(
        rule="comm",
        numbers={"comm_s": comm, "usual_s": usual},
        text=f"collectives take {ms(comm)} of a step, {ms(usual)} before: a link or a node has become slower; `elasticrl "
        "doctor --nodes` measures every pair",
    )


def loss_jumps(past: Sequence[Seen], _limits: Slowness) -> Advice | None:
    """The loss has left the range of the last steps. A fault does not do that here: the bits are the same."""
    loss = past[-1].loss
    known = [seen.loss for seen in past[-WINDOW:-1] if seen.loss is not None and isfinite(seen.loss)]
    if loss is None or len(known) < WINDOW - 1:
        return None
    usual = median(known)
    spread = max(*(abs(value - usual) for value in known), 1e-3 * abs(usual), 1e-9)
    if isfinite(loss) and abs(loss - usual) <= JUMP * spread:
        return None
    return Advice(
        rule="loss",
        numbers={"loss": loss, "usual": usual, "spread": spread},
        text=f"the loss is {loss:.4g} after {usual:.4g} (usually within {spread:.2g} of it): no fault does that, as `elasticrl "
        "verify RUN` shows; look at this step's samples, its reward and the learning rate",
    )


RULES: tuple[Callable[[Sequence[Seen], Slowness], Advice | None], ...] = (
    sync_is_dear,
    rollout_is_dear,
    a_rank_is_slow,
    padding_is_much,
    passes_are_small,
    comm_has_slowed,
    loss_jumps,
)


@dataclass(slots=True)
class Adviser:
    """The rules over the last steps. Example: Adviser().look(seen) == () until WINDOW steps were seen."""

    limits: Slowness = field(default_factory=Slowness)
    past: deque[Seen] = field(default_factory=lambda: deque(maxlen=USUAL))
    given: dict[str, int] = field(default_factory=dict)  # rule -> the newest step at which it was true

    def look(self, seen: Seen) -> tuple[Advice, ...]:
        """What is to be said now."""
        if self.past and len(self.past[-1].own) != len(seen.own):
            self.past.clear()  # another gang: its times are no measure of this one's
        self.past.append(seen)
        if len(self.past) < WINDOW:
            return ()
        new = []
        for rule in RULES:
            name = rule.__name__
            if (advice := rule([*self.past], self.limits)) is not None:
                if seen.step - self.given.get(name, -USUAL) >= WINDOW:
                    new.append(advice)
                self.given[name] = seen.step
        return tuple(new)


@dataclass(slots=True)
class Baseline:
    """What each figure usually is: the median of its last values. Example: Baseline().usual({"rollout": 0.2}) == {}"""

    past: dict[str, deque[float]] = field(default_factory=dict)

    def usual(self, figures: Mapping[str, float]) -> dict[str, float]:
        """What they were before, where that is known; and takes them in."""
        found = {}
        for name, value in figures.items():
            row = self.past.setdefault(name, deque(maxlen=USUAL))
            if len(row) >= WINDOW:
                found[name] = median(row)
            row.append(value)
        return found


def _usual(past: Sequence[Seen], phase: str) -> float:
    return median(seen.seconds.get(phase, 0.0) for seen in past[-WINDOW:])


def _whole(past: Sequence[Seen]) -> float:
    return median(sum(seen.seconds.values()) for seen in past[-WINDOW:])


def ms(seconds: float) -> str:
    """As reports have it: 541ms."""
    return f"{seconds * 1000:.0f}ms"
