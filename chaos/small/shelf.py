"""The store of a small world: the simulator's own, asked one question at a time.

The one idea: `chaos.sim.store.Store` knows what etcd promises. Here what it holds is a value with a number; a request is
answered by a store that is made of that value, and what it holds then is the next value. Leases are counted by the world.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from chaos.history import CROSSING_S, Fact
from chaos.sim.store import ALL, SCOPES, Lease, LeaseGone, Store, Watcher
from chaos.sim.world import Network, World
from chaos.small.values import GRID_S, Cores
from elasticrl.contract import events
from elasticrl.contract.cause import Cause
from elasticrl.contract.events import Action
from elasticrl.contract.model import Member, Plan, Quarantine, Record, View

LIVES: Final = 100  # a node's: so a lease has the number of its owner's life


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """All that the store holds, but for leases. Revisions are counted by key, so that they stay small."""

    shared: View = field(default_factory=lambda: View(revision=1))
    records: Mapping[str, Record] = field(default_factory=dict)
    quarantines: Mapping[str, Quarantine] = field(default_factory=dict)
    confined: Mapping[str, int] = field(default_factory=dict)  # how many steps of time ago, as far as that matters
    drains: Mapping[str, Member] = field(default_factory=dict)
    offices: int = 0  # how often the leader key was written
    intents: int = 0
    looks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of a request: what is held then, what an outsider saw, and who is shown which scopes anew."""

    held: int
    facts: tuple[Fact, ...] = ()
    shared: tuple[str, ...] = ()  # scopes of which every node hears
    own: tuple[tuple[int, str], ...] = ()  # a node's own scopes, of which it and the office hear
    gone: bool = False  # the store does not know the lease


def bare(plan: Plan) -> Plan:
    """A plan without what only people read: of its causes the kinds are left, and no verdict."""
    return replace(plan, causes=tuple(Cause(why=cause.why) for cause in plan.causes[:1]), verdict=None)


class _Still(World):
    """A world at one moment: what it is told to do later is for others to do."""

    def later(self, delay: float, what: object, *args: object) -> None:
        """Nothing."""


class Shelf(Store):
    """A store for one request; it notes which scopes that has changed."""

    def __init__(self, world: World) -> None:
        super().__init__(world, Network(), 0.0)
        self.told: list[str] = []
        self.told_own: list[tuple[str, str]] = []

    @property
    def world(self) -> World:
        """Its clock, and the history of this one request."""
        return self._world

    def end(self, lease: int, owner: Member) -> None:
        """A lease is over."""
        self._drop(lease, owner)

    def _share(self, **changes: object) -> None:
        super()._share(**changes)
        self.told += [scope for scope in SCOPES if scope in changes]

    def _touch(self, node: str, *scopes: str) -> None:
        super()._touch(node, *scopes)
        self.told_own += [(node, scope) for scope in scopes]


