"""What starts etcd and the agent goes on trying where the machine says no, and leaves nothing that nobody would find again."""

import asyncio
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from structlog.testing import CapturingLogger

from chaos.live.local import SCRIPT
from chaos.patience import patience
from elasticrl.agent.spec import Spec
from elasticrl.base.address import CONTROL
from elasticrl.base.process import started_at, state
from elasticrl.base.started import Started
from elasticrl.config.tree import Tree
from elasticrl.contract import wire
from elasticrl.contract.events import Asked, Event, Workers
from elasticrl.contract.model import Member, Record, Verb
from elasticrl.contract.settings import Settings
from elasticrl.core.node.state import State
from elasticrl.daemon.background import background
from elasticrl.daemon.crew import Crew, Ears
from elasticrl.daemon.history import History
from elasticrl.daemon.life import Life
from elasticrl.daemon.main import Daemon
from elasticrl.daemon.neighbours import Neighbours
from elasticrl.daemon.vault import Options, Vault, once
from elasticrl.shell import keys
from elasticrl.store import StoreSettings, open_store
from elasticrl.store.embedded import RECORD, Embedded
from elasticrl.store.memory import MemoryStore

FULL = Path("/dev/full")
pytestmark = pytest.mark.timeout(100)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="elasticrl-guard-") as folder:  # short: sockets live below it
        yield Path(folder)


def tree(folder: Path) -> Tree:
    folders = {"run_dir": str(folder / "run"), "state_dir": str(folder / "state")}
    plain = {
        "job": {"name": "j", "program": "x"},
        "node": {"interface": "lo", "name": "n0", **folders},
        "checkpoint": {"dir": str(folder / "saves")},
        "store": {"embedded": True},
    }
    return Tree.model_validate(plain)


def processes(*words: object) -> list[int]:
    """Those whose command line has all of these."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if all(str(word) in line for word in words):
                found.append(int(entry.parent.name))
    return found


def heard(said: CapturingLogger, name: str) -> list[dict[str, object]]:
    return [call.kwargs for call in said.calls if call.args[0] == name]


async def until(claim: Callable[[], bool], task: "asyncio.Task[None]", within_s: float = 20.0) -> None:
    deadline = time.monotonic() + patience(within_s)
    while not claim():
        assert not task.done(), task.exception()
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def ended(crew: Crew, task: "asyncio.Task[None]", folder: Path) -> None:
    """Whatever a test has left of a crew's agent is gone."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for pid in processes("elasticrl.agent", folder):
        os.kill(pid, signal.SIGKILL)
    assert await crew._begun.gone(10.0)


def test_etcd_is_started_again_once_its_record_can_be_written_and_no_orphan_is_left(folder: Path) -> None:
    async def run() -> None:
        said = CapturingLogger()
        daemon = Daemon(tree(folder), log=said, history=History())
        assert daemon.etcd is not None
        etcd = daemon.etcd.folder
        etcd.mkdir(parents=True)
        (etcd / RECORD).mkdir()  # no file can take its place
        async with background(daemon._guard_store(), "etcd", daemon.log) as guard:
            try:
                await until(lambda: bool(heard(said, "store.failed")), guard)
                assert processes("etcd", f"--data-dir {etcd}") == []
                await asyncio.sleep(2.5)
                assert len(heard(said, "store.failed")) == 1, "the same is said once"
                (etcd / RECORD).rmdir()
                await until(lambda: bool(heard(said, "store.started")), guard)
                assert len(processes("etcd", f"--data-dir {etcd}")) == 1
            finally:
                await daemon.etcd.stop()
                for pid in processes("etcd", f"--data-dir {etcd}"):
                    os.kill(pid, signal.SIGKILL)

    asyncio.run(run())


