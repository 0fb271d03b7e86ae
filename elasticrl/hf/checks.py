"""What a trainer's arguments ask for that a job of elasticrl does otherwise, or not at all: each with what to do.

A table: a claim about the trainer, and the sentence. All that is refused is said at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.trained import strategy_of

if TYPE_CHECKING:
    from elasticrl.hf.elastic import Elastic

log = logging.getLogger(__name__)
Says = Callable[["Elastic", Any], str | bool | None]


def _accumulates(trainer: Elastic, args: Any) -> str | bool:
    count, lanes = args.gradient_accumulation_steps, trainer.lanes_count
    return count != 1 and (
        f"gradient_accumulation_steps is {count}. A lane is one micro-batch, so a step has lanes.count of them: set "
        f"gradient_accumulation_steps=1 and lanes.count to {count} times the number of processes that you had (with as many "
        f"as there are lanes now: {count * lanes})."
    )


def _groups(trainer: Elastic, args: Any) -> str | bool:
    batch, group = args.per_device_train_batch_size, trainer.group
    return batch % group != 0 and (
        f"per_device_train_batch_size is {batch} and num_generations is {group}: a lane has whole groups, so the first must be "
        "a multiple of the second."
    )


def _strategy(trainer: Elastic, _: Any) -> str | bool:
    strategy = strategy_of(trainer.run.tree, "model")
    return strategy != "replicated" and f"model.strategy is {strategy}: trainers run under replicated; set it so."


REFUSED: Final[tuple[Says, ...]] = (
    _accumulates,
    _groups,
    _strategy,
    lambda t, _: (tp := t.run.tree.model.tp) > 1 and f"model.tp is {tp}: trainers have a whole model in each worker; set 1.",
    lambda t, _: (cp := t.run.tree.model.cp) > 1 and f"model.cp is {cp}: trainers have whole sequences in each worker; set 1.",
    lambda t, _: not hasattr(t.train_dataset, "__len__")
    and "train_dataset has no length: samples are asked for by number, so give a dataset that has one and can be indexed.",
    lambda _, a: a.train_sampling_strategy not in ("random", "sequential")
    and f"train_sampling_strategy is {a.train_sampling_strategy}: the order is the job's own; set it to random or sequential.",
    lambda _, a: (a.deepspeed or a.fsdp)
    and "deepspeed and fsdp are set by Accelerate, which sees one process here: leave both out.",
    lambda _, a: a.fp16 and "fp16 scales losses by what it saw before, which is nobody's state: set bf16=True, or neither.",
    lambda _, a: a.auto_find_batch_size and "auto_find_batch_size changes the job: set per_device_train_batch_size.",
    lambda _, a: a.load_best_model_at_end
    and "load_best_model_at_end needs checkpoints of transformers: export a step by `elasticrl checkpoint export`.",
    lambda _, a: a.enable_jit_checkpoint and "enable_jit_checkpoint: a job that is asked to end saves by itself; leave it out.",
    lambda _, a: getattr(a, "steps_per_generation", 1) != 1
    and f"steps_per_generation is {a.steps_per_generation}: samples are made in the step that uses them; set it to 1.",
    lambda _, a: getattr(a, "num_iterations", 1) != 1
    and f"num_iterations is {a.num_iterations}: a step has one update; set it to 1, or use elasticrl.ppo.",
    lambda _, a: getattr(a, "use_vllm", False) and "use_vllm: leave it out, or use elasticrl.ppo with rollout.engine: vllm.",
    lambda _, a: getattr(a, "sync_ref_model", False)
    and "sync_ref_model changes a model that is not kept: leave it out, or use elasticrl.ppo.",
    lambda _, a: getattr(a, "use_adaptive_entropy", False)
    and "use_adaptive_entropy keeps a coefficient by process: set entropy_coef to a constant.",
)  # fmt: skip

TOLD: Final[tuple[Says, ...]] = (
    lambda _, a: a.save_strategy != "no"
    and f"save_strategy={a.save_strategy} and save_steps are not used: the job's own checkpoints are (checkpoint.every).",
    lambda _, a: a.dataloader_num_workers and "dataloader_num_workers is not used: a lane's samples are read when it begins.",
)  # fmt: skip


def check(trainer: Elastic) -> None:
    """Misuse with all that is refused; what is only not used is a warning."""
    if refused := _said(REFUSED, trainer):
        raise Misuse(" ".join(refused))
    for sentence in _said(TOLD, trainer):
        log.warning(sentence)


def _said(table: tuple[Says, ...], trainer: Elastic) -> list[str]:
    return [said for says in table if isinstance(said := says(trainer, trainer.args), str)]