class Shelves:
    """Questions to the store, each answered once."""

    def __init__(self, cores: Cores, names: tuple[str, ...]) -> None:
        self.cores, self.names = cores, names
        self._asked: dict[tuple[object, ...], Answer] = {}
        self._views: dict[tuple[object, ...], int] = {}
        self._later: dict[int, int] = {}

    def held(self, number: int) -> Held:
        """What the store holds."""
        found: Held = self.cores.numbers.values[number]
        return found

    def ask(self, held: int, action: int, member: Member, leased: bool, lapsed: int) -> Answer:
        """A request arrives."""
        key = (held, action, member, leased, lapsed)
        if key not in self._asked:
            self._asked[key] = self._answer(held, self.cores.numbers.values[action], member, leased, lapsed)
        return self._asked[key]

    def drop(self, held: int, member: Member) -> Answer:
        """A lease ends, and all that hangs on it goes."""
        key = (held, "drop", member)
        if key not in self._asked:
            shelf, before = self._open(held)
            shelf.end(self._lease_of(member), member)
            self._asked[key] = self._closed(shelf, before)
        return self._asked[key]

    def _answer(self, held: int, action: Action, member: Member, leased: bool, lapsed: int) -> Answer:
        shelf, before = self._open(held)
        lease = self._lease_of(member)
        if leased:
            shelf.leases[lease] = Lease(member, inf, inf)  # the search says when it ends
        try:
            match action:
                case events.Publish(record=record):
                    shelf.put_record(record, lease)
                case events.Campaign(over=over):
                    shelf.campaign(member, lease, over)
                case events.Propose(plan=plan):
                    shelf.propose(replace(action, plan=bare(plan)), member, lapsed * GRID_S)
                case events.WriteCommit():
                    shelf.commit(action)
                case events.Restore():
                    shelf.restore(action, member)
                case events.Confine():
                    shelf.confine(action)
                case events.Inspect():
                    shelf.inspect(action)
                case events.Ask(verb=verb, node=name):
                    shelf.ask(verb, name)
        except LeaseGone:
            return Answer(held=held, gone=True)
        return self._closed(shelf, before)

    def _open(self, number: int) -> tuple[Shelf, Held]:
        held = self.held(number)
        shelf = Shelf(_Still("small"))
        shelf.world.now = 100.0
        shelf.shared = replace(held.shared)
        shelf.records = {node: (record, self._lease_of(record.member)) for node, record in held.records.items()}
        shelf.quarantines, shelf.drains = dict(held.quarantines), dict(held.drains)
        shelf.confined_at = {node: 100.0 - ago * GRID_S for node, ago in held.confined.items()}
        shelf.leader_lease = self._lease_of(held.shared.leader) if held.shared.leader else 0
        return shelf, held

    def _lease_of(self, member: Member) -> int:
        return LIVES * self.names.index(member.node) + member.incarnation

    def _closed(self, shelf: Shelf, before: Held) -> Answer:
        """Revisions of the store become counts of the writes of each key."""
        was, now = before.shared, shelf.shared
        offices, intents, looks = before.offices, before.intents, before.looks
        offices += now.leader_revision not in (was.leader_revision, 0)
        intents += "intent" in shelf.told
        looks += "look" in shelf.told
        one = self.cores.numbers.one
        shared = replace(
            now,
            revision=1,
            plan=one(now.plan),
            plan_revision=was.plan_revision + ("plan" in shelf.told),
            commit_revision=was.commit_revision + ("commit" in shelf.told),
            leader_revision=0 if now.leader is None else offices if "leader" in shelf.told else was.leader_revision,
            intent_revision=intents,
            look_revision=looks,
        )
        held = Held(
            shared=one(shared),
            records={node: one(record) for node, (record, _) in shelf.records.items()},
            quarantines=shelf.quarantines,
            confined={node: round((100.0 - at) / GRID_S) for node, at in shelf.confined_at.items()},
            drains=shelf.drains,
            offices=offices,
            intents=intents,
            looks=looks,
        )
        index = self.names.index
        return Answer(
            held=self.cores.numbers.of(held),
            facts=tuple(shelf.world.history),
            shared=tuple(dict.fromkeys(shelf.told)),
            own=tuple((index(node), scope) for node, scope in dict.fromkeys(shelf.told_own)),
        )

    def later(self, number: int) -> int:
        """One step of time later: only how long ago quarantines were written changes."""
        if number not in self._later:
            held, most = self.held(number), round(CROSSING_S / GRID_S) + 1
            confined = {node: min(most, ago + 1) for node, ago in held.confined.items()}
            same = confined == dict(held.confined)
            self._later[number] = number if same else self.cores.numbers.of(replace(held, confined=confined))
        return self._later[number]

    def seen(self, core: int, held: int, scope: str, everyone: bool) -> int:
        """The event that a node is shown: one scope as it is now, the others as it was shown them last."""
        key = (core, held, scope, everyone)
        found = self._views.get(key)
        if found is None:
            state = self.cores.of(core)
            shelf, _ = self._open(held)
            watcher = Watcher(state.me, state.me.node, lambda _: None, everyone, 0.0)
            view = shelf.view(watcher)
            if scope != ALL:
                view = replace(state.view, **{name: getattr(view, name) for name in SCOPES[scope]})
            found = self.cores.numbers.of(events.Seen(now=1e-5, view=self.cores.view(view)))
            self._views[key] = found
        return found
