"""Named points at which a test or a chaos scenario may end, stop or starve this process.

The one idea: code that must survive a kill at any byte says where it is (`reach`, `write`), and one environment variable
picks the point: `ELASTICRL_FAULT=checkpoint.fsync@3:kill` ends the process when it comes to `checkpoint.fsync` for the third
time. `ELASTICRL_FAULT_TRACE=FILE` appends every point that is reached, so that a test can visit each of them.
"""

import errno
import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FAULT = "ELASTICRL_FAULT"
TRACE = "ELASTICRL_FAULT_TRACE"
ACTIONS = ("kill", "stop", "full", "readonly")

_hits: Counter[str] = Counter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One armed fault. Example: Fault(point="checkpoint.fsync", count=3, action="kill")."""

    point: str
    count: int = 1
    action: str = "kill"


def parse(text: str) -> Fault | None:
    """The fault that `point[@count][:action]` names; None for an empty text.

    >>> parse("checkpoint.fsync@3:kill")
    Fault(point='checkpoint.fsync', count=3, action='kill')
    """
    if not text:
        return None
    where, _, action = text.partition(":")
    point, _, count = where.partition("@")
    if (action or "kill") not in ACTIONS:
        raise ValueError(f"{FAULT}={text!r}: the action {action!r} is not one of {', '.join(ACTIONS)}")
    return Fault(point=point, count=int(count or 1), action=action or "kill")


def reach(point: str, detail: str = "") -> None:
    """Say that the process is at `point` now; act if that is the armed one."""
    if _due(point, detail):
        _act(point)


def write(point: str, put: Callable[[bytes | memoryview], object], data: bytes | memoryview) -> None:
    """`put(data)`; when armed, only the first half of it is put before the fault acts: the torn write of a real kill."""
    if _due(point, f"{len(data)} bytes"):
        put(data[: len(data) // 2])
        _act(point)
    put(data)


def reset() -> None:
    """Count from the start again; for a process that was forked."""
    _hits.clear()


def _due(point: str, detail: str) -> bool:
    if trace := os.environ.get(TRACE):
        with Path(trace).open("a") as file:
            file.write(f"{point}\t{detail}\n")
    armed = parse(os.environ.get(FAULT, ""))
    if armed is None or armed.point != point:
        return False
    _hits[point] += 1
    return _hits[point] == armed.count


def _act(point: str) -> None:
    armed = parse(os.environ[FAULT])
    assert armed is not None
    if armed.action == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), point)
    if armed.action == "readonly":
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), point)
    os.kill(os.getpid(), signal.SIGKILL if armed.action == "kill" else signal.SIGSTOP)
