"""Samples and tokens a second of a whole PPO step: elasticrl beside TRL's PPO trainer, in one run, in turn.

    python bench/ppo.py [--rounds 3] [--steps 8] [--worlds 1,2] [--json] [--sides elasticrl,plain,trl] [--venv DIR]

A Qwen2 of about 10 million random parameters, prompts and answers of 32 tokens, batches of 32 samples that are trained on
twice, a reward model and a critic of the same size, float32, one thread in each worker, gloo. Both sides have the same models,
prompts, lengths, batch, micro-batch and number of updates, and whole processes that start anew in each round; the first steps
of each are warm-up. elasticrl's step has everything on: vaults with a copy at the neighbour, digests, the ledger.

`plain` is our trainer under torchrun alone, without seats, vaults and ledger: the runtime's own cost is the difference to it.
TRL (the newest that still has its PPO trainer) lives in an environment of its own, which is made at the first run.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.report import dump, machine, noisy, seconds, show, summary

ROOT = Path(__file__).parents[1]
TRL = ("torch==2.13.0", "transformers==5.19.0", "trl==1.12.0")
PROMPT, ANSWER, BATCH, MICRO, EPOCHS, LANES = 32, 32, 32, 8, 2, 2
WARM_UP = 2
PATIENCE_S = 900.0
SIDES = ("elasticrl", "plain", "trl")


@dataclass(slots=True)
class Found:
    """Of one side with one number of workers: seconds of each step, and by phase where it tells."""

    steps: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=dict)


def models(folder: Path) -> dict[str, Any]:
    """The job that both sides get."""
    from elasticrl.ppo import tiny

    words = (*tiny.WORDS, *(f"w{number}" for number in range(4096 - len(tiny.WORDS))))
    shape = {"hidden": 320, "layers": 8, "heads": 8, "positions": 2 * (PROMPT + ANSWER), "words": words}
    chance = random.Random(7)
    prompts = folder / "prompts.jsonl"
    rows = ["".join(chance.choice("0123456789") for _ in range(PROMPT)) for _ in range(4096)]
    prompts.write_text("\n".join(json.dumps({"prompt": row}) for row in rows))
    return {
        "folder": str(folder / "trl"),
        "model": tiny.write(folder / "actor", **shape),
        "reward": tiny.write(folder / "reward", **shape, seed=1, kind="reward"),
        "prompts": str(prompts),
        "batch": BATCH,
        "micro_batch": MICRO,
        "epochs": EPOCHS,
        "prompt": PROMPT,
        "max_tokens": ANSWER,
        "lanes": LANES,
        "lr": 1e-5,
    }


def elasticrl(job: Mapping[str, Any], folder: Path, world: int, steps: int) -> Found:
    """Workers on seats of their own, as an agent gives them, with vaults beside them; no daemon."""
    sys.path.insert(0, str(ROOT / "tests" / "runtime"))
    from gang_kit import Nodes

    conf = {
        "ppo": {
            "batch": job["batch"], "mini_batch": job["batch"], "micro_batch": job["micro_batch"],
            "epochs": job["epochs"], "lr": job["lr"], "critic_lr": job["lr"],
        },
        "model": {"path": job["model"], "critic_path": job["reward"]},
        "reward": {"model": job["reward"]},
        "rollout": {"max_tokens": job["max_tokens"]},
        "data": {"path": job["prompts"], "max_prompt": PROMPT, "chat_template": False},
        "telemetry": {"format": "json"},
        "lanes": {"digest": "sample"},
        "timeouts": {"collective": "15m"},
    }  # fmt: skip
    with Nodes(folder, steps=steps, lanes=LANES, program="elasticrl.ppo.__main__", conf=conf, copies=world - 1) as gang:
        gang.plan(*(f"n{number}" for number in range(world)))
        log = gang.workers["n0"].log
        gang.until_done(within_s=PATIENCE_S)
        told = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"ts"')]
    made = [event for event in told if event["event"] == "ppo.step"]
    # A step is told when the next one has sealed it, so what lies between two is one whole step.
    times = [datetime.fromisoformat(event["ts"]).timestamp() for event in made[:-1]]
    found = Found(steps=[after - before for before, after in pairwise(times)][WARM_UP - 1 :])
    for event in made[WARM_UP:]:
        for phase, took in event["seconds"].items():
            found.phases.setdefault(phase, []).append(took)
    return found


def script(name: str, python: Path, job: Mapping[str, Any], folder: Path, world: int, steps: int) -> Found:
    """A trainer that is a script of its own, under torchrun where there are several workers."""
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({**job, "steps": steps, "folder": str(folder / "out")}))
    command = [str(ROOT / "bench" / name), str(folder / "job.json")]
    many = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"] if world > 1 else []
    env = {name: value for name, value in os.environ.items() if not name.startswith("ELASTICRL")}
    env |= {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "ACCELERATE_USE_CPU": "true",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    done = subprocess.run(
        [str(python), *many, *command], env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"ended"')]
    if not lines:
        raise SystemExit(
            f"{name} did not train (exit {done.returncode}):\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
        )
    ended = json.loads(lines[-1])["ended"]
    return Found(steps=[after - before for before, after in pairwise(ended)][WARM_UP:])


def environment(folder: Path) -> Path:
    """TRL's own, with our torch; its Python."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"making {folder} with {', '.join(TRL)}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        quiet = ("--quiet", "--disable-pip-version-check", "--constraint", str(ROOT / "constraints.txt"))
        subprocess.run([str(python), "-m", "pip", "install", *quiet, *TRL], check=True)
    return python


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--worlds", default="1,2")
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-trl")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    sides, worlds = options.sides.split(","), [int(word) for word in options.worlds.split(",")]
    load = os.getloadavg()[0]
    found = {(side, world): Found() for side in sides for world in worlds}
    with tempfile.TemporaryDirectory(prefix="bench-ppo-") as base:
        python = environment(options.venv) if "trl" in sides else Path(sys.executable)
        scripts = {"plain": ("ppo_plain.py", Path(sys.executable)), "trl": ("ppo_trl.py", python)}
        job = models(Path(base))
        for number in range(options.rounds):
            for world in worlds:
                for side in sides:
                    folder = Path(base) / f"{number}-{side}-{world}"
                    one = (
                        elasticrl(job, folder, world, options.steps)
                        if side == "elasticrl"
                        else script(*scripts[side], job, folder, world, options.steps)
                    )
                    print(f"round {number + 1}: {side}, W {world}: {seconds(summary(one.steps))}", file=sys.stderr)
                    found[side, world].steps += one.steps
                    for phase, took in one.phases.items():
                        found[side, world].phases.setdefault(phase, []).extend(took)
    return told(found, sides, worlds, noisy(load, os.getloadavg()[0]), as_json=options.json)


