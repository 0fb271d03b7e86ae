"""The faults that both drivers can put in, and where: at a time, or at a position in the life of the job.

`KINDS` are known to both drivers, `LIVE` to the live one alone.

The one idea: a fault is a value. A scenario is a list of them, a seed draws such a list, and a failing seed is saved as
the list it drew.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

Reach = Literal["node", "link", "store", "operator", "job"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong.

    `node` is a name or a role that is looked up when the fault strikes: leader, deputy, rank 0, last rank, seated, spare.
    Of several that are seated or spare the simulator draws one, and for "" any node; live it is always the first.
    `when` is a position: `before|during|after PHASE` with the phases of a step (rollout, reduce, apply, gather, seal; live, of
    PPO, its own as well), or `saving`, `reform`, `forming`, `elected`, `committing`, `probing`, `held`; live also `published`
    (a save is whole and not committed yet), `copying` (the node's snapshot is on its way to a neighbour) and `reform after
    STAGE` (reach, meet, form, agree, spread, gather, restore, publish). `step N` may follow. `nth` counts arrivals there.
    Live, where one job takes many scenarios, both count from the scenario's beginning.
    `slot` is one of a node's workers, for what befalls a worker alone. Left out it is the last, live, and any in the simulator.

    Example: Fault(kind="power_cut", node="leader", when="saving step 50", for_s=8.0)
    """

    kind: str
    at: float | None = None
    when: str = ""
    nth: int = 1
    node: str = ""
    peer: str = ""
    slot: int | None = None
    for_s: float | None = None  # None: for good, or until the healing
    value: float = 0.0
    way: Literal["both", "out", "in"] = "both"
    scope: Literal["all", "beat", "data"] = "all"
    or_any: bool = False  # where it cannot act on its node, on another that the seed chooses

    @property
    def place(self) -> str:
        """Its position without the step. Example: "saving" of "saving step 50"."""
        return self.when.partition(" step ")[0]

    @property
    def step(self) -> int:
        """The step of its position; 0: any."""
        number = self.when.partition(" step ")[2]
        return int(number) if number else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a kind of fault does, whom it touches, and from which values the nemesis draws."""

    does: str
    reach: Reach
    weight: float = 1.0
    for_s: tuple[float, float] | None = None  # drawn from this range; None: it has no duration
    value: tuple[float, float] = (0.0, 0.0)


KINDS: Final[dict[str, Kind]] = {
    "kill_worker": Kind(does="kill -9 of a worker", reach="node", weight=3),
    "crash_worker": Kind(does="a worker raises an exception", reach="node", weight=2),
    "hang_worker": Kind(does="a worker's training thread stands still outside any collective", reach="node", weight=2),
    # `value`: it stands still where not even a kill ends it.
    "stop_worker": Kind(does="SIGSTOP of a worker, and perhaps SIGCONT", reach="node", for_s=(0.5, 30)),
    "slow_worker": Kind(does="a worker is slower by a factor", reach="node", for_s=(2, 30), value=(1.5, 6)),
    "crash_loop": Kind(does="every attempt at one step raises the same exception", reach="job", weight=0.3, value=(3, 12)),
    "sick_node": Kind(does="a node's workers raise soon after every start", reach="node", weight=0.5, for_s=(5, 40)),
    "kill_agent": Kind(does="kill -9 of the agent: its workers die with it", reach="node"),
    "kill_daemon": Kind(does="kill -9 of the daemon; systemd starts it again", reach="node", weight=2, for_s=(0.3, 6)),
    "pause_daemon": Kind(does="SIGSTOP, then SIGCONT of the daemon", reach="node", for_s=(0.3, 15)),
    "kill_node": Kind(does="all processes of a node die, its kernel lives", reach="node", weight=2, for_s=(1, 20)),
    "power_cut": Kind(does="a node goes silent at once; its memory is lost", reach="node", weight=2, for_s=(2, 30)),
    "pause_node": Kind(does="a whole node stands still, then goes on", reach="node", for_s=(0.3, 12)),
    "lose_vault": Kind(does="a node's memory snapshots are lost", reach="node"),
    "cut_store": Kind(does="a node cannot reach the store, or not hear it; or a share is lost", reach="node", for_s=(0.5, 20)),
    "cut_link": Kind(does="two nodes cannot hear each other, or one not the other", reach="link", for_s=(0.3, 20)),
    "isolate": Kind(does="a node hears no other node, or is not heard", reach="node", for_s=(0.3, 20)),
    "partition": Kind(does="the nodes fall into two parts", reach="link", for_s=(0.5, 15)),
    "lossy_node": Kind(does="a share of the beats from and to a node is lost", reach="node", for_s=(2, 20), value=(0.1, 0.9)),
    "store_outage": Kind(does="the store is gone", reach="store", for_s=(0.5, 40)),
    "store_failover": Kind(does="the store elects a new leader; leases start anew", reach="store"),
    "store_compaction": Kind(does="watches break and must list again", reach="store"),
    "store_loss": Kind(does="a share of all requests and answers is lost", reach="store", for_s=(1, 15), value=(0.05, 0.7)),
    "store_delay": Kind(does="requests and watches are late", reach="store", for_s=(1, 15), value=(0.05, 3)),
    "store_repeat": Kind(does="requests are applied again, late", reach="store", for_s=(1, 15), value=(0.2, 4)),
    "stale_view": Kind(does="a node is shown the store as it was", reach="node", for_s=(1, 12), value=(0.2, 6)),
    "lose_lease": Kind(does="the store forgets a node's lease", reach="node", weight=0.5),
    "lost_publishes": Kind(does="a node's record writes vanish", reach="node", for_s=(1, 12)),
    "late_commit": Kind(does="the next commit is applied twice, the second time late", reach="store", value=(0.3, 12)),
    "late_plan": Kind(does="the next plan arrives late at the store", reach="store", value=(0.3, 6)),
    "clock_rate": Kind(does="a node's monotonic clock runs fast or slow", reach="node", for_s=(5, 60), value=(0.95, 1.05)),
    "clock_step": Kind(does="a node's wall clock jumps: nothing may notice", reach="node", weight=0.2, value=(-4000, 4000)),
    "slow_disk": Kind(does="saves take longer by a factor", reach="job", for_s=(3, 30), value=(2, 10)),
    "torn_save": Kind(does="the save in progress is never finished", reach="job"),
    "corrupt_save": Kind(does="the newest checkpoint on disk rots", reach="job", weight=0.5),
    "drain": Kind(does="an operator drains a node", reach="operator"),
    "admit": Kind(does="an operator admits a node", reach="operator", weight=0.5),
    "pause": Kind(does="an operator pauses the job, and resumes it later", reach="operator", for_s=(1, 15)),
    "stop": Kind(does="an operator stops the job", reach="operator", weight=0.15),
    # Weight 0: only in scenarios, so that what seeds draw stays what it was.
    "store_wiped": Kind(does="the store loses all of its data, and serves on", reach="store", weight=0),
    "store_set_back": Kind(does="the store is set back to a backup", reach="store", weight=0, for_s=(1, 30)),
    "gpu_breaks": Kind(does="the kernel of a node reports a GPU off the bus; its workers train on", reach="node", weight=0),
    "ask_drain": Kind(
        does="an operator drains a node if the others can spare it; in the simulator alone", reach="operator", weight=0
    ),
    "refused_loop": Kind(
        does="every attempt at one step ends with all workers saying that a peer refused them; in the simulator alone",
        reach="job", weight=0,
    ),
    "disk_line": Kind(does="a log of a node, of no gang's, says that a disk is full; all train on", reach="node", weight=0),
    "versions_line": Kind(does="a worker's log says that its versions do not fit the others'", reach="node", weight=0),
    "late_ways": Kind(does="a node's ways take long; one end says so, later the other", reach="node", weight=0, for_s=(3, 30)),
    "start_again": Kind(does="an operator starts all nodes of a job that is over", reach="operator", weight=0),
    "stray_worker": Kind(does="a worker stands in its own code; its beats say that it waits", reach="node", weight=0),
    "wait_outside": Kind(does="a worker waits for a server outside of the gang", reach="node", weight=0, for_s=(2, 20)),
    "reset_links": Kind(
        does="connections between workers are reset, and all of them live; in the simulator alone", reach="node", weight=0
    ),
    "part_ways": Kind(does="a worker enters another collective than the others, in so many gangs", reach="node", weight=0),
    "quiet_log": Kind(does="a script's log tells of no progress, though it goes on", reach="node", weight=0, for_s=(5, 200)),
    "nccl_breaks": Kind(does="NCCL does not work over a node's ways; all else does", reach="node", weight=0, for_s=(5, 60)),
    "join_node": Kind(does="a node that was not there starts", reach="operator", weight=1),
}  # fmt: skip

#: What only real machines have: processes that the simulator does not tell apart, cables, disks, memory, clumsy hands.
LIVE: Final[dict[str, Kind]] = {
    "term_worker": Kind(does="SIGTERM of a worker", reach="node"),
    "kill_spare": Kind(does="kill -9 of a spare process", reach="node"),
    "term_spare": Kind(does="SIGTERM of a spare process", reach="node", weight=0.5),
    "stop_spare": Kind(does="SIGSTOP, then SIGCONT of a spare process", reach="node", weight=0.5, for_s=(1, 8)),
    "term_agent": Kind(does="SIGTERM of the agent: its node leaves, and is started again", reach="node", for_s=(3, 10)),
    "pause_agent": Kind(does="SIGSTOP, then SIGCONT of the agent", reach="node", for_s=(0.5, 8)),
    "term_daemon": Kind(does="SIGTERM of the daemon: it hands over to the next one", reach="node", for_s=(0.1, 4)),
    "kill_vault": Kind(does="kill -9 of the vault; its files stay", reach="node", weight=2),
    "pause_vault": Kind(does="SIGSTOP, then SIGCONT of the vault", reach="node", for_s=(0.5, 8)),
    "term_vault": Kind(does="SIGTERM of the vault", reach="node", weight=0.5),
    "kill_engine": Kind(does="kill -9 of the rollout engine beside a worker", reach="node"),
    "term_engine": Kind(does="SIGTERM of the rollout engine beside a worker", reach="node", weight=0.5),
    "pause_engine": Kind(
        does="SIGSTOP, then SIGCONT of the rollout engine beside a worker", reach="node", for_s=(0.5, 8)
    ),
    "kill_etcd": Kind(does="kill -9 of a member of the store", reach="store", for_s=(0.5, 8)),
    "term_etcd": Kind(does="SIGTERM of a member of the store", reach="store", weight=0.5, for_s=(0.5, 8)),
    "pause_etcd": Kind(does="SIGSTOP, then SIGCONT of a member of the store", reach="store", for_s=(0.5, 8)),
    "slow_store_disk": Kind(
        does="the store's members write no faster than a rate (kB/s)", reach="store", for_s=(2, 8), value=(20, 200)
    ),
    "store_full": Kind(does="the store's quota is used up: it takes no writes", reach="store", for_s=(1, 5)),
    "link_down": Kind(does="a node's cable is pulled and put back", reach="node", weight=2, for_s=(0.5, 10)),
    "leader_alone": Kind(does="a node reaches neither the others nor the store", reach="node", for_s=(1, 10)),
    "store_alone": Kind(does="no node reaches the store, which is well", reach="store", for_s=(1, 12)),
    "slow_link": Kind(does="a node sends no faster than a rate (Mbit/s)", reach="node", for_s=(2, 8), value=(1, 20)),
    "late_node": Kind(does="a node's frames are late (ms, each way)", reach="node", for_s=(2, 8), value=(5, 100)),
    "mtu_hole": Kind(does="a node's frames over a size are lost", reach="node", weight=0.5, for_s=(2, 10), value=(400, 1200)),
    "disk_full": Kind(does="the disk of the checkpoints is full", reach="job", for_s=(2, 12)),
    "tear_save": Kind(does="a file of the newest checkpoint on disk lacks its end", reach="job", weight=0.5),
    "disk_read_only": Kind(does="a node's checkpoint disk is read-only", reach="node", weight=0.7, for_s=(2, 10)),
    "oom_worker": Kind(does="the kernel ends a worker for its memory", reach="node"),
    "starve_node": Kind(does="a node gets a small share of a core", reach="node", for_s=(2, 8), value=(0.05, 0.3)),
    "port_taken": Kind(does="somebody takes the vault's port while it is down", reach="node", weight=0.5, for_s=(3, 8)),
    "two_daemons": Kind(does="a second daemon with the same name is started", reach="operator"),
    "changed_config": Kind(does="a daemon restarts with another configuration", reach="operator", weight=0.7, for_s=(2, 6)),
    "wrong_zone": Kind(does="a node is killed and comes back in another time zone", reach="node", weight=0.5, for_s=(1, 6)),
    "wrong_clock": Kind(
        does="a node is killed and comes back with a wall clock that is off (s) and drifts, and is put right as it trains",
        reach="node", weight=0.5, for_s=(1, 6), value=(-4000, 4000),
    ),
    "drain_and_back": Kind(does="an operator drains a node and starts it again", reach="operator", for_s=(3, 10)),
}  # fmt: skip
ALL: Final = KINDS | LIVE

#: What a worker does to itself: at its place, the driver has nothing to do there but wait.
ITSELF: Final = ("crash_worker", "hang_worker", "oom_worker")
#: What only a job of PPO has: a rollout engine.
OF_PPO: Final = ("kill_engine", "term_engine", "pause_engine")


def around(phases: Iterable[str]) -> tuple[str, ...]:
    """The places that each phase has."""
    return tuple(f"{side} {phase}" for phase in phases for side in ("before", "during", "after"))


PHASES: Final = ("rollout", "reduce", "apply", "gather", "seal")
PPO_PHASES: Final = ("reward", "logprobs", "ref", "values", "advantage", "update", "sync")  # beside those
IN_A_STEP: Final = around(PHASES)
IN_A_STEP_OF_PPO: Final = around(PPO_PHASES)
INSIDE: Final = IN_A_STEP + IN_A_STEP_OF_PPO
REFORM_STAGES: Final = ("reach", "meet", "form", "agree", "spread", "gather", "restore", "publish")
IN_A_REFORM: Final = tuple(f"reform after {stage}" for stage in REFORM_STAGES)
PLACES: Final = (
    *INSIDE,
    *IN_A_REFORM,
    *("saving", "published", "copying", "reform", "forming", "elected", "committing", "probing", "held"),
)
ROLES: Final = ("leader", "deputy", "rank 0", "last rank", "seated", "spare")


def holder(role: str, *, seats: Sequence[str], leader: str, spares: Iterable[str] = ()) -> str:
    """The node that has a role, the first if several have; "" if nobody has it. What is no role is a name.

    >>> [holder(role, seats=["n0", "n1"], leader="n0") for role in ("deputy", "spare", "n7")]
    ['n1', '', 'n7']
    """
    match role:
        case "leader":
            return leader
        case "deputy":
            return next((node for node in seats if node != leader), "")
        case "rank 0" | "seated" | "":
            return next(iter(seats), "")
        case "last rank":
            return next(reversed(seats), "")
        case "spare":
            return next(iter(spares), "")
    return role


def check(fault: Fault) -> str:
    """What is wrong with a fault as written; empty if nothing is."""
    number = fault.when.partition(" step ")[2]
    if fault.kind not in ALL:
        return f"there is no fault {fault.kind!r}; there are {', '.join(ALL)}"
    if (fault.at is None) == (not fault.when):
        return f"{fault.kind} needs either `at` (seconds) or `when` (a position)"
    if fault.when and fault.place not in PLACES:
        return f"{fault.kind}: there is no position {fault.place!r}; there are {', '.join(PLACES)}"
    if number and not number.isdecimal():
        return f"{fault.kind}: {number!r} is no number of a step"
    if fault.nth < 1:
        return f"{fault.kind}: nth counts from 1, and is {fault.nth}"
    if fault.place in IN_A_REFORM and (fault.nth > 1 or fault.kind in ITSELF):
        return f"{fault.kind}: at {fault.place!r} something is done to a worker, and in the next reform: nth is 1"
    return ""
