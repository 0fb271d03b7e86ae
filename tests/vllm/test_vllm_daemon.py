"""vLLM under real daemons: a job of two nodes, whose engines live in an environment of their own (`rollout.python`)."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from served_kit import gone, pid_of, until

from chaos.live.local import Job
from elasticrl.config import dumps, load
from elasticrl.ppo import tiny
from elasticrl.runtime.chronicle import read
from elasticrl.runtime.data.audit import audit
from elasticrl.runtime.vault.errors import DataError

pytestmark = pytest.mark.timeout(900)
NODES = ("n0", "n1")
STEPS = 10
PATIENCE_S = 280.0


@pytest.fixture
def conf(tmp_path: Path) -> dict[str, Any]:
    chance = random.Random(5)
    lines = [f'{{"prompt": "{chance.randrange(10_000):04}"}}' for _ in range(500)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    vllm = {"gpu_memory_utilization": 0.05, "kv_cache": "8MiB", "max_num_seqs": 64}
    return {
        "job": {"program": "elasticrl.ppo", "args": [], "seed": 7, "steps": STEPS},
        "lanes": {"count": 4, "digest": "full"},
        "ppo": {
            "batch": 32, "mini_batch": 16, "micro_batch": 4, "lr": 4e-3, "critic_lr": 4e-3, "kl": {"coef": 0.01},
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


def test_a_job_of_daemons_comes_to_the_bits_of_one_process_through_the_deaths_of_an_engine_and_a_worker(
    conf: dict[str, Any], tmp_path: Path
):
    with Job(etcd=1, conf=conf) as job:
        run = job.folder / "saves" / job.name
        homes = [job.folder / "vault" / job.name / f"{node}.engine" for node in NODES]
        job.start(*NODES)
        job.until(lambda: len(digests(run)) > 2, PATIENCE_S, "the first steps")
        engines = [pid_of(home) for home in homes]
        os.kill(engines[0], signal.SIGKILL)
        job.until(lambda: pid_of(homes[0]) != engines[0], PATIENCE_S, "another engine of n0")
        os.kill(job.worker("n1"), signal.SIGKILL)
        daemons = list(job.daemons.values())
        job.until(lambda: all(daemon.poll() is not None for daemon in daemons), PATIENCE_S, "the end of the job")
        assert [daemon.returncode for daemon in daemons] == [0, 0]
        [fault] = [event for event in job.events("n0", "plan.adopted") if "SIGKILL" in event["reason"]]
        assert "n1" in fault["reason"]
        found, used = digests(run), audit(run)
        assert used.ok, used.sentence
        assert (used.steps, used.samples) == (STEPS, STEPS * 32)
        for home in homes:
            until(lambda home=home: gone(pid_of(home)), "the end of the engines with the job")
        assert found == alone(job, tmp_path / "alone")