def corpses() -> set[int]:
    """Children of this process that have ended, and that nobody has cleared away."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {int(pid) for pid in children if state(int(pid)) == "Z"}


def test_an_etcd_whose_record_cannot_be_written_is_not_left_running(folder: Path) -> None:
    (folder / RECORD).mkdir()
    before = corpses()
    try:
        with pytest.raises(OSError, match="directory"):
            asyncio.run(Embedded(folder=folder).ensure())
        assert processes("etcd", f"--data-dir {folder}") == []
        assert corpses() <= before, "where the disk stays full, one more with each try"
    finally:
        for pid in processes("etcd", f"--data-dir {folder}"):
            os.kill(pid, signal.SIGKILL)


def test_an_agent_that_cannot_be_started_is_tried_again(folder: Path) -> None:
    async def run() -> None:
        said = CapturingLogger()
        (folder / "log").write_text("a file where its folder should be")
        spec = Spec(job="j", node="n0", program=("-m", "nothing"), log_dir=str(folder / "log"), spares=0, preload=())
        crew = Crew(folder / "home", spec, log=said, managed=False)
        task = asyncio.create_task(crew.run())
        try:
            await until(lambda: bool(heard(said, "agent.failed")), task)
            await asyncio.sleep(1.5)
            assert len(heard(said, "agent.failed")) == 1, "the same is said once"
            (folder / "log").unlink()
            await until(lambda: bool(heard(said, "agent.started")), task, within_s=60.0)
            await crew.quit("the test is over", 20.0)
        finally:
            await ended(crew, task, folder)

    asyncio.run(run())


def test_an_agent_that_ends_as_it_starts_is_tried_ever_more_rarely_and_says_why(folder: Path) -> None:
    async def run() -> None:
        said = CapturingLogger()
        spec = Spec(job="j", node="n0", program=("-m", "nothing"), log_dir=str(folder / "log"), spares=0, preload=())
        (folder / "home").mkdir()
        told: list[Event] = []
        with (folder / "home" / "agent.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # so that each ends with code 2
            crew = Crew(folder / "home", spec, log=said, managed=False)
            task = asyncio.create_task(crew.run())
            await until(lambda: bool(heard(said, "agent.failed")), task)
            crew.join(
                Member(node="n0", incarnation=1), Ears(post=told.append, reported=lambda _: None, broken=lambda: None)
            )  # who come later are told
            await asyncio.sleep(4.0)
            (failed,) = heard(said, "agent.failed")
            assert "exit code 2): an agent runs here already" in failed["error"]
            assert isinstance(told[-1], Workers)
            assert told[-1].problem == failed["error"]
            assert 2 <= (folder / "log" / "agent.log").read_text().count("an agent runs here already") <= 5
        try:
            await until(lambda: bool(heard(said, "agent.started")), task, within_s=60.0)
            assert isinstance(told[-1], Workers)
            assert told[-1].problem == ""
            await crew.quit("the test is over", 20.0)
        finally:
            await ended(crew, task, folder)

    asyncio.run(run())


def reports(*said: wire.Report) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """An agent that says this to its daemon, and is gone."""

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for report in said:
            writer.write(wire.encode(report))
        await writer.drain()
        writer.close()

    return serve


@pytest.mark.parametrize("managed", [True, False], ids=["a unit's", "its daemon's"])
def test_an_agent_that_was_told_to_end_before_its_node_is_known_is_not_forgotten_when_it_is_gone(
    folder: Path, managed: bool
) -> None:
    # The store may be away for longer than an agent takes to end: another agent was started, and its node took part again.
    async def run() -> list[Event]:
        said, told = CapturingLogger(), list[Event]()
        spec = Spec(job="j", node="n0", program=("-m", "nothing"), log_dir=str(folder / "log"), spares=0, preload=())
        crew = Crew(folder, spec, log=said, managed=managed)
        began, ends = (
            wire.Report(pid=os.getpid(), started=1),
            wire.Report(pid=os.getpid(), started=1, stopping="SIGTERM"),
        )
        agent = await asyncio.start_unix_server(reports(began, ends), folder / "agent.sock")
        async with background(crew.run(), "crew", said) as task:
            await until(lambda: bool(heard(said, "agent.lost")), task)
            agent.close()
            (folder / "agent.sock").unlink()
            await asyncio.sleep(0.6)  # three looks whether another is to be started
            assert processes("elasticrl.agent", folder) == []
            crew.join(
                Member(node="n0", incarnation=1), Ears(post=told.append, reported=lambda _: None, broken=lambda: None)
            )
        return told

    told = asyncio.run(run())
    assert [event.verb for event in told if isinstance(event, Asked)] == [Verb.DRAIN]
    assert [type(event) for event in told][:2] == [Workers, Asked], "who leaves without workers goes at once"


def test_an_agent_that_is_told_to_end_before_it_has_spoken_asks_its_node_to_leave(folder: Path) -> None:
    # It imports torch for seconds. Another one was started, and the node took part.
    async def run() -> list[Event]:
        said, told = CapturingLogger(), list[Event]()
        spec = Spec(job="j", node="n0", program=("-m", "nothing"), log_dir=str(folder / "log"), spares=0, preload=())
        crew = Crew(folder / "home", spec, log=said, managed=False)
        async with background(crew.run(), "crew", said) as task:
            await until(lambda: crew._begun.alive, task)
            await asyncio.sleep(0.2)
            crew._begun.send(signal.SIGTERM)
            await until(lambda: bool(heard(said, "agent.failed")), task)
            await asyncio.sleep(1.2)  # by then another was started
            assert processes("elasticrl.agent", folder) == []
            crew.join(
                Member(node="n0", incarnation=1), Ears(post=told.append, reported=lambda _: None, broken=lambda: None)
            )
        return told

    told = asyncio.run(run())
    assert [type(event) for event in told] == [Workers, Asked]
    assert [event.verb for event in told if isinstance(event, Asked)] == [Verb.DRAIN]


@pytest.mark.parametrize("managed", [False, True])
def test_the_sockets_of_an_agent_that_was_killed_go_with_its_daemon(folder: Path, managed: bool) -> None:
    # Found in the lab: the job was stopped before another agent took them over. Under systemd they are the other unit's.
    said = CapturingLogger()
    spec = Spec(job="j", node="n0", program=("-m", "nothing"), log_dir=str(folder / "log"), spares=0, preload=())
    left = [folder / name for name in ("agent.sock", "fork.sock")]
    for path in left:
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(path))

    async def run() -> None:
        crew = Crew(folder, spec, log=said, managed=managed)
        crew.first.set()
        await crew.quit("the job is stopped", 1.0)

    asyncio.run(run())
    assert [path.exists() for path in left] == [managed, managed]


def test_an_agent_that_was_started_after_one_was_told_to_end_takes_that_back(folder: Path) -> None:
    async def run() -> list[Event]:
        said, told = CapturingLogger(), list[Event]()
        spec = Spec(job="j", node="n0", program=("-m", "nothing"), log_dir=str(folder / "log"))
        crew = Crew(folder, spec, log=said, managed=True)
        ends, begins = wire.Report(pid=1, started=1, stopping="SIGTERM"), wire.Report(pid=os.getpid(), started=2)
        async with background(crew.run(), "crew", said) as task:
            for report in (ends, begins):
                (folder / "agent.sock").unlink(missing_ok=True)
                agent = await asyncio.start_unix_server(reports(report), folder / "agent.sock")
                await until(lambda report=report: crew._known.pid == report.pid, task)
                agent.close()
            crew.join(
                Member(node="n0", incarnation=1), Ears(post=told.append, reported=lambda _: None, broken=lambda: None)
            )
        return told

    assert not [event for event in asyncio.run(run()) if isinstance(event, Asked)]


def vault_in(folder: Path, said: CapturingLogger, deadline_s: float = 5.0) -> Vault:
    """A daemon's view of the vault there."""
    options = Options(job="j", node="n0", folder=folder / "vault", home=folder, host="127.0.0.1", deadline_s=deadline_s)
    vault = Vault(options, log=said)
    vault.know(b"s" * 32)
    return vault


