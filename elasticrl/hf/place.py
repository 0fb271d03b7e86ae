"""This process's place in its job, and what Accelerate sees of it: nothing.

The one idea: each process is a world of one for Accelerate. Accelerate learns of other processes from the variables that
torchrun sets, and it looks at them once, when the training arguments are made. So they go before that. What crosses from one
process to another is the runtime's alone.

Missing hook: an argument of `TrainingArguments` that says "do not look at the environment". `_setup_devices` would need
`PartialState(**accelerator_state_kwargs, distributed=self.distributed)`. That is why the variables are taken away.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.run import Run
from elasticrl.runtime.run import join as take_place
from elasticrl.runtime.told import hide, loaded

if TYPE_CHECKING:
    from pathlib import Path

    from elasticrl.config import Tree

# What Accelerate 1.15 takes for a sign of other processes.
SIGNS: Final = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
)  # fmt: skip
CARDS: Final = "CUDA_VISIBLE_DEVICES"

_here: Run | None = None


def join(config: Path | str | Tree | None = None) -> Run:
    """This process's place in its job; the same however often it is asked for. `config` is as of `elasticrl.runtime.join`.

    Defining a class with `Elastic` calls it. Call it first if the model, or the training arguments, are made before that.
    """
    global _here  # noqa: PLW0603 - a process has one place, whoever asks for it
    if _here is None:
        if dist.is_initialized():
            raise Misuse(
                "There is a process group before this process has taken its place: Accelerate has made one with the training "
                "arguments. Define the class that has Elastic before them, or call elasticrl.hf.join() first."
            )
        _one_card()
        _here = take_place(config)
        hide(SIGNS)
        for name in SIGNS:
            os.environ.pop(name, None)
    return _here


def _one_card() -> None:
    """Of a node's GPUs this worker sees its own: Accelerate takes the first, and splits batches over all that it sees."""
    cards = os.environ.get(CARDS)
    if cards == "":
        return
    seen = cards.split(",") if cards else [str(card) for card in range(torch.cuda.device_count())]
    if len(seen) > 1:
        loaded()  # which card it has depends on its rank
        slot = int(os.environ.get("LOCAL_RANK", "0"))
        os.environ[CARDS], os.environ["LOCAL_RANK"] = seen[slot % len(seen)], "0"
