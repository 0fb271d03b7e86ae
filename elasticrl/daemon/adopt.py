"""A store that knows nothing of a job, beside checkpoints that say it has run. What follows is `core.node.adopt`'s."""

import asyncio
import time
from collections.abc import Callable

from elasticrl.core.node.adopt import Kept, adopted, refusal
from elasticrl.daemon.refusal import Refusal
from elasticrl.shell import keys
from elasticrl.store import Absent, Get, Put, Store


class Lost(Refusal):
    """The store has lost the job; the message says what to do."""


Look = Callable[[bool], Kept | None]  # `True`: verify what you find, and step back to what is good


async def settle(store: Store, look: Look, *, adopt: bool) -> Kept | None:
    """See that store and checkpoints fit, or raise `Lost`; with `adopt`, mend it, and return what the job goes on from."""
    answer = await store.txn((), [Get(scope=keys.PLAN), Get(scope=keys.COMMIT)])
    if any(response.entries for response in answer.responses):
        return None
    kept = await asyncio.to_thread(look, adopt)
    if kept is None:
        return None
    if not adopt:
        raise Lost(refusal(kept))
    plan, commit = adopted(kept, round(time.time(), 1))
    fences = [Absent(key=keys.PLAN), Absent(key=keys.COMMIT)]
    ops = [Put(key=keys.PLAN, value=keys.dump(plan)), Put(key=keys.COMMIT, value=keys.dump(commit))]
    done = await store.txn(fences, ops)
    return kept if done.ok else None  # of several that adopt, the first does
