"""The vocabulary. Everything a daemon knows, says and agrees on is one of these values; read them and you know elasticrl.

The one idea: a leader writes a single `Plan`, and every node makes itself match it. A `Record` is what a member says of
itself; a `Commit` is the newest disk checkpoint; a `View` is what a node has seen of the store. All are frozen, so that
yesterday's view can be compared with today's.

Long because it is one vocabulary.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import Enum, IntEnum, StrEnum
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, TypeVar

from elasticrl.base.member import Member as Member  # noqa: PLC0414 - the first of these nouns
from elasticrl.base.value import dataclass, unshare
from elasticrl.base.words import count
from elasticrl.contract.cause import Cause, Why, sentence, told
from elasticrl.contract.evidence import Evidence, Sign
from elasticrl.contract.pairs import Result
from elasticrl.contract.partition import Pair
from elasticrl.contract.verdict import Verdict


class Phase(StrEnum):
    """What a plan asks of its gang."""

    HOLD = "hold"  # keep processes and state, make no steps
    PROBE = "probe"  # as HOLD, and let the nodes test each other
    TRAIN = "train"
    STOP = "stop"  # the job is over; the plan's exit code says how


class Rung(IntEnum):
    """The recovery ladder: what a generation costs its processes."""

    START = 0  # not a recovery: a first start, growth, or what an operator asked
    REFORM = 1  # survivors keep their processes and form a new group in place
    REPLACE = 2  # a sick or dead worker comes back in a fresh process, state from a vault; the others reform
    RESTART = 3  # all workers come back in fresh processes, state from vaults
    RELOAD = 4  # all workers come back in fresh processes, state from the newest good disk checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A member's place in a plan: `slots` consecutive ranks.

    `born` is the generation in which the worker processes got their first rank. A node whose running workers were born then
    keeps them and reforms; any other node takes fresh ones. So a plan says by this number who keeps its processes: all of them
    (reform), all but the lost (replace), or none (restart).

    Example: Seat(member=Member(node="n03", incarnation=2), born=14, slots=8, beat="10.0.0.3:7461")
    """

    member: Member
    born: int
    slots: int = 1
    beat: str = ""  # where the daemon listens for neighbours' beats
    echo: str = ""  # where the agent answers them when the daemon is silent
    vault: str = ""  # host:port where this node's vault takes copies and gives them back; "": it has none
    probe: str = ""  # host:port at which this node is tested by others


_node_of: Final[Callable[[Seat], str]] = attrgetter("member.node")
_member_of: Final[Callable[[Seat], Member]] = attrgetter("member")
_born: Final[Callable[[Seat], int]] = attrgetter("born")
_slots: Final[Callable[[Seat], int]] = attrgetter("slots")


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """The memory of a failure that is the program's own doing, so that a crash loop is seen whoever leads.

    Example: Strike(cause=Cause(why=Why.FAILED, said="exit code 1: ValueError: bad prompt"), step=128, count=2)
    """

    cause: Cause
    step: int
    count: int
    mixed: bool = False  # other failures were counted with it
    unblamed: int = (
        0  # of `count`: gangs of which all workers that ended said that a peer had gone, and none is known to have
    )


