"""What the daemon itself costs: start-up, processor and memory, without workers and with eight.

python bench/daemon.py [--seconds 20] [--starts 5] [--json]

The package is compiled first, as pip does when it installs one: a daemon that compiles itself starts twice as slowly.
"""

import argparse
import compileall
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.report import Watch, cpu_s, end_cleanly, judged, summary
from chaos.live.local import Job

ROOT = Path(__file__).parents[1]
GOALS = {"idle_core_share": 0.01, "eight_workers_core_share": 0.03, "memory_mb": 80.0, "start_s": 0.5}
START_LIMIT_S = 60.0


def memory_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def share(pid: int, seconds: float) -> float:
    used, begun = cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    return (cpu_s(pid) - used) / (time.monotonic() - begun)


def starts(job: Job, count: int) -> list[float]:
    """From the start of the process until its loop runs. It adopts an agent that is there, as after a restart."""
    found = []
    for _ in range(count):
        job.kill_daemon("n0", signal.SIGTERM)
        before = len(job.events("n0", "daemon.started"))
        begun = time.monotonic()
        job.start("n0")
        while len(job.events("n0", "daemon.started")) == before:
            if time.monotonic() > begun + START_LIMIT_S:
                raise TimeoutError(
                    f"the daemon did not start within {START_LIMIT_S:g} s; see the logs of its etcd and its own"
                )
            time.sleep(0.002)
        found.append(time.monotonic() - begun)
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    waiting = {"membership": {"min_nodes": 2}}
    with Job(name="idle", conf=waiting) as job:
        job.start("n0")
        job.until(lambda: job.agent_runs("n0"), 60.0, "the agent runs")
        time.sleep(5.0)
        pid = job.daemons["n0"].pid
        idle, memory = share(pid, options.seconds), memory_mb(pid)
        begun = starts(job, options.starts)
    eight = {"membership": {"min_nodes": 1}, "node": {"workers": 8}, "lanes": {"count": 32}, "vault": {"copies": 0}}
    with Job(name="eight", conf=eight) as job:
        job.start("n0")
        job.until_steps(8, within_s=120.0, count=3)
        time.sleep(3.0)
        busy = share(job.daemons["n0"].pid, options.seconds)
    return {"idle_core_share": idle, "eight_workers_core_share": busy, "memory_mb": memory, "start_s": summary(begun)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    end_cleanly()
    options = parser.parse_args()
    compileall.compile_dir(ROOT / "elasticrl", quiet=1)
    watch = Watch()
    found = measure(options)
    return judged("daemon", "the daemon", found, GOALS, watch, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
