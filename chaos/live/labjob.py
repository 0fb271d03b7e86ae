"""A job on the lab's nodes: its configuration, its daemons, and who is who among a node's processes.

The one idea: processes are told apart by what the kernel says of them (namespace, command line, parent), never by asking the
one that is about to be killed; only a worker is known by its own words, the last line that it wrote.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any, Literal

import yaml

from chaos.live.box import Box
from chaos.live.lab import Lab
from chaos.live.proc import alive, command_line, inner_pid, parent
from elasticrl.base.address import CONTROL
from elasticrl.config import Tree, load
from elasticrl.contract.settings import Settings
from elasticrl.daemon.client import ask
from elasticrl.daemon.spec import OWN
from elasticrl.runtime.vault.layout import HEADER_AT, SEAL_AT

PROGRAM = Path(__file__).with_name("job.py")
PPO_PROGRAM = Path(__file__).with_name("ppojob.py")
RUN_DIR, VAULT_DIR = "/run/elasticrl", "/dev/shm/elasticrl"
LANES = 12
LINE = 1000  # bytes of a history's end that have a worker's newest line
SECTIONS = ("membership", "recovery", "health", "timeouts")

#: Shorter than this is no setting for real processes on a shared machine, whatever a scenario says.
LEAST = {
    "lease_ttl_s": 5.0, "keepalive_s": 1.5, "suspect_s": 1.2, "settle_s": 0.5, "start_s": 90.0, "reform_s": 15.0,
    "replace_s": 30.0, "restart_s": 45.0, "reload_s": 60.0, "probe_s": 5.0, "drain_s": 20.0, "quarantine_s": 6.0,
    "quarantine_max_s": 12.0, "floor_s": 4.0, "default_phase_s": 12.0, "confirm_s": 0.5,
}  # fmt: skip
#: And longer than this nobody wants to wait for.
MOST = {
    "lease_ttl_s": 10.0, "keepalive_s": 3.0, "quarantine_s": 8.0, "quarantine_max_s": 16.0, "default_phase_s": 15.0,
    "reload_s": 90.0, "drain_s": 30.0, "start_s": 120.0,
}  # fmt: skip


def within(name: str, value: float) -> float:
    """A setting of a scenario as it is for real nodes."""
    return min(max(value, LEAST.get(name, value)), MOST.get(name, value))


def conf_of(settings: Settings, *, nodes: int) -> dict[str, Any]:
    """A scenario's settings as sections of a configuration; what is too short for this machine is lengthened."""
    plain = asdict(settings)
    conf: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for section in SECTIONS:
        for name, value in plain[section].items():
            if isinstance(value, dict):
                continue
            if name.endswith("_s"):
                conf[section][name.removesuffix("_s")] = f"{within(name, value):g}s"
            else:
                conf[section][name] = value
    least = max(1, min(settings.membership.min_nodes, nodes))
    conf["membership"] |= {"max_nodes": min(nodes, settings.membership.max_nodes), "min_nodes": least, "doubt": "500ms"}
    conf["vault"] = {"copies": min(settings.copies, least - 1)}
    conf["policy"] = dict(settings.policy)
    return conf


def ppo_conf(folder: Path) -> dict[str, Any]:
    """The sections of a small job of PPO with an engine beside each worker; what it needs is written to the folder."""
    from elasticrl.ppo import tiny  # it imports transformers

    chance = Random(5)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(f'{{"prompt": "{chance.randrange(10_000):04}"}}' for _ in range(500)))
    rows = 2 * LANES
    return {
        "ppo": {"batch": rows, "mini_batch": rows, "micro_tokens": 20, "epochs": 1, "lr": 4e-3, "critic_lr": 4e-3},
        "model": {"path": tiny.write(folder / "actor", hidden=32, layers=2)},
        "reward": {"function": "elasticrl.ppo.tasks:reverse"},
        "data": {"path": str(prompts), "max_prompt": 6},
        "rollout": {
            "engine": "served", "max_tokens": 4, "health_every": "1s", "health_timeout": "6s", "start_timeout": "90s",
            "sync_timeout": "20s", "idle": "60s",
        },
        "agent": {"preload": list(OWN["elasticrl.ppo"])},
    }  # fmt: skip


