"""A Lightning Trainer that reports its steps. It saves and stops when it is time to leave.

    trainer = Trainer(..., callbacks=[elasticrl.lightning.Callback("checkpoints/leaving.ckpt")])
    trainer.fit(model, ckpt_path=elasticrl.lightning.latest("checkpoints"))

With `Callback(keep=True)` the whole state is in memory after each step (job.level kept).

The one idea: only Lightning's public callbacks are used. Its own `ModelCheckpoint` stays in charge of all other checkpoints.
"""
# ruff: noqa: ARG002 - Trainer hands all of them to each callback

import zipfile
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl

from elasticrl.lightning.kept import Keep
from elasticrl.runtime import told

TRAIN: Final = "train"
EVALUATE: Final = "evaluate"


_Callback: Any = pl.Callback  # Lightning need not be installed where types are checked


class Callback(_Callback):  # type: ignore[misc]
    """Tells elasticrl of steps and phases. Outside of elasticrl it does nothing.

    `leaving`: where the state goes when the job is stopped or started again to grow; None: nothing is saved then. `keep`: also
    keeps the state in memory, after each step or after each so many. Put it behind callbacks with a state.
    """

    def __init__(self, leaving: str | Path | None = None, *, keep: int | bool = False) -> None:
        super().__init__()
        self._leaving = leaving
        self._keep = Keep(int(keep)) if keep else None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """There is a process group."""
        if self._keep is not None and stage == "fit":
            self._keep.setup(trainer)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """All that is trained is there."""
        if self._keep is not None:
            self._keep.begin(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Training begins, or goes on from a checkpoint."""
        told.beat(step=trainer.global_step, phase=TRAIN)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A batch is done. When any rank was told to leave, all save and stop here."""
        if self._keep is not None:
            self._keep.step(trainer)
        told.beat(step=trainer.global_step, phase=TRAIN)
        mine = told.leaving()
        if not bool(trainer.strategy.reduce_boolean_decision(mine, all=False)):
            return
        if self._leaving is not None:
            with told.phase("save"):
                trainer.save_checkpoint(self._leaving)
        trainer.should_stop = True

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        """One batch of a validation."""
        told.beat(phase=EVALUATE)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A validation is over."""
        told.beat(phase=TRAIN)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What comes now is the script's own."""
        if self._keep is not None:
            self._keep.end()
        told.beat(phase="end")


def latest(folder: str | Path) -> str | None:
    """The newest whole checkpoint below a folder; None if there is none. One that was cut short is no archive and is passed
    over.
    """
    found = sorted(Path(folder).rglob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    return next((str(path) for path in found if path.is_dir() or zipfile.is_zipfile(path)), None)
