"""What facts are worth: which signs are causes, which only follow from one, which are waits, and who is believed.

The one idea: all that is known of a single sign is a row of a table. Memory, disks, GPUs, settings, versions and stragglers
have no rules of their own: a row here is all that the judge needs for them (`causes`).
"""

from collections.abc import Mapping
from types import MappingProxyType

from elasticrl.base.value import dataclass
from elasticrl.contract.evidence import Kind, Sign
from elasticrl.contract.verdict import Confidence, Fault


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
    Sign.MISTAKE: Meaning(
        Fault.USER_ERROR, _LOW, "raised an exception that most often is the program's own",
        "Read the traceback of that rank; a setting or a library of another version can raise it too.",
        "the same program and data work elsewhere", soft=True,
    ),
    Sign.FAILED: Meaning(
        Fault.USER_ERROR, _LOW, "failed in its program, without naming a cause",
        "Read the traceback of that rank, and what it printed before.",
        "another rank failed earlier, or the same program works elsewhere", depth=1, soft=True,
    ),
    Sign.MISFIT: Meaning(
        Fault.VERSION_MISMATCH, _LOW, "uses libraries that do not seem to fit each other, or the program",
        "Compare the installed versions with those that the program was made for (pip list, its requirements).",
        "the same versions work with this program elsewhere: then it is a mistake in the program", soft=True,
    ),
    Sign.UNSUITED: Meaning(
        Fault.CONFIG, _LOW, "does not seem to suit its settings, or the place it runs in",
        "Compare the setting that the line names with the number of nodes and GPUs, and with the job's limits.",
        "the same settings work on the same nodes", depth=1, soft=True,
    ),
    Sign.DAMAGED: Meaning(
        Fault.DISK, _LOW, "read a file that seems to be damaged",
        "Compare the size and the hash of that file with its source's; a download or a save that broke off leaves such files.",
        "the file is whole: then it is another kind of file, or the program reads it wrongly", depth=1, soft=True,
    ),
    Sign.CRAMPED: Meaning(
        Fault.OOM_GPU, _LOW, "could not start a library on its GPU, most often for lack of memory",
        "Look how much of the GPU's memory is used, and by whom; then compare the library's version with the driver.",
        "memory was free: then the library does not fit the driver", depth=1, soft=True,
    ),
    Sign.OUTSIDE: Meaning(
        Fault.NETWORK, _LOW, "could not use a server outside of the cluster",
        "Check proxy, firewall and name resolution from that node, and whether the server is up; use local copies of models "
        "and data.",
        "the server refuses what was asked of it: then it is the program, or its credentials", soft=True,
    ),
    Sign.UNJOINED: Meaning(
        Fault.USER_ERROR, _MEDIUM, "did not join",
        "Call elasticrl.runtime.join() in the program (job.program), once its imports are done: it takes the worker's rank. If "
        "the program does so and only loads for longer, raise recovery.start. elasticrl logs shows how far it came.",
        "it joins when it is given more time (recovery.start)",
    ),
    Sign.DIVERGED: Meaning(
        Fault.DIVERGENCE, _HIGH, "computes other bits than its replicas: silent data corruption",
        "Keep its node out and have memory and processor tested (memtest, dcgmi diag); its state was restored from others.",
        "the program uses something that is not deterministic, or the ranks' versions differ",
    ),
    Sign.MISCOMPUTED: Meaning(
        Fault.DIVERGENCE, _HIGH, "comes to other bits than other nodes from the same input: silent data corruption",
        "Keep its node out and have GPU, memory and processor tested (dcgmi diag, memtest). Earlier steps may hold its wrong "
        "bits too: if you find out when the fault began, go back to a checkpoint from before that.",
        "the program's lanes depend on who computes them, or use something that is not deterministic",
    ),
    Sign.OTHER_FILES: Meaning(
        Fault.VERSION_MISMATCH, _HIGH, "has read other model files than its peers, or than the job until now",
        "Give every node the same files of the model that the line names, best in a folder; then let its node back "
        "(elasticrl admit).",
        "the files are the same on all nodes (then its disk or memory changes what it reads)",
    ),
    Sign.UNKEPT: Meaning(
        Fault.HOST_HANG, _MEDIUM, "had to end, as its node's vault did not keep its state",
        "See the vault's log on that node, what the node is short of (/dev/shm, memory, processor time) and who holds its "
        "vault; vault.timeout says how long a vault is waited for.",
        "the vault's log shows that it took that state in time", depth=1,
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
        Fault.DEAD_NODE, _HIGH, "stopped responding",
        "Check the node's power, kernel log and console. If it is up, check its daemon (systemctl status elasticrl): it may "
        "hang. The job continues if enough nodes are left, and takes the node back when elasticrl runs there again.",
        "its daemon is heard by other nodes (then the path to it is at fault)", depth=1,
    ),
    Sign.UNHEARD: Meaning(
        Fault.NETWORK, _HIGH, "is up, but its peers receive nothing from it",
        "Check its link, switch port, cable and firewall, and the route to it (ip -s link, ethtool); the store was reached "
        "another way, or later.",
        "its daemon stood still meanwhile: then its host is at fault, not the way to it",
    ),
    Sign.KILLED: Meaning(
        Fault.DEAD_RANK, _MEDIUM, "died: it was killed from outside",
        "See who sent the signal: OOM killer (kernel log), scheduler, an operator.",
        "it ended after the others had failed (then it was torn down with them)", depth=1,
    ),
    Sign.CRASHED: Meaning(
        Fault.DEAD_RANK, _MEDIUM, "crashed",
        "Look for the core dump and the native stack of that rank; a library mismatch or a native extension is likely.",
        "it ended after the others had failed", depth=1,
    ),
    Sign.GONE: Meaning(
        Fault.DEAD_RANK, _MEDIUM, "has ended, and the others still wait for it",
        "Read the end of its log: an exception, a signal (then the kernel log, for memory), or data that ended before the "
        "others'.",
        "it ended after the others had failed", depth=1,
    ),
    Sign.STOPPED: Meaning(
        Fault.HOST_HANG, _HIGH, "was stopped by SIGSTOP or a debugger, and could not run on",
        "Find who sent SIGSTOP, or whose debugger held it.",
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
    Sign.UNMET: Meaning(
        Fault.COORDINATOR, _LOW, "waited at a rendezvous to which not all came in time",
        "See which node or rank did not come: it never started, still prepares, looks for another address, or cannot reach the "
        "rendezvous. Raise the timeout for long preparation.",
        "the one that did not come is found alive and stuck (then its host is at fault)", depth=1,
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

#: What a broken NCCL says of itself that tells what to do better than its kind does.
TELLING: Mapping[str, str] = MappingProxyType({
    "no socket interface found": "NCCL_SOCKET_IFNAME names an interface that is not there, is down, or has no address "
    "(ip addr); name one that every node has.",
})  # fmt: skip


#: Where a fact comes from decides how far it is believed: what an agent, a beat or a probe saw, before what a log claims.
HARD = frozenset({Kind.EXIT, Kind.BEAT, Kind.RECORDER, Kind.PROBE, Kind.NODE, Kind.STACK})
SNAPSHOTS = frozenset({Kind.STACK, Kind.RECORDER})  # taken of all ranks at one moment
GOING_ON = SNAPSHOTS | {Kind.BEAT}  # a wait that such a fact speaks of has not ended with it
WAITS = frozenset({Sign.WAITED, Sign.WATCHDOG_STUCK, Sign.SETUP_WAITED})
WATCHDOGS = frozenset({
    Kind.WATCHDOG_TIMEOUT, Kind.WATCHDOG_STATUS, Kind.WATCHDOG_ERROR, Kind.HEARTBEAT_MONITOR, Kind.TEAR_DOWN,
})  # fmt: skip
#: Signs that yield to any other cause.
VAGUE = frozenset({Sign.RAISED, Sign.FAILED, Sign.UNSUITED, Sign.CRAMPED})
_ENDS = frozenset(
    {Sign.UNKEPT, Sign.PROGRAM, Sign.MISTAKE, Sign.FAILED, Sign.RAISED, Sign.CRASHED, Sign.ABORTED, Sign.GONE}
)
_STARVED = _ENDS | {Sign.KILLED, Sign.OOM_KILLED, Sign.NODE_GONE, Sign.UNHEARD}
#: What the state of a machine explains of what befell its node and its ranks, and nothing else: no disk stops a dataloader.
EXPLAINS: Mapping[Sign, frozenset[Sign]] = {
    Sign.DISK_FULL: _ENDS, Sign.DISK_BROKEN: _ENDS, Sign.SHM_FULL: _ENDS, Sign.RESOURCE_LIMIT: _ENDS,
    Sign.HOST_MEMORY: _STARVED, Sign.OOM_KILLED: _STARVED,
}  # fmt: skip
#: What any other cause explains: how a process ended.
ENDS = frozenset({Sign.KILLED, Sign.CRASHED, Sign.ABORTED, Sign.GONE})
DISKS = frozenset({Sign.DISK_FULL, Sign.DISK_BROKEN})
#: What a line that a program prints, and survives, cannot explain: the node or the kernel did it.
UNCLAIMED = frozenset({Sign.NODE_GONE, Sign.UNHEARD, Sign.STOPPED, Sign.OOM_KILLED})
#: What does not pass because a gang goes on for a while.
LASTING = frozenset({Sign.GPU_BROKEN, Sign.VERSIONS, Sign.DIVERGED, Sign.MISCOMPUTED, Sign.OTHER_FILES})
#: Ends and silences that have nothing to do with how much room a disk has.
PLAIN = frozenset({
    Sign.NODE_GONE, Sign.UNHEARD, Sign.KILLED, Sign.STOPPED, Sign.OOM_KILLED, Sign.DIVERGED,
    Sign.MISCOMPUTED, Sign.OTHER_FILES,
})  # fmt: skip
