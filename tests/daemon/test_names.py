"""Two machines with one name, as after an image was cloned: one of them goes and says why, the other trains on."""

import shutil
import time
from collections.abc import Iterator

import pytest

from chaos.live.local import Job
from chaos.patience import patience

pytestmark = pytest.mark.timeout(200)
ALONE = {"membership": {"min_nodes": 1, "lease_ttl": "3s", "keepalive": "800ms"}, "vault": {"copies": 0}}
REFUSED = 78


@pytest.fixture
def machines() -> Iterator[tuple[Job, Job]]:
    """Two folders that know nothing of each other, and addresses of their own."""
    with Job(name="one", conf=ALONE) as here:
        there = {"store": {"endpoints": list(here.etcd.endpoints)}, "node": {"address": "127.0.0.2"}}
        with Job(name="one", conf={**ALONE, **there}) as other:
            yield here, other


def reason(job: Job) -> str:
    (refused,) = job.events("n0", "daemon.refused")
    return str(refused["reason"])


def test_a_machine_whose_name_is_taken_is_refused_and_the_other_does_not_notice(machines: tuple[Job, Job]) -> None:
    here, other = machines
    here.start("n0")
    here.until_steps(1, within_s=60.0, count=3)
    other.start("n0")
    assert other.daemons["n0"].wait(60.0) == REFUSED
    assert "n0/1, heard at 127.0.0.1:" in reason(other), "both addresses are of this machine"
    assert "node.name" in reason(other)
    here.until_steps(1, within_s=10.0, count=5)
    assert here.ask("n0", "status")["generation"] == 1
    assert not other.events("n0", "workers.changed")


class Moving(Job):
    """A job whose node's address can change."""

    address = "127.0.0.9"

    def overrides(self, node: str) -> list[str]:
        return [*super().overrides(node), f"node.address={self.address}"]


def _beats(job: Job) -> str:
    """Where n0 hears its neighbours, as its record says; "" while there is none."""
    record = job.records().get("n0")
    return record.beat if record else ""


def test_a_daemon_that_comes_back_at_another_address_is_not_its_own_rival() -> None:
    # Found by reading: after a VPN had come up, a restart of the daemon ended all workers, with 78 and a false reason.
    with Moving(name="one", conf=ALONE) as job:
        job.start("n0")
        job.until_steps(1, within_s=60.0, count=3)
        worker = job.worker("n0")
        job.kill_daemon("n0")
        job.address = "127.0.0.10"  # as a text it is the smaller one
        job.start("n0")
        job.until(lambda: len(job.events("n0", "daemon.started")) == 2, 30.0, "the next daemon")
        assert job.events("n0", "daemon.started")[-1]["adopted"]
        job.until_steps(1, within_s=10.0, count=5)
        job.until(lambda: _beats(job).startswith("127.0.0.10:"), 10.0, "its record has the new address")
        assert job.worker("n0") == worker, "it went on; at most its gang was told where its vault is now"
        job.check()


def test_of_two_that_begin_at_one_moment_one_goes_and_the_other_trains(machines: tuple[Job, Job]) -> None:
    for job in machines:
        job.start("n0")
    deadline = time.monotonic() + patience(60.0)
    while all(job.daemons["n0"].poll() is None for job in machines):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (gone,) = [job for job in machines if job.daemons["n0"].poll() is not None]
    (left,) = [job for job in machines if job is not gone]
    assert gone.daemons["n0"].returncode == REFUSED
    assert any(said in reason(gone) for said in ("another machine is n0: ", "n0 runs on this machine already: "))
    left.until_steps(1, within_s=60.0, count=5)
    assert not left.events("n0", "bug")


def test_the_name_of_a_machine_that_died_is_free_when_its_lease_has_run_out(machines: tuple[Job, Job]) -> None:
    here, other = machines
    here.start("n0")
    here.until_steps(1, within_s=60.0, count=3)
    here.kill_node("n0")
    other.start("n0")
    other.until(lambda: bool(other.events("n0", "daemon.started")), 30.0, "the other machine's daemon")
    assert other.events("n0", "daemon.started")[0]["member"] == "n0/2"
    assert not other.events("n0", "daemon.refused")
    other.until(lambda: other.agent_runs("n0"), 30.0, "its agent, which is then ended with it")


def test_a_node_that_lost_its_power_is_another_life_though_nothing_else_tells_of_the_last_one() -> None:
    """Found live: its lease had run out, and the newest plan did not name it."""
    with Job(name="one", conf={**ALONE, "membership": {**ALONE["membership"], "max_nodes": 2}}) as job:
        job.start("n0")
        job.start("n1")
        job.until_steps(2, within_s=patience(60.0), count=3)
        job.kill_node("n1")
        shutil.rmtree(job.folder / "run" / "one" / "n1")  # as a boot does
        job.until(lambda: "n1" not in job.records(), patience(30.0), "its lease has run out")
        job.until_steps(1, within_s=patience(60.0), count=3)
        job.start("n1")
        job.until(lambda: "n1" in job.records(), patience(60.0), "it is back")
        assert job.records()["n1"].member.incarnation == 2
