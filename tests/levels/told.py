"""The script of ddp.py with three lines for elasticrl: it tells its steps, and saves and leaves when it is asked to."""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elasticrl


def hang() -> None:
    """As a file server does that does not answer."""
    while True:
        time.sleep(0.2)


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--steps", type=int, default=200)
    asked.add_argument("--save", type=Path, required=True)
    asked.add_argument("--history", type=Path, required=True)
    asked.add_argument("--hang", type=Path, default=Path("/nowhere"))
    asked.add_argument("--load", type=float, default=0.0, help="seconds: it stands for a large model")
    args = asked.parse_args()
    time.sleep(args.load)
    elasticrl.loaded()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(16, 16))
    begin, file = 0, args.save / "newest.pt"
    if file.exists():
        kept = torch.load(file)
        model.module.load_state_dict(kept["model"])
        begin = kept["step"]
    for step in range(begin + 1, args.steps + 1):
        with elasticrl.phase("load"):
            if rank == 1 and args.hang.exists():
                args.hang.unlink()
                hang()
            batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
        model(batch).square().mean().backward()
        model.zero_grad()
        time.sleep(0.05)
        leave = torch.tensor([int(elasticrl.leaving())])
        dist.all_reduce(leave, dist.ReduceOp.MAX)
        elasticrl.beat(step=step, phase="train")
        with args.history.open("a") as out:
            out.write(f"{time.monotonic():.4f} {os.getpid()} rank {rank} world {world} step {step}\n")
        if rank == 0 and (leave.item() or step % 50 == 0):
            torch.save({"model": model.module.state_dict(), "step": step}, file.with_suffix(".new"))
            file.with_suffix(".new").replace(file)
        if leave.item():
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
