"""A rank's shard: its pieces of the parameters and of the optimizer's state, in two versions.

The idea: version N + 1 is written beside version N, never over it. Until N + 1 is sealed, N is whole on every rank, so an
update that was cut short anywhere is undone by looking at the other row; and once it is sealed it stays unchanged through
all of the next step, which is when the vault copies it, without haste and without a copy of its own.

One row is one contiguous tensor (the parameters first, then each optimizer slot), the same for every strategy.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch

from elasticrl.runtime.digest import MASK, digest_of
from elasticrl.runtime.layout import Layout, SumPlan, blocks, sum_plan
from elasticrl.runtime.optim import Rule, apply, scaled

if TYPE_CHECKING:
    from collections.abc import Callable

FOLD = 65_536  # elements whose squares are folded at a time, so that they stay in cache

# (row, parameter, first element, where to put them): fills the tensor from wherever the state is, a vault or a file.
Read = "Callable[[str, str, int, torch.Tensor], None]"


class Shard:
    """What one rank owns of version `version`, and what it will own of the next.

    `rule_of` gives each parameter's rule by name and is asked anew at every update, so schedules may change it.
    """

    def __init__(
        self, layout: Layout, rank: int, rule_of: Callable[[str], Rule], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layout, self.pieces = layout, layout.pieces[rank]
        self.rows = ("param", *rule_of(next(iter(layout.shapes))).slots)
        self.grad = torch.zeros(layout.size, dtype=dtype, device=device)
        self.version = 0  # how many updates it has had
        self.applied = False  # the next version has been written, but may yet be given up
        self._rule_of = rule_of
        self._both = torch.zeros(2, len(self.rows), layout.size, dtype=dtype, device=device)
        self._now = 0

    @property
    def state(self) -> torch.Tensor:
        """[rows, size] of `version`: unchanged until the update after the next one is applied."""
        return self._both[self._now]

    @property
    def next(self) -> torch.Tensor:
        """[rows, size] of the version being made."""
        return self._both[1 - self._now]

    @cached_property
    def sums(self) -> SumPlan:
        """How every rank finishes the sums of all ranks' `squares`."""
        return sum_plan(self.layout)

    def squares(self) -> torch.Tensor:
        """[blocks] float64: the sums of the gradient's squares over each of the pieces' aligned blocks."""
        parts: list[torch.Tensor] = []
        for piece in self.pieces:
            parts += _fold(self.grad[piece.there], piece.start)
        return torch.stack(parts) if parts else self.grad.new_zeros(0, dtype=torch.float64)

    def apply(self, *, scale: float, lr_factor: float = 1.0, halfway: Callable[[], None] = lambda: None) -> None:
        """Writes the next version from this one and scale * gradient."""
        assert not self.applied, f"version {self.version + 1} was applied but neither sealed nor rolled back"
        runs = self._runs()
        for i, (rule, start, stop) in enumerate(runs):
            if i == len(runs) // 2:
                halfway()
            part = (slice(None), slice(start, stop))
            rule = scaled(rule, lr_factor)  # noqa: PLW2901 - the run's rule, at this moment
            apply(rule, self.state[part], self.next[part], self.grad[start:stop], scale=scale, count=self.version + 1)
        self.applied = True

    def seal(self) -> None:
        """The next version is whole everywhere: it becomes this one, and this one's memory is free for the one after."""
        assert self.applied, "nothing was applied"
        self._now, self.version, self.applied = 1 - self._now, self.version + 1, False

    def roll_back(self) -> None:
        """Gives up the next version, wherever it got to."""
        self.applied = False

    def load(self, version: int, read: Callable[[str, str, int, torch.Tensor], None]) -> None:
        """Fills this version from `read(row, parameter, first element, out)`."""
        for i, row in enumerate(self.rows):
            for piece in self.pieces:
                read(row, piece.name, piece.start, self.state[i, piece.there])
        self.version, self.applied = version, False

    def read(self, row: str, name: str, start: int, stop: int) -> list[tuple[int, torch.Tensor]]:
        """What this shard has of elements start <= i < stop of a parameter: (first element, values), a view of this version."""
        state = self.state[self.rows.index(row)]
        found: list[tuple[int, torch.Tensor]] = []
        for piece in self.pieces:
            lo, hi = max(start, piece.start), min(stop, piece.stop)
            if piece.name == name and lo < hi:
                found.append((lo, state[piece.at + lo - piece.start : piece.at + hi - piece.start]))
        return found

    def digest(self) -> dict[str, int]:
        """This rank's part of the state's digest, per row; parts are added modulo 2**64."""
        state = self.next if self.applied else self.state
        return {
            row: sum(digest_of(state[i, piece.there], piece.start, row, piece.name) for piece in self.pieces) & MASK
            for i, row in enumerate(self.rows)
        }

    def _runs(self) -> list[tuple[Rule, int, int]]:
        """The shard, cut only where the rule changes. Padding goes along: of zeros it makes zeros."""
        runs: list[tuple[Rule, int, int]] = []
        for piece in sorted(self.pieces, key=lambda piece: piece.at):
            rule = self._rule_of(piece.name)
            if runs and runs[-1][0] == rule:
                runs[-1] = (rule, runs[-1][1], piece.there.stop)
            else:
                runs.append((rule, piece.at, piece.there.stop))
        return runs


def _fold(values: torch.Tensor, start: int) -> list[torch.Tensor]:
    """The sums of squares over `blocks(start, start + n)`, in that order, in float64."""
    stop = start + values.numel()
    lo, hi = -(-start // FOLD), stop // FOLD  # the aligned chunks that lie inside are folded one by one, while in cache
    if lo < hi:
        sums = [_halve(values[i * FOLD - start : (i + 1) * FOLD - start], i * FOLD) for i in range(lo, hi)]
        found = _halve(values[: lo * FOLD - start], start) | _halve(values[hi * FOLD - start :], hi * FOLD)
        found |= _pair(torch.stack([next(iter(one.values())) for one in sums]), lo, FOLD)
    else:
        found = _halve(values, start)
    return [found[block] for block in blocks(start, stop)]


def _halve(values: torch.Tensor, start: int) -> dict[tuple[int, int], torch.Tensor]:
    return _pair(values.double().square_(), start, 1)


def _pair(values: torch.Tensor, start: int, size: int) -> dict[tuple[int, int], torch.Tensor]:
    """Adds neighbours, level by level; what has no neighbour at an edge is a block of its own. values[i] stands for block
    number start + i of `size` elements. Elementwise additions only: their order is ours and no library's.
    """
    found: dict[tuple[int, int], torch.Tensor] = {}
    while values.numel():
        if start & 1:
            found[start * size, (start + 1) * size] = values[0]
            values, start = values[1:], start + 1
        if values.numel() & 1:
            last = start + values.numel() - 1
            found[last * size, (last + 1) * size] = values[-1]
            values = values[:-1]
        pairs = values.view(-1, 2)
        values, start, size = pairs[:, 0] + pairs[:, 1], start >> 1, size << 1
    return found
