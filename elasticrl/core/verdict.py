"""From evidence to a verdict: which class of fault, who, why, how sure, what to do. A pure function of its arguments.

The one idea: facts have ranks of their own. A *cause* (a GPU off the bus, memory that ran out, a rank that entered another
collective) explains *consequences* (a peer that is gone),
and both explain *waits* (a watchdog's timeout). The loudest facts
are waits: every innocent rank prints them. So waits never name the one who waited, a consequence speaks only where there is
no cause, and among causes the earliest wins. What is only likely is said with confidence `low`, and names nobody.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType

from elasticrl.core.evidence import GANG, Call, Evidence, Kind, Sign
from elasticrl.core.reach import Reach, single_out


class Fault(StrEnum):
    """The class of a fault; `policy` in the config has one action for each."""

    DEAD_RANK = "dead_rank"
    DEAD_NODE = "dead_node"
    NETWORK = "network"
    FABRIC = "fabric"  # gloo works, NCCL does not
    DESYNC = "desync"
    STRAGGLER = "straggler"
    HOST_HANG = "host_hang"
    OOM_GPU = "oom_gpu"
    OOM_HOST = "oom_host"
    DISK = "disk"
    GPU_FAULT = "gpu_fault"
    CONFIG = "config"
    VERSION_MISMATCH = "version_mismatch"
    COORDINATOR = "coordinator"
    DIVERGENCE = "divergence"  # silent data corruption
    USER_ERROR = "user_error"
    UNKNOWN = "unknown"


class Confidence(StrEnum):
    """How sure a verdict is. `low`: likely by what such jobs turned out to have; act on it only with a person."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known beside the evidence.

    Example: Facts(world=8, heard=frozenset(range(8)), nodes={0: "n00", 1: "n00"})
    """

    world: int | None = None
    heard: frozenset[int] = frozenset()  # ranks whose output was seen, whatever it said
    nodes: Mapping[int, str] = field(default_factory=dict)  # where each rank runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer.

    Example: Verdict(fault=Fault.HOST_HANG, ranks=(3,), nodes=("n01",), cause="rank 3 has been in its dataloader for 12 s
    while 7 others wait in ALLREDUCE 4486", confidence=Confidence.HIGH, remedy="...", because=(...), against=(...))
    """

    fault: Fault
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    cause: str
    confidence: Confidence = Confidence.LOW
    remedy: str = ""
    because: tuple[Evidence, ...] = ()
    against: tuple[str, ...] = ()  # what would contradict it, and what was seen that might

    @property
    def said(self) -> str:
        """The cause, with the node that it is about."""
        lacks = [node for node in self.nodes if node not in self.cause]
        return f"{', '.join(lacks)}: {self.cause}" if lacks else self.cause

    def plain(self) -> dict[str, object]:
        """For JSON."""
        return {
            "class": str(self.fault),
            "culprit": {"ranks": list(self.ranks), "nodes": list(self.nodes)},
            "cause": self.cause,
            "confidence": str(self.confidence),
            "remedy": self.remedy,
            "because": [str(fact) for fact in self.because],
            "against": list(self.against),
        }


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a sign says if nothing explains it: the class, how sure, and in which words."""

    fault: Fault
    confidence: Confidence
    words: str  # after the culprit's name
    remedy: str
    contradicted_by: str
    depth: int = 0  # 0: a cause; 1: how it showed, which a cause nearby explains
    soft: bool = False  # a program can survive it, so it must not outlive the wait


_LOW, _MEDIUM, _HIGH = Confidence.LOW, Confidence.MEDIUM, Confidence.HIGH

#: Signs that can be a cause. All others are consequences, waits or noise.
MEANINGS: Mapping[Sign, Meaning] = MappingProxyType({
    Sign.GPU_BROKEN: Meaning(
        Fault.GPU_FAULT, _HIGH, "reported a hardware fault of its GPU",
        "Take the node out, run the vendor's diagnostics (dcgmi diag, nvidia-smi -q), replace the GPU. Training can go on "
        "without it.",
        "the same GPU passes diagnostics under load, or the report is older than this run",
    ),
    Sign.GPU_SUSPECT: Meaning(
        Fault.GPU_FAULT, _LOW, "lost its GPU without saying why",
        "Look for Xid lines in the kernel log of the node; run diagnostics before it comes back.",
        "the kernel log shows no Xid and the program fails at the same place on another node", depth=1,
    ),
    Sign.GPU_MEMORY: Meaning(
        Fault.OOM_GPU, _HIGH, "ran out of GPU memory",
        "Smaller micro batches or sequences, activation checkpointing, more shards; look for a leftover process on that "
        "GPU.",
        "the program caught it and went on for many steps", soft=True,
    ),
    Sign.HOST_MEMORY: Meaning(
        Fault.OOM_HOST, _MEDIUM, "could not get host memory",
        "Fewer dataloader workers, less pinned or mapped memory, a higher cgroup limit or vm.max_map_count; check "
        "MemAvailable per node.",
        "memory was plentiful then, and the program caught the error and went on", soft=True,
    ),
    Sign.OOM_KILLED: Meaning(
        Fault.OOM_HOST, _HIGH, "was killed for memory by the kernel",
        "Give the job more host memory or fewer dataloader workers; keep other jobs off the node; check the cgroup's "
        "limit.",
        "the killed process was none of this job's",
    ),
    Sign.SHM_FULL: Meaning(
        Fault.CONFIG, _MEDIUM, "ran out of shared memory (/dev/shm)",
        "Start the container with --shm-size=16g or --ipc=host (Kubernetes: an emptyDir of medium Memory), or fewer "
        "dataloader workers.",
        "df /dev/shm shows space while it fails", soft=True,
    ),
    Sign.RESOURCE_LIMIT: Meaning(
        Fault.CONFIG, _MEDIUM, "met a resource limit",
        "Raise the limit where the job starts (ulimit -l unlimited, ulimit -n 1048576, TasksMax in the unit or container).",
        "the limit is high and far from used", soft=True,
    ),
    Sign.DISK_FULL: Meaning(
        Fault.DISK, _HIGH, "could not write: the disk is full",
        "Free space, keep fewer checkpoints, or move them; the next save will fail the same way until then.",
        "df shows space and inodes on the file system it wrote to", soft=True,
    ),
    Sign.DISK_BROKEN: Meaning(
        Fault.DISK, _MEDIUM, "met a file system that failed or turned read-only",
        "Check the kernel log and the mount on that node; for NFS the server; move checkpoints to a healthy file system.",
        "the file system is healthy on all nodes", soft=True,
    ),
    Sign.MISMATCH: Meaning(
        Fault.DESYNC, _HIGH, "entered a collective that does not match the others'",
        "Find the branch that depends on the rank or on its data: unequal batches, a conditional collective, another "
        "model or order. "
        "TORCH_DISTRIBUTED_DEBUG=DETAIL names the call.",
        "all ranks show the same operation, sizes and order for this collective",
    ),
    Sign.VERSIONS: Meaning(
        Fault.VERSION_MISMATCH, _HIGH, "runs other versions than it needs or its peers have",
        "Install the same torch, NCCL, CUDA and driver on all nodes (elasticrl doctor compares them).",
        "versions are equal on all nodes and match the driver",
    ),
    Sign.SETTING: Meaning(
        Fault.CONFIG, _MEDIUM, "cannot work with the settings it was given",
        "Correct the setting named in the line: one rank per GPU, an interface that exists, a free port. elasticrl doctor "
        "checks them.",
        "the same settings work on the same nodes",
    ),
    Sign.PROGRAM: Meaning(
        Fault.USER_ERROR, _MEDIUM, "raised an exception of the program's own",
        "Fix the program at the line of the traceback; a restart would repeat it.",
        "the exception was caught, or came after the collective had failed", soft=True,
    ),
    Sign.DIVERGED: Meaning(
        Fault.DIVERGENCE, _HIGH, "computes with other bits than its replicas: silent data corruption",
        "Keep its node out and have memory and processor tested (memtest, dcgmi diag); its state was restored from others.",
        "the program uses something that is not deterministic, or the ranks' versions differ",
    ),
    Sign.BAD_ACCESS: Meaning(
        Fault.USER_ERROR, _LOW, "had a kernel access memory that is not its own",
        "Run the step under compute-sanitizer or CUDA_LAUNCH_BLOCKING=1; if only one GPU ever does it, look for its Xid "
        "and ECC lines.",
        "it happens on one GPU only, whatever runs there (then it is the GPU)", depth=1,
    ),
    Sign.RAISED: Meaning(
        Fault.UNKNOWN, _LOW, "raised an error that does not tell its cause",
        "Read the traceback of that rank; set NCCL_DEBUG=INFO for the next run if the error is NCCL's.",
        "another rank failed earlier", depth=1, soft=True,
    ),
    Sign.NODE_GONE: Meaning(
        Fault.DEAD_NODE, _HIGH, "went away with all of its processes",
        "Training goes on without it; look at power, kernel log and console of the node.",
        "its daemon is heard by other nodes (then the path to it is at fault)", depth=1,
    ),
    Sign.UNHEARD: Meaning(
        Fault.NETWORK, _HIGH, "lives, and its peers do not hear it",
        "Check its link, switch port, cable and firewall, and the route to it (ip -s link, ethtool); the store was reached "
        "another way, or later.",
        "its daemon stood still meanwhile: then its host is at fault, not the way to it",
    ),
    Sign.KILLED: Meaning(
        Fault.DEAD_RANK, _MEDIUM, "died: it was killed from outside",
        "See who sent the signal: OOM killer (kernel log), scheduler, an operator. The others only waited for it.",
        "it ended after the others had failed (then it was torn down with them)", depth=1,
    ),
    Sign.CRASHED: Meaning(
        Fault.DEAD_RANK, _MEDIUM, "died of a signal of its own making",
        "Look for the core dump and the native stack of that rank; a library mismatch or a native extension is likely.",
        "it ended after the others had failed", depth=1,
    ),
    Sign.STOPPED: Meaning(
        Fault.HOST_HANG, _HIGH, "is stopped (the kernel says so) and cannot run on",
        "Somebody sent SIGSTOP or a debugger holds it; it is killed and replaced.",
        "its process state is not T", depth=1,
    ),
    Sign.HOST_STUCK: Meaning(
        Fault.HOST_HANG, _HIGH, "is stuck on its host, outside of collectives",
        "See its stack: dataloader, file system, save, compilation or a lock. Others only wait for it; raise the phase's "
        "budget if it was "
        "merely slow.",
        "its stack shows it inside the same collective as the others", depth=1,
    ),
    Sign.ABSENT: Meaning(
        Fault.HOST_HANG, _MEDIUM, "did not join the collective that the others wait in",
        "See what that rank does instead: its stack, its last log lines, its data.",
        "it shows as waiting in the same collective", depth=1,
    ),
    Sign.SLOW: Meaning(
        Fault.STRAGGLER, _MEDIUM, "is slower than the rest of its gang in the same phase",
        "Compare clocks, throttling, load and steal of its node with a fast one; replace it if it stays slow.",
        "its times fall back to the gang's median", depth=1,
    ),
    Sign.LINK: Meaning(
        Fault.NETWORK, _MEDIUM, "had a connection fail in the network",
        "Check link, switch, cable, route and MTU between the two (ibstat, ip -s link, ping -M do -s 8972); probe the "
        "pair.",
        "gloo and ping between the two are clean (then NCCL's own way is at fault), or the peer had died before", depth=1,
    ),
    Sign.NIC: Meaning(
        Fault.NETWORK, _MEDIUM, "cannot use its network device",
        "Check that the device is visible and usable where the job runs (container devices, GID, NCCL_IB_HCA); "
        "ibv_devinfo there.",
        "ibv_devinfo and a bandwidth test work from inside the same container", depth=1,
    ),
    Sign.MTU: Meaning(
        Fault.NETWORK, _HIGH, "drops large packets while small ones pass (MTU black hole)",
        "Set the same MTU on both ends and every switch between them, or lower it on the job's interface.",
        "full-size packets pass with don't-fragment set", depth=1,
    ),
    Sign.FABRIC: Meaning(
        Fault.FABRIC, _MEDIUM, "failed in NCCL's own way between GPUs (P2P, NVLS, RDMA)",
        "Try NCCL_P2P_DISABLE=1 or NCCL_NVLS_ENABLE=0 to prove it; then IOMMU/ACS, driver, fabric manager, container "
        "isolation.",
        "gloo between the same nodes fails too (then it is the network)", depth=1,
    ),
    Sign.COORDINATOR: Meaning(
        Fault.COORDINATOR, _MEDIUM, "lost the store that coordinates the job",
        "See why the process or node that hosts the store ended; put the store where no worker's death can take it (etcd).",
        "the store was reachable from other nodes at that time", depth=1,
    ),
})  # fmt: skip

#: What is left when there is no cause: consequences of something that the evidence does not show.
CONSEQUENCES: Mapping[Sign, Meaning] = MappingProxyType({
    Sign.PEER_GONE: Meaning(
        Fault.DEAD_RANK, _LOW, "a peer went away: its process ended or the way to it was cut; those that report it are "
        "victims",
        "Look at the far end's own log and its node's kernel log at that time; the cause is there.",
        "the far end's process lives (then the network between them is at fault)",
    ),
    Sign.STORE_GONE: Meaning(
        Fault.COORDINATOR, _LOW, "the process that hosts the TCPStore (most often rank 0) is gone; the real failure is "
        "earlier, in its log",
        "Read the log of rank 0 and of its launcher before this time.",
        "the store's host lives and its port answers",
    ),
    Sign.ABORTED: Meaning(
        Fault.DEAD_RANK, _LOW, "a rank ended by abort(), as the watchdog does after an error that is not shown here",
        "Read what that rank printed before it aborted.", "its log shows an error of its own",
    ),
    Sign.CALL_FAILED: Meaning(
        Fault.NETWORK, _LOW, "a communication call failed in the system (socket, interface, memory) while connecting",
        "Run again with NCCL_DEBUG=INFO; name the right interfaces (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME); check "
        "firewall and ulimits.",
        "the same nodes connect over the same interfaces with gloo",
    ),
})  # fmt: skip

#: Where a fact comes from decides how far it is believed: what the agent and the kernel saw, before what a log claims.
HARD = frozenset({Kind.EXIT, Kind.BEAT, Kind.RECORDER, Kind.PROBE, Kind.NODE, Kind.STACK})
SNAPSHOTS = frozenset({Kind.STACK, Kind.RECORDER})  # taken of all ranks at one moment
GOING_ON = SNAPSHOTS | {Kind.BEAT}  # a wait that such a fact speaks of has not ended with it
WAITS = frozenset({Sign.WAITED, Sign.WATCHDOG_STUCK, Sign.SETUP_WAITED})
#: Operations in which every rank must bring the same number of elements.
EVEN = frozenset({"ALLREDUCE", "BROADCAST", "_ALLGATHER_BASE", "ALLGATHER", "COALESCED", "_REDUCE_SCATTER_BASE",
                  "REDUCE_SCATTER", "ALLREDUCE_COALESCED", "REDUCE", "BARRIER"})  # fmt: skip
_EVEN = frozenset(name.replace("_", "") for name in EVEN)  # recorders write all_reduce

WATCHDOGS = frozenset({
    Kind.WATCHDOG_TIMEOUT, Kind.WATCHDOG_STATUS, Kind.WATCHDOG_ERROR, Kind.HEARTBEAT_MONITOR, Kind.TEAR_DOWN,
})  # fmt: skip
#: Ends and silences that have nothing to do with how much room a disk has.
PLAIN = frozenset({Sign.NODE_GONE, Sign.UNHEARD, Sign.KILLED, Sign.STOPPED, Sign.OOM_KILLED, Sign.DIVERGED})

NEAR_S = 60.0  # a cause is looked for this long after what it shows as
LATE_S = 2.0  # what came this long after the first wait ended is a consequence of the end
SHORT_TIMEOUT_MS = 120_000  # a collective timeout that a save or an evaluation on one rank easily exceeds
LATE_RUN = 100_000  # collectives after which preparation is long over


def judge(evidence: Iterable[Evidence], facts: Facts | None = None) -> Verdict:
    """The verdict on a fault. The evidence is in the order it was found in, as far as there is one."""
    case = Case(tuple(evidence), facts or Facts())
    for rule in RULES:
        if verdict := rule(case):
            return replace(verdict, nodes=verdict.nodes or case.nodes_of(verdict.ranks))
    return Verdict(
        fault=Fault.UNKNOWN,
        cause="nothing in the evidence shows a failure" if not case.serious else "the evidence does not tell a cause",
        remedy="Collect the logs of all ranks, the kernel log, and the flight recorder (TORCH_FR_BUFFER_SIZE=2000).",
        because=case.serious[:3],
        against=("any line of another rank that failed earlier",),
    )


@dataclass(frozen=True)  # no slots: what follows is computed once
class Case:
    """The evidence, sorted into what it can be."""

    evidence: tuple[Evidence, ...]
    facts: Facts

    @cached_property
    def serious(self) -> tuple[Evidence, ...]:
        """All but noise."""
        return tuple(fact for fact in self.evidence if fact.sign not in {Sign.NOISE, Sign.TOLD, Sign.HEALTHY})

    @cached_property
    def waits(self) -> tuple[Evidence, ...]:
        """What the victims say."""
        return tuple(fact for fact in self.evidence if fact.sign in WAITS)

    @cached_property
    def waiting(self) -> frozenset[int]:
        """The ranks that waited."""
        named = {rank for fact in self.evidence if fact.sign is Sign.WAITED for rank in fact.ranks}
        return frozenset(named | {fact.rank for fact in self.waits if fact.rank is not None})

    @cached_property
    def causes(self) -> tuple[Evidence, ...]:
        """What can be a cause, without what was survived and what came after the end."""
        return tuple(
            f
            for f in self.evidence
            if f.sign in MEANINGS
            and not self.survived(f)
            and not self.late(f)
            and self.believed(f)
            and not (self.plain and f.source == "health" and f.kind in {Kind.DISK, Kind.LIMIT})
        )

    @cached_property
    def plain(self) -> bool:
        """Whether it was seen how the gang was broken, in a way that no full disk or limit of a machine explains."""
        ways = any(f.kind is Kind.PROBE and any(f.sign in signs for signs, _ in TROUBLE) for f in self.evidence)
        return ways or self.parted is not None or any(_witnessed(f) and f.sign in PLAIN for f in self.evidence)

    @cached_property
    def accused(self) -> frozenset[int]:
        """Ranks that hard facts speak against."""
        hard = (f for f in self.evidence if f.kind in HARD and f.source and f.sign in MEANINGS)
        named = frozenset(rank for f in hard for rank in ((f.rank,) if f.rank is not None else f.ranks))
        return named | self.aborted | frozenset(self.away) | frozenset(self.parted.odd if self.parted else ())

    @cached_property
    def aborted(self) -> frozenset[int]:
        """Ranks that were seen to end by abort(), and not because their watchdog had waited for others."""
        told = frozenset(
            f.rank for f in self.evidence if f.sign is Sign.ABORTED and _witnessed(f) and f.rank is not None
        )
        return told - {f.rank for f in self.evidence if f.kind in WATCHDOGS}

    @cached_property
    def parted(self) -> "Parted | None":
        """Where the recorders of the ranks differ, if they do."""
        return _part(self.evidence)

    @cached_property
    def seen_waiting(self) -> frozenset[int]:
        """Ranks that were seen in a collective, whatever their logs say."""
        return frozenset(f.rank for f in self.waits if f.kind in GOING_ON and _witnessed(f) and f.rank is not None)

    @cached_property
    def away(self) -> Mapping[int, Evidence]:
        """Who was seen outside of collectives while most others were seen in one. When most are elsewhere, that a few wait
        proves nothing about anybody.
        """
        found = {f.rank: f for f in self.evidence if f.sign is Sign.ELSEWHERE and f.rank is not None}
        there = {f.rank for f in self.waits if f.kind in SNAPSHOTS and f.rank is not None} - set(found)
        return found if found and there and len(found) <= len(there) else {}

    def survived(self, fact: Evidence) -> bool:
        """Whether its rank went on working after it: it waited later than this, in a wait that began after this."""
        if not MEANINGS[fact.sign].soft or fact.rank is None:
            return False
        if not _witnessed(fact) and fact.rank in self.seen_waiting:
            return True  # it goes on, and keeps up with the others: its log is noise, however often it says so
        if fact.when is None:
            return False
        return any(
            wait.rank == fact.rank and wait.when is not None and wait.clock == fact.clock
            and wait.when - (wait.elapsed_ms or 0) / 1000 > fact.when + LATE_S
            for wait in self.waits
        )  # fmt: skip

    def late(self, fact: Evidence) -> bool:
        """Whether it came only after a wait had ended, and so is part of the tear-down. That a wait has ended is what a log
        claims: nothing that was seen since is made light of for that.
        """
        if fact.when is None or fact.kind is Kind.XID or _witnessed(fact):
            return False
        ends = [
            wait.when
            for wait in self.waits
            if wait.when is not None and wait.clock == fact.clock and wait.kind not in GOING_ON
        ]
        return bool(ends) and fact.when > min(ends) + LATE_S

    def believed(self, fact: Evidence) -> bool:
        """A log's claim counts less where hard facts name somebody else: an innocent rank may be noisy.

        Of two that brought different sizes gloo ends the one that brought less, who may be any of the two: recorders know.
        """
        if fact.kind is Kind.GLOO_ERROR and fact.sign is Sign.MISMATCH and self.parted is not None:
            return False
        if (
            self.parted is not None
            and not _witnessed(fact)
            and fact.rank is not None
            and fact.rank not in self.parted.odd
        ):
            return not MEANINGS[fact.sign].soft  # though it may have been the one that gloo ended
        if fact.kind in HARD or fact.rank is None or not (self.accused or self.silenced):
            return True
        return fact.rank in self.accused or fact.node in self.silenced or not MEANINGS[fact.sign].soft

    @cached_property
    def missed(self) -> frozenset[int]:
        """Ranks of which the recorders of the others show that they did not come."""
        absent = (f for f in self.evidence if f.kind is Kind.RECORDER and f.sign is Sign.ABSENT)
        return frozenset(f.rank for f in absent if f.rank is not None)

    @cached_property
    def silenced(self) -> frozenset[str]:
        """Nodes that were seen to go, or to be out of order."""
        told = (f for f in self.evidence if f.sign in {Sign.NODE_GONE, Sign.UNHEARD} and _witnessed(f))
        ill = (f for f in self.evidence if f.source == "health" and f.sign in MEANINGS)
        return frozenset(f.node for f in (*told, *ill) if f.node)

    def nodes_of(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """Where ranks run, as far as that is known."""
        seen = {fact.rank: fact.node for fact in self.evidence if fact.rank is not None and fact.node}
        return tuple(sorted({node for rank in ranks if (node := self.facts.nodes.get(rank) or seen.get(rank))}))


def _declared(case: Case) -> Verdict | None:
    """A cause that says what it is: the earliest, unless a deeper one stands beside it."""
    return _first_of(case, case.causes)


def _seen(case: Case) -> Verdict | None:
    """The same, of what agents, beats, stacks and neighbours have seen: it goes before what any log claims."""
    return _first_of(case, tuple(filter(_witnessed, case.causes)))


def _first_of(case: Case, causes: Sequence[Evidence]) -> Verdict | None:
    if not causes:
        return None
    first = _earliest(causes)
    deep = [fact for fact in causes if MEANINGS[fact.sign].depth == 0 and not _after(fact, first, NEAR_S)]
    if deep:
        # How a process ended says less than what it said before it did.
        said = [fact for fact in deep if fact.kind is not Kind.EXIT and fact.rank in {None, _earliest(deep).rank}]
        first = _earliest(said) if said and _earliest(deep).kind is Kind.EXIT else _earliest(deep)
    elif first.sign in {Sign.RAISED, Sign.ABSENT}:
        # It does not know; let everything speak that does.
        known = [fact for fact in causes if fact.sign is not first.sign]
        if known:
            first = _earliest(known)
        elif (
            any(fact.sign in CONSEQUENCES and fact.sign is not Sign.ABORTED for fact in case.evidence)
            and first.sign is Sign.RAISED
        ):
            return None
    return _verdict(case, first)


def _verdict(case: Case, first: Evidence) -> Verdict:
    meaning = MEANINGS[first.sign]
    # Of two that brought different sizes gloo ends the one that brought less: it may be any of the two.
    either = first.kind is Kind.GLOO_ERROR and first.sign is Sign.MISMATCH and first.rank not in case.missed
    blamed = meaning.fault is not Fault.UNKNOWN and not either
    alike = [fact for fact in case.causes if fact.sign is first.sign and not _after(fact, first, NEAR_S)]
    ranks, nodes = _culprits(first, alike)
    who = (
        f"{_names(ranks, nodes)} or a peer"
        if either and ranks
        else _names(ranks, nodes) or ("one rank" if first.sign is not Sign.VERSIONS else "one node")
    )
    victims = sorted(case.waiting - set(ranks))
    cause = f"{who} {meaning.words}{_detail(first)}"
    if meaning.fault is Fault.HOST_HANG and first.kind is not Kind.STACK:
        # Beats say that it hangs; its stack, where.
        stack = next(
            (
                f
                for f in case.evidence
                if f.kind is Kind.STACK and f.rank in ranks and f.detail and f.sign is not first.sign
            ),
            None,
        )
        cause += f", {stack.detail}" if stack else ""
    if victims:
        cause += f"; {_names(victims, ())} only waited"
    others = [
        f for f in case.evidence if f.sign in MEANINGS and f.sign is not first.sign and MEANINGS[f.sign].depth == 0
    ]
    ends = [f for f in case.evidence if f.kind is Kind.EXIT and f.rank in ranks and f is not first and f not in alike]
    doubts = [f"seen too, but later, survived or less sure: {other}" for other in others[:3]]
    confidence = meaning.confidence
    if others and any(f in case.causes and not _after(f, first, NEAR_S) for f in others):
        confidence = min(confidence, _MEDIUM, key=list(Confidence).index)
    return Verdict(
        fault=meaning.fault, ranks=ranks if blamed else (), nodes=nodes if blamed else (), cause=cause,
        confidence=confidence,
        remedy=meaning.remedy,
        because=(first, *[fact for fact in alike if fact is not first][:3], *ends[:1], *case.waits[:2]),
        against=(meaning.contradicted_by, *doubts),
    )  # fmt: skip


def _culprits(first: Evidence, alike: list[Evidence]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Whom the fact itself names. A report of a broken path names its far end beside the reporter."""
    if first.ranks:
        return first.ranks, ()
    if first.sign in {Sign.LINK, Sign.FABRIC, Sign.NIC, Sign.COORDINATOR}:
        peers = Counter(fact.peer for fact in alike if fact.peer)
        ends = {fact.node or fact.source for fact in alike if fact.peer}
        if peers and (len(ends) > 1 or not first.node) and len(peers) == 1:
            return (), tuple(peers)  # several cannot reach the same one
        return (), tuple(sorted({name for name in (first.node, first.peer) if name}))
    if first.rank is not None:
        # One look at all ranks at the same moment: whoever it shows in the same way is in it together.
        same = [fact for fact in alike if fact.kind is first.kind] if first.kind in SNAPSHOTS else [first]
        ranks = tuple(sorted({fact.rank for fact in same if fact.rank is not None}))
        return ranks, tuple(sorted({fact.node for fact in same if fact.node}))
    return (), (first.node,) if first.node else ()


