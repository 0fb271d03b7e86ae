"""The engine that a configuration asks for, and what it cannot ask for yet.

The idea: this is the only place that knows both the configuration and a worker's place on its node.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from elasticrl.ppo import groups, models, sizes
from elasticrl.ppo.environments import made_by
from elasticrl.ppo.prompts import arguments_of
from elasticrl.ppo.rollout.attend import Attendant, Limits
from elasticrl.ppo.rollout.away import ROLL, Away, Roll
from elasticrl.ppo.rollout.calls import Desk, Patience
from elasticrl.ppo.rollout.engine import Engine, Sampling
from elasticrl.ppo.rollout.episodes import Episodes, Shape, Words
from elasticrl.ppo.rollout.outside import Outside
from elasticrl.ppo.rollout.served import Served
from elasticrl.ppo.rollout.service import Service
from elasticrl.ppo.rollout.tape import Tape
from elasticrl.ppo.staleness import rows_at_once
from elasticrl.runtime.vault.slots import word

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elasticrl.config import Tree
    from elasticrl.ppo.elastic import ElasticRun
    from elasticrl.ppo.rollout.engine import Draw
    from elasticrl.ppo.rollout.episodes import Fed, Plays
    from elasticrl.runtime.context import Context
    from elasticrl.runtime.run import Run


def sampling_of(tree: Tree, tokenizer: Any) -> Sampling:
    """How samples are drawn, wherever that is done."""
    at_once = rows_at_once(tree)
    prompt, answer = sizes.asked(tree)
    return Sampling(
        prompt_tokens=prompt, max_tokens=answer, rows=at_once,
        eos=models.ends(str(tree.model.path), tokenizer), pad=tokenizer.pad_token_id, temperature=tree.rollout.temperature,
        top_p=tree.rollout.top_p, top_k=tree.rollout.top_k, blocks=not tree.rollout.foreign,
    )  # fmt: skip


def home_of(where: Context) -> Path:
    """Where this node's engine is, and the weights for it or for those elsewhere."""
    by_the_vault = where.vault.with_name(f"{where.vault.name}.engine")
    folder = where.tree.rollout.dir
    return Path(folder) / word(where.job) / word(where.node) if folder else by_the_vault


def outside(tree: Tree, run: ElasticRun, sampling: Sampling) -> Outside | None:
    """The engine that is a process of its own. Beside the worker: looked for, or started, while the models are built; or
    those of the rollout nodes. None for `torch`.
    """
    rollout, where = tree.rollout, run.base.context
    if rollout.engine == "torch":
        return None
    say(f"weights go {way(rollout.sync_transport, rollout.nodes)}")
    if rollout.nodes:
        makes = Service.of(tree, sampling, device=where.device).makes
        roll = Roll(Path(os.environ[ROLL]), job=where.job, node=where.node)
        return Away(
            roll, home_of(where), sampling, makes, Limits.of(tree),
            wait_s=rollout.wait_s, transport=rollout.sync_transport, check=run.check, waits=run.base.waits,
            outside=run.base.outside, say=say,
        )  # fmt: skip
    attendant = Attendant(
        home_of(where),
        Service.of(tree, sampling, device=where.device),
        Limits.of(tree),
        python=rollout.python,
        say=say,
    )
    return Served(attendant, sampling, check=run.check, waits=lambda: run.base.waits(alone=True), alone=run.base.alone)


def episodes_of(tree: Tree, base: Run, run: ElasticRun, engine: Engine, feed: Fed, tokenizer: Any) -> Episodes | None:
    """The environment's turns. None where a sample is one answer."""
    if tree.environment.function is None:
        return None
    shape = Shape(turns=tree.environment.turns, prompt=tree.data.max_prompt, answer=tree.rollout.max_tokens)
    return Episodes(
        run, engine, feed, desk=desk_of(tree, base, "rollout"), words=words_of(tree, tokenizer, engine), shape=shape,
        groups=groups.of(tree.ppo, tree.lanes.count),
    )  # fmt: skip


