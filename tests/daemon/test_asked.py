"""What an operator is told, by a real control socket before a real etcd: done is what the store has confirmed."""

import asyncio
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from chaos.etcd import LocalCluster
from elasticrl.cli import serve
from elasticrl.config.tree import Tree
from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.events import Asked
from elasticrl.contract.model import Commit, Intent, Member, Phase, Plan, Quarantine, Record, Seat, Verb
from elasticrl.contract.settings import Membership, Settings
from elasticrl.core.node.state import State
from elasticrl.daemon import outside
from elasticrl.daemon.client import Unanswered, ask, ask_stream, pack
from elasticrl.daemon.history import History
from elasticrl.daemon.life import Life
from elasticrl.daemon.main import Daemon
from elasticrl.daemon.neighbours import Neighbours
from elasticrl.daemon.stored import read_all
from elasticrl.shell import keys
from elasticrl.shell.sight import Wanted
from elasticrl.status.past import Missing, Past
from elasticrl.status.picture import Picture
from elasticrl.store import Delete, Store, StoreSettings, open_store
from elasticrl.telemetry.log import set_up

TIMEOUT_S = 1.0
pytestmark = pytest.mark.timeout(60)


class Reached:
    """A daemon as far as operators reach: its answers, its store, and no workers."""

    def __init__(self, folder: Path, etcd: LocalCluster, store: Store, timeout_s: float) -> None:
        self.etcd, self.store = etcd, store
        folders = {"run_dir": str(folder / "run"), "state_dir": str(folder / "state")}
        plain = {
            "job": {"name": "j", "program": "x"},
            "node": {"interface": "lo", "name": "n0", **folders},
            "checkpoint": {"dir": str(folder / "saves")},
            "store": {"endpoints": etcd.endpoints, "timeout_s": timeout_s, "try_timeout_s": 0.2},
        }
        self.history = History()
        self.daemon = Daemon(
            Tree.model_validate(plain), log=set_up(pretty=False, tap=self.history), history=self.history
        )
        me = Member(node="n0", incarnation=1)
        state = State(settings=Settings(job="j"), me=me, card=Record(member=me))
        neighbours = Neighbours(me, b"s" * 32, state.settings.membership, post=lambda _: None, refused=lambda *_: None)
        joined = self.daemon._join(state, store, neighbours, Life(node="n0", incarnation=1))
        self.node = joined.node
        self.path = self.daemon.home.control

    async def ask(self, verb: str, **fields: Any) -> Any:
        return await asyncio.to_thread(ask, self.path, verb, deadline_s=20.0, **fields)

    async def refused(self, verb: str, **fields: Any) -> str:
        with pytest.raises(Unanswered) as said:
            await self.ask(verb, **fields)
        return str(said.value)

    async def intent(self) -> Intent:
        entry = await self.store.get(keys.INTENT)
        return keys.load(Wanted, entry.value, keys.INTENT).intent if entry else Intent.RUN

    def trains(self) -> None:
        """There is a plan; nobody of whom these tests speak has a seat in it."""
        self.node.sight.view = replace(self.node.sight.view, plan=Plan(generation=1, phase=Phase.TRAIN, lanes=8))

    async def join(self, node: str) -> Member:
        member = Member(node=node, incarnation=3)
        await self.store.put(keys.member_key(node), keys.dump(Record(member=member)))
        return member


@asynccontextmanager
async def asked(timeout_s: float = TIMEOUT_S) -> AsyncIterator[Reached]:
    with tempfile.TemporaryDirectory(prefix="elasticrl-asked-") as folder:  # short: a socket lives below it
        async with LocalCluster(Path(folder) / "etcd", members=1) as etcd:
            settings = StoreSettings(
                endpoints=etcd.endpoints, namespace=keys.namespace("j"), timeout_s=timeout_s, try_timeout_s=0.2
            )
            async with open_store(settings) as store:
                it = Reached(Path(folder), etcd, store, timeout_s)
                async with AsyncExitStack() as stack:
                    await it.daemon._open_control(stack)
                    yield it


