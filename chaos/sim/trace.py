"""A run on the terminal: one line for each thing that happened, a column for each node."""

from chaos import history
from chaos.history import Fact
from chaos.sim.cluster import Cluster
from chaos.sim.node import Node
from elasticrl.contract.model import Work

WIDE = 12  # nodes that have a column of their own
LETTER = {
    Work.NONE: ".", Work.JOINING: "j", Work.TRAINING: "T", Work.PARKED: "p", Work.STALLED: "S", Work.FAILED: "x",
    Work.DONE: "D",
}  # fmt: skip


class Trace:
    """Prints as facts come."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._cells: dict[str, str] = {}
        self._sealed = (0, 0, 0)  # generation, first and last version of the updates not yet told of

    def attach(self) -> None:
        """From now on."""
        before = self.cluster.world.onlooker

        def look(fact: Fact) -> None:
            if before is not None:
                before(fact)
            self.see(fact)

        self.cluster.world.onlooker = look
        names = list(self.cluster.nodes)[:WIDE]
        print("    time  " + "".join(f"{name:<9}" for name in names) + " what")
        print(
            "          T training  j joining  p parked  S stalled  x failed  . none  + warm  * leader  ! down  z frozen"
        )

    def see(self, fact: Fact) -> None:
        """One more fact."""
        if isinstance(fact, history.Sealed):
            generation, first, _ = self._sealed
            self._sealed = (fact.generation, first if generation == fact.generation else fact.version, fact.version)
            return
        text = describe(fact)
        if text:
            self._flush(fact.at)
            self._print(fact.at, text)

    def _flush(self, at: float) -> None:
        generation, first, last = self._sealed
        if generation:
            self._sealed = (0, 0, 0)
            self._print(at, f"generation {generation} has sealed updates {first} to {last}")

    def _print(self, at: float, text: str) -> None:
        names = list(self.cluster.nodes)[:WIDE]
        cells = {name: self._cell(self.cluster.nodes[name]) for name in names}
        row = "".join(f"{cells[name] if cells[name] != self._cells.get(name) else chr(183):<9}" for name in names)
        self._cells = cells
        print(f"{at:8.3f}  {row} {text}")

    def _cell(self, node: Node) -> str:
        if not node.powered:
            return "!off"
        if node.frozen:
            return "z"
        leader = self.cluster.store.shared.leader
        led = "*" if leader is not None and leader.node == node.name and leader.incarnation == node.incarnation else ""
        daemon = "" if node.daemon_up else "!"
        warm = "+" if node.warm else ""
        work = "H" if node.hung or node.stopped else LETTER[node.work]
        return f"{work}{node.generation or ''}{warm}{led}{daemon}"


def describe(fact: Fact) -> str:  # noqa: C901, PLR0912 - a table of sentences
    """A fact as a sentence; empty for those that show in the columns anyway."""
    match fact:
        case history.Planned(plan=plan):
            seats = " ".join(str(seat.member) for seat in plan.seats[:WIDE])
            return f"PLAN {plan.generation} {plan.phase.value} [{seats}] from step {plan.resume}: {plan.reason}"
        case history.Committed(step=step, generation=generation):
            return f"step {step} committed by generation {generation}"
        case history.Struck(kind=kind, nodes=nodes, detail=detail):
            return f"FAULT {kind} {' '.join(nodes)} ({detail})"
        case history.Eased(kind=kind):
            return f"fault {kind} is over"
        case history.Healed():
            return "HEALED: from here on the job owes us progress"
        case history.Resumed(generation=generation, version=version, source=source, nodes=nodes):
            return f"generation {generation} trains on {len(nodes)} nodes from update {version} ({source})"
        case history.Elected(member=member):
            return f"{member} leads"
        case history.Expired(member=member):
            return f"the lease of {member} has run out"
        case history.Confined(member=member, held=held, cause=cause):
            return f"{member} {'is quarantined' if held else 'is let go'}: {cause}"
        case history.Died(node=node, cause=cause):
            return f"a worker of {node} died: {cause}"
        case history.Left(member=member, code=code, reason=reason):
            return f"{member} leaves with {code}: {reason}"
        case history.Started(member=member, adopted=adopted):
            return f"{member} starts" + (" and adopts its workers" if adopted else "")
        case history.Asked(verb=verb, node=node):
            return f"an operator asks: {verb} {node}"
        case history.Suspicion(node=node, other=other, suspected=suspected):
            return f"{node} {'does not hear' if suspected else 'hears'} {other}" + ("" if suspected else " again")
        case history.Halted(node=node, generation=generation, under=under):
            return f"{node} ends its workers of generation {generation} under {under}"
        case history.Repeated(node=node, order=order, times=times):
            return f"{node} is told {order} {times} times"
        case history.Saved(step=step, whole=False):
            return f"the save of step {step} is torn"
        case history.Bug(node=node, error=error):
            return f"BUG at {node}: {error}"
    return ""
