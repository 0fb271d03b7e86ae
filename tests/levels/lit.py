"""A Lightning script, with elasticrl's callback."""

import argparse
import os
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import elasticrl


class Model(pl.LightningModule):
    def __init__(self, history):
        super().__init__()
        self.layer, self.history = torch.nn.Linear(8, 1), history

    def training_step(self, batch, batch_idx):  # noqa: ARG002 - as Lightning calls it
        time.sleep(0.05)
        with self.history.open("a") as out:
            where = f"rank {self.global_rank} world {self.trainer.world_size} step {self.global_step + 1}"
            out.write(f"{time.monotonic():.4f} {os.getpid()} {where}\n")
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main():
    asked = argparse.ArgumentParser()
    asked.add_argument("--save", type=Path, required=True)
    asked.add_argument("--history", type=Path, required=True)
    args = asked.parse_args()
    trainer = pl.Trainer(
        max_steps=100_000, accelerator="cpu", devices=1, num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), strategy="ddp",
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[elasticrl.lightning.Callback(args.save / "leaving.ckpt")],
    )  # fmt: skip
    data = DataLoader(TensorDataset(torch.randn(512, 8)), batch_size=4)
    trainer.fit(Model(args.history), data, ckpt_path=elasticrl.lightning.latest(args.save))


if __name__ == "__main__":
    main()
