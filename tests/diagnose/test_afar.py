"""A job of another launcher on two machines, looked at over ssh: the culprit is named in time, and nothing is needed there."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from chaos.patience import patience
from elasticrl.contract.verdict import Confidence, Fault
from elasticrl.diagnose import afar
from elasticrl.diagnose.afar import Answer
from elasticrl.diagnose.foreign import LOOKS, NoJob, Seen
from elasticrl.diagnose.stacks import Frame, Stack

BIN = Path(sys.executable).parent
SCRIPT = Path(__file__).with_name("foreign_job.py")
WITHIN_S = 10.0

WAITS = (Frame(file="/env/torch/distributed/distributed_c10d.py", line=1, name="all_reduce"),)
LOADS = (Frame(file="/job/loader.py", line=12, name="__next__"),)


def answer(host: str, ranks: Mapping[int, tuple[Frame, ...]], *, world: int = 4, port: str = "29500") -> Answer:
    env = {
        rank: {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "n01", "MASTER_PORT": port} for rank in ranks
    }
    stacks = {100 + rank: Stack(pid=100 + rank, frames=frames, state="S") for rank, frames in ranks.items()}
    seen = tuple(Seen(pid=100 + rank, parent=10, env=env[rank]) for rank in ranks)
    return Answer(host=host, seen=seen, looks=(stacks,) * LOOKS, spy=True)


FIRST = answer("n01", {0: WAITS, 1: WAITS})
SECOND = answer("n02", {2: WAITS, 3: LOADS})
SILENT = Answer(host="n02", silent=True, why="ssh: connect to host n02 port 22: No route to host")


def test_a_rank_on_another_machine_is_named_with_that_machine() -> None:
    found = afar.look((FIRST, SECOND))
    assert (found.verdict.fault, found.verdict.ranks, found.verdict.nodes) == (Fault.HOST_HANG, (3,), ("n02",))
    assert found.job.world == 4
    assert found.hosts == ("n01: 2 ranks", "n02: 2 ranks")


def test_process_numbers_that_two_machines_share_are_two_processes() -> None:
    second = replace(SECOND, seen=tuple(replace(one, pid=one.pid - 2) for one in SECOND.seen), looks=tuple(
        {pid - 2: stack for pid, stack in look.items()} for look in SECOND.looks
    ))  # fmt: skip
    assert afar.look((FIRST, second)).verdict.ranks == (3,)


def test_a_machine_that_does_not_answer_is_what_the_others_wait_for() -> None:
    found = afar.look((FIRST, SILENT))
    assert (found.verdict.fault, found.verdict.nodes) == (Fault.DEAD_NODE, ("n02",))
    assert found.verdict.confidence is Confidence.MEDIUM  # it was asked by one way only
    assert "elasticrl" not in found.verdict.remedy
    assert found.hosts[1] == f"n02: {SILENT.why}"


def test_a_silent_machine_is_not_blamed_where_a_rank_is_elsewhere() -> None:
    found = afar.look((answer("n01", {0: WAITS, 1: LOADS}), SILENT))
    assert (found.verdict.fault, found.verdict.ranks) == (Fault.HOST_HANG, (1,))


def test_a_machine_that_refuses_the_key_is_told_and_no_evidence() -> None:
    refuses = Answer(host="n02", why="n02: Permission denied (publickey).")
    found = afar.look((FIRST, refuses))
    assert found.verdict.fault is not Fault.DEAD_NODE
    assert found.hosts[1] == "n02: n02: Permission denied (publickey)."


def test_where_no_machine_answers_it_says_why() -> None:
    with pytest.raises(NoJob, match=r"No machine answered: n02: ssh: connect to host n02 port 22: No route to host"):
        afar.look((SILENT,))


def test_two_machines_with_the_same_rank_are_refused() -> None:
    with pytest.raises(NoJob, match="Rank 0 runs on n01 and on n09: these are two jobs, or one machine by two names"):
        afar.look((FIRST, replace(FIRST, host="n09")))


def test_of_two_jobs_the_one_with_the_address_is_looked_at() -> None:
    other = answer("n02", {0: WAITS}, world=1, port="29501")
    with pytest.raises(NoJob, match="2 jobs"):
        afar.look((FIRST, other))
    assert afar.look((FIRST, other), address="n01:29500").job.ranks.keys() == {0, 1}


@pytest.mark.parametrize("text", ["", " , ", "-oProxyCommand=sh", "n01;reboot", "n01,a b"])
def test_what_is_no_name_of_a_machine_never_reaches_ssh(text: str) -> None:
    with pytest.raises(NoJob, match="--host names no machine"):
        afar.hosts(text)


@pytest.mark.parametrize(
    "told", [[], {}, {"seen": [{"pid": "x"}]}, {"seen": 3, "looks": [], "started": {}, "kernel": "", "spy": 1}]
)
def test_an_answer_that_does_not_fit_is_no_answer(told: object) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        afar.heard("n01", told)


#: What stands for ssh: it goes where a file says that the machine is, to a namespace of its own without anything of ours.
SSH = """#!/bin/sh
for word; do last=$word; host=$before; before=$word; done
case "$*" in *BatchMode=yes*) ;; *) exit 9 ;; esac
case $host in
  mute) exec sleep 60 ;;
  shut) echo "ssh: connect to host shut port 22: Connection refused" >&2; exit 255 ;;