def test_a_vault_that_hangs_already_when_its_daemon_comes_is_ended_and_another_serves(folder: Path) -> None:
    async def run() -> None:
        said = CapturingLogger()
        before = vault_in(folder, said, deadline_s=20.0)
        async with background(before.run(), "vault", said) as task:
            await until(lambda: bool(before.address), task)
        hung = before.process.pid
        os.kill(hung, signal.SIGSTOP)
        after = vault_in(folder, said, deadline_s=1.0)
        async with background(after.run(), "vault", said) as task:
            await until(lambda: bool(after.address), task)
            assert after.process.pid != hung
            assert not started_at(hung) or state(hung) == "Z", "it is the first one's child"
        await after.end()

    asyncio.run(run())


def test_a_vault_whose_folder_is_cleared_away_is_there_again_for_who_comes_later(folder: Path) -> None:
    async def run() -> None:
        said = CapturingLogger()
        vault = vault_in(folder, said)
        async with background(vault.run(), "vault", said) as task:
            await until(lambda: bool(vault.address), task)
            first, address = vault.process.pid, vault.address
            shutil.rmtree(folder / "vault")
            await until((folder / "vault" / CONTROL).exists, task)
            status = await once(folder / "vault" / CONTROL, 5.0, "status")
            assert (status["pid"] != first, vault.address) == (True, address)
        await vault.end()

    asyncio.run(run())


