"""A job on loopback: real daemons, agents and workers, one real etcd of any size, all in one folder.

The one idea: what happened is read from what was written: each worker appends a line for each sealed step to one history file,
with the machine's monotonic clock, and each daemon logs JSON. So a fault's cost is a difference of two times in a file, and
nothing here asks the code under test how it did.
"""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from chaos.etcd import LocalCluster
from chaos.live.errors import Late
from chaos.live.proc import all_pids, command_line
from chaos.patience import patience
from elasticrl.base.address import CONTROL
from elasticrl.contract.model import Record
from elasticrl.daemon.client import Unanswered, ask
from elasticrl.daemon.stored import read_all
from elasticrl.shell.keys import namespace
from elasticrl.store import StoreSettings, open_store
from elasticrl.store.embedded import free_ports

SCRIPT = Path(__file__).parents[2] / "tests" / "agent" / "train_small.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """One worker's line about one step.

    Example: Sealed(at=3656.81, node="n0", pid=24482, step=455, generation=2, rank=0, world=3, digest="1c8d779e")
    """

    at: float
    node: str
    pid: int
    step: int
    generation: int
    rank: int
    world: int
    digest: str


def parse(line: str) -> Sealed:
    """A line of the history."""
    at, node, pid, _, step, _, generation, _, rank, _, world, _, digest = line.split()
    return Sealed(
        at=float(at), node=node, pid=int(pid), step=int(step), generation=int(generation), rank=int(rank), world=int(world),
        digest=digest,
    )  # fmt: skip


class Job:
    """Some nodes on loopback. Use it as a context; it leaves nothing behind."""

    def __init__(
        self,
        *,
        etcd: int = 1,
        script_args: Sequence[str] = (),
        conf: Mapping[str, Any] | None = None,
        name: str = "live",
        client: str = "grpc",
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="elasticrl-live-"))  # short: sockets live below it
        self.name = name
        self.client = client  # of etcd
        self.history_file = self.folder / "history"
        self.etcd = LocalCluster(self.folder / "etcd", members=etcd)
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.metrics_ports: dict[str, int] = {}
        self.vaults = Path((conf or {}).get("vault", {}).get("dir", self.folder / "vault"))
        self._loop = asyncio.new_event_loop()
        self._script_args = script_args
        self._conf = conf or {}
        self._read = 0
        self._keep = bool(os.environ.get("ELASTICRL_KEEP"))  # leave the folder for somebody to look at
        self._sealed: list[Sealed] = []

    def __enter__(self) -> Self:
        self.run(self.etcd.__aenter__())
        self.history_file.touch()
        more = [arg.replace("{folder}", str(self.folder)) for arg in self._script_args]
        args = ["--save", str(self.folder / "saves"), "--history", str(self.history_file), *more]
        conf: dict[str, Any] = {
            "job": {"name": self.name, "program": str(SCRIPT), "args": args},
            "node": {
                "device": "cpu",
                "interface": "lo",
                "run_dir": str(self.folder / "run"),
                "state_dir": str(self.folder / "state"),
            },
            # The package etcd3 knows one endpoint.
            "store": {
                "client": self.client,
                "endpoints": list(self.etcd.endpoints)[: 1 if self.client == "etcd3" else None],
            },
            "membership": {"min_nodes": 2, "max_nodes": 4, "settle": "500ms", "lease_ttl": "5s", "keepalive": "1500ms"},
            "timeouts": {"floor": "2s", "slack": 20, "confirm": "500ms"},
            "lanes": {"count": 12},
            "vault": {"dir": str(self.vaults), "copies": 1},
            "checkpoint": {"dir": str(self.folder / "saves")},
            "telemetry": {"log_dir": str(self.folder / "log"), "format": "json"},
        }
        for section, values in self._conf.items():
            conf.setdefault(section, {}).update(values)
        (self.folder / "job.yaml").write_text(yaml.safe_dump(conf), encoding="utf-8")
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            for node in list(self.daemons):
                self.end(node)
        finally:
            self.run(self.etcd.__aexit__())
            self._loop.close()
        if exc[0] is None and not self._keep:
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            sys.stderr.write(f"everything is kept in {self.folder}\n")

    def run(self, work: Any) -> Any:
        """Await something of the store's in this thread, which etcd's processes die with."""
        return self._loop.run_until_complete(work)

    # ---- nodes

    def start(self, *nodes: str, foreground: bool = False) -> None:
        """Start daemons; each starts its agent, or adopts the one that runs."""
        for node in nodes:
            command = [
                sys.executable,
                "-m",
                "elasticrl.cli.main",
                "daemon",
                "--config",
                str(self.folder / "job.yaml"),
                *self.overrides(node),
                *(["--foreground"] if foreground else []),
            ]
            with self.log(node).open("ab") as output:
                self.daemons[node] = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
                )

    def overrides(self, node: str) -> list[str]:
        """What is this node's own in the configuration."""
        port = self.metrics_ports.setdefault(node, free_ports()[0])
        return [f"node.name={node}", f"telemetry.metrics_port={port}"]

    def log(self, node: str) -> Path:
        """What a node's daemons have logged."""
        return self.folder / f"{node}.daemon.log"

    def home(self, node: str) -> Path:
        """A node's runtime directory."""
        return self.folder / "run" / self.name / node

    def control(self, node: str) -> Path:
        """Where its daemon answers."""
        return self.home(node) / CONTROL

    def agent(self, node: str) -> int:
        """The pid of a node's agent, as its daemon remembers it."""
        return int(json.loads((self.home(node) / "life.json").read_text(encoding="utf-8"))["agent_pid"])

    def agent_runs(self, node: str) -> bool:
        """Does the node's daemon know a running agent?"""
        try:
            return self.agent(node) > 0
        except (OSError, ValueError, KeyError):
            return False

    def agent_lives(self, node: str) -> bool:
        """Does the agent that a node's daemon knew last still run?"""
        return "elasticrl.agent" in command_line(self.agent(node))

    def worker(self, node: str) -> int:
        """The pid of a node's first worker."""
        return int(self.ask(node, "logs")[0]["pid"])

    def vault(self, node: str) -> int:
        """The pid of a node's vault; 0 if none answers."""
        try:
            return int(self.ask_vault(node, "status")["pid"])
        except (OSError, ValueError):
            return 0

    def ask_vault(self, node: str, op: str, **fields: Any) -> dict[str, Any]:
        """A question to a node's vault."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(10.0)
            sock.connect(str(self.vaults / self.name / node / CONTROL))
            sock.sendall(json.dumps({"v": 1, "op": op, **fields}).encode() + b"\n")
            return dict(json.loads(sock.makefile("rb").readline()))

    def ask(self, node: str, verb: str, **fields: Any) -> Any:
        """A question to a node's daemon."""
        return ask(self.control(node), verb, deadline_s=10.0, **fields)

    def kill_daemon(self, node: str, number: int = signal.SIGKILL) -> None:
        """Send its daemon a signal, and reap it."""
        process = self.daemons[node]
        process.send_signal(number)
        process.wait(30.0)

    def kill_node(self, node: str) -> None:
        """Everything of a node dies at once: daemon first, so that it says nothing; its sockets close."""
        pids = [pid for pid in (self.worker(node), self.agent(node), self.vault(node)) if pid]
        self.daemons[node].kill()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.daemons[node].wait(10.0)

    def end(self, node: str) -> None:
        """Clean up after a node, however it was left."""
        process = self.daemons.pop(node)
        try:
            agent = self.agent(node)
        except (OSError, ValueError, KeyError):
            agent = 0
        process.kill()
        process.wait(10.0)
        for pid in all_pids():  # by name: one that is too busy to answer, or just begins, would stay for ever
            words = command_line(pid)
            if "elasticrl.runtime.vault" in words and f"--node {node} " in words and f"{self.vaults}/" in words:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if agent and "elasticrl.agent" in command_line(agent):
            os.kill(agent, signal.SIGKILL)  # its workers die with it
        shutil.rmtree(self.home(node), ignore_errors=True)

    def fault(self, **what: object) -> Path:
        """One fault at a logical place, for a program with `--faults {folder}/fault`; see tests/runtime/run_job.py. The file
        goes when it strikes.
        """
        path = self.folder / "fault"
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(what), encoding="utf-8")
        fresh.rename(path)
        return path

    def records(self) -> dict[str, Record]:
        """What each member says of itself, as it stands in the store."""

        async def look() -> dict[str, Record]:
            endpoints = self._conf.get("store", {}).get("endpoints", self.etcd.endpoints)
            settings = StoreSettings(endpoints=tuple(endpoints), namespace=namespace(self.name))
            async with open_store(settings) as store:
                return (await read_all(store))[0]

        return dict(self.run(look()))

    def metrics(self, node: str) -> dict[str, float]:
        """What a node's daemon measures: by sample, as Prometheus would read it."""
        page = f"http://127.0.0.1:{self.metrics_ports[node]}/metrics"
        with urllib.request.urlopen(page, timeout=10.0) as answer:
            lines = answer.read().decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    def leader(self) -> str:
        """The node that leads."""
        for node in self.daemons:
            try:
                picture = self.ask(node, "status")
            except Unanswered:
                continue
            return next((row["node"] for row in picture["rows"] if row["leader"]), "")
        return ""

    # ---- what happened

    def sealed(self) -> list[Sealed]:
        """All lines so far."""
        with self.history_file.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        self._sealed.extend(parse(line) for line in whole.decode().splitlines())
        return self._sealed

    def full_steps(self, world: int, after: float) -> Iterator[tuple[float, int]]:
        """Steps that all ranks of a gang of this size have sealed since: when the last of them did, and which step."""
        ranks: dict[tuple[int, int], dict[int, float]] = {}
        for line in self.sealed():
            if line.at > after and line.world == world:
                ranks.setdefault((line.generation, line.step), {})[line.rank] = line.at
        for (_, step), seen in sorted(ranks.items()):
            if len(seen) == world:
                yield max(seen.values()), step

    def until_steps(self, world: int, *, after: float | None = None, within_s: float = 30.0, count: int = 1) -> float:
        """Wait until a gang of this size has sealed so many steps after that time; returns when the first of them was."""
        after = time.monotonic() if after is None else after
        found: list[tuple[float, int]] = []

        def enough() -> bool:
            found[:] = list(self.full_steps(world, after))
            return len(found) >= count

        self.until(enough, within_s, f"{count} steps of {world} ranks")
        return min(found)[0]

    def until(self, claim: Callable[[], bool], within_s: float, what: str) -> None:
        """Wait for something, or say in what state everything is."""
        deadline = time.monotonic() + patience(within_s)
        while not claim():
            if time.monotonic() > deadline:
                self._keep = True
                raise Late(f"{what}: not within {within_s} s; last sealed: {self.sealed()[-3:]}; {self.reasons()}")
            time.sleep(0.02)

    def forgive(self) -> None:
        """What was late was expected to be: nothing needs to be kept for that."""
        self._keep = False

    def reasons(self) -> dict[str, str]:
        """What each node says of itself."""
        found = {}
        for node, process in self.daemons.items():
            if process.poll() is not None:
                found[node] = f"ended ({process.returncode})"
                continue
            try:
                picture = self.ask(node, "status")
                found[node] = f"{picture['state']} generation {picture['generation']}: {picture['here']}"
            except (Unanswered, OSError) as error:
                found[node] = str(error)
        return found

    def events(self, node: str, name: str = "") -> list[dict[str, Any]]:
        """A node's log lines, of one event if it is named. (The last may not be whole yet.)"""
        whole, _, _ = self.log(node).read_bytes().rpartition(b"\n") if self.log(node).exists() else (b"", b"", b"")
        lines = whole.decode().splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{")]
        return [line for line in found if not name or line["event"] == name]

    def check(self) -> None:
        """What must hold after whatever was done: no bug was logged, and every step has one digest, whoever computed it."""
        for log in self.folder.glob("*.daemon.log"):
            text = log.read_text(encoding="utf-8", errors="replace")
            assert '"event": "bug"' not in text, (
                f"{log.name}: {next(line for line in text.splitlines() if 'bug' in line)}"
            )
            assert "Traceback" not in text, f"{log.name} has a traceback:\n{text[text.index('Traceback') :][:2000]}"
        digests: dict[int, str] = {}
        for line in self.sealed():
            assert digests.setdefault(line.step, line.digest) == line.digest, (
                f"step {line.step} has two digests: {line}"
            )
