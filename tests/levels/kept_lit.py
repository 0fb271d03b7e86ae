"""A Lightning script whose state is kept in memory. It has no checkpoint, and runs under torchrun.

A pass has some dozen steps and a validation. Dropout draws from each rank's own generator.
"""

import os

import lightning.pytorch as pl
import torch
from kept import digest
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.strategies import DDPStrategy
from steps import arguments, digested, made
from torch import nn
from torch.utils.data import TensorDataset

import elasticrl

ROWS = 192


class Model(pl.LightningModule):
    def __init__(self, history):
        super().__init__()
        self.history = history
        self.layers = nn.Sequential(nn.Linear(16, 37), nn.ReLU(), nn.Dropout(0.1), nn.Linear(37, 5))

    def training_step(self, batch, batch_idx):  # noqa: ARG002 - as Lightning calls it
        rows, numbers = batch
        with (self.history.parent / "rows").open("a") as out:
            out.write(f"{os.environ['WORLD_SIZE']} {self.current_epoch} {' '.join(map(str, numbers.tolist()))}\n")
        return self.layers(rows).square().mean()

    def validation_step(self, batch, batch_idx):  # noqa: ARG002
        self.log("loss", self.layers(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 1000))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class History(Callback):
    def __init__(self, args):
        self.args, self.made = args, 0

    def on_train_batch_end(self, trainer, module, *_):
        step = trainer.global_step
        if step == self.made:
            return
        self.made = step
        digested(self.args, step, digest(module, trainer.optimizers[0]))
        over = made(self.args, step)
        trainer.should_stop |= trainer.strategy.reduce_boolean_decision(over, all=False)


def main():
    args = arguments().parse_args()
    torch.manual_seed(7)
    model = Model(args.history)
    torch.manual_seed(int(os.environ["RANK"]))
    rows = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(1))
    data = elasticrl.lightning.DataLoader(TensorDataset(rows, torch.arange(ROWS)), batch_size=2, shuffle=True)
    stops = EarlyStopping("loss", patience=1000)  # its state is a part of what is kept
    trainer = pl.Trainer(
        max_epochs=100_000, accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), strategy=DDPStrategy(find_unused_parameters=True),
        accumulate_grad_batches=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[stops, History(args), elasticrl.lightning.Callback(keep=True)],
    )  # fmt: skip
    checks = torch.utils.data.DataLoader(TensorDataset(rows[:12]), batch_size=2)
    trainer.fit(model, data, checks, ckpt_path=elasticrl.lightning.latest(args.save))


if __name__ == "__main__":
    main()