def test_a_vault_that_was_just_started_when_the_job_ended_is_not_left(folder: Path) -> None:
    async def run() -> None:
        said = CapturingLogger()
        vault = vault_in(folder, said)
        async with background(vault.run(), "vault", said) as task:
            await until(lambda: bool(processes("elasticrl.runtime.vault", folder)), task)
        assert not vault.process.pid, "it has not answered yet"
        await vault.end()
        assert processes("elasticrl.runtime.vault", folder) == []

    asyncio.run(run())


@pytest.mark.parametrize("known", [True, False], ids=["one that has spoken, and is stopped", "one of a daemon before"])
def test_an_agent_that_does_not_hear_that_it_shall_end_ends_with_all_below_it(folder: Path, known: bool) -> None:
    async def run() -> None:
        said = CapturingLogger()
        spec = Spec(
            job="j", node="n0", program=("-m", "nothing"), log_dir=str(folder / "log"), spares=1, preload=(), stop_s=1.0
        )
        crew = Crew(folder / "home", spec, log=said, managed=False)
        task = asyncio.create_task(crew.run())
        try:
            await until(lambda: crew.report is not None and crew.report.spares > 0, task, within_s=60.0)
            assert crew.report is not None
            agent = crew.report.pid
            assert len(processes("elasticrl.agent", folder)) > 1
            if known:
                os.kill(agent, signal.SIGSTOP)
                await crew.quit("the test is over", 1.0)
                (killed,) = heard(said, "agent.killed")
                assert killed["pid"] == agent
            else:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                after = Crew(folder / "home", spec, log=said, managed=False)
                after.know(Started.of(agent))
                await after.quit("the test is over", 20.0)
                assert heard(said, "agent.killed") == [], "it was asked to end, and did"
            assert not started_at(agent)
            deadline = time.monotonic() + patience(5.0)  # the kernel ends what is below it
            while processes("elasticrl.agent", folder) and time.monotonic() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            assert processes("elasticrl.agent", folder) == []
        finally:
            await ended(crew, task, folder)

    asyncio.run(run())


