"""A virtual cluster: nodes, store, network, disk, and the gangs that form on them."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from chaos.history import Committed, Fact
from chaos.sim.beats import Beats
from chaos.sim.disk import Disk
from chaos.sim.gang import Gang
from chaos.sim.node import Node
from chaos.sim.store import LeaseGone, Store, Waits
from chaos.sim.world import Network, World
from elasticrl.contract import events, orders
from elasticrl.contract.events import Action
from elasticrl.contract.model import LOADING, UNTOLD, Plan, Stall, Work
from elasticrl.contract.pairs import Result
from elasticrl.contract.settings import Settings
from elasticrl.contract.versions import WIRE
from elasticrl.core.node.suspect import Budgets
from elasticrl.runtime.vault.version import Lineage, Version, alive
from elasticrl.shell.sight import GATHER_S, MANY

if TYPE_CHECKING:
    from chaos.sim.nemesis import Nemesis


MBPS, MTU = 1000.0, 1500  # of each way
WAITS_S = 0.01  # until a request that waits in the store is looked at again
OURS = json.dumps({"wire": WIRE})
FOREIGN = json.dumps({"wire": f"not {WIRE}"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a run is like: the nodes, the job, and how long things take when nothing is wrong."""

    nodes: int = 3
    trainer: Literal["points", "ppo"] = "points"  # what real nodes run: a tiny training, or PPO with engines
    late: int = 0  # of these, so many are off until something starts them
    slots: int = 1
    settings: Settings = field(default_factory=Settings)
    updates: int = 1  # optimizer updates in a step
    save_every: int = 5
    step_s: float = 0.5
    save_s: float = 0.6
    warm_s: tuple[float, float] = (1.0, 1.5)
    load_s: float = 0.0  # until the program of a fresh worker has its model
    load_ahead: bool = False  # a spare process loads it as soon as it is warm
    restore_s: float = 0.0  # until state that was kept is put back, beside what that takes with a small model
    agent_s: float = 2.0
    watch_s: float = 0.01
    apart_s: float = 0.0  # by how much the news of two keys of the store may come apart
    many: int = MANY  # records from which on news of others' is gathered
    gather_s: float = GATHER_S  # for each record
    ends_s: float = 0.0  # until a worker that its agent has killed is gone: its memory is freed first
    look_s: tuple[float, float] = (0.05, 0.3)  # until stalled workers have said where they are
    alien: tuple[str, ...] = ()  # nodes that compute other bits
    foreign: tuple[str, ...] = ()  # nodes whose workers speak another wire
    finds_bits: bool = False  # what decides a node's bits it knows when a process of it is warm, as real ones do
    torchrun: bool = False  # its agents start the processes: of none is it told how it ended
    evaluates_every: int = 0  # so many steps there is an evaluation on all nodes; 0: never
    evaluates_s: float = 0.0  # that takes so long
    script_steps: int = 0  # below job.level exact: the script ends after so many; 0: never
    script_saves: int = 1  # every so many of its steps
    log_every: int = 0  # there, its log tells of progress every so many steps; 0: never
    vault_moves: bool = False  # one that was lost is back at another port
    vault_goes: bool = False  # with its daemon, and is back with the next one; the agent answers for them meanwhile
    each_beat: bool = False
    deep: bool = False  # probes test each way as real ones do, NCCL too, and agents tell how long phases and steps take
    needs: dict[str, int] = field(default_factory=dict)  # nodes whose configuration has another `min_nodes`


