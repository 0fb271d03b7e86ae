"""A DDP script, or with --fsdp one of FSDP2, whose state is kept in memory. It has no checkpoint, and runs under torchrun.

All ranks share one batch of twelve rows, which follows from the step. Dropout draws from each rank's own generator.
"""

import argparse
import hashlib
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import elasticrl

ROWS = 12


class Sampler:
    """Says which rows come next. `die`: a file; who finds it there is killed while it is asked for its state."""

    def __init__(self, die):
        self.position, self.die = 0, die

    def rows(self):
        self.position += 1
        return torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(self.position))

    def state_dict(self):
        if self.die.exists():
            self.die.unlink(missing_ok=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Strange(Sampler):
    def state_dict(self):
        return {"state": {"foo": self}}


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def digest(model, optimizer):
    """Of all parameters, and of all that the optimizer knows."""
    found = hashlib.sha256()
    states = [value for state in optimizer.state.values() for _, value in sorted(state.items())]
    for tensor in (*model.parameters(), *states):
        found.update(whole(tensor.detach()).contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def main():
    asked = argparse.ArgumentParser()
    asked.add_argument("--steps", type=int, default=200)
    asked.add_argument("--save", type=Path, required=True)
    asked.add_argument("--history", type=Path, required=True)
    asked.add_argument("--last", type=Path, default=Path("/nowhere"), help="a file with the number of the last step")
    asked.add_argument("--die", type=Path, default=Path("/nowhere"))
    asked.add_argument("--every", type=int, default=1)
    asked.add_argument("--pause", type=float, default=0.05)
    asked.add_argument("--fsdp", action="store_true")
    asked.add_argument("--strange", action="store_true")
    args = asked.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(16, 37), nn.ReLU(), nn.Dropout(0.1), nn.Linear(37, 5))
    if args.fsdp:
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (world,)))
    else:
        # Else DDP lays out its buckets anew after a process's first step, and three ranks then add up in another order.
        model = DistributedDataParallel(model, find_unused_parameters=True)
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    sampler = (Strange if args.strange else Sampler)(args.die)
    kept = elasticrl.keep(
        model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, every=args.every
    )  # fmt: skip
    step = kept.restore()
    assert sampler.position == scheduler.last_epoch == step
    while step < args.steps:
        loss = model(sampler.rows()[rank::world]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        time.sleep(args.pause)
        step += 1
        made = digest(model, optimizer)
        if rank == 0:
            with (args.history.parent / "digests").open("a") as out:
                out.write(f"{world} {step} {made}\n")
        with args.history.open("a") as out:
            out.write(f"{time.monotonic():.4f} {os.getpid()} rank {rank} world {world} step {step}\n")
        kept.step(step)
        last = torch.tensor([int(args.last.exists() and step >= int(args.last.read_text()))])
        dist.all_reduce(last, dist.ReduceOp.MAX)
        if last.item():
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
