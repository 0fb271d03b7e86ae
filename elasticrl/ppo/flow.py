"""A step, declared: its stages, who does each, what each needs and makes.

The idea: the order of stages, what could run beside what, the phases that beats and budgets know, and what must be done again
after a fault all follow from the same few lines. Adding an algorithm is adding a declaration here and a loss.

    rollout -> reward, logprobs, ref, values -> advantage -> update -> sync

Where an epoch is one update, that stage's first passes of the critic make the values, and the advantages follow from them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from elasticrl.ppo.staleness import ON_TIME, Staleness

if TYPE_CHECKING:
    from elasticrl.config.training import Ppo


# What each lane keeps of a value, per sample; the other values are not the lanes'.
ROWS: Mapping[str, tuple[str, ...]] = {
    "samples": ("tokens", "attention", "mask", "rollout_logprobs", "ended"),
    "replies": ("earned", "lost", "troubles", "turns"),
    "scores": ("scores",),
    "logprobs": ("logprobs",),
    "ref_logprobs": ("ref_logprobs",),
    "values": ("values",),
    "advantages": ("advantages", "kept"),
    "gains": ("rewards", "kept"),
    "returns": ("returns",),
}

# Whether the state is kept after a stage, which makes anew nothing that was made up to there: where that costs a small part of
# the time that it took (`vault.inside`), or always, as it is not to be had again, or only from others and slowly.
Keeps = Literal["never", "worth it", "always"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One phase of a step.

    `weights` is what it computes with: "start" means the trained roles as they are before the step's first update, so that it
    cannot be done again once that is sealed; "frozen", "kept" or none can be.

    Example: Stage(name="values", role="critic", reads=("samples",), writes=("values",), weights="start")
    """

    name: str  # also the phase in beats, budgets and timings, unless `phase` says another
    role: str  # which model or part does it
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    weights: str = ""
    phase: str = ""
    keeps: Keeps = "never"

    @property
    def rows(self) -> tuple[str, ...]:
        """What it leaves with each lane."""
        return tuple(row for value in self.writes for row in ROWS.get(value, ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """An algorithm's step. Example: Flow(name="ppo", given=("prompts",), stages=(...), trained=("actor", "critic"))"""

    name: str
    given: tuple[str, ...]  # what the data brings
    stages: tuple[Stage, ...]
    trained: tuple[str, ...]

    def __post_init__(self) -> None:
        made = [value for stage in self.stages for value in stage.writes] + list(self.given)
        assert len(made) == len(set(made)), f"{self.name}: something is written twice in {made}"
        for stage in self.stages:
            assert set(stage.reads) <= set(made), f"{self.name}: nobody writes {sorted(set(stage.reads) - set(made))}"
        assert sum(len(wave) for wave in self.waves()) == len(self.stages)

    def __contains__(self, name: str) -> bool:
        return any(stage.name == name for stage in self.stages)

    @property
    def order(self) -> tuple[Stage, ...]:
        """Each after what it needs; as declared where that leaves a choice."""
        have, todo, found = set(self.given), list(self.stages), []
        while todo:
            stage = next(stage for stage in todo if set(stage.reads) <= have)
            todo.remove(stage)
            have |= set(stage.writes)
            found.append(stage)
        return tuple(found)

    @property
    def phases(self) -> tuple[str, ...]:
        """The names that budgets and timings are asked for."""
        return tuple(dict.fromkeys(stage.phase or stage.name for stage in self.order))

    def waves(self) -> tuple[tuple[Stage, ...], ...]:
        """Stages of one wave need nothing of each other: roles that live in different places can do them at the same time."""
        have, todo, found = set(self.given), list(self.stages), []
        while todo:
            wave = [stage for stage in todo if set(stage.reads) <= have]
            assert wave, f"{self.name}: {[stage.name for stage in todo]} wait for each other"
            found.append(tuple(wave))
            have |= {value for stage in wave for value in stage.writes}
            todo = [stage for stage in todo if stage not in wave]
        return tuple(found)

    def made(self, done: Collection[str]) -> set[str]:
        """The values that there are when these stages are done."""
        return {value for stage in self.stages if stage.name in done for value in stage.writes}

    def again(self, have: AbstractSet[str], *, updates: int) -> tuple[Stage, ...] | None:
        """What must be done, in order, when of a step only `have` is left after `updates` sealed updates.

        None: it cannot be had again with these weights, and the step must go back to before its first update.
        """
        missing = [stage for stage in self.order if not set(stage.writes) <= have]
        lost = [stage for stage in missing if stage.weights == "start"]
        return None if updates and lost else tuple(missing)

    def text(self, placement: Mapping[str, str] | None = None) -> str:
        """The graph for a terminal; `placement` says where each role lives and how it is sharded."""
        lines = [f"{self.name}: one step trains {' and '.join(self.trained)}; given {', '.join(self.given)}"]
        for number, wave in enumerate(self.waves(), 1):
            for i, stage in enumerate(wave):
                head = f"{number:3}" if i == 0 else "  |"
                flows = f"{', '.join(stage.reads) or '-'} -> {', '.join(stage.writes) or '-'}"
                where = f"  @ {(placement or {}).get(stage.role, 'every worker')}"
                lines.append(f"{head}  {stage.name:<10} {stage.role:<8} {flows}{where}")
        lines.append("  |  marks stages that need nothing of each other")
        return "\n".join(lines)


def of(
    ppo: Ppo,
    *,
    tied: bool = False,
    staleness: Staleness = ON_TIME,
    apart: bool = False,
    asked: bool = False,
    turns: bool = False,
) -> Flow:
    """The flow that a configuration asks for. With `staleness` samples of later steps are generated too: before the update, or,
    where the engine is `apart`, beside everything that follows the rollout, the update included. Scores that are `asked` of a
    model or an endpoint take their time, in which a fault must not cost the rollout. With `turns` an environment replies, and
    the rollout keeps each turn by itself.
    """
    if ppo.algorithm in ("dpo", "kto", "sft"):
        return _given(ppo)
    with_ref, with_critic = ppo.kl.where != "off", ppo.algorithm == "ppo"
    trained: tuple[str, ...] = ("actor", "critic") if with_critic and not tied else ("actor",)
    if together(ppo, tied=tied):
        trained = ("critic", "actor")  # whose loss has the advantages
    ref = ("ref_logprobs",) if with_ref else ()
    values = ("values",) if with_critic and not together(ppo, tied=tied) else ()
    replies = ("replies",) if turns else ()
    scored = ("logprobs", *values) if tied else ("logprobs",)  # a tied head gives both in one pass
    # Where more is generated than trained on, scores choose.
    scores_first = ("samples", "scores") if ppo.gen_batch else ("samples",)
    stages = [
        Stage(
            name="rollout",
            role="rollout",
            reads=("prompts",),
            writes=("samples", *replies),
            weights="start",
            keeps="always" if asked else "never" if turns else "worth it",
        ),
        Stage(name="reward", role="reward", reads=("samples", *replies), writes=("scores",), keeps="always"),
        Stage(name="logprobs", role="actor", reads=scores_first, writes=scored, weights="start"),
    ]
    if with_ref:
        stages.append(Stage(name="ref", role="ref", reads=scores_first, writes=ref, weights="frozen"))
    if values and not tied:
        stages.append(Stage(name="values", role="critic", reads=("samples",), writes=values, weights="start"))
    gains = ("advantages", "returns") if values else ("gains",) if with_critic else ("advantages",)
    early = ("ahead",) if staleness else ()
    # The weights that a longer period began with are kept: with them the samples are to be had again at any time.
    by = "kept" if apart and staleness.steps > 1 else "start"
    ahead = [
        Stage(name=name, role="rollout", reads=("samples",), writes=early, weights=by, phase="rollout")
        for name in early
    ]
    before, beside = (
        ((), early) if apart else (early, ())
    )  # what waits for them: the update, or the new weights' way out
    stages += [
        Stage(name="advantage", role="job", reads=("samples", "scores", "logprobs", *ref, *values), writes=gains),
        *(ahead if before else ()),
        Stage(
            name="update",
            role="+".join(trained),
            reads=("samples", "logprobs", *gains, *values, *(ref if ppo.kl.where == "loss" else ()), *before),
            writes=("weights",),
        ),
        *(ahead if beside else ()),
        Stage(name="sync", role="rollout", reads=("weights", *beside), writes=("published",)),
    ]
    return Flow(name=ppo.algorithm, given=("prompts",), stages=tuple(stages), trained=trained)


def together(ppo: Ppo, *, tied: bool) -> bool:
    """Whether the critic's values are made in its own first update, which has all samples, by the weights that are asked."""
    return ppo.algorithm == "ppo" and not tied and ppo.batch == ppo.mini_batch == ppo.generated


def compares(ppo: Ppo) -> bool:
    """Whether an algorithm on given answers needs a reference."""
    return ppo.algorithm == "kto" or (ppo.algorithm == "dpo" and ppo.preference_loss != "simpo")


def _given(ppo: Ppo) -> Flow:
    """Given answers, a reference where one is compared with, an update."""
    first = "ref" if compares(ppo) else "update"  # the phase that the answers are read in
    stages = [Stage(name="answers", role="job", reads=("records",), writes=("answers",), phase=first)]
    reads: tuple[str, ...] = ("answers",)
    if compares(ppo):
        stages.append(Stage(name="ref", role="ref", reads=("answers",), writes=("ref_logprobs",), weights="frozen"))
        reads += ("ref_logprobs",)
    if ppo.algorithm == "kto":
        stages.append(
            Stage(name="baseline", role="actor+ref", reads=("answers",), writes=("baseline",), weights="start")
        )
        reads += ("baseline",)
    stages.append(Stage(name="update", role="actor", reads=reads, writes=("weights",)))
    return Flow(name=ppo.algorithm, given=("records",), stages=tuple(stages), trained=("actor",))
