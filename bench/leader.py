"""What the leader, a deputy and any other node do in a second, by how many nodes there are: processor and bytes.

    python bench/leader.py [--nodes 256,1024,4096,16384] [--slots 8] [--fixed-ports] [--json]

It is the real core and the real reading and writing of the store's values, without a store: every node trains, and refreshes
its record as often as nodes do.

look      the leader goes over all records once, as it does when it is told of news
leader    of a second in which nothing happens: reading what is refreshed, and a look at each bunch of it
deputy    the same, of a node that would take over
follower  a step of any other node, for whatever it is told of
recovery  of the leader, for the plan after a node's death: writing it, and reading the two records of each node that answer
          it, for as long as one etcd takes to write them

plan      as it lies in the store, and what all nodes read of it together
after     the same of the plan after a node's death, which also names the gang before until a step is sealed
written   what it takes the leader to turn that plan into bytes; what it takes a node to read them
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.report import Watch, dump, end_cleanly, show
from elasticrl.base.value import dataclass
from elasticrl.contract import events
from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.model import Lap, Member, Pace, Phase, Plan, Record, Seat, View, Work
from elasticrl.contract.settings import Membership, Settings
from elasticrl.core.node.follow import REPORTS_PER_S
from elasticrl.core.node.state import State
from elasticrl.core.step import step
from elasticrl.shell import keys
from elasticrl.shell.sight import GATHER_S, MANY

RECOVERY_S = 2.0  # in which the nodes' answers to a plan come, at least
WRITES_PER_S = 4500  # of one etcd (bench/scale.py): many nodes' answers come as fast as it writes them


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A plan in which all train, and what each node says of itself. Example: Cluster(plan=..., records={"gpu-00000": ...})"""

    plan: Plan
    records: dict[str, Record]

    def record(self, node: str, **more: Any) -> bytes:
        return keys.dump(replace(self.records[node], **more))


def cluster(nodes: int, slots: int, *, fixed_ports: bool) -> Cluster:
    """Addresses as a real cluster has them: they decide how far a plan can be compressed."""
    chance = random.Random(nodes)

    def ports() -> list[int]:
        beat, echo, vault, probe = (chance.randrange(32768, 60999) for _ in range(4))
        return [7461, echo, 7462, 7463] if fixed_ports else [beat, echo, vault, probe]  # the agent's own is always free

    plan_seats, records = [], {}
    paces = tuple(
        Pace(slot=slot, phase=phase, seconds=0.0481) for slot in range(slots) for phase in ("rollout", "update")
    )
    for i in range(nodes):
        member = Member(node=f"gpu-{i:05d}", incarnation=1 + i * 7 % 3)
        beat, echo, vault, probe = (f"10.{i >> 16 & 255}.{i >> 8 & 255}.{i & 255}:{port}" for port in ports())
        plan_seats.append(Seat(member=member, born=1, slots=slots, beat=beat, echo=echo, vault=vault, probe=probe))
        records[member.node] = Record(
            member=member, slots=slots, beat=beat, echo=echo, vault=vault, probe=probe, warm=True, work=Work.TRAINING,
            generation=1, born=1, step=5, phase="update", endpoint=beat, bits="torch 2.13.0, sm_90, deterministic",
            versions='{"wire":"2","torch":"2.13.0","python":"3.11.7","nccl":"2.26"}', pace=paces,
            lap=Lap(generation=1, seconds=1.31, bytes=1_881_000), beat_at=1.7e9, needs=nodes // 2,
        )  # fmt: skip
    because = (Cause(why=Why.EXPIRED, who=(plan_seats[-1].member,)),)
    plan = Plan(generation=1, phase=Phase.TRAIN, seats=tuple(plan_seats), lanes=nodes * slots, causes=because)
    return Cluster(plan=plan, records=records)


