"""Jobs of TRL under real daemons: five workers are killed, and the bits are those of one process that nothing happens to."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import hf_job
import pytest

from chaos.live.local import Job
from elasticrl.config import dumps, load
from elasticrl.runtime.chronicle import read
from elasticrl.runtime.data.audit import audit

pytestmark = pytest.mark.timeout(600)
NODES = ("n0", "n1", "n2")
PROGRAM = Path(__file__).with_name("hf_job.py")
STEPS, KILLS, LANES = 24, 5, 4
PATIENCE_S = 240.0


CONF: dict[str, Any] = {
    "job": {"program": str(PROGRAM), "seed": 7},
    "membership": {"min_nodes": 3},
    "lanes": {"count": LANES, "digest": "full"},
    "recovery": {"reform": "60s"},
    "timeouts": {"floor": "20s"},
    "checkpoint": {"every": 1000},
}


def digests(run: Path) -> dict[int, str]:
    found = read(run)
    assert not found.findings, found.findings
    return dict(found.steps)


def alone(job: Job, folder: Path) -> dict[int, str]:
    """The digests of the same job in one process."""
    folder.mkdir()
    own = [f"checkpoint.dir={folder}/saves", f"vault.dir={folder}/vault", "vault.copies=0", "membership.min_nodes=1"]
    tree = load(job.folder / "job.yaml", own)
    (folder / "config.json").write_text(dumps(tree))
    args = list(tree.job.args)
    args[args.index("--history") + 1], args[args.index("--step-ms") + 1] = "", "0"
    env = {**os.environ, "ELASTICRL_CONFIG": str(folder / "config.json"), "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log:
        subprocess.run(
            [sys.executable, str(PROGRAM), *args], env=env, check=True, timeout=400, stdout=log, stderr=log, cwd=folder
        )
    return digests(folder / "saves" / job.name)


@pytest.mark.parametrize("kind", ["plain", "sft", "grpo"])
def test_five_killed_workers_cost_no_bit_and_no_sample(tmp_path: Path, kind: str):
    hf_job.model_of(tmp_path, kind)
    chance = random.Random(kind)
    args = (kind, "--folder", str(tmp_path), "--step-ms", "250", "--more", json.dumps({"max_steps": STEPS}))
    with Job(etcd=1, conf=CONF, script_args=args) as job:
        run = job.folder / "saves" / job.name
        job.start(*NODES)
        job.until_steps(3, within_s=PATIENCE_S)
        for _ in range(KILLS):
            node = chance.choice(NODES)
            before = {name: job.worker(name) for name in NODES}
            os.kill(before[node], signal.SIGKILL)
            job.until_steps(3, within_s=PATIENCE_S)
            now = {name: job.worker(name) for name in NODES}
            assert {name for name in NODES if now[name] != before[name]} == {node}, "survivors keep their processes"
        daemons = list(job.daemons.values())
        job.until(lambda: all(daemon.poll() is not None for daemon in daemons), PATIENCE_S, "the end of the job")
        assert [daemon.returncode for daemon in daemons] == [0, 0, 0]
        job.check()
        faults = [
            event for event in job.events("n0", "plan.adopted") if {"found", "failed"}.intersection(event["causes"])
        ]
        assert len(faults) >= KILLS
        found, used = digests(run), audit(run)
        assert used.ok, used.sentence
        per_lane = hf_job.ROWS // (hf_job.GROUP if kind == "grpo" else 1)
        assert (used.steps, used.samples) == (STEPS, STEPS * LANES * per_lane)
        assert found == alone(job, tmp_path / "alone")
