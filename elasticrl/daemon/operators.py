"""What operators ask of a job, answered for a daemon: how it is, whether a node can be spared, and that something be done.

The one idea: an answer is made of the store and of the last that was seen of it, and of nothing else that a daemon has. What
the store has not confirmed is refused: who asks is told so, and asks again.
"""

import asyncio
import time
from contextlib import suppress
from dataclasses import replace
from typing import Final

from elasticrl.core.drain import refusal
from elasticrl.core.model import Member, Rollout, Verb, View
from elasticrl.core.settings import Settings
from elasticrl.daemon.control import Refused
from elasticrl.daemon.past import forget
from elasticrl.daemon.past import read as read_past
from elasticrl.daemon.picture import Picture, picture
from elasticrl.daemon.stored import read_all, readable
from elasticrl.shell import keys
from elasticrl.shell.office import request
from elasticrl.store import Store, StoreError

LOOK_FIRST_S: Final = 1.0  # for the store to say how the job is, before what this node has seen of it is taken


async def look(store: Store, view: View, *, job: str, node: str, here: str, needs: int, engines: int) -> Picture:
    """What the whole job looks like, asked of the store; of what this node has seen, if the store is silent."""
    rollouts, past = dict[str, Rollout](), None
    silent = False
    try:
        async with asyncio.timeout(LOOK_FIRST_S):
            past = await read_past(store)
            records, quarantines = await read_all(store)
            if engines:
                rollouts = readable(Rollout, await store.scan(keys.ROLLOUTS), keys.ROLLOUTS)
    except (StoreError, TimeoutError):
        own = {node: view.own} if view.own else {}
        records = {**(view.records or own)}
        quarantines = {**(view.quarantines or {})}
        engines = 0  # who is not seen is not missed
        silent = view.records is None
    return picture(
        job, view, records, quarantines, rollouts,
        past=past, needs=needs, engines=engines, here=here, now=time.time(), silent=silent,
    )  # fmt: skip


async def spared(store: Store, view: View, settings: Settings, node: str) -> None:
    """`Refused` if the others cannot spare this node. If the store does not say who they are, whoever asks may know."""
    with suppress(StoreError, TimeoutError):
        async with asyncio.timeout(LOOK_FIRST_S):
            records, quarantines = await read_all(store)
            asked = readable(Member, await store.scan(keys.DRAINS), keys.DRAINS)
        view = replace(view, records=records, quarantines=quarantines)
        if why := refusal(view, settings, node, asked.values()):
            raise Refused(why)


async def write_down(store: Store, verb: Verb, node: str | None, generation: int, *, within_s: float) -> str:
    """What an operator asks of others into the store, and what he is told; or `Refused`: nobody asks it again for him, so he
    must know.
    """
    try:
        async with asyncio.timeout(within_s):
            known = await request(store, verb, node, generation)
            if not known and verb is Verb.DRAIN and node and await forget(store, node):
                return let_go(node)
    except (StoreError, TimeoutError) as error:
        why = str(error) or f"no answer within {within_s:g} s"
        again = " ".join(filter(None, ("elasticrl", str(verb), node)))
        raise Refused(
            f"the store has not confirmed it ({why}), so it is not done, though it may come true late; "
            f"see what the store lacks (elasticrl doctor --config FILE), then ask again: {again}"
        ) from None
    except keys.Unreadable as error:
        raise Refused(str(error)) from None
    if not known:
        raise Refused(f"{node} is no member now; elasticrl status shows who is")
    return promise(verb, node or "")


def let_go(node: str) -> str:
    """What is told of a drain of one that is gone already."""
    return f"{node} was gone already: nobody waits for it any more"


def promise(verb: Verb, node: str) -> str:
    """What an operator is told that will happen now."""
    match verb:
        case Verb.DRAIN:
            return f"{node} was asked to leave: it finishes its step, and the plan goes on without it"
        case Verb.ADMIT:
            return f"nothing keeps {node} out of the plan now"
        case Verb.PAUSE:
            return "the job pauses at the next step; go on with: elasticrl resume"
        case Verb.RESUME:
            return "the job goes on"
        case Verb.STOP:
            return "the job saves and ends on all nodes"
