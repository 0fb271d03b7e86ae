"""What a script holds of a run inside of its loop: a step, and a lane's turn in it.

The one idea: each is a number and a way back to the run, so a fault inside of it is kept there, cuts the step short, and is no
error of the script's.
"""

# ruff: noqa: SLF001 - a run, its steps and its lanes are one class in three
from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from elasticrl.runtime.group import GangError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from elasticrl.runtime.data.cursor import SampleId
    from elasticrl.runtime.lanes import Turn
    from elasticrl.runtime.rng import Streams
    from elasticrl.runtime.run import Run
    from elasticrl.runtime.scalars import Tally


class Step(int):
    """A step's number, counted from 0. As a context it swallows what cuts the step short; `steps` then repeats it."""

    _run: Run

    def __enter__(self) -> Self:
        self._run._guarded = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        self._run._guarded = False
        if not isinstance(error, GangError):
            # What an aborted collective let through may be anything, and a program that looks at it says so. Its own fault
            # comes again with the step.
            reason = self._run._flag.reason
            if reason is None or not isinstance(error, Exception):
                return False
            error = GangError(f"{type(error).__name__} ({error}) in a step that was given up: {reason}")
        self._run._cut_by(error)
        return True


class Lane:
    """One lane's turn: its samples, its random streams, its tally, its leaf of the gradient's tree."""

    def __init__(self, run: Run, turn: Turn, tally: Tally, streams: Streams) -> None:
        self.index, self.ghost = turn.lane, turn.ghost
        self.tally = tally
        self.streams = streams.at(lane=turn.lane)
        self._run = run
        self.over = False

    @contextmanager
    def rng(self, purpose: str) -> Iterator[None]:
        """Inside, the ambient generators are this lane's stream of that name. What uses a result (loss.item()) belongs inside
        too: a pass that a fault cuts short (of fsdp, whose passes have collectives) ends here, without one.
        """
        try:
            with self.streams.ambient(purpose):
                yield
        except GangError as error:
            self._run._cut_by(error)

    def ids(self) -> tuple[SampleId, ...]:
        """The samples of the registered cursor that this lane trains on now; they go into the ledger with the update."""
        return self._run._take(self)

    def used(self, ids: Sequence[SampleId], turn: int = 0) -> None:
        """These samples enter the next update, for scripts that choose samples by themselves."""
        if not self.ghost:
            self._run._used.append((self.index, turn, tuple(ids)))

    def done(self) -> None:
        """The backward pass is over."""
        self.over = True
        self._run._done()
