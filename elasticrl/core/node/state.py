"""What a node remembers between two events, and what it decides at one."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import field
from math import inf

from elasticrl.base.value import dataclass, unshare
from elasticrl.contract.events import Action, Probed, Workers
from elasticrl.contract.evidence import Evidence
from elasticrl.contract.model import Member, Pace, Record, Stall, View
from elasticrl.contract.pairs import Result
from elasticrl.contract.settings import Settings
from elasticrl.contract.verdict import Fault, Verdict
from elasticrl.core.judge.policy import Answer, proven
from elasticrl.core.node.dossier import KEPT_S, Filed, file
from elasticrl.core.node.rows import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """How often a node's worker failed without the job getting past the step of the first of these failures."""

    generation: int  # of the newest
    step: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What the leader makes of the facts about the present gang, and what it would do about it."""

    of: Filed
    verdict: Verdict
    answer: Answer

    @property
    def condemns(self) -> bool:
        """Is it proof against a node that is up? That one is kept out though its gang trains, where policy and caps let it."""
        return proven(self.verdict) and self.verdict.fault is not Fault.DEAD_NODE

    @property
    def capped(self) -> str:
        """Who is not kept out though it should be, and which cap keeps us from it; "" if none does."""
        if not self.answer.capped or not self.condemns:
            return ""
        return f"{', '.join(self.answer.nodes)} is not kept out: {self.answer.milder}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Formation:
    """How the newest plan's gang came to be, as far as the leader has seen it."""

    generation: int = 0  # that `planned_at` speaks of
    planned_at: float = -inf  # when it was first seen here
    loaded_at: float = -inf  # when a program of its workers was last seen to load
    restored_at: float = -inf  # when state was last seen to be put back into its workers
    grown: int = 0  # the newest generation of which it is known that all have been there whom its plan added
    parted_at: float = -inf  # when a gang that was to grow was first seen to have parted, with all there
    there: int | None = None  # the newest step when those whom it adds to a gang had all come
    gang: int = 0  # the newest generation that was to train: whose fault is judged
    formed: int = 0  # the newest generation of which a member was seen to train


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """Who is there, and who is not."""

    lapsed: bool = False  # several members had no record when this node began to lead
    emptied: bool = False  # the store had lost all, their leases too
    ready: frozenset[Member] = frozenset()  # candidates for a seat
    ready_at: float = -inf  # when the newest of them came
    absent: Mapping[Member, float] = field(default_factory=dict)  # since when each seated one has had no record


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalls:
    """Members that wait."""

    since: float | None = None  # when members began to report stalls with nobody to blame
    asked: int = 0  # the newest request to look at workers at that time
    excused: bool = False  # were those who wait in a collective, at the last look?
    excused_at: float = -inf  # until when they were
    silent: tuple[float, int] | None = None  # when a log was last found silent, and after which request to look


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Workers that have ended, and a job that is to end."""

    failed_at: float | None = None  # since when a worker of the present gang has ended
    done_at: float | None = None  # since when all seats have been done
    stop_at: float = inf  # when it was first seen that the job is to stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Custody:
    """Who is kept out, was kept out, or may have to be."""

    doubted: Mapping[Member, float] = field(default_factory=dict)  # when each was last convicted by its neighbours
    failures: Mapping[str, Failures] = field(default_factory=dict)  # by node
    confining: Mapping[str, float] = field(
        default_factory=dict
    )  # when each quarantine was written that is not seen yet
    confined: Mapping[str, float] = field(default_factory=dict)  # when each held quarantine was first seen
    put_out: tuple[float, ...] = ()  # when quarantines of the last hour were first seen
    let_back: Mapping[str, float] = field(default_factory=dict)  # when a quarantine was seen to be over, lately
    well: Mapping[Member, float] = field(default_factory=dict)  # since when each has been well who is not forgiven yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Dossier:
    """What is known of the present gang, and what follows."""

    facts: Filed = ()  # of all nodes, the oldest first
    read: Mapping[str, Record] = field(default_factory=dict)  # records whose facts are among these
    finding: Finding | None = None
    passed: Mapping[int, float] = field(default_factory=dict)  # until when each gang has outlived what was found
    marks: tuple[tuple[float, int], ...] = ()  # of the present gang: when it was looked at, its foremost rank's step

    def with_(self, fresh: Iterable[Evidence], now: float) -> Filed:
        """The facts with the new ones among them."""
        return file(self.facts, fresh, now, kept_s=1.25 * KEPT_S, passed=self.passed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paces:
    """How long phases take, in this generation, and who is slow."""

    newest: Mapping[str, tuple[Pace, ...]] = field(default_factory=dict)  # of each seated node that has told them
    history: tuple[Mapping[int, Mapping[str, float]], ...] = ()  # rank -> phase -> seconds
    slow: Filed = ()  # who is slow, as things are
    eased: frozenset[str] = frozenset()  # nodes that were given up for being slow, in any generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """What probes have found, and a gang that goes on over another backend for it."""

    results: tuple[Result, ...] = ()  # of the probe that is going on
    earlier: tuple[Result, ...] = ()  # of those before, which this one confirms
    measured: str = ""  # what the fallback costs, once steps were made over it
    backend_since: float = inf  # since when this leader has known the gang to be on a backend that is not its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """What the leader remembers. It is lost with it, which costs time and nothing else: the next leader begins anew."""

    since: float  # when this node began to lead
    formation: Formation = field(default_factory=Formation)
    presence: Presence = field(default_factory=Presence)
    stalls: Stalls = field(default_factory=Stalls)
    ends: Ends = field(default_factory=Ends)
    custody: Custody = field(default_factory=Custody)
    dossier: Dossier = field(default_factory=Dossier)
    paces: Paces = field(default_factory=Paces)
    probes: Probes = field(default_factory=Probes)
    rows: Rows | None = field(default=None, compare=False)  # what the seats' nodes said, as it was read last


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What came of this node's tests of its cut ways: the newest, and since when there are any."""

    found: int
    since: float
    at: float
    asked: frozenset[str]
    reached: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)  # no slots: `but` copies the instance's dict
