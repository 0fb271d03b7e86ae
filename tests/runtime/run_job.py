"""A small job under `runtime.join`, for live tests and benches: a model with dropout, AdamW, clipping, a schedule, a cursor.

It writes one line to the history for each step that it knows to be sealed, and obeys faults that appear in a file:

    {"step": 12, "rank": 0, "do": "raise" | "hang" | "stop" | "segv" | "kill" | "corrupt" | "stray" | "slow",
     "at": "lane" | "update" | "further" | "third" | "after"}

A broken device does "weight", "activation" or "gradient": one bit is wrong in the pass of `lane`, or for `ever` in each. In a
"moment" of the optimizer it is wrong once, by a "rule" in each update.
"""

import argparse
import json
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).parents[2]))  # it is a program of its own under a daemon

import elasticrl
from chaos.live.job import ROWS, Warmup, data, fresh, rule
from elasticrl.runtime.data.cursor import Cursor, Walk
from elasticrl.runtime.outline import outlined
from elasticrl.runtime.run import Run
from elasticrl.runtime.team import local

built: list[weakref.ref[nn.Module]] = []
BALLAST = 1_000_000  # elements of a row of what is there for its size alone
slow_s = 0.0  # in each lane, from the fault "slow" on
wrong: list[Callable[[], None]] = []  # makes a broken device whole again
ever = False  # it is broken for ever


def sharded(run: Run, mesh: DeviceMesh) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    print("built beside", sum(model() is not None for model in built), "outlined" if run.fills else "whole", flush=True)
    with outlined() if run.fills else nullcontext():
        model = fresh()
    built.append(weakref.ref(model))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model[3], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole() -> nn.Sequential:
    """What a team shares, as one process has it."""
    return nn.Sequential(
        nn.Linear(24, 68), nn.GELU(), nn.Dropout(0.1), nn.Linear(68, 67), nn.LayerNorm(67), nn.Dropout(0.1),
        nn.Linear(67, 5),
    )  # fmt: skip


