"""The job through etcd alone, for a machine without a daemon: `elasticrl status --store HOST:PORT,... --job NAME`.

The one idea: a daemon adds nothing to what operators see and ask but its own log; all else is read from the store and written
to it here in the same way. `--store FILE.yaml` takes endpoints, prefix, TLS and password from a configuration.
"""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from elasticrl.config import load, to_core
from elasticrl.contract.cause import culprits
from elasticrl.contract.model import Member, Phase, Record, Rollout, Verb, View
from elasticrl.contract.settings import Settings
from elasticrl.core.lead.drain import needed, refusal
from elasticrl.daemon import operators
from elasticrl.daemon.control import Refused, name_of
from elasticrl.daemon.history import about
from elasticrl.daemon.stored import readable
from elasticrl.diagnose.job_store import store_settings
from elasticrl.shell import keys
from elasticrl.shell.sight import Sight
from elasticrl.status.past import read as read_past
from elasticrl.status.picture import picture
from elasticrl.store import Store, StoreError, StoreRefused, StoreSettings, open_store

NOBODY = Member(node="", incarnation=0)  # whose eyes we look with: a member that nobody is
FIRST_S = 10.0  # for the first picture


class NoJob(StoreRefused):
    """Nothing in the store speaks of it."""


class Unwilling(StoreError):
    """What is asked is understood, and cannot be done with the job as it is."""


def settings_of(where: str, job: str | None) -> Settings:
    """What the core goes by, as far as `--store` says. (How many nodes the job needs, its nodes say.)"""
    if where.endswith((".yaml", ".yml")):
        return to_core(load(where, (f"job.name={job}",) if job else ()))
    return Settings(job=job or "")


def reach(where: str, job: str | None) -> StoreSettings:
    """What `--store` and `--job` say."""
    if where.endswith((".yaml", ".yml")):
        tree = load(where, (f"job.name={job}",) if job else ())
        if tree.store.embedded and not tree.store.endpoints:
            raise StoreRefused(
                f"the store of {where} is embedded: it runs as long as the job, beside its daemons. Ask those, on their "
                f"machine, without --store: elasticrl status --job {tree.job.name}"
            )
        return store_settings(tree)
    if not job:
        raise StoreRefused("say which job: --store HOST:PORT --job NAME")
    return StoreSettings(endpoints=tuple(where.split(",")), namespace=keys.namespace(job))


def job_of(where: StoreSettings) -> str:
    """The job's name, as its keys begin."""
    return where.namespace.strip("/").rpartition("/")[2]