def _probed(case: Case) -> Verdict | None:
    """Pairs of nodes that tested each other: the worst kind of trouble there is, and what its pairs have in common."""
    facts = [fact for fact in case.evidence if fact.kind is Kind.PROBE and fact.node and fact.peer]
    for depth, (signs, what) in enumerate(TROUBLE):
        broken = [fact for fact in facts if fact.sign in signs]
        if not broken:
            continue
        worse = {sign for earlier, _ in TROUBLE[: depth + 1] for sign in earlier}
        good = [(str(fact.node), str(fact.peer)) for fact in facts if fact.sign not in worse]
        reach = single_out(((str(fact.node), str(fact.peer)) for fact in broken), good)
        sure = bool(reach.nodes) or what.fault is Fault.FABRIC
        return Verdict(
            fault=what.fault, nodes=reach.blamed, confidence=_HIGH if sure and not reach.apart else _MEDIUM,
            cause=_where(reach, what) + f" ({broken[0].detail})" * bool(broken[0].detail),
            remedy=what.remedy, because=tuple(broken[:6]), against=(_doubt(reach), what.contradicted_by),
        )  # fmt: skip
    return None


@dataclass(frozen=True, slots=True)
class Trouble:
    """How a kind of broken pair is told: of a node, of a link, of all."""

    fault: Fault
    node: str
    link: str
    all: str
    remedy: str
    contradicted_by: str


