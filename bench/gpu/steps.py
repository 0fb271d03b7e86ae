"""Steps of PPO and GRPO of a Qwen2 with random weights: tokens a second, memory beside `elasticrl plan`, what the daemon costs,
and how long a snapshot holds up the training thread. TRL's GRPO beside it, where TRL is.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from bench.gpu.job import SIZES, configuration, write
from bench.gpu.say import ROOT, Say, begin

WARM_UP = 2  # steps
FOR_EVER = 100_000  # steps: a job that is at its end writes its state to a disk
SIDE_S = 100.0  # one side
THREADS = {"cuda": "8", "cpu": "1"}


def memory(say: Say) -> Path:
    """A folder that is no disk."""
    return Path(os.environ.get("ELASTICRL_BENCH_MEMORY", say.folder))


def made(history: Path) -> list[float]:
    """When each step was made."""
    lines = history.read_text(encoding="utf-8").splitlines() if history.exists() else []
    return [json.loads(line)["made"] for line in lines]


def step_s(history: Path) -> float:
    """What a step takes once it is warm."""
    times = made(history)
    took = [after - before for before, after in pairwise(times)][WARM_UP - 1 :]
    assert took, f"{len(times)} steps were made"
    return median(took)


def alone(say: Say, algorithm: str, conf: Mapping[str, Any], steps: int) -> tuple[float, dict[str, float], Path]:
    """Without a daemon: seconds of a step, what the process took, and its configuration."""
    folder = say.folder / algorithm
    folder.mkdir()
    config, out = folder / "job.yaml", folder / "out.json"
    plain = {section: dict(values) for section, values in conf.items()}
    plain |= {"job": {"name": "steps", "program": "elasticrl.ppo", "steps": FOR_EVER, "seed": 7}}
    plain["store"] = {"embedded": True}  # of a daemon, which there is none of
    plain["node"] |= {"name": "n0", "state_dir": str(folder / "state")}
    plain["vault"] |= {"dir": str(memory(say) / algorithm)}
    plain["checkpoint"] |= {"dir": str(folder / "saves")}
    config.write_text(yaml.safe_dump(plain), encoding="utf-8")
    env = {**os.environ, "ELASTICRL_HISTORY": str(folder / "history"), "OMP_NUM_THREADS": THREADS[say.device]}
    env |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    command = [sys.executable, "-m", "bench.gpu.alone", str(config), str(out), str(steps)]
    subprocess.run(command, env=env, cwd=ROOT, check=True, timeout=SIDE_S)
    return step_s(folder / "history"), json.loads(out.read_text(encoding="utf-8")), config


def under_a_daemon(say: Say, conf: Mapping[str, Any], steps: int) -> float:
    """Seconds of a step with daemon, agent, vault and an etcd beside it."""
    from chaos.live.local import Job

    history = say.folder / "history"
    plain = {**conf, "job": {"program": "elasticrl.ppo", "args": [], "seed": 7, "steps": FOR_EVER}}
    plain |= {"vault": {**conf["vault"], "dir": str(memory(say) / "daemon")}}
    plain |= {"agent": {"env": {"ELASTICRL_HISTORY": str(history)}}}
    plain |= {"timeouts": {"floor": "30s"}}
    with Job(etcd=1, name="gpu", conf=plain) as job:
        job.start("n0")
        job.until(lambda: len(made(history)) >= steps - 1, SIDE_S, "its steps")
    return step_s(history)


def planned(config: Path) -> int:
    """Bytes at the worst moment, as `elasticrl plan` has it."""
    command = [sys.executable, "-m", "elasticrl.cli.main", "plan", str(config), "--workers", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    return int(json.loads(done.stdout)["peak"])


def main(say: Say) -> None:
    size = SIZES[say.device]
    what = f"{size.name}, {size.dtype}, {size.batch} samples of {size.prompt} + {size.answer} tokens"
    no_card = f"{size.name} on a processor says nothing of a card"
    model, prompts = write(size, say.folder)
    ours: dict[str, float] = {}
    for algorithm in ("ppo", "grpo"):
        conf = configuration(size, model, prompts, algorithm=algorithm, device=say.device)
        with say.check(f"{algorithm}: steps without a daemon", on_card=no_card):
            ours[algorithm], took, config = alone(say, algorithm, conf, size.steps)
            say.figure(
                f"{algorithm}: tokens a second",
                size.tokens / ours[algorithm],
                "",
                f"a step {ours[algorithm]:.2f} s; {what}",
            )
            plan = planned(config)
            where = "on the card, " if say.card else "resident, all of the process; "
            say.figure(f"{algorithm}: memory", took["used"] / 1e9, "GB", f"{where}held {took['held'] / 1e9:.2f} GB")
            say.figure(
                f"{algorithm}: memory by `plan`", plan / 1e9, "GB", f"used were {took['used'] / plan:.2f} times that"
            )
            stall = took["stalled_s"] / size.steps
            share = 100 * stall / ours[algorithm]
            say.figure(f"{algorithm}: snapshots hold a step up", 1000 * stall, "ms", f"{share:.2f} % of a step")
    with say.check("ppo: steps under a daemon", on_card=no_card):
        daemon = under_a_daemon(
            say, configuration(size, model, prompts, algorithm="ppo", device=say.device), size.steps
        )
        say.figure("ppo: a step under a daemon by one without", daemon / ours["ppo"], "times", f"{daemon:.3f} s")
    if say.has("TRL's GRPO", "trl", "datasets", "accelerate"):
        with say.check("TRL's GRPO", on_card=no_card):
            history = say.folder / "trl"
            command = [sys.executable, "-m", "bench.gpu.trl_grpo", say.device, str(model), str(prompts), str(history)]
            env = {**os.environ, "OMP_NUM_THREADS": THREADS[say.device]}
            subprocess.run(command, env=env, cwd=ROOT, check=True, timeout=SIDE_S)
            took_s = step_s(history)
            times = took_s / ours["grpo"]
            said = f"a step {took_s:.2f} s, {times:.2f} times ours"
            say.figure("TRL's GRPO: tokens a second", size.tokens / took_s, "", said)


if __name__ == "__main__":
    begin(main)
