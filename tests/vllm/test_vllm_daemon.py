"""vLLM under real daemons: a job of two nodes, whose engines live in an environment of their own (`rollout.python`)."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from served_kit import pid_of, strike, struck, until

from chaos.live.local import Job
from elasticrl.config import dumps, load
from elasticrl.ppo import tiny
from elasticrl.ppo.rollout.service import ENGINE_LOCK
from elasticrl.runtime.chronicle import read
from elasticrl.runtime.data.audit import audit
from elasticrl.runtime.vault.errors import DataError

pytestmark = pytest.mark.timeout(900)
NODES = ("n0", "n1")
PROGRAM = Path(__file__).parents[1] / "ppo" / "engine_ends.py"
STEPS = 10
PATIENCE_S = 280.0


@pytest.fixture
def conf(tmp_path: Path) -> dict[str, Any]:
    chance = random.Random(5)
    lines = [f'{{"prompt": "{chance.randrange(10_000):04}"}}' for _ in range(500)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    vllm = {"gpu_memory_utilization": 0.05, "kv_cache": "8MiB", "max_num_seqs": 64}
    return {
        "job": {"program": str(PROGRAM), "args": [], "seed": 7, "steps": STEPS},
        "agent": {"env": {"ENGINE_ENDS": str(tmp_path / "ends")}, "preload": ["elasticrl.ppo.__main__"]},
        "lanes": {"count": 4, "digest": "full"},
        "ppo": {
            "batch": 32, "mini_batch": 16, "micro_tokens": 40, "lr": 4e-3, "critic_lr": 4e-3, "kl": {"coef": 0.01},
            "importance_limit": 2.0,
        },
        "model": {"path": tiny.write(tmp_path / "actor", hidden=64, layers=2, heads=2)},
        "reward": {"function": "elasticrl.ppo.tasks:reverse"},
        "rollout": {
            "engine": "vllm", "python": os.environ["ELASTICRL_VLLM_PYTHON"], "vllm": vllm, "max_tokens": 4,
            "health_timeout": "60s", "start_timeout": "250s", "idle": "300s",
        },
        "data": {"path": str(tmp_path / "prompts.jsonl"), "max_prompt": 6},
        "checkpoint": {"every": 1000},
    }  # fmt: skip


def digests(run: Path) -> dict[int, str]:
    """Of the steps so far."""
    try:
        return dict(read(run).steps)
    except (OSError, DataError):
        return {}


def alone(job: Job, folder: Path) -> dict[int, str]:
    """The digests of the same job in one process, with an engine that nothing happens to."""
    folder.mkdir()
    own = [f"checkpoint.dir={folder}/saves", f"vault.dir={folder}/vault", "vault.copies=0", "membership.min_nodes=1"]
    (folder / "config.json").write_text(dumps(load(job.folder / "job.yaml", own)))
    env = {**os.environ, "ELASTICRL_CONFIG": str(folder / "config.json"), "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log:
        command = [sys.executable, "-m", "elasticrl.ppo"]
        subprocess.run(command, env=env, check=True, timeout=400, stdout=log, stderr=log)
    return digests(folder / "saves" / job.name)


def test_a_job_of_daemons_comes_to_the_bits_of_one_process_through_the_deaths_of_both_engines_and_a_worker(
    conf: dict[str, Any], tmp_path: Path
):
    """One engine dies in rollout and the other in sync, which costs no worker and calls for no plan; then a worker dies."""
    (tmp_path / "ends").mkdir()
    strike(tmp_path, "n0", "rollout", 3)
    strike(tmp_path, "n1", "sync", 4)
    with Job(etcd=1, conf=conf) as job:
        run = job.folder / "saves" / job.name
        homes = {node: job.folder / "vault" / job.name / f"{node}.engine" for node in NODES}
        job.start(*NODES)
        locks = [home / ENGINE_LOCK for home in homes.values()]
        job.until(lambda: all(lock.exists() for lock in locks), PATIENCE_S, "the engines")
        engines = {node: pid_of(homes[node]) for node in NODES}
        workers = {node: job.worker(node) for node in NODES}
        assert not any(struck(tmp_path, node) for node in NODES), "they were to be known before"
        for node in NODES:
            job.until(lambda node=node: struck(tmp_path, node), PATIENCE_S, f"the end of {node}'s engine")
        job.until(lambda: len(digests(run)) > 5, PATIENCE_S, "steps with other engines")
        assert {node: job.worker(node) for node in NODES} == workers, "an engine's death cost a worker"
        assert not [node for node in NODES if pid_of(homes[node]) == engines[node]]
        second = pid_of(homes["n1"])
        os.kill(workers["n1"], signal.SIGKILL)
        daemons = list(job.daemons.values())
        job.until(lambda: all(daemon.poll() is not None for daemon in daemons), PATIENCE_S, "the end of the job")
        assert [daemon.returncode for daemon in daemons] == [0, 0]
        [fault] = [event for event in job.events("n0", "plan.adopted") if event["rung"] != "start"]
        assert fault["nodes"] == ["n1"]
        job.check()
        found, used = digests(run), audit(run)
        assert used.ok, used.sentence
        assert (used.steps, used.samples) == (STEPS, STEPS * 32)
        logs = [path.read_text() for path in (job.folder / "log" / job.name / "n1").rglob("rank_*.log")]
        found_it = [text for text in logs if f"rollout engine: process {second} (" in text and ", adopted" in text]
        assert found_it, "the worker that came for the dead one found its engine"
        for home in homes.values():
            until(lambda home=home: not home.exists(), "the end of the engines with the job, and of all that they had")
        assert found == alone(job, tmp_path / "alone")
