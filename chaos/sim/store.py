"""A virtual etcd: revisions, leases, fenced transactions, watches.

The one idea: it keeps what etcd promises and no more. A transaction is atomic and fenced by revisions; its answer may be
lost; a watch is late, may skip to the newest, and never goes backwards unless a fault says so. Each scope has a watch of its
own: where they come `apart`, a node sees one key's news before another's of the same or even an earlier transaction.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Final

from chaos.history import CROSSING_S, Advised, Committed, Confined, Elected, Expired, Inspected, Planned
from chaos.sim.world import Network, World
from elasticrl.contract import events
from elasticrl.contract.model import INTENTS, Commit, Intent, Member, Phase, Quarantine, Record, Verb, View
from elasticrl.shell.sight import GATHER_S, MANY

#: The fields of a view that come with each scope that a node watches, as `elasticrl.shell.sight` puts them together.
SCOPES: Final[Mapping[str, tuple[str, ...]]] = {
    "plan": ("plan", "plan_revision"),
    "commit": ("commit", "commit_revision"),
    "leader": ("leader", "leader_revision"),
    "intent": ("intent", "intent_generation", "intent_revision"),
    "look": ("look", "look_revision"),
    "drain": ("drain",),
    "members": ("own", "records"),
    "quarantine": ("quarantines", "barred"),
}
ALL: Final = ""


class LeaseGone(Exception):
    """The store does not know this lease."""


@dataclass(slots=True)
class Lease:
    """Whose it is and until when it holds."""

    owner: Member
    ttl_s: float
    until: float


@dataclass(slots=True)
class Watcher:
    """One node's watches: where its views go, and of which scopes news is on its way."""

    member: Member
    node: str
    deliver: Callable[[View], None]
    everyone: bool
    lag_s: float
    pending: set[str] = field(default_factory=set)  # scopes; `ALL` for a reading of everything
    reading: int = 0  # rises with every reading of everything: news that was on its way is in it
    shown: View | None = None  # what the node was shown last
    gathers: set[str] = field(default_factory=set)  # scopes: what is on its way is gathered news of others' records
    dead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """All that a store knew at one moment. As it stands: of one that knows nothing."""

    shared: View = field(default_factory=lambda: View(revision=1))
    records: Mapping[str, tuple[Record, int]] = field(default_factory=dict)
    quarantines: Mapping[str, Quarantine] = field(default_factory=dict)
    drains: Mapping[str, Member] = field(default_factory=dict)
    leader_lease: int = 0
    leases: Mapping[int, Member] = field(default_factory=dict)


class Waits:
    """No answer yet: the request waits in the store."""


WAITS = Waits()


