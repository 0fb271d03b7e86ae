"""A plain DDP script: torchrun's variables, its own checkpoint, nothing of elasticrl. It runs under torchrun as it is."""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--steps", type=int, default=200)
    asked.add_argument("--every", type=int, default=5)
    asked.add_argument("--pause", type=float, default=0.05)
    asked.add_argument("--save", type=Path, required=True)
    asked.add_argument("--history", type=Path, required=True)
    asked.add_argument("--last", type=Path, default=Path("/nowhere"), help="a file with the number of the last step")
    asked.add_argument(
        "--only-world", type=int, default=0, help="once so many have trained, no other number of them can"
    )
    asked.add_argument(
        "--hang", type=Path, default=Path("/nowhere"), help="rank 1 stands still once this file is there"
    )
    asked.add_argument(
        "--spin", type=Path, default=Path("/nowhere"), help="rank 1 computes as long as this file is there"
    )
    asked.add_argument("--refused", action="store_true", help="where it cannot, it says that a peer is gone")
    args = asked.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if args.only_world not in (0, world) and f" world {args.only_world} " in args.history.read_text():
        if args.refused:
            raise dist.DistNetworkError("The client socket has failed to connect to 10.9.8.7:1 (Connection refused)")
        raise ValueError(f"this script cannot train in a world of {world}")
    assert int(os.environ["LOCAL_RANK"]) < int(os.environ["LOCAL_WORLD_SIZE"])
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    begin, file = 0, args.save / "newest.pt"
    if file.exists():
        kept = torch.load(file)
        model.module.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        begin = kept["step"]
    for step in range(begin, args.steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        loss = model(torch.randn(4, 16, generator=generator)).square().mean()
        optimizer.zero_grad()
        if rank == 1 and args.hang.exists():
            args.hang.unlink()
            time.sleep(3600)
        while rank == 1 and args.spin.exists():
            pass
        loss.backward()
        optimizer.step()
        time.sleep(args.pause)
        with args.history.open("a") as out:
            out.write(f"{time.monotonic():.4f} {os.getpid()} rank {rank} world {world} step {step + 1}\n")
        if rank == 0:
            print(f"step {step + 1}/{args.steps} loss {loss.item():.3f}", flush=True)
        if rank == 0 and (step + 1) % args.every == 0:
            fresh = file.with_suffix(".new")
            torch.save(
                {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, fresh
            )
            fresh.replace(file)
        if args.last.exists() and step + 1 >= int(args.last.read_text()):
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
