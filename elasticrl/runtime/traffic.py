"""What a rank's collectives cost: how many, bytes sent to others, and the time that it stood still for them.

The idea: a collective is counted where it is begun and its cost is taken where it is waited for, so what a backward pass
hides costs nothing here. One meter serves a process for all of its generations; whoever reports of a step takes what came
together since the step before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

KINDS: Mapping[str, str] = {
    "allreduce": "all_reduce", "allreduce_coalesced": "all_reduce", "allgather": "all_gather",
    "allgather_coalesced": "all_gather", "all_gather_single": "all_gather", "_allgather_base": "all_gather",
    "all_gather_single_coalesced": "all_gather", "allgather_into_tensor_coalesced": "all_gather",
    "alltoall": "all_to_all", "all_to_all_single": "all_to_all", "alltoall_base": "all_to_all",
    "reduce_scatter": "reduce_scatter", "reduce_scatter_single": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
}  # fmt: skip


class Cost(NamedTuple):
    """Of one kind of collective. Example: Cost(times=8, bytes=403_456, seconds=0.012)"""

    times: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Meter:
    """Counts until it is read. Example: meter.begun("all_to_all_single", (out, given), rank=0, world=2); meter.taken()"""

    costs: dict[str, Cost] = field(default_factory=dict)
    timeouts: int = 0
    moved: int = 0  # bytes in all, since the process began: for its beat
    waited_s: float = 0.0  # in all, since the process began: for whoever takes it off a phase's time

    def begun(self, op: str, args: tuple[Any, ...], *, rank: int, world: int) -> None:
        """A collective was started."""
        kind = KINDS.get(op, "other")
        times, size, seconds = self.costs.get(kind, Cost())
        moved = sent(kind, args, rank, world)
        self.moved += moved
        self.costs[kind] = Cost(times + 1, size + moved, seconds)

    def waited(self, op: str, seconds: float) -> None:
        """Its result was waited for."""
        kind = KINDS.get(op, "other")
        times, size, before = self.costs.get(kind, Cost())
        self.costs[kind] = Cost(times, size, before + seconds)
        self.waited_s += seconds

    def taken(self) -> tuple[dict[str, Cost], int]:
        """(costs by kind, timeouts) since this was asked for the last time."""
        found, late = self.costs, self.timeouts
        self.costs, self.timeouts = {}, 0
        return found, late


def sent(kind: str, args: tuple[Any, ...], rank: int, world: int) -> int:
    """Bytes that a rank sends to others: what it hands in, less what stays, times those who get it. Gloo may take another way
    round (a ring passes on what others sent); this is what the operation needs, whatever the way.
    """
    if kind == "all_to_all":
        given = tensors_of(args[1])
        splits = args[3] if len(args) > 3 and isinstance(args[3], list | tuple) else ()
        size = sum(part.nbytes for part in given)
        whole = sum(splits)
        kept = splits[rank] / whole if whole else 1 / world
        return int(size * (1 - kept))
    if kind == "all_gather":
        return sum(part.nbytes for part in tensors_of(args[1])) * (world - 1)
    if kind in ("all_reduce", "reduce_scatter"):
        size = sum(part.nbytes for part in tensors_of(args[0] if kind == "all_reduce" else args[1]))
        return (2 if kind == "all_reduce" else 1) * size * (world - 1) // world
    return 0


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All that are in a collective's arguments."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [part for item in value for part in tensors_of(item)] if isinstance(value, list | tuple) else []
