"""A small job whose whole state is kept and compared bit for bit, and ways to put it through vault files and checkpoints."""

import random
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elasticrl.runtime.checkpoint.load import open_checkpoint, permitted
from elasticrl.runtime.checkpoint.manifest import Conditions, Difference, Manifest
from elasticrl.runtime.checkpoint.parts import Ambient, Parts
from elasticrl.runtime.checkpoint.place import Place
from elasticrl.runtime.checkpoint.save import finish, write_shard
from elasticrl.runtime.checkpoint.shelf import Found, newest_good
from elasticrl.runtime.vault.client import Vault
from elasticrl.runtime.vault.piece import Piece
from elasticrl.runtime.vault.slots import Pinned, pin
from elasticrl.runtime.vault.source import Source
from elasticrl.runtime.vault.version import Cut, Version

LANES = 4
FACTS = Conditions(job="job", lanes=LANES, batch=64, data="numbers:100", config="c0")


class Counter:
    """A controller with a few numbers, as a KL controller has."""

    def __init__(self) -> None:
        self.beta = 0.1
        self.history: list[tuple[int, float]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"beta": self.beta, "history": list(self.history), 3: b"\x00raw", "nothing": None}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self.beta, self.history = state["beta"], state["history"]
        assert state[3] == b"\x00raw"
        assert state["nothing"] is None


class Rollout:
    """Per-lane tensors and values of the lanes that this rank carries: a rollout buffer in the middle of a step."""

    def __init__(self, rank: int, world: int) -> None:
        self.lanes = range(rank * LANES // world, (rank + 1) * LANES // world)
        self.tokens = torch.full((len(self.lanes), 5), -1, dtype=torch.int64)
        self.marks: dict[str, str] = {}

    def fill(self) -> None:
        for row, lane in enumerate(self.lanes):
            self.tokens[row] = torch.arange(5) + 100 * lane
            self.marks[f"lane.{lane}"] = f"prompt {lane}"

    def pieces(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        if self.lanes:
            yield (
                Piece("rollout.tokens", "int64", (LANES, 5), (self.lanes.start, 0), (len(self.lanes), 5)),
                self.tokens,
            )

    def values(self) -> Mapping[str, Any]:
        return dict(self.marks)

    def restored(self, values: Mapping[str, Any], /) -> None:
        self.marks = {f"lane.{lane}": values[f"lane.{lane}"] for lane in self.lanes}


class Job:
    """Model, optimizer, schedule, controller, generators, rollout buffer: everything that a worker registers."""

    def __init__(self, seed: int, rank: int = 0, world: int = 1) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        self.model = torch.nn.Sequential(torch.nn.Linear(17, 33), torch.nn.Linear(33, 5), torch.nn.BatchNorm1d(5))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.controller = Counter()
        self.rollout = Rollout(rank, world)
        self.rank, self.world = rank, world
        self.parts = Parts(
            model=self.model,
            optimizer=self.optimizer,
            schedule=self.schedule,
            controller=self.controller,
            ambient=Ambient(),
            rollout=self.rollout,
        )

    def train(self, steps: int) -> "Job":
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 17)).pow(2).sum().backward()
            self.optimizer.step()
            self.schedule.step()
            self.controller.beta *= 1.1
            self.controller.history.append((len(self.controller.history), self.controller.beta))
        self.rollout.fill()
        return self

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {
            "model": {k: v.clone() for k, v in self.model.state_dict().items()},
            "optimizer": _cloned(self.optimizer.state_dict()),
            "schedule": self.schedule.state_dict(),
            "controller": self.controller.state_dict(),
            "ambient": Ambient().state_dict(),
        }


def _cloned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {k: _cloned(v) for k, v in value.items()}
    return value


def same(a: Any, b: Any) -> bool:
    """Bit for bit, types included."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def snapshots(root: Path, job: Job, world: int, *, step: int = 5, generation: int = 2) -> list[Path]:
    """The job's state as `world` ranks would keep it, each in its own node's vault."""
    paths = []
    for rank in range(world):
        vault = Vault(root / f"n{rank}", job="job", node=f"n{rank}")
        try:
            rollout = Rollout(rank, world)
            rollout.fill()
            parts = Parts(**{name: job.parts.part(name) for name in job.parts if name != "rollout"}, rollout=rollout)
            ticket = vault.snapshot(
                parts.capture(rank, world),
                version=Version(step),
                generation=generation,
                shard=rank,
                world=world,
                lineage=(Cut(generation, Version(0)),),
            )
            ticket.wait_sealed(10)
            assert ticket.path is not None
            paths.append(ticket.path)
        finally:
            vault.close()
    return paths


def pinned(path: Path) -> Pinned:
    found = pin(path)
    assert isinstance(found, Pinned), found
    return found


def write(where: Place, paths: Iterable[Path], *, parent: str | None = None) -> Manifest:
    """Vault files as a published checkpoint."""
    for path in paths:
        with pinned(path) as shard:
            write_shard(where, shard)
            stamp = shard.sealed.stamp
    return finish(
        where,
        version=stamp.version,
        generation=stamp.generation,
        world=stamp.world,
        facts=FACTS,
        parent=parent,
        lineage=stamp.lineage,
        timeout_s=1.0,
    )


def resume(
    where: Place, facts: Conditions, *, allow: Collection[str] = ()
) -> tuple[Source, Found, tuple[Difference, ...]] | None:
    """The newest good checkpoint, and what differs in this run, that may go on from it. None: there is none."""
    found = newest_good(where)
    if found is None:
        return None
    changed = permitted(where, found.manifest, facts, allow=allow)
    return open_checkpoint(where, found.manifest.name, check=False), found, changed
