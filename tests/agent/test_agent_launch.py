"""What an agent does between choosing processes for a seat and handing them their ranks."""

import asyncio
import multiprocessing.connection
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.api import WorkerGroup

from elasticrl.agent.led_agent import LedAgent
from elasticrl.agent.pool import Process
from elasticrl.agent.spec import Spec
from elasticrl.base.process import started_at
from elasticrl.contract.beats import Page
from elasticrl.contract.model import Rung
from elasticrl.contract.orders import Place
from elasticrl.shell.notify import Notify


@pytest.fixture
def spares(tmp_path: Path) -> Iterator[list[Process]]:
    """Two processes that wait for a rank, as far as the agent can tell."""
    with ExitStack() as stack:
        made = []
        for number in range(2):
            child = stack.enter_context(subprocess.Popen(["sleep", "60"], start_new_session=True))
            stack.callback(child.kill)
            ours, theirs = map(stack.enter_context, socket.socketpair())
            del theirs
            made.append(
                Process(
                    number=number, pid=child.pid, pidfd=os.pidfd_open(child.pid), started=started_at(child.pid),
                    context=None, channel=ours, page=Page(tmp_path / f"page_{number}", create=True),  # type: ignore[arg-type]
                    error_file=tmp_path / "error", log=tmp_path / "log", first_log=tmp_path / "log", witness=tmp_path,
                    parent=os.getpid(), warm=True,
                )
            )  # fmt: skip
        yield made
        for process in made:
            os.close(process.pidfd)


class Unlucky(LedAgent):
    """One of the chosen dies before it has its rank."""

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        first = self._spares.processes[0]
        first.end("")
        assert multiprocessing.connection.wait([first.pidfd], 10)
        super()._rendezvous(worker_group)


def test_one_that_dies_between_being_chosen_and_seated_is_seated_and_found_dead(
    tmp_path: Path, spares: list[Process]
) -> None:
    spec = Spec(job="t", node="n0", program=("x.py",), slots=2, spares=0, log_dir=str(tmp_path / "logs"))
    gang = Place(
        generation=1, born=1, rank=0, slots=2, world=2, all_lanes=4, resume=0, rung=Rung.START, endpoint="127.0.0.1:1",
        nodes=("n0", "n0"),
    )  # fmt: skip

    async def launched() -> LedAgent:
        hand = Unlucky(spec, tmp_path, Notify({}))
        hand._spares.processes = list(spares)
        hand._ordered.place = hand._ordered.launching = gang
        await hand._launch(gang)
        return hand

    hand = asyncio.run(launched())
    assert list(hand._seated.values()) == spares
    assert [process.rank for process in spares] == [0, 1]
    assert spares[0].ended
    assert hand._spares.processes == []
