"""PPO of one's own under FSDP2: two models cut up over the workers, the same bits on one worker or many.

    elasticrl run configs/one-machine.yaml --nodes 3 job.program=docs/examples/fsdp_ppo.py model.strategy=fsdp

A policy learns to count: shown a digit, it is to say the next four. The loop is what one would write for torchrun; marked with
(*) is what makes it elastic, and what FSDP asks for beyond `supervised.py`: whatever has a forward pass is made equally often
on all ranks, inside of `with step:` or `with lane.rng(...)`.
"""

from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import elasticrl
from elasticrl.runtime.data.cursor import Cursor, Walk
from elasticrl.runtime.optim import AdamW
from elasticrl.runtime.outline import outlined
from elasticrl.runtime.run import Run
from elasticrl.runtime.scalars import Tally
from elasticrl.runtime.step import Lane

DIGITS, PLACES, PER_LANE, EPOCHS = 10, 4, 16, 2
Rows = dict[str, torch.Tensor]


class Network(nn.Module):
    """Some numbers for each place of an answer: of the digit that was shown, the place, and what was said before it."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.shown, self.place = nn.Embedding(DIGITS, 64), nn.Embedding(PLACES, 64)
        self.before = nn.Embedding(DIGITS + 1, 64)  # the last one: nothing yet
        self.body = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, numbers))
        self.habit = nn.Embedding(PLACES, numbers)
        for table in (self.shown, self.place, self.before, self.habit):
            nn.init.normal_(table.weight, std=0.3)  # nothing is likely yet

    def forward(self, shown: torch.Tensor, said: torch.Tensor) -> torch.Tensor:
        """For the places of `said` and the one after it, as far as there are any."""
        nothing = torch.full_like(shown[:, None], DIGITS)
        before = torch.cat([nothing, said], 1)[:, :PLACES]
        places = torch.arange(before.shape[1], device=shown.device)
        return self.body(self.shown(shown)[:, None] + self.place(places) + self.before(before)) + self.habit(places)


def main() -> None:
    """One job."""
    with elasticrl.runtime.join() as run:  # (*)

        def build(numbers: int, mesh: DeviceMesh) -> nn.Module:  # (*) called anew for each gang
            with outlined() if run.fills else nullcontext():  # (*) no memory for weights that are filled at once
                model = Network(numbers)
            if not run.fills:
                model.to(run.context.device)  # and here one would read a file into it
            return fully_shard(model, mesh=mesh)  # of a large one each block first

        lanes = run.tree.lanes.count
        cursor = Cursor(Walk(name="digits", size=1000, lanes=lanes, per_lane=PER_LANE, turns=EPOCHS, seed=7))  # (*)
        run.train(  # (*) both change in one update, or neither does
            actor=(lambda mesh: build(DIGITS, mesh), AdamW(lr=1e-2)),
            critic=(lambda mesh: build(1, mesh), AdamW(lr=1e-2)),
        )
        run.register(data=cursor)  # (*)
        for step in run.steps():  # (*)
            with step:  # (*) a fault ends the body here, and the step comes again
                with run.phase("rollout"):  # (*) a budget of its own: timeouts.phase.rollout
                    rows = {lane: rollout(run, cursor, step, lane) for lane in in_step(run)}
                whiten(run, rows)
                for _ in range(EPOCHS):
                    for lane in run.passes("actor"):  # (*)
                        lane.ids()  # (*) these samples are used in this update: a line of the ledger
                        with lane.rng("update"):  # (*)
                            learn(lane, policy_loss=policy_loss(run, rows[lane.index]))
                        lane.done()  # (*)
                    for lane in run.passes("critic"):
                        with lane.rng("update"):
                            learn(lane, value_loss=value_loss(run, rows[lane.index]))
                        lane.done()
                    done = run.update_all(scale=1 / lanes, max_norm=1.0)  # (*)
                if step % 20 == 0:
                    right = evaluate(run)
                    if run.rank == 0 and done:
                        off = done["critic"].tally.sums["value_loss"] / lanes
                        print(f"step {step} right {right:.2f} value loss {off:.4f}", flush=True)


def learn(lane: Lane, **losses: torch.Tensor) -> None:
    """One backward pass. A function of its own: nothing outlives it that holds this gang's model."""
    for loss in losses.values():
        loss.backward()
    lane.tally.add(**losses)  # (*) summed over lanes, in their order


