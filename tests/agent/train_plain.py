"""A program as people write them for torchrun: it knows nothing of elasticrl. 50 ms steps, an all_reduce each."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main(history: str, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(steps):
        total = torch.ones(1)
        dist.all_reduce(total)
        assert int(total) == world
        with Path(history).open("a") as lines:
            restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
            store = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            lines.write(
                f"{time.monotonic():.3f} {os.getppid()} {os.getpid()} {rank} {world} {step} {restart} {store}\n"
            )
        time.sleep(0.05)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000)