@dataclass(frozen=True)  # no slots: the cached look-ups below live in the instance's dict
class Plan:
    """The one file of truth. A generation is a plan that was written; its number strictly rises.

    Example: Plan(generation=14, phase=Phase.TRAIN, seats=(...), resume=1260, causes=(Cause(why=Why.EXPIRED, who=(...)),))
    """

    generation: int
    phase: Phase
    seats: tuple[Seat, ...] = ()  # in rank order; survivors keep their order
    spares: tuple[Seat, ...] = ()  # warm, unseated, as known when the plan was written
    resume: int = (
        0  # the newest commit when it was written: the gang may agree on a newer sealed step, never an older one
    )
    rung: Rung = Rung.START
    lanes: int = 1  # of the whole job; `deal` gives each rank its range
    team: int = 1  # so many consecutive ranks carry lanes together, as one
    endpoint: str = ""  # host:port of the TCPStore in which this generation meets
    causes: tuple[Cause, ...] = ()  # why it was made, what came first first
    strike: Strike | None = None
    exit_code: int | None = None  # only with STOP
    bits: str = ""  # fingerprint of what decides the job's bits: whoever computes others gets no seat
    verdict: Verdict | None = None  # on what broke the gang before
    pairs: tuple[Pair, ...] = ()  # with PROBE: test these, instead of everybody some others
    backend: str = ""  # "gloo": in place of what is configured, until a probe finds that in order
    fallbacks: int = 0  # how often it was found broken in a row
    usual_s: float = 0.0  # with `backend`: how long a step took over what is configured; 0: nobody knew
    gang: tuple[
        str, ...
    ] = ()  # nodes of the newest gang that sealed a step, in rank order, where they are not those of the seats
    again: bool = False  # it is the one before, written anew for a store that had lost it, and all leases with it
    leases_lost: bool = False  # it comes soon after such a one: who has no lease may live
    waited: int = -1  # the commit since which the job has held for members that were put out
    saves: bool = (
        False  # HOLD: the workers end with a last save, as nodes leave that cannot be spared; TRAIN: to save it forms
    )

    def __post_init__(self) -> None:
        unshare(self)  # it is looked at all the time

    @cached_property
    def reason(self) -> str:
        """Its causes, and what is done about them, as status shows them. For people: what decides asks for `causes`."""
        return told(self.causes, self._done(trains=True))

    @property
    def promise(self) -> str:
        """The same while its gang does not train yet."""
        return told(self.causes, self._done(trains=False))

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Of its causes."""
        return tuple(cause.why.value for cause in self.causes)

    def _done(self, *, trains: bool) -> str:
        match self.phase:
            case Phase.TRAIN:
                saves = "its workers form once more, to save; " if self.saves else ""
                return f"{saves}{'training' if trains else 'to train'} on {count(len(self.seats), 'node')}"
            case Phase.PROBE:
                return "probing across" if self.pairs else "probing"
            case Phase.HOLD if self.saves:
                return "holding to save"
        return ""

    def says(self, *kinds: Why) -> bool:
        """Is one of its causes of these kinds?"""
        return any(cause.why in kinds for cause in self.causes)

    @cached_property
    def seated(self) -> tuple[str, ...]:
        """The seats' nodes, in rank order."""
        return tuple(map(_node_of, self.seats))

    @cached_property
    def members(self) -> tuple[Member, ...]:
        """Who has them, in rank order."""
        return tuple(map(_member_of, self.seats))

    @cached_property
    def seat_at(self) -> Mapping[str, int]:
        """Each seated node's place among the seats."""
        return MappingProxyType(dict(zip(self.seated, range(len(self.seats)), strict=True)))

    @cached_property
    def seat_of(self) -> Mapping[Member, Seat]:
        """Each seated member's seat. Who asks for one alone asks `seat`: of thousands this takes a while."""
        return MappingProxyType(dict(zip(self.members, self.seats, strict=True)))

    def seat(self, member: Member) -> Seat | None:
        """This member's seat, if it has one."""
        place = self.seat_at.get(member.node)
        seat = self.seats[place] if place is not None else None
        return seat if seat is not None and (seat.member is member or seat.member == member) else None

    @cached_property
    def ring(self) -> tuple[Seat, ...]:
        """Everybody who exchanges beats, each with those next to it."""
        return self.seats + self.spares

    @cached_property
    def around(self) -> tuple[Member, ...]:
        """Who is in that ring, in its order."""
        return tuple(map(_member_of, self.ring))

    @cached_property
    def place(self) -> Mapping[str, int]:
        """Each seated or spare node's position in the ring of neighbours."""
        return MappingProxyType(dict(zip(map(_node_of, self.ring), range(len(self.ring)), strict=True)))

    @cached_property
    def world(self) -> int:
        """The number of ranks."""
        return sum(map(_slots, self.seats))

    @property
    def carriers(self) -> int:
        """Among so many its lanes are dealt: ranks, or teams of them."""
        return self.world // self.team

    @cached_property
    def node_of(self) -> Mapping[int, str]:
        """Where each rank runs."""
        return MappingProxyType(dict(enumerate(seat.member.node for seat in self.seats for _ in range(seat.slots))))

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """Each rank's node."""
        return tuple(self.node_of.values())

    @cached_property
    def grows(self) -> bool:
        """Does it only add to a gang that trains? That one trains on until those who come are there."""
        if self.phase is not Phase.TRAIN or self.rung is not Rung.START:
            return False
        return 0 < sum(map(self.generation.__gt__, map(_born, self.seats))) < len(self.seats)

    def first_rank(self, member: Member) -> int:
        """The rank of a seat's first slot."""
        if self.seat(member) is None:
            raise KeyError(f"{member} has no seat in generation {self.generation}")
        return self._first_ranks[self.seat_at[member.node]]

    def team_of(self, rank: int) -> int | None:
        """The number of a rank's team; None where there are none."""
        return rank // self.team if self.team > 1 else None

    def rank_of(self, member: Member, slot: int | None) -> int | None:
        """The rank of a member's worker; None where no single one is meant."""
        return None if slot is None else self.first_rank(member) + slot

    @cached_property
    def _first_ranks(self) -> tuple[int, ...]:
        """Of each seat, and the number of all ranks."""
        return tuple(accumulate(map(_slots, self.seats), initial=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The newest disk checkpoint: one fenced transaction made it so.

    Example: Commit(step=1280, generation=14, manifest="step-00001280")
    """

    step: int
    generation: int
    manifest: str = ""
    written: float = 0.0  # by the wall clock of who committed it, for display alone


class Work(StrEnum):
    """What a node's seated workers are doing."""

    NONE = "none"  # no seated workers
    JOINING = "joining"  # told of a generation, not yet through its first collective
    TRAINING = "training"
    PARKED = "parked"  # out of a broken or held group, state in hand, waiting for the next generation
    STALLED = "stalled"  # a worker waits for others for longer than its budget; who hangs by itself is still TRAINING
    FAILED = "failed"  # a worker ended; `Record.exit` says how
    DONE = "done"  # all steps made


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a worker ended. `own` tells the program's own doing (an exception, a bad signal) from what was done to it.

    Example: Exit(generation=14, slot=0, step=1283, cause="signal 9 (SIGKILL)", own=False, signal=9)
    """

    generation: int
    slot: int | None  # None: not one worker of the node, but all of them
    step: int
    cause: str  # for people: nothing is decided by it
    own: bool
    signal: int = 0  # that ended it
    sign: Sign | None = None  # what its agent or the kernel knows of it; None: nothing beside the above
    phase: str = ""  # in which it stood still, and was ended for that
    raised: str = ""  # the full name of the exception that ended it ("torch.distributed.DistStoreError"); "": not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A worker that has made no progress in its phase for longer than the phase's budget.

    `waiting` is true inside a collective: such a worker is a victim of somebody. A worker that is not waiting, or whose
    process the kernel reports as stopped, is itself the culprit.

    Example: Stall(slot=0, step=1283, phase="rollout", for_s=12.0, budget_s=10.0, waiting=False)
    """

    slot: int
    step: int
    phase: str
    for_s: float
    budget_s: float
    waiting: bool
    stopped: bool = False
    op: str = ""  # the collective that it waits in, and its number in this generation; "": not known
    collective: int = 0
    silent: bool = False  # all that is known is that its log tells of no progress

    @property
    def sign(self) -> Sign:
        """What it says of the worker: who waits in a collective is a victim, who does not is stuck himself."""
        return Sign.STOPPED if self.stopped else Sign.WAITED if self.waiting else Sign.HOST_STUCK

    def __str__(self) -> str:
        if self.silent:
            # Without how long: it may last for hours, and is shown anew when it changes.
            return f"its log shows no progress: a line was expected within {self.budget_s:.0f} s"
        state = "stopped" if self.stopped else "stalled"
        return f"{state} in {self.phase} for {self.for_s:.1f} s (budget {self.budget_s:.1f} s)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long a worker's own work in one phase took, per step, since the last such word: what it waited is not in it.

    Example: Pace(slot=0, phase="update", seconds=0.048)
    """

    slot: int
    phase: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lap:
    """How long a step took lately, waits and all, and what each rank sent in it: the most of a node's workers.

    Example: Lap(generation=14, seconds=1.31, bytes=1_881_000)
    """

    generation: int
    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Milestone:
    """How far a script says in its log that it is. It is for display and a sign of life: nothing goes on from it.

    Example: Milestone(unit="step", at=120, of=500)
    """

    unit: str  # what is counted: "step", "epoch", "sample"
    at: float
    of: float = 0.0  # how many there will be; 0: not said
    read: float = 0.0  # when the newest line of progress was read, by the wall clock

    def __str__(self) -> str:
        return f"{self.unit} {self.at:,.15g}" + (f" of {self.of:,.15g}" if self.of else "")


#: The phase of a worker that waits for something outside of the gang (an engine that is being started, the disk at the end of
#: a job), under a deadline of its own: it does not hang, and who waits for it in a collective is no victim.
OUTSIDE: Final = "outside"
#: That of a seated process whose program has not asked for its rank yet: it imports, and loads its model.
LOADING: Final = "warm"
#: That of a script that has not said what it does. Nothing but a look from outside can tell that it hangs.
UNTOLD: Final = "script"
#: How a program asks for it.
JOIN: Final = "elasticrl.runtime.join()"
#: That of a worker from when it has taken its rank in a generation until it trains there.
MEETING: Final = "reform"
#: What a phase of a script's own is called that has a cap of its own: it is a key of the configuration, and has 32 bytes in a
#: beat. Others are cut there, and have the usual cap.
PHASE_NAME: Final = r"[A-Za-z][A-Za-z0-9_-]{0,31}"
STATES: Final = frozenset({OUTSIDE, LOADING, MEETING, UNTOLD, "parked", "done"})


def misnamed(phase: str) -> str:
    """Why no phase of a script's own can have a cap under this name, as "it ..."; "" if it can."""
    if phase in STATES:
        return "it is what the runtime calls a state of its own"
    if not re.fullmatch(PHASE_NAME, phase):
        return "it is not a letter and up to 31 letters, digits, dashes and underscores"
    return ""


def meanwhile(work: Work, phase: str) -> bool:
    """Of workers that were told of a plan which adds to their gang: do they train on in that one?"""
    return work is Work.JOINING and phase not in {"", LOADING, MEETING, "parked"}


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a node's workers. The agent's reports, the event `Workers` and the member's record all extend it, so a
    new fact is written down here, set where it is measured, and read where it is used: what lies between passes it on. One that
    changes at every step is left out by `news` (agent/reports) and `record_of` (core/node/follow), or each change goes to etcd.

    Example: Facts(work=Work.TRAINING, generation=14, born=12, warm=True, step=1280, phase="rollout")
    """

    work: Work = Work.NONE
    generation: int = 0  # that `work` speaks of
    born: int = 0  # of the running workers; 0: none
    warm: bool = False  # as many warm spare processes as it has slots: it can take a seat at once
    step: int = 0  # newest sealed step
    saved: int = 0  # newest step whose disk checkpoint is whole and waits for its commit; only on the node of rank 0
    manifest: str = ""  # of `saved`
    exit: Exit | None = None  # how its last workers ended, until there are others; `generation` says under which plan
    stall: Stall | None = None
    endpoint: str = ""  # of the TCPStore this node offers to the next generation it would head
    echo: str = ""  # where the agent answers neighbours
    vault: str = ""  # host:port where this node's vault takes copies and gives them back
    bits: str = ""  # fingerprint of what decides the bits that they compute; "" until a process has said it
    versions: str = ""  # what they run, as JSON: names of contract.versions
    pace: tuple[Pace, ...] = ()  # how long their phases took lately
    lap: Lap | None = None  # how long their newest steps took, of this generation or the last that made some
    milestone: Milestone | None = None  # how far a script's log says that it is; None: it says nothing, or is not read
    phase: str = ""  # that of the one who waits outside of the gang, else of the one whose beat is the oldest
    beat_at: float = 0.0  # that beat, by the wall clock: for display alone
    problem: str = ""  # why no process gets warm
    unlogged: str = ""  # why what this node's processes say is not kept where it should be: for display alone
    restores: bool = (
        False  # state is put back into them, for a while now, and comes nearer: its size decides how long it takes
    )
    restore_s: float = 0.0  # how long putting their state back took in this generation: for display alone

    def into(self, kind: Callable[..., T], **more: object) -> T:
        """These facts in a value of a kind that extends them, with `more` beside them or in their place."""
        return kind(**self.beside(**more))

    def beside(self, **more: object) -> dict[str, object]:
        """These facts by name, with `more` beside them or in their place."""
        return dict(zip(FACTS, _facts_of(self), strict=True)) | more


FACTS: Final = tuple(field.name for field in fields(Facts))
_facts_of: Final = attrgetter(*FACTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record(Facts):
    """What a member says of itself, under its own lease. Rewritten when it changes, not every step: `step`, `phase`, `pace` and
    `lap` are refreshed slowly.

    Example: Record(member=Member(node="n03", incarnation=2), slots=8, warm=True, work=Work.TRAINING, generation=14, step=1280)
    """

    member: Member
    slots: int = 1
    beat: str = ""
    suspects: tuple[str, ...] = ()  # neighbours whose beats it does not hear, each with its life ("n03/2"), sorted
    unreachable: tuple[str, ...] | None = None  # the answer to a PROBE plan; None: not answered
    answered: int = 0  # which PROBE plan that answers: there may be two in a row
    probing: bool = False  # what was found on the way to those within reach is still to come
    probed: tuple[Result, ...] = ()  # it
    probe: str = ""  # host:port at which this node is tested by others
    evidence: tuple[Evidence, ...] = ()  # the newest facts that this node has found, those first that can be a cause
    looked: int = 0  # the newest request to look at its workers that this node has answered
    taken_at: float = 0.0  # when its daemon was started again; like `beat_at`; 0: never
    taken: str = ""  # after what: a word of `words.ENDS`
    advice: tuple[str, ...] = ()  # what the leader would tell an operator
    since: int = 0  # the store's revision when this life began; 0: not told
    needs: int = 0  # nodes below which its job holds, by its configuration, for display and refusals; 0: not told
    tested: int = 0  # which finding of cut ways to this node it has tested since (`Quarantine.found`)
    reached: tuple[str, ...] = ()  # whom it reached then
    leaving: bool = False

    def says(self, words: Mapping[str, object], facts: Facts) -> bool:
        """Is it what `saying` makes of these, but for when its beat came? (That is asked at each event, and costs a fifth of
        making another, to compare.)
        """
        words_of, others_of, _ = _reading(tuple(words))
        return bool(words_of(self) == tuple(words.values()) and others_of(self) == others_of(facts))


def saying(words: Mapping[str, Any], facts: Facts) -> Record:
    """The record of these words, among them when its beat came, and of the facts that they do not mention."""
    _, others_of, others = _reading(tuple(words))
    return Record(**words, **dict(zip(others, others_of(facts), strict=True)))


@lru_cache(maxsize=8)
def _reading(words: tuple[str, ...]) -> tuple[Callable[[object], object], Callable[[object], Any], tuple[str, ...]]:
    """What reads these words of a record, what reads the facts beside them, and which those are."""
    others = tuple(name for name in FACTS if name not in words and name != "beat_at")
    left = {field.name for field in fields(Record)}.difference(words, others, ["beat_at"])
    assert not left, f"a record is made without {', '.join(sorted(left))}"
    return attrgetter(*words), attrgetter(*others), others


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """What a rollout node says of itself, under its own lease. It has no seat and no vote: nothing is decided by this.

    Example: Rollout(member=Member(node="r00", incarnation=1), up=True, address="10.0.0.7:41327", pid=4711, version=2560)
    """

    member: Member
    up: bool = False  # its engine has generated, and answers
    address: str = ""  # where
    pid: int = 0
    version: int | None = None  # of the weights that it has; None: none yet
    note: str = ""  # why it is not up


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """A node that is kept out of plans although it is up. `held` turns false when it has served its time.

    Example: Quarantine(member=Member(node="n03", incarnation=2), cause=Cause(why=Why.SILENT, ...), strikes=1)
    """

    member: Member
    cause: Cause
    strikes: int = 1  # each further one doubles the time; 0: it is forgiven
    held: bool = True
    cuts: tuple[Pair, ...] = ()  # ways to and from it on which nothing arrives, as was found: from whom, to whom
    found: int = 0  # the generation in which that was found

    @property
    def reason(self) -> str:
        """Why, for people."""
        return sentence(self.cause)

    def binds(self, member: Member | None) -> bool:
        """Is the life of the node that runs now kept out? The first two bind one life, later ones the node."""
        return self.held and (self.strikes > 2 or member is None or member == self.member)

    @property
    def peers(self) -> frozenset[str]:
        """The other ends of the cut ways."""
        return frozenset(node for way in self.cuts for node in way) - {self.member.node}

    def beyond(self, record: Record) -> frozenset[str]:
        """Whom the node has not reached since, as its record says, whichever life it is of: it gets no seat beside them."""
        return self.peers.difference(record.reached if record.tested == self.found else ())


class Intent(StrEnum):
    """What the operators want of the whole job."""

    RUN = "run"
    PAUSE = "pause"
    STOP = "stop"


class Verb(StrEnum):
    """What an operator can ask."""

    DRAIN = "drain"
    ADMIT = "admit"
    PAUSE = "pause"
    RESUME = "resume"
    STOP = "stop"


#: What is wanted of the job from then on, by what was asked.
INTENTS: Final[Mapping[Verb, Intent]] = MappingProxyType(
    {Verb.PAUSE: Intent.PAUSE, Verb.RESUME: Intent.RUN, Verb.STOP: Intent.STOP}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a node has seen of the store, at one revision. The `*_revision` fields fence what is written next.

    `records` and `quarantines` are None on a node that does not watch them: only the leader and its deputies do.
    """

    revision: int = 0
    epoch: int = 0  # how often it was seen to have been set back, below a revision that was there before
    lost: bool = False  # it has lost a plan or a commit that this node knows, which stands here in its place
    plan: Plan | None = None
    plan_revision: int = 0
    commit: Commit | None = None
    commit_revision: int = 0
    leader: Member | None = None
    leader_revision: int = 0
    intent: Intent = Intent.RUN
    intent_generation: int = 0  # the newest when the intent was asked
    intent_by: str = ""  # who asked, as "root on n0"; "": not known
    intent_revision: int = 0
    own: Record | None = None  # this member's own record, so that a lost write is noticed
    look: int = 0  # the generation whose workers shall say where they are
    look_revision: int = 0  # which request that is
    drain: Member | None = None  # the life of this node that was asked to leave
    barred: Quarantine | None = None  # what keeps this node out, or did
    records: Mapping[str, Record] | None = None  # by node
    quarantines: Mapping[str, Quarantine] | None = None  # by node

    @property
    def generation(self) -> int:
        """The newest generation seen; 0 before the first plan."""
        return self.plan.generation if self.plan else 0

    @property
    def committed(self) -> int:
        """The newest committed step; 0 before the first commit."""
        return self.commit.step if self.commit else 0


def deal(lanes: int, world: int) -> tuple[range, ...]:
    """Each rank's contiguous range of lanes, the longer ranges first.

    >>> deal(8, 3)
    (range(0, 3), range(3, 6), range(6, 8))
    """
    short, longer = divmod(lanes, world)
    starts = [rank * short + min(rank, longer) for rank in range(world + 1)]
    return tuple(range(a, b) for a, b in pairwise(starts))


def rounds(lanes: int, world: int) -> int:
    """How many lanes the busiest rank carries: what a step's time is proportional to."""
    return -(-lanes // max(world, 1))


class Outcome(Enum):
    """The exit codes of a job, the same everywhere."""

    FINISHED = 0
    CRASH_LOOP = 70
    STOPPED = 75


REFUSED: Final = 78  # the exit code of what refuses to start, as sysexits.h has it; systemd does not start it again
