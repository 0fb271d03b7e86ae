"""An embedded etcd that several daemons of a machine share: it ends with the last of them."""

import json
import os
import signal
from contextlib import suppress

import pytest

from chaos.live.local import Job
from chaos.live.proc import alive

pytestmark = pytest.mark.timeout(120)


def test_a_node_that_is_drained_leaves_the_store_to_the_others() -> None:
    # Found by a new user: the drain of one node took etcd away from a job of two, for good.
    conf = {"store": {"embedded": True, "endpoints": []}, "membership": {"min_nodes": 1}, "vault": {"copies": 0}}
    with Job(name="shared", conf=conf) as job:
        record = job.folder / "state" / job.name / "etcd" / "etcd.json"
        try:
            job.start("n0")
            job.until(record.exists, 30.0, "the first daemon's etcd")
            etcd = int(json.loads(record.read_text())["pid"])
            job.start("n1")
            job.until_steps(2, within_s=60.0, count=3)
            job.ask("n0", "drain")
            job.until(lambda: job.daemons["n0"].poll() is not None, 30.0, "the drained daemon has ended")
            assert job.daemons["n0"].returncode == 0
            assert alive(etcd)
            job.until_steps(1, within_s=30.0, count=20)
            os.kill(job.worker("n1"), signal.SIGKILL)  # what befalls it now is answered, which needs the store
            job.until_steps(1, within_s=30.0, count=20)
            assert len(job.events("n1", "verdict.found")) == 1
            job.ask("n1", "stop")
            job.until(lambda: not alive(etcd), 10.0, "the last one takes etcd along")
        finally:  # whose daemons hand over to the next ones, where the test has failed
            if record.exists():
                with suppress(ProcessLookupError):
                    os.kill(int(json.loads(record.read_text())["pid"]), signal.SIGKILL)