class LabJob:
    """The nodes of one job in a lab."""

    def __init__(
        self, lab: Lab, name: str, *, conf: Mapping[str, Any], step_ms: float = 100.0, save_every: int = 40,
        load_s: float = 0.0, trainer: Literal["points", "ppo"] = "points", slots: int = 1, team: int = 1,
    ) -> None:  # fmt: skip
        self.lab, self.name, self.slots, self.team = lab, name, slots, team
        self.folder = lab.folder / name
        self.history = self.folder / "history"
        self.history.mkdir(parents=True)
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.saves = lab.disk / "saves" / name
        self.program = PPO_PROGRAM if trainer == "ppo" else PROGRAM
        args = ["--step-ms", f"{step_ms:g}", "--history", str(self.history), "--load-s", f"{load_s:g}"]
        plain: dict[str, Any] = {
            "job": {"name": name, "program": str(self.program), "args": args, "seed": 7},
            "node": {"device": "cpu", "workers": slots},
            "model": {"tp": team},
            "store": {"endpoints": list(lab.endpoints), "try_timeout": "1s", "timeout": "5s"},
            "lanes": {"count": LANES, "digest": "full"},
            "vault": {"timeout": "10s", "linger": "20s"},
            "checkpoint": {"dir": str(lab.disk / "saves"), "every": save_every, "keep_last": 3},
            "telemetry": {"log_dir": str(self.folder / "log"), "format": "json"},
        }
        for section, values in [*(ppo_conf(self.folder) if trainer == "ppo" else {}).items(), *conf.items()]:
            plain.setdefault(section, {}).update(values)
        if len(lab.boxes) > 4 and plain.get("membership", {}).get("grow") == "useful":
            plain["membership"]["grow"] = "always"  # a fifth node makes no step of 12 lanes quicker
        self.config = self.folder / "job.yaml"
        self.config.write_text(yaml.safe_dump(plain), encoding="utf-8")
        self.tree: Tree = load(self.config, ["node.name=n0"])

    # ---- daemons

    def start(
        self, node: str, *overrides: str, count: bool = True, env: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start a node's daemon, or one more that is not counted as the node's."""
        box = self.lab.boxes[node]
        own = [f"node.name={node}", f"node.state_dir={self.folder / 'state' / node}"]
        own += [f"node.run_dir={box.inner(RUN_DIR)}", f"vault.dir={box.inner(VAULT_DIR)}"]
        own += ["node.interface=eth0"] if self.lab.real else ["node.interface=lo", f"node.address={box.address}"]
        own += overrides
        command = [sys.executable, "-m", "elasticrl.cli.main", "daemon", "--config", str(self.config), *own]
        process = box.start(command, self.log(node) if count else self.folder / f"{node}.second.log", env)
        if count:
            self.daemons[node] = process
        return process

    def log(self, node: str) -> Path:
        """What a node's daemons have logged."""
        return self.folder / f"{node}.daemon.log"

    def ended(self, node: str) -> int | None:
        """The exit code of a node's daemon that has ended; None while it runs."""
        process = self.daemons.get(node)
        return process.poll() if process else None

    def ask(self, asked: str, verb: str, **fields: Any) -> Any:
        """A question to a node's daemon."""
        return ask(self.control(asked), verb, deadline_s=10.0, **fields)

    def control(self, node: str) -> Path:
        """Where its daemon answers."""
        return self.lab.boxes[node].path(f"{RUN_DIR}/{self.name}/{node}/{CONTROL}")

    # ---- who is who

    def box(self, node: str) -> Box:
        """A node's box."""
        return self.lab.boxes[node]

    def daemon(self, node: str) -> int:
        """The host's number of the daemon's process; 0: it does not run."""
        return self._find(node, "elasticrl.cli.main daemon")

    def agent(self, node: str) -> int:
        """Of the agent's."""
        return self._find(node, "-m elasticrl.agent ")

    def vault(self, node: str) -> int:
        """Of the vault's."""
        return self._find(node, "-m elasticrl.runtime.vault")

    def engine(self, node: str) -> int:
        """Of the rollout engine's."""
        return self._find(node, "-m elasticrl.ppo.rollout.process")

    def copying(self, node: str) -> set[Path]:
        """Files of this node's snapshots, in its neighbours' memory, that are not whole."""
        found: set[Path] = set()
        for name, box in self.lab.boxes.items():
            if box.on and name != node:
                found |= {path for path in self.vault_dir(name).glob(f"{node}+*.shard") if not is_sealed(path)}
        return found

    def vault_dir(self, node: str) -> Path:
        """Where a node's snapshots lie, and those that it keeps for others."""
        return self.lab.boxes[node].path(f"{VAULT_DIR}/{self.name}/{node}")

    def _find(self, node: str, words: str) -> int:
        found = [
            pid for pid in self.box(node).pids() if words in command_line(pid) and f"{self.name}" in command_line(pid)
        ]
        found = found or [pid for pid in self.box(node).pids() if words in command_line(pid)]
        found = [pid for pid in found if parent(pid) not in found]  # not its forks
        return found[0] if found else 0

    def worker(self, node: str, slot: int | None = None) -> int:
        """Of the process that wrote this node's newest line and still runs; of its worker in that slot, else the last."""
        inner = self.last(node, self.slot(slot)).get("pid", 0)
        return self.box(node).host_pid(int(inner)) if inner else 0

    def slot(self, asked: int | None) -> int:
        """Which of a node's workers is meant."""
        return self.slots - 1 if asked is None else asked

    def spare(self, node: str) -> int:
        """Of a process that the fork server made and that has no rank."""
        workers = {self.worker(node, slot) for slot in range(self.slots)}
        pids, agent = self.box(node).pids(), self.agent(node)
        servers = {pid for pid in pids if parent(pid) == agent and "resource_tracker" not in command_line(pid)}
        spares = [p for p in pids if parent(p) in servers and p not in workers and p not in servers]
        return spares[-1] if spares else 0

    def last(self, node: str, slot: int) -> dict[str, Any]:
        """The newest line of a node's worker in that slot."""
        return newest(self.history / f"{node}.jsonl", slot, self.slots)

    def order(self, node: str, **what: Any) -> Path:
        """Tell a node's worker what to do, and where; see chaos.live.told."""
        path = self.history / f"{node}.order"
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(what))
        fresh.replace(path)
        return path

    # ---- the end

    def alone(self, steps: int) -> Path:
        """The same job in one process, or one team, that nothing happens to; where it left its chronicle."""
        folder = self.folder / "alone"
        (folder / "saves").mkdir(parents=True)
        own = [
            f"job.steps={steps}", f"checkpoint.dir={folder / 'saves'}", f"vault.dir={folder / 'vault'}", "node.name=alone",
            "membership.min_nodes=1", "vault.copies=0", "node.interface=lo", f"checkpoint.every={max(steps, 1)}",
        ]  # fmt: skip
        from elasticrl.config import dumps

        command, env = [sys.executable, str(self.program), "--step-ms", "0"], {**os.environ, "OMP_NUM_THREADS": "1"}
        if self.team > 1:  # which is a node, with a store of its own
            own += [
                f"node.workers={self.team}", "membership.max_nodes=1", "store.embedded=true", "store.endpoints=[]",
                "job.args=[--step-ms, '0']",
                f"node.state_dir={folder / 'state'}", f"telemetry.log_dir={folder / 'logs'}",
            ]  # fmt: skip
            own.remove("node.name=alone")
            env["XDG_RUNTIME_DIR"] = str(folder)  # where `run` has its sockets
            command = [sys.executable, "-m", "elasticrl.cli.main", "run", str(self.config), *own]
        else:
            (folder / "config.json").write_text(dumps(load(self.config, own)))
            env["ELASTICRL_CONFIG"] = str(folder / "config.json")
        with (folder / "log").open("wb") as log:
            done = subprocess.run(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=120 + 2 * steps
            )
        if done.returncode:
            raise RuntimeError(f"the undisturbed run failed: {(folder / 'log').read_text()[-1000:]}")
        return folder / "saves" / self.name

    def processes(self) -> dict[str, list[str]]:
        """What runs in each box: command lines."""
        return {
            n: [f"{inner_pid(p)} {command_line(p)}" for p in box.pids()] for n, box in self.lab.boxes.items() if box.on
        }

    def kill_all(self) -> None:
        """End every process of the job, so that another one can begin."""
        for box in self.lab.boxes.values():
            if box.on:
                box.unfreeze()
                for pid in box.pids():
                    send(pid, signal.SIGKILL)
        for process in self.daemons.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(10.0)


def newest(history: Path, slot: int, slots: int) -> dict[str, Any]:
    """The newest line there of the worker in that slot; empty if there is none. All nodes have as many, so a rank says it."""
    try:
        with history.open("rb") as file:
            start = max(0, history.stat().st_size - LINE * slots)
            file.seek(start)
            lines = file.read().split(b"\n")[1 if start else 0 : -1]
        said = (dict(json.loads(line)) for line in reversed(lines))
        return next((line for line in said if line["rank"] % slots == slot), {})
    except (OSError, ValueError):
        return {}


def is_sealed(shard: Path) -> bool:
    """Does a file of a vault bear a seal? One that is gone is not on its way either."""
    try:
        with shard.open("rb") as file:
            file.seek(SEAL_AT)
            return any(file.read(HEADER_AT - SEAL_AT))
    except OSError:
        return True


def send(pid: int, number: int) -> bool:
    """Send a signal; was there somebody?"""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def gone(pid: int, within_s: float = 10.0) -> bool:
    """Has it ended within that time?"""
    deadline = time.monotonic() + within_s
    while alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True
