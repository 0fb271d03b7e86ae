"""An optimizer of your own under elasticrl: Lion, written as a rule, for the weights; AdamW for the rest; an average beside.

    python docs/examples/own_rule.py --steps 100                      alone, one process, no daemon
    elasticrl run configs/one-machine.yaml --nodes 3 job.program=docs/examples/own_rule.py
                                                                      three local nodes, with faults survived

A rule is a frozen value with three names: lr, slots and update. docs/RUNTIME.md says what it must keep to.
"""

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import elasticrl
from elasticrl.runtime.data.cursor import Cursor, Walk
from elasticrl.runtime.optim import AdamW, Rule

SIZE, CLASSES, PER_LANE = 4096, 5, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Lion:
    """The sign of a mean of gradients (arXiv 2302.06675)."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    @property
    def slots(self) -> tuple[str, ...]:
        """One number for each element. It begins as 0."""
        return ("exp_avg",)

    def update(self, old: Tensor, new: Tensor, grad: Tensor, spare: Tensor, scale: float, count: int) -> None:
        """new[2, n] from old[2, n] and scale * grad[n]; row 0 is the parameter, row 1 exp_avg. Single operations, into memory
        that is there: `old` stays as it is, since a fault may still undo this update.
        """
        del count  # the number of this update, from 1: for a bias correction
        (step, part), (one, two) = spare.unbind(), self.betas
        torch.mul(grad, scale, out=step)
        torch.mul(old[1], two, out=new[1])
        torch.mul(step, 1 - two, out=part)
        new[1].add_(part)
        step.mul_(1 - one)
        torch.mul(old[1], one, out=part)
        step.add_(part).sign_().mul_(self.lr)
        torch.mul(old[0], 1 - self.lr * self.weight_decay, out=new[0])
        new[0].sub_(step)


def rule(name: str) -> Rule:
    """Of each parameter, by its name. A schedule multiplies `lr` (run.update(lr_factor=...))."""
    return Lion(lr=1e-3, weight_decay=0.01) if name.endswith("weight") else AdamW(lr=3e-3)


def main() -> None:
    """One job."""
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int)
    args = options.parse_args()
    with elasticrl.runtime.join() as run:
        model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, CLASSES))
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
        centres = torch.randn(CLASSES, 20, generator=torch.Generator().manual_seed(1))
        cursor = Cursor(Walk(name="digits", size=SIZE, lanes=run.tree.lanes.count, per_lane=PER_LANE, seed=7))
        run.register(model=model, optimizer=rule, data=cursor, average=average)  # the average is kept with the rest
        for step in run.steps(args.steps):
            for lane in run.lanes():
                labels = torch.tensor([sample.index % CLASSES for sample in lane.ids()])
                points = centres[labels] + torch.randn(PER_LANE, 20, generator=lane.streams.torch("noise"))
                loss = nn.functional.cross_entropy(model(points), labels)
                loss.backward()
                lane.tally.add(loss=loss)
                lane.done()
            done = run.update(max_norm=1.0, lr_factor=min(1.0, (step + 1) / 10))
            if done is None:
                continue  # the step was cut short, and comes again: the average must not count it
            average.update_parameters(model)
            if run.rank == 0 and step % 5 == 4:
                size = sum(weight.double().abs().sum().item() for weight in average.parameters())
                print(
                    f"step {step} loss {done.tally.sums['loss'] / run.tree.lanes.count:.6f} average {size!r}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