#: What a probe can find, the worst first. A lesser trouble of a pair says that the worse one is not there.
TROUBLE: tuple[tuple[frozenset[Sign], Trouble], ...] = (
    (frozenset({Sign.UNREACHABLE, Sign.ONE_WAY}), Trouble(
        Fault.NETWORK, "cannot be reached by its peers", "the way between {} is cut", "no node can reach any other",
        MEANINGS[Sign.LINK].remedy, "a second probe with other partners is clean",
    )),
    (frozenset({Sign.MTU}), Trouble(
        Fault.NETWORK, "loses large packets (MTU black hole)", "large packets vanish between {} (MTU black hole)",
        "large packets vanish between all nodes (MTU black hole)", MEANINGS[Sign.MTU].remedy,
        MEANINGS[Sign.MTU].contradicted_by,
    )),
    (frozenset({Sign.LOSSY}), Trouble(
        Fault.NETWORK, "loses packets", "packets are lost between {}", "packets are lost between all nodes",
        "Look at the error counters of both ends and of the switch's ports (ip -s link, ethtool -S); change the cable.",
        "a second probe in a quiet moment loses nothing",
    )),
    (frozenset({Sign.DELAYED}), Trouble(
        Fault.NETWORK, "answers late", "packets take long between {}", "packets take long between all nodes",
        "Look for a detour (traceroute), a saturated link or a shaper (tc qdisc) at that place.",
        "a second probe in a quiet moment is as fast as elsewhere",
    )),
    (frozenset({Sign.NCCL_BROKEN}), Trouble(
        Fault.FABRIC, "works over gloo and not over NCCL", "gloo works between {} and NCCL does not",
        "gloo works between the nodes and NCCL does not, for any pair: settings, version or driver",
        MEANINGS[Sign.FABRIC].remedy, "gloo fails between the same nodes",
    )),
)  # fmt: skip


