"""Batches one after the other, with `state_dict`: for trainers that are written as a loop over a data loader.

The one idea: the position is a number of steps and nothing else, because what a step gets is a function of it. So it is kept
and restored like a `StatefulDataLoader`'s, at any world size; and an iterator that has nothing left says so, because a loop
over it would train no step and end as if it had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from elasticrl.runtime.data.loader import Batch
from elasticrl.runtime.vault.errors import DataError


class Fetches(Protocol):
    """A `Loader` or a `StreamLoader`."""

    def fetch(self, step: int, lanes: Iterable[int], update: int = 0) -> dict[int, Batch]:
        """The samples of these lanes."""


class Batches:
    """Iterate to get each step's batches by lane; register it as a part of the run's state.

    `lanes` is asked at every step, because a reform may deal others. `steps`: where the data ends (`cursor.steps`).
    Example: for batches in Batches(loader, run.carried, steps=cursor.steps): loss = sum(f(batches[lane]) for lane in batches)
    """

    def __init__(self, loader: Fetches, lanes: Callable[[], Iterable[int]], *, steps: int | None = None) -> None:
        self.step = 0  # the next to be given
        self._loader = loader
        self._lanes = lanes
        self._steps = steps

    def __len__(self) -> int:
        """Steps that are left. TypeError for data without an end, as for any endless iterable."""
        if self._steps is None:
            raise TypeError("this data has no end: stop by the number of steps")
        return max(self._steps - self.step, 0)

    def __iter__(self) -> Iterator[dict[int, Batch]]:
        """From where it is. DataError if nothing is left at the very beginning."""
        if self._steps is not None and self.step >= self._steps:
            raise DataError(
                f"All {self._steps} steps of the data have been used: a loop over it would train nothing and look finished. "
                "Raise epochs in Walk(...), or do not begin again what is done."
            )
        return self._rest()

    def _rest(self) -> Iterator[dict[int, Batch]]:
        while self._steps is None or self.step < self._steps:
            found = self._loader.fetch(self.step, self._lanes())
            # Counted before it is given: a state that is kept in the loop's body is the state after this step.
            self.step += 1
            yield found

    def state_dict(self) -> dict[str, Any]:
        """The number of steps that were given."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Go on after so many. An iterator that is under way goes on there as well."""
        self.step = int(state["step"])
