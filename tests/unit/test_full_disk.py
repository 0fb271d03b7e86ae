"""A disk that takes nothing: `/dev/full` in the place of a file. It costs lines, and ends nobody."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import CapturingLogger

from chaos.patience import patience
from elasticrl.config.tree import Tree
from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.events import Seen
from elasticrl.contract.model import Member, Phase, Plan, Quarantine, Record, Seat, View
from elasticrl.contract.settings import Membership, Settings
from elasticrl.core.node.state import State
from elasticrl.core.step import step
from elasticrl.daemon.history import History
from elasticrl.daemon.life import Life
from elasticrl.daemon.main import Daemon
from elasticrl.daemon.neighbours import Neighbours
from elasticrl.shell import keys
from elasticrl.shell.node import Node
from elasticrl.shell.trace import AGAIN_S, Trace, replay
from elasticrl.store.memory import MemoryStore

ME = Member(node="n0", incarnation=1)
FULL = Path("/dev/full")


def state() -> State:
    return State(
        settings=Settings(job="t", lanes=1, retry_s=0.1, membership=Membership(min_nodes=1)),
        me=ME,
        card=Record(member=ME),
    )


class Traced:
    """A core at work whose every step is traced."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, CapturingLogger()
        self.trace = Trace(folder, 1 << 20, self.said.info)
        self.state, self.now = state(), 1000.0

    def sees(self, revision: int, *, after_s: float = AGAIN_S, **fields: object) -> None:
        self.now += after_s
        event = Seen(now=self.now, view=View(revision=revision, **fields))  # type: ignore[arg-type]
        before, decision = self.state, step(self.state, event)
        self.state = decision.state
        self.trace.write(before, event, decision.actions)

    def heard(self) -> list[str]:
        return [call.args[0] for call in self.said.calls]

    def replayed(self, name: str = "new") -> list[View]:
        """What an operator sees of it, each step decided as it was."""
        steps = list(replay(self.folder / f"trace-{name}.jsonl"))
        assert all(done.same for done in steps)
        return [done.event.view for done in steps if isinstance(done.event, Seen)]


@pytest.fixture
def it(tmp_path: Path) -> Iterator[Traced]:
    traced = Traced(tmp_path / "trace")
    yield traced
    traced.trace.close()


def fill(it: Traced) -> Path:
    """The disk is full from now on: the open file as well as any other."""
    head = it.folder / "trace-head.jsonl"
    head.symlink_to(FULL)
    file = os.open(FULL, os.O_WRONLY)
    assert it.trace._file is not None
    os.dup2(file, it.trace._file.fileno())
    os.close(file)
    return head


def test_a_full_disk_costs_a_trace_lines_and_is_said_once(it: Traced) -> None:
    it.sees(1)
    head = fill(it)
    for revision in range(2, 7):
        it.sees(revision)
    assert it.heard() == ["trace.lost"]
    assert "No space left" in it.said.calls[0].kwargs["error"]
    assert [view.revision for view in it.replayed()] == [1], "what was written before is not rotated away"
    head.unlink()
    it.sees(7)
    it.sees(8)
    assert it.heard() == ["trace.lost", "trace.back"]
    assert [view.revision for view in it.replayed("old")] == [1]
    assert [view.revision for view in it.replayed()] == [7, 8]


def test_a_full_disk_is_not_tried_at_every_step(it: Traced) -> None:
    it.sees(1)
    fill(it)
    it.sees(2)
    (it.folder / "trace-head.jsonl").unlink()
    it.sees(3, after_s=AGAIN_S / 2)
    it.sees(4, after_s=AGAIN_S)
    assert [view.revision for view in it.replayed()] == [4]


