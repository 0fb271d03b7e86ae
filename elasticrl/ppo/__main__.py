"""`python -m elasticrl.ppo`, and what `job.program: elasticrl.ppo` runs: the whole job, from its configuration.

The idea: this is only the list of parts. The models and their optimizers go to the runtime, the trainer gets the roles, and
each step is one `with` that a fault may cut short.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import nn

import elasticrl
from elasticrl.config.training import Curriculum
from elasticrl.ppo import answers, guarantee, models, prompts, rewards, sinks, sizes
from elasticrl.ppo.advice import Adviser, Seen, Slowness
from elasticrl.ppo.elastic import ElasticRun, collective
from elasticrl.ppo.evaluation import Evaluation
from elasticrl.ppo.flow import compares
from elasticrl.ppo.frozen import Frozen
from elasticrl.ppo.idle import Idle
from elasticrl.ppo.preferences import PreferenceTrainer
from elasticrl.ppo.records import DataError
from elasticrl.ppo.report import Comm, Report, Reporter
from elasticrl.ppo.roles import Roles
from elasticrl.ppo.rollout.away import Away
from elasticrl.ppo.rollout.begun import Begun
from elasticrl.ppo.rollout.configured import (
    episodes_of,
    held_out_episodes,
    not_here,
    outside,
    sampling_of,
    sent_as,
    tools_of,
)  # fmt: skip
from elasticrl.ppo.rollout.engine import Draw, drawn
from elasticrl.ppo.rollout.episodes import Episodes
from elasticrl.ppo.rollout.inline import TorchEngine
from elasticrl.ppo.rollout.outside import Outside
from elasticrl.ppo.rollout.served import Served
from elasticrl.ppo.rollout.weights import in_buckets, sent
from elasticrl.ppo.staleness import staleness_of
from elasticrl.ppo.trainer import Trainer
from elasticrl.runtime.data.cursor import Cursor, Walk
from elasticrl.runtime.optim import AdamW, Rule
from elasticrl.runtime.outline import give_memory
from elasticrl.runtime.team import ACROSS
from elasticrl.runtime.tokens import tokens_of
from elasticrl.runtime.trained import strategy_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from elasticrl.config import Tree
    from elasticrl.ppo.prompts import Prompt, Prompts
    from elasticrl.ppo.rollout.engine import Engine, Sampling
    from elasticrl.ppo.rollout.weights import Bucket
    from elasticrl.runtime.run import Run
    from elasticrl.runtime.trained import Build


class NotHere(ValueError):
    """The configuration asks for something that this trainer cannot do yet."""


def main(config: str | None = None) -> None:
    """One job, to its end."""
    with elasticrl.runtime.join(config) as base:
        trainer, refresh = build(base)
        base.claim()
        experts = models.has_experts(str(base.tree.model.path))
        reporter, generation = Reporter(sinks.opened(base.tree), adviser(base.tree)), 0
        for step in base.steps():
            with step:
                if base.generation != generation:
                    generation = base.generation
                    refresh()
                    holds = guarantee.of(base.tree, base.context.device, experts=experts)
                    reporter.promise(holds, step=step, rank=base.rank)
                report = trainer.step(step)
                told = base.tell({"own": own(trainer), "kept": reporter.kept})
                reporter.tell(sealed=base.sealed, rank=base.rank, kept=[words["kept"] for words in told])
                reporter.keep(
                    report,
                    *watched(base, report, [words["own"] for words in told]),
                    {"generation": generation, "world": base.world, "made": round(time.time(), 4)},
                )
        reporter.close(sealed=base.sealed, rank=base.rank)
        if isinstance(trainer.engine, Outside):
            trainer.engine.end()  # this node is let go, or all steps are made; a worker that dies leaves it running
        if isinstance(trainer.generator, Episodes):
            trainer.generator.end()
        if trainer.evaluation is not None:
            trainer.evaluation.end()


def build(base: Run) -> tuple[Trainer, Callable[[], None]]:
    """The trainer, and what is to be called in each new generation, when sharded models have been built anew."""
    check(base.tree)
    if base.tree.ppo.router_aux_coef:
        models.check_routed(base.tree.model)
    if base.tree.rollout.engine != "torch":
        base.claim()  # an engine is started for a rank
    return preferring(base) if base.tree.ppo.algorithm in answers.PER_RECORD else generating(base)


def beside(tree: Tree, tokenizer: Any) -> None:
    """Models of other folders than the actor's must know its tokens, or ModelError."""
    folders = {
        "model.critic_path": tree.model.critic_path, "model.ref_path": tree.model.ref_path, "reward.model": tree.reward.model,
    }  # fmt: skip
    for key, folder in folders.items():
        if folder is not None and folder != str(tree.model.path):
            models.check_tokens(tokenizer, folder, key)


