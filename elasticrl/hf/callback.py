"""A transformers Trainer that reports its steps. It saves and stops when it is time to leave.

    trainer = Trainer(..., callbacks=[elasticrl.hf.Callback()])
    trainer.train(resume_from_checkpoint=elasticrl.hf.latest(args.output_dir))

With `Callback(keep=True)` the whole state is in memory after each step (job.level kept), and `latest` finds the newer of both.

The one idea: only Trainer's public callbacks are used, so TRL's trainers and others that build on it are served alike. Two
hooks are missing: nothing is called before an evaluation or a save begins. Both are known at the end of the step before, by
Trainer's own `control`, so their phases begin there.
"""
# ruff: noqa: ARG002 - Trainer hands all of them to each callback

import zipfile
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from elasticrl.base.parsed import parsed
from elasticrl.hf.kept import Keep, remembered
from elasticrl.runtime import told

TRAIN: Final = "train"
WEIGHTS: Final = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
LENGTH: Final = 8  # bytes at the beginning of a safetensors file that say how long its header is


class Callback(TrainerCallback):
    """Tells elasticrl of steps and phases. Outside of elasticrl it does nothing.

    `keep`: also keeps the state in memory, after each step or after each so many. It has to be with `latest`.
    """

    def __init__(self, *, keep: int | bool = False) -> None:
        self._leave = Agreement()
        self._keep = Keep(int(keep)) if keep else None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **has: Any) -> None:
        """Training begins, or goes on from a checkpoint."""
        self._leave.begin()
        if self._keep is not None:
            self._keep.begin(args, state, has)
            told.beat(phase=TRAIN)
            return
        told.beat(step=state.global_step, phase=TRAIN)

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """One of the batches whose gradients are summed."""
        told.beat(phase=TRAIN)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """A step is made. When it is time to leave, Trainer saves and stops here, on all ranks at the same step."""
        if self._leave.agreed(mine=told.leaving()):
            control.should_save = control.should_training_stop = True
        following = "evaluate" if control.should_evaluate else "save" if control.should_save else TRAIN
        if self._keep is not None:
            self._keep.step(state.global_step)
        told.beat(step=state.global_step, phase=following)
        return control

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """One batch of an evaluation."""
        told.beat(phase="evaluate")

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """An evaluation is over."""
        told.beat(phase="save" if control.should_save else TRAIN)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """A checkpoint is written."""
        told.beat(phase=TRAIN)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """What comes now is the script's own: a last evaluation, a last save."""
        self._leave.end()
        if self._keep is not None:
            self._keep.end()
        told.beat(phase="end")


class Agreement:
    """Whether any rank was told to leave, known to all ranks at the same step: one step late, and without a wait.

    The word goes over gloo, beside the gang's own collectives: over NCCL its answer would be read only when the GPU is done.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self._said: Any = None  # the tensor and the work of the step before

    def begin(self) -> None:
        """To be called by all ranks."""
        self._group = self._said = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")

    def agreed(self, *, mine: bool) -> bool:
        """To be called by all ranks at each step."""
        if self._group is None:
            return mine
        known = self._read()
        word = torch.tensor([int(mine)])
        self._said = (word, dist.all_reduce(word, dist.ReduceOp.MAX, group=self._group, async_op=True))
        return known

    def end(self) -> None:
        """Wait for the last word, so that no rank leaves while another still speaks."""
        self._read()

    def _read(self) -> bool:
        if self._said is None:
            return False
        (word, work), self._said = self._said, None
        work.wait()
        return bool(word.item())


def latest(output_dir: str | Path) -> str | None:
    """The newest checkpoint in a Trainer's `output_dir` that is whole; None if there is none, so that training begins anew. At
    job.level kept: a folder that stands for what is in memory, if that is as new. Then call it on all ranks, after the Trainer
    is made.

    Trainer itself takes the one with the greatest number, which a kill in the middle of a save has left in pieces.
    """
    found = [(int(number), path) for path in Path(output_dir).glob("checkpoint-*") if (number := _number(path))]
    newest = next(((step, str(path)) for step, path in sorted(found, reverse=True) if whole(path, step)), None)
    return remembered(newest[0] if newest else 0) or (newest[1] if newest else None)


def _number(path: Path) -> str:
    number = path.name.rpartition("-")[2]
    return number if number.isdecimal() and path.is_dir() else ""


def whole(folder: Path, step: int) -> bool:
    """Is a checkpoint of Trainer whole? It writes `trainer_state.json` last; what it has written before must be as long as it
    says itself.
    """
    try:
        state = parsed((folder / "trainer_state.json").read_text(encoding="utf-8"))
        return state.get("global_step") == step and _weights(folder) and all(map(_complete, _files(folder)))
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return False


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.suffix in {".safetensors", ".pt", ".pth", ".bin"}]


def _weights(folder: Path) -> bool:
    """Are there weights, all parts of them? (FSDP and DeepSpeed keep theirs in folders.)"""
    for index in folder.glob("*.index.json"):
        parts = set(parsed(index.read_text(encoding="utf-8"))["weight_map"].values())
        return all((folder / part).is_file() for part in parts)
    folders = (*folder.glob("pytorch_model_fsdp*"), *folder.glob("global_step*"))
    return any((folder / name).is_file() for name in WEIGHTS) or bool(folders)


def _complete(file: Path) -> bool:
    """Is a file as long as it says itself? Nothing in it is loaded."""
    if file.suffix != ".safetensors":
        return file.suffix == ".bin" or zipfile.is_zipfile(file)
    size = file.stat().st_size
    with file.open("rb") as data:
        length = int.from_bytes(data.read(LENGTH), "little")
        if length > size:
            return False
        header = parsed(data.read(length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return size == LENGTH + length + max(ends, default=0)
