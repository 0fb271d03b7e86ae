"""The job's picture from etcd alone, for a machine without a daemon: `elasticrl status --store`."""

from dataclasses import asdict
from typing import Any

from elasticrl.core.model import Commit, Member, Plan, View
from elasticrl.daemon.main import read_all
from elasticrl.daemon.picture import picture
from elasticrl.shell import keys
from elasticrl.store import Get, StoreSettings, open_store


async def look(endpoints: tuple[str, ...], job: str) -> dict[str, Any]:
    """One look."""
    async with open_store(StoreSettings(endpoints=endpoints, namespace=keys.namespace(job))) as store:
        answer = await store.txn((), [Get(scope=key) for key in (keys.PLAN, keys.COMMIT, keys.LEADER)])
        plan, commit, leader = (r.entries[0] if r.entries else None for r in answer.responses)
        view = View(
            plan=keys.load(Plan, plan.value, keys.PLAN) if plan else None,
            commit=keys.load(Commit, commit.value, keys.COMMIT) if commit else None,
            leader=keys.load(Member, leader.value, keys.LEADER) if leader else None,
        )
        records, quarantines = await read_all(store)
        return asdict(picture(job, view, records, quarantines, needs=1, here="asked of the store"))