def _where(reach: Reach, what: Trouble) -> str:
    if reach.everywhere:
        return what.all
    if reach.apart:
        return "the network has fallen apart: " + " | ".join(_few(part) for part in reach.apart)
    parts = [f"{_few(reach.nodes)} {what.node}"] if reach.nodes else []
    parts += [what.link.format(" and ".join(link)) for link in reach.links[:3]]
    return "; ".join(parts)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:6])} and {len(names) - 6} more"


def _doubt(reach: Reach) -> str:
    if reach.apart:
        return "several links broke by themselves: pairs across, not tested yet, would tell"
    if reach.nodes:
        return "its peers fail with others too (then they are at fault)"
    return "one of the two ends fails with all others (a probe of further pairs tells node from link)"


def _deep(case: Case) -> Verdict | None:
    """Causes that explain everything else, before comparisons are made."""
    return _declared(case) if any(MEANINGS[fact.sign].depth == 0 for fact in case.causes) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parted:
    """Where recorders differ.

    Example: Parted(group="default_pg", seq=41, sides=(("all_reduce 64 Float", (0, 2)), ("broadcast 7 Float", (1,))), odd=(1,))
    """

    group: str
    seq: int
    sides: tuple[tuple[str, tuple[int, ...]], ...]
    odd: tuple[int, ...]  # the fewer; all of them where no side has more


