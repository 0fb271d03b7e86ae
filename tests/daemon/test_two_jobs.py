"""Two jobs on one host, with everything that two jobs can share: store, folders, names of nodes. Neither knows of the other."""

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from chaos.live.local import Job

NODES = ("n0", "n1")
SHARED = ("run", "vault", "saves", "state", "log")
pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def jobs() -> Iterator[tuple[Job, Job]]:
    with Job(name="one") as one, Job(name="two", conf={"store": {"endpoints": list(one.etcd.endpoints)}}) as two:
        for folder in SHARED:
            (one.folder / folder).mkdir(exist_ok=True)
            (two.folder / folder).symlink_to(one.folder / folder)
        for job in (one, two):
            job.start(*NODES)
        for job in (one, two):
            job.until_steps(2, within_s=90.0, count=3)
        yield one, two
        for job in (one, two):
            job.check()


def generation(job: Job) -> int:
    return int(job.ask("n0", "status")["generation"])


def test_what_happens_to_one_job_is_nothing_to_another_beside_it(jobs: tuple[Job, Job]) -> None:
    one, two = jobs
    held = {node: (two.worker(node), two.agent(node), two.vault(node)) for node in NODES}
    assert {job.name: sorted(job.records()) for job in jobs} == {"one": [*NODES], "two": [*NODES]}

    faults: list[Callable[[], None]] = [
        lambda: os.kill(one.worker("n1"), signal.SIGKILL),
        lambda: os.kill(one.vault("n1"), signal.SIGKILL),
        lambda: one.kill_daemon("n0"),
    ]
    for fault in faults:
        fault()
        two.until_steps(2, within_s=10.0, count=5)
    one.start("n0")
    one.until(lambda: len(one.events("n0", "daemon.started")) == 2, 30.0, "the new daemon of n0 is up")
    one.until_steps(2, within_s=60.0, count=3)
    one.until(lambda: generation(one) > 1, 10.0, "it has seen the plan")

    one.kill_node("n1")
    one.end("n0")
    two.until_steps(2, within_s=10.0, count=5)
    assert generation(two) == 1, two.reasons()
    assert {node: (two.worker(node), two.agent(node), two.vault(node)) for node in NODES} == held
