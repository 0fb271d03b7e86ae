"""What `rollout.staleness` gains: one PPO job with samples of 0, 1, 2 and 4 steps ago. Its bits stay whatever its engines do.

    python bench/staleness.py [--engines 1] [--steps 24] [--behind 0,1,2,4] [--chaos 2] [--seed 7] [--json]
    python bench/staleness.py --learning [--steps 30] [--behind 0,1,2,4] [--seeds 0,1,2] [--json]

One training node and `--engines` rollout nodes on loopback, one real etcd. A random model of 4 layers, 128 wide, GRPO with 32
samples a step, prompts of 16 tokens and answers of 48 at most.

step     seconds of a step, from the third to the last, and how many times those of staleness 0
chaos    as often as `--chaos` says, the job is done again while its engines are stopped, killed and started at random
bits     have all runs of one staleness the same digests?
once     was each sample used once in each epoch?

With `--learning` it is what staleness costs instead: the demonstration's job (`elasticrl demo`) in one process, with
`ppo.importance_limit` 2 where samples are old. Which weights generate a sample is the same whoever generates it, so the rewards
are those of any engine.

reward   the mean of the last ten steps: the median of the seeds, and all of them
half     the first step of which the reward, as a mean of five steps, is at least 0.5: the median of the seeds
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.live.local import Job
from elasticrl.cli import demo
from elasticrl.ppo import tiny
from elasticrl.ppo.rollout.service import ENGINE_LOCK
from elasticrl.runtime.chronicle import compare, read
from elasticrl.runtime.data.audit import audit
from elasticrl.runtime.vault.errors import DataError

LIMIT_S = 900.0
LEARN_S = 3600.0  # for one job of `--learning`
FIRST = 3  # steps before it: processes start, memory is found


class Rollouts(Job):
    """A job whose nodes r0, r1, ... only generate."""

    def overrides(self, node: str) -> list[str]:
        return [*super().overrides(node), *["node.role=rollout"] * node.startswith("r")]

    def engine(self, node: str) -> int:
        """The pid of a node's engine; 0: there is none."""
        with suppress(OSError, ValueError):
            return int((self.folder / "vault" / self.name / f"{node}.engine" / ENGINE_LOCK).read_text())
        return 0

    def end(self, node: str) -> None:
        if not node.startswith("r"):
            super().end(node)
            return
        process, engine = self.daemons.pop(node), self.engine(node)
        process.kill()
        process.wait(10.0)
        if engine:
            with suppress(ProcessLookupError):
                os.kill(engine, signal.SIGKILL)

    @property
    def step(self) -> int:
        """The newest that is sealed."""
        try:
            return max(read(self.folder / "saves" / self.name).steps, default=-1)
        except (OSError, DataError):
            return -1


@dataclass(frozen=True, kw_only=True)
class Run:
    """One job. Example: Run(behind=1, chaos=0, step_s=1.2, faults=0, once=True)"""

    behind: int
    chaos: int  # which disturbed run; 0: undisturbed
    step_s: float
    faults: int
    once: bool


def conf(folder: Path, behind: int, engines: int, steps: int) -> dict[str, Any]:
    """The job."""
    return {
        "job": {"program": "elasticrl.ppo", "args": [], "seed": 7, "steps": steps},
        "membership": {"min_nodes": 1, "max_nodes": 1},
        "lanes": {"count": 4, "digest": "full"},
        "model": {"path": str(folder / "actor")},
        "ppo": {
            "algorithm": "grpo", "group": 4, "batch": 32, "mini_batch": 32, "lr": 1e-3, "importance_limit": 2.0,
            "kl": {"where": "off"},
        },
        "data": {"path": str(folder / "prompts.jsonl"), "max_prompt": 16},
        "reward": {"function": "elasticrl.ppo.tasks:reverse"},
        "rollout": {
            "engine": "served", "nodes": engines, "max_tokens": 48, "staleness": behind, "health_timeout": "5s",
            "wait": "200s",
        },
        "vault": {"copies": 0},
        "checkpoint": {"every": 1000},
    }  # fmt: skip


def play(folder: Path, behind: int, args: argparse.Namespace, chaos: int, keep: Path) -> Run:
    """One job, to its end."""
    nodes = [f"r{i}" for i in range(args.engines)]
    chance, faults, resume = random.Random(f"{args.seed} {behind} {chaos}"), 0, dict[int, float]()
    with Rollouts(etcd=1, conf=conf(folder, behind, args.engines, args.steps)) as job:
        job.start(*nodes, "n0")
        began, due, deadline = 0.0, 0.0, time.monotonic() + LIMIT_S
        while (step := job.step) < args.steps - 1:
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError(f"staleness {behind}: step {step} after {LIMIT_S:g} s")
            began = began or (now if step >= FIRST else 0.0)
            due = due or (now + chance.uniform(0.5, 3.0) if began else 0.0)
            if chaos and due and now > due:
                faults, due = faults + 1, now + chance.uniform(1.0, 5.0)
                if pid := job.engine(chance.choice(nodes)):
                    with suppress(ProcessLookupError):
                        if chance.random() < 0.5:
                            os.kill(pid, signal.SIGKILL)
                        else:
                            os.kill(pid, signal.SIGSTOP)
                            resume[pid] = now + chance.uniform(0.2, 2.0)
            for pid in [pid for pid, at in resume.items() if now > at]:
                del resume[pid]
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            time.sleep(0.05)
        took = time.monotonic() - began
        (job.folder / "saves" / job.name).rename(keep)
    return Run(behind=behind, chaos=chaos, step_s=took / (args.steps - 1 - FIRST), faults=faults, once=audit(keep).ok)


