"""A gang without daemons: real worker processes on real seats, real vault servers, real gloo; the test writes the plans.

    with Nodes(tmp_path, steps=60) as nodes:
        nodes.plan("n0", "n1", "n2")
        nodes.until_sealed(10)
        nodes.kill_worker("n1")
        nodes.plan("n0", "n1", "n2")

A node is a vault server and a worker. To lose a node is to lose its memory: the vault's files go with it.
"""

import importlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from forked_workers import PRELOAD
from vault_nodes import Node

from chaos.patience import patience
from elasticrl.config import dumps
from elasticrl.config.tree import Tree
from elasticrl.contract.beats import Beat, Page, Snapshot, Stage
from elasticrl.contract.model import Commit, Rung
from elasticrl.contract.orders import Halt, Park, Place
from elasticrl.contract.seat import Order, OwnSeat, open_log, write
from elasticrl.runtime.checkpoint import ahead
from elasticrl.runtime.chronicle import read
from elasticrl.runtime.data.audit import audit

DEVICE = os.environ.get("ELASTICRL_TEST_DEVICE", "cpu")  # cuda: the same over NCCL, all workers on one GPU


def _work(channel: socket.socket, page: str, log: str, env: dict[str, str], program: str, args: list[str]) -> None:
    os.environ.update(env)
    open_log(log)
    ahead.fork()  # as under an agent
    OwnSeat(channel, Beat(Path(page)))
    sys.argv = [program, *args]
    importlib.import_module(program).main()


class Worker:
    """One process, and our end of its seat."""

    def __init__(self, context, folder: Path, name: str, env: dict[str, str], program: str, args: list[str]) -> None:
        ours, theirs = socket.socketpair()
        self.channel = ours
        self.page = Page(folder / f"{name}.page", create=True)
        self.log = folder / f"{name}.log"
        self.born = 0
        self.process: BaseProcess = context.Process(
            target=_work, args=(theirs, str(folder / f"{name}.page"), str(self.log), env, program, args), daemon=True
        )
        self.process.start()
        theirs.close()

    def tell(self, order: Order) -> None:
        self.channel.sendall(write(order))

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)
        self.process.close()
        self.channel.close()
        self.page.close()

    @property
    def beat(self) -> Snapshot:
        return self.page.read() or Snapshot()

    @property
    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


