"""A store that knows nothing of a job, beside checkpoints which say that it has run: etcd's data were lost.

The one idea: to begin such a job as if it were new would put its old generations' numbers on other plans, and forget what was
committed. So nobody does that unasked; who asks gets the newest good checkpoint as the commit, under a plan that has ended, of
a generation above all that can have been: the job goes on as one that was stopped.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from elasticrl.core.model import Commit, Outcome, Phase, Plan
from elasticrl.shell import keys
from elasticrl.store import Absent, Get, Put, Store

AHEAD = 100  # generations that the lost store may have known of and no checkpoint tells of


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A committed checkpoint of the job, and the newest generation of all that lie beside it.

    Example: Kept(place="/mnt/runs/ppo", name="step-00001280-g14", step=1280, generation=14, newest=15)
    """

    place: str
    name: str
    step: int
    generation: int
    newest: int


class Lost(ValueError):
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
        raise Lost(
            f"the store knows nothing of this job, but {kept.place} holds its checkpoints, committed up to {kept.name}: etcd "
            "has lost its data, or this is another etcd. Bring the right one back; or go on from the newest good checkpoint "
            "with --adopt (elasticrl run --adopt, or elasticrl daemon --adopt on one node); or give a new job another job.name"
        )
    reason = f"the store had lost the job: going on from {kept.name}, as asked by --adopt"
    plan = Plan(
        generation=kept.newest + AHEAD,
        phase=Phase.STOP,
        resume=kept.step,
        reason=reason,
        exit_code=Outcome.STOPPED.value,
    )
    commit = Commit(step=kept.step, generation=kept.generation, manifest=kept.name, written=round(time.time(), 1))
    fences = [Absent(key=keys.PLAN), Absent(key=keys.COMMIT)]  # of several that adopt, the first does
    ops = [Put(key=keys.PLAN, value=keys.dump(plan)), Put(key=keys.COMMIT, value=keys.dump(commit))]
    await store.txn(fences, ops)
    return kept
