"""What daemon and agent say to each other, over a unix socket in the runtime directory: versioned JSON, a message a line.

The one idea: orders go one way, whole pictures come back. Every report is the agent's complete present state, so a daemon
that comes back after a crash knows all from the first line it reads (adoption), and a lost report is made good by the next.
Nothing is answered: what an order achieved is in the reports after it. How a process ended is repeated in every report
until it is acknowledged, so that no daemon's death can lose it.
"""

import json
from functools import cache
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from elasticrl.agent.seat import Committed
from elasticrl.core import events
from elasticrl.core.evidence import Sign
from elasticrl.core.model import Exit, Facts, Member, Plan, Rung, deal
from elasticrl.core.parsed import parsed
from elasticrl.core.value import dataclass

VERSION: Final = 2
LIMIT: Final = 8 * 1024 * 1024  # of one line; 4,096 seats are far below it


class Garbled(ValueError):
    """A line is not what this protocol says; the sentence tells what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """What the workers of one seat need to know of their generation.

    Example: Gang(generation=14, born=12, rank=2, slots=2, world=4, lanes=8, resume=1260, rung=Rung.REFORM,
        endpoint="10.0.0.1:40123", nodes=("n00", "n00", "n03", "n03"), reason="n01/1 died (lease); 2 nodes train")
    """

    generation: int
    born: int
    rank: int  # of slot 0
    slots: int
    world: int
    lanes: int
    resume: int
    rung: Rung
    endpoint: str
    nodes: tuple[str, ...]  # each rank's node
    reason: str = ""
    backend: str = ""  # in place of what is configured
    run: str = ""  # which run of the job this is, for logs
    grows: bool = False  # it only adds to the gang that there was

    @property
    def prefix(self) -> str:
        """Under which this generation's keys lie in the TCPStore at `endpoint`."""
        return f"g{self.generation}/"

    def lanes_of(self, rank: int) -> range:
        """The lanes a rank carries."""
        return deal(self.lanes, self.world)[rank]


# ---- orders: daemon to agent


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """End any seated workers and hand the ranks to warm processes."""

    gang: Gang


@dataclass(frozen=True, slots=True, kw_only=True)
class Reform:
    """Tell the living workers of a new generation."""

    gang: Gang


@dataclass(frozen=True, slots=True, kw_only=True)
class Park:
    """Tell the living workers to leave their group and wait, state in hand."""

    generation: int
    endpoint: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """End the seated workers; `save` lets them finish the step and write a checkpoint first."""

    generation: int
    save: bool
    within_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """End one worker that cannot run on, at once."""

    slot: int
    cause: str
    sign: Sign


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
    """One seated process. Its beats can be read at `beat` with `elasticrl.agent.beats.Page`."""

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


Order = Launch | Reform | Park | Halt | Kill | Committed | Acknowledge | Quit
Message = Order | Report
KINDS: Final[dict[str, Any]] = {
    kind.__name__: kind for kind in (Launch, Reform, Park, Halt, Kill, Committed, Acknowledge, Quit, Report)
}  # what is not here cannot come in


def gang_of(plan: Plan, me: Member, run: str = "") -> Gang:
    """A member's part of a plan."""
    seat = plan.seat_of[me]
    return Gang(
        generation=plan.generation, born=seat.born, rank=plan.first_rank(me), slots=seat.slots, world=plan.world,
        lanes=plan.lanes, resume=plan.resume, rung=plan.rung, endpoint=plan.endpoint,
        nodes=tuple(s.member.node for s in plan.seats for _ in range(s.slots)),
        reason=plan.reason, backend=plan.backend, run=run, grows=plan.grows,
    )  # fmt: skip


def order_of(action: events.Action, me: Member, run: str = "") -> Order | None:
    """What to send for an action of the core; None if it does not concern the agent."""
    match action:
        case events.Launch(plan=plan):
            return Launch(gang=gang_of(plan, me, run))
        case events.Reform(plan=plan):
            return Reform(gang=gang_of(plan, me, run))
        case events.Park(plan=plan):
            return Park(generation=plan.generation, endpoint=plan.endpoint, reason=plan.reason)
        case events.Halt(generation=generation, save=save, within_s=within_s, reason=reason):
            return Halt(generation=generation, save=save, within_s=within_s, reason=reason)
        case events.Kill(slot=slot, cause=cause, sign=sign):
            return Kill(slot=slot, cause=cause, sign=sign)
        case _:
            return None


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
