"""What it costs to compute a lane twice on another node, and a shard's update (`audit.lanes`).

    python bench/audit.py [--world 2] [--lanes 4] [--steps 160] [--json]

One gang, with vaults, over gloo. By `audit.lanes: 1/2` a lane is computed twice in half of the steps, and a shard's update in
half of them, drawn apart. A step with both is compared with the nearest step that has neither, so a machine whose speed changes
is slow for both. What the two cost at the default rate is that ratio, less 1, by the rate. With as many lanes as workers a lane
is all that a worker computes in a step: nothing costs more.
"""

import argparse
import os
import sys
import tempfile
import time
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.report import Watch, against, dump, interval, show
from elasticrl.config.cluster import Audit
from elasticrl.runtime.audit import drawn

ROOT = Path(__file__).parents[1]
TIMES = "AUDIT_TIMES"
RATE, SEED = "1/2", 7
WIDTH, LAYERS, ROWS = 384, 6, 64
GOAL = 1.01


def work() -> None:
    """What the workers run: a line a step, when it ended."""
    import torch
    from torch import nn

    import elasticrl
    from elasticrl.runtime.data.cursor import Cursor, Walk
    from elasticrl.runtime.optim import AdamW

    with elasticrl.runtime.join() as run:
        lanes = run.tree.lanes.count
        model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
        walk = Walk(name="points", size=100_000, lanes=lanes, per_lane=ROWS, seed=SEED)
        run.register(model=model, optimizer=AdamW(), data=Cursor(walk))
        for step in run.steps():
            for lane in run.lanes():
                numbers = torch.tensor([[sample.index] for sample in lane.ids()]).float()
                loss = run.model(torch.sin(numbers * torch.arange(WIDTH))).square().mean()
                loss.backward()  # type: ignore[no-untyped-call]
                lane.tally.add(loss=loss)
                lane.done()
            run.update()
            if run.rank == 0:
                with Path(os.environ[TIMES]).open("a") as out:
                    out.write(f"{step} {time.monotonic():.6f}\n")


def times(world: int, lanes: int, steps: int) -> dict[int, float]:
    """What each step took."""
    sys.path.insert(0, str(ROOT / "tests" / "runtime"))
    from gang_kit import Nodes

    with tempfile.TemporaryDirectory(prefix="elasticrl-audit-") as folder:
        conf = {"audit": {"lanes": RATE}, "lanes": {"digest": "sample"}}
        with Nodes(Path(folder), steps=steps, lanes=lanes, program="bench.audit", conf=conf, copies=1) as gang:
            gang.env = {TIMES: f"{folder}/times"}
            gang.plan(*(f"n{number}" for number in range(world)))
            gang.until_done(within_s=600.0)
        rows = [line.split() for line in Path(folder, "times").read_text().splitlines()]
    return {int(after[0]): float(after[1]) - float(before[1]) for before, after in pairwise(rows)}


def ratios(took: dict[int, float], world: int, lanes: int) -> list[float]:
    """Of each step with both audits and the nearest one with neither."""

    def audits(step: int) -> int:
        both = (("model", lanes), ("model shard", world))
        return sum(drawn(SEED, name, step, 0, lanes=count, rate=RATE) is not None for name, count in both)

    plain = [step for step in took if audits(step) == 0]
    return [took[step] / took[min(plain, key=lambda one: abs(one - step))] for step in took if audits(step) == 2]


def main() -> None:
    """Measure, and print."""
    if TIMES in os.environ:
        work()
        return
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--world", type=int, default=2)
    asked.add_argument("--lanes", type=int, default=4)
    asked.add_argument("--steps", type=int, default=160)
    asked.add_argument("--json", action="store_true")
    args = asked.parse_args()
    watch = Watch()
    took = times(args.world, args.lanes, args.steps)
    found = ratios(took, args.world, args.lanes)
    rate = float(Fraction(Audit().lanes))
    between = interval(found)
    low, high = between or (0.0, 0.0)
    cost = None if between is None else (1 + (low - 1) * rate, 1 + (high - 1) * rate)
    step, middle = median(took.values()), median(found)
    if args.json:
        dump({"step_s": step, "ratios": found, "cost": cost, "others": watch.look()})
        return
    between_95 = f"{cost[0]:.4f} to {cost[1]:.4f}" if cost else "too few"
    row = (f"{step * 1000:.0f} ms", f"{middle:.2f}", f"{1 + (middle - 1) * rate:.4f}", between_95, against(cost, GOAL))
    title = (
        f"{args.world} workers, {args.lanes} lanes: a step with both audits, by one with neither ({len(found)} pairs)"
    )
    show(title, ("step", "ratio", f"cost at {Audit().lanes}", "95 %", f"goal {GOAL}"), [row])


if __name__ == "__main__":
    main()
