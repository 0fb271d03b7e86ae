"""Which rows a lane puts into which update, and in blocks of which shape they go through a model.

The idea: a lane cuts its own samples, with an order drawn from a stream of its own. No order depends on the number of
workers, since no lane needs to know of the others; and a block always has the same number of rows, filled up with padding,
since a model computes other bits for another shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticrl.runtime.rng import Streams

Rows = dict[str, torch.Tensor]  # tensors with the same first dimension: one entry per sample


def updates(rows: int, size: int, count: int, epochs: int, streams: Streams, *, unit: int = 1) -> list[torch.Tensor]:
    """The rows of each update of a step, for one lane: `count` updates of `size` rows in each epoch, which has each row once.

    `streams` are those of (seed, step, lane). `unit` neighbouring rows stay together. A lane with fewer rows than others makes
    as many updates, of which the last are short, or empty.
    """
    assert size % unit == 0, f"{size} rows of an update are not whole units of {unit}"
    assert rows % unit == 0, f"{rows} rows are not whole units of {unit}"
    assert rows <= size * count, f"{rows} rows do not fit into {count} updates of {size}"
    found: list[torch.Tensor] = []
    for epoch in range(epochs):
        units = torch.randperm(rows // unit, generator=streams.torch(f"mini-batches of epoch {epoch}"))
        order = (units[:, None] * unit + torch.arange(unit)).reshape(-1)
        found += [order[i * size : (i + 1) * size] for i in range(count)]
    return found


def blocks(index: torch.Tensor, size: int, count: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(rows, real) of at least `count` equal blocks that hold the rows of `index`, [size] each. Padding repeats a row and is
    not real. An empty lane has blocks of padding: it computes, and joins every collective, like the others.
    """
    count = max(count, -(-len(index) // size))
    filler = index[:1] if len(index) else index.new_zeros(1)
    padded = torch.cat([index, filler.expand(count * size - len(index))])
    real = torch.arange(count * size) < len(index)
    return [(padded[i : i + size], real[i : i + size]) for i in range(0, count * size, size)]


def take(rows: Mapping[str, torch.Tensor], index: torch.Tensor, real: torch.Tensor) -> Rows:
    """Those rows; where they are padding, `mask` is false everywhere, so that they count for nothing."""
    found = {
        n: value[index] if len(value) else value.new_zeros(len(index), *value.shape[1:]) for n, value in rows.items()
    }
    if not len(rows["mask"]):
        found["attention"] = torch.ones_like(found["attention"])  # a row that attends to nothing would be NaN
    found["mask"] = found["mask"] & real[:, None]
    return found
