"""Real ranks for the tests of stacks and recorders: they start, say where they are, and always end."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from chaos.patience import patience
from elasticrl.base.process import state

JOB = Path(__file__).with_name("diagnose_job.py")


@contextlib.contextmanager
def gang(folder: Path, *whats: str, within_s: float = 90.0) -> Iterator[dict[int, int]]:
    """rank -> pid, once all of them are about to be where they were sent."""
    processes = []
    for rank, what in enumerate(whats):
        with (folder / f"{rank}.err").open("w") as err:
            command = [sys.executable, str(JOB), str(folder), str(rank), str(len(whats)), what]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True))
    try:
        for rank, process in enumerate(processes):
            assert process.stdout is not None
            said = process.stdout.readline()  # a worker that dies closes its end, so this always returns
            assert said == "at\n", (folder / f"{rank}.err").read_text()
        yield {rank: process.pid for rank, process in enumerate(processes)}
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait(timeout=within_s)
            assert process.stdout is not None
            process.stdout.close()


def stop(pid: int) -> None:
    """SIGSTOP, and all of its threads stand: the kernel stops each one when it next looks, which may be after the call."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    until(
        lambda: all(state(int(thread.name)) == "T" for thread in threads.iterdir()), 20.0, f"process {pid} stands still"
    )


def until(true: Callable[[], bool], within_s: float, what: str | Callable[[], str]) -> None:
    """Wait for a condition, not for a time."""
    deadline = time.monotonic() + patience(within_s)
    while not true():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what if isinstance(what, str) else what()}"
        time.sleep(0.0005)
