"""The store-side actions of the core, performed: lease, record, leadership, plans, commits, quarantines, requests.

The one idea: no action has a reply. What a transaction did is seen by the watch; what was lost is decided again. So every
failure of the store here is logged and forgotten, and only the lease speaks back (`Leased`).
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from elasticrl.contract import events
from elasticrl.contract.events import (
    Action,
    Ask,
    Campaign,
    Confine,
    Inspect,
    KeepAlive,
    Leased,
    Propose,
    Publish,
    Restore,
    WriteCommit,
)
from elasticrl.contract.model import INTENTS, Commit, Intent, Member, Phase, Quarantine, Record, Rollout, Verb
from elasticrl.core.node.follow import TOGETHER_S
from elasticrl.shell import keys
from elasticrl.shell.sight import Sight, Wanted
from elasticrl.store.protocol import Compare, Delete, Lease, LeaseGone, Op, Put, Store, Unchanged


class Outrun(Exception):
    """Another drain was written since whoever asks for this one has looked who can be spared."""


class Office:
    """Performs what the core decides about the store, under one lease."""

    def __init__(
        self,
        store: Store,
        me: Member,
        sight: Sight,
        *,
        ttl_s: float,
        post: Callable[[events.Event], None],
        clock: Callable[[], float],
        lease: Lease | None = None,
    ) -> None:
        self._store = store
        self._me = me
        self._sight = sight
        self._ttl_s = ttl_s
        self._post = post
        self._clock = clock
        self.lasting: tuple[Put, ...] = ()  # what else a store that has lost the job is told again
        self.lease = lease  # of an earlier daemon whose workers we adopted, or None

    async def perform(self, action: Action) -> bool:
        """Do it; False if this is not an action on the store."""
        match action:
            case KeepAlive():
                await self._keep_alive()
            case Publish(record=record):
                await self._publish(keys.member_key(self._me.node), keys.dump(record))
            case Campaign(over=over):
                put = Put(key=keys.LEADER, value=keys.dump(self._me), lease=self.lease.id if self.lease else 0)
                if put.lease:
                    await self._write([Unchanged(key=keys.LEADER, revision=over)], [put])
            case Propose():
                await self._propose(action)
            case Restore():
                await self._restore(action)
            case WriteCommit(step=step, generation=generation, manifest=manifest):
                fences = [
                    Unchanged(key=keys.PLAN, revision=action.if_plan),
                    Unchanged(key=keys.COMMIT, revision=action.if_commit),
                ]
                commit = Commit(step=step, generation=generation, manifest=manifest, written=round(time.time(), 1))
                await self._write(fences, [Put(key=keys.COMMIT, value=keys.dump(commit))])
            case Confine(quarantine=quarantine, if_leader=if_leader):
                await self._write([Unchanged(key=keys.LEADER, revision=if_leader)], [_confined(quarantine)])
            case Inspect(generation=generation, if_leader=if_leader):
                put = Put(key=keys.LOOK, value=keys.dump(generation))
                await self._write([Unchanged(key=keys.LEADER, revision=if_leader)], [put])
            case Ask(verb=verb, node=node):
                await request(self._store, verb, node, self._sight.view.generation)
            case _:
                return False
        return True

    async def retire(self) -> None:
        """Revoke the lease: the others know in milliseconds that this member has left."""
        lease, self.lease = self.lease, None
        if lease is not None:
            await self._store.revoke(lease.id)

    async def _keep_alive(self) -> None:
        held = self.lease
        if held:
            await together(held.ttl_s)
        lease = await (self._store.keepalive(held.id) if held else self._store.grant(self._ttl_s))
        self.lease = lease if lease.held else None
        self._post(Leased(now=self._clock(), sent=lease.sent, held=lease.held))

    async def _propose(self, action: Propose) -> None:
        plan = action.plan
        fences: list[Compare] = [
            Unchanged(key=keys.PLAN, revision=action.if_plan),
            Unchanged(key=keys.COMMIT, revision=action.if_commit),
            Unchanged(key=keys.LEADER, revision=action.if_leader),
        ]
        ops: list[Op] = [Put(key=keys.PLAN, value=keys.dump(plan))]
        if action.answers:
            fences.append(Unchanged(key=keys.INTENT, revision=action.answers))
        if plan.phase is Phase.STOP or action.answers:
            # What operators wanted ends with the job. Found on a real systemd: a job that was begun again was stopped
            # at its second plan, for the earlier `stop` still stood there and only the first plan passed it over.
            wanted = Wanted(intent=Intent.RUN, generation=plan.generation)
            ops.append(Put(key=keys.INTENT, value=keys.dump(wanted)))
        elif action.stops is not None:  # with the plan, so that no leader can take the job for one that is to go on
            wanted = Wanted(intent=Intent.STOP, generation=plan.generation, by=action.stops)
            ops.append(Put(key=keys.INTENT, value=keys.dump(wanted)))
        ops.extend(_confined(quarantine) for quarantine in action.confine)
        await self._write(fences, ops)

    async def _restore(self, action: Restore) -> None:
        fences = [
            Unchanged(key=keys.PLAN, revision=action.if_plan),
            Unchanged(key=keys.COMMIT, revision=action.if_commit),
            Unchanged(key=keys.INTENT, revision=action.if_intent),
        ]
        wanted = Wanted(intent=action.intent, generation=action.intent_generation)
        ops = [Put(key=keys.PLAN, value=keys.dump(action.plan)), Put(key=keys.INTENT, value=keys.dump(wanted))]
        if action.commit is not None:
            ops.append(Put(key=keys.COMMIT, value=keys.dump(action.commit)))
        await self._write(fences, [*ops, *self.lasting])

    async def _publish(self, key: str, value: bytes) -> None:
        if (under := self.lease) is None:
            return
        try:
            await self._store.put(key, value, under.id)
        except LeaseGone:
            self._lost(under)

    async def _write(self, fences: Sequence[Compare], ops: Sequence[Op]) -> None:
        under = self.lease
        try:
            await self._store.txn(fences, ops)
        except LeaseGone:
            self._lost(under)

    def _lost(self, lease: Lease | None) -> None:
        """It has run out; another may have been granted while the store said so."""
        if self.lease is not None and lease is not None and self.lease.id != lease.id:
            return
        self.lease = None
        self._post(Leased(now=self._clock(), sent=0.0, held=False))


def _confined(quarantine: Quarantine) -> Put:
    return Put(key=keys.quarantine_key(quarantine.member.node), value=keys.dump(quarantine))


async def together(ttl_s: float) -> None:
    """Until everybody's renewals are sent: a tenth of a second, by the wall clock, at which etcd wakes once for many."""
    await asyncio.sleep(-time.time() % min(TOGETHER_S, ttl_s / 100))


