"""What a node's agent and its workers are told to do.

The core decides these values. The daemon sends them to the agent as they are. The agent gives each worker its own part: a
`Place`, a `Park` or a `Halt`.
"""

from dataclasses import replace

from elasticrl.base.value import dataclass
from elasticrl.contract.evidence import Sign
from elasticrl.contract.model import Member, Plan, Rung, deal


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Something the shell should do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place in a generation: that of a node's first slot, until `at` makes it one worker's.

    Example: Place(generation=14, born=12, rank=2, slots=2, world=4, all_lanes=8, resume=1260, rung=Rung.REFORM,
        endpoint="10.0.0.1:40123", nodes=("n00", "n00", "n03", "n03"), reason="n01 lost its lease; 2 nodes train")
    """

    generation: int
    born: int  # generation whose launch started this process: equal to `generation` means that it has no state yet
    rank: int
    slot: int = 0  # which of the node's processes; torch calls it the local rank
    slots: int = 1
    world: int
    all_lanes: int
    team: int = 1  # so many consecutive ranks carry lanes together
    resume: int = 0  # newest committed step; a newer sealed one may be had from memory
    rung: Rung = Rung.START
    endpoint: str = ""  # host:port of the TCPStore to meet in
    nodes: tuple[str, ...] = ()  # each rank's node
    reason: str = ""
    backend: str = ""  # "gloo": in place of what is configured
    run: str = ""  # which run of the job this is, for logs
    grows: bool = False  # it only adds to the gang that there was: that one trains on until those who come are there
    log: str = ""  # where the worker writes

    @property
    def prefix(self) -> str:
        """Under which this generation's keys lie in the TCPStore at `endpoint`."""
        return f"g{self.generation}/"

    @property
    def lanes(self) -> range:
        """The lanes that this rank carries, or its team does."""
        return deal(self.all_lanes, self.world // self.team)[self.rank // self.team]

    @property
    def host(self) -> str:
        """Of the endpoint."""
        return self.endpoint.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """Of the endpoint."""
        return int(self.endpoint.rpartition(":")[2])

    def at(self, slot: int, log: str) -> "Place":
        """The place of one of the node's workers."""
        return replace(self, rank=self.rank + slot, slot=slot, log=log)


def place_of(plan: Plan, me: Member) -> Place:
    """A member's place in a plan."""
    seat = plan.seats[plan.seat_at[me.node]]
    return Place(
        generation=plan.generation, born=seat.born, rank=plan.first_rank(me), slots=seat.slots, world=plan.world,
        all_lanes=plan.lanes, team=plan.team, resume=plan.resume, rung=plan.rung, endpoint=plan.endpoint, nodes=plan.nodes,
        reason=plan.reason, backend=plan.backend, grows=plan.grows,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch(Action):
    """End any seated workers; hand their places to warm processes."""

    place: Place
    leave_s: float = (
        0.0  # the seated ones have so long to save and to leave by themselves; 0: nothing of theirs can be saved
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reform(Action):
    """Tell the living workers of the new generation: they leave their group and join this one in place."""

    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Park(Action):
    """The living workers leave their group and wait for the next generation, state in hand."""

    generation: int
    endpoint: str = ""  # in which that one may meet
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt(Action):
    """The seated workers end, by `save` with the step finished and a checkpoint written; after `within_s` they are killed."""

    generation: int  # under which they end; what they save last is committed under it
    save: bool
    within_s: float
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill(Action):
    """End one worker that cannot run on: SIGCONT and SIGKILL at once. Its exit record bears the cause and the sign."""

    slot: int
    cause: str
    sign: Sign


Order = Launch | Reform | Park | Halt | Kill
