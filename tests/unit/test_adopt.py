"""An empty store beside committed checkpoints is refused; with --adopt the job goes on as one that was stopped."""

import asyncio

import pytest
from core_kit import Life, record

from elasticrl.contract import events
from elasticrl.contract.events import Tick, Workers
from elasticrl.contract.model import Commit, Phase, Plan, View
from elasticrl.core.node.adopt import AHEAD, Kept
from elasticrl.daemon.adopt import Lost, settle
from elasticrl.shell import keys
from elasticrl.store import Put
from elasticrl.store.memory import MemoryServer, MemoryStore

KEPT = Kept(place="/runs/ppo", name="step-00001280-g14", step=1280, generation=14, newest=15)


def settled(*, adopt, before=(), found=KEPT):
    """What came of it: what the job goes on from, what lies in the store then, and how the checkpoints were looked at."""
    looked = []

    def look(verify):
        looked.append(verify)
        return found

    async def play():
        store = MemoryStore(MemoryServer())
        if before:
            await store.txn((), before)
        kept = await settle(store, look, adopt=adopt)
        entries = [await store.get(key) for key in (keys.PLAN, keys.COMMIT)]
        return kept, [entry.value if entry else None for entry in entries]

    kept, (plan, commit) = asyncio.run(play())
    plan = keys.load(Plan, plan, "plan") if plan else None
    return kept, plan, keys.load(Commit, commit, "commit") if commit else None, looked


def test_a_store_that_has_lost_the_job_is_refused_with_the_remedy():
    with pytest.raises(Lost, match=r"/runs/ppo holds its checkpoints, committed up to step-00001280-g14.*--adopt"):
        settled(adopt=False)


@pytest.mark.parametrize("adopt", [False, True])
def test_a_new_job_begins_as_ever(adopt):
    assert settled(adopt=adopt, found=None) == (None, None, None, [adopt])


@pytest.mark.parametrize("key", [keys.PLAN, keys.COMMIT])
def test_a_store_that_knows_the_job_is_left_alone(key):
    value = Plan(generation=3, phase=Phase.HOLD) if key == keys.PLAN else Commit(step=4, generation=3)
    kept, plan, commit, looked = settled(adopt=True, before=[Put(key=key, value=keys.dump(value))])
    assert kept is None
    assert [plan, commit] == [value, None] if key == keys.PLAN else [None, value]
    assert looked == []  # nobody reads a disk for it


def test_who_adopts_verifies_and_is_ahead_of_every_generation_that_was():
    kept, plan, commit, looked = settled(adopt=True)
    assert kept == KEPT
    assert looked == [True]
    assert (commit.step, commit.manifest, commit.generation) == (1280, "step-00001280-g14", 14)
    assert (plan.phase, plan.generation) == (Phase.STOP, 15 + AHEAD)


def test_an_adopted_job_goes_on_from_the_checkpoint_at_a_higher_generation():
    _, plan, commit, _ = settled(adopt=True)
    life = Life("n00/1")
    life.leased(0.0)
    life.view = View(revision=5, plan=plan, plan_revision=4, commit=commit, commit_revision=4)
    life.seen(0.0, "what was adopted")
    life.at(0.1, Workers(now=0, warm=True, endpoint="n00:29500"))
    life.at(0.6, Tick(now=0))
    life.seen(0.7, "the office is ours", leader=life.state.me, leader_revision=6, records={}, quarantines={})
    life.told(1.0, record("n00"), record("n01"))
    made = next(action.plan for action in life.at(2.5, Tick(now=0)).actions if isinstance(action, events.Propose))
    assert (made.phase, made.generation, made.resume) == (Phase.TRAIN, 16 + AHEAD, 1280)