def shared(mesh: DeviceMesh, *, fsdp: bool = False) -> nn.Module:
    """Cut evenly and unevenly, by rows and by columns, and not cut. FSDP2 cuts it further, evenly and unevenly."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"0": ColwiseParallel(), "3": RowwiseParallel(), "6": ColwiseParallel(output_layouts=Replicate())}
    model = parallelize_module(whole().to(mesh.device_type), mesh["tp"], plan, src_data_rank=None)
    if fsdp:
        from torch.distributed.fsdp import fully_shard

        for layer in (model[0], model[3]):
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


class Weighty(nn.Module):
    """The model, with so many parameters more, which have a gradient and next to no say."""

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__()
        self.model = model
        sizes = [min(BALLAST, count - at) for at in range(0, count, BALLAST)]
        self.ballast = nn.ParameterList(nn.Parameter(torch.full((size,), 0.5)) for size in sizes)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(points)
        return found + 1e-9 * torch.stack([row.sum() for row in self.ballast]).sum()


class Stored:
    """State without gradients."""

    def __init__(self, count: int) -> None:
        self.rows = [torch.full((min(BALLAST, count - at),), 0.5) for at in range(0, count, BALLAST)]

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {str(number): row for number, row in enumerate(self.rows)}

    def load_state_dict(self, state: dict[str, torch.Tensor], /) -> None:
        for number, row in enumerate(self.rows):
            row.copy_(state[str(number)])


def main() -> None:  # noqa: PLR0912 - one branch for each of its ways
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int)
    options.add_argument("--step-ms", type=float, default=50.0)
    options.add_argument("--history", default="")
    options.add_argument("--faults", default="")
    options.add_argument("--save", default="")  # taken from the configuration here
    options.add_argument("--torch", action="store_true", help="torch's own optimizers, and a scheduler")
    options.add_argument("--updates", type=int, default=1, help="in each step")
    options.add_argument("--counted", action="store_true", help="by run.updates")
    options.add_argument(
        "--noise", action="store_true", help="each step draws from the generators that belong to no lane"
    )
    options.add_argument("--carried", action="store_true", help="it asks which lanes are here")
    options.add_argument("--unlike", choices=("model", "data", "buffer", "lone"), help="each process has another one")
    options.add_argument("--long", type=float, nargs=2, metavar=("STEP", "SECONDS"), help="rank 0 takes so long there")
    options.add_argument("--params", type=int, default=0, help="so many parameters more")
    options.add_argument("--state", type=int, default=0, help="so many numbers without gradients")
    options.add_argument("--nan", type=int, default=-1, metavar="STEP", help="the loss is none there")
    options.add_argument("--skips", action="store_true", help="an update that is not finite is left out")
    load_s = float(os.environ.get("LOAD_S", "0"))  # of this process alone
    options.add_argument("--load", type=float, default=load_s, help="seconds until it asks for its rank")
    args = options.parse_args()
    with elasticrl.runtime.join() as run:
        if not run.tree.agent.load_ahead:  # else it would wait for its rank here
            print("at first rank", run.rank, "of", run.world, flush=True)
        time.sleep(args.load)  # it stands for a large model
        lanes = run.tree.lanes.count
        content = str(os.getpid()) if args.unlike == "data" else ""
        seed, turns = run.tree.job.seed, args.updates
        cursor = Cursor(
            Walk(name="points", content=content, size=1000, lanes=lanes, per_lane=ROWS, turns=turns, seed=seed)
        )
        schedule = Warmup()
        device = run.context.device
        model: Any = partial(sharded, run) if run.tree.model.strategy == "fsdp" else fresh().to(device)
        if run.tree.model.tp > 1:
            model = partial(shared, fsdp=run.tree.model.strategy == "fsdp")
        elif args.params:
            model = Weighty(model, args.params).to(device)
        more = {"stored": Stored(args.state)} if args.state else {}
        if args.unlike == "model":
            next(model.parameters()).data += os.getpid()
        if args.unlike == "buffer":
            model.register_buffer("scale", torch.tensor(os.getpid()))
        if args.unlike == "lone" and os.environ["ELASTICRL_NODE"] == "n0":
            model.register_buffer("scale", torch.tensor(1.0))
        stepped: Any = None
        if args.torch:
            first, *rest = model.parameters()
            several = [torch.optim.AdamW([first], lr=1e-2), torch.optim.Adam(rest, lr=1e-2, amsgrad=True)]
            stepped = torch.optim.lr_scheduler.StepLR(several[1], 5, 0.7)
            run.register(model=model, optimizer=several, data=cursor, schedule=stepped, **more)
        else:
            run.register(model=model, optimizer=rule, data=cursor, schedule=schedule, **more)
        told = 0
        for step in run.steps(args.steps):
            begun = time.monotonic()
            noise = torch.rand(()).item() if args.noise else 1.0
            mine = run.carried if args.carried else range(lanes)
            for number in run.updates(args.updates) if args.counted else range(args.updates):
                for lane in run.lanes():
                    assert lane.index in mine, "a lane that is not prepared here"
                    points, labels = zip(*(data(sample.index) for sample in lane.ids()), strict=True)
                    misbehave(args.faults, step, run, "lane", lane.index)
                    time.sleep(slow_s)
                    with lane.rng("dropout"):
                        truth = torch.tensor(labels, device=device)
                        loss = nn.functional.cross_entropy(run.model(torch.stack(points).to(device)), truth)
                        (loss * float("nan") if step == args.nan else loss).backward()
                    loss = loss.detach()  # its graph holds the model
                    lane.tally.add(loss=loss.item())
                    lane.done()
                    if wrong and not ever:
                        wrong.pop()()
                if args.long and run.rank == 0 and step == args.long[0]:
                    time.sleep(args.long[1])  # each time it comes to it, as an evaluation does
                misbehave(args.faults, step, run, ("update", "further", "third")[number])
                print("update", number, flush=True)
                how = {"scale": 1.0 / lanes, "lr_factor": noise * schedule.factor}
                run.update_all(max_norm=0.5, skips=args.skips or None, **how)
            if stepped is not None:
                stepped.step()
            schedule.steps += 1 if stepped is None else 0
            misbehave(args.faults, step, run, "after")
            told = tell(run, args.history, told)
            time.sleep(max(0.0, args.step_ms / 1000 - (time.monotonic() - begun)))
        tell(run, args.history, told)


def tell(run: Run, history: str, told: int) -> int:
    if run.sealed > told and history:
        digest = run.sealed_digest or "-"
        line = f"step {run.sealed} generation {run.generation} rank {run.rank} world {run.world} digest {digest}"
        with Path(history).open("a") as file:
            file.write(f"{time.monotonic():.4f} {os.environ.get('ELASTICRL_NODE', '')} {os.getpid()} {line}\n")
    return run.sealed


def misbehave(path: str, step: int, run: Run, at: str, lane: int | None = None) -> None:
    try:
        fault = json.loads(Path(path).read_text())
    except OSError:  # none is given, none is due, or its rank has just taken it
        return
    odd = fault.get("lane", lane) != lane
    if fault["rank"] != run.rank or fault["step"] > step or fault.get("at", "lane") != at or odd:
        return
    Path(path).unlink()
    match fault["do"]:
        case "raise":
            raise ValueError("bad prompt")
        case "hang":
            time.sleep(3600)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stray":  # into a collective that nobody else is in
            torch.distributed.broadcast(torch.zeros(7), src=(run.rank + 1) % run.world)
        case "slow":
            globals()["slow_s"] = 0.05
        case "weight" | "activation" | "gradient" | "moment" | "rule":
            globals()["ever"] = fault.get("ever", False)
            wrong.append(BREAKS[fault["do"]](run))
        case "corrupt":  # as a bad memory chip would: one bit of one parameter
            local(next(run.model.parameters())).data.view(-1).view(torch.int32)[5] ^= 1 << 20


def flip(tensor: torch.Tensor) -> None:
    tensor.view(torch.int32)[5] ^= 1 << 20


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    """The same with one bit wrong."""
    bad = tensor.detach().clone()
    flip(bad.view(-1))
    return tensor + (bad - tensor.detach())


def bad_weight(run: Run) -> Callable[[], None]:
    """While a pass goes forward."""
    weight = next(run.model.parameters()).data.view(-1)
    hooks = [
        run.model.register_forward_pre_hook(lambda *_: flip(weight)),
        run.model.register_forward_hook(lambda *_: flip(weight)),
    ]
    return lambda: [hook.remove() for hook in hooks] and None


def bad_activation(run: Run) -> Callable[[], None]:
    return run.model[1].register_forward_hook(lambda _m, _i, out: flipped(out)).remove


def bad_gradient(run: Run) -> Callable[[], None]:
    return next(run.model.parameters()).register_hook(flipped).remove


def bad_moment(run: Run) -> Callable[[], None]:
    """In the memory of the shard."""
    flip(run.role("model").live.shard.state[1])
    return lambda: None


def bad_rule(run: Run) -> Callable[[], None]:
    """In each update, each time alike."""
    shard = run.role("model").live.shard
    right = shard.apply
    shard.apply = lambda **how: (right(**how), flip(shard.next[1]))
    return lambda: None


BREAKS = {
    "weight": bad_weight, "activation": bad_activation, "gradient": bad_gradient, "moment": bad_moment, "rule": bad_rule,
}  # fmt: skip


if __name__ == "__main__":
    main()
