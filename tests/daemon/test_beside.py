"""A second daemon, or `elasticrl run`, of a node that runs on this machine: it is refused, and the first does not notice."""

import os
import subprocess
import sys

import pytest

from chaos.live.local import Job

pytestmark = pytest.mark.timeout(150)
ALONE = {"membership": {"min_nodes": 1}, "vault": {"copies": 0}}


def test_a_second_one_of_a_name_is_refused_whatever_session_it_is_of() -> None:
    # Its sockets lay where no other session looks, so each ended the other's vault and took its name, again and again.
    with Job(name="one", conf=ALONE) as job:
        job.start("n0")
        job.until_steps(1, within_s=60.0, count=3)
        pid, before = job.daemons["n0"].pid, job.vault("n0")
        sockets, state = f"node.run_dir={job.folder}/other/run", f"node.state_dir={job.folder}/other/state"
        config, one = str(job.folder / "job.yaml"), f"runs here already (pid {pid}, {job.folder}/state/one/n0)"
        listens = f"n0 runs on this machine already: n0/1, heard at {job.records()['n0'].beat}. End that one first"
        daemon = ["daemon", "--foreground", "--config", config, "node.name=n0", sockets]
        runs = ["run", config]
        environ = {**os.environ, "XDG_RUNTIME_DIR": str(job.folder / "cron")}
        for words, code, said in (
            (daemon, 78, one),
            ([*daemon, state], 78, listens),
            (runs, 2, f"a daemon of job one runs on this machine already: n0, process {pid}. End it first"),
            ([*runs, state], 2, listens),
        ):
            command = [sys.executable, "-m", "elasticrl.cli.main", *words]
            again = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
            assert (again.returncode, said in again.stdout + again.stderr) == (code, True), again.stdout + again.stderr
        job.until_steps(1, within_s=30.0, count=5)
        assert job.ask("n0", "status")["generation"] == 1
        assert job.vault("n0") == before
        assert not job.ask_vault("n0", "status").get("leaving")
        job.check()
