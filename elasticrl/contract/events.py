"""What happens to the core, and what it asks for in return.

Every event carries `now`, in seconds on the node's monotonic clock: the core never looks at one. No action has a reply:
its effect is what the next `Seen` or `Workers` shows, and an action that was lost is decided again.
"""

from collections.abc import Mapping
from dataclasses import field

from elasticrl.base.value import dataclass
from elasticrl.contract.evidence import Evidence
from elasticrl.contract.model import Commit, Facts, Intent, Plan, Quarantine, Record, Verb, View
from elasticrl.contract.orders import Action as Action  # noqa: PLC0414 - the orders are actions too
from elasticrl.contract.pairs import Result
from elasticrl.contract.partition import Pair
from elasticrl.contract.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class At:
    """Something that happened, at `now` on this node's monotonic clock."""

    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(At):
    """The time that a decision asked to be woken at has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen(At):
    """The store as it looks from here."""

    view: View


@dataclass(frozen=True, slots=True, kw_only=True)
class Leased(At):
    """The lease was renewed by a keepalive that was *sent* at `sent`; `held=False`: the store does not know it any more."""

    sent: float
    held: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers(Facts):
    """This node's workers as the agent knows them. Sent when work, generation, exit or stall changes, at a gang's first step,
    and at least every second (`agent/reports.py` says what is news).
    """

    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspected(At):
    """A neighbour's beats have stopped, says the detector; `silent_s` ago came the last."""

    node: str
    silent_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared(At):
    """A suspected neighbour is heard again."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found(At):
    """Facts, whoever found them: a log's line, a stack, a counter. `scene`: with them all workers of this node were looked at.
    A number: at the request of that revision; 0: since one of them had stalled; None: nobody looked.
    """

    evidence: tuple[Evidence, ...] = ()
    scene: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed(At):
    """What this node could not reach when it was asked to probe, and what it found on the way to the others.

    `more`: that takes a while, and comes with a second one.
    """

    generation: int
    unreachable: tuple[str, ...]
    results: tuple[Result, ...] = ()
    more: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried(At):
    """Which of the other ends of its cut ways this node reached, and which not, when it tested them beside the gang."""

    found: int
    reached: tuple[str, ...]
    unreachable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked(At):
    """An operator, through this daemon. `node` is None for the whole job."""

    verb: Verb
    node: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured(At):
    """An operator changed what may be changed while the daemon runs."""

    settings: Settings


Event = Tick | Seen | Leased | Workers | Suspected | Cleared | Found | Probed | Tried | Asked | Configured


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAlive(Action):
    """Renew the lease; take a new one if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish(Action):
    """Write this member's record under its lease."""

    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave(Action):
    """Stop the workers, revoke the lease and end the daemon with this exit code."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign(Action):
    """Become leader if the leader key is still at revision `over` (0: there is none)."""

    over: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch(Action):
    """Watch all records and quarantines (`everyone`), or only this node's own."""

    everyone: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Propose(Action):
    """Write the plan if the plan, the commit and the leader key are still at these revisions."""

    plan: Plan
    if_plan: int
    if_commit: int
    if_leader: int
    answers: int = 0  # the revision of a stop that was asked of an earlier run, and is done with; 0: none
    stops: str | None = None  # who asked for the stop before which this gang forms once more: it is asked for again
    confine: tuple[Quarantine, ...] = ()  # written with the plan, or not at all


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCommit(Action):
    """Make a saved step the newest checkpoint if the plan and the commit are still at these revisions."""

    step: int
    generation: int
    manifest: str
    if_plan: int
    if_commit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore(Action):
    """Write again what the store has lost of the job, if plan, commit and intent are still at these revisions: anybody may."""

    plan: Plan
    commit: Commit | None
    intent: Intent
    intent_generation: int
    if_plan: int
    if_commit: int
    if_intent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Confine(Action):
    """Write a quarantine, if the leader key is still at this revision."""

    quarantine: Quarantine
    if_leader: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect(Action):
    """Ask all nodes of the gang where their workers are, if the leader key is still at this revision."""

    generation: int
    if_leader: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAt(Action):
    """Look where this node's workers are; answer with `Found`, whose `scene` is `request`."""

    generation: int
    request: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask(Action):
    """Write down what an operator asked, for those whom it concerns. DRAIN names the life that shall leave."""

    verb: Verb
    node: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(Action):
    """Test the way to these nodes (name -> beat address); answer with `Probed`.

    `nodes`: where they and this node are tested (name -> host:port); `pairs`: this node's own, in the order to test them in.
    """

    generation: int
    targets: Mapping[str, str]
    nodes: Mapping[str, str] = field(default_factory=dict)
    pairs: tuple[Pair, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Try(Action):
    """Test the cut ways to these nodes (name -> beat address), while others train; answer with `Tried`.

    `doors`: where each takes a connection (name -> host:port), as far as is known.
    """

    found: int
    targets: Mapping[str, str]
    doors: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Say(Action):
    """One log event. Names are declared in `elasticrl.telemetry.events`."""

    event: str
    fields: Mapping[str, object] = field(default_factory=dict)
