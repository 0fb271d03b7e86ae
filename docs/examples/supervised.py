"""A plain supervised job under elasticrl: the same bits on one worker or many, whatever dies on the way.

    python docs/examples/supervised.py --steps 100                    alone, one process, no daemon
    elasticrl run configs/one-machine.yaml --nodes 3 job.program=docs/examples/supervised.py
                                                                      three local nodes, with faults survived

What makes it elastic is marked with (*); the rest is what one would write anyway.
"""

import argparse
import time

import torch
from torch import nn

import elasticrl
from elasticrl.runtime.data.cursor import Cursor, Walk
from elasticrl.runtime.optim import AdamW

SIZE, CLASSES, PER_LANE = 4096, 5, 16


class Digits(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Noisy points of five kinds, each known from its number."""

    centres = torch.randn(CLASSES, 20, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(20, generator=torch.Generator().manual_seed(index))
        return self.centres[index % CLASSES] + noise, torch.tensor(index % CLASSES)


def main() -> None:
    """One job."""
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int)
    options.add_argument("--step-ms", type=float, default=0.0)
    args = options.parse_args()
    with elasticrl.runtime.join() as run:  # (*) our place in the gang; generators are seeded
        model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, CLASSES))
        data = Digits()
        cursor = Cursor(Walk(name="digits", size=SIZE, lanes=run.tree.lanes.count, per_lane=PER_LANE, seed=7))  # (*)
        run.register(model=model, optimizer=AdamW(lr=3e-3), data=cursor)  # (*) what is kept, and restored
        for step in run.steps(args.steps):  # (*) from where the job is; a step that was cut short comes again
            begun = time.monotonic()
            for lane in run.lanes():  # (*) the lanes that this worker carries now
                points, labels = zip(*(data[sample.index] for sample in lane.ids()), strict=True)
                with lane.rng("dropout"):  # (*) random streams belong to lanes, not to workers
                    loss = nn.functional.cross_entropy(model(torch.stack(points)), torch.stack(labels))
                    loss.backward()
                lane.tally.add(loss=loss)
                lane.done()
            done = run.update(max_norm=1.0)  # (*) summed in a fixed order, applied in two phases
            if done is not None and run.rank == 0 and step % 20 == 0:
                print(f"step {step} loss {done.tally.sums['loss'] / run.tree.lanes.count:.4f}", flush=True)
            time.sleep(max(0.0, args.step_ms / 1000 - (time.monotonic() - begun)))


if __name__ == "__main__":
    main()
