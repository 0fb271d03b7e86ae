"""A Lightning script as one finds it: a ModelCheckpoint that keeps the last one, and `ckpt_path`."""

import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from steps import arguments, made
from torch.utils.data import DataLoader, TensorDataset


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):  # noqa: ARG002 - as Lightning calls it
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class History(Callback):
    def __init__(self, args):
        self.args = args

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop |= made(self.args, trainer.global_step)


def main():
    args = arguments().parse_args()
    saves = ModelCheckpoint(args.save, save_last=True, every_n_train_steps=args.every, save_top_k=1, monitor=None)
    trainer = pl.Trainer(
        max_steps=args.steps, accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), strategy="ddp",
        logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[saves, History(args)],
    )  # fmt: skip
    data = DataLoader(TensorDataset(torch.randn(4096, 8)), batch_size=4)
    last = args.save / "last.ckpt"
    trainer.fit(Model(), data, ckpt_path=str(last) if last.exists() else None)


if __name__ == "__main__":
    main()