def in_step(run: Run) -> list[int]:
    """(*) This rank's lanes, the last one again where another rank has more: all make as many passes."""
    mine = list(run.carried)
    return [mine[min(i, len(mine) - 1)] for i in range(run.rounds)]


@torch.no_grad()
def rollout(run: Run, cursor: Cursor, step: int, lane: int) -> Rows:
    """A lane's answers, what the policy and the critic think of them, and what they earn."""
    device = run.context.device
    actor, critic = run.role("actor").model, run.role("critic").model  # (*) of this gang: never kept
    shown = torch.tensor([sample.index % DIGITS for sample in cursor.ids(step, 0, lane)], device=device)
    said = shown.new_empty(len(shown), 0)
    with run.streams.at(lane=lane).ambient("rollout"):  # (*) chance belongs to the lane, not to the worker
        for _ in range(PLACES):
            chances = actor(shown, said)[:, -1].softmax(-1)
            said = torch.cat([said, torch.multinomial(chances, 1)], 1)
    logprobs = actor(shown, said).log_softmax(-1).gather(2, said[..., None])[..., 0]
    values = critic(shown, said)[..., 0]
    rewards = (said == wanted(shown)).float()  # each place for itself
    return {"shown": shown, "said": said, "logprobs": logprobs, "rewards": rewards, "advantages": rewards - values}


def wanted(shown: torch.Tensor) -> torch.Tensor:
    """The answers that are right."""
    return (shown[:, None] + torch.arange(1, PLACES + 1, device=shown.device)) % DIGITS


def whiten(run: Run, rows: dict[int, Rows]) -> None:
    """Advantages by the whole batch's mean and spread, which all ranks come to alike."""
    tallies: dict[int, Tally] = {}
    for lane in run.carried:
        tallies[lane] = Tally()
        tallies[lane].spread("advantages", rows[lane]["advantages"])
    whole = run.exchange(tallies).moments["advantages"]  # (*)
    for lane in rows.values():
        lane["advantages"] = (lane["advantages"] - whole.mean) / (whole.std() + 1e-8)


def policy_loss(run: Run, rows: Rows) -> torch.Tensor:
    """PPO's clipped surrogate, and some entropy, as it has to find out."""
    chances = run.role("actor").model(rows["shown"], rows["said"]).log_softmax(-1)
    new = chances.gather(2, rows["said"][..., None])[..., 0]
    ratio = (new - rows["logprobs"]).exp()
    gain = torch.min(ratio * rows["advantages"], ratio.clamp(0.8, 1.2) * rows["advantages"])
    return -gain.mean() + 0.1 * (chances.exp() * chances).sum(-1).mean()


def value_loss(run: Run, rows: Rows) -> torch.Tensor:
    """How far the critic is off."""
    return nn.functional.mse_loss(run.role("critic").model(rows["shown"], rows["said"])[..., 0], rows["rewards"])


@torch.no_grad()
def evaluate(run: Run) -> float:
    """(*) Of all digits, how much of the likeliest answer is right. A phase of its own, on all ranks."""
    with run.phase("evaluate"):
        shown = torch.arange(DIGITS, device=run.context.device)
        said = shown.new_empty(DIGITS, 0)
        for _ in range(PLACES):
            best = run.role("actor").model(shown, said)[:, -1].argmax(-1)
            said = torch.cat([said, best[:, None]], 1)
        return (said == wanted(shown)).float().mean().item()


if __name__ == "__main__":
    main()
