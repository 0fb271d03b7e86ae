"""How a job ends: with its last checkpoint committed, on the disk as in the store."""

from pathlib import Path

from chaos.live.local import Job
from elasticrl.runtime.checkpoint.place import place
from elasticrl.runtime.checkpoint.shelf import listing

PROGRAM = Path(__file__).parents[1] / "runtime" / "run_job.py"
STEPS = 8


def ends(job: Job, within_s: float = 90.0) -> list[int | None]:
    """The exit codes of all daemons, which end by themselves."""
    daemons = list(job.daemons.values())
    job.until(lambda: all(daemon.poll() is not None for daemon in daemons), within_s, "the end of the job")
    return [daemon.returncode for daemon in daemons]


def test_a_job_that_ends_by_itself_leaves_its_last_checkpoint_committed():
    conf = {"job": {"program": str(PROGRAM), "seed": 7, "steps": STEPS}, "checkpoint": {"every": 100}}
    with Job(etcd=1, conf=conf, script_args=("--step-ms", "20")) as job:
        job.start("n0", "n1")
        assert ends(job) == [0, 0]
        found = listing(place(str(job.folder / "saves" / job.name)))
        assert [(entry.version.step, entry.committed) for entry in found] == [(STEPS, True)]
