"""A process that ends with the one that started it: the kernel sees to that, and standard library alone is imported.

The one idea: whoever asks for it says who the parent was, as that one may have ended before the kernel was asked.
"""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """The kernel sends us this signal when our parent, stopped or not, ends; if it has ended already, so do we now."""
    on_parents_death(number)
    if os.getppid() != parent:
        os._exit(1)


def on_parents_death(number: int) -> None:
    """Which signal the kernel sends us then; 0: none."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
