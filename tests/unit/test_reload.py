"""SIGHUP: what a running daemon takes up of a changed file, what it leaves, and what it says of both."""

import io
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import CapturingLogger

from elasticrl.config import Tree, load, taken_up
from elasticrl.config.changes import when
from elasticrl.config.cluster import Job
from elasticrl.config.tree import values
from elasticrl.contract.events import Configured
from elasticrl.contract.settings import Settings
from elasticrl.daemon.history import History
from elasticrl.daemon.main import Daemon
from elasticrl.telemetry.log import set_up

OTHER = {
    "job": {"name": "b", "steps": 9},
    "membership": dict.fromkeys(("min_nodes", "max_nodes", "spares", "neighbours", "deputies"), 7),
    "health": {"node_strikes": 9, "straggler_z": 9.0, "sample": "9s"},
    "recovery": dict.fromkeys(("start", "reform", "replace", "restart", "reload", "probe", "drain"), "9s"),
    "timeouts": {"confirm": "9s", "dump": "9s", "slack": 9.0, "phase": {"rollout": "9s"}},
    "policy": {"dead_rank": "stop", "unknown": "report", "disk": "stop"},
    "vault": {"copies": 3},
    "comm": {"fallback": "gloo"},
}


class Reloaded:
    """A daemon over a file that is written anew, with all that it says."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "c.yaml"
        self.base = (
            "job: {name: j, program: x}\nstore: {embedded: true}\n"
            f"node: {{interface: lo, run_dir: {folder}/run, state_dir: {folder}/state}}\n"
            f"checkpoint: {{dir: {folder}/saves}}\n"
        )
        self.heard = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.heard.bind(str(folder / "notify"))
        self.heard.settimeout(5.0)
        self.said, self.posted = CapturingLogger(), []
        self.write()
        self.daemon = Daemon(
            load(self.file, (), {}), log=self.said, history=History(), reload=lambda: load(self.file, (), {})
        )
        joined: Any = SimpleNamespace(node=SimpleNamespace(post=self.posted.append))
        self.daemon._joined = joined

    def write(self, more: str = "") -> None:
        self.file.write_text(self.base + more)

    def reload(self, more: str) -> Any:
        """The daemon's line about this file."""
        self.write(more)
        self.daemon.reload()
        return self.said.calls[-1]

    @property
    def settings(self) -> Settings:
        """What the core was told last."""
        event = self.posted[-1]
        assert isinstance(event, Configured)
        return event.settings

    def states(self) -> list[str]:
        """What systemd has been told of a reload."""
        return [self.heard.recv(4096).decode().partition("\n")[0] for _ in range(2)]


@pytest.fixture
def it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reloaded]:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    made = Reloaded(tmp_path)
    yield made
    made.heard.close()


def test_a_refused_reload_is_said_as_one_and_systemd_sees_a_daemon_that_is_ready_again(it: Reloaded) -> None:
    line = it.reload("membership: {min_nodes: many}\n")
    assert line.args == ("reload.refused",)
    assert "membership.min_nodes" in line.kwargs["reason"]
    assert not it.posted
    assert it.states() == ["RELOADING=1", "READY=1"]


def test_what_is_changed_and_changed_back_is_taken_up_twice(it: Reloaded) -> None:
    there = it.reload("membership: {min_nodes: 3}\n")
    assert there.kwargs["changed"] == ["membership.min_nodes: 1 -> 3"]
    assert it.settings.membership.min_nodes == 3
    back = it.reload("")
    assert back.kwargs["changed"] == ["membership.min_nodes: 3 -> 1"]
    assert it.settings.membership.min_nodes == 1


def test_what_the_inquiry_and_the_log_go_by_changes_with_a_reload(it: Reloaded) -> None:
    it.reload("health: {sample: 3s}\ntimeouts: {dump: 4s}\nrecovery: {probe: 5s}\ntelemetry: {level: warning}\n")
    tree = it.daemon.inquiry.desk.tree
    assert (tree.health.sample_s, tree.timeouts.dump_s, tree.recovery.probe_s) == (3.0, 4.0, 5.0)
    assert it.daemon.tree.telemetry.level == "warning"


def test_a_level_that_changes_holds_for_loggers_that_are_there_already() -> None:
    level, screen = ["info"], io.StringIO()
    log = set_up(screen, pretty=False, level=lambda: level[0]).bind(job="j")
    log.info("daemon.reloaded", changed=[], ignored=[])
    level[0] = "error"
    log.info("daemon.reloaded", changed=[], ignored=[])
    log.info("reload.refused", reason="r")
    assert [json.loads(line)["event"] for line in screen.getvalue().splitlines()] == [
        "daemon.reloaded",
        "reload.refused",
    ]


def test_what_wants_a_restart_is_said_at_every_reload_until_there_is_one(it: Reloaded) -> None:
    slow = "lanes: {threads: 2}\n"
    for more in (slow, slow + "membership: {min_nodes: 3}\n", slow):
        assert it.reload(more).kwargs["ignored"] == ["lanes.threads needs a restart"]
    assert it.daemon.tree.lanes.threads == 1


def test_what_wants_a_restart_does_not_come_along_with_what_is_live(it: Reloaded) -> None:
    line = it.reload("membership: {min_nodes: 2, campaign_spread: 2s}\ncomm: {fallback: gloo}\nvault: {copies: 1}\n")
    assert line.kwargs["changed"] == ["membership.min_nodes: 1 -> 2"]
    assert line.kwargs["ignored"] == [
        f"{key} needs a restart" for key in ("membership.campaign_spread", "vault.copies", "comm.fallback")
    ]
    assert it.settings.membership.min_nodes == 2
    assert (it.settings.membership.campaign_spread_s, it.settings.copies, it.settings.fallback) == (0.5, 0, "none")


def test_what_would_not_hold_without_what_wants_a_restart_is_refused_whole(it: Reloaded) -> None:
    line = it.reload("lanes: {count: 16}\nmembership: {min_nodes: 12, max_nodes: 16}\n")
    assert line.args == ("reload.refused",)
    assert re.match(r"without what needs a restart \(lanes.count\) it would not hold: .*lanes", line.kwargs["reason"])
    assert it.daemon.tree.membership.min_nodes == 1
    assert not it.posted
    assert it.states() == ["RELOADING=1", "READY=1"]


def test_exactly_what_the_table_calls_live_is_taken_up() -> None:
    old, new = Tree(job=Job(name="a")), Tree.model_validate(OTHER)
    for key, value in values(taken_up(old, new)).items():
        assert value == values(new if when(key) == "live" else old)[key], key
    assert len({key for key in values(old) if values(old)[key] != values(new)[key] and when(key) == "live"}) > 10
