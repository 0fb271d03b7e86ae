"""The frozen values the core decides by. `elasticrl.config` produces them from YAML; the core never sees a file.

Every duration is in seconds and ends in `_s`. The defaults are those of a small cluster on one switch; the relations
between them (a lease must outlive two keepalives, ...) are checked in `elasticrl.config.relations`, not here.
"""

from dataclasses import field
from typing import Literal

from elasticrl.base.value import dataclass
from elasticrl.contract.level import MEANS, Level, Means


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Who may be in, and how we know that they are alive."""

    min_nodes: int = 1  # below this many the plan holds instead of training
    max_nodes: int = 64  # never seat more nodes than this
    spares: int = 0  # nodes kept warm and unseated, to take a dead one's place
    settle_s: float = 1.0  # the first plan waits this long for nodes to arrive, and growth for those who get ready
    grow: Literal["useful", "always"] = "useful"  # useful: only when more nodes mean fewer rounds of lanes
    fixed: bool = False  # no other world than that of max_nodes: `least` of them, or none
    grow_every_s: float = 600.0  # a gang that grows by a restart of all is restarted for that no more often
    lease_ttl_s: float = 10.0  # a member whose lease is not renewed this long is dead to all
    keepalive_s: float = 4.0
    report_s: float = 5.0  # how often a training node refreshes the step in its record
    beat_s: float = 0.2  # neighbours' beats over UDP
    suspect_s: float = 0.8  # no beat from a neighbour this long: suspected
    neighbours: int = 2  # watched on either side of the ring
    deputies: int = 2  # seats that watch all records beside the leader, ready to take over
    campaign_spread_s: float = 0.5  # candidates that are not deputies wait up to this long, by a hash of their name
    rejoin_s: float = 2.0  # after a change of leader, several members without a record get this long to come back


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The ladder: each rung has a deadline and falls to the next."""

    start_s: float = 120.0  # first start of a gang, from plan to training
    reform_s: float = 10.0  # rung 1
    replace_s: float = 20.0  # rung 2
    restart_s: float = 120.0  # rung 3
    reload_s: float = 300.0  # rung 4
    probe_s: float = 10.0  # a PROBE plan waits this long for the members' answers
    drain_s: float = 60.0  # a draining node finishes, saves and leaves within this
    grace_s: float = 10.0  # from SIGTERM to SIGKILL, where a script's workers are ended
    steady_s: float = (
        300.0  # a gang that tells no steps and has run so long has got on: failures before it do not count
    )
    no_progress_limit: int = 3  # failures of the program's own, whatever each says, with no step beyond the first's


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """When a node that is up is kept out."""

    quarantine_s: float = 60.0  # the first quarantine; each further one doubles it
    quarantine_max_s: float = 3600.0
    quarantine_share: float = 0.5  # at most this share of the known nodes at once
    node_strikes: int = 3  # a node whose worker failed this often without progress in between is quarantined
    straggler_z: float = 4.0  # robust standard deviations above the gang from which a rank is slow
    straggler_steps: int = 5  # reports in a row


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long a worker may be in one phase without progress. Budgets are learned below these caps."""

    phase_s: dict[str, float] = field(default_factory=dict)  # cap per phase; see `default_phase_s` for the others
    default_phase_s: float = 60.0
    floor_s: float = 2.0  # a learned budget is never shorter
    slack: float = 10.0  # a learned budget is this many times what is usual
    quiet_s: float = 0.0  # a script that tells nothing may show no sign of life for so long; 0: for ever
    progress: Literal["off", "tell", "restart"] = "tell"  # when a script's log tells of no progress for unusually long
    confirm_s: float = 1.0  # a stall must stand this long after its budget before it is acted on
    dump_s: float = 10.0  # the longest that stacks and recorders of stalled workers are waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All that the core is told: one job, on one node."""

    job: str = "job"
    level: Level = Level.EXACT
    lanes: int = 8
    team: int = 1  # so many workers of a node carry lanes together
    steps: int = 0  # the job is finished after this many; 0: it never is
    copies: int = 1  # vault copies on other nodes
    retry_s: float = 1.0  # an action whose effect has not been seen is decided again after this long
    exact: Literal["require", "warn", "off"] = "require"  # what to do with a node that computes other bits
    membership: Membership = field(default_factory=Membership)
    recovery: Recovery = field(default_factory=Recovery)
    health: Health = field(default_factory=Health)
    timeouts: Timeouts = field(default_factory=Timeouts)
    policy: dict[str, str] = field(default_factory=dict)  # class of fault -> what is done at most; others: restart
    fallback: Literal["none", "gloo"] = "none"  # what to go on over where NCCL is proven broken
    fallback_limit: float = 20.0  # not where moving a step's bytes would take more than so many usual steps

    @property
    def means(self) -> Means:
        """What a plan of this job may use."""
        return MEANS[self.level]