def generating(base: Run) -> tuple[Trainer, Callable[[], None]]:
    """PPO, GRPO and their kin: samples are generated and scored."""
    tree = base.tree
    path = str(tree.model.path)
    tokenizer = models.tokenizer(path)
    beside(tree, tokenizer)
    ppo, lanes = tree.ppo, tree.lanes.count
    device = base.context.device
    ref_away, reward_away = (placement.where == "rollout" for placement in (tree.placement.ref, tree.placement.reward))
    passes = passes_of(tree, device)
    run = ElasticRun(base, parts=sizes.parts_of(ppo, lanes, passes))
    frozen = Frozen(tree, device)
    apart = ppo.algorithm == "ppo" and tree.model.value_head == "separate"
    built = to_train(base, frozen, ["actor", *["critic"] * apart])
    base.train(**{name: (model, rule_of(tree, name)) for name, model in built.items()})
    sampling = sampling_of(tree, tokenizer)
    frozen.ends(sampling.eos)
    away = outside(tree, run, sampling)
    judge = away.judge if isinstance(away, Away) else None
    needed = ppo.kl.where != "off" and not ref_away
    reference = frozen.model("ref", lambda: reference_of(tree), outline_of(tree)) if needed else None
    data = prompts.load(tree.data, tokenizer, kept_tokens(base), tools=tools_of(tree))
    print(prompts.fitting(tree.data, kept=len(data), left_out=data.left_out), flush=True)
    run.cursor = cursor = Cursor(
        Walk(
            name=str(tree.data.path), content=data.content, size=len(data), lanes=lanes,
            per_lane=ppo.generated // lanes // ppo.part(lanes), turns=ppo.epochs, seed=tree.job.seed,
            shuffle=tree.data.shuffle, spans=ppo.group // ppo.part(lanes), levels=data.levels,
            stages=tree.data.curriculum.weights if tree.data.curriculum.stages else (),
        ),
        group=ppo.group,
        trained=ppo.batch if ppo.gen_batch else None,
    )  # fmt: skip
    scored = tree.reward.asked or tree.environment.function is None
    scorer = (
        rewards.of(
            tree.reward,
            deadline_s=tree.timeouts.phase.reward_s or tree.timeouts.default_phase_s,
            check=lambda: base.check("reward"),
            waits=lambda: base.waits(alone=True),
            alone=base.alone,
            load=lambda name: rewards.RewardModel(
                model=nn.Module()
                if reward_away
                else frozen.model("reward", lambda: models.reward_model(tree.model, name)) or nn.Module(),
                sizes=replace(passes, unit=1, share=False),
                pad=tokenizer.pad_token_id,
                collective=collective(tree, "reward"),
                judge=judge if reward_away else None,
            ),
        )
        if scored
        else None
    )
    roles = Roles(
        model=tree.model, actor=at_first(built["actor"]), critic=at_first(built["critic"]) if "critic" in built else None,
        ref=reference, judge=judge if ref_away else None, tokenizer=tokenizer, device=device,
        temperature=tree.rollout.temperature, most_logits=sizes.most_logits(ppo),
    )  # fmt: skip
    gathers = collective(tree, "actor")
    engine = away or TorchEngine(
        body(roles.actor), sampling, lockstep=gathers, whole=gathers and tree.rollout.gather, check=run.check
    )
    feed = Feed(cursor, data)
    trainer = Trainer(
        run,
        roles,
        ppo=ppo,
        lanes=lanes,
        steps=tree.job.steps,
        feed=feed,
        sizes=passes,
        engine=engine,
        scorer=scorer,
        staleness=staleness_of(tree),
        begun=Begun(lambda: now_sent(trainer)) if away is not None and tree.rollout.staleness > 1 else None,
        episodes=episodes_of(tree, base, run, engine, feed, tokenizer),
        evaluation=evaluation_of(tree, base, run, roles, engine),
    )
    base.register(data=cursor, kl=trainer.coefficient)
    if trainer.begun is not None:
        base.register(begun=trainer.begun)

    def hold(trained: Mapping[str, nn.Module], ref: nn.Module | None, reward: nn.Module | None) -> None:
        trainer.roles = replace(trainer.roles, actor=trained["actor"], critic=trained.get("critic"), ref=ref)
        if scorer is not None and reward is not None:
            trainer.scorer = rewards.with_model(scorer, reward)
        trainer.idle = idle_of(tree, trainer)
        for each in (engine, trainer.evaluation and trainer.evaluation.engine):
            if isinstance(each, TorchEngine):
                each.model = body(trainer.roles.actor)

    def refresh() -> None:
        hold({name: base.role(name).model for name in built}, frozen.here("ref", base), frozen.here("reward", base))
        frozen.compare(base)
        if not isinstance(engine, TorchEngine):
            number = base.slot if isinstance(engine, Served) else base.rank  # among those of whom one writes
            writes, joins = number == 0, gathers or number < tree.model.tp  # whose team has the model
            engine.enter(life=run.life, source=source(tree, trainer, kept=writes), writes=writes, gathers=joins)
            if isinstance(engine, Away) and run.first and not writes:
                engine.tidy()

    base.on_let_go(
        lambda: hold({name: at_first(it) for name, it in built.items()}, frozen.whole("ref"), frozen.whole("reward"))
    )
    return trainer, refresh


