"""The racers: how each is started, where its processes are, and how each fault of the schedule is done to it.

Three one-worker nodes on loopback for all. A supervisor is played for everybody alike: a coordinator that is killed is
started again after half a second, as systemd or Kubernetes would, and so is a node that comes back.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from bench.race.environments import environment
from bench.race.judge import Deal, deal, names, samples
from bench.recovery import NODES, Elastic, monotonic, spares, torchrun, torchrun_env
from chaos.live import proc
from chaos.live.errors import Late
from chaos.live.local import Sealed, parse
from elasticrl.base.process import started_at
from elasticrl.daemon.client import Unanswered
from elasticrl.runtime.data.audit import audit
from elasticrl.runtime.vault.errors import DataError
from elasticrl.store.embedded import free_ports

HERE = Path(__file__).parent
REVIVE_S = 0.5  # until a supervisor starts again what was killed: part of the fault
START_S = 240.0
HOSTED_S = 60.0
STOP_S = 90.0
STEP_S = 0.05
SAVE_EVERY = 20
SOCKETS = Path("/tmp/ckpt_sock/race")  # where DLRover has those of a job of this name, whatever TMPDIR says
COLLECTIVE_S = 10.0  # timeout of collectives where a side is tuned: the shortest one sees on real gangs
WORKER, NODE = "n1", "n2"  # whose worker is struck; which node dies, or joins. n0 hosts what a side hosts in a node.


class Side(ABC):
    """A job under one of the racers. Use it as a context; it leaves nothing behind."""

    name: str
    about: str  # versions and settings, for the table's notes
    faults: Mapping[str, str] = {}  # fault -> why this side cannot have it
    remedy: Mapping[str, str] = {}  # fault -> the setting that would help, where the job is lost or never comes back
    bits_of = ""  # the side whose undisturbed run has the same bits; empty: its own
    begins_whole = True  # with all nodes, if nothing happens

    @abstractmethod
    def __init__(self, step_s: float = STEP_S) -> None: ...

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(self, *exc: object) -> None: ...

    @abstractmethod
    def start(self, *nodes: str) -> None:
        """Start these nodes, and what they need."""

    @abstractmethod
    def lines(self) -> list[Sealed]:
        """All steps made so far."""

    @abstractmethod
    def samples(self, since: int) -> tuple[int, int] | None:
        """Since this step: lost, and trained more than once; None if it cannot be told."""

    @abstractmethod
    def blamed(self, since: float) -> str:
        """Who was blamed since the blow, by the side's own word."""

    @abstractmethod
    def over(self) -> bool:
        """Has the job ended?"""

    def ready(self, world: int, within_s: float = START_S) -> None:
        """So many ranks train, and have for a second."""
        since = time.monotonic()
        deadline = since + within_s
        while True:
            seen = [line for line in self.lines() if line.at > since and line.world == world]
            if len({line.node for line in seen}) == world and seen[-1].at - seen[0].at > 1.0:
                return
            if self.over() or time.monotonic() > deadline:
                state = "the job ended" if self.over() else f"not within {within_s:.0f} s"
                raise Late(f"{self.name}: {world} ranks do not train: {state}; last steps: {self.lines()[-3:]}")
            time.sleep(0.05)

    def strike(self, fault: str) -> tuple[str, ...]:
        """Do it; returns the nodes that were struck."""
        return tuple(getattr(self, fault.replace("-", "_"))())


