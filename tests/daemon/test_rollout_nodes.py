"""Nodes that only generate, under real daemons: they come, die and come back while the others train, to the same bits.

Two training nodes and two rollout nodes on loopback, one real etcd, PPO of a tiny model.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from chaos.live.local import Job
from chaos.patience import patience
from elasticrl.config import dumps, load
from elasticrl.ppo import tiny
from elasticrl.ppo.rollout import weights
from elasticrl.ppo.rollout.service import ENGINE_LOCK
from elasticrl.runtime.checkpoint.place import place
from elasticrl.runtime.checkpoint.shelf import listing
from elasticrl.runtime.chronicle import compare, read
from elasticrl.runtime.data.audit import audit
from elasticrl.runtime.vault.errors import DataError

STOPPED = 75
DRAIN_S = 60.0  # `recovery.drain`
PATIENCE_S = 200.0  # on a machine that is busy with other tests
TRAIN, GENERATE = ("n0", "n1"), ("r0", "r1")

pytestmark = pytest.mark.timeout(900)


class RolloutJob(Job):
    """A job whose nodes r0, r1, ... only generate."""

    def overrides(self, node: str) -> list[str]:
        more = ["node.role=rollout"] if node.startswith("r") else []
        return [*super().overrides(node), *more]

    def rows(self, node: str = "n0") -> dict[str, dict[str, Any]]:
        """What `status` shows, by node."""
        return {row["node"]: row for row in self.ask(node, "status")["rows"]}

    def engine(self, node: str) -> int:
        """The pid of a node's engine, once it has begun."""
        lock = self.vault_of(node) / ENGINE_LOCK
        self.until(lambda: lock.stat().st_size > 0, PATIENCE_S, f"{node}'s engine")
        return int(lock.read_text())

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
            os.kill(int((self.vault_of(node) / ENGINE_LOCK).read_text()), signal.SIGKILL)

    def step(self) -> int:
        """The newest step that is sealed on all ranks."""
        try:
            return max(read(self.folder / "saves" / self.name).steps, default=0)
        except (OSError, DataError):
            return 0


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("model")
    chance = random.Random(5)
    lines = [f'{{"prompt": "{chance.randrange(10_000):04}"}}' for _ in range(2000)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    # So that faults of seconds cost few steps.
    (folder / "at_leisure.py").write_text(
        "import time\nfrom elasticrl.ppo import tasks\n\n\n"
        "def reverse(*args, **kwargs):\n    time.sleep(0.2)\n    return tasks.reverse(*args, **kwargs)\n"
    )
    return {
        "agent": {"env": {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}},
        "ppo": {
            "batch": 32, "mini_batch": 16, "micro_tokens": 40, "lr": 4e-3, "critic_lr": 4e-3, "kl": {"coef": 0.01},
        },
        "model": {"path": tiny.write(folder / "actor", hidden=32, layers=2)},
        "reward": {"function": "at_leisure:reverse"},
        "rollout": {"max_tokens": 4},
        "data": {"path": str(folder / "prompts.jsonl"), "max_prompt": 6},
    }  # fmt: skip


def alone(job: RolloutJob, folder: Path, steps: int) -> Path:
    """Where the same job left its chronicle in one process that generates for itself."""
    plain = "reward.function=elasticrl.ppo.tasks:reverse"
    own = [plain, f"job.steps={steps}", f"checkpoint.dir={folder}/saves", f"vault.dir={folder}/vault"]
    inside = ["rollout.engine=torch", "rollout.nodes=0", "membership.min_nodes=1", "vault.copies=0"]
    inside.append("placement.ref.where=train")
    (folder / "config.json").write_text(dumps(load(job.folder / "job.yaml", [*own, *inside])))
    env = {**os.environ, "ELASTICRL_CONFIG": str(folder / "config.json"), "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log:
        subprocess.run(
            [sys.executable, "-m", "elasticrl.ppo"], env=env, check=True, timeout=200, stdout=log, stderr=log
        )
    return folder / "saves" / job.name


@pytest.fixture(params=[pytest.param(0, marks=pytest.mark.slow), 2])
def job(conf: dict[str, Any], request: pytest.FixtureRequest) -> Iterator[RolloutJob]:
    more = {
        "job": {"program": "elasticrl.ppo", "args": [], "seed": 7},
        "lanes": {"count": 4, "digest": "full"},
        "rollout": {
            **conf["rollout"], "engine": "served", "nodes": 2, "health_timeout": "5s", "wait": "200s", "sync_timeout": "10s",
            "staleness": request.param,
        },
        "placement": {"ref": {"where": "rollout"}},  # what it says decides the bits, too
        "checkpoint": {"every": 1000},
    }  # fmt: skip
    with RolloutJob(etcd=1, conf={**conf, **more}) as job:
        yield job


def test_rollout_nodes_die_and_come_back_and_the_bits_are_those_of_an_engine_in_the_worker(
    job: RolloutJob, tmp_path: Path
):
    job.start(*GENERATE, *TRAIN)
    job.until(lambda: job.step() >= 2, PATIENCE_S, "the first steps")
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
    job.until(lambda: job.step() >= at + 2, PATIENCE_S, "steps with one engine")
    job.until(
        lambda: job.engine("r0") != first and job.rows()["r0"]["state"] == "rollout", PATIENCE_S, "r0's engine again"
    )

    job.kill_node("r1")
    at = job.step()
    job.until(lambda: job.step() >= at + 2, PATIENCE_S, "steps without r1")
    job.until(lambda: "r1" not in job.rows(), PATIENCE_S, "the end of r1's lease")
    assert any("1 of 2 rollout nodes" in text for text in job.ask("n0", "status")["advice"])
    job.start("r1")
    job.until(lambda: job.rows().get("r1", {}).get("state") == "rollout", PATIENCE_S, "r1 again")
    job.until(lambda: "weights" in job.rows()["r1"]["note"], PATIENCE_S, "weights at r1")

    writer = next(node for node, row in job.rows().items() if row["rank"] == 0)
    os.kill(job.worker(writer), signal.SIGKILL)  # who brings the weights: its successor brings them anew
    at = job.step()
    job.until(lambda: job.step() >= at + 3, PATIENCE_S, "steps with both again")
    assert job.ask("n0", "status")["generation"] == 2
    job.ask("n0", "stop")
    begun = time.monotonic()
    ended = list(job.daemons.values())
    job.until(lambda: all(daemon.poll() is not None for daemon in ended), PATIENCE_S, "the end of the job")
    assert time.monotonic() - begun < patience(DRAIN_S), (
        "the step that is under way gets its engines, and no worker is killed"
    )
    assert [daemon.returncode for daemon in ended] == [STOPPED] * 4
    job.check()
    for node in GENERATE:
        assert not (job.vault_of(node) / weights.FILE).exists(), "an engine's memory is given back with the job"
    run = job.folder / "saves" / job.name
    used = audit(run)
    assert used.ok, used.sentence
    same = compare(read(alone(job, tmp_path, used.steps)), read(run))
    assert same.ok, same.sentence
    assert same.steps >= used.steps
    saved, *_ = listing(place(str(run)))
    assert saved.version.step == job.step(), "it ends with a save of the last step"