def passes_of(tree: Tree, device: str) -> sizes.Sizes:
    """Of the job's forward and backward passes. Samples of a group are one row on CPUs: on GPUs a mask takes another kernel,
    which nobody has measured here, and a judge elsewhere takes samples.
    """
    ppo, lanes, away = tree.ppo, tree.lanes.count, tree.placement.ref.where == "rollout"
    widest = {"prompt": tree.data.max_prompt, "answer": tree.rollout.max_tokens}
    share = device == "cpu" and not away and models.shares(str(tree.model.path), tree.model, ppo, lanes, **widest)
    return sizes.of(ppo, device=device, share=share, lanes=lanes, **widest)


def evaluation_of(tree: Tree, base: Run, run: ElasticRun, roles: Roles, its: Engine) -> Evaluation | None:
    """Held-out prompts, answered by the trainer's own weights: in this worker, or by `its` engine."""
    asked, lanes = tree.evaluate, tree.lanes.count
    if not asked.every:
        return None
    chosen = held_out(tree, base, roles.tokenizer)
    several = tree.rollout.temperature if asked.samples > 1 else 0.0
    draw = Draw(
        tokens=min(asked.max_tokens or its.sampling.max_tokens, its.sampling.max_tokens),  # of a message, where there are turns
        top_p=asked.top_p, top_k=asked.top_k,
        temperature=several if asked.temperature is None else asked.temperature,
    )  # fmt: skip
    engine = (
        its if tree.rollout.evaluates else beside_training(tree, base, roles, drawn(its.sampling, draw), len(chosen))
    )
    told = draw if engine is its else None
    return Evaluation(
        run, engine, chosen, asked, lanes=lanes, steps=tree.job.steps, scored=tree.ppo.batch // lanes, draw=told,
        episodes=held_out_episodes(tree, base, engine, roles.tokenizer, told), tell=base.tell, says=base.scored,
    )  # fmt: skip


