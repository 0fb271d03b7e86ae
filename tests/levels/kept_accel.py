"""A loop with Accelerate, whose state is kept in memory. It has no checkpoint, and runs under torchrun.

A pass has some dozen steps, in an order that Accelerate draws. Dropout draws from each rank's own generator.
"""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from kept import digest
from steps import arguments, digested, made
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elasticrl.hf

ROWS = 192


def main():
    args = arguments().parse_args()
    # Else DDP lays out its buckets anew after a process's first step, and three ranks then add up in another order.
    same = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[same])
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(16, 37), nn.ReLU(), nn.Dropout(0.1), nn.Linear(37, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 1000))
    rows = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(rows, torch.arange(ROWS)), batch_size=2, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    torch.manual_seed(accelerator.process_index)
    loader = elasticrl.hf.Passes(loader)
    kept = elasticrl.keep(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    step, over = kept.restore(), False
    while not over:
        for batch, numbers in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            used(args, loader.passes, numbers)
            if not accelerator.sync_gradients:
                continue
            step += 1
            digested(args, step, digest(model, optimizer))
            over = made(args, step)
            kept.step(step)
            if over := bool(accelerator.reduce(torch.tensor(float(over)), "sum").item()):
                break
    accelerator.end_training()


def used(args, epoch, numbers):
    """The rows that a rank has trained on."""
    with (args.history.parent / "rows").open("a") as out:
        out.write(f"{os.environ['WORLD_SIZE']} {epoch} {' '.join(map(str, numbers.tolist()))}\n")


if __name__ == "__main__":
    main()
