"""An FSDP2 script with torch's distributed checkpoints: any world size loads what another has saved. Nothing of elasticrl."""

import argparse
import os
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def newest(folder: Path) -> Path | None:
    """The newest checkpoint that is whole: its `.metadata` is written last."""
    found = [path for path in folder.glob("step-*") if (path / ".metadata").exists()]
    return max(found, key=lambda path: int(path.name.partition("-")[2]), default=None)


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--steps", type=int, default=200)
    asked.add_argument("--every", type=int, default=10)
    asked.add_argument("--save", type=Path, required=True)
    asked.add_argument("--history", type=Path, required=True)
    asked.add_argument("--last", type=Path, default=Path("/nowhere"), help="a file with the number of the last step")
    args = asked.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(17, 33), nn.ReLU(), nn.Linear(33, 5))
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    begin = 0
    if (found := newest(args.save)) is not None:
        states, optimizers = get_state_dict(model, optimizer)
        dcp.load({"model": states, "optimizer": optimizers}, checkpoint_id=str(found))
        set_state_dict(model, optimizer, model_state_dict=states, optim_state_dict=optimizers)
        begin = int(found.name.partition("-")[2])
    for step in range(begin, args.steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        loss = model(torch.randn(4, 17, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.05)
        with args.history.open("a") as out:
            out.write(f"{time.monotonic():.4f} {os.getpid()} rank {rank} world {world} step {step + 1}\n")
        if (step + 1) % args.every == 0:
            states, optimizers = get_state_dict(model, optimizer)
            place = args.save / f"step-{step + 1}"
            if rank == 0 and place.exists():
                shutil.rmtree(place)
            dist.barrier()
            dcp.save({"model": states, "optimizer": optimizers}, checkpoint_id=str(place))
        if args.last.exists() and step + 1 >= int(args.last.read_text()):
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
