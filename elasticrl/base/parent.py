"""A process that ends with others, and by which signals: the kernel tells it of their end. Standard library alone is imported.

The one idea: whoever asks for it says who the others are, as they may have ended before the kernel was asked.
"""

import ctypes
import os
import signal
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

_PR_SET_PDEATHSIG = 1


def stops() -> tuple[signal.Signals, ...]:
    """The signals that end this process. TERM is none where whoever started it has it ignored: where Slurm ends a job it sends
    TERM to every process at once, and one that ended by itself would take away what a save needs.
    """
    heeded = signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT) if heeded else (signal.SIGINT,)


def pass_over() -> None:
    """Where TERM is ignored here, it is heard from now on, and nothing comes of it: what this process starts, and ends by TERM,
    does not inherit that.
    """
    if signal.SIGTERM in stops():
        return

    def forget() -> None:
        if signal.getsignal(signal.SIGTERM) is nothing:  # and not the program's own
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def nothing(*_: object) -> None:
        pass

    signal.signal(signal.SIGTERM, nothing)
    os.register_at_fork(after_in_child=forget)


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """The kernel sends us this signal when our parent, stopped or not, ends; if it has ended already, so do we now."""
    on_parents_death(number)
    if os.getppid() != parent:
        os._exit(1)


def on_parents_death(number: int) -> None:
    """Which signal the kernel sends us then; 0: none."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


class Led:
    """Processes that see to this one; when the last of them has ended, it shall end as well."""

    def __init__(self, loop: "AbstractEventLoop", alone: Callable[[], None]) -> None:
        self._loop, self._alone = loop, alone
        self._handles: set[int] = set()

    def by(self, pids: Iterable[int]) -> None:
        """By these from now on, of whom some may have ended; by none: nobody's end matters."""
        pids = tuple(pids)
        found = {handle for pid in pids if (handle := _handle(pid)) is not None}
        before, self._handles = self._handles, found
        for handle in before:
            self._forget(handle)
        for handle in found:
            self._loop.add_reader(handle, self._ended, handle)
        if pids and not found:
            self._alone()

    def _ended(self, handle: int) -> None:
        self._handles.discard(handle)
        self._forget(handle)
        if not self._handles:
            self._alone()

    def _forget(self, handle: int) -> None:
        self._loop.remove_reader(handle)
        os.close(handle)


def _handle(pid: int) -> int | None:
    """By which the kernel tells of this process's end; None: it has ended."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None