def held_out_episodes(
    tree: Tree, base: Run, engine: Engine, tokenizer: Any, draw: Draw | None
) -> Callable[[Plays, Fed], Episodes] | None:
    """The turns of what is held out, with replies on a tape of their own. None where a sample is one answer."""
    if tree.environment.function is None:
        return None
    answer = tree.evaluate.max_tokens or tree.rollout.max_tokens
    shape = Shape(turns=tree.environment.turns, prompt=tree.data.max_prompt, answer=answer)
    desk, words = desk_of(tree, base, "evaluate"), words_of(tree, tokenizer, engine)
    return lambda run, feed: Episodes(
        run, engine, feed, desk=desk, words=words, shape=shape, draw=draw, called="an evaluation"
    )


def desk_of(tree: Tree, base: Run, phase: Literal["rollout", "evaluate"]) -> Desk:
    """All environments of this worker in that phase."""
    asked, where = tree.environment, base.context
    assert asked.function is not None
    patience = Patience(
        timeout_s=asked.timeout_s, retries=asked.retries, at_once=asked.at_once, holds=asked.trouble == "hold",
        may_lose=asked.may_lose, deadline_s=tree.timeouts.phase.caps().get(phase) or tree.timeouts.default_phase_s,
        key=f"timeouts.phase.{phase}",
    )  # fmt: skip
    name = {"rollout": "tape", "evaluate": "held-out.tape"}[phase]
    # Who trains alone is not replaced.
    tape = Tape(None if where.alone else where.vault.with_name(f"{where.vault.name}.{name}"))
    return Desk(
        asked.function, made_by(asked.function), patience, tape,
        check=lambda: base.check(phase), waits=lambda: base.waits(alone=True), alone=base.alone,
    )  # fmt: skip


def words_of(tree: Tree, tokenizer: Any, engine: Engine) -> Words:
    """Between tokens and messages."""
    return Words(tokenizer=tokenizer, ends=engine.sampling.eos, told=arguments_of(tree.data, tools_of(tree)))


def tools_of(tree: Tree) -> Sequence[Any]:
    """What the prompts' chat template is told that the policy may call."""
    found: Sequence[Any] = getattr(made_by(tree.environment.function), "tools", ()) if tree.environment.function else ()
    return found


def way(asked: str, nodes: int) -> str:
    """How weights reach the engines, in words.

    >>> way("auto", 0)
    'through shared memory (ipc)'
    >>> way("auto", 2)
    'over nccl, gloo or TCP, whichever is quicker'
    """
    if not nodes:
        return "through shared memory (ipc)"
    return {
        "auto": "over nccl, gloo or TCP, whichever is quicker",
        "nccl": "over nccl to all engines at once, or gloo or TCP where that does not work",
        "gloo": "over gloo to all engines at once, or TCP where that does not work",
        "tcp": "over TCP, to each engine by itself",
    }[asked]


def say(sentence: str) -> None:
    """For the worker's log."""
    print(sentence, flush=True)


def sent_as(tree: Tree) -> torch.dtype:
    """The type that the engine computes in: what is sent is no more than it keeps."""
    half = tree.rollout.foreign and tree.model.dtype == "bfloat16"
    return torch.bfloat16 if half else torch.float32


def not_here(tree: Tree) -> dict[str, bool]:
    """What is asked for and not built, by key."""
    rollout = tree.rollout
    apart = rollout.engine != "torch"
    cut = rollout.top_p < 1.0 or rollout.top_k > 0
    return {
        f"model.lora.rank with rollout.engine {rollout.engine}": rollout.foreign and tree.model.lora.rank > 0,
        "rollout.nodes without a daemon": apart and rollout.nodes > 0 and ROLL not in os.environ,
        # It tells log-probabilities at a temperature only after top_p and top_k.
        "rollout.temperature with top_p or top_k, of vllm": rollout.engine == "vllm"
        and rollout.temperature != 1.0
        and cut,
    }
