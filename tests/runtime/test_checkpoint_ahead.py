"""The writer that a warm worker forks: ready at once, outlives a worker that saves, and is gone with one that never did."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from vault_nodes import until

from elasticrl.runtime.checkpoint.place import place
from elasticrl.runtime.checkpoint.shelf import listing

HERE = Path(__file__).parent
WORKER = """
import os, sys
from pathlib import Path
from elasticrl.runtime.checkpoint import ahead

held = os.open(sys.argv[1], os.O_RDONLY)  # something that a writer has no business with
ahead.fork()
print("warm", ahead._waiting[1].pid, flush=True)
sys.stdin.readline()
os.dup2(os.open(Path(sys.argv[1]) / "log", os.O_WRONLY | os.O_CREAT), 2)  # as a worker that gets a rank does

import torch
from state_jobs import FACTS, Job
from elasticrl.runtime.checkpoint.saver import Saver
from elasticrl.runtime.vault.client import Vault
from elasticrl.runtime.vault.version import Version

torch.set_num_threads(2)
torch.ones(1 << 20).sum()  # it has threads by now
root, job = Path(sys.argv[1]), Job(seed=1).train(2)
vault = Vault(root / "vault", job="job", node="n0")
saver = Saver(str(root / "ck"), facts=FACTS)

def save(step):
    ticket = vault.snapshot(job.parts.capture(0, 1), version=Version(step), generation=1, shard=0, world=1)
    ticket.wait_sealed(10)
    saver.save(ticket, finish=True)

for line in sys.stdin:
    what, _, step = line.strip().partition(" ")
    if what == "begin":
        save(int(step))
        print("begun", saver.pid, flush=True)
    elif what == "save":
        save(int(step))
        (outcome,) = saver.wait(60)
        print("saved", saver.pid, outcome.manifest, outcome.why, flush=True)
    else:
        print("outcome", [(out.ok, out.why) for out in saver.wait(60)], flush=True)
"""


class Worker:
    """A process that forks a writer and does what it is told."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(folder)],
            cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        self.writer = int(self.hear("warm")[0])

    def tell(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")

    def hear(self, what: str) -> list[str]:
        assert self.process.stdout
        said, *rest = self.process.stdout.readline().split()
        assert said == what
        return rest

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        assert self.process.stdin
        assert self.process.stdout
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()  # not read to its end, which a writer that stays would keep from coming
        with suppress(ProcessLookupError):
            os.kill(self.writer, signal.SIGKILL)


@pytest.fixture
def worker(tmp_path: Path):
    made = Worker(tmp_path)
    yield made
    made.end()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_the_first_save_waits_for_no_imports_and_the_writer_speaks_where_its_worker_does(
    worker: Worker, tmp_path: Path
):
    worker.tell("seated")
    worker.tell("save 1")
    pid, manifest, *_ = worker.hear("saved")
    assert int(pid) == worker.writer
    assert manifest == "step-00000001-g1"
    files = {link.name: link.readlink() for link in Path(f"/proc/{worker.writer}/fd").iterdir()}
    assert files["2"] == tmp_path / "log"
    assert tmp_path not in files.values(), "it holds nothing of its worker's"
    assert Path(f"/proc/{worker.writer}/comm").read_text().strip() == "elasticrl-save"
    assert os.getsid(worker.writer) == worker.writer


def test_a_worker_that_never_saves_leaves_no_writer(worker: Worker):
    assert alive(worker.writer)
    worker.process.kill()
    until(lambda: not alive(worker.writer), "its writer ends with it", 10)


def test_a_save_under_way_is_finished_though_its_worker_is_killed(worker: Worker, tmp_path: Path):
    worker.tell("seated")
    worker.tell("save 1")
    worker.hear("saved")
    os.kill(worker.writer, signal.SIGSTOP)
    worker.tell("begin 2")
    worker.hear("begun")
    worker.process.kill()
    os.kill(worker.writer, signal.SIGCONT)
    until(lambda: [entry.version.step for entry in listing(place(tmp_path / "ck"))][:1] == [2], "it is published", 20)
    until(lambda: not alive(worker.writer), "and the writer ends", 20)


def test_one_that_is_killed_is_told_of_and_replaced(worker: Worker):
    worker.tell("seated")
    os.kill(worker.writer, signal.SIGSTOP)
    worker.tell("begin 1")
    assert int(worker.hear("begun")[0]) == worker.writer
    os.kill(worker.writer, signal.SIGKILL)
    worker.tell("outcome")
    assert "the checkpoint writer of step 1.0 died (signal 9)" in " ".join(worker.hear("outcome"))
    worker.tell("save 2")
    pid, manifest, *_ = worker.hear("saved")
    assert int(pid) != worker.writer
    assert manifest == "step-00000002-g1"


def test_one_that_died_while_it_waited_is_not_asked(worker: Worker):
    os.kill(worker.writer, signal.SIGKILL)
    worker.tell("seated")
    worker.tell("save 1")
    assert int(worker.hear("saved")[0]) != worker.writer
