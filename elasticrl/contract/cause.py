"""Why a plan was made, as values; and the sentence for each of them, which stands nowhere else.

The one idea: rules, reports and tests ask for a cause's kind and for whom it names. The sentence is for people alone: it is
rendered here, at the very end, and nothing reads it back. What somebody else has said (a program's exception, a verdict) is
carried along in `said`, is shown as it is, and is never looked into.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from elasticrl.base.member import Member
from elasticrl.base.value import dataclass
from elasticrl.base.words import count, some
from elasticrl.contract.verdict import Fault, Verdict

SHOWN: Final = 3  # causes that a sentence names; of more it says how many
KEPT: Final = 64  # causes that a plan carries: what has befallen thousands of nodes at once is told of the first


class Why(StrEnum):
    """The kinds of causes."""

    # The job as a whole.
    BEGUN = "begun"  # there was no plan before
    BEGUN_AGAIN = "begun_again"  # it had ended, and was started again
    ADOPTED = "adopted"  # an operator has it go on from its checkpoints beside an empty store
    STOPPED = "stopped"  # by an operator
    PAUSED = "paused"  # by an operator
    RESUMED = "resumed"  # after a pause
    WENT_ON = "went_on"  # after a hold
    UNSAVED = "unsaved"  # it stops, and no gang is there to save its last steps
    FINISHED = "finished"  # all steps are made
    SCRIPT_ENDED = "script_ended"  # with exit code 0, on all ranks
    ENDED_AT_ONCE = "ended_at_once"  # the script failed as it was started for the first time
    CRASH_LOOP = "crash_loop"
    POLICY = "policy"  # what was proven ends the job, as the operator has configured
    STORE_LOST = "store_lost"  # etcd lost its data, and a node has written the plan again
    STORE_SET_BACK = "store_set_back"
    # What befell a seat.
    SILENT = "silent"  # its neighbours do not hear it
    EXPIRED = "expired"  # its lease ran out
    REBORN = "reborn"  # it came back in another life
    QUARANTINED = "quarantined"
    LEFT = "left"  # it leaves in order: drained, or its daemon was stopped
    FAILED = "failed"  # a worker ended
    WORKERLESS = "workerless"  # its workers have ended, and it has no new ones yet
    FAILED_AGAIN = "failed_again"  # its worker failed at the same step too often
    # What was found out.
    FOUND = "found"  # the verdict
    CAPPED = "capped"  # there is reason to keep a node out, and a cap forbids it
    UNLIKE = "unlike"  # a node that was let in computes other bits
    UNREACHED = "unreached"  # out of reach in a probe
    ALL_REACHED = "all_reached"  # a probe found every node in reach
    # A gang that does not form, or does not go on.
    TOO_FEW = "too_few"
    UNSPARED = "unspared"  # it leaves, and the others are too few without it
    SOLE_KEEPERS = "sole_keepers"  # the newest steps are with nodes that are not there
    FORGONE = "forgone"  # they are given up
    STALLED = "stalled"  # nobody has been found to blame
    STALLED_GROWING = "stalled_growing"
    BROKE_GROWING = "broke_growing"
    BROKE_FORMING = "broke_forming"
    UNJOINED = "unjoined"  # who has not joined within its time
    UNFORMED = "unformed"  # all have joined, and do not train
    UNCALLED = "uncalled"  # the program has not asked for its ranks
    UNPARTED = "unparted"  # a gang has not let in those who were there
    CUT = "cut"  # nodes on both sides accuse each other
    PIECES = "pieces"
    RETESTED = "retested"  # what would put nodes out is tested once more
    # Growth, and what all have to hear.
    JOINED = "joined"
    VAULT_MOVED = "vault_moved"
    WITHOUT_LOADING = "without_loading"  # those who load their model are not waited for
    AFRESH = "afresh"  # all workers are started again
    # The backend.
    ON_GLOO = "on_gloo"  # it goes on over gloo
    PRICE = "price"  # what that costs
    RECHECKED = "rechecked"  # the nodes test whether NCCL works again
    NCCL_WELL = "nccl_well"
    NCCL_ILL = "nccl_ill"


#: Kinds by which a gang goes on though nothing has broken: nodes leave in order.
ORDERLY: Final = frozenset({Why.LEFT, Why.UNSPARED})
#: Kinds by which a gang goes on that held.
GOES_ON: Final = frozenset({Why.RESUMED, Why.WENT_ON})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One reason for a plan, or for a quarantine.

    Example: Cause(why=Why.SILENT, who=(Member(node="n03", incarnation=1),), nodes=("n02", "n04"))
    """

    why: Why
    who: tuple[Member, ...] = ()  # whom it befell
    nodes: tuple[str, ...] = ()  # who says so, who asked for it, or what else is named
    step: int = 0
    count: int = 0  # how many, or how often; of a worker that failed the number of its team, where there are teams
    of: int = 0  # how many there may be, or have to be; of teams how many there were
    seconds: float = 0.0
    setting: str = ""  # the key of the configuration that decides
    fault: Fault | None = None  # of the verdict
    signal: int = 0  # that ended a worker
    raised: str = ""  # the name of the exception that did
    said: str = ""  # in somebody else's words: shown, and never read

    def __str__(self) -> str:
        return sentence(self)


