"""Workers that a signal is ending: seen while the kernel still frees their memory."""

import asyncio
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticrl.agent.led_agent import LedAgent
from elasticrl.agent.spec import Spec
from elasticrl.base.process import killed_by
from elasticrl.contract.beats import Snapshot
from elasticrl.contract.model import Work
from elasticrl.shell.notify import Notify

LARGE = "import time; a = bytearray(1 << 30); a[::4096] = b'x' * (1 << 18); print('there', flush=True); time.sleep(600)"


def test_a_large_process_is_seen_to_die_before_the_kernel_says_that_it_has() -> None:
    # Whoever looks may be put aside just then.
    assert any(seen_to_die() == signal.SIGKILL for _ in range(5))


def seen_to_die() -> int:
    process = subprocess.Popen([sys.executable, "-c", LARGE], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    assert killed_by(process.pid) == 0, "it lives"
    watch = os.pidfd_open(process.pid)
    poll = select.poll()
    poll.register(watch, select.POLLIN)
    process.kill()
    seen = 0
    while not poll.poll(0):
        seen = seen or killed_by(process.pid)
    process.wait()
    assert killed_by(process.pid) == 0, "it is gone"
    os.close(watch)
    process.stdout.close()
    return seen


class Worker:
    """A seated process of which this alone is known."""

    slot, rank, pid, number = 0, 0, 0, 1
    killed, sign, finished, dying, swept, closed = "", None, False, False, False, False
    log = Path("/nowhere")

    def beat(self) -> Snapshot:
        return Snapshot(step=12)

    def writes_elsewhere(self, _beat: Snapshot) -> bool:
        return False

    def sweep(self) -> None:
        self.swept = True


@pytest.mark.parametrize("script", [True, False])
def test_a_worker_that_a_signal_ends_has_failed_at_once_and_only_scripts_wait_for_its_ports(
    tmp_path: Path, script: bool
) -> None:
    spec = Spec(
        job="j", node="n0", program=("-m", "nothing"), log_dir=str(tmp_path / "log"), on_cards=False, script=script
    )
    agent: Any = LedAgent(spec, tmp_path, Notify(None))
    worker = Worker()
    agent._seated = {0: worker}

    class Dying:
        def pause_s(self, _running: list[Worker]) -> float:
            return 0.0

        def look(self, running: list[Worker]) -> list[tuple[Worker, int]]:
            return [(process, signal.SIGKILL) for process in running]

    async def scenario() -> None:
        looking = asyncio.create_task(agent._see_dying(Dying()))
        async with asyncio.timeout(10):
            while not worker.dying:  # noqa: ASYNC110 - what is tested tells nobody
                await asyncio.sleep(0)
        agent._turns.over.set()
        agent._turns.poke()
        await looking

    asyncio.run(scenario())
    assert worker.swept
    assert not agent._seated
    assert agent._ending == {worker}, "its end is still to be seen"
    report = agent._report_now()
    assert report.work is Work.FAILED
    assert report.exit.cause == "signal 9 (SIGKILL)"
    assert (report.exit.step, report.exit.own) == (12, False)
    assert agent._in_the_way() is script