def test_a_folder_that_cannot_be_made_is_survived(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    it = Traced(tmp_path / "state" / "trace")
    it.sees(1)
    assert it.heard() == ["trace.lost"]
    (tmp_path / "state").unlink()
    it.sees(2)
    it.trace.close()
    assert [view.revision for view in it.replayed()] == [2]


def test_what_a_view_has_as_before_is_not_written_again(it: Traced) -> None:
    seats = tuple(Seat(member=Member(node=f"n{n}", incarnation=1), born=1, beat=f"h:{n}") for n in range(200))
    plans = [
        Plan(generation=n, phase=Phase.TRAIN, seats=seats, lanes=200, causes=(Cause(why=Why.POLICY, said=f"plan {n}"),))
        for n in (1, 2)
    ]
    kept = {"n9": Quarantine(member=Member(node="n9", incarnation=1), cause=Cause(why=Why.POLICY, said="why"))}
    records = {f"n{n}": Record(member=seats[n].member, step=n) for n in range(3)}
    it.sees(1)
    it.sees(2, plan=plans[0], quarantines=kept, records=records)
    it.sees(3, plan=plans[0], quarantines=dict(kept), records={**records, "n1": Record(member=seats[1].member, step=9)})
    it.sees(4, plan=plans[1], quarantines={}, records={"n0": records["n0"]})
    it.sees(3, plan=plans[0], quarantines=kept, records=records)  # of a store member that lags: the core ignores it
    it.sees(5, plan=plans[0], quarantines=kept, records=records)
    it.sees(6, quarantines=None, records=None)
    it.sees(7, plan=plans[1], quarantines=kept, records=records)
    views = it.replayed()
    assert [view.plan.generation if view.plan else 0 for view in views] == [0, 1, 1, 2, 1, 1, 0, 2]
    assert [sorted(view.quarantines or ()) for view in views] == [[], ["n9"], ["n9"], [], ["n9"], ["n9"], [], ["n9"]]
    assert [len(view.records or ()) for view in views] == [0, 3, 3, 1, 3, 3, 0, 3]
    sizes = [len(line) for line in (it.folder / "trace-new.jsonl").read_text().splitlines()]
    assert sizes[3] < sizes[2] / 10, sizes


def test_a_node_lives_through_a_full_state_disk(tmp_path: Path) -> None:
    """As its daemon puts it together, but for workers: it takes a lease, and says who it is."""

    async def run() -> list[str]:
        said = CapturingLogger()
        folder = tmp_path / "trace"
        folder.mkdir()
        for name in ("head", "new"):
            (folder / f"trace-{name}.jsonl").symlink_to(FULL)
        trace = Trace(folder, 1 << 20, said.info)
        async with MemoryStore(namespace=keys.namespace("t")) as store:
            node = Node(state(), store, (), log=said, trace=trace)
            running = asyncio.create_task(node.run())
            async with asyncio.timeout(patience(10.0)):
                while not (running.done() or await store.get(keys.member_key("n0"))):  # noqa: ASYNC110 - the store tells nobody
                    await asyncio.sleep(0.01)
            assert not running.done(), running.exception()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        trace.close()
        return [call.args[0] for call in said.calls]

    said = asyncio.run(run())
    assert said.count("trace.lost") == 1
    assert "bug" not in said


LOGS = """
import os, sys
from elasticrl.daemon.history import History
from elasticrl.telemetry.log import set_up

history = History()
log = set_up(pretty=False, tap=history)
log.info("leader.elected", member="n0/1")
here = os.dup(2)
os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
for number in range(300):
    log.info("leader.elected", member=f"n{number}/1")
assert [line["event"] for line in history._lines].count("log.lost") == 1
assert history.lost == "its daemon's log takes no lines ([Errno 28] No space left on device)"
os.dup2(here, 2)
log.info("leader.resigned", member="n0/1")
assert not history.lost
os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
log.info("leader.elected", member="n0/1")
sys.exit(75)
"""


def test_log_lines_that_a_full_disk_does_not_take_are_dropped_and_counted(tmp_path: Path) -> None:
    with (tmp_path / "log").open("ab") as output:
        done = subprocess.run([sys.executable, "-c", LOGS], stderr=output, timeout=60)
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["leader.elected", "leader.resigned", "log.back"]
    assert lines[2]["dropped"] == 301  # with the one that said it
    assert done.returncode == 75


def test_a_line_that_was_written_in_part_does_not_spoil_the_next(tmp_path: Path) -> None:
    program = (
        "import resource\n"
        "from elasticrl.telemetry.log import set_up\n"
        "log = set_up(pretty=False)\n"
        "log.info('leader.elected', member='n0/1')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (150, resource.RLIM_INFINITY))\n"
        "log.info('leader.elected', member='n' * 150)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "log.info('leader.resigned', member='n0/1')\n"
    )
    with (tmp_path / "log").open("ab") as output:
        subprocess.run([sys.executable, "-c", program], stderr=output, timeout=60, check=True)
    first, torn, *others = (tmp_path / "log").read_text().splitlines()
    assert json.loads(first)["event"] == "leader.elected"
    assert torn
    assert [json.loads(line)["event"] for line in others] == ["leader.resigned", "log.back"]


def test_a_life_that_cannot_be_written_down_is_said_once_and_tried_again(tmp_path: Path) -> None:
    folders = {"run_dir": str(tmp_path / "run"), "state_dir": str(tmp_path / "state")}
    plain = {"job": {"name": "j", "program": "x"}, "node": {"interface": "lo", "name": "n0", **folders}}
    said = CapturingLogger()
    daemon = Daemon(
        Tree.model_validate({**plain, "checkpoint": {"dir": str(tmp_path / "saves")}}), log=said, history=History()
    )
    neighbours = Neighbours(ME, b"s" * 32, state().settings.membership, post=lambda _: None, refused=lambda *_: None)
    joined = daemon._join(state(), MemoryStore(), neighbours, Life(node=ME.node, incarnation=ME.incarnation, lease=7))
    fresh = daemon.home.folder / ".life.json.new"
    fresh.mkdir()  # as good as a full disk: nothing can be written there
    joined.remember()
    joined.remember()
    assert [call.args[0] for call in said.calls] == ["incarnation.unsaved"]
    fresh.rmdir()
    joined.remember()
    life = daemon.home.load()
    assert life is not None
    assert life.member == ME


def test_a_configuration_is_not_read_again_by_who_has_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Found by a second reader: it told systemd that it was up, while it waited for its store still.
    folders = {"run_dir": str(tmp_path / "run"), "state_dir": str(tmp_path / "state")}
    plain = {"job": {"name": "j", "program": "x"}, "node": {"interface": "lo", "name": "n0", **folders}}
    said, asked = CapturingLogger(), []
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    tree = Tree.model_validate({**plain, "checkpoint": {"dir": str(tmp_path / "saves")}})
    daemon = Daemon(tree, log=said, history=History(), reload=lambda: asked.append(1) or tree)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setblocking(False)
        daemon.reload()
        with pytest.raises(BlockingIOError):
            systemd.recv(1000)
    assert [call.args[0] for call in said.calls] == ["reload.refused"]
    assert not asked