def found(verdict: Verdict) -> Cause:
    """What a verdict says."""
    return Cause(why=Why.FOUND, nodes=verdict.nodes, fault=verdict.fault, said=verdict.said)


def names(causes: Iterable[Cause], *kinds: Why) -> frozenset[Member]:
    """Whom causes of these kinds name.

    >>> left = Cause(why=Why.LEFT, who=(Member(node="n2", incarnation=1),))
    >>> sorted(map(str, names((left, Cause(why=Why.STALLED)), Why.LEFT)))
    ['n2/1']
    """
    return frozenset(member for cause in causes if cause.why in kinds for member in cause.who)


def culprits(causes: Iterable[Cause]) -> tuple[str, ...]:
    """The nodes that causes are about.

    >>> culprits([Cause(why=Why.SILENT, who=(Member(node="n2", incarnation=1),), nodes=("n0",))])
    ('n2',)
    """
    found = [name for cause in causes if cause.why is Why.FOUND for name in cause.nodes]
    return tuple(sorted({*found, *(member.node for cause in causes for member in cause.who)}))


def orderly(kinds: Collection[str]) -> bool:
    """Was a plan with causes of these kinds made because nodes leave in order, and for nothing else?

    >>> orderly(["left"]), orderly(["left", "silent"]), orderly([])
    (True, False, False)
    """
    return bool(kinds) and all(kind in ORDERLY for kind in kinds)


def goes_on(kinds: Collection[str]) -> bool:
    """Is it a plan by which a gang goes on that held?"""
    return any(kind in GOES_ON for kind in kinds)


#: Kinds that name the team of the worker that failed, where workers share a model.
TEAMED: Final = frozenset({Why.FAILED, Why.FOUND})

#: What each kind says. A name in braces is a field; `who` and `nodes` are listed, of many the first.
SENTENCES: Final[Mapping[Why, str]] = MappingProxyType(
    {
        Why.BEGUN: "first plan",
        Why.BEGUN_AGAIN: "started again from step {step:,} (it had ended: {said})",
        Why.ADOPTED: "the store had lost the job: going on from {said}, as asked by --adopt",
        Why.STOPPED: "stopped by {nodes}",
        Why.UNSAVED: "the steps after {step}, up to {count}, cannot be saved: no workers are running",
        Why.PAUSED: "paused by {nodes}",
        Why.RESUMED: "resumed after the pause",
        Why.WENT_ON: "going on",
        Why.FINISHED: "all {step} steps are done",
        Why.SCRIPT_ENDED: "the script has ended with exit code 0 on all ranks",
        Why.ENDED_AT_ONCE: "the script failed {seconds:.1f} s after its first start, so it is not started again: {who}: {said}",
        Why.CRASH_LOOP: "crash loop: {said}, {count} times at step {step} without progress",
        Why.POLICY: "{said}",
        Why.STORE_LOST: "the store lost its data, and {nodes} wrote the plan again",
        Why.STORE_SET_BACK: "the store was set back to an earlier state, and {nodes} wrote the plan again",
        Why.SILENT: "{who} stopped responding (confirmed by {nodes})",
        Why.EXPIRED: "{who} was lost (its lease expired)",
        Why.REBORN: "{who} was restarted as {said}",
        Why.QUARANTINED: "{who} is quarantined: {said}",
        Why.LEFT: "{who} left",
        Why.FAILED: "{who}: {said}",
        Why.WORKERLESS: "{who} has no running workers yet",
        Why.FAILED_AGAIN: "a worker of {who} failed {count} times at step {step}",
        Why.FOUND: "{who}: {said}",
        Why.CAPPED: "{who} is not quarantined: at most {of} nodes may be quarantined at once ({setting})",
        Why.UNLIKE: "{nodes} computed different bits than the job (lanes.exact: warn)",
        Why.UNREACHED: "{who} was out of reach in a probe",
        Why.ALL_REACHED: "a probe found every node in reach",
        Why.TOO_FEW: "holding: {count} of the {of} required nodes are up",
        Why.UNSPARED: "{who} is leaving, and too few nodes are left without it",
        Why.SOLE_KEEPERS: "holding for up to {seconds:g} s: only {nodes} had the steps after {step} in memory",
        Why.FORGONE: "the steps after {step} were lost with {nodes}",
        Why.STALLED: "workers are stalled, and no culprit was found",
        Why.STALLED_GROWING: "{who} {said} before the new nodes had joined",
        Why.BROKE_GROWING: "the process group broke before the new nodes had joined",
        Why.BROKE_FORMING: "the process group broke{again} before it had formed",
        Why.UNJOINED: "{who} did not join within {setting}",
        Why.UNFORMED: "the workers joined but did not form a process group within {setting}",
        Why.UNCALLED: "the program has not called elasticrl.runtime.join()",
        Why.UNPARTED: "the running workers did not let the new nodes in",
        Why.CUT: "two groups of nodes each report that the other does not respond",
        Why.PIECES: "the network between the nodes is split",
        Why.RETESTED: "some connections of {nodes} work and others do not: testing them again",
        Why.JOINED: "{who} joined",
        Why.VAULT_MOVED: "the vault of {who} moved to another port",
        Why.WITHOUT_LOADING: "forming without the nodes that are still loading",
        Why.AFRESH: "restarting all workers",
        Why.ON_GLOO: "training over gloo until a probe finds NCCL working",
        Why.PRICE: "{said}",
        Why.RECHECKED: "training runs over gloo: testing whether NCCL works again",
        Why.NCCL_WELL: "a probe found NCCL working: switching back from gloo",
        Why.NCCL_ILL: "a probe found NCCL not working: staying on gloo",
    }
)


