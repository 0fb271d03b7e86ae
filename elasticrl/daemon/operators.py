"""What operators ask of a job, answered for a daemon: how it is, whether a node can be spared, and that something be done.

The one idea: an answer is made of the store and of the last that was seen of it, and of nothing else that a daemon has. What
the store has not confirmed is refused: who asks is told so, and asks again.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final, TypeVar

from elasticrl.contract.model import INTENTS, Commit, Intent, Member, Plan, Record, Rollout, Verb, View
from elasticrl.contract.settings import Settings
from elasticrl.core.lead.drain import refusal
from elasticrl.daemon.control import Refused
from elasticrl.daemon.stored import read_all, readable
from elasticrl.shell import keys
from elasticrl.shell.office import Outrun, life_of, request
from elasticrl.shell.sight import Wanted
from elasticrl.shell.sight import read as seen
from elasticrl.status.answers import absent, ending, let_go, promise
from elasticrl.status.past import forget
from elasticrl.status.past import read as read_past
from elasticrl.status.picture import Picture, newest, picture, unsaved
from elasticrl.store import Store, StoreError

LOOK_FIRST_S: Final = 1.0  # for the store to say how the job is, before what this node has seen of it is taken
LOOKS: Final = 64  # at who can be spared; each time another drain has got through
T = TypeVar("T")


async def look(
    store: Store,
    view: View,
    *,
    job: str,
    node: str,
    here: str,
    needs: int,
    engines: int,
    own: Record | None = None,
    planned_s: float | None = None,
) -> Picture:
    """What the whole job looks like, asked of the store; of what this node has seen, if the store is silent. `own`: what it
    would say of itself now, which is newer than what it has written. `planned_s`: how long ago it saw the plan come.
    """
    rollouts, past, drains = dict[str, Rollout](), None, dict[str, Member]()
    silent = away = False
    try:
        async with asyncio.timeout(LOOK_FIRST_S):
            past = await read_past(store)
            records, quarantines = await read_all(store)
            drains = readable(Member, await store.scan(keys.DRAINS), keys.DRAINS)
            view = await begun(store, view)
            if engines:
                rollouts = readable(Rollout, await store.scan(keys.ROLLOUTS), keys.ROLLOUTS)
    except (StoreError, TimeoutError):
        alone = {node: view.own} if view.own else {}
        records = {**(view.records or alone)}
        quarantines = {**(view.quarantines or {})}
        engines = 0  # who is not seen is not missed
        silent, away = view.records is None, True
    if own is not None and node in records and records[node].member == own.member:
        records[node] = own
    return picture(
        job, view, records, quarantines, rollouts,
        past=past, drains=drains, needs=needs, engines=engines, node=node, here=here, now=time.time(),
        silent=silent, away=away, planned_s=planned_s,
    )  # fmt: skip


async def begun(store: Store, view: View) -> View:
    """With the plan and the commit of the store where nothing is seen of it yet, as by a daemon that has just begun."""
    if view.plan is not None or view.commit is not None:
        return view
    plan, commit = await asyncio.gather(store.get(keys.PLAN), store.get(keys.COMMIT))
    with suppress(keys.Unreadable):
        return replace(view, plan=seen(Plan, plan, keys.PLAN), commit=seen(Commit, commit, keys.COMMIT))
    return view


async def in_turn(look: Callable[[], Awaitable[int | None]], write: Callable[[int | None], Awaitable[T]]) -> T:
    """A drain that nobody forces: `look` who can be spared, and `write` it down unless another came in between."""
    for _ in range(LOOKS):
        with suppress(Outrun):
            return await write(await look())
    raise Refused(f"{LOOKS} other nodes were asked to leave in this moment; see elasticrl status, then ask again")


async def last_drain(store: Store) -> int:
    """The revision of the newest drain; 0: there was none. Read before looking who can be spared."""
    entry = await store.get(keys.DRAINED)
    return entry.mod_revision if entry else 0


async def spared(store: Store, view: View, settings: Settings, node: str, *, own: str) -> int | None:
    """`Refused` if the others cannot spare this node; else the newest drain that this has looked at, for its `request`. If the
    store does not say who they are (None), whoever asks may know. `own`: the node that is asked, which has no record yet when
    it has just begun: then nobody counts on it (None).
    """
    with suppress(StoreError, TimeoutError):
        async with asyncio.timeout(LOOK_FIRST_S):
            last = await last_drain(store)
            records, quarantines = await read_all(store)
            asked = readable(Member, await store.scan(keys.DRAINS), keys.DRAINS)
            view = await begun(store, view)
        begins = node == own and node not in records
        if begins:
            records[node] = Record(member=Member(node=node, incarnation=0))
        view = replace(view, records=records, quarantines=quarantines)
        if why := refusal(view, settings, node, asked.values()):
            raise Refused(why)
        return None if begins else last
    return None


async def write_down(
    store: Store, verb: Verb, node: str | None, view: View, *, job: str, by: str, needs: int, within_s: float,
    after: int | None = None,
) -> str:  # fmt: skip
    """What an operator asks of others into the store, and what he is told; or `Refused`: nobody asks it again for him, so he
    must know.
    """
    try:
        async with asyncio.timeout(within_s):
            said = await ask(store, verb, node, view, job=job, by=by, needs=needs, after=after)
    except (StoreError, TimeoutError) as error:
        why = str(error) or f"no answer within {within_s:g} s"
        again = " ".join(filter(None, ("elasticrl", str(verb), node)))
        raise Refused(
            f"the store has not confirmed it ({why}), so it is not done, though it may come true late; "
            f"see what the store lacks (elasticrl doctor --config FILE), then ask again: {again}"
        ) from None
    except keys.Unreadable as error:
        raise Refused(str(error)) from None
    if said is None:
        raise Refused(f"{node} is no member now; elasticrl status shows who is")
    return said


async def ask(
    store: Store, verb: Verb, node: str | None, view: View, *, job: str, by: str, needs: int, after: int | None = None
) -> str | None:
    """What an operator asks of others into the store, and what he is told; None: there is no such node. `by`: who he is.
    `after`: as `request` has it.
    """
    before = await intent(store) if verb in {Verb.PAUSE, Verb.RESUME} else None
    records = (await read_all(store))[0] if verb is Verb.STOP else {}
    known = await request(store, verb, node, view.generation, by, after=after)
    match verb:
        case Verb.DRAIN if node and not known:
            return let_go(node) if await forget(store, node) else None
        case Verb.ADMIT if node and (known or await is_missing(store, node)):
            return promise(verb, job, node) if await life_of(store, node) else absent(node)
        case Verb.PAUSE | Verb.RESUME:
            return promise(verb, job, before=before is INTENTS[verb])
        case Verb.STOP:
            left = unsaved(view, records, needs)
            return f"job {job} {ending(newest(view, records), left)}"
    return promise(verb, job, node or "") if known else None


async def intent(store: Store) -> Intent | None:
    """What was wanted of the whole job last; None for what cannot be read."""
    entry = await store.get(keys.INTENT)
    with suppress(keys.Unreadable):
        return keys.load(Wanted, entry.value, entry.key).intent if entry else Intent.RUN
    return None


async def is_missing(store: Store, node: str) -> bool:
    """Has it gone without a word?"""
    past = await read_past(store)
    return past is not None and any(each.member.node == node for each in past.missing)