esac
exec nsenter --target "$(cat FOLDER/$host.pid)" --pid --mount env -u PYTHONPATH PATH=FOLDER/bin:/usr/bin:/bin sh -c "$last"
"""


class Machines:
    """A job of four ranks under torchrun, on two machines that see each other's network and not each other's processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.job = folder / "job"
        self.job.mkdir()
        (folder / "bin").mkdir()
        (folder / "bin" / "py-spy").symlink_to(BIN / "py-spy")
        (folder / "bin" / "python3").symlink_to(Path(sys.executable).resolve())
        (folder / "path").mkdir()
        ssh = folder / "path" / "ssh"
        ssh.write_text(SSH.replace("FOLDER", str(folder)))
        ssh.chmod(0o755)
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Until all ranks make steps."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for number in range(2):
            command = [
                "unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-m", "torch.distributed.run", "--nnodes", "2",
                "--node-rank", str(number), "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(port),
                str(SCRIPT), str(self.job), "torchrun",
            ]  # fmt: skip
            with (self.folder / f"log-{number}").open("wb") as log:
                child = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            self.started.append(child)
            inside = Path(f"/proc/{child.pid}/task/{child.pid}/children")
            self.until(lambda inside=inside: bool(inside.read_text().split()))
            (self.folder / f"n{number}.pid").write_text(inside.read_text().split()[0])
        self.until(lambda: all(self.step(rank) > 2 for rank in range(4)))

    def step(self, rank: int) -> int:
        try:
            return int((self.job / f"step-{rank}").read_text() or -1)
        except OSError:
            return -1

    def until(self, true: Callable[[], bool], within_s: float = 60.0) -> None:
        deadline = time.monotonic() + patience(within_s)
        while not true():
            assert time.monotonic() < deadline, [(self.folder / f"log-{n}").read_text()[-1500:] for n in range(2)]
            time.sleep(0.05)

    def still(self) -> None:
        def stands() -> bool:
            before = [self.step(rank) for rank in range(4)]
            time.sleep(1.0)
            return before == [self.step(rank) for rank in range(4)]

        self.until(stands)

    def asked(self, hosts: str) -> dict[str, object]:
        """As an operator asks, and in time."""
        path = f"{self.folder / 'path'}:{os.environ['PATH']}"
        began = time.monotonic()
        done = subprocess.run(
            [BIN / "elasticrl", "diagnose", "--host", hosts, "--json"],
            capture_output=True,
            env={**os.environ, "PATH": path},
        )
        assert time.monotonic() - began < patience(WITHIN_S)
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout)

    def end(self) -> None:
        for child in self.started:  # with the first process of a namespace all others in it end
            with contextlib.suppress(ProcessLookupError, OSError):
                os.kill(
                    int(Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()[0]), signal.SIGKILL
                )
            child.wait(30)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    if subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True).returncode:
        assert os.geteuid(), "root must be able to make namespaces"
        pytest.skip("only root may make two machines of one")
    made = Machines(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.end()


@pytest.mark.long
def test_who_hangs_on_another_machine_is_named_within_ten_seconds_and_goes_on_after(machines: Machines) -> None:
    (machines.job / "order-3").write_text("data")
    machines.still()
    told = machines.asked("n0,n1")
    (machines.job / "order-3").unlink()
    before = max(machines.step(rank) for rank in range(4))
    machines.until(lambda: all(machines.step(rank) > before + 2 for rank in range(4)))  # nothing was broken by asking
    assert told["verdict"]["class"] == Fault.HOST_HANG, told
    assert told["verdict"]["culprit"] == {"ranks": [3], "nodes": ["n1"]}, told
    assert told["world"] == 4
    # A machine that does not answer costs no more time than it was given, and the others are told of.
    (machines.job / "order-1").write_text("save")
    machines.still()
    told = machines.asked("n0,n1,mute,shut")
    assert told["verdict"]["culprit"] == {"ranks": [1], "nodes": ["n0"]}, told
    assert told["hosts"] == [
        "n0: 2 ranks", "n1: 2 ranks", "mute: it did not answer within 9 s",
        "shut: ssh: connect to host shut port 22: Connection refused",
    ]  # fmt: skip