class Cluster:
    """Everything that a run is about."""

    def __init__(self, world: World, shape: Shape) -> None:
        self.world, self.shape, self.settings = world, shape, shape.settings
        self.updates, self.save_every, self.step_s = shape.updates, shape.save_every, shape.step_s
        self.warm_s, self.agent_s, self.look_s = shape.warm_s, shape.agent_s, shape.look_s
        self.net = Network()
        self.store = Store(world, self.net, shape.watch_s, shape.apart_s, shape.many, shape.gather_s)
        self.disk = Disk(self, shape.save_s)
        self.beats = Beats(self, each=shape.each_beat)
        self.budgets = Budgets(settings=self.settings.timeouts)
        self.gangs: dict[int, Gang] = {}
        self.layouts: dict[int, int] = {}
        self.digests: dict[tuple[int, int], str] = {}
        self.lineages: dict[int, Lineage] = {}  # of the generations that have formed
        self.script = (
            not self.settings.means.joins
        )  # a program with checkpoints of its own, in fresh processes each time
        self.own = (0, "")  # the newest of those: version and digest
        self.running: Gang | None = None
        self.committed: list[str] = []
        self.finishing: dict[str, int] = {}
        self.outside: set[str] = set()  # nodes one of whose workers waits for a server, and says so
        self.returning: set[str] = set()  # one has its answer, and is on its way to the others
        self.loop_step: int | None = None
        self.refused_step: int | None = None
        self.late_commit = self.late_plan = 0.0
        self.steps = 0
        self.wanted: frozenset[str] = frozenset()
        self.nemesis: Nemesis | None = None
        width = len(str(max(shape.nodes - 1, 1)))
        names = [f"n{i:0{max(width, 2)}d}" for i in range(shape.nodes)]
        self.nodes = {name: Node(self, name, shape.slots) for name in names}
        self.names = sorted(names)
        world.onlooker = self._look

    def start(self) -> None:
        """Power on, not all at the same moment."""
        for name in list(self.nodes)[: len(self.nodes) - self.shape.late]:
            self.world.later(0.3 * self.world.chance("start").random(), self.nodes[name].boot)

    def settings_of(self, name: str) -> Settings:
        """What its daemon is configured with."""
        if name not in self.shape.needs:
            return self.settings
        membership = self.settings.membership
        return replace(self.settings, membership=replace(membership, min_nodes=self.shape.needs[name]))

    def bits_of(self, name: str) -> str:
        """The fingerprint of what decides a node's bits."""
        return "other" if name in self.shape.alien else "same"

    def versions_of(self, name: str) -> str:
        """What its workers say that they run."""
        return FOREIGN if name in self.shape.foreign else OURS

    def reach(self, place: str, subject: "Gang | Node") -> None:
        """The job has come to a position at which a fault may wait."""
        if place in self.wanted and self.nemesis is not None:
            self.nemesis.reached(place, subject)

    def _look(self, fact: Fact) -> None:
        if isinstance(fact, Committed):
            self.committed.append(fact.manifest)
        if self.nemesis is not None:
            self.nemesis.look(fact)

    # ---- requests to the store

    def send(
        self,
        name: str,
        apply: Callable[[], object],
        answer: Callable[[object], None] = lambda _: None,
        *,
        repeatable: bool = False,
        action: Action | None = None,
    ) -> None:
        """A request on its way: it may be lost, late, or applied again; so may its answer."""
        net, chance = self.net, self.nodes[name].way
        commits = isinstance(action, events.WriteCommit)
        if commits:
            self.reach("committing", self.nodes[name])
        loss = max(net.loss, net.losses.get(name, 0.0)) if net.losses else net.loss
        if net.to_store.get(name) or (loss and chance.random() < loss):
            return

        lag = net.lag(chance)
        if self.late_plan and isinstance(action, events.Propose):
            lag, self.late_plan = lag + self.late_plan, 0.0
        self.world.later(lag, self._arrive, name, apply, answer, repeatable, commits)

    def _arrive(
        self, name: str, apply: Callable[[], object], answer: Callable[[object], None], repeatable: bool, commit: bool
    ) -> None:
        if not self.store.up:
            return
        net, chance = self.net, self.nodes[name].way
        result = self._apply(apply)
        if isinstance(result, Waits):
            self.world.later(WAITS_S, self._arrive, name, apply, answer, repeatable, commit)
            return
        if net.repeat and repeatable:
            self.world.later(net.repeat * chance.random(), self._apply_again, apply)
        if self.late_commit and commit:
            self.world.later(self.late_commit, self._apply_again, apply)
            self.late_commit = 0.0
        loss = max(net.loss, net.losses.get(name, 0.0)) if net.losses else net.loss
        if not (net.from_store.get(name) or (loss and chance.random() < loss)):
            self.world.later(net.lag(chance), self._back, self.nodes[name], answer, result)

    def _back(self, node: Node, answer: Callable[[object], None], result: object) -> None:
        if not node.powered:
            return
        if node.frozen or node.daemon_paused:
            self.world.later(0.1, self._back, node, answer, result)
        else:
            answer(result)

    def _apply(self, apply: Callable[[], object]) -> object:
        try:
            return apply()
        except LeaseGone as gone:
            return gone

    def _apply_again(self, apply: Callable[[], object]) -> None:
        if self.store.up:
            self._apply(apply)

    # ---- who can do what

    def reachable(self, src: str, dst: str) -> bool:
        """Does a probe from one node to another come back?"""
        other = self.nodes.get(dst)
        if other is None or not other.awake:
            return False
        net = self.net
        beats = net.hears(src, dst, "beat") and net.hears(dst, src, "beat")
        return beats and (self.shape.deep or net.linked(src, dst))  # else what carries data is tested by itself

    def tried(self, src: str, dst: str) -> Result:
        """What a thorough test of the way between two nodes says at this end."""
        net, other = self.net, self.nodes[dst]
        back = other.awake and net.hears(dst, src, "data")
        both = back and net.hears(src, dst, "data")
        if not both:
            return Result(node=src, peer=dst, sent=100, heard=100 * back, tcp="timed out")
        nccl = None if net.untried[src] or net.untried[dst] else "ok"
        if net.fabric_broken((src, dst)) and nccl:
            nccl = "unhandled system error"
        largest = min((net.holes[name] for name in (src, dst) if name in net.holes), default=MTU)
        return Result(
            node=src, peer=dst, sent=100, answered=100, heard=100, latency_ms=0.2, mtu=MTU, largest=largest, tcp="ok",
            mbps=MBPS, gloo="ok", nccl=nccl,
        )  # fmt: skip

    def gang(self, plan: Plan) -> Gang:
        """The gang of this plan."""
        if plan.generation not in self.gangs:
            gang = Gang(self, plan)
            self.gangs[plan.generation] = gang
            self.layouts[plan.generation] = gang.shards
            for old in sorted(self.gangs)[:-9]:
                del self.gangs[old]
        return self.gangs[plan.generation]

    def newest_whole(self, seats: list[Node], floor: int, committed: int | None) -> tuple[int, int]:
        """The newest version that is whole in these nodes' vaults, and the generation that sealed it; (-1, 0): none.

        What a later generation has left does not count, nor what is older than `floor`, unless it was made since the one that
        `committed` it: by who began below, where the checkpoint was rotten (`vault.holdings`).
        """
        found: dict[tuple[int, int], int] = {}
        for node in seats:
            if node.powered and node.vault.serves:
                for key, shards in node.vault.all().items():
                    found[key] = found.get(key, 0) | shards
        last = max((generation for _, generation in found), default=0)
        lineage = self.lineages.get(last, ())
        if committed is not None:
            floor = min([floor, *(cut.start.step for cut in lineage if cut.generation > committed)])
        whole = [
            key
            for key, shards in found.items()
            if key[0] >= floor
            and shards == self.layouts[key[1]]
            and key in self.digests
            and alive(lineage, key[1], Version(key[0]))
        ]
        return max(whole, default=(-1, 0))

    def learn(self, phase: str, took_s: float) -> None:
        """A phase was left in this time."""
        self.budgets = self.budgets.learn(phase, took_s)

    def broke_up_over(self, stall: Stall | None) -> None:
        """A gang has ended in which somebody was found standing still."""
        if stall is not None:
            self.budgets = self.budgets.end(stall)

    def finished(self, version: int) -> bool:
        """Are all steps made?"""
        steps = self.shape.script_steps if self.script else self.settings.steps
        return bool(steps) and version >= steps * self.updates

    # ---- the ends of gangs

    def finish(self, node: Node, halt: orders.Halt) -> None:
        """A node's workers shall finish the step, save, and end."""
        if node.name in self.finishing:
            return
        self.finishing[node.name] = halt.generation
        self.world.later(halt.within_s, self._finished, node, halt.generation)
        gang = node.gang
        if gang is not None and gang.running and not gang.broken and node.work is not Work.DONE:
            gang.halting = True
        elif not any(node is source for save in self.disk.active for source, _ in save.sources):
            self.world.later(0.05, self._finished, node, halt.generation)  # between gangs workers save nothing

    def broke_up(self, node: Node) -> None:
        """Workers that were asked to end leave a broken gang, and end without a save, unless another gang is told of first."""
        if node.name in self.finishing:
            self.world.later(0.3, self._finished, node, self.finishing[node.name])

    def _finished(self, node: Node, generation: int) -> None:
        if self.finishing.get(node.name) == generation:
            del self.finishing[node.name]
            node.halted(generation)

    def saved(self, nodes: list[Node]) -> None:
        """A save has ended: who waited for it may end too, unless another one of theirs goes on or is to come, or they are
        in another gang by now.
        """
        waiting = {node.name for save in self.disk.active for node, _ in save.sources}
        savers = {node.name for node in nodes}
        for node in nodes:
            gang = node.gang
            if gang is not None and gang.names != savers:
                continue
            if gang is not None and gang.halting and gang.running and not (gang.broken or gang.saves_last):
                continue  # it makes its last step first
            if node.name in self.finishing and node.name not in waiting:
                self._finished(node, self.finishing[node.name])

    def watch_still(self, node: Node, phase: str, since: float) -> None:
        """A worker that stood still when its group broke: either it moves again, or its agent finds it stalled."""
        if not node.alive or node.work is Work.PARKED or (node.gang is not None and node.gang.running):
            return
        if node.phase == LOADING:
            return  # of a program that has not asked for its rank no agent expects progress
        if node.able and self.script:
            node.reset()
            return
        if node.able:
            if node.work is not Work.JOINING or node.next_plan is not None:
                node.part()
            return
        phase = UNTOLD if self.script else phase
        budget_s = self.settings.timeouts.confirm_s if self.script and node.stopped else self.budgets.budget(phase)
        if not node.frozen and node.stall is None and self.world.now - since >= budget_s:
            node.stalls(phase, self.world.now - since, budget_s)
        self.world.later(0.2, self.watch_still, node, phase, since)
