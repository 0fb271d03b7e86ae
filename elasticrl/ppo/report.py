"""What is said of a step: its metrics, its times, what its collectives cost; as events, each with a line for people.

The idea: metrics come from one tally of the whole batch, folded in the order of lanes, so they too are the same for any number
of workers. Times and traffic are one worker's, and are told beside what they usually are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from elasticrl.ppo.advantages import explained_variance
from elasticrl.ppo.advice import Advice, Adviser, Baseline, Seen, ms
from elasticrl.ppo.sinks import Event, Sinks
from elasticrl.runtime.spikes import Guard, Spike
from elasticrl.telemetry.events import BY_NAME

if TYPE_CHECKING:
    from elasticrl.config import training as config
    from elasticrl.contract.evaluated import Evaluated
    from elasticrl.ppo.guarantee import Guarantee
    from elasticrl.ppo.losses import Entries
    from elasticrl.runtime.scalars import Moments, Tally
    from elasticrl.runtime.strategy import Reduced
    from elasticrl.runtime.traffic import Cost

FACTS = "evaluate."  # before figures of the weights that a step ends with, among its facts
AT_START = "evaluate_start."  # before those of the weights that it begins with
SPIKE = "spike."  # before numbers of an update that is one
WATCHED = ("value_loss", "preference_loss", "loss")  # for spikes, where they are tallied
UNTOLD = ("entries.", FACTS, AT_START, SPIKE)  # facts that are no metrics of a step
TOLD = ("score", "pass@1", "ended", "length")  # figures in an evaluation's line
SHOWN = ("reward", "kl", "preference_loss", "right", "loss")  # metrics in a step's line


@dataclass(frozen=True, slots=True, kw_only=True)
class Jump:
    """A spike of an update. Example: Jump(update=0, spike=Spike(name="actor_norm", ...), skipped=True)"""

    update: int
    spike: Spike
    skipped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What an operator sees of a step. Example: Report(step=12, metrics={"reward": 0.71}, seconds={"rollout": 0.185})"""

    step: int
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]
    evaluated: Sequence[Evaluated] = ()  # of the weights that it began with, and of those that it ended with
    spikes: Sequence[Jump] = ()

    @classmethod
    def of(
        cls, step: int, facts: Mapping[str, float], seconds: Mapping[str, float], evaluated: Sequence[Evaluated] = ()
    ) -> Report:
        """From the buffer's facts, without those that are only counts for the losses, or told as an evaluation."""
        metrics = {name: value for name, value in facts.items() if not name.startswith(UNTOLD)}
        return cls(step=step, metrics=metrics, seconds=dict(seconds), evaluated=evaluated, spikes=jumps_of(facts))

    def line(self) -> str:
        """Example: [Step 1234] rollout: 185ms | reward: 2ms | ... | reward 0.710 kl 0.021"""
        times = " | ".join(f"{name}: {seconds * 1000:.0f}ms" for name, seconds in self.seconds.items())
        facts = " ".join(f"{name} {self.metrics[name]:.3f}" for name in SHOWN if name in self.metrics)
        return f"[Step {self.step}] {times} | {facts}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comm:
    """A step's communication, as one worker saw it. `sync_s` is what bringing the weights to the engine took.

    Example: Comm(step=12, costs={"all_to_all": Cost(times=8, bytes=400_000, seconds=0.01)}, sync_s=0.06, timeouts=0)
    """

    step: int
    costs: Mapping[str, Cost]
    sync_s: float
    timeouts: int

    @property
    def figures(self) -> dict[str, float]:
        """What has a baseline of its own."""
        seconds = {name: cost.seconds for name, cost in sorted(self.costs.items())}
        return {**seconds, "waits": sum(seconds.values()), "sync": self.sync_s}

    def line(self, usual: Mapping[str, float]) -> str:
        """Example: [Comm 1234] all_to_all: 8 of 3.1MiB 12ms (usually 11ms) | ... | waits 15ms | sync 61ms | timeouts 0"""

        def against(name: str, seconds: float) -> str:
            before = f" (usually {ms(usual[name])})" if name in usual else ""
            return f"{ms(seconds)}{before}"

        kinds = [
            f"{name}: {cost.times} of {_mib(cost.bytes)} {against(name, cost.seconds)}"
            for name, cost in sorted(self.costs.items())
        ]
        rest = [f"{name} {against(name, self.figures[name])}" for name in ("waits", "sync")]
        return f"[Comm {self.step}] " + " | ".join([*kinds, *rest, f"timeouts {self.timeouts}"])


