"""A real trainer under daemons, and how it has to end."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from chaos.live.local import Job
from elasticrl.config import dumps, load
from elasticrl.runtime.chronicle import compare, read
from elasticrl.runtime.data.audit import audit

PROGRAM = Path(__file__).parents[1] / "runtime" / "run_job.py"


NODES = ("n0", "n1", "n2")


STOPPED = 75


def alone(job: Job, folder: Path, steps: int) -> Path:
    """The same job in one process that nothing happens to; where it left its chronicle."""
    own = [f"job.steps={steps}", f"checkpoint.dir={folder}", f"vault.dir={folder}/vault"]
    overrides = ["membership.min_nodes=1", "vault.copies=0", *own]
    tree = load(job.folder / "job.yaml", overrides)
    (folder / "config.json").write_text(dumps(tree))
    env = {**os.environ, "ELASTICRL_CONFIG": str(folder / "config.json"), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(PROGRAM), "--step-ms", "0"], env=env, check=True, timeout=120)
    return folder / job.name


def ends_as_if_undisturbed(job: Job, folder: Path, base: Callable[[Job, Path, int], Path] | None = None) -> None:
    """A job that was told to stop does, with each sample used once and the bits of one process that nothing happens to, or of
    what `base` says nothing has happened to.
    """
    ended = list(job.daemons.values())
    job.until(lambda: all(daemon.poll() is not None for daemon in ended), 60.0, "the end of the job")
    assert [daemon.returncode for daemon in ended] == [STOPPED] * len(ended)
    job.check()
    ours = job.folder / "saves" / job.name
    used = audit(ours)
    assert used.ok, used.sentence
    same = compare(read((base or alone)(job, folder, used.steps)), read(ours))
    assert same.ok, same.sentence
    assert same.steps == used.steps + 1
