"""What job.level kept costs with 20 M parameters and AdamW: seconds of kept.step, and from kill -9 to the next step.

    python bench/kept.py [--steps 40] [--trials 3]

Two one-worker nodes on loopback, gloo, DDP, processors, one copy on the other node. The state has 240 MB: each rank keeps a
half, and its node a copy of the other.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

NODES = ("n0", "n1")


def script(history: Path) -> None:
    """What the workers run. A line a step: when, pid, rank, world, step; and beside it what of the step was kept.step's."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import elasticrl

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(19))))
    optimizer = torch.optim.AdamW(model.parameters())
    kept = elasticrl.keep(model=model, optimizer=optimizer)
    step, end = kept.restore(), time.monotonic()
    while True:
        model(torch.randn(64, 1024)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        begun = time.monotonic()
        kept.step(step)
        before, end = end, time.monotonic()
        with history.open("a") as out:
            out.write(f"{end:.4f} {os.getpid()} rank {rank} world {world} step {step}\n")
        with history.with_name(f"costs-{rank}").open("a") as out:
            out.write(f"{end - begun:.4f} {end - before:.4f}\n")


def main() -> int:
    """Print the figures."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--steps", type=int, default=40)
    asked.add_argument("--trials", type=int, default=3)
    asked.add_argument("--history", type=Path, help="for the workers")
    asked.add_argument("--save", help="for the workers")
    args = asked.parse_args()
    if args.history:
        script(args.history)
    from tests.levels.scripts import Running

    conf = {"vault": {"copies": 1}, "health": {"node_strikes": 99}, "membership": {"max_nodes": 2}}
    with Running(Path(__file__).resolve(), level="kept", conf=conf) as run:
        run.job.start(*NODES)
        run.trains(2, steps=args.steps)
        rows = [line.split() for line in run.history.with_name("costs-0").read_text().splitlines()[5 : args.steps]]
        cost, whole = (statistics.median(float(row[column]) for row in rows) for column in (0, 1))
        print(f"kept.step {cost:.3f} s of a step of {whole:.3f} s ({cost / whole:.0%}), load {os.getloadavg()[0]:.1f}")
        took = []
        for _ in range(args.trials):
            run.warm()
            at = run.hit("n1")
            took.append(run.trains(2, after=at + 0.1, steps=1) - at)
            run.trains(2, after=at + 0.1, steps=5)
    print(
        f"kill -9 to the next step: median {statistics.median(took):.2f} s of {len(took)}, load {os.getloadavg()[0]:.1f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
