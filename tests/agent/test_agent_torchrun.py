"""Stock torchrun, our rendezvous, a real etcd: a node joins, a worker is killed, a node is killed, the job ends."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousConnectionError

from chaos.etcd import LocalCluster
from chaos.patience import patience
from elasticrl.agent import rendezvous, torchrun
from elasticrl.agent.torchrun import ElasticRendezvous
from elasticrl.shell.route import ABROAD

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

    def torchrun(self, *program: str, nodes: str = "1:4") -> subprocess.Popen[bytes]:
        command = [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc-per-node=1", "--max-restarts=20",
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
        deadline = time.monotonic() + patience(within_s)
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
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with asyncio.Runner() as runner:
        cluster = LocalCluster(tmp_path / "etcd", members=1)
        runner.run(cluster.__aenter__())
        yield cluster
        runner.run(cluster.__aexit__())


@pytest.fixture
def etcd(cluster: LocalCluster) -> str:
    return ",".join(endpoint.removeprefix("http://") for endpoint in cluster.endpoints)


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
        assert not re.search(r"\bbug\b", job.logs())  # torch's own words speak of bugs
    finally:
        job.stop()


def test_torchruns_that_end_well_end_together_and_the_same_job_can_be_run_again(tmp_path: Path, etcd: str) -> None:
    job = Job(tmp_path, etcd)
    try:
        for _ in range(2):
            since = time.monotonic()
            both = [job.torchrun("40", nodes="2"), job.torchrun("40", nodes="2")]
            assert [agent.wait(60) for agent in both] == [0, 0], job.logs()
            lines = [line for line in job.lines() if line.at > since]
            assert len(lines) == 80, "each has made each step once"
            assert time.monotonic() < max(line.at for line in lines) + patience(8.0)
        assert not re.search(r"\bbug\b", job.logs())  # torch's own words speak of bugs
    finally:
        job.stop()


def handlers(etcd: str, *names: str, **more: str) -> list[ElasticRendezvous]:
    """Members of one job, who have met."""
    rendezvous.register()
    made = []
    for _ in names:
        conf = {"ttl": "1", "settle": "0.5", "join_timeout": "30", **more}
        params = RendezvousParameters("elasticrl", etcd, "K", len(names), 4, local_addr="127.0.0.1", **conf)
        made.append(rendezvous_handler_registry.create_handler(params))
    with ThreadPoolExecutor(len(names)) as pool:
        met = list(pool.map(lambda handler: handler.next_rendezvous(), made))
    assert sorted(info.rank for info in met) == list(range(len(names)))
    return made


def test_who_has_ended_well_stays_until_the_others_have(etcd: str) -> None:
    """A rank's last save takes longer than torchrun's exit barrier (300 s): its node must not be restarted for that."""
    first, second = handlers(etcd, "first", "second", end_timeout="20")
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(first.shutdown)
        with pytest.raises(TimeoutError):
            leaving.result(3.0)  # three times what it takes to notice that a node is gone
        assert second.num_nodes_waiting() == 0
        assert second.shutdown()
        assert leaving.result(10.0)


def test_who_has_ended_well_leaves_when_the_others_go_on_without_him_or_his_time_is_over(etcd: str) -> None:
    first, second = handlers(etcd, "first", "second", end_timeout="1.5")
    begun = time.monotonic()
    assert first.shutdown()
    assert 1.4 < time.monotonic() - begun < patience(8.0)
    until(lambda: second.num_nodes_waiting() == 1)
    assert second.shutdown()  # its workers are to be restarted, which it does no more: nobody is waited for


def test_who_has_ended_well_does_not_wait_for_a_store_that_is_gone(cluster: LocalCluster, etcd: str) -> None:
    both = handlers(etcd, "first", "second", join_timeout="2", end_timeout="40")
    cluster.kill(0)
    begun = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(lambda handler: handler.shutdown(), both))
    assert 2.0 < time.monotonic() - begun < patience(20.0)


def test_who_has_ended_well_leaves_with_the_plan_that_follows_anothers_failure(etcd: str) -> None:
    first, second = handlers(etcd, "first", "second", end_timeout="20")
    with ThreadPoolExecutor(2) as pool:
        leaving = pool.submit(first.shutdown)
        until(lambda: first._mood is torchrun.Mood.DONE)
        again = pool.submit(second.next_rendezvous)  # as torchrun asks when its workers have failed
        assert leaving.result(10.0)
        second.shutdown()
        with pytest.raises(RendezvousClosedError):
            again.result(10.0)


def test_who_has_failed_leaves_at_once(etcd: str) -> None:
    first, second = handlers(etcd, "first", "second", end_timeout="20")
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="workers failed"):
        fails(first)
    assert time.monotonic() - begun < patience(5.0)
    until(lambda: second.num_nodes_waiting() == 1)
    second.shutdown()


def fails(handler: ElasticRendezvous) -> None:
    """As torch.distributed.launcher.api ends."""
    try:
        raise RuntimeError("workers failed")
    finally:
        handler.shutdown()


def until(true: Callable[[], bool], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + patience(within_s)
    while not true():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("endpoints", "expected"),
    [
        ("127.0.0.1:2379", "127.0.0.1"),
        ("localhost:2379", "127.0.0.1"),
        ("own:2379", "10.0.0.7"),  # Debian's 127.0.1.1, and no other way: as the world sees it
        ("own:2379,other:2379", "10.0.0.8"),
        ("unknown:2379,other:2379", "10.0.0.8"),
        ("[::1]:2379", "::1"),
    ],
)
def test_a_node_gives_the_address_that_others_reach(endpoints: str, expected: str) -> None:
    ways = {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1", "own": "127.0.1.1", "other": "10.0.0.8", "::1": "::1"}

    def way(host: str) -> str:
        if host == ABROAD:
            return "10.0.0.7"
        if host not in ways:
            raise socket.gaierror(f"no {host}")
        return ways[host]

    assert torchrun.address_towards(endpoints, way) == expected
    with pytest.raises(RendezvousConnectionError, match="no way to unknown"):
        torchrun.address_towards("unknown:2379", way)


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
