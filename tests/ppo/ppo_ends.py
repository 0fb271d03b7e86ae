"""`elasticrl.ppo`, with sudden ends at places that a test chooses.

A node's file in the folder `$PPO_ENDS` says {"phase": "update", "after_ms": 7}: its worker dies so long after it has entered
that phase, by a signal that nothing catches. With {"stay": true} it does nothing else meanwhile, as if the phase took so long.
With {"entry": 3} it is the third time that it enters the phase.

`$PPO_FACTORS`, [[step, update, lane, factor], ...], makes the actor's loss so many times as large there; NaN is a factor too.

What its worker generates is a line in the file `$PPO_GENERATED`: {"generation": 3, "version": 4, "ids": ["0:17", ...]}.

`$PPO_CACHE`, [node, step, ever], flips the sign of a number in the cache of keys there as it generates, from that step on;
without `ever` once.

`$PPO_FROZEN`, [node, step, role], flips a bit of a weight of a frozen model there, before that step's phase of the same name.

As a sharded model is built, it says how many of those before, or a layer of theirs, were still in memory,
and whether its weights were read: "ref built beside 0 whole".
"""

import json
import os
import signal
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from elasticrl.ppo import __main__ as ppo
from elasticrl.ppo.batches import Rows
from elasticrl.ppo.elastic import ElasticRun
from elasticrl.ppo.losses import Entries
from elasticrl.ppo.rollout.engine import Request, Samples
from elasticrl.ppo.rollout.inline import TorchEngine
from elasticrl.ppo.trainer import Trainer
from elasticrl.runtime.run import Run
from elasticrl.runtime.scalars import Tally
from elasticrl.runtime.trained import Build

enter = Run.phase
given_as, reference_of = ppo.given_as, ppo.reference_of
generate = TorchEngine.generate
actor_loss = Trainer.actor_loss
here: list[Run] = []  # this worker's
frozen: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary()  # by role
entered: Counter[str] = Counter()  # how often each phase was, since somebody wants to know
flips: list[int] = []  # the steps in which the cache was wrong


@contextmanager
def phase(run: Run, name: str) -> Iterator[None]:
    here[:] = [run]
    spoil(run, name)
    with enter(run, name):
        path = Path(os.environ.get("PPO_ENDS", "/nonexistent")) / os.environ["ELASTICRL_NODE"]
        if path.exists():
            end = json.loads(path.read_text())
            entered[name] += end["phase"] == name
            if end["phase"] == name and entered[name] >= end.get("entry", 1):
                path.unlink()
                entered.clear()
                signal.setitimer(signal.ITIMER_REAL, end["after_ms"] / 1000)
                if end.get("stay"):
                    time.sleep(60)
        yield


def generating(engine: TorchEngine, requests: Sequence[Request], *, version: int) -> Samples:
    with flipping(engine):
        found = generate(engine, requests, version=version)
    if path := os.environ.get("PPO_GENERATED"):
        line = {"generation": here[0].generation, "version": version, "ids": [request.id for request in requests]}
        with Path(path).open("a") as file:
            file.write(json.dumps(line) + "\n")
    return found


@contextmanager
def flipping(engine: TorchEngine) -> Iterator[None]:
    node, step, ever = json.loads(os.environ.get("PPO_CACHE", '["", 0, false]'))
    over = bool(flips) and not ever
    if node != os.environ["ELASTICRL_NODE"] or here[0].progress.step < step or over:
        yield
        return
    flips.append(step)
    passes = iter(range(1 << 30))

    def flip(_module: nn.Module, _args: Any, out: Any) -> None:
        if next(passes) == 0:
            out.past_key_values.layers[0].keys[0, 0, -1, 0].neg_()

    hook = engine.model.register_forward_hook(flip)
    try:
        yield
    finally:
        hook.remove()


def spoil(run: Run, phase: str) -> None:
    """A weight of a frozen model changes in memory, once and for ever."""
    node, step, role = json.loads(os.environ.get("PPO_FROZEN", '["", 0, ""]'))
    if node == os.environ["ELASTICRL_NODE"] and phase == role and run.progress.step >= step and role in frozen:
        norms = [param for name, param in frozen.pop(role).named_parameters() if "norm" in name]
        norms[-1].data.view(-1).view(torch.int32)[0] ^= 1 << 22


def keeping(role: str, build: Callable[..., nn.Module | None]) -> Callable[..., nn.Module | None]:
    """What builds a frozen model, which is known here then."""

    def made(*args: Any) -> nn.Module | None:
        model = build(*args)
        if model is not None:
            frozen[role] = model
        return model

    return made


def counted(role: str, build: Callable[..., nn.Module | None]) -> Callable[..., nn.Module | None]:
    """What builds a model in each generation, which says so."""
    built: list[weakref.WeakSet[nn.Module]] = []

    def counting(*args: Any) -> nn.Module | None:
        beside = sum(len(modules) > 0 for modules in built)
        if (model := build(*args)) is not None:
            built.append(weakref.WeakSet(model.modules()))
        outlined = model is not None and any(param.is_meta for param in model.parameters())
        print(f"{role} built beside", beside, "outlined" if outlined else "whole", flush=True)
        return model

    return counting


def given(strategy: str, make: Callable[[], nn.Module], *more: Any, narrow: bool) -> nn.Module | Build:
    found = given_as(strategy, make, *more, narrow=narrow)
    return found if isinstance(found, nn.Module) else cast("Build", counted("a role", found))


def spoiled(trainer: Trainer, rows: Rows, entries: Entries, tally: Tally) -> torch.Tensor:
    loss = actor_loss(trainer, rows, entries, tally)
    run = cast("ElasticRun", trainer.run)
    where = [run.streams.step, run.streams.update, run._lane.index // run.base.parts_per_lane if run._lane else -1]
    for *there, factor in json.loads(os.environ.get("PPO_FACTORS", "[]")):
        loss = loss * factor if where == there else loss
    return loss


def main() -> None:
    Trainer.actor_loss = spoiled  # type: ignore[method-assign]
    Run.phase = phase  # type: ignore[method-assign]
    TorchEngine.generate = generating  # type: ignore[method-assign]
    ppo.given_as = given
    ppo.reference_of = counted("ref", keeping("ref", reference_of))
    ppo.models.reward_model = keeping("reward", ppo.models.reward_model)  # type: ignore[assignment]
    ppo.main()
