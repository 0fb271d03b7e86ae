"""Seconds from a fault to the next step of all ranks: elasticrl beside stock torchrun, in one run, in turn.

    python bench/recovery.py [--trials 10] [--json] [--sides elasticrl,torchrun,torchrun-best] [--faults worker,node,join]

Three one-worker nodes on loopback, 50 ms steps, gloo. `torchrun` is torch's elastic launcher as shipped; `torchrun-best` is the
fairest setting we know for it: the TCPStore not shared between restarts, last_call_timeout=1, keep-alive 1 s x 3.

worker  kill -9 of one worker                        -> the next step that three ranks make
node    kill -9 of everything of one node             -> the next step that the two survivors make
join    the node is started again                     -> the next step that three ranks make (from its agent's start)
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.report import dump, machine, noisy, seconds, show, summary
from chaos.live.local import Job, Late, Sealed, parse

STEP_MS = 50
NODES = ("n0", "n1", "n2")
PATIENCE_S = 60.0


class Elastic:
    """elasticrl, with a warm spare process on each node."""

    def __init__(self) -> None:
        self.job = Job(etcd=1, name="bench")

    def __enter__(self) -> Self:
        self.job.__enter__()
        self.job.start(*NODES)
        self.ready()
        return self

    def __exit__(self, *exc: object) -> None:
        self.job.__exit__(None, None, None)

    def ready(self) -> None:
        """Three ranks train, and every node has its spare again."""
        self.job.until_steps(3, within_s=120.0, count=5)
        self.job.until(lambda: all(spares(self.job, node) for node in NODES), 60.0, "a spare on every node")
        time.sleep(1.0)

    def worker(self) -> float:
        pid, at = self.job.worker("n1"), time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return self.job.until_steps(3, after=at + 0.03, within_s=PATIENCE_S) - at

    def node(self) -> float:
        at = time.monotonic()
        self.job.kill_node("n2")
        return self.job.until_steps(2, after=at, within_s=PATIENCE_S) - at

    def join(self) -> float:
        at = time.monotonic()
        self.job.start("n2")
        return self.job.until_steps(3, after=at, within_s=PATIENCE_S) - at

    def stages(self) -> list[dict[str, float]]:
        return [line["stages"] for node in NODES for line in self.job.events(node, "recovery.done")]


def spares(job: Job, node: str) -> bool:
    try:
        return bool(job.ask(node, "crew")["spares"])
    except Exception:  # noqa: BLE001 - the daemon is still starting
        return False


class Torchrun:
    """Three torchrun agents on loopback."""

    def __init__(self, best: bool) -> None:
        self.best = best
        self.folder = Path(tempfile.mkdtemp(prefix="elasticrl-torchrun-"))
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.port = free_port()

    def __enter__(self) -> Self:
        (self.folder / "history").touch()
        for node in NODES:
            self.start(node)
        self.ready()
        return self

    def __exit__(self, *exc: object) -> None:
        for agent in self.agents.values():
            kill_tree(agent.pid)
            agent.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, node: str) -> None:
        settings = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3" if self.best else ""
        env = {**os.environ, "NODE": node, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        if self.best:
            env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        host = ["--rdzv-conf", settings] if settings else []
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=1:3", "--nproc-per-node=1", "--rdzv-backend=c10d",
            f"--rdzv-endpoint=localhost:{self.port}", "--rdzv-id=bench", "--max-restarts=100", "--local-addr=localhost", *host,
            str(Path(__file__).with_name("torchrun_script.py")), str(self.folder), str(STEP_MS / 1000),
        ]  # fmt: skip
        with (self.folder / f"{node}.log").open("ab") as log:
            self.agents[node] = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        if node == NODES[0]:
            time.sleep(2.0)  # the first one hosts the rendezvous

    def lines(self) -> list[Sealed]:
        text = (self.folder / "history").read_text()
        return [parse(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def until_steps(self, world: int, after: float, within_s: float = PATIENCE_S) -> float:
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            seen: dict[int, dict[int, float]] = {}
            for line in self.lines():
                if line.at > after and line.world == world:
                    seen.setdefault(line.step, {})[line.rank] = line.at
            done = [max(ranks.values()) for ranks in seen.values() if len(ranks) == world]
            if done:
                return min(done)
            time.sleep(0.02)
        raise Late(f"{world} ranks made no step within {within_s} s")

    def ready(self) -> None:
        self.until_steps(3, time.monotonic(), 180.0)
        time.sleep(1.0)

    def pid(self, node: str) -> int:
        return [line.pid for line in self.lines() if line.node == node][-1]

    def victim(self) -> str:
        return next(
            node for node in reversed(NODES) if node != NODES[0]
        )  # n0 hosts the rendezvous: its death ends the job

    def worker(self) -> float:
        at = time.monotonic()
        os.kill(self.pid(self.victim()), signal.SIGKILL)
        return self.until_steps(3, at + 0.2) - at

    def node(self) -> float:
        node, at = self.victim(), time.monotonic()
        kill_tree(self.agents[node].pid)
        self.agents[node].wait()
        return self.until_steps(2, at) - at

    def join(self) -> float:
        at = time.monotonic()
        self.start(self.victim())
        return self.until_steps(3, at) - at

    def stages(self) -> list[dict[str, float]]:
        return []


def free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def kill_tree(pid: int) -> None:
    children = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
    for child in children:
        kill_tree(int(child))
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


SIDES: dict[str, Callable[[], Any]] = {
    "elasticrl": Elastic,
    "torchrun-best": lambda: Torchrun(best=True),
    "torchrun": lambda: Torchrun(best=False),
}
GOALS = {"worker": 2.0, "node": 3.0}


def trial(side: str, faults: list[str]) -> tuple[dict[str, float], list[dict[str, float]]]:
    """One fresh job, each fault once. What does not come back in time is missing, and ends the trial."""
    found: dict[str, float] = {}
    with SIDES[side]() as job:
        for fault in faults:
            try:
                found[fault] = getattr(job, fault)()
                if fault != "node":
                    job.ready()
            except (Late, OSError, IndexError) as error:
                print(f"  {side}: {fault}: {error}"[:300], file=sys.stderr)
                break
        return found, job.stages()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--sides", default="elasticrl,torchrun-best")
    parser.add_argument("--faults", default="worker,node,join")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sides, faults = options.sides.split(","), options.faults.split(",")
    load = os.getloadavg()[0]
    found: dict[str, dict[str, list[float]]] = {side: {fault: [] for fault in faults} for side in sides}
    stages: list[dict[str, float]] = []
    tried = dict.fromkeys(sides, 0)
    for number in range(options.trials):
        for side in sides:  # in turn, so that a slow minute of the machine meets all
            times, parts = trial(side, faults)
            tried[side] += 1
            stages += parts
            for fault, took_s in times.items():
                found[side][fault].append(took_s)
            print(
                f"trial {number + 1}: {side}: " + ", ".join(f"{f} {t:.3f} s" for f, t in times.items()), file=sys.stderr
            )
    noise = noisy(load, os.getloadavg()[0])
    results = {
        side: {fault: {**summary(times), "tried": tried[side]} for fault, times in by.items()}
        for side, by in found.items()
    }
    names = sorted({name for part in stages for name in part})
    by_stage = {name: summary([part[name] for part in stages if name in part]) for name in names}
    met = {
        fault: results["elasticrl"][fault].get("median", 1e9) <= goal
        for fault, goal in GOALS.items()
        if fault in faults and "elasticrl" in sides
    }
    if options.json:
        dump(
            {
                "bench": "recovery",
                "results": results,
                "stages": by_stage,
                "goals_s": GOALS,
                "met": met,
                "noise": noise,
                "machine": machine(),
            }
        )
    else:
        rows = [(side, *(seconds(results[side][fault]) + f" of {tried[side]}" for fault in faults)) for side in sides]
        notes = [f"stage {name}: {seconds(part)}" for name, part in by_stage.items()] + ([noise] if noise else [])
        show("seconds from the fault to the next step of all ranks", ("side", *faults), rows, notes)
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
