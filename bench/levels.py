"""Seconds from kill -9 of a worker of a DDP script to the next step of all ranks, under elasticrl and under torchrun.

    python bench/levels.py [--trials 5] [--sides supervised,kept,torchrun-best]

Three one-worker nodes on loopback, gloo, steps of 50 ms. The script `tests/levels/ddp.py` saves each fifth step. The clock
stops when all three ranks have made a step. `kept` runs `tests/levels/kept.py`, which has no checkpoint. `torchrun-best`
has the best settings that we know (bench/recovery.py).
"""

import argparse
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.recovery import kill_tree, torchrun, torchrun_env
from elasticrl.store.embedded import free_ports
from tests.levels.scripts import HERE, NODES, Line, Running, lines_of

PATIENCE_S = 120.0
LOOK_S = 0.01
STEADY = 100  # steps of each rank before the next fault: some six seconds
STEPS = ("--steps", "100000")


class Torchrun:
    """Three torchrun agents, with the same script."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="elasticrl-torchrun-"))
        self.history, self.saves = self.folder / "steps", self.folder / "own"
        self.agents: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self.saves.mkdir()
        self.history.touch()
        port = free_ports()[0]
        script = [str(HERE / "ddp.py"), "--save", str(self.saves), "--history", str(self.history), *STEPS]
        for node in NODES:
            with (self.folder / f"{node}.log").open("ab") as log:
                command, env = torchrun(port, script, best=True), torchrun_env(node, best=True)
                agent = subprocess.Popen(
                    command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            self.agents.append(agent)
            listening(port)  # the first one hosts the rendezvous
        return self

    def __exit__(self, *exc: object) -> None:
        for agent in self.agents:
            kill_tree(agent.pid)
            agent.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def lines(self, after: float = 0.0) -> list[Line]:
        """As a running job's."""
        return lines_of(self.history, after)


def made(lines: Callable[[float], list[Line]], after: float, *, but: int = 0) -> float:
    """Wait until all three ranks have made a step since then, none of them in the process `but`; when."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        fresh = [line for line in lines(after) if line.world == len(NODES)]
        first = {line.rank: line for line in reversed(fresh) if line.pid != but}
        if len(first) == len(NODES) and len({line.pid for line in fresh}) >= len(NODES):
            return max(line.at for line in first.values())
        time.sleep(LOOK_S)
    raise TimeoutError(f"no step within {PATIENCE_S:g} s")


def steady(lines: Callable[[float], list[Line]]) -> None:
    """Wait until the gang has made some steps and no process imports any more: the next fault shall find what a job has in the
    middle of its life.
    """
    deadline, since = time.monotonic() + PATIENCE_S, made(lines, time.monotonic())
    while len(lines(since)) < STEADY * len(NODES):
        if time.monotonic() > deadline:
            raise TimeoutError(f"fewer than {STEADY} steps within {PATIENCE_S:g} s")
        time.sleep(LOOK_S)


def listening(port: int) -> None:
    """Wait until somebody takes connections there."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody listens at port {port} after {PATIENCE_S:g} s")
        time.sleep(LOOK_S)


def supervised(trials: int) -> list[float]:
    """Under elasticrl."""
    return under_elasticrl(trials, "ddp.py", "supervised", 0)


def kept(trials: int) -> list[float]:
    """With the state in memory, and a copy on the next node."""
    return under_elasticrl(trials, "kept.py", "kept", 1)


def under_elasticrl(trials: int, script: str, level: str, copies: int) -> list[float]:
    """Another node each time: three failures without a step in between speak against a node."""
    found = []
    conf = {"health": {"node_strikes": 99}, "vault": {"copies": copies}}
    with Running(script, *STEPS, level=level, conf=conf) as run:
        run.job.start(*NODES)
        run.trains(3)
        for number in range(trials):
            run.warm()
            steady(run.lines)  # meanwhile the spare imports what the script does
            at = run.hit(NODES[1 + number % 2])
            found.append(made(run.lines, at + 0.1) - at)
    return found


def stock(trials: int) -> list[float]:
    """Under torchrun."""
    found = []
    with Torchrun() as run:
        made(run.lines, time.monotonic())
        for _ in range(trials):
            steady(run.lines)
            pid = next(line.pid for line in reversed(run.lines()) if line.rank == 1)
            at = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            found.append(made(run.lines, at + 0.2, but=pid) - at)
    return found


SIDES = {"supervised": supervised, "kept": kept, "torchrun-best": stock}


def main() -> int:
    """Print a line for each side."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--trials", type=int, default=5)
    asked.add_argument("--sides", default=",".join(SIDES))
    args = asked.parse_args()
    for side in args.sides.split(","):
        took = SIDES[side](args.trials)
        spread = f"{min(took):.2f} to {max(took):.2f}"
        load = os.getloadavg()[0]
        print(
            f"{side:14} median {statistics.median(took):.2f} s of {len(took)} ({spread}), load {load:.1f}", flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