async def request(
    store: Store, verb: Verb, node: str | None, generation: int, by: str = "", *, after: int | None = None
) -> bool:
    """Write down what an operator asks, for those whom it concerns to see; `by` whom, if that is known. False: there is no such
    node.

    `generation` is the newest that the asker knows of: what was wanted of an earlier run of the job is not wanted of a later.
    `after`: the newest drain that the asker has seen, by its revision, or 0; if there is a newer one, `Outrun`. None: whatever
    there is.
    """
    if verb in INTENTS:
        await store.put(keys.INTENT, keys.dump(Wanted(intent=INTENTS[verb], generation=generation, by=by)))
    elif verb is Verb.ADMIT and node:
        barred = [keys.quarantine_key(node), keys.drain_key(node)]
        if await life_of(store, node) is None and not any([await store.get(key) for key in barred]):
            return False
        await store.txn((), [Delete(scope=key) for key in barred])
    elif verb is Verb.DRAIN and node:
        member = await life_of(store, node)
        if member is None:
            return False
        fences = [] if after is None else [Unchanged(key=keys.DRAINED, revision=after)]
        both = [Put(key=key, value=keys.dump(member)) for key in (keys.drain_key(node), keys.DRAINED)]
        if not (await store.txn(fences, both)).ok:
            raise Outrun
    return True


async def life_of(store: Store, node: str) -> Member | None:
    """The life of a node that has a record now, whatever it does."""
    if entry := await store.get(keys.member_key(node)):
        return keys.load(Record, entry.value, entry.key).member
    if entry := await store.get(keys.rollout_key(node)):
        return keys.load(Rollout, entry.value, entry.key).member
    return None