class Reporter:
    """A worker's reports: kept until their step is sealed, then told once by one worker, whatever died meanwhile.

    Who tells a step is agreed in the gang: the lowest rank of those that have a report of it. A fresh process may be rank 0,
    and knows nothing of the step that was sealed as its predecessor died.
    """

    def __init__(self, sinks: Sinks, adviser: Adviser) -> None:
        self._sinks, self._adviser = sinks, adviser
        self._steps, self._comm = Baseline(), Baseline()
        self._kept: dict[int, tuple[Report, Comm, Seen, Mapping[str, float]]] = {}
        self._tellers: dict[int, int] = {}
        self._promised = False

    def promise(self, guarantee: Guarantee, *, step: int, rank: int) -> None:
        """What holds for this run, where its log begins: once in the life of a worker that is rank 0."""
        if rank == 0 and not self._promised:
            self._promised = True
            self._sinks.write(guarantee_event(guarantee, step))

    @property
    def kept(self) -> list[int]:
        """The steps that this worker could tell of."""
        return sorted(self._kept)

    def keep(self, report: Report, comm: Comm, seen: Seen, gang: Mapping[str, float]) -> None:
        """A step is made; it may yet be made again."""
        self._kept[report.step] = (report, comm, seen, gang)

    def tell(self, *, sealed: int, rank: int, kept: Sequence[Sequence[int]]) -> None:
        """Of the steps below `sealed`: no fault reaches those any more. `kept` is what each rank has."""
        self._tellers = {step: min(r for r, steps in enumerate(kept) if step in steps) for step in self.kept}
        self._tell(sealed, rank)

    def close(self, *, sealed: int, rank: int) -> None:
        """The job's end here: what is sealed by now is told by whom the gang had last agreed on."""
        self._tell(sealed, rank)
        self._sinks.close()

    def _tell(self, sealed: int, rank: int) -> None:
        for step in [step for step in self.kept if step < sealed]:
            report, comm, seen, gang = self._kept.pop(step)
            usual, usual_comm = self._steps.usual(report.seconds), self._comm.usual(comm.figures)
            advice = self._adviser.look(seen)
            if rank == self._tellers.get(step, 0):
                for each in report.evaluated:
                    if not each.step:
                        self._sinks.write(evaluate_event(each))
                self._sinks.write(step_event(report, usual, gang))
                for jump in report.spikes:
                    self._sinks.write(spike_event(step, jump))
                self._sinks.write(comm_event(comm, usual_comm))
                for found in advice:
                    self._sinks.write(advice_event(step, found))
                for each in report.evaluated:
                    if each.step:
                        self._sinks.write(evaluate_event(each))


def guarantee_event(guarantee: Guarantee, step: int) -> Event:
    """What holds for the run."""
    fields = {"holds": guarantee.holds, "reason": guarantee.text}
    return emit("ppo.guarantee", step, fields, f"[Guarantee {step}] {guarantee.text}", {})


def step_event(report: Report, usual: Mapping[str, float], gang: Mapping[str, float]) -> Event:
    """A step."""
    fields = {**gang, "metrics": dict(report.metrics), "seconds": dict(report.seconds), "usual": dict(usual)}
    scalars = {f"step/{name}": value for name, value in report.metrics.items()}
    scalars |= {f"seconds/{name}": value for name, value in report.seconds.items()}
    return emit("ppo.step", report.step, fields, report.line(), scalars)


def spike_event(step: int, jump: Jump) -> Event:
    """What of an update was a spike."""
    found = jump.spike
    fields = {
        "update": jump.update, "name": found.name, "value": found.value, "usual": found.usual, "spread": found.spread,
        "skipped": jump.skipped,
    }  # fmt: skip
    end = "the update was left out" if jump.skipped else "the update was applied"
    return emit("ppo.spike", step, fields, f"[Spike {step}] update {jump.update}: {found}; {end}", {})


def evaluate_event(found: Evaluated) -> Event:
    """An evaluation. Its step is the number of those that made the weights, as a checkpoint's is."""
    fields = {"metrics": dict(found.figures), "samples": [asdict(sample) for sample in found.samples]}
    facts = " ".join(f"{name} {value:.3f}" for name, value in found.figures.items() if name in TOLD)
    scalars = {f"evaluate/{name}": value for name, value in found.figures.items()}
    return emit("ppo.evaluate", found.step, fields, f"[Evaluate {found.step}] {facts}", scalars)


def comm_event(comm: Comm, usual: Mapping[str, float]) -> Event:
    """Its communication."""
    costs = {name: cost._asdict() for name, cost in sorted(comm.costs.items())}
    waits = comm.figures["waits"]
    fields = {
        "costs": costs,
        "waits_s": waits,
        "sync_s": comm.sync_s,
        "timeouts": comm.timeouts,
        "usual": dict(usual),
    }
    scalars = {f"comm/{name}_bytes": float(cost.bytes) for name, cost in comm.costs.items()}
    scalars |= {f"comm/{name}_s": value for name, value in comm.figures.items()} | {"comm/timeouts": comm.timeouts}
    return emit("ppo.comm", comm.step, fields, comm.line(usual), scalars)


