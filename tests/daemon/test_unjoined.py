"""A program that is not there is refused; one that never asks for its rank fails, is said to, and ends the job at the limit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.live.local import Job

pytestmark = pytest.mark.timeout(150)
CRASH_LOOP, REFUSED = 70, 78
SOON = {"start": "4s", "reform": "4s", "replace": "4s", "restart": "4s", "reload": "4s"}
ENDED = "its program ended with exit code 0, and had never called elasticrl.runtime.join()"


@pytest.mark.parametrize(
    ("program", "cause", "limit"),
    [
        (
            "import time; time.sleep(600)",
            "the program had not called elasticrl.runtime.join() within recovery.start",
            2,
        ),
        ("print('done')", ENDED, 2),
        ("print('done')", ENDED, 1),
    ],
    ids=["it goes on", "it ends", "it ends, and one failure is the limit"],
)
def test_a_program_that_never_joins_is_said_to_and_ends_the_job(
    tmp_path: Path, program: str, cause: str, limit: int
) -> None:
    # It was started anew for ever; and one that ended with 0 was said to have made all 0 steps.
    script = tmp_path / "train.py"
    script.write_text(program)
    conf = {"job": {"program": str(script)}, "membership": {"min_nodes": 1}, "vault": {"copies": 0}}
    conf["recovery"] = SOON | {"no_progress_limit": limit}
    with Job(name="one", conf=conf) as job:
        job.start("n0")
        assert job.daemons["n0"].wait(100.0) == CRASH_LOOP
        assert "crash_loop" in job.events("n0", "plan.adopted")[-1]["causes"]
        told = [json.loads(file.read_text()) for file in (job.folder / "state").rglob("incidents/*.json")]
        verdicts = [each["verdict"] for each in told]
        assert {verdict["class"] for verdict in verdicts} == {"user_error"}
        assert all(f"n0: rank 0 did not join ({cause})" in f"n0: {verdict['cause']}" for verdict in verdicts)
        assert all("Call elasticrl.runtime.join()" in verdict["remedy"] for verdict in verdicts)
        job.check()


def test_a_program_that_is_not_there_is_refused_before_a_worker_is_started(tmp_path: Path) -> None:
    # Workers found it out: each ended as it started, and three of them ended the job.
    with Job(name="one", conf={"job": {"program": str(tmp_path / "train.py")}, "vault": {"copies": 0}}) as job:
        job.start("n0")
        assert job.daemons["n0"].wait(60.0) == REFUSED
        why = f"job.program: {tmp_path}/train.py is not here; name one that is: job.program=..."
        assert [line["reason"] for line in job.events("n0", "daemon.refused")] == [why]
        assert not job.events("n0", "worker.exited")
        command = [sys.executable, "-m", "elasticrl.cli.main", "config", "check", str(job.folder / "job.yaml")]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        assert why in said.splitlines()