def _part(evidence: Iterable[Evidence]) -> Parted | None:
    """The first number at which ranks of one group entered different collectives.

    A rank that gloo has ended for bringing less than was sent to it has no recorder any more: it was with those that brought
    least, and alone if all others brought the same.
    """
    evidence = tuple(evidence)
    short = {f.rank for f in evidence if f.kind is Kind.GLOO_ERROR and f.sign is Sign.MISMATCH and f.rank is not None}
    rows: dict[tuple[int, str], dict[int, dict[int, Call]]] = {}
    for fact in evidence:
        if fact.kind is Kind.RECORDER and fact.calls and fact.group and fact.rank is not None:
            row = rows.setdefault((fact.generation or 0, fact.group), {}).setdefault(fact.rank, {})
            row.update({call.seq: call for call in fact.calls})
    for (_, group), ranks in sorted(rows.items()):
        last = max(max(row) for row in ranks.values())
        for seq in sorted({seq for row in ranks.values() for seq in row}):
            here = {rank: row[seq] for rank, row in sorted(ranks.items()) if seq in row}
            sides: dict[str, list[int]] = {}
            for rank, call in here.items():
                sides.setdefault(call.what, []).append(rank)
            if lost := sorted(short - set(ranks)):
                if len(sides) > 1:
                    least = min(here.values(), key=lambda call: (call.numel or 0, call.what)).what
                    sides[least] = sorted([*sides[least], *lost])
                elif seq == last:
                    sides["less than that"] = lost
            if len(sides) > 1:
                most = max(map(len, sides.values()))
                odd = sorted(r for members in sides.values() if len(members) < most for r in members)
                odd = odd or sorted(r for members in sides.values() for r in members)
                told = tuple((what, tuple(members)) for what, members in sides.items())
                return Parted(group=group, seq=seq, sides=told, odd=tuple(odd))
    return None


