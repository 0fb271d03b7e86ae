"""Stock torchrun, our rendezvous, a real etcd: a node joins, a worker is killed, a node is killed, the job ends."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from chaos.etcd import LocalCluster
from elasticrl.agent import rendezvous

SCRIPT = str(Path(__file__).with_name("train_plain.py"))


@dataclass(frozen=True)
class Line:
    at: float
    agent: int
    worker: int
    rank: int
    world: int
    step: int
    restart: int
    store: str


class Job:
    def __init__(self, folder: Path, endpoints: str) -> None:
        self.folder = folder
        self.history = folder / "history"
        self.endpoints = endpoints
        self.agents: list[subprocess.Popen[bytes]] = []

    def torchrun(self, *program: str) -> subprocess.Popen[bytes]:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=1:4", "--nproc-per-node=1", "--max-restarts=20",
            "--rdzv-backend=elasticrl", f"--rdzv-endpoint={self.endpoints}", "--rdzv-id=J",
            "--rdzv-conf=ttl=3,settle=0.3,join_timeout=60", "--local-addr=127.0.0.1", SCRIPT, str(self.history), *program,
        ]  # fmt: skip
        with (self.folder / f"torchrun_{len(self.agents)}.log").open("wb") as log:
            agent = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
        self.agents.append(agent)
        return agent

    def lines(self) -> list[Line]:
        found = []
        for text in self.history.read_text().splitlines() if self.history.exists() else ():
            at, *numbers, store = text.split()
            found.append(Line(float(at), *map(int, numbers), store))
        return found

    def until(self, true: Callable[[list[Line]], bool], since: float, within_s: float = 60.0) -> list[Line]:
        deadline = time.monotonic() + within_s
        while True:
            lines = [line for line in self.lines() if line.at > since]
            if true(lines):
                return lines
            assert time.monotonic() < deadline, f"not within {within_s} s\n{self.logs()}\n{lines[-4:]}"
            time.sleep(0.02)

    def logs(self) -> str:
        return "\n".join(
            f"--- {log}\n{log.read_text(errors='replace')[-4000:]}" for log in sorted(self.folder.glob("*.log"))
        )

    def stop(self) -> None:
        workers = {line.worker for line in self.lines()}
        for agent in self.agents:
            with contextlib.suppress(ProcessLookupError):
                agent.kill()
            agent.wait(10)
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[str]:
    with asyncio.Runner() as runner:
        cluster = LocalCluster(tmp_path / "etcd", members=1)
        runner.run(cluster.__aenter__())
        yield ",".join(endpoint.removeprefix("http://") for endpoint in cluster.endpoints)
        runner.run(cluster.__aexit__())


def stepping(agents: list[subprocess.Popen[bytes]]) -> Callable[[list[Line]], bool]:
    """All of these, and nobody else, make steps together."""

    def check(lines: list[Line]) -> bool:
        newest = [[line for line in lines if line.agent == agent.pid][-1:] for agent in agents]
        last = [line for found in newest for line in found]
        return (
            len(last) == len(agents)
            and all(line.world == len(agents) and line.step >= 2 for line in last)
            and len({line.store for line in last}) == 1
        )

    return check


def test_stock_torchrun_takes_in_a_joining_node_and_survives_the_death_of_a_worker_and_of_a_node(
    tmp_path: Path, etcd: str
) -> None:
    job = Job(tmp_path, etcd)
    try:
        a = job.torchrun()
        job.until(stepping([a]), 0.0)

        joined_at = time.monotonic()
        b = job.torchrun()
        lines = job.until(stepping([a, b]), joined_at)
        print(f"joined {time.monotonic() - joined_at:.1f} s after its start")
        head = next(line for line in reversed(lines) if line.rank == 0)
        assert head.agent == a.pid  # who was there keeps its rank

        killed_at = time.monotonic()
        os.kill(head.worker, signal.SIGKILL)
        lines = job.until(stepping([a, b]), killed_at)
        print(f"a worker's death cost {time.monotonic() - killed_at:.1f} s")
        assert lines[-1].store != head.store  # every generation meets in a store of its own

        head = next(line for line in reversed(lines) if line.rank == 0)
        killed_at = time.monotonic()
        a.kill()
        os.kill(head.worker, signal.SIGKILL)
        job.until(stepping([b]), killed_at)
        print(f"the death of the head node cost {time.monotonic() - killed_at:.1f} s")
        assert "] bug {" not in job.logs()
    finally:
        job.stop()


def test_the_handler_is_registered_in_code_and_by_its_entry_point() -> None:
    rendezvous.register()
    rendezvous.register()
    params = RendezvousParameters("elasticrl", "h1:2379,h2:2379", "J", 1, 4, local_addr="127.0.0.1", ttl="4")
    handler = rendezvous_handler_registry.create_handler(params)
    assert (handler.get_backend(), handler.get_run_id(), handler.use_agent_store) == ("elasticrl", "J", True)
    assert handler.num_nodes_waiting() == 0
    assert not handler.is_closed()
    assert handler.shutdown()  # nothing was started, nothing hangs
    with pytest.raises(RendezvousConnectionError, match="host:port"):
        rendezvous_handler_registry.create_handler(
            RendezvousParameters("elasticrl", "h1", "J", 1, 4, local_addr="127.0.0.1")
        )
