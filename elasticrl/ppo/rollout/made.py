"""The engine that a configuration asks for, and what it cannot ask for yet.

The idea: this is the only place that knows both the configuration and a worker's place on its node.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from elasticrl.ppo.rollout.attend import Attendant, Limits
from elasticrl.ppo.rollout.served import Served
from elasticrl.ppo.rollout.service import Service
from elasticrl.runtime.vault.slots import word

if TYPE_CHECKING:
    from elasticrl.config import Tree
    from elasticrl.ppo.elastic import ElasticRun
    from elasticrl.ppo.rollout.engine import Sampling


def beside(tree: Tree, run: ElasticRun, sampling: Sampling) -> Served | None:
    """The engine that is a process of its own: looked for, or started, while the models are built. None for `torch`."""
    rollout, where = tree.rollout, run.base.context
    if rollout.engine == "torch":
        return None
    by_the_vault = where.vault.with_name(f"{where.vault.name}.engine")
    attendant = Attendant(
        Path(rollout.dir) / word(where.job) / word(where.node) if rollout.dir else by_the_vault,
        Service.of(tree, sampling, device=where.device),
        Limits.of(tree),
        python=rollout.python,
        say=lambda sentence: print(sentence, flush=True),
    )
    return Served(attendant, sampling, check=run.check)


def sent_as(tree: Tree) -> torch.dtype:
    """The type that the engine computes in: what is sent is no more than it keeps."""
    half = tree.rollout.engine == "vllm" and tree.model.dtype == "bfloat16"
    return torch.bfloat16 if half else torch.float32


def not_here(tree: Tree) -> dict[str, bool]:
    """What is asked for and not built, by key."""
    rollout = tree.rollout
    apart = rollout.engine != "torch"
    cut = rollout.top_p < 1.0 or rollout.top_k > 0
    return {
        "model.lora.rank with this rollout.engine": apart and tree.model.lora.rank > 0,
        "rollout.sync_transport": apart and rollout.sync_transport in ("nccl", "gloo"),
        # It tells log-probabilities at a temperature only after top_p and top_k.
        "rollout.temperature with top_p or top_k, of vllm": rollout.engine == "vllm"
        and rollout.temperature != 1.0
        and cut,
    }