def told(
    found: Mapping[tuple[str, int], Found], sides: Sequence[str], worlds: Sequence[int], noise: str, *, as_json: bool
) -> int:
    steps = {key: median(one.steps) for key, one in found.items()}
    ratios = {
        (side, world): steps["trl", world] / steps[side, world] for side, world in found if ("trl", world) in found
    }
    if as_json:
        results = {
            f"{side} W{world}": {
                "step_s": summary(one.steps),
                "samples_per_s": BATCH / steps[side, world],
                "tokens_per_s": BATCH * (PROMPT + ANSWER) / steps[side, world],
                "phases_s": {phase: summary(row) for phase, row in one.phases.items()},
            }
            for (side, world), one in found.items()
        }
        shape = {"batch": BATCH, "prompt": PROMPT, "answer": ANSWER, "micro_batch": MICRO, "epochs": EPOCHS}
        ratio = {f"{side} W{world}": value for (side, world), value in ratios.items()}
        dump({"bench": "ppo", "results": results, "ratio": ratio, "job": shape, "noise": noise, "machine": machine()})
        return 0
    rows = [
        (
            side,
            str(world),
            f"{BATCH / steps[side, world]:.2f}",
            f"{BATCH * (PROMPT + ANSWER) / steps[side, world]:.0f}",
            seconds(summary(found[side, world].steps)),
            f"{ratios[side, world]:.2f}x" if ratios else "",
        )
        for world in worlds
        for side in sides
    ]
    notes = [
        f"elasticrl, W {world}: "
        + ", ".join(f"{phase} {median(row) * 1000:.0f} ms" for phase, row in found["elasticrl", world].phases.items())
        for world in worlds
        if "elasticrl" in sides
    ]
    show(
        f"a whole PPO step: {BATCH} samples of {PROMPT} + {ANSWER} tokens, {EPOCHS} epochs",
        ("side", "W", "samples/s", "tokens/s", "step", "of TRL's speed"),
        rows,
        [*notes, *([noise] if noise else [])],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