def beside_training(tree: Tree, base: Run, roles: Roles, sampling: Sampling, prompts: int) -> TorchEngine:
    """What answers so many held-out prompts in this worker, whatever generates what is trained on."""
    gathers, most = collective(tree, "actor"), -(-prompts // tree.lanes.count) * tree.evaluate.samples
    return TorchEngine(
        body(roles.actor), replace(sampling, rows=min(sampling.rows, most)), lockstep=gathers,
        whole=gathers and tree.rollout.gather, check=lambda: base.check("evaluate"),
    )  # fmt: skip


def held_out(tree: Tree, base: Run, tokenizer: Any) -> list[Prompt]:
    """The prompts that are never trained on."""
    asked = tree.evaluate
    read_as = tree.data.model_copy(
        update={"path": asked.prompts, "split": asked.split, "shuffle": False, "curriculum": Curriculum()}
    )
    try:
        data = prompts.load(read_as, tokenizer, kept_tokens(base), tools=tools_of(tree))
    except DataError as error:
        raise DataError(f"evaluate.prompts cannot be used, which is read as data.path is: {error}") from error
    print(prompts.fitting(read_as, kept=len(data), left_out=data.left_out), flush=True)
    return [data[number] for number in range(min(len(data), asked.limit or len(data)))]


def preferring(base: Run) -> tuple[Trainer, Callable[[], None]]:
    """DPO, KTO and SFT: answers are given, so nobody generates and nobody scores."""
    tree, ppo, lanes = base.tree, base.tree.ppo, base.tree.lanes.count
    path = str(tree.model.path)
    tokenizer = models.tokenizer(path)
    beside(tree, tokenizer)

    device = base.context.device
    passes = sizes.of(ppo, prompt=tree.data.max_prompt, answer=tree.rollout.max_tokens, device=device)
    run = ElasticRun(base, parts=sizes.parts_of(ppo, lanes, passes), last="update")
    frozen = Frozen(tree, device)
    built = to_train(base, frozen, ["actor"])["actor"]
    base.train(actor=(built, rule_of(tree, "actor")))
    answer_tokens, ends = tree.rollout.max_tokens, models.ends(path, tokenizer)
    frozen.ends(ends)
    data = answers.load(
        tree.data, tokenizer, algorithm=ppo.algorithm, answer_tokens=answer_tokens, ends=ends, keep=kept_tokens(base)
    )
    print(prompts.fitting(tree.data, kept=len(data), left_out=data.left_out), flush=True)
    run.cursor = cursor = Cursor(
        Walk(
            name=str(tree.data.path), content=data.content, size=len(data), lanes=lanes,
            per_lane=ppo.batch // lanes // answers.PER_RECORD[ppo.algorithm], turns=ppo.epochs, seed=tree.job.seed,
            shuffle=tree.data.shuffle,
        )
    )  # fmt: skip
    reference = frozen.model("ref", lambda: reference_of(tree), outline_of(tree)) if compares(ppo) else None
    roles = Roles(
        model=tree.model, actor=at_first(built), ref=reference, tokenizer=tokenizer, device=device,
        most_logits=sizes.most_logits(ppo),
    )  # fmt: skip
    trainer = PreferenceTrainer(
        run, roles, ppo=ppo, lanes=lanes, steps=tree.job.steps, sizes=passes,
        given=answers.Feed(cursor, data), pad=tokenizer.pad_token_id,
    )  # fmt: skip
    base.register(data=cursor)

    def hold(actor: nn.Module, ref: nn.Module | None) -> None:
        trainer.roles = replace(trainer.roles, actor=actor, ref=ref)
        trainer.idle = idle_of(tree, trainer)

    def refresh() -> None:
        hold(base.role("actor").model, frozen.here("ref", base))
        frozen.compare(base)

    base.on_let_go(lambda: hold(at_first(built), frozen.whole("ref")))
    return trainer, refresh


def to_train(base: Run, frozen: Frozen, roles: Sequence[str]) -> dict[str, nn.Module | Build]:
    """What the runtime is given of each model that is trained."""
    tree, device = base.tree, base.context.device
    path = str(tree.model.path)
    paths = {"actor": path, "critic": tree.model.critic_path or path}

    def given(role: str) -> nn.Module | Build:
        strategy = strategy_of(tree, role)

        def make() -> nn.Module:
            later = strategy == "fsdp" or tree.model.team > 1
            weights: models.Weights = "filled" if base.fills else "later" if later else "read"
            if role == "critic":
                return models.critic(tree.model, paths[role], weights=weights)
            return models.actor(tree.model, paths[role], seed=tree.job.seed, weights=weights)

        def fill(model: nn.Module) -> None:
            if base.fills or not any(param.is_meta for param in model.parameters()):
                return
            if strategy == "fsdp":
                from elasticrl.runtime import fsdp  # half a second of imports, for this alone

                fsdp.give_memory(model, device)
            else:
                give_memory(model, device)
            models.fill(model, paths[role])

        made = frozen.within(role, make)
        if tree.model.team > 1 and strategy == "replicated":
            return shared(made, device, fill)
        return given_as(strategy, made, device, fill, narrow=tree.model.dtype == "bfloat16")

    return {role: given(role) for role in roles}


def reference_of(tree: Tree, weights: models.Weights = "read") -> nn.Module | None:
    """None where the reference is the actor without its adapters: it costs no memory then."""
    if tree.model.lora.rank and tree.model.ref_path is None:
        return None
    return models.reference(tree.model, tree.model.ref_path or str(tree.model.path), weights=weights)


def outline_of(tree: Tree) -> Callable[[], nn.Module | None]:
    """Makes the reference without its weights."""
    return lambda: reference_of(tree, "filled")


def now_sent(trainer: Trainer) -> Iterable[tuple[str, torch.Tensor]]:
    """The actor's weights of now that an engine gets."""
    actor = trainer.roles.actor
    return sent(body(actor), within=actor)


def source(tree: Tree, trainer: Trainer, *, kept: bool) -> Callable[[int], Iterable[Bucket]]:
    """The actor's weights of a version, bucket by bucket; empty ones for who only joins in putting them together."""

    def made(version: int) -> Iterable[Bucket]:
        begun = trainer.begun
        params = now_sent(trainer) if begun is None or version == trainer.run.version else begun.held.items()
        return in_buckets(params, nbytes=tree.rollout.sync_bucket_bytes, dtype=sent_as(tree), kept=kept)

    return made


def check(tree: Tree) -> None:
    """Refuse what is not built, before anything is loaded."""
    asked = [name for name, there in not_here(tree).items() if there]
    if asked:
        raise NotHere(
            f"{', '.join(asked)}: not built into this trainer yet; leave it at its default, or write a script."
        )
    if tree.model.path is None:
        raise NotHere("model.path is not set: name a folder in Hugging Face's layout, or a model on its hub.")
    inexact = [role for role in ("actor", "critic") if strategy_of(tree, role) == "deepspeed"]
    if inexact and find_spec("deepspeed") is None:
        raise NotHere(
            f"the strategy of {' and '.join(inexact)} is deepspeed, and that package is not installed: "
            "pip install 'elasticrl[deepspeed]', or set strategy: fsdp."
        )


def kept_tokens(base: Run) -> Path | None:
    """Where a node keeps its data's tokens. Who trains alone is not replaced, and writes nothing beside its run."""
    return None if base.context.alone else base.context.node_dir / "tokens"


class Feed:
    """Which prompts a lane gets in a step: the cursor's samples."""

    def __init__(self, cursor: Cursor, data: Prompts) -> None:
        self._cursor, self._data = cursor, data

    def __call__(self, step: int, lane: int) -> Sequence[tuple[str, Prompt]]:
        """(sample id, prompt) of each."""
        return [(str(sample), self._data[sample.index]) for sample in self._cursor.ids(step, 0, lane)]

    def made_of(self, step: int) -> str:
        """The cursor's."""
        return self._cursor.made_of(step)


def rule_of(tree: Tree, role: str) -> Callable[[str], Rule]:
    """AdamW with the role's learning rate."""
    ppo = tree.ppo
    lr = ppo.critic_lr if role == "critic" else ppo.lr
    rule = AdamW(lr=lr, betas=ppo.betas, eps=ppo.eps, weight_decay=ppo.weight_decay)
    return lambda _name: rule


def shards(
    make: Callable[[], nn.Module], fill: Callable[[nn.Module], None] = lambda _model: None, *, narrow: bool = False
) -> Callable[[DeviceMesh], nn.Module]:
    """The model with every layer a unit of FSDP2's, and then filled. Where the mesh is a team's, that shares it before. With
    `narrow` passes of autocast get what they would narrow in bfloat16.
    """

    def build(mesh: DeviceMesh) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        model, across = make(), mesh
        if mesh.ndim > 1 or tokens_of(mesh) is not None:
            share(body(model), mesh)
            across = mesh[ACROSS]
        for layers in (module for module in model.modules() if isinstance(module, nn.ModuleList)):
            for layer in layers:
                fully_shard(layer, mesh=across)
        fully_shard(model, mesh=across)
        fill(model)
        if narrow:
            from elasticrl.runtime import narrowed

            narrowed.narrow(model, models.PRODUCTS)
        return model

    return build


def shared(
    make: Callable[[], nn.Module], device: str, fill: Callable[[nn.Module], None]
) -> Callable[[DeviceMesh], nn.Module]:
    """The model as the team of the mesh shares it: its layers by transformers' own plan for its kind, or its tokens."""

    def build(mesh: DeviceMesh) -> nn.Module:
        model = make()
        share(body(model), mesh)
        fill(model)
        give_memory(model, device)  # of what is filled with what was kept
        return model.to(device)

    return build


def share(model: nn.Module, mesh: DeviceMesh) -> None:
    """As `planned.share`."""
    from elasticrl.runtime import planned  # half a second of imports, which only teams need

    planned.share(model, mesh)


def given_as(
    strategy: str,
    make: Callable[[], nn.Module],
    device: str,
    fill: Callable[[nn.Module], None],
    *,
    narrow: bool = False,
) -> nn.Module | Build:
    """What the runtime is given of a trained model: itself, on its device, or how to build it for a gang: what shards it puts
    each layer there by itself, so that no GPU holds all of it.
    """
    if strategy == "replicated":
        return make().to(device)
    return shards(make, fill, narrow=narrow) if strategy == "fsdp" else lambda _mesh: make()


def at_first(given: nn.Module | Build) -> nn.Module:
    """A trained model before the first generation, which builds what is sharded."""
    return given if isinstance(given, nn.Module) else nn.Module()


def idle_of(tree: Tree, trainer: Trainer) -> Idle:
    """The roles that are put away while they have nothing to do. DeepSpeed puts away its own."""
    placement, roles = tree.placement, trainer.roles
    scorer = rewards.model_of(trainer.scorer)
    models_of: dict[str, nn.Module | None] = {
        "actor": roles.actor, "critic": roles.critic, "ref": roles.ref,
        "reward": scorer.model if scorer is not None else None,
    }  # fmt: skip
    asked = {
        "actor": placement.actor.offload, "critic": placement.critic.offload,
        "ref": placement.ref.offload, "reward": placement.reward.offload,
    }  # fmt: skip
    inexact = {role for role in ("actor", "critic") if strategy_of(tree, role) == "deepspeed"}
    return Idle(
        {
            role: model
            for role, model in models_of.items()
            if model is not None and asked[role] == "cpu" and role not in inexact
        },
        frozen=("ref", "reward"),
        stands_for={"ref": "actor"} if roles.ref is None and roles.judge is None else {},
        copies=trainer.idle.copies,
    )


def body(model: nn.Module) -> nn.Module:
    """What generates: a tied actor without its value head."""
    return model.actor if isinstance(model, models.Tied) else model


def own(trainer: Trainer) -> Mapping[str, float]:
    """Each phase's seconds on this worker, less what it waited for others."""
    assert isinstance(trainer.run, ElasticRun)
    return trainer.run.own


def watched(base: Run, report: Report, times: Sequence[Mapping[str, float]]) -> tuple[Comm, Seen]:
    """What a step cost, and what rules of thumb look at. `times` are every rank's own."""
    costs, timeouts = base.meter.taken()
    ppo, tree = base.tree.ppo, base.tree
    comm = Comm(step=report.step, costs=costs, sync_s=report.seconds.get("sync", 0.0), timeouts=timeouts)
    seen = Seen(
        step=report.step, seconds=report.seconds, own=times, padding=report.metrics.get("padding", 0.0),
        micro_tokens=ppo.micro_tokens, lane_batch=ppo.mini_batch // tree.lanes.count,
        width=tree.data.max_prompt + tree.rollout.max_tokens, device=base.context.device,
        loss=report.metrics.get("policy_loss", report.metrics.get("preference_loss", report.metrics.get("loss"))),
        comm_s=comm.figures["waits"], quicker=quicker(tree),
    )  # fmt: skip
    return comm, seen


def quicker(tree: Tree) -> tuple[str, ...]:
    """What a job could use to get its samples sooner. Nothing is generated ahead where an environment answers."""
    ahead = not tree.rollout.staleness and tree.environment.function is None
    return (
        *(["rollout.engine: vllm"] if not tree.rollout.foreign and not tree.model.lora.rank else []),
        *(["rollout.staleness"] if ahead else []),
    )


def adviser(tree: Tree) -> Adviser:
    """With the configuration's idea of who is slow."""
    return Adviser(Slowness(z=tree.health.straggler_z, steps=tree.health.straggler_steps))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
