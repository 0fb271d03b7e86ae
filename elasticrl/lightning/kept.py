"""A Lightning Trainer whose state is in memory after each step: what is kept, and how Trainer goes on from it.

The one idea: when a fit begins, Lightning's own objects are there and no loop has begun. So weights, optimizers, schedules and
the progress of the loops are loaded straight from memory into them. A checkpoint on the disk that is older gives its weights,
which are then loaded over, and nothing else.
"""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from elasticrl.runtime import kept
from elasticrl.runtime.data.standing import world
from elasticrl.runtime.misuse import Misuse

_CheckpointIO: Any = CheckpointIO  # Lightning need not be installed where types are checked
BATCHES = "epoch_loop.batch_progress"


class Keep:
    """A Trainer's state, kept after each `every` steps."""

    def __init__(self, every: int) -> None:
        self._every, self._made = every, 0
        self._kept: kept.Kept | None = None
        self._disk: Disk | None = None

    def setup(self, trainer: pl.Trainer) -> None:
        """There is a process group, and nothing is loaded."""
        if not isinstance(trainer.strategy, DDPStrategy | SingleDeviceStrategy):
            raise Misuse(
                f"elasticrl.lightning.Callback(keep=True) cannot keep a Trainer with {type(trainer.strategy).__name__}: it "
                "resumes only from its own files. Remove keep, and save to disk; job.level told is enough then."
            )
        memory = kept.memory()
        if memory is not None and (whole := memory.newest()) is not None:
            self._disk = Disk(trainer.strategy.checkpoint_io, trainer, whole.version.step)
            trainer.strategy.checkpoint_io = self._disk

    def begin(self, trainer: pl.Trainer) -> None:
        """A fit begins. What is in memory is loaded, if nothing on the disk is newer."""
        given: dict[str, Any] = {"model": trainer.lightning_module, "loops": Loops(trainer), "more": More(trainer)}
        given |= {f"optimizer{number}": each for number, each in enumerate(trainer.optimizers)}
        given |= {f"scheduler{number}": each.scheduler for number, each in enumerate(trainer.lr_scheduler_configs)}
        self._kept = kept.keep(every=self._every, **given)
        if self._disk is not None and not self._disk.newer:
            self._kept.restore()
        self._made = trainer.global_step

    def step(self, trainer: pl.Trainer) -> None:
        """A batch is done, and perhaps a step."""
        if self._kept is not None and trainer.global_step != self._made:
            self._made = trainer.global_step
            self._kept.step(self._made)

    def end(self) -> None:
        """Training is over."""
        if self._kept is not None:
            self._kept.close()
        self._kept = None


class Loops:
    """How far Lightning's loops are, and where its loaders stand if they have a state."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Numbers, and how many ranks there were."""
        return {"world": world(), "fit": self._trainer.fit_loop.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Lightning goes on in the middle of the pass. A pass has fewer batches for each rank where there are more ranks."""
        found = dict(state_dict["fit"])
        progress = found[BATCHES]
        current = {name: number * state_dict["world"] // world() for name, number in progress["current"].items()}
        found[BATCHES] = progress | {"current": current}
        if progress["is_last_batch"]:  # the next pass is a new one
            found["state_dict"] = {
                name: each for name, each in found["state_dict"].items() if name != "combined_loader"
            }
        self._trainer.fit_loop.load_state_dict(found)


class More:
    """What callbacks, the precision and the datamodule have to say."""

    def __init__(self, trainer: Any) -> None:
        self._has: dict[str, Any] = {each.state_key: each for each in trainer.callbacks}
        self._has["precision"] = trainer.precision_plugin
        if trainer.datamodule is not None:
            self._has["datamodule"] = trainer.datamodule

    def state_dict(self) -> dict[str, Any]:
        """Of those that have a state."""
        return {name: state for name, each in self._has.items() if (state := each.state_dict())}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """The reverse."""
        for name, state in state_dict.items():
            if name in self._has:
                self._has[name].load_state_dict(state)


class Disk(_CheckpointIO):  # type: ignore[misc]
    """Lightning's checkpoints, where something is in memory. Of an older one the loops and the optimizers are left out."""

    def __init__(self, inner: Any, trainer: pl.Trainer, step: int) -> None:
        self._inner, self._precision, self._step = inner, type(trainer.precision_plugin).__qualname__, step
        self.newer = False

    def load_checkpoint(self, path: Any, *args: Any, **more: Any) -> Any:
        """What a file says."""
        found = self._inner.load_checkpoint(path, *args, **more)
        self.newer = found["global_step"] > self._step
        if self.newer:
            return found
        left = {name: each for name, each in found.items() if name not in {"loops", self._precision}}
        return left | {"optimizer_states": [], "lr_schedulers": []}

    def save_checkpoint(self, *args: Any, **more: Any) -> Any:
        """The same."""
        return self._inner.save_checkpoint(*args, **more)

    def remove_checkpoint(self, path: Any) -> Any:
        """The same."""
        return self._inner.remove_checkpoint(path)

    def teardown(self) -> None:
        """The same."""
        self._inner.teardown()
