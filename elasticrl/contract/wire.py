"""What daemon and agent say to each other, over a unix socket in the runtime directory: versioned JSON, a message a line.

The one idea: orders go one way, whole pictures come back. Every report is the agent's complete present state, so a daemon
that comes back after a crash knows all from the first line it reads (adoption), and a lost report is made good by the next.
Nothing is answered: what an order achieved is in the reports after it. How a process ended is repeated in every report
until it is acknowledged, so that no daemon's death can lose it.
"""

import json
from functools import cache
from typing import Any, Final, get_args

from pydantic import TypeAdapter, ValidationError

from elasticrl.base.parsed import parsed
from elasticrl.base.value import dataclass
from elasticrl.contract.model import Commit, Exit, Facts
from elasticrl.contract.orders import Order

VERSION: Final = 3
LIMIT: Final = 8 * 1024 * 1024  # of one line; 4,096 seats are far below it


class Garbled(ValueError):
    """A line is not what this protocol says; the sentence tells what to do."""


# ---- orders: daemon to agent


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledge:
    """These ends have been logged."""

    ended: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quit:
    """End all processes and the agent itself."""

    reason: str


# ---- reports: agent to daemon


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one process ended, with what could be learned about it.

    Example: Ended(number=7, exit=Exit(generation=14, slot=0, step=1283, cause="signal 9 (SIGKILL)", own=False), rank=2)
    """

    number: int  # to acknowledge it by
    exit: Exit
    rank: int | None = None  # None: it was a spare
    core: str = ""  # where the kernel puts core dumps, if this end may have left one
    said: str = ""  # the last line of its output


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One seated process. Its beats can be read at `beat` with `elasticrl.contract.beats.Page`."""

    slot: int
    rank: int
    pid: int
    started: int  # clock ticks after boot
    beat: str
    log: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Facts):
    """All there is to know about a node's processes now."""

    pid: int = 0  # the agent's own
    started: int = 0
    workers: tuple[Worker, ...] = ()
    spares: int = 0  # warm processes
    ended: tuple[Ended, ...] = ()  # not yet acknowledged
    stopping: str = ""  # why the agent is about to end


Command = Order | Commit | Acknowledge | Quit
Message = Command | Report
KINDS: Final[dict[str, Any]] = {kind.__name__: kind for kind in get_args(Message)}  # what is not here cannot come in


@cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def encode(message: Message) -> bytes:
    """A message as one line."""
    kind = type(message)
    plain = _adapter(KINDS[kind.__name__]).dump_python(message, mode="json", exclude_defaults=True)
    return json.dumps({"v": VERSION, "is": kind.__name__, **plain}, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message again; fields that a newer version has added are passed over."""
    try:
        plain = parsed(line)
    except ValueError as error:
        raise Garbled(f"a line on the agent's socket is not JSON ({error}): {line[:80]!r}") from None
    if not isinstance(plain, dict) or plain.pop("v", None) != VERSION:
        raise Garbled(
            f"the other end of the agent's socket speaks another protocol than {VERSION}: {line[:80]!r}; "
            "drain the node and restart daemon and agent in the same version"
        )
    kind = KINDS.get(str(plain.pop("is", None)))
    if kind is None:
        raise Garbled(f"unknown message on the agent's socket: {line[:80]!r}")
    try:
        message: Message = _adapter(kind).validate_python(plain)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise Garbled(f"{kind.__name__} on the agent's socket: {where}: {first['msg']}") from None
    return message
