"""Nodes that only generate, under real daemons: they come, die and come back while the others train, to the same bits.

Two training nodes and two rollout nodes on loopback, one real etcd, PPO of a tiny model.
"""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from chaos.live.local import Job
from elasticrl.config import dumps, load
from elasticrl.ppo import tiny
from elasticrl.ppo.rollout import weights
from elasticrl.ppo.rollout.service import ENGINE_LOCK
from elasticrl.runtime.chronicle import read
from elasticrl.runtime.data.audit import audit
from elasticrl.runtime.vault.errors import DataError

STOPPED = 75
TRAIN, GENERATE = ("n0", "n1"), ("r0", "r1")

pytestmark = pytest.mark.timeout(400)


class RolloutJob(Job):
    """A job whose nodes r0, r1, ... only generate."""

    def overrides(self, node: str) -> list[str]:
        more = ["node.role=rollout"] if node.startswith("r") else []
        return [*super().overrides(node), *more]

    def rows(self, node: str = "n0") -> dict[str, dict[str, Any]]:
        """What `status` shows, by node."""
        return {row["node"]: row for row in self.ask(node, "status")["rows"]}

    def engine(self, node: str) -> int:
        """The pid of a node's engine."""
        return int((self.vault_of(node) / ENGINE_LOCK).read_text())

    def vault_of(self, node: str) -> Path:
        """Where a node's engine is."""
        return self.folder / "vault" / self.name / f"{node}.engine"

    def keeper(self, node: str) -> int:
        """The pid of what sees to it: its daemon's only child."""
        pid = self.daemons[node].pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def kill_node(self, node: str) -> None:
        if not node.startswith("r"):
            super().kill_node(node)
            return
        pids = [self.keeper(node), self.engine(node)]
        self.daemons[node].kill()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.daemons[node].wait(10.0)

    def end(self, node: str) -> None:
        if not node.startswith("r"):
            super().end(node)
            return
        process = self.daemons.pop(node)
        process.kill()
        process.wait(10.0)
        with suppress(OSError, ValueError):
            os.kill(self.engine(node), signal.SIGKILL)

    def step(self) -> int:
        """The newest step that is sealed on all ranks."""
        try:
            return len(read(self.folder / "saves" / self.name).steps)
        except (OSError, DataError):
            return 0


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("model")
    chance = random.Random(5)
    lines = [f'{{"prompt": "{chance.randrange(10_000):04}"}}' for _ in range(2000)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return {
        "ppo": {
            "batch": 64, "mini_batch": 32, "micro_batch": 4, "lr": 4e-3, "critic_lr": 4e-3, "kl": {"coef": 0.01},
        },
        "model": {"path": tiny.write(folder / "actor", hidden=32, layers=2)},
        "reward": {"function": "elasticrl.ppo.tasks:reverse"},
        "rollout": {"max_tokens": 4},
        "data": {"path": str(folder / "prompts.jsonl"), "max_prompt": 6},
    }  # fmt: skip


def alone(job: RolloutJob, folder: Path, steps: int) -> dict[int, str]:
    """The digests of the same job in one process that generates for itself."""
    own = [f"job.steps={steps}", f"checkpoint.dir={folder}/saves", f"vault.dir={folder}/vault"]
    inside = ["rollout.engine=torch", "rollout.nodes=0", "membership.min_nodes=1", "vault.copies=0"]
    (folder / "config.json").write_text(dumps(load(job.folder / "job.yaml", [*own, *inside])))
    env = {**os.environ, "ELASTICRL_CONFIG": str(folder / "config.json"), "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log:
        subprocess.run([sys.executable, "-m", "elasticrl.ppo"], env=env, check=True, timeout=200, stdout=log, stderr=log)
    return dict(read(folder / "saves" / job.name).steps)


@pytest.fixture
def job(conf: dict[str, Any]) -> Iterator[RolloutJob]:
    more = {
        "job": {"program": "elasticrl.ppo", "args": [], "seed": 7},
        "lanes": {"count": 4, "digest": "full"},
        "rollout": {
            **conf["rollout"], "engine": "served", "nodes": 2, "health_timeout": "5s", "wait": "60s", "sync_timeout": "10s",
        },
        "checkpoint": {"every": 1000},
    }  # fmt: skip
    with RolloutJob(etcd=1, conf={**conf, **more}) as job:
        yield job


def test_rollout_nodes_die_and_come_back_and_the_bits_are_those_of_an_engine_in_the_worker(
    job: RolloutJob, tmp_path: Path
):
    job.start(*GENERATE, *TRAIN)
    job.until(lambda: job.step() >= 2, 120.0, "the first steps")
    rows = job.rows()
    assert {node: rows[node]["role"] for node in rows} == dict.fromkeys(TRAIN, "train") | dict.fromkeys(
        GENERATE, "rollout"
    )
    assert {rows[node]["rank"] for node in TRAIN} == {0, 1}
    assert {rows[node]["rank"] for node in GENERATE} == {None}
    assert job.leader() in TRAIN
    assert set(job.records()) == set(TRAIN), "who has no seat has no vote, and the core never hears of it"
    picture = job.ask("r0", "status")
    assert picture["known"] == 2

    first = job.engine("r0")
    os.kill(first, signal.SIGKILL)
    at = job.step()
    job.until(lambda: job.step() >= at + 2, 60.0, "steps with one engine")
    job.until(lambda: job.engine("r0") != first and job.rows()["r0"]["state"] == "rollout", 60.0, "r0's engine again")

    job.kill_node("r1")
    at = job.step()
    job.until(lambda: job.step() >= at + 2, 60.0, "steps without r1")
    job.until(lambda: "r1" not in job.rows(), 30.0, "the end of r1's lease")
    assert any("1 of 2 rollout nodes" in text for text in job.ask("n0", "status")["advice"])
    job.start("r1")
    job.until(lambda: job.rows().get("r1", {}).get("state") == "rollout", 60.0, "r1 again")
    job.until(lambda: "weights" in job.rows()["r1"]["note"], 60.0, "weights at r1")

    at = job.step()
    job.until(lambda: job.step() >= at + 2, 60.0, "steps with both again")
    job.ask("n0", "stop")
    ended = list(job.daemons.values())
    job.until(lambda: all(daemon.poll() is not None for daemon in ended), 120.0, "the end of the job")
    assert [daemon.returncode for daemon in ended] == [STOPPED] * 4
    job.check()
    for node in GENERATE:
        assert not (job.vault_of(node) / weights.FILE).exists(), "an engine's memory is given back with the job"
    run = job.folder / "saves" / job.name
    used = audit(run)
    assert used.ok, used.sentence
    ours = dict(read(run).steps)
    assert {step: ours[step] for step in range(used.steps)} == alone(job, tmp_path, used.steps)