def with_asked(script: Callable[[Reached], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asked() as it:
            await script(it)

    asyncio.run(run())


def test_what_is_asked_stands_in_the_store_when_the_answer_comes() -> None:
    async def script(it: Reached) -> None:
        member = await it.join("n1")
        it.trains()
        for verb, intent in (("pause", Intent.PAUSE), ("resume", Intent.RUN), ("stop", Intent.STOP)):
            await it.ask(verb)
            assert await it.intent() is intent
        assert "n1 was asked to leave" in await it.ask("drain", node="n1")
        entry = await it.store.get(keys.drain_key("n1"))
        assert entry
        assert keys.load(Member, entry.value, "drain") == member
        await it.ask("admit", node="n1")
        assert await it.store.get(keys.drain_key("n1")) is None
        await it.join("n0")
        assert "n0 was asked to leave" in await it.ask("drain", force=True)
        assert await it.store.get(keys.drain_key("n0")), (
            "its own daemon was asked, and leaves; others say who wanted it"
        )
        assert "n11 is no member now" in await it.refused("admit", node="n11")

    with_asked(script)


def test_who_asks_for_what_is_so_already_is_told_so() -> None:
    async def script(it: Reached) -> None:
        assert await it.ask("resume") == "job j was not paused: nothing is changed"
        assert await it.ask("pause") == "job j pauses at the next step; go on with: elasticrl resume"
        assert await it.ask("pause") == "job j was paused already; go on with: elasticrl resume"
        assert await it.ask("resume") == "job j goes on"
        assert await it.ask("stop") == "job j saves and ends on all nodes"
        await it.store.put(keys.INTENT, b"{")
        assert await it.ask("resume") == "job j goes on", "what cannot be read keeps nobody from writing it anew"

    with_asked(script)


def test_who_admits_a_node_that_does_not_run_is_told_what_brings_it_back() -> None:
    # Found by a newcomer: "nothing keeps n1 out of the plan now", and it stayed away.
    there = "nothing keeps n1 out of the plan now"
    away = f"{there}, but it does not run: start elasticrl there, and it joins"

    async def script(it: Reached) -> None:
        member = await it.join("n1")
        assert await it.ask("admit", node="n1") == there
        await it.store.txn((), [Delete(scope=keys.member_key("n1"))])
        kept_out = Quarantine(member=member, cause=Cause(why=Why.POLICY, said="why"))
        for key, value in ((keys.drain_key("n1"), member), (keys.quarantine_key("n1"), kept_out)):
            await it.store.put(key, keys.dump(value))
            assert await it.ask("admit", node="n1") == away
        assert "n1 is no member now" in await it.refused("admit", node="n1")
        await it.store.put(keys.PAST, keys.dump(Past(began=1.0, missing=(Missing(member=member, at=2.0),))))
        assert await it.ask("admit", node="n1") == away

    with_asked(script)


def test_before_the_first_plan_nobody_is_let_go() -> None:
    async def script(it: Reached) -> None:
        assert "there is no plan yet" in await it.refused("drain"), "nor before it has told the others of itself"
        for node in ("n0", "n1"):
            await it.join(node)
            assert "there is no plan yet that it could leave" in await it.refused("drain", node=node)
        assert not (await it.store.scan(keys.DRAINS)).entries
        assert not it.node.loop._events

    with_asked(script)


def test_a_daemon_that_has_seen_nothing_yet_shows_where_the_job_stood() -> None:
    # Found by a newcomer: "generation 0 step 0 (committed 0)" of a job of 18,680 steps that was begun again.
    async def script(it: Reached) -> None:
        member = await it.join("n0")
        plan = Plan(
            generation=4, phase=Phase.STOP, seats=(Seat(member=replace(member, incarnation=2), born=1),), lanes=8,
            causes=(Cause(why=Why.STOPPED, nodes=("an operator",)),), exit_code=75,
        )  # fmt: skip
        await it.store.put(keys.PLAN, keys.dump(plan))
        await it.store.put(keys.COMMIT, keys.dump(Commit(step=18680, generation=4)))
        shown = await it.ask("status")
        assert (shown["state"], shown["generation"], shown["step"], shown["node"]) == ("FORMING", 4, 18680, "n0")
        assert shown["causes"] == [], "the plan of the run before is none of this one's"

    with_asked(script)


def test_two_that_ask_at_once_both_get_what_they_are_told() -> None:
    async def script(it: Reached) -> None:
        nodes = [f"n{number}" for number in range(1, 9)]
        it.trains()
        for node in nodes:
            await it.join(node)
        await asyncio.gather(*(it.ask("drain", node=node) for node in nodes))
        found = await it.store.scan(keys.DRAINS)
        assert [entry.key for entry in found.entries] == [keys.drain_key(node) for node in nodes]

    with_asked(script)


def test_a_node_that_is_not_there_cannot_be_drained() -> None:
    async def script(it: Reached) -> None:
        assert await it.refused("drain", node="n99") == "n99 is no member now; elasticrl status shows who is"

    with_asked(script)


def test_a_node_that_the_others_cannot_spare_leaves_only_if_that_is_meant() -> None:
    async def script(it: Reached) -> None:
        members = [await it.join(node) for node in ("n0", "n1")]
        plan = Plan(
            generation=1, phase=Phase.TRAIN, seats=tuple(Seat(member=each, born=1) for each in members), lanes=8
        )
        it.node.sight.view = replace(it.node.sight.view, plan=plan)
        it.daemon.settings = replace(it.daemon.settings, membership=Membership(min_nodes=2))
        for named in ({"node": "n1"}, {}):
            said = await it.refused("drain", **named)
            assert "1 of the 2 nodes are left that the job needs (membership.min_nodes)" in said
            assert said.endswith(f"elasticrl drain {named.get('node', 'n0')} --force")
        assert not (await it.store.scan(keys.DRAINS)).entries
        assert not it.node.loop._events
        assert [line["event"] for line in it.history._lines] == []  # nothing was done, so nothing is told
        await it.join("n2")  # it trains as little as the others, and has no seat
        assert "stays" in await it.refused("drain", node="n1")
        assert "n1 was asked to leave" in await it.ask("drain", node="n1", force=True)
        assert "n0 was asked to leave" in await it.ask("drain", force=True)

    with_asked(script)


def test_the_store_alone_tells_who_can_be_spared_where_a_configuration_or_a_node_says_how_many_are_needed() -> None:
    async def script(it: Reached) -> None:
        members = [await it.join(node) for node in ("n0", "n1")]
        plan = Plan(
            generation=1, phase=Phase.TRAIN, seats=tuple(Seat(member=each, born=1) for each in members), lanes=8
        )
        await it.store.put(keys.PLAN, keys.dump(plan))
        where = StoreSettings(endpoints=it.etcd.endpoints, namespace=keys.namespace("j"))
        needs = Settings(job="j", membership=Membership(min_nodes=2))
        with pytest.raises(outside.Unwilling, match="n1 stays"):
            await outside.ask(where, Verb.DRAIN, "n1", unless=needs)
        # Endpoints alone: as the nodes have it.
        await it.store.put(keys.member_key("n0"), keys.dump(Record(member=members[0], needs=2)))
        with pytest.raises(outside.Unwilling, match="1 of the 2 nodes"):
            await outside.ask(where, Verb.DRAIN, "n1", unless=Settings(job="j"))
        assert (await outside.look(where))["needs"] == 2
        assert "n1 was asked to leave" in await outside.ask(where, Verb.DRAIN, "n1")
        assert "n0 was asked to leave" in await outside.ask(where, Verb.DRAIN, "n0")

    with_asked(script)


def test_without_a_store_nothing_is_said_to_be_done_but_a_nodes_own_drain() -> None:
    async def script(it: Reached) -> None:
        await it.join("n1")
        await it.etcd.freeze(0)
        try:
            for verb, node in (("stop", None), ("pause", None), ("drain", "n1"), ("admit", "n1")):
                said = await it.refused(verb, node=node)
                assert "the store has not confirmed it" in said
                assert said.endswith(f"ask again: elasticrl {verb}{' n1' if node else ''}")
            assert not it.node.loop._events
            assert "n0 was asked to leave" in await it.ask("drain")
            event = it.node.loop._events[0]
            assert isinstance(event, Asked)
            assert event.verb is Verb.DRAIN
        finally:
            it.etcd.thaw(0)

    with_asked(script)


def test_a_store_that_is_given_long_to_answer_is_told_of_by_who_waited_for_it() -> None:
    # The control socket gave every answer 10 s, and said in place of this that nothing is known.
    async def script() -> None:
        async with asked(timeout_s=12.0) as it:
            await it.etcd.freeze(0)
            try:
                stopped, looked = await asyncio.gather(it.refused("stop"), it.ask("diagnose"))
            finally:
                it.etcd.thaw(0)
            assert "the store has not confirmed it" in stopped
            assert looked["said"] == "no workers run"

    asyncio.run(script())


def test_one_value_that_cannot_be_read_hides_no_other() -> None:
    async def script(it: Reached) -> None:
        member = await it.join("n1")
        kept = Quarantine(member=member, cause=Cause(why=Why.POLICY, said="why"))
        await it.store.put(keys.quarantine_key("n1"), keys.dump(kept))
        await it.store.put(keys.member_key("n7"), b"{")
        await it.store.put(keys.quarantine_key("n8"), b'{"v": 99}')
        records, quarantines = await read_all(it.store)
        assert (list(records), quarantines) == (["n1"], {"n1": kept})
        assert [row["node"] for row in (await it.ask("status"))["rows"]] == ["n1"]
        assert "members/n7 is not JSON" in await it.refused("drain", node="n7")

    with_asked(script)


def test_a_fault_of_the_daemons_own_is_answered_and_logged() -> None:
    async def script(it: Reached) -> None:
        it.daemon.crew.report = 7  # type: ignore[assignment] # as nothing has it
        assert "for a fault of its own (AttributeError" in await it.refused("logs")
        assert [line["event"] for line in it.history._lines] == ["bug"]
        it.daemon.crew.report = None
        assert await it.ask("logs") == []

    with_asked(script)


@contextmanager
def ending(path: Path, *, says: bytes, reads: bool) -> Iterator[None]:
    """A daemon that goes away during every question, after some bytes; if it has not read it, the connection is reset."""
    path.parent.mkdir(parents=True, exist_ok=True)
    over = threading.Event()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        server.listen()
        server.settimeout(0.05)

        def serve_it() -> None:
            while not over.is_set():
                try:
                    client, _ = server.accept()
                except TimeoutError:
                    continue
                with client, suppress(OSError):
                    if reads:
                        client.recv(4096)
                    client.sendall(says)

        thread = threading.Thread(target=serve_it)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(10)


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("says", [b"", b'{"v":1,"ok":tr'])
def test_a_daemon_that_goes_away_during_a_question_is_said_so(tmp_path: Path, says: bytes, reads: bool) -> None:
    path = tmp_path / "j" / "n0" / "control.sock"
    with ending(path, says=says, reads=reads):
        for _ in range(20):
            with pytest.raises(Unanswered, match="ended before it had answered"):
                ask(path, "status", deadline_s=5.0, more="x" * 8192)


def test_a_run_outlives_a_daemon_that_goes_away_during_its_question(tmp_path: Path) -> None:
    with ending(tmp_path / "j" / "n0" / "control.sock", says=b"", reads=True):
        ends = [sys.executable, "-c", "import time, sys; time.sleep(1); sys.exit(75)"]
        assert serve.follow([serve.Started("n0", lambda: subprocess.Popen(ends), "")], tmp_path, "j", 0.05, 0) == 75


def test_a_daemon_that_breaks_is_started_again_but_not_for_ever_nor_after_the_jobs_end(tmp_path: Path) -> None:
    def exits(*codes: int) -> serve.Started:
        turns = iter([*codes, *[codes[-1]] * 20])
        script = [sys.executable, "-S", "-c"]
        return serve.Started("n0", lambda: subprocess.Popen([*script, f"import os; os._exit({next(turns)})"]), "")

    def begun(*daemons: serve.Started) -> int:
        assert serve.follow(list(daemons), tmp_path, "j", 0.02, 0) >= 0
        return len(daemons[0].began)

    assert begun(exits(1, 1, 0)) == 3, "until it ends in order"
    assert begun(exits(1)) == serve.BURST
    for code in (0, 2, 70, 75, 78):
        assert begun(exits(code)) == 1
    over = exits(75)
    over.process.wait()
    assert begun(exits(1), over) == 1, "one that began now would begin the job anew"


@pytest.mark.parametrize(("exit_code", "said"), [(None, 1), (0, 0)])
def test_how_a_node_that_was_drained_comes_back_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], exit_code: int | None, said: int
) -> None:
    # Found by new users: "start elasticrl on it again" names no command for a node of `elasticrl run`.
    picture = {**asdict(Picture(job="j", state="TRAINING")), "exit_code": exit_code}
    with ending(tmp_path / "j" / "n0" / "control.sock", says=pack({"ok": True, "value": picture}), reads=True):
        drained, other = (
            serve.Started(name, partial(subprocess.Popen, ["sleep", seconds]), "elasticrl daemon &")
            for name, seconds in (("n1", "0"), ("n0", "1.5"))
        )
        assert serve.follow([drained, other], tmp_path, "j", 0.1, 0) == 0
    assert capsys.readouterr().out.count("n1 has left. To bring it back: elasticrl daemon &\n") == said


def test_events_that_are_not_followed_come_to_an_end() -> None:
    async def script(it: Reached) -> None:
        it.daemon.log.info("leader.elected", member="n0/1")
        lines = await asyncio.to_thread(lambda: list(ask_stream(it.path, "events", deadline_s=3.0)))
        assert [line["event"] for line in lines] == ["leader.elected"]

    with_asked(script)
