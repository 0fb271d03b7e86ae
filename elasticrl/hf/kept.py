"""A transformers Trainer whose state is in memory after each step: what is kept, and how Trainer resumes from it.

The one idea: Trainer resumes from a folder, and finds its step, the order of its samples and its random generators in small
files there. These are written from memory, and the weights file has no weights in it. As training begins, weights, optimizer
and schedule are loaded straight from memory into Trainer's own objects.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import TrainerState, TrainingArguments

from elasticrl.runtime import kept
from elasticrl.runtime.checkpoint.parts import Ambient
from elasticrl.runtime.memory import Memory
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.script_state import RANDOM

TRAINER = "trainer"  # the part with Trainer's own state
_offered = 0  # the step of the folder that was handed to Trainer


class Trained:
    """What Trainer writes into trainer_state.json."""

    def __init__(self, state: TrainerState) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        """As text. Which rank writes logs is not a part of it."""
        plain = replace(self._state, is_local_process_zero=True, is_world_process_zero=True)
        return {"json": json.dumps(asdict(plain))}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Trainer has read it from the folder."""


class Keep:
    """A Trainer's state, kept after each `every` steps."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._kept: kept.Kept | None = None

    def begin(self, args: TrainingArguments, state: TrainerState, has: Mapping[str, Any]) -> None:
        """Training begins. If Trainer resumes from the folder that stands for what is in memory, that is loaded."""
        if options := [name for name in ("fsdp", "deepspeed") if getattr(args, name, None)]:
            raise Misuse(
                f"elasticrl.hf.Callback(keep=True) cannot keep a Trainer with the option {options[0]}: it resumes only from "
                "its own files. Remove keep, and save to disk; job.level told is enough then."
            )
        model = has["model"]
        given = {
            "model": model,
            "optimizer": has["optimizer"],
            "scheduler": has["lr_scheduler"],
            TRAINER: Trained(state),
        }
        self._kept = kept.keep(every=self._every, frozen=not hasattr(model, "peft_config"), **given)
        if _offered and state.global_step == _offered:
            self._kept.restore()

    def step(self, step: int) -> None:
        """A step is made."""
        if self._kept is not None:
            self._kept.step(step)

    def end(self) -> None:
        """Training is over."""
        if self._kept is not None:
            self._kept.close()
        self._kept = None


def remembered(least: int) -> str | None:
    """A folder for Trainer, if what is whole in memory is at least so new; else None. Collective where a state is kept."""
    global _offered  # noqa: PLW0603 - the callback must know what Trainer was given
    memory = kept.memory()
    whole = memory.newest() if memory else None
    if memory is None or whole is None or whole.version.step < max(least, 1):
        return None
    own = memory.own(TRAINER, RANDOM)
    if TRAINER not in own:
        raise Misuse("elasticrl.hf.latest: what is in memory was not kept by elasticrl.hf.Callback(keep=True).")
    folder = memory.gang.context.vault / f"resume-w{memory.gang.slot}"
    written(folder, own, memory)
    _offered = whole.version.step
    return str(folder)


def written(folder: Path, own: Mapping[str, Any], memory: Memory) -> None:
    """The small files, for this rank alone. Trainer reads the generators when it has skipped the samples that were used."""
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "trainer_state.json").write_text(own[TRAINER]["json"], encoding="utf-8")
    save_file({}, folder / "model.safetensors")
    generators = folder / (f"rng_state_{memory.gang.rank}.pth" if memory.gang.world > 1 else "rng_state.pth")
    torch.save(as_trainer_has_it(own[RANDOM]), generators)


def as_trainer_has_it(state: Mapping[str, Any]) -> dict[str, Any]:
    """Generators in the form of Trainer's own files."""
    import random

    import numpy as np

    here = Ambient()
    before = here.state_dict()
    here.load_state_dict(state)
    found: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}  # noqa: NPY002
    if torch.cuda.is_available() and state["cuda"]:
        found["cuda"] = torch.cuda.get_rng_state()
    here.load_state_dict(before)
    return found