class State:
    """One node's memory. Facts on top, then what follows from them over time."""

    settings: Settings
    me: Member
    card: Record  # the part of this member's record that never changes: slots, role, address, bits
    view: View = field(default_factory=View)
    workers: Workers | None = None
    joined: int = 0  # the newest generation that living workers of this member were in
    formed: int = 0  # the newest generation in which they got through the first collective
    made: int = 0  # the newest generation in which they sealed a step
    suspects: frozenset[str] = frozenset()
    probed: Probed | None = None
    trial: Trial | None = None
    evidence: Filed = ()  # what this node has found in the last minute, the oldest first
    stalled_at: float | None = None  # when the present stall was first heard of
    looked: int = 0  # the newest request to look at the workers that was answered
    moved_at: float = -inf  # when a worker that had stood in a collective was last seen out of it
    looked_at: float = -inf  # when they were looked at, asked or not
    leased: float = -inf  # when the newest acknowledged keepalive was sent
    met: int | None = None  # the generation that was there when this daemon first saw the store
    adopted: float = -inf  # when the present plan was first seen here
    leaving: str = ""  # why this member leaves; "" while it stays
    leaving_since: float = 0.0
    reported: float = -inf  # when the record's step was last refreshed
    lost_since: float | None = None  # since when the store has known less of the job than this node
    vacant_since: float | None = None  # since when there has been no leader, or only a convicted one
    lead: Lead | None = None  # present while this node leads
    sent: Mapping[Hashable, tuple[Action, float]] = field(default_factory=dict)  # decided, not yet seen to have worked
    reason: str = ""  # the sentence that status shows for this node
    calm_until: float = field(default=-inf, compare=False)  # until when only its record and its lease can want anything

    def __post_init__(self) -> None:
        unshare(self)  # and so are those that `but` makes

    @property
    def known(self) -> Dossier:
        """What this node knows of the present gang: the leader what all have told, the others what they found themselves."""
        return self.lead.dossier if self.lead else Dossier(facts=self.evidence)

    def patient_until(self, stall: Stall) -> float:
        """Until when a worker that stands still outside of collectives may only be on its way to the next.

        Found live: where a way takes long all phases do, and the first that was seen between two collectives was ended for it.
        """
        return -inf if stall.waiting or stall.stopped else self.moved_at + stall.budget_s

    def but(self, **changes: object) -> "State":
        """This state with these changes. (`dataclasses.replace` takes ten times as long: a fifth of a simulation.)"""
        before = vars(self)
        values = before.copy()
        values.update(changes)
        assert len(values) == len(before), f"a state has no {', '.join(sorted(changes.keys() - before.keys()))}"
        after = object.__new__(State)
        object.__setattr__(after, "__dict__", values)
        return after


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The next state, what to do now, and when to look again if nothing happens."""

    state: State
    actions: tuple[Action, ...]
    wake_at: float


@dataclass(frozen=True, slots=True)
class Wish:
    """What one part of the core wants done: actions by what they are about, when to look again, and why."""

    actions: tuple[Action, ...] = ()
    wake_at: float = inf
    reason: str = ""


NOTHING = Wish()