class Ours(Side):
    """elasticrl as bench/recovery.py sets it up, with saves to disk as often as everybody's."""

    name = "elasticrl"
    about = (
        "a warm spare process per node, floor of the phases' budgets 2 s, one etcd member; begun when its first save is on the "
        "disk"
    )

    def __init__(self, step_s: float = STEP_S) -> None:
        self.gang = Elastic(step_ms=step_s * 1000, save_every=SAVE_EVERY)
        self.job = self.gang.job

    def __enter__(self) -> Self:
        self.job.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.job.forgive()
        self.job.__exit__(None, None, None)

    def start(self, *nodes: str) -> None:
        self.job.start(*nodes)

    def ready(self, world: int, within_s: float = START_S) -> None:
        super().ready(world, within_s)
        nodes = list(self.job.daemons)
        self.job.until(lambda: all(spares(self.job, node) for node in nodes), within_s, "a spare on every node")
        self.job.until(lambda: self.job.ask(nodes[0], "status")["committed"] > 0, within_s, "the first save")

    def lines(self) -> list[Sealed]:
        return list(self.job.sealed())

    def samples(self, since: int) -> tuple[int, int] | None:  # noqa: ARG002 - the ledger is judged as a whole
        """By the ledger of the run, which is whole when the job has been told to stop and has."""
        with contextlib.suppress(DataError, ValueError, Unanswered, Late):
            self.job.ask(NODES[0], "stop")
            self.job.until(self.over, STOP_S, "the job ends")
            found = audit(self.job.folder / "saves" / self.job.name)
            if not found.problems:
                return len(found.missing), len(found.duplicates)
        return None

    def blamed(self, since: float) -> str:
        plans = [
            (monotonic(line["at"]) > since, line["generation"], line["reason"])
            for line in self.gang.log("plan.adopted")
        ]
        known = max((generation for late, generation, _ in plans if not late), default=0)
        return min(((number, reason) for late, number, reason in plans if late and number > known), default=(0, ""))[1]

    def over(self) -> bool:
        return all(daemon.poll() is not None for daemon in self.job.daemons.values())

    def worker(self) -> Sequence[str]:
        os.kill(self.job.worker(WORKER), signal.SIGKILL)
        return [WORKER]

    def stop(self) -> Sequence[str]:
        os.kill(self.job.worker(WORKER), signal.SIGSTOP)
        return [WORKER]

    def hang(self) -> Sequence[str]:
        self.gang.hung()
        return [next(line.node for line in reversed(self.lines()) if line.rank == 1)]

    def node(self) -> Sequence[str]:
        kill(self.gang.pids(NODE))
        self.job.daemons[NODE].wait(10.0)
        return [NODE]

    def node_back(self) -> Sequence[str]:
        self.node()
        time.sleep(REVIVE_S)
        self.start(NODE)
        return [NODE]

    def coordinator(self) -> Sequence[str]:
        """The daemon that leads."""
        leader = self.job.leader()
        self.job.kill_daemon(leader)
        time.sleep(REVIVE_S)
        self.start(leader)
        return []

    def store(self) -> Sequence[str]:
        self.job.etcd.kill(0)
        time.sleep(REVIVE_S)
        self.job.run(self.job.etcd.revive(0))
        return []

    def join(self) -> Sequence[str]:
        self.start(NODE)
        return [NODE]

    def power(self) -> Sequence[str]:
        pids = [pid for node in NODES for pid in self.gang.pids(node)]
        self.job.etcd.kill(0)
        kill(pids)
        for node in NODES:
            self.job.daemons[node].wait(10.0)
        shutil.rmtree(self.job.folder / "vault", ignore_errors=True)  # it is memory
        time.sleep(REVIVE_S)
        self.start(*NODES)  # all at once: nodes get ready beside a store that is not there yet
        self.job.run(self.job.etcd.revive(0))
        return NODES


