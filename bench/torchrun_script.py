"""The same small loop as elasticrl's test script, for stock torchrun: gloo, 50 ms steps, its own checkpoint file."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    folder, step_s = Path(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    saved = folder / "saved"
    step = int(saved.read_text()) if saved.exists() else 0
    start = torch.tensor([step])
    dist.broadcast(start, 0)
    step = int(start)
    weights = torch.zeros(4097, dtype=torch.float64)
    with (folder / "history").open("a", buffering=1) as history:
        while True:
            begun = time.monotonic()
            gradient = torch.full((4097,), float(step), dtype=torch.float64)
            dist.all_reduce(gradient)
            weights += gradient / world
            step += 1
            if rank == 0:
                fresh = saved.with_suffix(".new")
                fresh.write_text(str(step))
                fresh.replace(saved)
            generation = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            node = os.environ.get("NODE", "?")
            where = f"generation {generation} rank {rank} world {world}"
            history.write(f"{time.monotonic():.4f} {node} {os.getpid()} step {step} {where} digest 0\n")
            time.sleep(max(0.0, step_s - (time.monotonic() - begun)))


if __name__ == "__main__":
    main()