class Nodes:
    """Some nodes of one job in one folder."""

    def __init__(
        self, folder: Path, *, steps: int = 60, lanes: int = 12, strategy: str = "replicated", copies: int = 1,
        every: int = 1000, step_ms: float = 0.0, args: tuple[str, ...] = (),
        program: str = "run_job", conf: Mapping[str, Any] | None = None, slots: int = 1,
    ) -> None:  # fmt: skip
        """`slots`: workers of a node. Then names are the workers': with 2, n0 and n1 are the workers of the node n0."""
        self.folder = folder
        self.slots = slots
        self.copies = copies
        self.lanes = lanes
        self.program = program
        own = ["--steps", str(steps), "--step-ms", str(step_ms), "--faults", str(folder / "fault"), *args]
        self.args = own if program in {"run_job", "stale_job", "cut_job", "spoken_job"} else []
        plain: dict[str, Any] = {
            "job": {"name": "job", "seed": 7, "steps": steps},
            "node": {"device": DEVICE, "state_dir": str(folder / "state")},
            "membership": {"min_nodes": max(1, copies + 1)},
            "recovery": {"reform": "30s"},
            "lanes": {"count": lanes, "digest": "full"},
            "vault": {"dir": str(folder / "vault"), "copies": copies, "timeout": "10s"},
            "checkpoint": {"dir": str(folder / "saves"), "every": every},
            "model": {"strategy": strategy},
        }
        for section, values in (conf or {}).items():
            plain.setdefault(section, {}).update(values)
        self.tree = Tree.model_validate(plain)
        self.run_dir = folder / "saves" / "job"
        self.generation = 0
        self.resume = 0
        self.committed: Commit | None = None
        self.rung = 1
        self.env: dict[str, str] = {}  # more of the workers' environment
        self.vaults: dict[str, Node] = {}
        self.workers: dict[str, Worker] = {}
        self.plan_now: tuple[str, ...] = ()
        self._stores: list[dist.TCPStore] = []  # each generation's; kept, as late workers may still ask
        self._started = 0
        os.environ["OMP_NUM_THREADS"] = "1"
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.json").write_text(dumps(self.tree))
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers.values():
            worker.kill()
        for vault in self.vaults.values():
            vault.kill()
            vault.control.close()

    # ---- what a daemon would do

    def tell(self, *some: str) -> None:
        """The vaults hear who their neighbours are: these nodes', or all."""
        nodes = tuple(map(self.home, self.plan_now))
        addresses = {node: self.vaults[node].address for node in nodes}
        for node in dict.fromkeys(map(self.home, some or self.plan_now)):
            self.vaults[node].control.ask(
                "ring",
                generation=self.generation,
                nodes=nodes,
                addresses=addresses,
                copies=min(self.copies, len(set(nodes)) - 1),
            )

    def plan(self, *nodes: str, tell: bool = True, grows: bool = False, backend: str = "") -> None:
        """The next generation: these nodes, in rank order. Missing vaults and workers are started. `grows`: only adds some.
        `backend`: what carries it, in place of what is configured.
        """
        self.generation += 1
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._stores.append(store)
        homes = tuple(map(self.home, nodes))
        for node in homes:
            if node not in self.vaults:
                self.vaults[node] = Node(self.folder / "vault", int(node[1:])).start(deadline_s=5.0)
        self.plan_now = nodes
        if tell:
            self.tell(*(node for node in nodes if not grows or node not in self.workers))
        for node, worker in list(self.workers.items()):
            if node not in nodes:
                worker.tell(Halt(generation=self.generation, save=False, within_s=5.0, reason=f"{node} left"))
                worker.process.join(10)
                self.workers.pop(node).kill()
        for rank, node in enumerate(nodes):
            if node not in self.workers:
                self._start(node)
            worker = self.workers[node]
            worker.born = worker.born or self.generation
            worker.tell(
                Place(
                    generation=self.generation, born=worker.born, rank=rank, world=len(nodes),
                    slot=rank % self.slots, slots=self.slots,
                    all_lanes=self.lanes, team=self.tree.model.team, resume=self.resume,
                    rung=Rung.START if grows else self.rung, endpoint=f"127.0.0.1:{store.port}",
                    nodes=homes, reason=f"generation {self.generation}", grows=grows, backend=backend,
                )
            )  # fmt: skip
        self.rung = 1

    def parted(self, within_s: float = 20.0) -> None:
        """Wait until the gang has parted to grow: its vaults hear of the new ring then."""
        self.until(
            lambda: self.workers[self.plan_now[0]].beat.generation == self.generation, "the gang has parted", within_s
        )
        self.tell()

    def park(self) -> None:
        """Everybody out of the group."""
        self.generation += 1
        for node in self.plan_now:
            self.workers[node].tell(Park(generation=self.generation, reason="held"))

    def drain(self, *nodes: str) -> None:
        """These finish the step, save and end."""
        for node in nodes:
            self.workers[node].tell(Halt(generation=self.generation, save=True, within_s=20.0, reason="drained"))

    def commit(self) -> int:
        """As the leader does: the newest checkpoint that rank 0 says is whole becomes the commit. Its step."""
        beat = self.workers[self.plan_now[0]].beat
        if beat.saved > self.resume:
            self.resume = beat.saved
            self.committed = Commit(step=beat.saved, manifest=beat.manifest, generation=self.generation)
            for node in self.plan_now:
                self.workers[node].channel.sendall(write(self.committed))
        return self.resume

    def kill_worker(self, node: str) -> None:
        """kill -9 of the process; the node's vault stays."""
        self.workers.pop(node).kill()

    def lose(self, node: str) -> None:
        """A node is gone, memory and all."""
        self.workers.pop(node).kill()
        vault = self.vaults.pop(node)
        vault.kill()
        vault.control.close()
        shutil.rmtree(vault.directory)

    def freeze(self, node: str) -> None:
        """SIGSTOP."""
        pid = self.workers[node].process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)

    def fault(self, **what: object) -> None:
        """One fault at a logical place; see run_job."""
        fresh = self.folder / "fault.new"
        fresh.write_text(json.dumps(what))
        fresh.rename(self.folder / "fault")

    # ---- what can be seen

    def sealed(self) -> int:
        """The least that any rank of the plan knows to be sealed in this generation."""
        beats = [self.workers[node].beat for node in self.plan_now if node in self.workers]
        return min((b.step if b.generation == self.generation and b.state is not Stage.JOINING else -1) for b in beats)

    def until_sealed(self, step: int, within_s: float = 60.0) -> int:
        """Wait for that; the step."""
        self.until(lambda: self.sealed() >= step, f"step {step} sealed", within_s)
        return self.sealed()

    def until_new(self, count: int, within_s: float = 60.0) -> int:
        """Wait until so many steps were sealed in this generation, beyond what it went on from; the newest."""
        self.until(lambda: self.sealed() >= 0, "training", within_s)
        return self.until_sealed(self.sealed() + count, within_s)

    def until_done(self, within_s: float = 90.0) -> None:
        """All steps made, saved, and said so; then all are let go."""

        def done() -> bool:
            return all(self.workers[node].beat.state is Stage.DONE for node in self.plan_now)

        self.until(done, "the end of the job", within_s)
        self.commit()  # who saved last waits for that
        for node in self.plan_now:
            worker = self.workers[node]
            worker.tell(Halt(generation=self.generation, save=False, within_s=10.0, reason="finished"))
            worker.process.join(20)
            assert worker.process.exitcode == 0, f"{node}: {worker.text[-2000:]}"

    def until(self, claim: Callable[[], bool], what: str, within_s: float) -> None:
        """Wait, with a deadline, and say what the workers say if it passes or one of them ends."""
        deadline = time.monotonic() + patience(within_s)
        while not claim():
            ended = [node for node, worker in self.workers.items() if worker.process.exitcode not in (None, 0)]
            assert not ended, f"{ended[0]} ended while waiting for {what}: {self.workers[ended[0]].text[-3000:]}"
            if time.monotonic() > deadline:
                logs = "\n".join(f"{node} {worker.beat}: {worker.text[-800:]}" for node, worker in self.workers.items())
                raise AssertionError(f"not within {within_s} s: {what}\n{logs}")
            time.sleep(0.005)

    def home(self, worker: str) -> str:
        """The node that it is on."""
        return f"n{int(worker[1:]) // self.slots * self.slots}"

    def _start(self, node: str) -> None:
        self._started += 1
        home = self.home(node)
        env = {
            "ELASTICRL_CONFIG": str(self.folder / "config.json"),
            "ELASTICRL_VAULT": str(self.vaults[home].directory),
            "ELASTICRL_NODE": home,
            "ELASTICRL_JOB": "job",
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_HOSTID": node,
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            **self.env,
        }
        self.workers[node] = Worker(self._context, self.folder, f"{node}-{self._started}", env, self.program, self.args)
        if self.committed is not None:
            self.workers[node].channel.sendall(write(self.committed))


def undisturbed_digests(folder: Path, steps: int) -> dict[int, str]:
    """Of a gang of one that nothing happens to, with each sample used once."""
    with Nodes(folder, steps=steps, copies=0) as nodes:
        nodes.plan("n0")
        nodes.until_done()
        found = audit(nodes.run_dir)
        assert found.ok, found.sentence
        return digests(nodes.run_dir)


def digests(run_dir: Path) -> dict[int, str]:
    """Each step's digest; every step that was made again came to the same bits."""
    found = read(run_dir)
    assert not found.findings, found.findings
    return dict(found.steps)


def writer(nodes: Nodes, node: str) -> int:
    """The process that writes this node's checkpoints."""
    (found,) = writers(nodes, node)
    return found


def writers(nodes: Nodes, node: str) -> Iterator[int]:
    for children in Path(f"/proc/{nodes.workers[node].process.pid}/task").glob("*/children"):
        for pid in map(int, children.read_text().split()):
            if Path(f"/proc/{pid}/comm").read_text() == "elasticrl-save\n":
                yield pid