def _compared(case: Case) -> Verdict | None:
    """What recorders prove: ranks have entered different collectives under the same number."""
    parted = case.parted
    if parted is None:
        return None
    told = [f for f in case.evidence if f.kind is Kind.RECORDER and f.calls and f.group == parted.group]
    what = "; ".join(f"{_names(members, ())}: {side}" for side, members in parted.sides)
    return Verdict(
        fault=Fault.DESYNC, ranks=parted.odd, confidence=_HIGH,
        cause=f"ranks are in different collectives at the same number {parted.seq}: {what}",
        remedy=MEANINGS[Sign.MISMATCH].remedy, because=tuple(told[:6]), against=(MEANINGS[Sign.MISMATCH].contradicted_by,),
    )  # fmt: skip


def _disagreed(case: Case) -> Verdict | None:
    """Ranks that wait in different collectives under the same number of the same group."""
    if compared := _compared(case):
        return compared
    for group, works in _by_group(case).items():
        by_seq: dict[int, dict[int, Evidence]] = {}
        for fact in works:
            if fact.rank is not None and fact.seq is not None and fact.op:
                by_seq.setdefault(fact.seq, {}).setdefault(fact.rank, fact)
        for seq, ranks in sorted(by_seq.items()):
            shapes: dict[tuple[object, ...], list[int]] = {}
            for rank, fact in sorted(ranks.items()):
                shapes.setdefault(_shape(fact), []).append(rank)
            if len(shapes) < 2:
                continue
            majority = max(map(len, shapes.values()))
            odd = sorted(r for members in shapes.values() if len(members) < majority for r in members)
            ranks_named = tuple(odd or sorted(ranks))
            what = "; ".join(f"{_names(members, ())}: {_shape_words(ranks[members[0]])}" for members in shapes.values())
            return Verdict(
                fault=Fault.DESYNC, ranks=ranks_named, confidence=_HIGH if group else _MEDIUM,
                cause=f"ranks are in different collectives at the same number {seq}: {what}",
                remedy=MEANINGS[Sign.MISMATCH].remedy,
                because=tuple(ranks[r] for r in sorted(ranks))[:6],
                against=("the ranks belong to different process groups (their names are not in these lines)",) if not group
                else (MEANINGS[Sign.MISMATCH].contradicted_by,),
            )  # fmt: skip
    return None


def _elsewhere(case: Case) -> Verdict | None:
    """All were looked at in the same moment: who is outside of collectives while most wait in one holds them up."""
    away = case.away
    if not away:
        return None
    there = sorted({f.rank for f in case.waits if f.kind in SNAPSHOTS and f.rank is not None} - set(away))
    first = min(away)
    return Verdict(
        fault=Fault.HOST_HANG, ranks=tuple(sorted(away)), confidence=_HIGH,
        cause=f"{_names(away, ())} {'is' if len(away) == 1 else 'are'} outside of collectives, {away[first].detail}, while "
        f"{_names(there, ())} {'waits' if len(there) == 1 else 'wait'}",
        remedy=MEANINGS[Sign.HOST_STUCK].remedy,
        because=(*(away[rank] for rank in sorted(away)[:3]), *case.waits[:3]),
        against=("a second look shows it moving on: then it is slow, not stuck",),
    )  # fmt: skip


def _lagged(case: Case) -> Verdict | None:
    """A rank whose host never enqueued what the others wait in, or whose GPU is behind in the same group."""
    for group, works in _by_group(case).items():
        if not group:
            continue
        status: dict[int, Evidence] = {}
        for fact in works:
            if fact.rank is not None and fact.last_completed is not None:
                status[fact.rank] = fact
        if len(status) < 2:
            continue
        wanted = max(s.last_completed + 1 for s in status.values() if s.last_completed is not None)
        # Who is seen inside of an earlier collective has not gone elsewhere: it is what it waits for that does not come.
        never = sorted(
            r
            for r, s in status.items()
            if s.last_enqueued is not None and s.last_enqueued < wanted and r not in case.seen_waiting
        )
        behind = sorted(r for r, s in status.items() if s.last_completed is not None and s.last_completed + 1 < wanted)
        if never and len(never) * 2 <= len(status):
            others = sorted(set(status) - set(never))
            return Verdict(
                fault=Fault.HOST_HANG, ranks=tuple(never), confidence=_MEDIUM,
                cause=f"{_names(never, ())} never entered collective {wanted} of group {group}; {_names(others, ())} "
                "waited there",
                remedy=MEANINGS[Sign.HOST_STUCK].remedy, because=tuple(status[r] for r in (*never, *others))[:6],
                against=("its stack shows it inside that collective",),
            )  # fmt: skip
        if behind and len(behind) * 2 <= len(status):
            return Verdict(
                fault=Fault.NETWORK, ranks=tuple(behind), confidence=_LOW,
                cause=f"{_names(behind, ())} entered the collective, but does not get through it as the others in group "
                f"{group} did: its link or its GPU",
                remedy=MEANINGS[Sign.LINK].remedy, because=tuple(status[r] for r in sorted(status))[:6],
                against=("its host entered another collective before (see its flight recorder)",),
            )  # fmt: skip
    return None