@dataclass(frozen=True, kw_only=True)
class Learnt:
    """One job of `--learning`. Example: Learnt(behind=1, seed=0, rewards=[0.12, ...])"""

    behind: int
    seed: int
    rewards: list[float]

    @property
    def end(self) -> float:
        """The mean of the last ten steps."""
        return mean(self.rewards[-10:])

    @property
    def half(self) -> float:
        """The first step with at least half of the reward; infinity if it does not come to that."""
        means = {step: mean(self.rewards[step - 4 : step + 1]) for step in range(4, len(self.rewards))}
        return next((float(step) for step, reward in means.items() if reward >= 0.5), inf)


def learn(folder: Path, behind: int, seed: int, steps: int) -> Learnt:
    """The demonstration's job in one process, to its end."""
    own = folder / f"{behind}.{seed}"
    own.mkdir()
    (own / "job.yaml").write_text(demo.job("learning", folder, own / "vault", steps=steps, device="cpu"))
    settings = {
        "JOB__SEED": seed, "ROLLOUT__STALENESS": behind, "MEMBERSHIP__MIN_NODES": 1, "VAULT__COPIES": 0,
        "CHECKPOINT__DIR": own / "saves", "NODE__STATE_DIR": own / "state", "TELEMETRY__LOG_DIR": own / "log",
    } | ({"PPO__IMPORTANCE_LIMIT": 2.0} if behind else {})  # fmt: skip
    env = {f"ELASTICRL__{key}": str(value) for key, value in settings.items()}
    env |= {"ELASTICRL_HISTORY": str(own / "history.jsonl"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "elasticrl.ppo", str(own / "job.yaml")]
    with (own / "out").open("wb") as out:
        done = subprocess.run(command, env=os.environ | env, stdout=out, stderr=out, timeout=LEARN_S, check=False)
    if done.returncode:
        raise RuntimeError(
            f"staleness {behind}, seed {seed}: it ended with {done.returncode}: {(own / 'out').read_text()[-2000:]}"
        )
    told = [json.loads(line) for line in (own / "history.jsonl").read_text().splitlines()]
    rewards = {note["step"]: note["reward"] for note in told}
    return Learnt(behind=behind, seed=seed, rewards=[rewards[step] for step in range(steps)])


def learning(args: argparse.Namespace) -> None:
    """What staleness costs."""
    runs = list[Learnt]()
    with tempfile.TemporaryDirectory(prefix="learn-") as place:
        folder = Path(place)
        tiny.write(folder / "model", hidden=32, layers=2)
        chance = random.Random(5)
        lines = [
            json.dumps({"prompt": f"{chance.randrange(10**demo.DIGITS):0{demo.DIGITS}}"}) for _ in range(demo.PROMPTS)
        ]
        (folder / "prompts.jsonl").write_text("\n".join(lines))
        for behind in map(int, args.behind.split(",")):
            runs += [learn(folder, behind, seed, args.steps) for seed in map(int, args.seeds.split(","))]
            mine = [run for run in runs if run.behind == behind]
            if not args.json:
                ends = ", ".join(f"{run.end:.2f}" for run in mine)
                half = median(run.half for run in mine)
                print(
                    f"staleness {behind}: reward {median(run.end for run in mine):.2f} ({ends}), half {half:g}",
                    flush=True,
                )
    if args.json:
        print(json.dumps([asdict(run) for run in runs]))


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--learning", action="store_true")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--behind", default="0,1,2,4")
    parser.add_argument("--chaos", type=int, default=2)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.steps = args.steps or (30 if args.learning else 24)
    if args.learning:
        learning(args)
        return
    with tempfile.TemporaryDirectory(prefix="stale-") as place:
        folder, runs, alike = Path(place), list[Run](), dict[int, bool]()
        tiny.write(folder / "actor", hidden=128, layers=4)
        chance = random.Random(5)
        lines = [json.dumps({"prompt": f"{chance.randrange(10**8):08}"}) for _ in range(4000)]
        (folder / "prompts.jsonl").write_text("\n".join(lines))
        for behind in map(int, args.behind.split(",")):
            kept = [folder / f"{behind}.{chaos}" for chaos in range(args.chaos + 1)]
            for chaos, keep in enumerate(kept):
                runs.append(run := play(folder, behind, args, chaos, keep))
                if not args.json:
                    print(run, flush=True)
            alike[behind] = all(compare(read(kept[0]), read(other)).ok for other in kept[1:])
    first = runs[0].step_s
    if args.json:
        print(json.dumps({"runs": [asdict(run) for run in runs], "alike": alike}))
        return
    print(f"{'staleness':>9} {'s a step':>9} {'times':>6}  bits  once")
    for run in (run for run in runs if not run.chaos):
        mine = [one for one in runs if one.behind == run.behind]
        once = all(one.once for one in mine)
        print(f"{run.behind:9} {run.step_s:9.2f} {first / run.step_s:6.2f}  {alike[run.behind]!s:5} {once}")


if __name__ == "__main__":
    main()
