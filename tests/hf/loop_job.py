"""A loop of Accelerate with elasticrl.hf.prepare, for gangs of processes: what differs from a usual one has a number.

python loop_job.py --folder DIR [--history FILE] [--step-ms 50]
"""

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # it is a program of its own under a daemon

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elasticrl.hf  # 1

SAMPLES, BATCH, EPOCHS = 66, 3, 3


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--history", default="")
    options.add_argument("--save", default="")  # taken from the configuration here
    options.add_argument("--step-ms", type=float, default=0.0)
    options.add_argument("--ends", type=Path, default=Path("/nowhere"), help="who comes to the end says so there")
    args = options.parse_args()
    elasticrl.hf.join()  # 2
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(7, 9), nn.Dropout(0.3), nn.Linear(9, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    rows = torch.randn(SAMPLES, 7, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(rows), batch_size=BATCH, shuffle=True)
    prepared = elasticrl.hf.prepare(model, optimizer, loader, scheduler, epochs=EPOCHS, max_norm=0.5)  # 3
    model, optimizer, loader, scheduler = prepared
    told = 0
    for _ in loader.epochs:  # 4
        for (batch,) in loader:
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            time.sleep(args.step_ms / 1000)
            told = tell(loader.run, args.history, told)
    tell(loader.run, args.history, told)
    if args.ends.is_dir():
        (args.ends / str(os.getpid())).touch()


def tell(run, history: str, told: int) -> int:
    """One line for each step that is known to be sealed, as tests/runtime/run_job.py does."""
    if run.sealed > told and history:
        words = f"step {run.sealed} generation {run.generation} rank {run.rank} world {run.world}"
        head = f"{time.monotonic():.4f} {os.environ.get('ELASTICRL_NODE', '')} {os.getpid()}"
        with Path(history).open("a") as file:
            file.write(f"{head} {words} digest {run.sealed_digest or '-'}\n")
    return run.sealed


if __name__ == "__main__":
    main()
