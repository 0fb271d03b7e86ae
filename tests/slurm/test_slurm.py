"""The script of configs/slurm under a real Slurm of three nodes: to the end, and through what a cluster does to a job."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from slurm_kit import Slurm, missing

from chaos.etcd import LocalCluster
from chaos.live.proc import command_line

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "configs" / "slurm" / "elasticrl.sbatch"
PROGRAM = ROOT / "tests" / "runtime" / "run_job.py"
STEPS = 150
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    assert not missing(), f"this needs a Slurm: {', '.join(missing())} (make slurm installs it)"
    before = signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # one that is told to end leaves no Slurm behind either
    with Slurm() as slurm:
        yield slurm
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(autouse=True)
def empty(slurm: Slurm) -> Iterator[None]:
    """No test leaves a job to the next."""
    yield
    slurm.clear()


class Batch:
    """One job of ours in Slurm's queue."""

    def __init__(self, slurm: Slurm, store: LocalCluster, name: str, steps: int = 0, lease: str = "10s") -> None:
        self.slurm = slurm
        self.folder = slurm.folder / name
        self.folder.mkdir()
        self.history = self.folder / "history"
        self.history.touch()
        self.config = self.folder / "job.yaml"
        conf = {
            "job": {
                "name": name, "program": str(PROGRAM), "seed": 7, "steps": steps,
                "args": ["--step-ms", "100", "--history", str(self.history)],
            },
            "node": {"device": "cpu", "interface": "lo"},
            "store": {"endpoints": list(store.endpoints)},
            "membership": {"min_nodes": 2, "max_nodes": 3, "settle": "1s", "lease_ttl": lease, "suspect": "3s"},
            "lanes": {"count": 6},
            "vault": {"dir": f"{self.folder}/vault", "copies": 1},
            "checkpoint": {"dir": f"{self.folder}/saves", "every": 100_000},
            "telemetry": {"log_dir": f"{self.folder}/log", "format": "json"},
        }  # fmt: skip
        self.config.write_text(yaml.safe_dump(conf), encoding="utf-8")
        self.env = {
            "CONFIG": str(self.config),
            "PATH": f"{Path(sys.executable).parent}:{slurm.env['PATH']}",
            "PYTHONPATH": str(ROOT),
        }
        own = ["--nodes=2-3", "--cpus-per-task=1", "--gpus-per-node=0", "--time=30", f"--output={self.folder}/said"]
        self._own = own
        self.submit()

    def submit(self) -> None:
        """Into the queue."""
        self.job = self.slurm.said(["sbatch", "--parsable", *self._own, str(SCRIPT)], **self.env)

    @property
    def said(self) -> str:
        """What the batch script and its steps have printed."""
        with suppress(FileNotFoundError):
            return (self.folder / "said").read_text(encoding="utf-8", errors="replace")
        return ""

    @property
    def state(self) -> str:
        """RUNNING, PENDING, COMPLETED, ..."""
        return self.slurm.state(self.job)["JobState"]

    def lines(self) -> list[list[str]]:
        """What the workers have written, one line a step and rank."""
        return [line.split() for line in self.history.read_text(encoding="utf-8").splitlines()]

    def trains(self, world: int, steps: int = 5, within_s: float = 180.0) -> int:
        """Until a gang of this size has made so many steps from now on; the newest step."""
        before = len(self.lines())

        def fresh() -> list[int]:
            return sorted({int(line[4]) for line in self.lines()[before:] if line[10] == str(world)})

        self.slurm.until(lambda: len(fresh()) >= steps, within_s, f"{steps} steps of {world} ranks")
        return fresh()[-1]

    def ends(self, state: str, within_s: float = 180.0) -> None:
        """Until Slurm says so of the job."""
        self.slurm.until(lambda: self.state == state, within_s, f"job {self.job} to be {state}, and it is {self.state}")

    def starts_again(self, within_s: float = 180.0) -> None:
        """Until it has been queued again, and runs."""
        self.slurm.until(
            lambda: self.slurm.state(self.job)["Restarts"] == "1" and self.state == "RUNNING",
            within_s,
            "the job to run again",
        )

    def cancelled(self) -> None:
        """`scancel`, and until all of it has ended."""
        self.slurm.said(["scancel", self.job])
        self.ends("CANCELLED")

    def unlost(self) -> bool:
        """Has each gang gone on from the newest step that was sealed before, or from one after it?"""
        gangs: dict[int, list[int]] = {}
        for line in self.lines():
            gangs.setdefault(int(line[6]), []).append(int(line[4]))
        made = [gangs[generation] for generation in sorted(gangs)]
        return all(max(before) <= min(after) for before, after in pairwise(made))

    def workers_said(self) -> str:
        """What all workers have printed."""
        logs = (self.folder / "log").rglob("*rank*")
        return "".join(log.read_text(encoding="utf-8", errors="replace") for log in logs if log.is_file())

    def status(self) -> dict[str, Any]:
        """As `elasticrl status` says."""
        return dict(json.loads(self.elasticrl("status", "--json")))

    def elasticrl(self, *words: str) -> str:
        """What a command says that asks the store, as one may from anywhere."""
        command = [sys.executable, "-m", "elasticrl.cli.main", *words, "--store", str(self.config)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False).stdout

    def logged(self, event: str) -> list[dict[str, object]]:
        """What the daemons have logged of this."""
        lines = [line.partition(": ")[2] if line[:1].isdigit() else line for line in self.said.splitlines()]
        found = [json.loads(line) for line in lines if line.startswith("{")]
        return [line for line in found if line["event"] == event]

    def daemon(self, node: str) -> int:
        """The pid of a node's daemon."""
        for pid in self.slurm.pids(f"SLURMD_NODENAME={node}\0".encode()):
            line = command_line(pid)
            if " daemon " in line and str(self.config) in line and "bash" not in line:
                return pid
        raise AssertionError(f"no daemon of {node} runs: {self.said}")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalCluster]:
    cluster = LocalCluster(tmp_path / "etcd", members=1)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(cluster.__aenter__())
    try:
        yield cluster
    finally:
        loop.run_until_complete(cluster.__aexit__())
        loop.close()