def _never_worked(case: Case) -> Verdict | None:
    """The very first collective is the one that all wait in: it is the set-up, not a rank."""
    works = [fact for fact in case.waits if fact.seq is not None]
    if not works or any((fact.seq or 0) > 1 or (fact.last_completed or 0) > 0 for fact in works):
        return None
    ranks = sorted({fact.rank for fact in works if fact.rank is not None})
    return Verdict(
        fault=Fault.FABRIC, confidence=_LOW,
        cause=f"the first collective never finished ({_names(ranks, ()) or 'all'} waited at sequence number 1): the "
        "communicator has never worked",
        remedy="Not a straggler: try NCCL_P2P_DISABLE=1, then NCCL_IB_DISABLE=1, and name NCCL_SOCKET_IFNAME; check "
        "ACS/IOMMU, and that gloo works "
        "between the nodes (if not, it is the network).",
        because=tuple(works[:4]), against=("a rank is missing: still loading, or failed before its first collective",
        "gloo fails as well"),
    )  # fmt: skip


def _inside(case: Case) -> Verdict | None:
    """Every rank was seen in a collective, and none gets through: it is no rank, it is what is between them."""
    if not case.facts.world or case.seen_waiting < frozenset(range(case.facts.world)):
        return None
    seen = [fact for fact in case.waits if fact.kind in GOING_ON]
    return Verdict(
        fault=Fault.NETWORK, confidence=_LOW,
        cause="all ranks are in a collective and none gets through it: the way between some of them",
        remedy="A probe of the pairs tells node, link or path (elasticrl doctor --nodes ...).", because=tuple(seen[:6]),
        against=("the ranks are in different collectives (then it is desync)", "all pairs pass a probe, over NCCL too"),
    )  # fmt: skip


def _missing(case: Case) -> Verdict | None:
    """Ranks that are known to exist and do not wait with the others: the silent one is the one to look at."""
    ours = [fact for fact in case.waits if fact.group in {None, "default_pg", "0", GANG}]
    if not ours or len(case.waiting) < 2:
        return None
    known = case.facts.heard | (frozenset(range(case.facts.world)) if case.facts.world else frozenset())
    absent = sorted(known - case.waiting)
    if not absent or len(absent) * 2 > len(case.waiting):
        return None
    return Verdict(
        fault=Fault.HOST_HANG, ranks=tuple(absent), confidence=_MEDIUM if case.facts.world else _LOW,
        cause=f"{_names(sorted(case.waiting), ())} waited and {_names(absent, ())} did not: its host was elsewhere (data, "
        "save, evaluation, a lock)",
        remedy=MEANINGS[Sign.HOST_STUCK].remedy, because=tuple(ours[:6]),
        against=("its log was not collected", "it had left the collective before: an early exit or uneven inputs"),
    )  # fmt: skip


def _aborted(case: Case) -> Verdict | None:
    """One rank, or few, ended by abort(), and nothing says why: it ended first, whatever it was that it could not stand."""
    ranks = tuple(sorted(case.aborted))
    told = [f for f in case.evidence if f.sign is Sign.ABORTED and f.rank in case.aborted]
    if not ranks or (case.facts.world and 2 * len(ranks) > case.facts.world):
        return None
    return Verdict(
        fault=Fault.DEAD_RANK, ranks=ranks, confidence=_LOW, cause=f"{_names(ranks, ())} died: it called abort()",
        remedy="Read what that rank printed before it aborted; a library's own check, or its native stack, says why.",
        because=tuple(told[:4]), against=("its log shows an error of its own, or a peer sent it what it did not expect",),
    )  # fmt: skip


def _followed(case: Case) -> Verdict | None:
    """Consequences without a cause: somebody else is at fault, and the evidence does not show who."""
    for sign, meaning in CONSEQUENCES.items():
        told = [fact for fact in case.evidence if fact.sign is sign and not case.late(fact)]
        if not told:
            continue
        peers = tuple(sorted({fact.peer for fact in told if fact.peer}))
        nodes = peers if sign is Sign.PEER_GONE and len(peers) == 1 else ()
        return Verdict(
            fault=meaning.fault, nodes=nodes, confidence=meaning.confidence, cause=meaning.words + (" (far end: "
            f"{nodes[0]})" if nodes else ""),
            remedy=meaning.remedy, because=tuple(told[:4]), against=(meaning.contradicted_by,),
        )  # fmt: skip
    return None


