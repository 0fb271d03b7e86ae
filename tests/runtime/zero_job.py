"""The job of run_job for strategy `deepspeed`, or `replicated` to compare with. It notes each step's loss.

While there is a file `$ZERO_SLOWLY` it takes its time, so that few steps are enough for what a test does to it.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # it is a program of its own under a daemon

import elasticrl
from chaos.live.job import ROWS, Warmup, data, fresh, rule
from elasticrl.runtime.data.cursor import Cursor, Walk


def main() -> None:
    with elasticrl.runtime.join() as run:
        lanes = run.tree.lanes.count
        cursor = Cursor(Walk(name="points", size=1000, lanes=lanes, per_lane=ROWS, seed=run.tree.job.seed))
        schedule = Warmup()
        whole = run.tree.model.strategy == "replicated"
        device = run.context.device
        run.register(
            model=fresh().to(device) if whole else lambda _mesh: fresh(), optimizer=rule, data=cursor, schedule=schedule
        )
        for step in run.steps():
            with step:
                for lane in run.lanes():
                    points, labels = zip(*(data(sample.index) for sample in lane.ids()), strict=True)
                    with lane.rng("dropout"):
                        truth = torch.tensor(labels, device=device)
                        loss = nn.functional.cross_entropy(run.model(torch.stack(points).to(device)), truth)
                        loss.backward()
                    lane.tally.add(loss=loss.item())
                    lane.done()
                done = run.update(max_norm=0.5, lr_factor=schedule.factor)
                schedule.steps += 1
                if done is not None and run.rank == 0:
                    line = {
                        "step": int(step),
                        "loss": done.tally.sums["loss"] / lanes,
                        "norm": done.norm,
                        "world": run.world,
                    }
                    with Path(os.environ["ZERO_LOSSES"]).open("a") as file:
                        file.write(json.dumps(line) + "\n")
            if Path(os.environ.get("ZERO_SLOWLY", "/nonexistent")).exists():
                time.sleep(1.0)


if __name__ == "__main__":
    main()
