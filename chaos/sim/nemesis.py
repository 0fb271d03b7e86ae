"""Puts a scenario's faults in, at their times and positions, and takes them out again.

The one idea: a fault knows how to be undone, or needs no undoing; healing is undoing all that is left.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from chaos.case import node_of
from chaos.faults import Fault, holder
from chaos.history import Asked, Eased, Elected, Fact, Healed, Left, Refused, Struck
from chaos.sim.cluster import Cluster
from chaos.sim.gang import Gang
from chaos.sim.node import Node
from chaos.sim.store import Backup
from elasticrl.contract.evidence import Evidence, Kind, Sign
from elasticrl.contract.model import UNTOLD, Member, Phase, Stall, Verb, Work
from elasticrl.core.lead.drain import needed, refusal
from elasticrl.core.node.dossier import WAYS

LOOKED_S = 0.01  # from an operator's look to what he then writes

Undo = Callable[[], object]
Done = tuple[tuple[str, ...], Undo | None]  # whom it touched, and how to take it out


class Nemesis:
    """What goes wrong in one run."""

    def __init__(self, cluster: Cluster, faults: tuple[Fault, ...]) -> None:
        self.cluster, self.world = cluster, cluster.world
        self.faults: tuple[Fault, ...] = ()
        self.active: dict[int, tuple[Fault, Undo]] = {}
        self.healed = False
        self.struck: list[str] = []
        self._waiting: dict[str, list[tuple[int, Fault]]] = {}
        self._arrivals: dict[str, int] = {}
        cluster.nemesis = self
        self.add(faults)

    # ---- when

    def add(self, faults: tuple[Fault, ...]) -> None:
        """These too: their times and positions are ahead."""
        for number, fault in enumerate(faults, len(self.faults)):
            if fault.at is not None:
                self.world.at(fault.at, self._try, number, fault, "", 40)
            else:
                self._waiting.setdefault(fault.when, []).append((number, fault))
        self.faults += faults
        self.cluster.wanted = frozenset(self._waiting)

    def reached(self, place: str, subject: Gang | Node) -> None:
        """The job has come to a position."""
        if self.healed:
            return
        self._arrivals[place] = arrivals = self._arrivals.get(place, 0) + 1
        here = subject.name if isinstance(subject, Node) else subject.seats[0].name
        for number, fault in list(self._waiting.get(place, ())):
            if arrivals >= fault.nth and self._try(number, fault, here, 0):
                self._waiting[place].remove((number, fault))

    def look(self, fact: Fact) -> None:
        """Positions that show in the store."""
        if isinstance(fact, Elected) and "elected" in self.cluster.wanted:
            node = self.cluster.nodes[fact.member.partition("/")[0]]
            self.world.later(0.001, self.reached, "elected", node)
        elif isinstance(fact, Left) and self.healed:
            # Drained before the healing, it waited for a save. Who healed all others starts it again as well.
            self.world.later(1.0, self._repair, self.cluster.nodes[node_of(fact.member)])

    def _try(self, number: int, fault: Fault, here: str, again: int) -> bool:
        """Strike if that is possible now; a fault at a time waits a while for its chance."""
        if self.healed:
            return False
        done = self._strike(fault, here)
        if done is None:
            if again:
                self.world.later(0.25, self._try, number, fault, here, again - 1)
            return False
        nodes, undo = done
        self.struck.append(fault.kind)
        self.world.note(Struck(at=self.world.now, number=number, kind=fault.kind, nodes=nodes, detail=_detail(fault)))
        if undo is not None:
            self.active[number] = (fault, undo)
            if fault.for_s is not None:
                self.world.later(fault.for_s, self._ease, number)
        return True

    def _ease(self, number: int) -> None:
        if number in self.active:
            fault, undo = self.active.pop(number)
            self.world.note(Eased(at=self.world.now, number=number, kind=fault.kind))
            undo()  # what shows at once, as in a store that was set back, comes after that

    def heal(self) -> None:
        """From here on nothing fails any more; what was broken for good is repaired as operators would."""
        self.healed = True
        for number in sorted(self.active):
            self._ease(number)
        for name in self.cluster.names:
            self.cluster.nodes[name].sick = False
            self._repair(self.cluster.nodes[name])
        self.world.note(Healed(at=self.world.now))

    def _repair(self, node: Node) -> None:
        """As long as the job goes on, all of a node is there."""
        if not self.stopped:
            node.boot()
            node.wants_up = True
            node.start_agent()
            node.start_daemon()

    @property
    def stopped(self) -> bool:
        """Is the job over?"""
        plan = self.cluster.store.shared.plan
        return plan is not None and plan.phase is Phase.STOP

    # ---- whom

    def _whom(self, role: str, here: str) -> Node | None:
        cluster = self.cluster
        plan, leader = cluster.store.shared.plan, cluster.store.shared.leader
        seats = [seat.member.node for seat in plan.seats] if plan else []
        chance = self.world.chance("whom")
        match role:
            case "seated":
                name = chance.choice(seats) if seats else ""
            case "spare":
                taken = set(seats)
                idle = sorted(n for n, node in cluster.nodes.items() if n not in taken and node.daemon_up)
                name = chance.choice(idle) if idle else ""
            case "here":
                name = here
            case "":
                name = chance.choice(cluster.names)
            case _:
                name = holder(role, seats=seats, leader=leader.node if leader else "")
        return cluster.nodes.get(name)

    # ---- what

    def _strike(self, fault: Fault, here: str) -> Done | None:
        tables = (
            self._to_worker, self._to_node, self._to_link, self._to_way, self._to_store, self._to_disk, self._by_operator,
        )  # fmt: skip
        for node in self._targets(fault, here):
            for table in tables:
                done = table(fault.kind, fault, node)
                if done is not None:
                    return done
        return None

    def _targets(self, fault: Fault, here: str) -> Iterator[Node]:
        """Whom the fault names, and where it cannot act there and may go elsewhere, others by the seed."""
        node = self._whom(fault.node, here)
        if node is not None:
            yield node
        if fault.or_any:
            nodes, names = self.cluster.nodes, self.cluster.names
            yield from (nodes[name] for name in self.world.chance("stead").sample(names, min(len(names), 64)))

    def _to_worker(self, kind: str, fault: Fault, node: Node) -> Done | None:  # noqa: C901, PLR0912 - a table of cases
        touched = (node.name,)
        if kind == "crash_loop":
            gang = self.cluster.running
            if gang is None or self.cluster.loop_step is not None:
                return None
            self.cluster.loop_step = gang.attempted + int(fault.value)
            return (), None
        if kind == "refused_loop":
            gang = self.cluster.running
            if gang is None or self.cluster.refused_step is not None:
                return None
            self.cluster.refused_step = gang.attempted + int(fault.value)
            return (), None
        if kind == "sick_node":
            node.sick = True
            return touched, partial(setattr, node, "sick", False)
        if not (node.alive and node.powered and not node.frozen) or node.work is Work.DONE:
            return None
        first, last = (0, node.slots - 1) if fault.slot is None else (fault.slot, fault.slot)
        match kind:
            case "kill_worker":
                node.dies("signal 9 (SIGKILL)", own=False, slot=last, signal=9)
            case "crash_worker":
                node.dies("exit code 1: RuntimeError: CUDA error", own=True, slot=first, raised="RuntimeError")
            case "hang_worker":
                node.hung.add(first)
                self.cluster.watch_still(node, "reform", self.world.now)
            case "stop_worker":
                node.stopped.add(last)
                node.in_kernel = bool(fault.value)
                self.cluster.watch_still(node, "reform", self.world.now)
                return touched, partial(self._continued, node)
            case "stray_worker":
                node.hung.add(first)
                node.strays = True
            case "wait_outside":
                self.cluster.outside.add(node.name)
                node.tell()
                return touched, partial(self._inside, node, fault.value)
            case "reset_links" if node.gang is not None and node.gang.running:
                node.gang.break_()
            case "part_ways":
                node.parts_ways = max(1, int(fault.value))
            case "quiet_log" if self.cluster.script and node.stall is None:
                node.stall = Stall(
                    slot=first, step=0, phase=UNTOLD, for_s=60.0, budget_s=30.0, waiting=True, silent=True
                )
                node.tell()
                return touched, partial(self._line, node)
            case "slow_worker":
                node.slow = fault.value
                return touched, partial(setattr, node, "slow", 1.0)
            case _:
                return None
        return touched, None

    def _continued(self, node: Node) -> None:
        node.stopped.clear()
        node.in_kernel = False

    def _inside(self, node: Node, returns_s: float) -> None:
        """Its server has answered. It takes so long until it is with the others."""
        self.cluster.outside.discard(node.name)
        if returns_s:
            self.cluster.returning.add(node.name)
            self.world.later(returns_s, self.cluster.returning.discard, node.name)
        node.tell()

    def _line(self, node: Node) -> None:
        """Its log tells of progress again."""
        if node.stall is not None and node.stall.silent:
            node.stall = None
            node.tell()

    def _to_node(self, kind: str, fault: Fault, node: Node) -> Done | None:  # noqa: C901, PLR0912 - a table of cases
        touched = (node.name,)
        match kind:
            case "join_node" if not (
                node.powered or self.stopped
            ):  # who starts a node after the end wants the job again
                node.boot()
                return touched, None
            case "gpu_breaks" if node.awake:
                node.finds(
                    Evidence(kind=Kind.XID, sign=Sign.GPU_BROKEN, node=node.name, detail="Xid 79", source="kernel")
                )
                return touched, None
            case "disk_line" | "versions_line" if node.awake:
                node.reads(Sign.DISK_FULL if kind == "disk_line" else Sign.VERSIONS)
                return touched, None
            case "kill_agent" if node.agent_up and not node.frozen:
                node.kill_agent()
                return touched, None
            case "kill_daemon" if node.daemon_up:
                node.kill_daemon()
                return touched, partial(self._daemon_again, node)
            case "pause_daemon" if node.awake:
                node.daemon_paused = True
                self.cluster.beats.changed(node.name)
                return touched, partial(self._unpause, node)
            case "pause_node" if node.awake:
                node.frozen = True
                self.cluster.beats.changed(node.name)
                return touched, partial(self._unfreeze, node)
            case "kill_node" if node.powered and not node.frozen:
                node.kill_all()
                return touched, partial(self._daemon_again, node)
            case "power_cut" if node.powered and not node.frozen:
                node.power_off()
                return touched, partial(self._boot, node)
            case "lose_vault" if not node.vault.empty or self.cluster.shape.vault_moves:
                node.lose_vault()
                return touched, None
            case "clock_rate":
                node.clock.run_at(fault.value)
                return touched, partial(node.clock.run_at, 1.0)
            case "clock_step":
                return touched, None
            case "lose_lease" if node.lease is not None and node.lease in self.cluster.store.leases:
                self.cluster.store.forget(node.lease)
                return touched, None
            case "lost_publishes":
                node.mute_publish = True
                return touched, partial(setattr, node, "mute_publish", False)
            case "stale_view":
                self.cluster.store.lags[node.name] = fault.value
                return touched, partial(self._fresh, node.name)
        return None

    def _daemon_again(self, node: Node) -> None:
        if node.powered and node.wants_up and (not self.stopped or node.agent_up):
            node.start_daemon(again=True)

    def _boot(self, node: Node) -> None:
        if not self.stopped and node.wants_up:
            node.boot(again=True)

    def _unpause(self, node: Node) -> None:
        node.daemon_paused = False
        self.cluster.beats.changed(node.name)
        node.thaw()
        node.judge()

    def _unfreeze(self, node: Node) -> None:
        node.frozen = False
        self.cluster.beats.changed(node.name)
        node.thaw()
        node.judge()

    def _fresh(self, name: str) -> None:
        store = self.cluster.store
        store.lags.pop(name, None)
        if name in store.watchers:
            store.refresh(name)

    def _to_link(self, kind: str, fault: Fault, node: Node) -> Done | None:
        net, names = self.cluster.net, self.cluster.names
        scopes = ("beat", "data") if fault.scope == "all" else (fault.scope,)
        match kind:
            case "cut_store" if fault.value:
                net.losses[node.name] = fault.value
                return (node.name,), lambda: net.losses.pop(node.name, None)
            case "cut_store":
                ways = [c for c, way in ((net.to_store, "out"), (net.from_store, "in")) if fault.way in (way, "both")]
                for counter in ways:
                    counter[node.name] += 1
                return (node.name,), lambda: [counter.subtract([node.name]) for counter in ways]
            case "cut_link":
                peer = self._whom(fault.peer, "")
                if peer is None or peer is node:
                    return None
                pairs = [(node.name, peer.name)] * (fault.way != "in") + [(peer.name, node.name)] * (fault.way != "out")
                return (node.name, peer.name), self._cut([(a, b, s) for a, b in pairs for s in scopes])
            case "partition":
                chance = self.world.chance("partition")
                left = [name for name in names if chance.random() < 0.5]
                right = [name for name in names if name not in left]
                pairs = [(a, b) for a in left for b in right]
                if not pairs:
                    return None
                both = pairs + [(b, a) for a, b in pairs]
                return tuple(names), self._cut([(a, b, s) for a, b in both for s in scopes])
            case "isolate":
                counters = [c for c, way in ((net.dumb, "out"), (net.deaf, "in")) if fault.way in (way, "both")]
                for hearing in counters:
                    hearing.update((node.name, scope) for scope in scopes)
                net.cut_nodes[node.name] += 1
                self.cluster.beats.changed(node.name)
                return (node.name,), partial(self._rejoin, node, counters, scopes)
            case "lossy_node":
                if node.name in net.lossy:
                    return None
                net.lossy[node.name] = fault.value
                self.cluster.beats.lossy(node.name)
                return (node.name,), lambda: net.lossy.pop(node.name, None)
        return None

    def _to_way(self, kind: str, fault: Fault, node: Node) -> Done | None:
        net = self.cluster.net
        match kind:
            case "late_ways":
                net.late.add(node.name)
                self._told_late(node, fault.value)
                return (node.name,), partial(net.late.discard, node.name)
            case "mtu_hole":
                net.holes[node.name] = int(fault.value)
                return (node.name,), lambda: net.holes.pop(node.name, None)
            case "nccl_breaks":
                ways = net.untried if fault.value else net.no_nccl
                ways[node.name] += 1
                return (node.name,), lambda: ways.subtract([node.name])
        return None

    def _told_late(self, node: Node, after_s: float) -> None:
        """A neighbour's beats tell that one way is late; this node's, after a while, that all of its own are."""
        plan = self.cluster.store.shared.plan
        others = [self.cluster.nodes[name] for name in plan.seated if name != node.name] if plan else []
        if plan is None or not others:
            return

        def fact(of: Node, peer: Node, sign: Sign) -> Evidence:
            return Evidence(
                kind=Kind.PROBE, sign=sign, node=of.name, peer=peer.name, generation=plan.generation, source=WAYS,
                detail="a round trip takes 400 ms" if sign is Sign.DELAYED else "",
            )  # fmt: skip

        first = others[0]
        self.world.later(0.3, first.finds, fact(first, node, Sign.DELAYED))
        for other in others[1:]:
            self.world.later(0.3, first.finds, fact(first, other, Sign.HEALTHY))
        for other in others if after_s else ():
            self.world.later(after_s, node.finds, fact(node, other, Sign.DELAYED))

    def _rejoin(self, node: Node, counters: Sequence[Counter[tuple[str, str]]], scopes: tuple[str, ...]) -> None:
        for counter in counters:
            counter.subtract((node.name, scope) for scope in scopes)
        self._uncut_node(node.name)
        self.cluster.beats.changed(node.name)

    def _uncut_node(self, name: str) -> None:
        cut = self.cluster.net.cut_nodes
        cut[name] -= 1
        if cut[name] <= 0:
            del cut[name]

    def _cut(self, cuts: list[tuple[str, str, str]]) -> Undo:
        net = self.cluster.net
        ends = sorted({end for a, b, _ in cuts for end in (a, b)})
        net.cuts.update(cuts)
        net.cut_nodes.update(ends)
        for end in ends:
            self.cluster.beats.changed(end)

        def undo() -> None:
            net.cuts.subtract(cuts)
            for end in ends:
                self._uncut_node(end)
            for end in ends:
                self.cluster.beats.changed(end)

        return undo

    def _to_store(self, kind: str, fault: Fault, node: Node) -> Done | None:
        del node
        store, net = self.cluster.store, self.cluster.net
        match kind:
            case "store_outage" if store.up:
                store.up = False
                return (), store.come_back
            case "store_failover" if store.up:
                store.up = False
                self.world.later(1.3, store.come_back)
                return (), None
            case "store_compaction":
                store.relist()
                return (), None
            case "store_wiped" if store.up and (fault.value or not self.stopped):  # `value`: of a job that is over, too
                store.set_back(Backup())
                return (), None
            case "store_set_back" if store.up:
                return (), partial(self._set_back, store.backup())
            case "store_loss":
                net.loss = fault.value
                return (), partial(setattr, net, "loss", 0.0)
            case "store_delay":
                net.delay = fault.value
                return (), partial(setattr, net, "delay", 0.0)
            case "store_repeat":
                net.repeat = fault.value
                return (), partial(setattr, net, "repeat", 0.0)
            case "late_plan":
                self.cluster.late_plan = fault.value
                return (), None
            case "late_commit":
                self.cluster.late_commit = fault.value
                return (), None
        return None

    def _set_back(self, backup: Backup) -> None:
        if not self.stopped:
            self.cluster.store.set_back(backup)

    def _to_disk(self, kind: str, fault: Fault, node: Node) -> Done | None:
        del node
        disk = self.cluster.disk
        match kind:
            case "slow_disk":
                disk.factor = fault.value
                return (), partial(setattr, disk, "factor", 1.0)
            case "torn_save" if disk.active:
                for save in disk.active:
                    save.torn = True
                return (), None
            case "corrupt_save":
                newest = disk.newest()
                if newest is not None:
                    newest.rotten = True
                    return (), None
        return None

    def _by_operator(self, kind: str, fault: Fault, node: Node) -> Done | None:
        if kind == "ask_drain":
            return self._drain_if_spared(fault, node)
        if kind == "start_again":
            return self._start_again()
        if kind not in ("drain", "admit", "pause", "stop"):
            return None
        nodes = self.cluster.nodes
        via = next((nodes[name] for name in self.cluster.names if nodes[name].awake), None)
        early = kind in ("stop", "drain") and fault.value  # before there is a plan
        if via is None or (self.cluster.store.shared.plan is None and not early):
            return None
        if kind == "drain" and not node.awake:
            return None
        verb = Verb(kind)
        concerned = verb in (Verb.DRAIN, Verb.ADMIT)
        # Half of the drains are asked on the node itself.
        if verb is Verb.DRAIN and self.world.chance("operator").random() < 0.5:
            via = node
        self._ask(via, verb, node.name if concerned else None)
        undo = partial(self._ask_somebody, Verb.RESUME) if verb is Verb.PAUSE else None
        return ((node.name,) if concerned else ()), undo

    def _drain_if_spared(self, fault: Fault, node: Node) -> Done | None:
        """As `elasticrl drain` does from a machine that is no node. `value`: the `min_nodes` of the configuration there.

        It looks, and then writes: what others have asked for in between it has not looked at.
        """
        store, settings = self.cluster.store, self.cluster.settings
        if not store.up:
            return None
        view, asked = store.whole(), dict(store.drains)
        least = needed(view) or int(fault.value) or settings.membership.min_nodes
        there = replace(settings, membership=replace(settings.membership, min_nodes=least))
        if why := refusal(view, there, node.name, asked.values()):
            self.world.note(Refused(at=self.world.now, node=node.name, why=why))
            return (), None
        if node.name not in store.records:
            return (), None  # he is told that it is no member
        self.world.later(LOOKED_S, self._drain_as_looked, fault, node, asked)
        return (node.name,), None

    def _drain_as_looked(self, fault: Fault, node: Node, asked: Mapping[str, Member]) -> None:
        store = self.cluster.store
        if not store.up or node.name not in store.records:
            return
        if store.drain(node.name, asked):
            self.world.note(Asked(at=self.world.now, verb=Verb.DRAIN.value, node=node.name))
        else:
            self._drain_if_spared(fault, node)

    def _start_again(self) -> Done | None:
        """All nodes of a job that is over, and that all have left."""
        nodes = self.cluster.nodes.values()
        if not self.stopped or any(node.daemon_up for node in nodes):
            return None
        for node in nodes:
            node.wants_up = True
            node.start_agent()
            node.start_daemon()
        return (), None

    def _ask(self, via: Node, verb: Verb, node: str | None) -> None:
        via.asked(verb, node)

    def _ask_somebody(self, verb: Verb) -> None:
        """An operator who sees that it has not helped asks again."""
        for name in sorted(self.cluster.nodes):
            node = self.cluster.nodes[name]
            if node.awake and not self.cluster.net.to_store[name]:
                self._ask(node, verb, None)
                break
        self.world.later(2.0, self._insist, verb)

    def _insist(self, verb: Verb) -> None:
        if verb is Verb.RESUME and self.cluster.store.paused_at is not None:
            self._ask_somebody(verb)


def _detail(fault: Fault) -> str:
    parts = [fault.when or f"at {fault.at:g} s"]
    if fault.for_s is not None:
        parts.append(f"for {fault.for_s:g} s")
    if fault.value:
        parts.append(f"value {fault.value:g}")
    if fault.way != "both":
        parts.append(fault.way)
    if fault.scope != "all":
        parts.append(fault.scope)
    return ", ".join(parts)