def _starved(case: Case) -> Verdict | None:
    """Only victims spoke. What such jobs turn out to have, most often; nobody is named."""
    if not case.waits:
        return None
    waited = [fact for fact in case.waits if fact.sign is Sign.WAITED]
    because = tuple((waited or list(case.waits))[:4])
    ranks = _names(sorted(case.waiting), ())
    timeouts = [fact.timeout_ms for fact in waited if fact.timeout_ms]
    seqs = [fact.seq for fact in waited if fact.seq is not None]
    late = any(f.elapsed_ms and f.timeout_ms and f.elapsed_ms > 2 * f.timeout_ms for f in waited)
    note = (
        " ('ran for' is far over the timeout: the watchdog was stuck as well, so it does not tell when this began)"
        if late
        else ""
    )
    if timeouts and max(timeouts) <= SHORT_TIMEOUT_MS:
        return Verdict(
            fault=Fault.CONFIG, because=because,
            cause=f"{ranks or 'some ranks'} gave up after only {max(timeouts) / 1000:.0f} s: the timeout is likely "
            "shorter than what one rank does "
            f"between two collectives (a save, an evaluation, loading){note}",
            remedy="Give the group a timeout longer than its slowest phase (new_group(timeout=...)), and see what the "
            "silent rank did.",
            against=("the silent rank is stuck far longer than any save", "it was still progressing when the timeout came"),
        )  # fmt: skip
    who = ranks or "some rank"
    barrier = any(fact.numel_in is not None and fact.numel_in <= 1 for fact in waited)
    if seqs and min(seqs) >= LATE_RUN and not barrier:
        return Verdict(
            fault=Fault.DESYNC, because=because,
            cause=f"{who} waited for somebody who did not come, after {min(seqs):,} collectives that worked: most likely "
            "uneven inputs or an early "
            f"exit (the end of an epoch, an evaluation on some ranks only), else a host that is stuck{note}",
            remedy="Compare batch counts and shard sizes of the ranks; seed every split; use join() or drop_last. Collect "
            "the other ranks' logs.",
            against=("a rank is found alive and stuck on its host",
                     "all ranks are in the same collective (then it is the network)"),
        )  # fmt: skip
    setup = [fact for fact in case.waits if fact.sign is Sign.SETUP_WAITED]
    if setup and not waited:
        absent = tuple(sorted({rank for fact in setup for rank in fact.ranks} - case.waiting))
        return Verdict(
            fault=Fault.HOST_HANG, ranks=absent, because=tuple(setup[:4]),
            cause=f"{who} waited for {_names(absent, ()) or 'the others'} at the rendezvous of a group and it did not "
            "come in time: still loading or "
            "preparing, never started, or not reachable",
            remedy="See what the absent rank did meanwhile; raise the timeout for long preparation; check the interface "
            "(not lo) and the port.",
            against=("the absent rank was waiting too (then the network between them is at fault)",),
        )  # fmt: skip
    stuck = [fact for fact in case.waits if fact.sign is Sign.WATCHDOG_STUCK]
    what = (
        "the watchdog of " + who + " made no progress: a CUDA or NCCL call that does not return, or a held GIL"
        if stuck and not waited
        else (
            f"{who} waited {'at a barrier' if barrier else 'in a collective'} for somebody who did not come: most likely "
            "a host elsewhere "
            "(data, save, evaluation, compilation)"
        )
    )
    return Verdict(
        fault=Fault.HOST_HANG, because=because, cause=what + note,
        remedy="The culprit is a rank that prints nothing here: collect all ranks' logs and stacks (py-spy dump), and the "
        "flight recorder (TORCH_FR_BUFFER_SIZE=2000).",
        against=("all ranks are in the same collective (then it is network or fabric)",
                 "the ranks are in different collectives (then it is desync)"),
    )  # fmt: skip


#: In the order in which they are asked; the first that answers decides.
RULES: tuple[Callable[[Case], Verdict | None], ...] = (
    _deep, _probed, _disagreed, _seen, _elsewhere, _aborted, _declared, _lagged, _never_worked, _inside, _followed,
    _missing, _starved,
)  # fmt: skip


def _by_group(case: Case) -> Mapping[str, list[Evidence]]:
    """Waits by process group. What bears no group is compared only if no rank shows two numbers at once ("" then)."""
    named: dict[str, list[Evidence]] = {}
    placed = (*case.waits, *(fact for fact in case.evidence if fact.sign is Sign.BEHIND))
    for fact in placed:
        if fact.group:
            named.setdefault(fact.group, []).append(fact)
    groups: dict[str, list[Evidence]] = {}
    loose: list[Evidence] = []
    for fact in placed:
        if fact.rank is None:
            continue
        group = fact.group or _group_of(fact, named)
        if group:
            groups.setdefault(group, []).append(fact)
        if not fact.group and fact.seq is not None:
            loose.append(fact)
    per_rank: dict[int | None, set[int | None]] = {}
    for fact in loose:
        per_rank.setdefault(fact.rank, set()).add(fact.seq)
    # Ranks whose lines found different groups must not meet again under "".
    apart = {_group_of(fact, named) for fact in loose} - {None}
    if len(apart) <= 1 and all(len(seqs) == 1 for seqs in per_rank.values()):
        groups.setdefault("", []).extend(loose)
    return groups


def _group_of(fact: Evidence, named: Mapping[str, list[Evidence]]) -> str | None:
    """The group that the same rank's status line names for this very work."""
    for group, facts in named.items():
        for other in facts:
            same = other.seq == fact.seq or (other.last_completed is not None and other.last_completed + 1 == fact.seq)
            if other.rank == fact.rank and fact.seq is not None and same:
                return group
    return None


def _shape(fact: Evidence) -> tuple[object, ...]:
    return (fact.op, fact.numel_in, fact.numel_out) if str(fact.op).upper().replace("_", "") in _EVEN else (fact.op,)


def _shape_words(fact: Evidence) -> str:
    return f"{fact.op}({fact.numel_in} -> {fact.numel_out})" if fact.numel_in is not None else str(fact.op)


def _witnessed(fact: Evidence) -> bool:
    """Whether somebody of ours saw it, rather than that a log claims it."""
    return (fact.kind in HARD or fact.source == "health") and fact.line_no is None


def _earliest(facts: Iterable[Evidence]) -> Evidence:
    """By the clock where all have the same one, else in the order found."""
    listed = list(facts)
    if len({fact.clock for fact in listed}) == 1 and all(fact.when is not None for fact in listed):
        return min(listed, key=lambda fact: fact.when or 0.0)
    return listed[0]


def _after(fact: Evidence, other: Evidence, seconds: float) -> bool:
    """Whether a fact is known to be later than another one by more than this."""
    if fact.when is None or other.when is None or fact.clock != other.clock:
        return False
    return fact.when > other.when + seconds


def _detail(fact: Evidence) -> str:
    return f" ({fact.detail})" if fact.detail else ""


def surest(verdicts: list[Verdict]) -> Verdict:
    """The one with most confidence; of equals the first."""
    known = [verdict for verdict in verdicts if verdict.fault is not Fault.UNKNOWN] or verdicts
    return max(known, key=lambda verdict: list(Confidence).index(verdict.confidence))


def rank_names(ranks: Iterable[int]) -> str:
    """Ranks as people say them.

    >>> rank_names([0, 1, 2, 5])
    'ranks 0-2, 5'
    """
    return _names(ranks, ())


def _names(ranks: Iterable[int], nodes: Iterable[str]) -> str:
    """Rank 3; ranks 0-2, 5; node-a."""
    listed = sorted(set(ranks))
    if not listed:
        return " and ".join(nodes)
    spans: list[str] = []
    start = previous = listed[0]
    for rank in [*listed[1:], None]:
        if rank is not None and rank == previous + 1:
            previous = rank
            continue
        spans.append(str(start) if start == previous else f"{start}-{previous}")
        if rank is not None:
            start = previous = rank
    return ("rank " if len(listed) == 1 else "ranks ") + ", ".join(spans)
