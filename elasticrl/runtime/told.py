"""One to three lines in a script: they tell its step and its phase, or ask whether it is time to leave.

    for step, batch in enumerate(loader, start):
        train(batch)
        elasticrl.beat(step=step)
        if elasticrl.leaving():
            save(step)
            break

The one idea: outside of elasticrl every call does nothing, so the lines may stay in the script wherever it runs. Inside, a call
is a write into a page of shared memory, which costs some microseconds. No torch is imported here.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from elasticrl.contract.model import UNTOLD, misnamed
from elasticrl.contract.seat import NoSeat, OwnSeat, hidden

STEP: Final = "step"  # the phase of a script that names none
_known: set[str] = {STEP}  # names of phases that are in order


def beat(step: int | None = None, phase: str | None = None) -> None:
    """The script goes on. `step`: the newest step that it has made, a number that rises. `phase`: what it does from now on,
    such as "train" or "evaluate". Each phase has a time budget of its own, which is learned. Call it from the main thread.

    Example: elasticrl.beat(step=1284, phase="train")
    """
    if phase is not None and phase not in _known:
        if why := misnamed(phase):
            raise ValueError(f"elasticrl.beat: the phase {phase!r} cannot be used: {why}")
        _known.add(phase)
    seat = seat_here()
    if seat is None:
        return
    if phase is not None or seat.beat.now.phase == UNTOLD:
        seat.beat.phase(phase or STEP)
    if step is not None:
        seat.beat.sealed(step)
    elif phase is None:
        seat.beat.phase(seat.beat.now.phase)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Inside, the script does this; then it goes on with what it did before.

    Example: with elasticrl.phase("evaluate"): ...
    """
    seat = seat_here()
    before = seat.beat.now.phase if seat else STEP
    beat(phase=name)
    try:
        yield
    finally:
        beat(phase=STEP if before == UNTOLD else before)


def leaving() -> bool:
    """Is it time to leave: is the job being stopped, or drained, or started again to grow? Then save, and end with exit code 0.

    Not all ranks may hear of it at the same step: agree on it (an all_reduce) where the save is one of all ranks. A script that
    has called this has `recovery.drain` to leave before it is sent SIGTERM; any other is sent SIGTERM at once.
    """
    seat = seat_here()
    if seat is None:
        return False
    seat.listens()
    return seat.halt is not None


def loaded() -> None:
    """All is loaded that needs no rank: imports, data, a model in the host's memory. With `agent.load_ahead` a spare process
    runs the script until here, and goes on when it takes a dead worker's place. torchrun's variables are there from here on.
    """
    try:
        OwnSeat.here().claim()
    except NoSeat:
        return


def hide(names: Iterable[str]) -> None:
    """No rank brings these variables into this process's environment from now on: a library takes them for its own."""
    hidden.update(names)


def seat_here() -> OwnSeat | None:
    """That of this process, if a script holds it, and it is not a child of the script's (a loader's worker)."""
    try:
        seat = OwnSeat.here()
    except NoSeat:
        return None
    return seat if seat.scripted and seat.beat.now.pid == os.getpid() else None
