"""No sealed step is lost with one node, whatever of it dies first: its daemon, its vault, or both as its worker trains on."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from chaos.live.local import Job
from chaos.live.proc import command_line
from elasticrl.base.process import started_at
from tests.daemon.runtime_kit import NODES, PROGRAM, ends_as_if_undisturbed

CONF = {
    "job": {"program": str(PROGRAM), "seed": 7},
    "checkpoint": {"every": 20},
    "lanes": {"digest": "full"},
    "membership": {"lease_ttl": "8s", "keepalive": "2s"},
}


def trains(job: Job, *, foreground: bool) -> None:
    """Three nodes, past a commit, so that a loss would show as a step back."""
    job.start(*NODES, foreground=foreground)
    job.until_steps(3, within_s=90.0, count=3)
    job.until(lambda: max(line.step for line in job.sealed()) > 25, 120.0, "steps beyond a checkpoint")


def logs(job: Job) -> str:
    """What all workers have said."""
    return "\n".join(log.read_text() for log in job.folder.rglob("rank_*.log"))


def resumed(job: Job) -> dict[int, int]:
    """By generation the step that its workers went on from, as they say themselves."""
    told = re.findall(r"generation (\d+): rank \d+ of \d+, lanes .*, from step (\d+)", logs(job))
    return {int(generation): int(step) for generation, step in told}


def nothing_is_lost(job: Job, at: float) -> None:
    """The next gang goes on from the newest step that was told as sealed before that."""
    newest = max(line.step for line in job.sealed() if line.at < at)
    job.until_steps(2, after=at, within_s=60.0, count=3)
    (last, step), *_ = sorted(resumed(job).items(), reverse=True)
    assert last > 1
    assert step >= newest, f"generation {last} goes on from step {step}; {newest} was sealed"


@pytest.mark.parametrize(
    "vault", [pytest.param(False, id="alone", marks=pytest.mark.slow), pytest.param(True, id="with its vault")]
)
def test_a_foreground_daemon_that_is_killed_takes_all_of_its_node_along_and_no_sealed_step(
    vault: bool, tmp_path: Path
) -> None:
    with Job(etcd=1, conf=CONF, script_args=("--step-ms", "200")) as job:
        trains(job, foreground=True)
        worker, pid = job.worker("n1"), job.vault("n1")
        at = time.monotonic()
        if vault:
            os.kill(pid, signal.SIGKILL)
        job.kill_daemon("n1")
        nothing_is_lost(job, at)
        assert not started_at(pid)
        assert not command_line(worker)
        job.until(lambda: not job.agent_lives("n1"), 10.0, "the agent ends")
        job.daemons.pop("n1")
        job.ask("n0", "stop")
        ends_as_if_undisturbed(job, tmp_path)


def test_steps_that_are_made_without_a_vault_push_no_sealed_one_out_of_the_others(tmp_path: Path) -> None:
    with Job(etcd=1, conf=CONF, script_args=("--step-ms", "200")) as job:
        trains(job, foreground=False)
        at = time.monotonic()
        job.kill_daemon("n1")  # nobody starts it again, nor the vault; its agent answers for it
        os.kill(job.vault("n1"), signal.SIGKILL)
        nothing_is_lost(job, at)
        late = set(re.findall(r"step (\d+).0 has too few copies", logs(job)))
        assert len(late) > 3, "else nothing would have been pushed out"
        job.end("n1")
        job.ask("n0", "stop")
        ends_as_if_undisturbed(job, tmp_path)