def test_a_crew_that_fails_is_logged_and_another_daemon_is_wanted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTICRL_AGENT", "systemd")  # its agent is somebody else's: here, the socket below

    async def run() -> int:
        said = CapturingLogger()
        daemon = Daemon(tree(folder), log=said, history=History())

        def fails(report: object) -> None:
            if report is not None:
                raise RuntimeError("a bug in what hears the agent")

        async def report(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(wire.encode(wire.Report(pid=os.getpid(), started=1)))
            await reader.read()
            writer.close()
            await writer.wait_closed()
            parted.set()

        parted = asyncio.Event()

        agent = await asyncio.start_unix_server(report, daemon.home.folder / "agent.sock")
        me = Member(node="n0", incarnation=1)
        async with agent, MemoryStore(namespace=keys.namespace("j")) as store:
            state = State(settings=Settings(job="j"), me=me, card=Record(member=me))
            neighbours = Neighbours(
                me, b"s" * 32, state.settings.membership, post=lambda _: None, refused=lambda *_: None
            )
            monkeypatch.setattr(daemon.inquiry, "heard", fails)
            joined = daemon._join(state, store, neighbours, Life(node="n0", incarnation=1))
            vaults = background(asyncio.sleep(60), "vault", said)
            async with background(daemon.crew.run(), "crew", said) as crew, vaults as vault:
                told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
                code = await asyncio.wait_for(daemon._until_the_end(joined, told, crew, vault), 20.0)
            await parted.wait()
        (bug,) = heard(said, "bug")
        assert "what hears the agent" in str(bug["exc_info"])
        (stopped,) = heard(said, "daemon.stopped")
        assert (stopped["code"], stopped["reason"]) == (code, "the crew failed")
        return code

    assert asyncio.run(run()) == 1


def test_what_dies_beside_the_daemons_loop_is_said_while_it_goes_on(folder: Path) -> None:
    async def run() -> None:
        said = CapturingLogger()
        daemon = Daemon(tree(folder), log=said, history=History())

        async def fails() -> None:
            raise ValueError("a bug in what sends beats")

        async with background(fails(), "beats", said), background(asyncio.sleep(60), "vault", said):
            deadline = time.monotonic() + patience(10.0)
            while not heard(said, "bug"):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
        (bug,) = heard(said, "bug")  # and none of what was only cancelled
        assert bug["action"] == "beats"
        assert "what sends beats" in str(bug["exc_info"])
        nobody = StoreSettings(endpoints=("http://127.0.0.1:1",), try_timeout_s=0.2, timeout_s=0.2)
        async with open_store(nobody) as store, background(daemon._look_at(store), "store's health", said) as looking:
            await asyncio.wait({looking}, timeout=20.0)
            assert looking.done()
        assert len(heard(said, "bug")) == 1, "a store that is away is none"

    asyncio.run(run())


class Broken:
    """A daemon with an etcd of its own, and something where its socket is to be: it ends with `bug` once etcd is there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.beats = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.beats.bind(("127.0.0.1", 0))
        self.port = self.beats.getsockname()[1]
        self.beats.close()
        self.control = folder / "run/j/n0/control.sock"
        conf = {
            "job": {"name": "j", "program": str(SCRIPT)},
            "node": {
                "name": "n0", "device": "cpu", "interface": "lo", "run_dir": f"{folder}/run", "state_dir": f"{folder}/state",
                "beat_port": self.port,
            },
            "store": {"embedded": True},
            "membership": {"min_nodes": 2},
            "vault": {"dir": f"{folder}/vault", "copies": 0},
            "checkpoint": {"dir": f"{folder}/saves"},
            "telemetry": {"log_dir": f"{folder}/log", "format": "json"},
        }  # fmt: skip
        (folder / "job.yaml").write_text(yaml.safe_dump(conf))

    def start(self, *flags: str) -> "subprocess.Popen[bytes]":
        command = [
            sys.executable,
            "-m",
            "elasticrl.cli.main",
            "daemon",
            "--config",
            str(self.folder / "job.yaml"),
            *flags,
        ]
        with (self.folder / "said").open("ab") as said:
            return subprocess.Popen(command, stdout=said, stderr=said)

    def lines(self, name: str) -> list[dict[str, object]]:
        lines = map(json.loads, (self.folder / "said").read_text().splitlines())
        return [line for line in lines if line["event"] == name]

    def until(self, claim: Callable[[], object], within_s: float = 30.0) -> None:
        deadline = time.monotonic() + patience(within_s)
        while not claim():
            assert time.monotonic() < deadline, (self.folder / "said").read_text()
            time.sleep(0.05)  # between looks, up to the deadline


@pytest.fixture
def broken(folder: Path) -> Iterator[Broken]:
    made = Broken(folder)
    try:
        yield made
    finally:
        made.beats.close()
        for pid in processes(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_foreground_daemon_that_ends_by_a_bug_leaves_nothing(broken: Broken) -> None:
    broken.control.parent.mkdir(parents=True, mode=0o700)
    broken.control.mkdir()
    assert broken.start("--foreground").wait(60.0) == 1
    (stopped,) = broken.lines("daemon.stopped")
    assert (stopped["code"], stopped["workers"], "left" in stopped) == (1, "ended", False)
    assert broken.lines("bug")
    assert broken.lines("store.started")
    broken.until(lambda: not processes(broken.folder), within_s=5.0)


def test_a_port_that_somebody_has_is_refused_and_no_bug(broken: Broken) -> None:
    broken.beats = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    broken.beats.bind(("127.0.0.1", broken.port))
    assert broken.start("--foreground").wait(60.0) == 78
    assert not broken.lines("bug")
    (stopped,) = broken.lines("daemon.stopped")
    assert re.search(rf"beats cannot be heard at 127.0.0.1:{broken.port} .*node.beat_port", str(stopped["reason"]))


def test_a_daemon_that_ends_by_a_bug_says_what_it_leaves_for_the_next_and_what_ends_it(broken: Broken) -> None:
    first = broken.start()  # so that an agent is there for certain
    broken.until(lambda: broken.lines("daemon.started") and broken.lines("agent.started"))
    first.kill()
    first.wait()
    broken.control.unlink()
    broken.control.mkdir()
    assert broken.start().wait(60.0) == 1
    (stopped,) = broken.lines("daemon.stopped")
    assert (stopped["code"], stopped["workers"]) == (1, "kept")
    named = re.search(r"agent (\d+) .*etcd (\d+): the next daemon of this node adopts them", str(stopped["left"]))
    assert named, stopped
    assert set(map(int, named.groups())) <= set(processes(broken.folder))
    broken.control.rmdir()
    third = broken.start()
    broken.until(lambda: len(broken.lines("daemon.started")) == 2)
    assert [line["adopted"] for line in broken.lines("store.started")] == [False, True, True]
    assert [line["adopted"] for line in broken.lines("agent.started")] == [False, True, True]
    assert broken.lines("agent.started")[-1]["pid"] == int(named[1])
    third.terminate()  # nobody asks systemd here, so it hands over
    assert third.wait(30.0) == 0
    left = str(broken.lines("daemon.stopped")[-1]["left"])
    told = re.search(r"without one, (kill [\d ]+) ends them$", left)
    assert told, left
    subprocess.run(told[1].split(), check=True)
    broken.until(lambda: not processes(broken.folder))


@pytest.fixture
def small(folder: Path) -> Iterator[Path]:
    """A disk with room for a page."""
    place = folder / "small"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", place], capture_output=True, check=False
    ).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=False)


def test_a_disk_that_is_full_as_a_daemon_starts_is_told_and_no_bug(broken: Broken, small: Path) -> None:
    (small / "filled").write_bytes(b"x")
    command = broken.start("--foreground", f"node.run_dir={small}")
    assert command.wait(60.0) == 1, "whoever has started it does so again: there may be room then"
    assert not broken.lines("bug")
    (refused,) = broken.lines("daemon.refused")
    assert re.match(rf"No space left on device: .*{small}.*Free space there", str(refused["reason"]))
