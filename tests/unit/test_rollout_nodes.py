"""Rollout nodes without their engines: what training nodes know of them, what status shows, and that nobody counts them."""

import asyncio
import json
import sys
from dataclasses import asdict

from picture_kit import seen

from chaos.patience import patience
from elasticrl.cli import render
from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.model import Commit, Member, Phase, Plan, Record, Rollout, Seat, Verb, View, Work
from elasticrl.core.judge.straggler import slow
from elasticrl.daemon.roll import Roll, engines_of
from elasticrl.daemon.rollout import told_by
from elasticrl.daemon.secret import engine_key, vault_key
from elasticrl.shell import keys
from elasticrl.shell.office import request
from elasticrl.shell.sight import Sight
from elasticrl.status.picture import picture
from elasticrl.store import Delete
from elasticrl.store.memory import MemoryServer, MemoryStore

N0, R0, R1 = (Member(node=name, incarnation=1) for name in ("n0", "r0", "r1"))
UP = Rollout(member=R0, up=True, address="10.0.0.7:41327", pid=4711, version=2560)
DOWN = Rollout(member=R1, note="its engine starts")


class Log:
    def __init__(self):
        self.lines = []

    def info(self, event, **fields):
        self.lines.append((event, fields))


def test_those_that_are_up_are_written_down_for_the_workers_as_they_come_and_go(tmp_path):
    path, log, known = tmp_path / "rollouts.json", Log(), []

    def read():
        return json.loads(path.read_text())["engines"] if path.exists() else None

    async def until(expected):
        async with asyncio.timeout(patience(10.0)):
            while read() != expected:  # noqa: ASYNC110 - it is a file that somebody else writes
                await asyncio.sleep(0.01)
        known.append(expected)

    async def play():
        store = MemoryStore(MemoryServer())
        following = asyncio.create_task(Roll(path, log=log).run(store, b"secret"))
        await until({})
        await store.put(keys.rollout_key("r1"), keys.dump(DOWN))
        await store.put(keys.rollout_key("r0"), keys.dump(UP))
        await until({"r0": "10.0.0.7:41327"})
        await store.put(keys.rollout_key("r2"), b"nonsense")
        await store.txn([], [Delete(scope=keys.rollout_key("r0"))])
        await until({})
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(play())
    assert json.loads(path.read_text())["key"] == engine_key(b"secret") != vault_key(b"secret")
    assert path.stat().st_mode & 0o777 == 0o600
    assert [fields["engines"] for event, fields in log.lines if event == "rollouts.changed"] == known
    assert any(event == "store.unreadable" for event, _ in log.lines)


def test_an_engine_that_is_not_up_is_not_asked():
    assert engines_of({"r1": DOWN, "r0": UP}) == {"r0": "10.0.0.7:41327"}


def test_the_core_sees_no_rollout_node_and_one_can_be_drained():
    async def play():
        store = MemoryStore(MemoryServer())
        await store.put(keys.member_key("n0"), keys.dump(Record(member=N0)))
        await store.put(keys.rollout_key("r0"), keys.dump(UP))
        assert await request(store, Verb.DRAIN, "r0", 3)
        assert not await request(store, Verb.DRAIN, "r9", 3)
        views = {}
        for me in (N0, R0):
            views[me.node] = []
            sight = Sight(store, me, changed=views[me.node].append, complain=lambda _: None)
            watching = asyncio.create_task(sight.watch(everyone=True))
            async with asyncio.timeout(patience(10.0)):
                while not views[me.node]:  # noqa: ASYNC110 - told by a callback
                    await asyncio.sleep(0.01)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        return views["n0"][0], views["r0"][0]

    leaders, its_own = asyncio.run(play())
    assert set(leaders.records) == {"n0"}
    assert leaders.drain is None
    assert its_own.drain == R0


def shown(*rollouts, engines):
    plan = Plan(
        generation=3,
        phase=Phase.TRAIN,
        seats=(Seat(member=N0, born=1),),
        causes=(Cause(why=Why.POLICY, said="as told"),),
    )
    view = View(plan=plan, commit=Commit(step=40, generation=3), leader=N0)
    records = {"n0": Record(member=N0, work=Work.TRAINING, generation=3, step=41)}
    return picture("ppo", view, records, {}, {r.member.node: r for r in rollouts}, needs=1, engines=engines)


def test_status_shows_them_below_the_others_and_counts_them_nowhere():
    found = shown(DOWN, UP, engines=2)
    assert (found.nodes, found.known) == (1, 1)
    lines = render.status(asdict(found), colour=False, ages=False).splitlines()
    assert "1 of 1 nodes, needs 1" in lines[0]
    assert lines[4].split(maxsplit=4) == ["r0/1", "-", "rollout", "-", "engine at 10.0.0.7:41327, weights 2,560"]
    assert lines[5].split(maxsplit=5) == ["r1/1", "-", "no", "engine", "-", "its engine starts"]
    assert lines[6].startswith("# 1 of 2 rollout nodes have an engine: start elasticrl on the others")
    assert not shown(UP, engines=1).advice
    assert "training waits (rollout.wait)" in shown(DOWN, engines=1).advice[0]
    assert not seen().advice, "nobody expects any"


def test_who_brings_weights_to_the_engines_is_not_slow_for_it():
    history = [{0: {"sync": 5.0, "update": 1.0}, 1: {"sync": 0.0, "update": 1.0}, 2: {"update": 1.9, "sync": 0.0}}] * 5
    assert [(hit.rank, hit.phase) for hit in slow(history, z=4.0, steps=5)] == [(2, "update")]


KEEPER = """
import json
print("Loading weights: 100%")
for other in ([1], 7, None, "up", {"loss": 0.5}):
    print(json.dumps(other))
print("x" * 200_000)
print(json.dumps({"up": True, "address": "10.0.0.7:41327", "pid": 4711}))
print("y" * 200_000)
print(json.dumps({"up": False, "note": "its engine has died"}), end="")
"""


def test_whatever_libraries_print_a_keeper_is_heard():
    # A number, or a line of more than 64 KiB, ended the daemon.
    async def listen():
        keeper = await asyncio.create_subprocess_exec(sys.executable, "-c", KEEPER, stdout=asyncio.subprocess.PIPE)
        assert keeper.stdout is not None
        found = [told async for told in told_by(keeper.stdout)]
        assert await keeper.wait() == 0
        return found

    up, down = asyncio.run(listen())
    assert (up["pid"], down["note"]) == (4711, "its engine has died")
