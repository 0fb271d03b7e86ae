"""Evidence: one fact about a fault, whoever saw it. A log line, a worker's exit, a silent beat, a probe, a recorder's entry.

The one idea: a fact says two things apart from each other. Its `kind` is where it was seen; its `sign` is what it speaks
for. The sources (`elasticrl.diagnose`, the agent, the detector) know texts and counters and choose the sign; the judge
knows what signs mean and never looks at a text. So a new log format is a row in a table, and no rule changes.
"""

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING

from elasticrl.base import raised
from elasticrl.base.value import dataclass

if TYPE_CHECKING:  # a record carries facts, and facts are made of what a record says
    from elasticrl.contract.model import Exit, Stall


class Kind(StrEnum):
    """Where a fact was seen."""

    WATCHDOG_TIMEOUT = "watchdog_timeout"  # c10d: this collective did not finish in time
    WATCHDOG_STATUS = "watchdog_status"  # c10d: the last enqueued and the last completed work
    WATCHDOG_ERROR = "watchdog_error"  # c10d: the watchdog ended with an exception
    HEARTBEAT_MONITOR = "heartbeat_monitor"  # c10d: the watchdog itself made no progress
    DUMP_SIGNAL = "dump_signal"
    TEAR_DOWN = "tear_down"
    COLLECTIVE_MISMATCH = "collective_mismatch"
    NCCL_WARN = "nccl_warn"
    NCCL_ERROR = "nccl_error"  # what the call returned: ncclRemoteError, DistBackendError
    CARRIER = "carrier"  # libfabric, UCX: which of link, card and setting it is, they cannot tell
    CUDA_ERROR = "cuda_error"
    XID = "xid"
    KERNEL = "kernel"
    GLOO_ERROR = "gloo_error"
    TCPSTORE_ERROR = "tcpstore_error"
    RENDEZVOUS = "rendezvous"
    EXCEPTION = "exception"
    OOM = "oom"
    OOM_KILLER = "oom_killer"
    DISK = "disk"
    LIMIT = "limit"  # ulimit, /dev/shm
    EXIT = "exit"
    BEAT = "beat"
    STACK = "stack"
    RECORDER = "recorder"
    PROBE = "probe"
    NODE = "node"  # the lease, the neighbours
    VERSION = "version"
    STORE = "store"  # etcd