class Peer(Side):
    """A job of processes that are known by what they have in their environment: the job's folder and the node's name."""

    bits_of = "torchrun"
    environment: str = ""  # the name of the peer's own; empty: elasticrl's, which has torch
    program: str  # the loop's script
    blames: Sequence[str] = ()  # patterns of the nodes' logs; what their group holds is what is blamed
    timeout_s: float = 0.0
    coordinator_is_a_process = False  # of its own; otherwise it lives in n0

    def __init__(self, step_s: float = STEP_S) -> None:
        self.step_s = step_s
        self.folder = Path(tempfile.mkdtemp(prefix="elasticrl-race-"))
        self.port = free_ports()[0]
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.python = str(environment(self.environment).python) if self.environment else sys.executable
        self._read = 0
        self._lines: list[Sealed] = []
        self._logged: dict[str, int] = {}

    def __enter__(self) -> Self:
        (self.folder / "history").touch()
        return self

    def __exit__(self, *exc: object) -> None:
        kill(self.pids())
        for agent in self.agents.values():
            agent.wait(10.0)
        if os.environ.get("ELASTICRL_KEEP"):
            print(f"everything is kept in {self.folder}", file=sys.stderr)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)

    @abstractmethod
    def command(self, node: str) -> Sequence[str]:
        """Of a node's agent."""

    def host(self) -> Sequence[str]:
        """The command of a coordinator that is a process of its own; empty if a node hosts it."""
        return ()

    def env(self, node: str) -> Mapping[str, str]:  # noqa: ARG002 - for those who need it
        """What is the side's own in a node's environment."""
        return {}

    def script(self, *more: str) -> list[str]:
        """The loop's command line, without Python."""
        own = ["--folder", str(self.folder), "--step-s", str(self.step_s), "--timeout-s", str(self.timeout_s)]
        return [str(HERE / self.program), *own, *more]

    def start(self, *nodes: str) -> None:
        if self.host() and "host" not in self.agents:
            self._launch("host", self.host())
            self._hosted()
        for node in nodes:
            self._launch(node, self.command(node))
            if node == NODES[0] and not self.host():
                self._hosted()  # by this node, and by no other: all of them are on this machine

    def _hosted(self) -> None:
        """Where all meet somebody listens now. One that never does shows in that nobody trains."""
        deadline = time.monotonic() + HOSTED_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                return
            time.sleep(0.05)  # between attempts to connect

    def _launch(self, node: str, command: Sequence[str]) -> None:
        common = {"RACE": str(self.folder), "NODE": node, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        env = {**os.environ, **common, "TMPDIR": str(self.folder), **self.env(node)}
        with self.log(node).open("ab") as log:
            self.agents[node] = subprocess.Popen(
                list(command), env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def log(self, node: str) -> Path:
        return self.folder / f"{node}.log"

    def lines(self) -> list[Sealed]:
        with (self.folder / "history").open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        self._lines.extend(parse(line) for line in whole.decode().splitlines())
        return list(self._lines)

    def deals(self) -> Iterator[Deal]:
        text = (self.folder / "samples").read_text()
        return (deal(line) for line in text[: text.rfind("\n") + 1].splitlines())

    def samples(self, since: int) -> tuple[int, int] | None:
        return samples(self.lines(), self.deals(), since)

    def blamed(self, since: float) -> str:  # noqa: ARG002 - what was logged before the blow is left out by its place
        found = []
        for node in NODES:
            if self.log(node).exists():
                text = self.log(node).read_bytes()[self._logged.get(node, 0) :].decode(errors="replace")
                found += [(node, match[1]) for each in self.blames for match in re.finditer(each, text)]
        return names(found)

    def over(self) -> bool:
        return all(agent.poll() is not None for node, agent in self.agents.items() if node != "host")

    def strike(self, fault: str) -> tuple[str, ...]:
        self._logged = {node: self.log(node).stat().st_size for node in NODES if self.log(node).exists()}
        return super().strike(fault)

    def pids(self, node: str = "") -> list[int]:
        """All processes of a node, or of the job, the oldest first."""
        wanted = {f"RACE={self.folder}", *([f"NODE={node}"] if node else [])}
        found = [(started_at(pid), pid) for pid in proc.all_pids() if wanted <= {*proc.environment(pid)}]
        return [pid for started, pid in sorted(found) if started]

    def pid(self, node: str) -> int:
        """The node's worker."""
        for pid in self.pids(node):
            if any(word.endswith(self.program) for word in proc.words(pid)[1:3]):
                return pid
        raise Late(f"{self.name}: {node} has no worker")

    def worker(self) -> Sequence[str]:
        os.kill(self.pid(WORKER), signal.SIGKILL)
        return [WORKER]

    def stop(self) -> Sequence[str]:
        os.kill(self.pid(WORKER), signal.SIGSTOP)
        return [WORKER]

    def hang(self) -> Sequence[str]:
        order = self.folder / f"hang-{WORKER}"
        order.touch()
        deadline = time.monotonic() + 10.0
        while order.exists():
            if time.monotonic() > deadline:
                raise Late(f"{self.name}: the hang has not struck")
            time.sleep(0.005)  # the fault's time is that of the worker's taking the order
        return [WORKER]

    def end(self, *nodes: str) -> None:
        """As a power cut does, but sockets close."""
        for node in nodes:
            kill(self.pids(node))
            self.agents[node].wait(10.0)

    def node(self) -> Sequence[str]:
        self.end(NODE)
        return [NODE]

    def node_back(self) -> Sequence[str]:
        self.end(NODE)
        time.sleep(REVIVE_S)
        self.start(NODE)
        return [NODE]

    def coordinator(self) -> Sequence[str]:
        victim = "host" if self.host() else NODES[0]
        self.end(victim)
        del self.agents[victim]
        time.sleep(REVIVE_S)
        self.start(*([] if self.host() else [victim]))
        return [] if self.host() else [victim]

    def join(self) -> Sequence[str]:
        self.start(NODE)
        return [NODE]

    def power(self) -> Sequence[str]:
        kill(self.pids())
        for agent in self.agents.values():
            agent.wait(10.0)
        self.agents.clear()
        time.sleep(REVIVE_S)
        self.start(*NODES)
        return NODES


NO_STORE = {"store": "it has no store beside its coordinator"}
TORCHELASTIC = (r"failed \((exitcode: -?\d+)\)",)  # what an agent says of its own worker


class Torchrun(Peer):
    """torchrun as it comes."""

    name = "torchrun"
    about = "torch 2.13.0, c10d, all defaults"
    program = "loop_elastic.py"
    blames = TORCHELASTIC
    best = False
    faults = NO_STORE
    remedy = {  # noqa: RUF012 - read only
        "worker": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        "node": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, keep_alive_interval, last_call_timeout",
        "node-back": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        "join": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        "stop": "a timeout of collectives under its 30 min",
        "hang": "a timeout of collectives under its 30 min",
        "coordinator": "none: the rendezvous lives in one agent (a separate store host moves the problem)",
    }

    def command(self, node: str) -> Sequence[str]:  # noqa: ARG002 - all nodes have the same
        return torchrun(self.port, self.script(), best=self.best)

    def env(self, node: str) -> Mapping[str, str]:
        return torchrun_env(node, best=self.best)


class TorchrunTuned(Torchrun):
    """torchrun at the best settings that we know."""

    name = "torchrun-tuned"
    about = (
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, last_call_timeout=1, keep-alive 1 s x 3, "
        f"collectives' timeout {COLLECTIVE_S:.0f} s"
    )
    best = True
    timeout_s = COLLECTIVE_S
    remedy = {"coordinator": Torchrun.remedy["coordinator"]}  # noqa: RUF012 - read only


class Torchft(Peer):
    """torchft: a replica group of one worker per node under a torchrun of its own, one lighthouse."""

    name = "torchft"
    about = (
        "torchft-nightly 2026.10.26, ProcessGroupGloo, all defaults, each replica under its own torchrun; replicas join "
        "as they come, so no two starts have the same bits"
    )
    bits_of = ""  # it takes means, and deals samples by replica
    begins_whole = False  # replicas join as they come
    environment = "torchft"
    program = "loop_torchft.py"
    blames = TORCHELASTIC
    faults = NO_STORE
    lighthouse: Sequence[str] = ()
    remedy = {  # noqa: RUF012 - read only
        "coordinator": "TORCHFT_QUORUM_RETRIES over its default 0",
        "hang": "shorter timeouts of the manager and of the lighthouse",
    }

    def host(self) -> Sequence[str]:
        bind = ["--bind", f"[::]:{self.port}", "--min_replicas", "1"]
        return [str(Path(self.python).with_name("torchft_lighthouse")), *bind, *self.lighthouse]

    def command(self, node: str) -> Sequence[str]:  # noqa: ARG002 - all nodes have the same
        own = ["--nnodes=1", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
        return [
            self.python,
            "-m",
            "torch.distributed.run",
            *own,
            "--max-restarts=100",
            "--local-addr=localhost",
            *self.script(),
        ]

    def env(self, node: str) -> Mapping[str, str]:  # noqa: ARG002 - all nodes have the same
        return {"TORCHFT_LIGHTHOUSE": f"http://localhost:{self.port}"}


class TorchftTuned(Torchft):
    """torchft at the best settings that we know."""

    name = "torchft-tuned"
    about = "heartbeat_timeout_ms=1000, join_timeout_ms=1000, TORCHFT_QUORUM_RETRIES=10, timeouts 3 s"
    lighthouse = ("--heartbeat_timeout_ms", "1000", "--join_timeout_ms", "1000")
    timeout_s = 3.0
    remedy: Mapping[str, str] = {}

    def env(self, node: str) -> Mapping[str, str]:
        return {**super().env(node), "TORCHFT_QUORUM_RETRIES": "10"}


class NvrxLauncher(Peer):
    """NVIDIA's ft_launcher: torchrun with a rank monitor that listens to heartbeats."""

    name = "nvrx-launcher"
    about = (
        "nvidia-resiliency-ext 0.4.1, ft_launcher, c10d, heartbeat timeout 3 s, checked every 0.5 s, "
        f"last_call_timeout=1, keep-alive 1 s x 3, collectives' timeout {COLLECTIVE_S:.0f} s"
    )
    environment = "nvrx"
    program = "loop_elastic.py"
    blames = (*TORCHELASTIC, r"(Did not get subsequent heartbeat[^.\n]{0,60})")
    timeout_s = COLLECTIVE_S
    faults = NO_STORE
    remedy = {"coordinator": "none: the rendezvous lives in one agent"}  # noqa: RUF012 - read only

    def command(self, node: str) -> Sequence[str]:  # noqa: ARG002 - all nodes have the same
        conf = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
        own = [
            "--nnodes=1:3", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{self.port}",
            "--rdzv-id=race", "--max-restarts=100", "--local-addr=localhost", "--rdzv-conf", conf,
            "--ft-rank-heartbeat-timeout=3", "--ft-initial-rank-heartbeat-timeout=60", "--ft-workload-check-interval=0.5",
        ]  # fmt: skip
        return [str(Path(self.python).with_name("ft_launcher")), *own, *self.script("--heartbeats")]

    def env(self, node: str) -> Mapping[str, str]:  # noqa: ARG002 - all nodes have the same
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class NvrxInProcess(Peer):
    """NVIDIA's in-process restart: survivors go on within their processes, and a rank that is gone is gone."""

    name = "nvrx-inprocess"
    about = (
        f"nvidia-resiliency-ext 0.4.1, inprocess.Wrapper, timeouts 3 to 5 s, collectives' timeout {COLLECTIVE_S:.0f} s"
    )
    environment = "nvrx"
    program = "loop_inprocess.py"
    blames = (r"(Interruption\.\w+)",)
    timeout_s = COLLECTIVE_S
    faults = {**NO_STORE, "join": "no rank can join"}  # noqa: RUF012 - read only
    remedy = {  # noqa: RUF012 - read only
        **dict.fromkeys(
            ("worker", "node-back", "stop", "hang"), "none: a rank that is gone stays out of the running job"
        ),
        "coordinator": "none: rank 0 hosts the store",
    }

    def command(self, node: str) -> Sequence[str]:  # noqa: ARG002 - all nodes have the same
        return [self.python, *self.script()]

    def env(self, node: str) -> Mapping[str, str]:
        return {"RANK": node[1:], "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}


class Dlrover(Peer):
    """DLRover: a master, and an agent per node in a process table of its own, since its clean-up ends other jobs' workers."""

    name = "dlrover"
    about = (
        f"dlrover 0.6.1, local platform, one master, collectives' timeout {COLLECTIVE_S:.0f} s, saves as everybody's"
    )
    environment = "dlrover"
    program = "loop_elastic.py"
    blames = TORCHELASTIC
    timeout_s = COLLECTIVE_S
    faults = NO_STORE
    remedy = {  # noqa: RUF012 - read only
        **dict.fromkeys(("node", "node-back"), "its Kubernetes operator tells the master of dead pods; not tried"),
        "stop": "patience: it came back after about a minute elsewhere",
    }

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        shutil.rmtree(SOCKETS, ignore_errors=True)

    def host(self) -> Sequence[str]:
        own = ["--platform", "local", "--node_num", "3", "--port", str(self.port), "--job_name", "race"]
        return [self.python, "-m", "dlrover.python.master.main", *own]

    def command(self, node: str) -> Sequence[str]:  # noqa: ARG002 - all nodes have the same
        own = ["--nnodes=1:3", "--nproc_per_node=1", "--max_restarts=100", "--rdzv_conf", "last_call_timeout=1"]
        agent = [str(Path(self.python).with_name("dlrover-run")), *own, *self.script()]
        return ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *agent]

    def env(self, node: str) -> Mapping[str, str]:
        events = {"DLROVER_EVENT_FILE_DIR": str(self.folder)}  # else they pile up in a folder of all its jobs
        if node == "host":
            return events
        number = node[1:]
        return {
            **events, "DLROVER_MASTER_ADDR": f"127.0.0.1:{self.port}", "ELASTIC_JOB_NAME": "race", "NODE_TYPE": "worker",
            "NODE_ID": number, "NODE_RANK": number, "NODE_NUM": "3", "WORKER_NUM": "3", "WORKER_RANK": number,
            "POD_NAME": f"race-{node}", "PATH": f"{Path(self.python).parent}:{os.environ.get('PATH', '')}",
        }  # fmt: skip


def kill(pids: Sequence[int]) -> None:
    """All at once."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


SIDES: dict[str, Callable[..., Any]] = {
    side.name: side
    for side in (Ours, Torchrun, TorchrunTuned, Torchft, TorchftTuned, NvrxInProcess, NvrxLauncher, Dlrover)
}
