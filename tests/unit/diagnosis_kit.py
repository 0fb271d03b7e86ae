"""A leader of three nodes that train, and facts to tell it."""

from collections.abc import Mapping
from dataclasses import replace

from core_kit import Life, plan, record

from elasticrl.contract import events
from elasticrl.contract.events import Propose, Say, Tick, Workers
from elasticrl.contract.evidence import Evidence, Kind, Sign
from elasticrl.contract.model import Lap, Plan, Work
from elasticrl.contract.settings import Membership, Settings

NODES = ("n00", "n01", "n02")


def fact(sign: Sign, rank: int | None = None, generation: int | None = 1, **more: object) -> Evidence:
    known = {"kind": Kind.STACK, "node": None if rank is None else f"n{rank:02}", "source": "test", **more}
    return Evidence(sign=sign, rank=rank, generation=generation, **known)  # type: ignore[arg-type]


def leader(policy: Mapping[str, str] | None = None, **more: object) -> Life:
    """n00 leads three nodes that train generation 1."""
    settings = Settings(lanes=6, membership=Membership(min_nodes=2), policy=dict(policy or {}), **more)  # type: ignore[arg-type]
    life = Life("n00/1", settings)
    life.leased(0.0)
    life.seen(0.0, "empty store")
    life.at(0.1, Workers(now=0, warm=True, endpoint="n00:29500"))
    life.at(0.6, Tick(now=0))
    life.seen(0.7, "office", leader=life.state.me, leader_revision=3, records={}, quarantines={})
    life.told(1.0, *(record(name) for name in NODES))
    train(life, 1.2, 1)
    return life


def train(life: Life, now: float, generation: int, written: Plan | None = None, *, lap: Lap | None = None) -> None:
    found = written or plan(generation, *NODES)
    life.seen(now, "written", plan=found, plan_revision=10 * generation)
    running = {"work": Work.TRAINING, "generation": generation, "born": 1, "lap": lap}
    life.at(now, Workers(now=0, warm=True, endpoint="n00:29500", **running))  # type: ignore[arg-type]
    life.told(now, *(record(n, **running) for n in NODES[1:]), life.view.own)


def proposed(life: Life) -> Plan | None:
    """The plan that is wished for now."""
    return next((a.plan for a, _ in life.state.sent.values() if isinstance(a, Propose)), None)


BROKEN = fact(Sign.GPU_BROKEN, None, None, node="n01", kind=Kind.XID, detail="Xid 79")


def capped(life: Life, now: float) -> list[Say]:
    """A GPU of n01 is found broken; what the leader says then."""
    own = replace(life.view.records["n01"], evidence=(BROKEN,))
    life.view = replace(life.view, records={**life.view.records, "n01": own}, revision=life.view.revision + 1)
    done = life.at(now, events.Seen(now=0, view=life.view))
    return [action for action in done.actions if isinstance(action, Say)]
