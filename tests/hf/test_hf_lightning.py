"""Lightning's own checkpoints, where a newer or an older state is in memory."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader, TensorDataset

from elasticrl.lightning.kept import Disk, Keep
from elasticrl.runtime.misuse import Misuse

# ruff: noqa: ARG002 - as Lightning calls them
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's, about this machine


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Begins(pl.Callback):
    step, moments = -1, -1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.step, self.moments = trainer.global_step, len(trainer.optimizers[0].state)


def trained(folder: Path, steps: int, *callbacks: pl.Callback, **more: Any) -> pl.Trainer:
    return pl.Trainer(
        max_steps=steps, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=[*callbacks], **more,
    )  # fmt: skip


@pytest.mark.parametrize(("in_memory", "begins"), [(1, (2, 2)), (2, (0, 0)), (5, (0, 0))])
def test_of_a_checkpoint_that_is_older_than_memory_no_progress_is_loaded(
    tmp_path: Path, in_memory: int, begins: tuple[int, int]
) -> None:
    data = DataLoader(TensorDataset(torch.ones(32, 4)), batch_size=2)
    first = trained(tmp_path, 2)
    first.fit(Model(), data)
    first.save_checkpoint(tmp_path / "two.ckpt")
    begun = Begins()
    second = trained(tmp_path, 4, begun)
    disk = Disk(second.strategy.checkpoint_io, second, in_memory)
    second.strategy.checkpoint_io = disk
    second.fit(Model(), data, ckpt_path=tmp_path / "two.ckpt")
    assert disk.newer is (in_memory < 2)
    assert (begun.step, begun.moments) == begins


def test_a_strategy_that_resumes_only_from_its_own_files_is_refused() -> None:
    with pytest.raises(Misuse, match=r"cannot keep a Trainer with ModelParallelStrategy"):
        Keep(1).setup(SimpleNamespace(strategy=ModelParallelStrategy()))