class Core:
    """One node's core, told of the store."""

    def __init__(self, of: Cluster, place: int, *, everyone: bool) -> None:
        nodes, me = len(of.plan.seats), of.plan.seats[place].member
        settings = Settings(lanes=of.plan.lanes, membership=Membership(min_nodes=nodes // 2, max_nodes=nodes))
        self.now = 100.0
        self.records = dict(of.records)
        self.everyone = everyone
        self.state = State(settings=settings, me=me, card=of.records[me.node], met=0)
        self.view = View(
            revision=10, plan=of.plan, plan_revision=3, leader=of.plan.seats[0].member, leader_revision=2,
            own=of.records[me.node], quarantines={} if everyone else None,
        )  # fmt: skip
        self.take(events.Leased(now=self.now, sent=self.now))
        mine = of.records[me.node].into(events.Workers, now=self.now)
        self.take(mine)
        self.show()

    def take(self, event: events.Event) -> None:
        self.state = step(self.state, event).state

    def show(self, **more: Any) -> None:
        """What the store shows now."""
        self.now += 0.0001
        records = dict(self.records) if self.everyone else None
        self.view = replace(self.view, revision=self.view.revision + 1, records=records, **more)
        self.take(events.Seen(now=self.now, view=self.view))


def spent(what: Callable[[], object], times: int = 1) -> float:
    """Seconds of the processor for one of so many."""
    begun = time.process_time()
    for _ in range(times):
        what()
    return (time.process_time() - begun) / times


def bunches(of: Cluster, number: int, **more: Any) -> Iterator[list[bytes]]:
    """Every node's record once, as it comes from the store, in so many bunches."""
    values = [of.record(node, **more) for node in of.records]
    for i in range(number):
        yield values[i * len(values) // number : (i + 1) * len(values) // number]


def read(core: Core, values: list[bytes]) -> None:
    """A bunch of records into the picture, and a look."""
    for value in values:
        record = keys.load(Record, value, "a record")
        core.records[record.member.node] = record
    core.show()


def measure(nodes: int, slots: int, *, fixed_ports: bool) -> dict[str, Any]:
    of = cluster(nodes, slots, fixed_ports=fixed_ports)
    names = list(of.records)
    refreshed = min(nodes / Membership().report_s, REPORTS_PER_S)  # records in a second
    gather_s = GATHER_S * nodes if nodes >= MANY else 0.0
    each = max(1, round(refreshed * gather_s))  # in a bunch
    leader, deputy, follower = (
        Core(of, 0, everyone=True),
        Core(of, 1, everyone=True),
        Core(of, nodes // 2, everyone=False),
    )
    values = [of.record(names[7 * i % nodes], step=6 + i) for i in range(each * 10)]

    def second(core: Core) -> float:
        bunch = [values[i * each : (i + 1) * each] for i in range(10)]
        return spent(lambda: read(core, bunch.pop()), 10) * refreshed / each

    shares = {"leader": second(leader), "deputy": second(deputy)}
    look_s = spent(leader.show, 10)
    follower_s = spent(follower.show, 1000)
    dead, survivors = names[-1], of.plan.seats[:-1]
    plan = replace(of.plan, generation=2, seats=survivors, gang=tuple(names))
    value = keys.dump(plan)
    dump_s, load_s = spent(lambda: keys.dump(plan), 3), spent(lambda: keys.load(Plan, value, "a plan"), 3)
    del of.records[dead], leader.records[dead]
    begun = time.process_time()
    leader.show(plan=plan, plan_revision=20)
    making = dump_s + time.process_time() - begun
    answers_s = max(RECOVERY_S, 2 * nodes / WRITES_PER_S)
    number = max(1, round(answers_s / gather_s / 2)) if gather_s else len(survivors)
    for work in (Work.JOINING, Work.TRAINING):
        made = list(bunches(of, number, work=work, generation=2))
        making += spent(lambda made=made: [read(leader, bunch) for bunch in made])  # type: ignore[misc]
    record, plain = len(of.record(names[3])), len(keys.dump(of.plan))
    return {
        "nodes": nodes, "look_ms": 1e3 * look_s, **{f"{who}_core_share": share for who, share in shares.items()},
        "follower_us": 1e6 * follower_s, "recovery_s": making, "record_bytes": record, "plan_bytes": plain,
        "plan_to_all_bytes": nodes * plain, "after_bytes": len(value), "after_to_all_bytes": nodes * len(value),
        "dump_ms": 1e3 * dump_s, "plan_load_ms": 1e3 * load_s, "refreshed_per_s": refreshed,
        "to_leader_bytes_per_s": refreshed * record,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="256,1024,4096,16384", help="sizes, with commas between")
    parser.add_argument("--slots", type=int, default=8, help="workers of a node")
    parser.add_argument("--fixed-ports", action="store_true", help="as if the configuration fixed every port")
    parser.add_argument("--json", action="store_true")
    end_cleanly()
    options = parser.parse_args()
    watch = Watch()
    rows = [measure(int(n), options.slots, fixed_ports=options.fixed_ports) for n in options.nodes.split(",")]
    watch.look()
    if options.json:
        dump({"bench": "leader", "rows": rows, "noise": watch.noise(), "machine": watch.machine()})
        return 0
    shown = [
        (
            f"{row['nodes']}", f"{row['look_ms']:.2f} ms", f"{100 * row['leader_core_share']:.1f} %",
            f"{100 * row['deputy_core_share']:.1f} %", f"{row['follower_us']:.0f} us", f"{row['recovery_s']:.2f} s",
            f"{row['to_leader_bytes_per_s'] / 1e3:.0f} kB", f"{row['plan_bytes'] / 1e3:.0f} kB",
            f"{row['plan_to_all_bytes'] / 1e6:.0f} MB", f"{row['after_bytes'] / 1e3:.0f} kB",
            f"{row['after_to_all_bytes'] / 1e6:.0f} MB", f"{row['dump_ms']:.1f} ms", f"{row['plan_load_ms']:.1f} ms",
        )
        for row in rows
    ]  # fmt: skip
    heads = (
        "nodes", "look", "leader", "deputy", "follower", "recovery", "records/s", "plan", "to all", "after",
        "to all", "written", "read",
    )  # fmt: skip
    show("what a second costs, and a new plan", heads, shown, [watch.noise()] if watch.noise() else [])
    return 0


if __name__ == "__main__":
    sys.exit(main())