class Store:
    """All keys of one job."""

    def __init__(
        self, world: World, net: Network, watch_s: float, apart_s: float = 0.0, many: int = MANY, gather_s: float = GATHER_S
    ) -> None:  # fmt: skip
        self._world = world
        self._net = net
        self._watch_s = watch_s
        self._apart_s = apart_s  # up to this much later than another scope's may a scope's news come
        self._many = many  # from so many records on news of others' is gathered
        self._gather_s = gather_s  # for each record
        self.up = True
        self.revision = 1
        self.shared = View(revision=1)  # what every watcher is shown
        self.records: dict[str, tuple[Record, int]] = {}  # with its lease
        self.quarantines: dict[str, Quarantine] = {}
        self.confined_at: dict[str, float] = {}
        self.drains: dict[str, Member] = {}
        self.looks: dict[int, int] = {}  # which gang was to be looked at, by the request's revision
        self.leader_lease = 0
        self.leases: dict[int, Lease] = {}
        self.watchers: dict[str, Watcher] = {}
        self.office: dict[str, Watcher] = {}  # of them, those that watch everyone
        self.lags: dict[str, float] = {}  # of stale members, by the node that talks to them
        self.paused_at: float | None = None
        self.writes = 0  # of records
        self._lease = 0
        self._ttl_s = 0.0
        self._blocked: list[tuple[Watcher, str, int]] = []  # whose news waits for the store to be up
        self._everyone: dict[str, Record] | None = None  # all records, as every watcher of them is shown; None: changed

    # ---- leases

    def grant(self, owner: Member, ttl_s: float) -> int:
        """A new lease."""
        self._lease += 1
        self._ttl_s = ttl_s
        self.leases[self._lease] = Lease(owner, ttl_s, self._world.now + ttl_s)
        self._world.later(ttl_s + 0.2, self._expire, self._lease)
        return self._lease

    def keepalive(self, lease: int) -> "bool | Waits":
        """Does the lease still hold, and from now on for its whole time?

        If it has run out and its keys have not gone yet, etcd answers when they have, and renews nothing.
        """
        held = self.leases.get(lease)
        if held and self._world.now >= held.until:
            return WAITS
        if held:
            held.until = self._world.now + held.ttl_s
        return held is not None

    def revoke(self, lease: int) -> None:
        """The lease and all its keys go."""
        held = self.leases.pop(lease, None)
        if held:
            self._drop(lease, held.owner)

    def forget(self, lease: int) -> None:
        """The lease runs out before its time, as after a restored backup or by an operator's hand."""
        held = self.leases.pop(lease)
        self._world.note(Expired(at=self._world.now, member=str(held.owner)))
        self._drop(lease, held.owner)

    def _expire(self, lease: int) -> None:
        held = self.leases.get(lease)
        if held is None:
            return
        if not self.up:
            held.until = max(held.until, self._world.now + 1.0)
        if self._world.now < held.until:
            chance = self._world.chance("expiry").random()
            self._world.later(held.until - self._world.now + 0.2 * chance, self._expire, lease)
            return
        del self.leases[lease]
        self._world.note(Expired(at=self._world.now, member=str(held.owner)))
        self._drop(lease, held.owner)

    def _drop(self, lease: int, owner: Member) -> None:
        """What hung on a lease goes: its owner's record, and the office."""
        if owner.node in self.records and self.records[owner.node][1] == lease:
            del self.records[owner.node]
            self._everyone = None
            self._touch(owner.node, "members")
        if self.leader_lease == lease and self.shared.leader is not None:
            self.leader_lease = 0
            self._share(leader=None, leader_revision=0)

    def come_back(self) -> None:
        """Up again, under a new leader of the store: it starts all leases anew, and the watches go on."""
        self.up = True
        blocked, self._blocked = self._blocked, []
        for news in blocked:
            self._world.later(0.2 * self._world.chance("watch " + news[0].node).random(), self._deliver, *news)
        for held in self.leases.values():
            held.until = self._world.now + held.ttl_s

    def backup(self) -> Backup:
        """What it knows now."""
        return Backup(
            shared=replace(self.shared, revision=self.revision),
            records=dict(self.records),
            quarantines=dict(self.quarantines),
            drains=dict(self.drains),
            leader_lease=self.leader_lease,
            leases={number: held.owner for number, held in self.leases.items()},
        )

    def set_back(self, to: Backup) -> None:
        """It knows that and no more, and its revisions go on from there. Its leases begin anew."""
        now = self._world.now
        lost = [held for number, held in self.leases.items() if number not in to.leases]
        for node, quarantine in self.quarantines.items():
            if node not in to.quarantines:
                self._note_quarantine(replace(quarantine, held=False))
        if to.shared.leader is not None and to.shared.leader != self.shared.leader:
            self._world.note(Elected(at=now, member=str(to.shared.leader)))
        self.shared = replace(to.shared, epoch=self.shared.epoch + 1)
        self.revision = to.shared.revision
        self.records, self.quarantines, self.drains = dict(to.records), dict(to.quarantines), dict(to.drains)
        self.looks = {}
        self.leader_lease = to.leader_lease
        self.leases = {number: Lease(owner, self._ttl_s, now + self._ttl_s) for number, owner in to.leases.items()}
        self._everyone = None
        for held in lost:
            self._world.note(Expired(at=now, member=str(held.owner)))
        for number in self.leases:
            self._world.later(self._ttl_s + 0.2, self._expire, number)
        self.relist()

    # ---- writes

    def put_record(self, record: Record, lease: int) -> None:
        """A member's record under its lease."""
        if lease not in self.leases:
            raise LeaseGone
        before = self.records.get(record.member.node)
        if record.advice and (before is None or before[0].advice != record.advice):
            self._world.note(Advised(at=self._world.now, member=str(record.member), advice=record.advice))
        self.records[record.member.node] = (record, lease)
        self.writes += 1
        self._everyone = None
        self._touch(record.member.node, "members")

    def campaign(self, member: Member, lease: int, over: int) -> None:
        """Take the leader key if it is still as the candidate saw it."""
        if lease not in self.leases:
            raise LeaseGone
        if self.shared.leader_revision == over:
            self.leader_lease = lease
            self._share(leader=member, leader_revision=self.revision + 1)
            self._world.note(Elected(at=self._world.now, member=str(member)))

    def propose(self, action: events.Propose, by: Member, lapsed_s: float) -> None:
        """Write the plan if plan, commit and leader are still at these revisions."""
        at = (self.shared.plan_revision, self.shared.commit_revision, self.shared.leader_revision)
        if at != (action.if_plan, action.if_commit, action.if_leader):
            return
        if action.answers and self.shared.intent_revision != action.answers:
            return
        now = self._world.now
        held = tuple(
            str(q.member)
            for n, q in sorted(self.quarantines.items())
            if q.held and now - self.confined_at[n] > CROSSING_S
        )
        fact = Planned(
            at=now,
            plan=action.plan,
            by=str(by),
            committed=self.shared.committed,
            paused_s=now - self.paused_at if self.paused_at is not None else 0.0,
            held=held,
            lapsed_s=lapsed_s,
        )
        for quarantine in action.confine:
            self._confine(quarantine)
        self._share(plan=action.plan, plan_revision=self.revision + 1, **self._wanted(action))
        self._world.note(fact)

    def _wanted(self, action: events.Propose) -> dict[str, Any]:
        """What operators want ends with the job; a gang that forms once more before a stop is stopped all the same."""
        ends = action.plan.phase is Phase.STOP or action.answers
        if not ends and action.stops is None:
            return {}
        intent = Intent.RUN if ends else Intent.STOP
        at = self.revision + 1
        return {"intent": intent, "intent_generation": action.plan.generation, "intent_revision": at}

    def restore(self, action: events.Restore, by: Member) -> None:
        """Write again what was lost, if plan, commit and intent are still at these revisions."""
        at = (self.shared.plan_revision, self.shared.commit_revision, self.shared.intent_revision)
        if at != (action.if_plan, action.if_commit, action.if_intent):
            return
        now, next_one = self._world.now, self.revision + 1
        committed = {"commit": action.commit, "commit_revision": next_one} if action.commit else {}
        self._share(
            plan=action.plan,
            plan_revision=next_one,
            intent=action.intent,
            intent_generation=action.intent_generation,
            intent_revision=next_one,
            **committed,
        )
        paused_s = now - self.paused_at if self.paused_at is not None else 0.0
        self._world.note(
            Planned(at=now, plan=action.plan, by=str(by), committed=self.shared.committed, paused_s=paused_s)
        )

    def commit(self, action: events.WriteCommit) -> None:
        """Make a checkpoint the newest if plan and commit are still at these revisions."""
        if (self.shared.plan_revision, self.shared.commit_revision) != (action.if_plan, action.if_commit):
            return
        commit = Commit(step=action.step, generation=action.generation, manifest=action.manifest)
        self._share(commit=commit, commit_revision=self.revision + 1)
        self._world.note(
            Committed(at=self._world.now, step=commit.step, generation=commit.generation, manifest=commit.manifest)
        )

    def confine(self, action: events.Confine) -> None:
        """Write a quarantine if the leader key is still at this revision."""
        if self.shared.leader_revision == action.if_leader:
            self._confine(action.quarantine)

    def _confine(self, quarantine: Quarantine) -> None:
        node = quarantine.member.node
        self.quarantines[node] = quarantine
        self.confined_at[node] = self._world.now
        self._touch(node, "quarantine")
        self._note_quarantine(quarantine)

    def inspect(self, action: events.Inspect) -> None:
        """Where are everybody's workers?"""
        if self.shared.leader_revision == action.if_leader:
            self.looks[self.revision + 1] = action.generation
            self._share(look=action.generation, look_revision=self.revision + 1)
            self._world.note(Inspected(at=self._world.now, generation=action.generation))

    def ask(self, verb: Verb, node: str | None) -> None:
        """What an operator wants."""
        if verb in INTENTS:
            intent = INTENTS[verb]
            self.paused_at = self._world.now if intent is Intent.PAUSE else None
            at = {"intent_generation": self.shared.generation, "intent_revision": self.revision + 1}
            self._share(intent=intent, **at)
        elif verb is Verb.ADMIT and node:
            self.drains.pop(node, None)
            gone = self.quarantines.pop(node, None)
            if gone:
                self._note_quarantine(replace(gone, held=False))
            self._touch(node, "drain", "quarantine")
        elif verb is Verb.DRAIN and node and node in self.records:
            self.drain(node, self.drains)

    def drain(self, node: str, asked: Mapping[str, Member]) -> bool:
        """A node that is here is to leave, if nobody was asked to since whoever asks has looked."""
        if self.drains != asked:
            return False
        self.drains[node] = self.records[node][0].member
        self._touch(node, "drain")
        return True

    def _note_quarantine(self, quarantine: Quarantine) -> None:
        self._world.note(
            Confined(
                at=self._world.now,
                node=quarantine.member.node,
                member=str(quarantine.member),
                cause=quarantine.cause,
                strikes=quarantine.strikes,
                held=quarantine.held,
            )
        )

    # ---- watches

    def watch(self, member: Member, deliver: Callable[[View], None], *, everyone: bool) -> None:
        """Show this node the store from now on; its first view is a whole one."""
        node = member.node
        old = self.watchers.get(node)
        if old:
            old.dead = True
        lag = self._watch_s * (0.5 + self._world.chance("watch " + node).random())
        watcher = Watcher(member, node, deliver, everyone, lag)
        self.watchers[node] = watcher
        self.office.pop(node, None)
        if everyone:
            self.office[node] = watcher
        self._wake(watcher, ALL)

    def unwatch(self, node: str) -> None:
        """This node's daemon is gone."""
        watcher = self.watchers.pop(node, None)
        self.office.pop(node, None)
        if watcher:
            watcher.dead = True

    def refresh(self, node: str) -> None:
        """Show a node what there is now."""
        self._wake(self.watchers[node], ALL)

    def relist(self) -> None:
        """Compaction: every watch breaks and begins again."""
        for node in sorted(self.watchers):
            self._wake(self.watchers[node], ALL)

    def _share(self, **changes: object) -> None:
        self.revision += 1
        self.shared = replace(self.shared, revision=self.revision, **changes)  # type: ignore[arg-type]
        scopes = [scope for scope in SCOPES if scope in changes]
        for watcher in self.watchers.values():
            self._news(watcher, scopes)

    def _touch(self, node: str, *scopes: str) -> None:
        """A node's own keys have changed: it is shown them, and those who watch everyone."""
        self.revision += 1
        own = self.watchers.get(node)
        many = len(self.records) >= self._many and scopes == ("members",)
        for watcher in (*self.office.values(), *([own] if own and not own.everyone else [])):
            self._news(watcher, scopes, gathers=many and watcher is not own)

    def _news(self, watcher: Watcher, scopes: Iterable[str], *, gathers: bool = False) -> None:
        pending = watcher.pending
        for scope in scopes if self._apart_s and watcher.shown is not None else (ALL,):
            if not (scope in pending or ALL in pending) or (scope in watcher.gathers and not gathers):
                self._wake(watcher, scope, gathers=gathers)

    def _wake(self, watcher: Watcher, scope: str, *, gathers: bool = False) -> None:
        """News is on its way. (A reading of everything has in it what was gathered, and is not late by that.)"""
        watcher.pending.add(scope)
        if scope == ALL:
            watcher.gathers.clear()
        (watcher.gathers.add if gathers else watcher.gathers.discard)(scope)
        lag = watcher.lag_s + (self._gather_s * len(self.records) if gathers else 0.0)
        if scope == ALL:
            watcher.reading += 1
        else:
            lag += self._apart_s * self._world.chance("watch " + watcher.node).random()
        if self._net.delay:
            lag += self._net.delay * self._world.chance("watch " + watcher.node).random()
        self._world.later(lag, self._deliver, watcher, scope, watcher.reading)

    def _deliver(self, watcher: Watcher, scope: str, reading: int) -> None:
        if watcher.dead or reading != watcher.reading or scope not in watcher.pending:
            return  # what was gathered has been shown with other news
        if not self.up:
            self._blocked.append((watcher, scope, reading))
            return
        if self._net.from_store.get(watcher.node) or self._net.to_store.get(watcher.node):
            self._world.later(0.2, self._deliver, watcher, scope, reading)
            return
        if scope == ALL:
            watcher.pending.clear()
            watcher.gathers.clear()
        else:
            watcher.pending.discard(scope)
            watcher.gathers.discard(scope)
        view = self.view(watcher)
        if scope != ALL and watcher.shown is not None:
            fresh = {name: getattr(view, name) for name in SCOPES[scope]}
            view = replace(watcher.shown, revision=self.revision, **fresh)
        watcher.shown = view
        stale = self.lags.get(watcher.node)
        if stale is not None:
            self._world.later(stale * self._world.chance("stale").random(), self._show, watcher, view)
        else:
            watcher.deliver(view)

    def _show(self, watcher: Watcher, view: View) -> None:
        if not watcher.dead:
            watcher.deliver(view)

    def whole(self) -> View:
        """All that an operator reads who is no node."""
        return self.view(Watcher(Member(node="", incarnation=0), "", lambda _: None, everyone=True, lag_s=0.0))

    def view(self, watcher: Watcher) -> View:
        """The store as this watcher is shown it."""
        shared, node = self.shared, watcher.node
        record = self.records.get(node)
        if watcher.everyone and self._everyone is None:
            self._everyone = dict(zip(self.records, map(itemgetter(0), self.records.values()), strict=True))
        return View(
            revision=self.revision,
            epoch=shared.epoch,
            plan=shared.plan,
            plan_revision=shared.plan_revision,
            commit=shared.commit,
            commit_revision=shared.commit_revision,
            leader=shared.leader,
            leader_revision=shared.leader_revision,
            intent=shared.intent,
            intent_generation=shared.intent_generation,
            intent_revision=shared.intent_revision,
            own=record[0] if record and record[0].member == watcher.member else None,
            look=shared.look,
            look_revision=shared.look_revision,
            drain=self.drains.get(node),
            barred=self.quarantines.get(node),
            records=self._everyone if watcher.everyone else None,
            quarantines=dict(self.quarantines) if watcher.everyone else None,
        )