def test_it_runs_to_the_end_and_a_daemon_that_dies_comes_back(slurm: Slurm, store: LocalCluster) -> None:
    batch = Batch(slurm, store, "ends", steps=STEPS, lease="30s")  # longer than a start takes on a busy machine
    batch.trains(3)
    generation = batch.lines()[-1][6]
    os.kill(batch.daemon("s1"), signal.SIGKILL)
    batch.ends("COMPLETED")
    assert batch.status()["committed"] == STEPS
    started = sorted((line["node"], line["adopted"]) for line in batch.logged("daemon.started"))
    assert started == [("s0", False), ("s1", False), ("s1", True), ("s2", False)]
    assert batch.lines()[-1][6] == generation, "the gang has noticed"
    assert "the daemon of s1 ended (137) and is started again in 1 s" in batch.said


def test_a_requeued_job_has_saved_and_goes_on_from_there(slurm: Slurm, store: LocalCluster) -> None:
    batch = Batch(slurm, store, "again")
    step = batch.trains(3)
    slurm.said(["scontrol", "requeue", batch.job])
    batch.starts_again()
    assert batch.status()["committed"] >= step
    assert batch.trains(3) > step
    assert batch.unlost()
    assert "config was" not in batch.workers_said(), "nobody has changed it"
    batch.cancelled()


def test_a_job_is_saved_and_queued_again_before_its_time_limit_and_when_cancelled_only_saved(
    slurm: Slurm, store: LocalCluster
) -> None:
    batch = Batch(slurm, store, "limit")
    step = batch.trains(3)
    slurm.said(["scancel", "--batch", "--signal=USR1", batch.job])  # as Slurm does then
    batch.starts_again()
    assert batch.status()["committed"] >= step
    step = batch.trains(3)
    assert batch.unlost()
    batch.cancelled()
    assert batch.status()["committed"] >= step
    assert slurm.state(batch.job)["Restarts"] == "1"


def test_a_job_goes_on_without_a_node_that_dies_and_with_it_when_queued_again(
    slurm: Slurm, store: LocalCluster
) -> None:
    batch = Batch(slurm, store, "node")
    batch.trains(3)
    slurm.lose_node("s2")
    try:
        step = batch.trains(2)
        slurm.down("s2")
        assert batch.state == "RUNNING"
        slurm.said(["scontrol", "requeue", batch.job])
        batch.starts_again()  # on the two that are left
        assert batch.trains(2) > step
        assert batch.unlost()
        batch.cancelled()
    finally:
        slurm.start_node("s2")
        slurm.idle()


def test_a_job_whose_first_node_dies_goes_on_and_saves_without_its_script(slurm: Slurm, store: LocalCluster) -> None:
    batch = Batch(slurm, store, "first")
    batch.trains(3)
    slurm.lose_node("s0")
    try:
        step = batch.trains(2)
        slurm.said(["scancel", batch.job])
        batch.ends("CANCELLED")
        assert batch.status()["committed"] >= step
    finally:
        slurm.start_node("s0")
        slurm.idle()


def test_a_run_after_one_that_died_as_it_was_to_stop_is_not_stopped(slurm: Slurm, store: LocalCluster) -> None:
    batch = Batch(slurm, store, "died")
    batch.trains(3)
    for pid in slurm.pids(b"SLURMD_NODENAME="):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    slurm.idle()
    batch.elasticrl("stop", "--yes")
    batch.submit()
    batch.trains(3)
    batch.cancelled()
