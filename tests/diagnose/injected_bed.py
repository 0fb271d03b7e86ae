"""Real nodes in a lab, whose job lives on while one fault after the other is done to it; and what its daemons say.

What is judged is what was written: each daemon's log, and the incidents beside it.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from chaos.live.box import Box
from chaos.live.lab import Lab
from chaos.live.labjob import LabJob, send
from chaos.live.net import Rule, between
from chaos.live.proc import alive
from chaos.patience import patience
from elasticrl.daemon.client import Unanswered
from elasticrl.diagnose import incident
from elasticrl.diagnose.incident import Incident

PROGRAM = Path(__file__).with_name("injected_job.py")
NODES = ("n0", "n1", "n2")
CONF: Mapping[str, Mapping[str, Any]] = {
    "membership": {
        "min_nodes": 2, "max_nodes": 3, "settle": "500ms", "lease_ttl": "5s", "keepalive": "1500ms", "suspect": "1200ms",
        "doubt": "500ms", "report": "500ms",
    },
    "timeouts": {"floor": "2s", "slack": 5, "confirm": "500ms", "phase": {"save": "12s", "update": "12s"}},
    "recovery": {"start": "90s", "reform": "15s", "replace": "30s", "restart": "45s", "reload": "60s", "probe": "8s"},
    "health": {"quarantine": "3s", "quarantine_max": "4s", "quarantine_share": 1.0, "sample": "1s"},
    "vault": {"copies": 1},
    "policy": {"desync": "restart", "config": "restart"},
    "telemetry": {"metrics_port": 0},
}  # fmt: skip


@dataclass(slots=True)
class Struck:
    """A fault that is in."""

    at: float  # time.time()
    node: str = ""
    rank: int = -1
    gang: int = 0  # its generation
    incidents: dict[str, int] = field(default_factory=dict)  # that each node had before
    lines: dict[str, int] = field(default_factory=dict)


class Bed:
    """The job."""

    def __init__(self, lab: Lab, conf: Mapping[str, Mapping[str, Any]] | None = None, name: str = "injected") -> None:
        merged: dict[str, dict[str, Any]] = {section: dict(values) for section, values in CONF.items()}
        for section, values in (conf or {}).items():
            merged.setdefault(section, {}).update(values)
        self.lab, self.nodes = lab, tuple(lab.boxes)
        self.orders = lab.folder / f"{name}.orders"
        self.orders.mkdir()
        merged["job"] = {"program": str(PROGRAM), "args": ["--folder", str(self.orders), "--step-ms", "60"]}
        self.live = LabJob(lab, name, conf=merged, save_every=1_000_000)

    def start(self) -> None:
        """All nodes, until they train."""
        for node in self.nodes:
            self.live.start(node)
        self.until_well(180.0)

    def stop(self) -> None:
        self.live.kill_all()

    def box(self, node: str) -> Box:
        return self.lab.boxes[node]

    def events(self, node: str) -> list[dict[str, Any]]:
        """What its daemons have logged. (The last line may not be whole yet.)"""
        log = self.live.log(node)
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")[:-1] if log.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{")]

    def incidents(self, node: str) -> list[Incident]:
        folder = incident.folder_of(self.live.folder / "state" / node, self.live.name, node)
        return incident.found([folder])[0]

    def steps(self, node: str) -> tuple[int, int, int, int, int]:
        """Sealed steps, generation, rank, world and pid of its worker, as it wrote them last."""
        try:
            step, generation, rank, world, pid = (self.orders / f"{node}.step").read_text().split()
        except (OSError, ValueError):
            return 0, 0, -1, 0, 0
        return int(step), int(generation), int(rank), int(world), int(pid)

    def worker(self, node: str) -> int:
        return self.box(node).host_pid(self.steps(node)[4])

    def rank(self, node: str) -> int:
        return self.steps(node)[2]

    def status(self) -> dict[str, Any]:
        for node in self.nodes:
            with suppress(Unanswered, OSError):
                return dict(self.live.ask(node, "status"))
        return {}

    def leader(self) -> str:
        return next((row["node"] for row in self.status().get("rows", ()) if row["leader"]), "n0")

    # ---- waiting

    def until(self, claim: Callable[[], object], within_s: float, what: str) -> None:
        deadline = time.monotonic() + patience(within_s)
        while not claim():
            assert time.monotonic() < deadline, f"{what}: not within {within_s:.0f} s; {self.lacks()}"
            time.sleep(0.05)

    def until_well(self, within_s: float = 90.0) -> None:
        """All three train, have made some steps together, have a spare process each, and nobody is kept out."""
        begun = {node: (self.orders / f"{node}.step").stat().st_mtime if (self.orders / f"{node}.step").exists() else 0.0
                 for node in self.nodes}  # fmt: skip
        first = {node: self.steps(node)[:2] for node in self.nodes}

        def well() -> bool:
            now = {node: self.steps(node) for node in self.nodes}
            same = len({(s[1], s[3]) for s in now.values()}) == 1 and now["n0"][3] == len(self.nodes)
            fresh = all((self.orders / f"{n}.step").stat().st_mtime > begun[n] for n in self.nodes) if same else False
            for n in self.nodes:  # some steps of one gang: budgets are learned from what it has done
                if now[n][1] != first[n][1]:
                    first[n] = now[n][:2]
            moved = fresh and all(now[n][0] >= first[n][0] + 12 for n in self.nodes)
            if not moved or {s[2] for s in now.values()} != set(range(len(self.nodes))):
                return False
            with suppress(Unanswered, OSError):
                return all(self.live.ask(node, "crew")["spares"] for node in self.nodes)
            return False

        self.until(well, within_s, "all train, with a spare process each")

    def lacks(self) -> str:
        status = self.status()
        return (
            f"{[self.steps(n) for n in self.nodes]} {status.get('state')} {status.get('reason')} {status.get('advice')}"
        )

    def check(self) -> None:
        for node in self.nodes:
            bugs = [line for line in self.events(node) if line["event"] == "bug"]
            assert not bugs, bugs[:2]

    # ---- doing

    def order(self, node: str, word: str, within_s: float = 20.0) -> None:
        """Its rank does this in its next step."""
        path = self.orders / f"{node}.order"
        fresh = path.with_suffix(".new")
        fresh.write_text(word)
        fresh.rename(path)
        self.until(lambda: not path.exists(), within_s, f"{node} takes {word!r}")

    @contextmanager
    def noisy(self, node: str) -> Iterator[None]:
        """An innocent one, that looks like the culprit."""
        flag, heard = self.orders / f"{node}.noise", self.orders / f"{node}.loud"
        heard.unlink(missing_ok=True)
        flag.touch()
        try:
            self.until(heard.exists, 20.0, f"{node} makes noise")
            yield
        finally:
            flag.unlink(missing_ok=True)

    def mark(self, node: str = "") -> Struck:
        """Just before a strike at this node."""
        return Struck(
            at=time.time(), node=node, rank=self.rank(node) if node else -1, gang=self.steps(node or "n0")[1],
            incidents={n: len(self.incidents(n)) for n in self.nodes}, lines={n: len(self.events(n)) for n in self.nodes},
        )  # fmt: skip

    def since(self, struck: Struck, *names: str) -> list[dict[str, Any]]:
        """What was logged since then, by anybody, in the order of time."""
        found = [
            line
            for n in self.nodes
            for line in self.events(n)[struck.lines[n] :]
            if not names or line["event"] in names
        ]
        return sorted(found, key=lambda line: str(line["at"]))

    def told(self, struck: Struck) -> list[Incident]:
        """The incidents since then."""
        return [each for node in self.nodes for each in self.incidents(node)[struck.incidents[node] :]]

    def kill(self, node: str, number: int = signal.SIGKILL) -> None:
        assert send(self.worker(node), number)

    def drop(self, *matches: str) -> Rule:
        return self.lab.net.drop(*matches)

    def heal(self, rule: Rule) -> None:
        self.lab.net.heal(rule)

    def between(self, node: str, way: str = "both") -> list[str]:
        """Matches for what passes between it and its peers; the store stays in reach."""
        return between([self.box(node)], [self.box(other) for other in self.nodes if other != node], way)

    def connections(self, a: str, b: str) -> list[str]:
        """Matches for the connections that the workers of two nodes have now, and for no later ones."""
        found = []
        here, there = self.box(a), self.box(b)
        for line in Path(f"/proc/{self.worker(a)}/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            (_, mine), (address, its) = (field.split(":") for field in fields[1:3])
            if fields[3] == "01" and address == bytes(reversed([*map(int, there.address.split("."))])).hex().upper():
                out, back = (
                    f"tcp sport {int(mine, 16)} tcp dport {int(its, 16)}",
                    f"tcp sport {int(its, 16)} tcp dport {int(mine, 16)}",
                )
                found += [
                    f"iifname {here.wire} oifname {there.wire} {out}",
                    f"iifname {there.wire} oifname {here.wire} {back}",
                ]
        return found

    def digests(self) -> dict[int, set[str]]:
        """Those that the ranks told for each step: one, if bits are bits."""
        found: dict[int, set[str]] = {}
        for path in self.orders.glob("*.digests"):
            for line in path.read_text().splitlines():
                step, _, digest = line.partition(" ")
                found.setdefault(int(step), set()).add(digest)
        return found

    def restart(self, node: str, *overrides: str) -> None:
        """The whole node, daemon and all."""
        pids = self.box(node).pids()
        daemon = self.live.daemon(node)
        for pid in (daemon, *(pid for pid in pids if pid != daemon)):
            if pid:
                send(pid, signal.SIGKILL)
        deadline = time.monotonic() + patience(20.0)
        while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.live.daemons[node].wait(20.0)
        self.live.start(node, *overrides)


def when(text: str) -> float:
    """A log line's time, as time.time() counts."""
    return datetime.fromisoformat(text).timestamp()


@contextmanager
def bed(conf: Mapping[str, Mapping[str, Any]] | None = None, name: str = "injected", nodes: int = 3) -> Iterator[Bed]:
    """It goes down whatever happens; with ELASTICRL_KEEP its folder stays."""
    with Lab(nodes, members=1) as lab:
        lab.keep = bool(os.environ.get("ELASTICRL_KEEP"))
        made = Bed(lab, conf, name)
        try:
            made.start()
            yield made
        except BaseException:
            lab.keep = True
            sys.stderr.write(f"everything is kept in {lab.folder}\n")
            raise
        finally:
            made.stop()
