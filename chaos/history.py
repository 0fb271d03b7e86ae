"""What happened in a run, as facts: both drivers write them, `chaos.checks` judges nothing else.

The one idea: a fact is what an outsider could have seen (a key written in the store, a worker's exit, a fault that was put
in), never what a node believed. So the judge cannot share the mistakes of the judged.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path

from elasticrl.contract.cause import Cause
from elasticrl.contract.model import Member, Plan, Seat, Strike

SHOWN = 512  # seats of a plan that a file tells: thousands in hundreds of plans would be gigabytes
CROSSING_S = 2.0  # a plan may be under way while its writer's next decision, a quarantine, overtakes it


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Something that was so at `at`, in seconds since the run began."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned(Fact):
    """A plan was written to the store by this member; `committed` was the newest commit, `paused` the operators' wish."""

    plan: Plan
    by: str
    committed: int
    paused_s: float  # how long the job had been asked to pause; 0: it was not
    held: tuple[str, ...] = ()  # members under a quarantine that had stood for CROSSING_S
    lapsed_s: float = 0.0  # how long, by a true clock, the writer's lease had been unsure when it sent this plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(Fact):
    """A checkpoint became the newest."""

    step: int
    generation: int
    manifest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspected(Fact):
    """All were asked where their workers are."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Confined(Fact):
    """A quarantine was written (`held`) or lifted."""

    node: str
    member: str
    cause: Cause
    strikes: int
    held: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Elected(Fact):
    """The leader key was taken."""

    member: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Expired(Fact):
    """A lease ran out in the store."""

    member: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck(Fact):
    """A fault was put in. `nodes` are those it touches; `number` is its place in the scenario."""

    number: int
    kind: str
    nodes: tuple[str, ...]
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eased(Fact):
    """A fault was taken out again."""

    number: int
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Healed(Fact):
    """The nemesis has gone: from here on the job owes us progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Fact):
    """A gang formed and agreed on the version it goes on from. `source` is vault, disk or start."""

    generation: int
    version: int
    digest: str
    source: str
    whole: int  # the newest version that lay whole in the vaults of its members; -1: none
    nodes: tuple[str, ...]
    ranges: tuple[tuple[int, int], ...]  # the lanes of each rank: first, and one past the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed(Fact):
    """Every rank has applied this update and every shard of it is whole and copied.

    Real workers tell it when they come to it, which is late where a fault has cut that step: it was so since `after` at least,
    when they told of the version before.
    """

    generation: int
    version: int
    step: int
    digest: str
    after: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Made(Fact):
    """Every rank has applied this update, and not every shard of it could be copied: it is not sealed. (simulated)"""

    generation: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved(Fact):
    """A disk checkpoint was written to its end (`whole`) or not."""

    step: int
    version: int
    digest: str
    manifest: str
    whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Died(Fact):
    """A node's worker ended, and how."""

    node: str
    generation: int
    step: int
    cause: str
    own: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Began(Fact):
    """A node started fresh worker processes for a generation, or (`fresh=False`) its living ones reformed."""

    node: str
    generation: int
    fresh: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Halted(Fact):
    """A node ended its living workers, which had joined `generation`, because plan `under` asks for that."""

    node: str
    generation: int
    under: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated(Fact):
    """A node's agent was given the same order again and again within the time that an order has to work."""

    node: str
    order: str
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Left(Fact):
    """A member ended by its own decision."""

    member: str
    code: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Fact):
    """A daemon began; `adopted` with workers that were running."""

    member: str
    adopted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked(Fact):
    """An operator's request reached a daemon."""

    verb: str
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Advised(Fact):
    """A leader has something to tell operators that it does nothing about. (simulated)"""

    member: str
    advice: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested(Fact):
    """A node without a seat has tested the cut ways to it. (simulated)"""

    node: str
    passed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Fact):
    """An operator asked whether a node can be spared, and was told why not. (simulated)"""

    node: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion(Fact):
    """A node's detector changed its mind about a neighbour."""

    node: str
    other: str
    suspected: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Spun(Fact):
    """A node's core was asked more often than anything that happened can explain."""

    node: str
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug(Fact):
    """An assertion of the core failed."""

    node: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed(Fact):
    """A fault was put in and did not strike: no packet was dropped, nobody was throttled. (live)"""

    number: int
    kind: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Fact):
    """How busy the machine is: budgets are multiplied by this. (live)"""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Proved(Fact):
    """What was found when all was over: the audit, the comparison with the undisturbed run, what was left behind. (live)"""

    what: str
    ok: bool
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Fact):
    """The run is over: what is so at its end."""

    alive: tuple[str, ...]  # nodes whose daemon runs
    seated: tuple[str, ...]
    want: int  # seats that the configuration would give to the nodes that are there
    lively: bool  # the demands of the second phase were met in time
    lacks: str = ""  # which was not
    writes: int = 0  # of nodes' records to the store (simulated)


History = list[Fact]


def plain(value: object) -> object:
    """A fact's field as JSON."""
    if isinstance(value, Plan):
        return {
            "generation": value.generation, "phase": value.phase.value, "resume": value.resume, "rung": value.rung.name,
            "seats": [plain(seat) for seat in value.seats[:SHOWN]], "more_seats": max(0, len(value.seats) - SHOWN),
            "spares": [str(seat.member) for seat in value.spares[:SHOWN]],
            "lanes": value.lanes, "causes": list(value.kinds), "reason": value.reason, "strike": plain(value.strike),
            "exit_code": value.exit_code,
        }  # fmt: skip
    if isinstance(value, Seat):
        return {"member": str(value.member), "born": value.born, "slots": value.slots}
    if isinstance(value, Strike):
        return {"cause": str(value.cause), "step": value.step, "count": value.count}
    if isinstance(value, Member | Cause):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return round(value, 6) if isinstance(value, float) else value


def line(fact: Fact) -> str:
    """One fact as one line of JSON."""
    body = {field.name: plain(getattr(fact, field.name)) for field in fields(fact)}
    return json.dumps({"what": type(fact).__name__.lower(), **body}, separators=(",", ":"))


def write(history: Iterable[Fact], path: Path) -> None:
    """The history as a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as out:
        out.writelines(line(fact) + "\n" for fact in history)