async def views(store: Store) -> AsyncIterator[View]:
    """What the store says, and again whenever it says something else."""
    seen: asyncio.Queue[View] = asyncio.Queue()
    sight = Sight(store, NOBODY, changed=seen.put_nowait, complain=lambda _: None)
    watching = asyncio.create_task(sight.watch(everyone=True), name="watch")
    try:
        while True:
            looking = asyncio.create_task(seen.get())
            await asyncio.wait({looking, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                looking.cancel()
                watching.result()  # raises what ended it
            yield looking.result()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def now(store: Store) -> View:
    """The first picture, or StoreError."""
    looks = views(store)
    try:
        async with asyncio.timeout(FIRST_S):
            return await anext(looks)
    except TimeoutError:
        raise StoreError(f"the store has not shown the job within {FIRST_S:g} s") from None
    finally:
        await looks.aclose()  # type: ignore[attr-defined] # it is a generator


async def look(where: StoreSettings) -> dict[str, Any]:
    """`elasticrl status`."""
    async with open_store(where) as store:
        view = await now(store)
        rollouts = readable(Rollout, await store.scan(keys.ROLLOUTS), keys.ROLLOUTS)
        past = await read_past(store)
        drains = readable(Member, await store.scan(keys.DRAINS), keys.DRAINS)
    job = job_of(where)
    if not (view.plan or view.commit or view.records or rollouts or past):
        raise NoJob(f"there is no job under {where.namespace} in this store")
    records, quarantines = view.records or {}, view.quarantines or {}
    made = picture(
        job, view, records, quarantines, rollouts,
        past=past, drains=drains, needs=needed(view), here="asked of the store", now=time.time(),
    )  # fmt: skip
    return asdict(made)


async def ask(where: StoreSettings, verb: Verb, node: str | None = None, *, unless: Settings | None = None) -> str:
    """`elasticrl drain` and the like: what will happen now, or Unwilling. `unless`: a drain leaves too few by these, and by
    what the job's nodes say.
    """
    async with open_store(where) as store:
        view = await now(store)
        if view.plan is None and not view.records:
            raise NoJob(f"there is no job under {where.namespace} in this store")
        if view.plan is not None and view.plan.phase is Phase.STOP and verb in {Verb.PAUSE, Verb.RESUME, Verb.STOP}:
            raise Unwilling(f"the job has ended ({view.plan.reason}); start elasticrl on its nodes to begin it again")
        if verb in {Verb.DRAIN, Verb.ADMIT} and not node:
            raise StoreRefused(f"there is no node here to {verb}: name one, as elasticrl {verb} n03 --store ...")
        by = f"{await name_of(os.getuid())} on {socket.gethostname()}"
        write = partial(operators.ask, store, verb, node, job=job_of(where), by=by, needs=needed(view))
        if verb is Verb.DRAIN and node and unless is not None:
            look = partial(_spared, store, unless, node)
            try:
                said = await operators.in_turn(look, lambda after: write(view, after=after))
            except Refused as error:
                raise Unwilling(str(error)) from None
        else:
            said = await write(view)
        if said is None:
            raise Unwilling(f"{node} is no member now; there are {', '.join(sorted(view.records or {})) or 'none'}")
    return said


async def _spared(store: Store, unless: Settings, node: str) -> int:
    """The newest drain that this has looked at, or `Refused`."""
    last = await operators.last_drain(store)
    view = await now(store)
    asked = readable(Member, await store.scan(keys.DRAINS), keys.DRAINS)
    membership = replace(unless.membership, min_nodes=needed(view) or unless.membership.min_nodes)
    if why := refusal(view, replace(unless, membership=membership), node, asked.values()):
        raise Refused(why)
    return last


async def events(where: StoreSettings, node: str | None, *, follow: bool) -> AsyncIterator[dict[str, Any]]:
    """`elasticrl events`: what is so, as the daemons would have logged it, and with `follow` what changes from now on."""
    before = View()
    async with open_store(where) as store:
        async for view in views(store):
            if not follow and view.plan is None and not view.records:
                raise NoJob(f"there is no job under {where.namespace} in this store")
            for line in differences(before, view):
                if about(line, node):
                    yield {"at": datetime.fromtimestamp(time.time(), UTC).isoformat(), "level": "info", **line}
            before = view
            if not follow:
                return


def differences(before: View, view: View) -> Iterator[dict[str, Any]]:
    """What has changed between two looks, as events."""
    plan, commit = view.plan, view.commit
    if plan is not None and plan != before.plan:
        members, rung = len(plan.seats), plan.rung.name.lower()
        yield {
            "event": "plan.adopted", "generation": plan.generation, "phase": plan.phase.value, "members": members,
            "world": plan.world, "resume": plan.resume, "rung": rung, "causes": plan.kinds,
            "nodes": culprits(plan.causes),
            "reason": plan.reason,
        }  # fmt: skip
    if commit is not None and commit != before.commit:
        named = {"step": commit.step, "generation": commit.generation, "manifest": commit.manifest}
        yield {"event": "checkpoint.committed", **named}
    if view.leader is not None and view.leader != before.leader:
        yield {"event": "leader.elected", "node": view.leader.node, "member": str(view.leader)}
    old, new = before.records or {}, view.records or {}
    for node in sorted({*old, *new}):
        if node not in new:
            yield {"event": "node.state", "node": node, "reason": "it has no lease any more"}
        elif node not in old or worth(old[node]) != worth(new[node]):
            yield {"event": "workers.changed", "node": node, **worth(new[node])}
    for node, quarantine in sorted((view.quarantines or {}).items()):
        if quarantine != (before.quarantines or {}).get(node):
            state = "quarantined" if quarantine.held else "has served its time" if quarantine.strikes else "forgiven"
            yield {"event": "node.state", "node": node, "reason": f"{state}: {quarantine.reason}"}


def worth(record: Record) -> dict[str, Any]:
    """What of a record is worth a line."""
    said = {"work": record.work.value, "generation": record.generation, "born": record.born}
    more = {"leaving": record.leaving, "exit": record.exit.cause if record.exit else "", "suspects": record.suspects}
    return {"member": str(record.member), **said, **{name: value for name, value in more.items() if value}}