class Sign(StrEnum):
    """What a fact speaks for. `meanings.MEANINGS` says what each is worth."""

    NOISE = "noise"  # looks like a fault, and is printed on healthy starts too
    TOLD = "told"  # somebody was told to stop, to dump, to go down
    # It waited: these ranks are victims.
    WAITED = "waited"
    WATCHDOG_STUCK = "watchdog_stuck"
    SETUP_WAITED = "setup_waited"  # a communicator or group was never complete
    # Somebody else went away: these ranks are victims too.
    PEER_GONE = "peer_gone"
    STORE_GONE = "store_gone"
    CALL_FAILED = "call_failed"  # a communication call failed and does not say why
    # Ranks disagree, or one is elsewhere.
    MISMATCH = "mismatch"
    ABSENT = "absent"  # named as the one that did not come
    BEHIND = "behind"
    HOST_STUCK = "host_stuck"
    STOPPED = "stopped"
    ELSEWHERE = "elsewhere"  # outside of collectives at this moment: against it only if the others wait
    ENTERED = "entered"  # which collectives it had entered when its gang ended, for comparison
    LEFT = "left"  # it left a gang that the others were still forming: no cause itself, but it knows the cause
    SLOW = "slow"
    # Processes and nodes.
    KILLED = "killed"
    CRASHED = "crashed"
    ABORTED = "aborted"
    GONE = "gone"  # its process is not there any more, and how it ended nobody saw
    NODE_GONE = "node_gone"
    UNHEARD = "unheard"  # taken for dead by its peers, and alive: it says so itself
    # Machines.
    GPU_BROKEN = "gpu_broken"
    GPU_SUSPECT = "gpu_suspect"
    GPU_MEMORY = "gpu_memory"
    HOST_MEMORY = "host_memory"
    OOM_KILLED = "oom_killed"
    DISK_FULL = "disk_full"
    DISK_BROKEN = "disk_broken"
    SHM_FULL = "shm_full"
    RESOURCE_LIMIT = "resource_limit"
    # The way between them.
    LINK = "link"
    NIC = "nic"
    MTU = "mtu"
    # A probe's findings, with `node` and `peer`:
    UNREACHABLE = "unreachable"
    ONE_WAY = "one_way"  # packets from `node` do not arrive at `peer`; the other way they do
    LOSSY = "lossy"
    DELAYED = "delayed"
    FABRIC = "fabric"  # NCCL's own ways: P2P, NVLS, CUMEM
    NCCL_BROKEN = "nccl_broken"  # a probe's finding; gloo was fine
    HEALTHY = "healthy"  # a probe's finding
    # What people wrote.
    PROGRAM = "program"
    UNJOINED = "unjoined"  # a program that has never asked for its rank
    DIVERGED = "diverged"  # a replica's bits are not the others'
    MISCOMPUTED = "miscomputed"  # a lane's gradient is not what other nodes come to
    OTHER_FILES = "other_files"  # it has read another model than the others have, under the same name
    UNKEPT = "unkept"  # its node's vault has not taken its state
    BAD_ACCESS = "bad_access"
    RAISED = "raised"  # an exception that could be anybody's fault
    # Likely, and not sure:
    MISTAKE = "mistake"  # an exception that most often is the program's
    FAILED = "failed"  # an exception that names no cause
    CUT_OFF = "cut_off"  # a traceback that breaks off before it says what was raised
    MISFIT = "misfit"  # one library does not fit another, or the program does not fit it
    UNSUITED = "unsuited"  # the settings, or the place it runs in, do not suit it
    DAMAGED = "damaged"  # a file that is cut, or is not what its name says
    CRAMPED = "cramped"  # the words in which a library says that a GPU's memory was not enough, and other things
    OUTSIDE = "outside"  # a server outside of the cluster
    UNMET = "unmet"  # not all came to a rendezvous in time
    SETTING = "setting"
    VERSIONS = "versions"
    COORDINATOR = "coordinator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A collective that a rank has entered, by what must be the same on all ranks of its group.

    Example: Call(seq=41, what="all_reduce 64 Float", numel=64)
    """

    seq: int
    what: str
    numel: int | None = None  # that this rank brought


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One fact. Everything that its source does not say is None.

    Example: Evidence(kind=Kind.WATCHDOG_TIMEOUT, sign=Sign.WAITED, rank=7, op="ALLREDUCE", seq=4486, numel_in=1024,
    numel_out=1024, timeout_ms=600000, elapsed_ms=600013, at="10:42:28.858931807", line="[rank7]:[E419 ...")
    """

    kind: Kind
    sign: Sign
    rank: int | None = None
    node: str | None = None
    op: str | None = None
    seq: int | None = None
    numel_in: int | None = None
    numel_out: int | None = None
    timeout_ms: int | None = None
    elapsed_ms: int | None = None
    group: str | None = None
    last_enqueued: int | None = None
    last_completed: int | None = None
    ranks: tuple[int, ...] = ()  # others that it names: who mismatches, who is absent
    peer: str | None = None  # the far end: a node or an address
    detail: str = ""  # a word or two: "status 12", "Xid 79", "dataloader"
    at: str | None = None  # the time as it was found
    when: float | None = None  # seconds, comparable only with facts of the same clock
    clock: str = ""  # which clock `when` was read from
    line: str = ""
    line_no: int | None = None
    source: str = ""  # a file, or what saw it
    generation: int | None = None  # of the gang that it speaks of; None: of none (health), or not known
    calls: tuple[Call, ...] = ()  # the rank's last collectives of `group`, the newest last
    raised: str = ""  # the full name of the exception by which a worker ended
    phase: str = ""  # what the worker was doing, where it stood still
    check: str = ""  # the name of the check of a machine's health that says so

    def plain(self) -> dict[str, object]:
        """For JSON: the names that operators' scripts rely on, in a fixed order."""
        return {
            "kind": str(self.kind), "rank": self.rank, "op": self.op, "seq": self.seq,
            "numel_in": self.numel_in, "numel_out": self.numel_out,
            "timeout_ms": self.timeout_ms, "elapsed_ms": self.elapsed_ms, "group": self.group,
            "at": self.at, "line": self.line,
            "sign": str(self.sign), "node": self.node, "peer": self.peer, "ranks": list(self.ranks),
            "last_enqueued": self.last_enqueued, "last_completed": self.last_completed,
            "detail": self.detail, "source": self.source, "line_no": self.line_no, "when": self.when, "clock": self.clock,
            "generation": self.generation,
            "calls": [[call.seq, call.what, call.numel] for call in self.calls],
        }  # fmt: skip

    def __str__(self) -> str:
        who = f"rank {self.rank}: " if self.rank is not None else f"{self.node}: " if self.node else ""
        what = self.detail or str(self.sign).replace("_", " ")
        if self.op or self.seq is not None:
            what = f"{what} ({' '.join(str(x) for x in (self.op, self.seq) if x is not None)})"
        said = f" | {self.line.strip()[:160]}" if self.line else ""
        return f"{who}{str(self.kind).replace('_', ' ')}: {what}{said}"


