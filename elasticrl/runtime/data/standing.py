"""Where a script stands in its data: so many batches of this pass are handed out, by all ranks together.

The one idea: the order of a pass follows from the number of the pass, or from a generator as it was when the pass began. So a
new process begins the same pass again, and leaves out the batches that were used.
"""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


class Standing:
    """The place in a pass. It is the same on all ranks. `generator`: what all ranks draw the order from; None: in a world of
    one it is torch's own, else it follows from the number of the pass.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.passes = 0  # that are over
        self.resumes = False  # is the next pass the rest of one?
        self._batches = 0  # of this pass that were handed out, by all ranks together
        self._generator = generator
        self._begun: bytes | None = None  # the generator as the pass began

    def state_dict(self) -> dict[str, Any]:
        """Numbers, and the generator as it was and as it is."""
        now = _of(self._generator) if self._generator else None
        return {"passes": self.passes, "batches": self._batches, "begun": self._begun, "now": now}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """The next pass is the rest of this one."""
        self.passes, self._batches, self._begun = state["passes"], state["batches"], state["begun"]
        self.resumes = True
        if self._generator and state["now"]:
            _set(self._generator, state["now"])

    def forget(self, length: int) -> None:
        """If so many batches are a rank's pass: was all of it used? Then the next pass is a new one."""
        if self._batches // world() >= length:
            self.resumes = False

    def over(self, rest: Callable[[int], Iterable[Any]]) -> Iterator[Any]:
        """A pass, or the rest of one. `rest(3)` gives a rank's batches but the first three.

        A batch that is handed out counts as used. What is drawn to begin a pass again leaves the generators as they were.
        """
        resumes, self.resumes = self.resumes, False
        draws = self._generator or (torch.default_generator if world() == 1 else None)
        skipped = self._batches // world() if resumes else 0
        before = [(each, _of(each)) for each in {torch.default_generator, draws} if each]
        if not resumes:
            self._begun = _of(draws) if draws else None
        elif draws and self._begun:
            _set(draws, self._begun)
        batches = iter(rest(skipped))
        first = list(islice(batches, 1))  # the order is drawn here
        for each, state in before if resumes else ():
            _set(each, state)
        self._batches = skipped * world()
        for batch in chain(first, batches):
            self._batches += world()
            yield batch
        self.passes, self._batches = self.passes + 1, 0


def world() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def _of(generator: torch.Generator) -> bytes:
    return bytes(generator.get_state().numpy().tobytes())


def _set(generator: torch.Generator, state: bytes) -> None:
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
