"""A node's core, told event by event."""

from dataclasses import replace

from elasticrl.contract import events, orders
from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.events import Asked, Leased, Seen, Suspected, Tick, Workers
from elasticrl.contract.model import (
    Member,
    Phase,
    Plan,
    Record,
    Seat,
    View,
    Work,
)
from elasticrl.contract.settings import Membership, Recovery, Settings
from elasticrl.core.node.state import State
from elasticrl.core.step import step

SETTINGS = Settings(lanes=6, steps=0, membership=Membership(min_nodes=2), recovery=Recovery(no_progress_limit=3))


def member(name):
    node, _, life = name.partition("/")
    return Member(node=node, incarnation=int(life or 1))


def seat(name, born=1):
    return Seat(member=member(name), born=born, beat=f"{member(name).node}:7461")


def plan(generation, *names, phase=Phase.TRAIN, **more):
    return Plan(
        generation=generation,
        phase=phase,
        seats=tuple(seat(n) for n in names),
        lanes=6,
        causes=(Cause(why=Why.POLICY, said="as told"),),
        **more,
    )


def record(name, **more):
    who = member(name)
    fields = {"beat": f"{who.node}:7461", "endpoint": f"{who.node}:29500", "bits": "x", "warm": True, **more}
    return Record(member=who, **fields)


class Life:
    """One node's core and the store as it sees it; every line is an event and what was decided."""

    def __init__(self, name="n00/1", settings=SETTINGS):
        self.state = State(
            settings=settings, me=member(name), card=Record(member=member(name), beat=f"{name[:3]}:7461", bits="x")
        )
        self.view = View(revision=1)
        self.lines = []
        self.now = 0.0

    def at(self, now, event, label=None):
        self.now = now
        decision = step(self.state, replace(event, now=now))
        self.state = decision.state
        self.lines.append(f"{now:7.2f} {label or self.name(event)}")
        self.lines += [
            f"            {self.show(action)}" for action in decision.actions if not isinstance(action, events.Say)
        ]
        for action in decision.actions:
            if isinstance(
                action, events.Publish
            ):  # the store answers at once, so that the next line is about the next thing
                records = {**(self.view.records or {}), self.state.me.node: action.record}
                self.view = replace(
                    self.view, own=action.record, records=records if self.view.records is not None else None
                )
        return decision

    def leased(self, now):
        self.at(now, Leased(now=now, sent=now))

    def seen(self, now, label, **changes):
        self.view = replace(self.view, **{"revision": self.view.revision + 1, **changes})
        self.at(now, Seen(now=now, view=self.view), f"Seen: {label}")

    def told(self, now, *records):
        """The leader is shown these records."""
        names = ", ".join(f"{r.member} {r.work.value}{' warm' if r.warm else ''}" for r in records)
        everyone = {**(self.view.records or {}), **{r.member.node: r for r in records}}
        self.seen(now, names, records=everyone)

    @staticmethod
    def name(event):
        match event:
            case Workers():
                return f"Workers: {event.work.value} {event.generation}{' warm' if event.warm else ''}"
            case Suspected(node=node):
                return f"Suspected: {node}"
            case Asked(verb=verb, node=node):
                return f"Asked: {verb.value} {node or ''}".rstrip()
            case _:
                return type(event).__name__

    @staticmethod
    def show(action):
        match action:
            case events.Publish(record=r):
                parts = [f"{r.work.value} {r.generation} born {r.born} step {r.step}"]
                parts += ["warm"] * r.warm + ["leaving"] * r.leaving + ([f"exit {r.exit.cause!r}"] if r.exit else [])
                parts += [f"suspects {' '.join(r.suspects)}"] * bool(r.suspects) + [f"stall {r.stall}"] * bool(r.stall)
                parts += [f"evidence {'; '.join(map(str, r.evidence))}"] * bool(r.evidence)
                return f"Publish {', '.join(parts)}"
            case events.Propose(plan=p, if_plan=a, if_commit=b, if_leader=c, confine=out):
                seats = " ".join(f"{s.member}:{s.born}" for s in p.seats)
                code = f" exit {p.exit_code}" if p.exit_code is not None else ""
                text = f"Propose {p.generation} {p.phase.value} {p.rung.name} [{seats}] from {p.resume}{code}"
                put_out = "".join(f"\n{'':12}with {Life.show(events.Confine(quarantine=q, if_leader=c))}" for q in out)
                return f"{text} if {a}/{b}/{c}: {p.reason}{put_out}"
            case events.WriteCommit(step=s, generation=g, if_plan=a, if_commit=b):
                return f"Commit step {s} under {g} if {a}/{b}"
            case orders.Launch(place=p) | orders.Reform(place=p) | (orders.Park() as p):
                return f"{type(action).__name__} {p.generation}"
            case orders.Halt(save=save, reason=reason):
                return f"Halt{' and save' if save else ''}: {reason}"
            case events.Confine(quarantine=q):
                return f"Confine {q.member} {'held' if q.held else 'let go'}: {q.reason}"
            case _:
                fields = [f"{name}={getattr(action, name)}" for name in action.__dataclass_fields__]
                return f"{type(action).__name__} {' '.join(fields)}".rstrip()


def quarantines(actions):
    """What these write of them, with a plan or alone."""
    for action in actions:
        match action:
            case events.Propose(confine=several):
                yield from several
            case events.Confine(quarantine=one):
                yield one


def sent_quarantines(life):
    return list(quarantines(action for action, _ in life.state.sent.values()))


def leads(life, now=0.0):
    life.leased(now)
    life.seen(now, "empty store")
    life.at(now + 0.1, Workers(now=0, warm=True, endpoint="n00:29500"))
    life.at(now + 0.6, Tick(now=0))
    life.seen(now + 0.7, "the office is ours", leader=life.state.me, leader_revision=3, records={}, quarantines={})


def trains(life, now, generation, *names, **more):
    life.seen(now, f"plan {generation} written", plan=plan(generation, *names, **more), plan_revision=10 * generation)
    life.at(
        now + 0.1, Workers(now=0, work=Work.TRAINING, generation=generation, born=1, warm=True, endpoint="n00:29500")
    )
    rows = [record(n, work=Work.TRAINING, generation=generation, born=1) for n in names if n != "n00"]
    life.told(now + 0.2, life.view.own, *rows)
