"""The job of the lab: a tiny exact training with dropout, AdamW, clipping, a schedule and a cursor, that goes on for ever.

What it tells and how it is told of faults is in `chaos.live.told`.
"""

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import elasticrl
from elasticrl.runtime.data.cursor import Cursor, Walk
from elasticrl.runtime.optim import AdamW, Rule

sys.path.insert(0, str(Path(__file__).parents[2]))  # a node's workers are told of this file alone

from chaos.live.told import Told, options

ROWS, WIDTH = 9, 24


def fresh() -> nn.Sequential:
    """The model."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(WIDTH, 67), nn.GELU(), nn.Dropout(0.1), nn.Linear(67, 67), nn.Tanh(), nn.Linear(67, 5)
    )


class Warmup:
    """A schedule that is state: forget it, and the bits part."""

    def __init__(self) -> None:
        self.steps = 0

    @property
    def factor(self) -> float:
        """Of the learning rate."""
        return min(1.0, (self.steps + 1) / 50)

    def state_dict(self) -> dict[str, int]:
        """To be kept."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int], /) -> None:
        """To go on with."""
        self.steps = state["steps"]


def shared(mesh: DeviceMesh) -> nn.Module:
    """The same, cut over a team: by columns, by rows, and not at all. Its widths are odd, so in between it is put together."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"0": ColwiseParallel(output_layouts=Replicate()), "3": RowwiseParallel(input_layouts=Replicate())}
    return parallelize_module(fresh(), mesh["tp"], plan, src_data_rank=None)


def rule(name: str) -> Rule:
    """How a parameter is updated."""
    return AdamW(lr=1e-2, weight_decay=0.1 if name.endswith("weight") else 0.0)


def data(index: int) -> tuple[torch.Tensor, int]:
    """One sample."""
    generator = torch.Generator().manual_seed(index)
    return torch.randn(WIDTH, generator=generator), index % 5


def main() -> None:
    """Train until told to end, or for job.steps."""
    args = options()
    with elasticrl.runtime.join() as run:
        time.sleep(args.load_s)  # it stands for a large model
        cursor = Cursor(
            Walk(name="points", size=1000, lanes=run.tree.lanes.count, per_lane=ROWS, seed=run.tree.job.seed)
        )
        schedule = Warmup()
        run.register(model=shared if run.tree.model.tp > 1 else fresh(), optimizer=rule, data=cursor, schedule=schedule)
        told = Told(args.history, run)
        generation = sealed = -1
        for step in run.steps():
            begun = time.monotonic()
            if run.generation != generation:
                generation = run.generation
                told.say("began", int(step))
            told.at("before rollout", int(step))
            for number, lane in enumerate(run.lanes()):
                points, labels = zip(*(data(sample.index) for sample in lane.ids()), strict=True)
                with lane.rng("dropout"):
                    loss = nn.functional.cross_entropy(run.model(torch.stack(points)), torch.tensor(labels))
                    loss.backward()  # type: ignore[no-untyped-call] # torch has no types for it
                lane.done()
                if number == 0:
                    told.at("during rollout", int(step))
            told.at("after rollout", int(step))
            told.at("before reduce", int(step))
            with told.staged(run.role("model").live, int(step)):
                run.update(max_norm=0.5, lr_factor=schedule.factor)
            schedule.steps += 1
            sealed = told.sealed_by(run, sealed)
            time.sleep(max(0.0, args.step_ms / 1000 - (time.monotonic() - begun)))


if __name__ == "__main__":
    main()