#: What is said of a member that is gone where its name stands beside.
GONE: Final[Mapping[Why, str]] = MappingProxyType(
    {
        Why.SILENT: "no heartbeats received by {nodes}",
        Why.EXPIRED: "its lease expired",
        Why.REBORN: "it was restarted as {said}",
    }
)


def gone(cause: Cause) -> str:
    """How a member went, without its name.

    >>> gone(Cause(why=Why.SILENT, nodes=("n02", "n04")))
    'no heartbeats received by n02 and n04'
    """
    return GONE[cause.why].format(nodes=some(cause.nodes), said=cause.said)


def sentence(cause: Cause) -> str:
    """One cause in words.

    >>> n3 = Member(node="n03", incarnation=1)
    >>> sentence(Cause(why=Why.SILENT, who=(n3,), nodes=("n02", "n04")))
    'n03/1 stopped responding (confirmed by n02 and n04)'
    >>> sentence(Cause(why=Why.FAILED, who=(n3,), said="exit code 1: ValueError: {who} left"))
    'n03/1: exit code 1: ValueError: {who} left'
    >>> sentence(Cause(why=Why.FAILED, who=(n3,), said="signal 9 (SIGKILL)", count=1, of=4))
    'n03/1, team 1: signal 9 (SIGKILL)'
    >>> sentence(Cause(why=Why.ALL_REACHED, said="gloo cannot carry it"))
    'a probe found every node in reach (gloo cannot carry it)'
    """
    text = SENTENCES[cause.why]
    if not cause.who:
        text = text.removeprefix("{who}: ")
    team = f", team {cause.count}" if cause.why in TEAMED and cause.of else ""
    told = text.format(
        who=f"{some([str(member) for member in cause.who])}{team}",
        nodes=some(cause.nodes),
        step=cause.step, count=cause.count, of=cause.of, seconds=cause.seconds, setting=cause.setting, said=cause.said,
        again=" again" if cause.count > 1 else "",
    )  # fmt: skip
    return f"{told} ({cause.said})" if cause.said and "{said}" not in SENTENCES[cause.why] else told


def told(causes: Sequence[Cause], tail: str = "") -> str:
    """All of them in one line, of many the first; with what follows from them.

    >>> told([Cause(why=Why.STALLED)], "probing")
    'workers are stalled, and no culprit was found; probing'
    """
    shown = [sentence(cause) for cause in causes[:SHOWN]] if len(causes) > SHOWN + 1 else list(map(sentence, causes))
    more = [f"and {count(len(causes) - SHOWN, 'more cause')}"] if len(causes) > SHOWN + 1 else []
    return "; ".join(filter(None, [*shown, *more, tail]))