def bounded(fact: Evidence, most: int = 200) -> Evidence:
    """The same with texts cut: what goes to the store must not be as long as a program pleases."""
    texts = {"detail": fact.detail, "line": fact.line, "source": fact.source}
    long = {name: text[: most - 1] + "…" for name, text in texts.items() if len(text) > most}
    return replace(fact, **long) if long else fact  # type: ignore[arg-type]


def of_exit(ended: "Exit", *, rank: int | None = None, node: str | None = None, when: float | None = None) -> Evidence:
    """A worker's end as a fact."""
    return Evidence(
        kind=Kind.EXIT, sign=_sign_of_exit(ended), rank=rank, node=node, when=when, clock="core", detail=ended.cause,
        source="agent", generation=ended.generation, raised=ended.raised, phase=ended.phase,
    )  # fmt: skip


def of_stall(
    stall: "Stall",
    *,
    rank: int | None = None,
    node: str | None = None,
    when: float | None = None,
    generation: int | None = None,
) -> Evidence:
    """A worker without progress as a fact.

    Where its beat says in which collective it waits, ranks can be compared: they count them alike.
    """
    fact = Evidence(
        kind=Kind.BEAT, sign=stall.sign, rank=rank, node=node, when=when, clock="core", detail=f"in {stall.phase}",
        line=str(stall), elapsed_ms=round(stall.for_s * 1000), timeout_ms=round(stall.budget_s * 1000), source="beats",
        generation=generation, phase=stall.phase,
    )  # fmt: skip
    counted = stall.waiting and stall.collective > 0
    return replace(fact, op=stall.op, seq=stall.collective, group=GANG) if counted else fact


HEALTH = "health"  # the source of facts that speak of a machine, and hold until the same source says otherwise
NOISE = frozenset({Sign.NOISE, Sign.TOLD, Sign.HEALTHY})  # no trouble
SAVE = "save"  # the phase in which a checkpoint is written
GANG = "gang"  # what the runtime's own count of collectives is called, beside torch's groups

#: Signals by what they say of the process: somebody killed it, it broke, it gave up, it was asked to go.
SIGNALS: Mapping[int, Sign] = {
    9: Sign.KILLED, 4: Sign.CRASHED, 7: Sign.CRASHED, 8: Sign.CRASHED, 11: Sign.CRASHED, 6: Sign.ABORTED,
    2: Sign.TOLD, 15: Sign.TOLD,
}  # fmt: skip

#: Exceptions that a healthy program raises because of somebody else.
NOT_ITS_OWN = frozenset({
    "DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "ConnectionResetError", "BrokenPipeError",
    "ConnectionAbortedError", "EOFError", "ChildFailedError", "SignalException", "CollectiveAborted",
})  # fmt: skip

#: Exceptions that no state of a machine brings about: whoever raises one has a mistake in the program or its data.
MISTAKES = frozenset({
    "ValueError", "KeyError", "TypeError", "IndexError", "AttributeError", "AssertionError", "NameError", "SyntaxError",
    "ZeroDivisionError", "NotImplementedError", "UnboundLocalError", "RecursionError", "OverflowError", "ValidationError",
    "ConfigAttributeError", "IndentationError", "CompilationError",
})  # fmt: skip

#: Exceptions of the runtime's own, which are not the program's. By their full names: a program may call its own alike.
OURS: Mapping[str, Sign] = {
    "elasticrl.runtime.alike.Diverged": Sign.DIVERGED,
    "elasticrl.runtime.audited.Miscomputed": Sign.MISCOMPUTED,
    "elasticrl.hf.frozen.OtherFiles": Sign.OTHER_FILES,
    "elasticrl.ppo.frozen.OtherFiles": Sign.OTHER_FILES,
    "elasticrl.runtime.vault.errors.VaultError": Sign.UNKEPT,
}


def _sign_of_exit(ended: "Exit") -> Sign:
    if ended.sign is not None:
        return ended.sign
    if ended.signal:
        # Whom the agent asks to go has not failed: here a SIGTERM came from elsewhere.
        sign = SIGNALS.get(ended.signal, Sign.KILLED)
        return Sign.KILLED if sign is Sign.TOLD else sign
    if not ended.own or raised.short(ended.raised) in NOT_ITS_OWN:
        return Sign.PEER_GONE
    return OURS.get(ended.raised, Sign.PROGRAM)


def mistaken(fact: Evidence) -> bool:
    """Whether it is an end by an exception that only the program or its data can have brought about."""
    return fact.kind is Kind.EXIT and fact.sign is Sign.PROGRAM and raised.short(fact.raised) in MISTAKES