def advice_event(step: int, advice: Advice) -> Event:
    """What could be done about it."""
    fields = {"rule": advice.rule, "numbers": dict(advice.numbers), "text": advice.text}
    return emit("ppo.advice", step, fields, f"[Advice {step}] {advice.text}", {})


def emit(name: str, step: int, fields: Mapping[str, Any], line: str, scalars: Mapping[str, float]) -> Event:
    """An event that telemetry.events declares."""
    declared = BY_NAME[name].fields.keys() | {"step"}
    assert fields.keys() <= declared, f"{name}: {sorted(fields.keys() - declared)} are not declared"
    return Event(name=name, step=step, fields=fields, line=line, scalars=scalars)


def guard_of(asked: config.Spike, entries: Entries) -> Guard | None:
    """Against spikes; none of an update without samples, which is 0. The policy's loss is about 0 whatever happens."""
    if asked.does == "off" or not entries.tokens:
        return None
    return Guard(
        sigma=asked.sigma, window=asked.window, in_a_row=asked.in_a_row, does=asked.does, losses=WATCHED, per=entries.tokens
    )  # fmt: skip


def spiked(done: Reduced, number: int, facts: Mapping[str, float]) -> dict[str, float]:
    """An update's spikes as facts, which outlive a worker."""
    found = {"spikes": facts.get("spikes", 0.0) + 1.0} if done.spikes else dict[str, float]()
    for spike in done.spikes:
        numbers = {"value": spike.value, "usual": spike.usual, "spread": spike.spread, "skipped": float(done.skipped)}
        found |= {f"{SPIKE}{number}.{spike.name}.{name}": value for name, value in numbers.items()}
    return found


def jumps_of(facts: Mapping[str, float]) -> tuple[Jump, ...]:
    """The reverse, update by update."""
    heads = [name.removesuffix(".value") for name in facts if name.startswith(SPIKE) and name.endswith(".value")]
    found = []
    for head in heads:
        number, name = head.removeprefix(SPIKE).split(".", 1)
        value, usual, spread, skipped = (facts[f"{head}.{it}"] for it in ("value", "usual", "spread", "skipped"))
        spike = Spike(name=name, value=value, usual=usual, spread=spread)
        found.append(Jump(update=int(number), spike=spike, skipped=bool(skipped)))
    return tuple(sorted(found, key=lambda jump: (jump.update, jump.spike.name)))


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.1f}MiB"


def lr_factor(schedule: str, step: int, *, warmup: int, steps: int) -> float:
    """What the learning rate is multiplied by in a step: a rise over `warmup` steps, then the schedule's way down to 0."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}[schedule]


def facts_of(whole: Tally) -> dict[str, float]:
    """A step's metrics, and the counts that losses are divided by."""
    m = whole.moments
    found = {
        "reward": m["scores"].mean,
        "reward_std": m["scores"].std(),
        "length": m["length"].mean,
    }
    found |= parts_said(m)
    if "gap" in m:
        found |= {"rollout_gap": m["gap"].mean, "rollout_gap_std": m["gap"].std()}
    if "advantages" in m:
        found |= gains_of(whole)
    if "turns" in m:
        found |= {"turns": m["turns"].mean, "lost": whole.sums["lost"], "troubles": whole.sums["troubles"]}
    found["left_out"] = whole.sums["left_out"] / max(m["length"].count, 1.0)
    found["ended"] = whole.sums["ended"] / max(m["length"].count, 1.0)
    return found | passing(whole)


def gains_of(whole: Tally) -> dict[str, float]:
    """Of advantages, and of a critic."""
    m = whole.moments
    found = {"advantage_std": m["advantages"].std()}
    return found | ({"explained_variance": explained_variance(m["returns"], m["errors"])} if "returns" in m else {})


def parts_said(moments: Mapping[str, Moments]) -> dict[str, float]:
    """Of several rewards what each said, before it was weighed."""
    parts = {name: its for name, its in moments.items() if name.startswith("reward/")}
    return {
        f"{name}{end}": value for name, its in parts.items() for end, value in (("", its.mean), ("_std", its.std()))
    }


def passing(whole: Tally) -> dict[str, float]:
    """What a step's updates are divided by, and which share of what their passes compute is padding."""
    entries = {name: value for name, value in whole.sums.items() if name.startswith("entries.")}
    return entries | {"padding": 1.0 - whole.sums["tokens"] / max(whole.sums["places"], 1.0)}
