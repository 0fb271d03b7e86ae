"""Samples and tokens a second of a whole PPO or GRPO step: elasticrl beside TRL's trainers, in one run, in turn.

    python bench/ppo.py [--rounds 3] [--steps 10] [--worlds 1,2] [--json] [--sides elasticrl,plain,trl] [--venv DIR]
    python bench/ppo.py --lengths log-normal --algorithm grpo --sides elasticrl,trl --steps 4
    python bench/ppo.py --sides elasticrl,daemon-each,trl --rounds 8         (beside TRL, enough rounds to tell)
    python bench/ppo.py --sides daemon,daemon-each,plain --rounds 8          (what the daemon costs)

A Qwen2 of about 10 million random parameters, prompts and answers of 32 tokens, batches of 32 samples, float32, one thread in
each worker, gloo. PPO trains on each batch twice, with a reward model and a critic of the same size; GRPO once, in groups of 4,
with a reward function. Both sides have the same models, prompts, lengths, batch, micro-batch and number of updates, and whole
processes that start anew in each round; the first steps of each are warm-up. elasticrl's step has everything on: vaults with a
copy at the neighbour, digests, the ledger.

With `--lengths log-normal` prompts and answers have at most 128 tokens, and the median is a quarter of that: prompts are
log-normal, answers geometric, as the model ends them (bench/long_tails.py). Both sides generate by themselves; how long their
samples were is printed. Samples a processor second count all processes of a side (bench/processes.py), and its memory is the
peak of its largest process.

`plain` is our trainer under torchrun alone, without seats, vaults and ledger: the runtime's own cost is the difference to it.
`daemon` is the same under a real daemon, which like torchrun has all workers of its node, with its agent, vault and etcd beside
them; the state is kept every 8 steps. `daemon-each` keeps it after each, and its rollout, as is the default: copied and
summed by processors that have nothing to spare here. Each round gives the ratio of their mean step to that of `plain` in the
same round, which side goes first changes with the round, and shown are the ratios' median and its 95 % interval. With fewer
than six rounds there is none. bench/cost.py tells the same on a machine whose speed changes.
Beside TRL stand all of ours that run, each by the samples a second of the same round: `elasticrl` has its workers on nodes of
their own, and `daemon-each`, one node of all workers at the default keeping of state, is what TRL runs as.
TRL's PPO trainer (the newest TRL that still has one) lives in an environment of its own, which is made at the first run; its
GRPO trainer is that of the TRL which is installed.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import long_tails
from bench.processes import Processes
from bench.report import Watch, against, dump, end_cleanly, interval, seconds, show, some_of, summary

ROOT = Path(__file__).parents[1]
TRL = ("torch==2.13.0", "transformers==5.19.0", "trl==1.12.0")
BATCH, MICRO, LANES, GROUP = 32, 8, 2, 4  # MICRO: samples of a pass
MOST = {"equal": 32, "log-normal": 128}  # tokens of a prompt, and of an answer
EPOCHS = {"ppo": 2, "grpo": 1}
WARM_UP = 2
STEP_S = 300.0  # a step is not waited for any longer
HISTORY = "history"
SIDES = ("elasticrl", "daemon", "daemon-each", "plain", "trl")
DAEMONS = ("daemon", "daemon-each")
OURS = ("elasticrl", *DAEMONS)  # what is put beside TRL
SELDOM = {"every": 8, "inside": 0}  # steps between two states that are kept; none inside of a step
WAITS: Mapping[str, Mapping[str, str]] = {  # as by default
    "membership": {"lease_ttl": "10s", "keepalive": "4s"}, "timeouts": {"floor": "30s"}, "vault": {},
}  # fmt: skip
TIMES = 3.0  # TRL's samples a second: the goal
GOAL = 1.02  # a step under daemons, by one without


@dataclass(slots=True)
class Found:
    """Of one side with one number of workers: seconds of each step, and by phase where it tells."""

    steps: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)  # processor seconds of each step
    lengths: list[float] = field(default_factory=list)  # mean tokens of an answer
    peak: float = 0.0  # MiB of the largest process
    rounds: list[float] = field(default_factory=list)  # the mean of each: a state that is kept now and then counts too
    phases: dict[str, list[float]] = field(default_factory=dict)


def models(folder: Path, algorithm: str, lengths: str) -> dict[str, Any]:
    """The job that both sides get."""
    from elasticrl.ppo import tiny

    most = MOST[lengths]
    words = (*tiny.WORDS, *(f"w{number}" for number in range(4096 - len(tiny.WORDS))))
    shape = {"hidden": 320, "layers": 8, "heads": 8, "positions": 4 * most, "words": words}
    chance = random.Random(7)
    prompts = folder / "prompts.jsonl"
    sizes = [most] * 4096 if lengths == "equal" else long_tails.lengths(most, 4096, 7)
    rows = ["".join(chance.choice("0123456789") for _ in range(size)) for size in sizes]
    prompts.write_text("\n".join(json.dumps({"prompt": row}) for row in rows))
    actor = tiny.write(folder / "actor", **shape)
    if lengths != "equal":
        long_tails.end_at_random(actor, most)
    return {
        "folder": str(folder / "trl"),
        "algorithm": algorithm,
        "model": actor,
        "reward": tiny.write(folder / "reward", **shape, seed=1, kind="reward"),
        "prompts": str(prompts),
        "batch": BATCH,
        "micro_batch": MICRO,
        "epochs": EPOCHS[algorithm],
        "group": GROUP if algorithm == "grpo" else 1,
        "prompt": most,
        "mean_prompt": fmean(sizes),
        "max_tokens": most,
        "ends": lengths != "equal",
        "lanes": LANES,
        "lr": 1e-5,
    }


def configuration(job: Mapping[str, Any]) -> dict[str, Any]:
    """The job as our configuration says it."""
    conf: dict[str, Any] = {
        "ppo": {
            "batch": job["batch"], "mini_batch": job["batch"], "epochs": job["epochs"], "lr": job["lr"], "critic_lr": job["lr"],
            "micro_tokens": job["micro_batch"] * (job["prompt"] + job["max_tokens"]),
        },
        "model": {"path": job["model"]},
        "rollout": {"max_tokens": job["max_tokens"]},
        "data": {"path": job["prompts"], "max_prompt": job["prompt"], "chat_template": False},
        "lanes": {"digest": "sample"},
    }  # fmt: skip
    if job["algorithm"] == "ppo":
        conf["model"]["critic_path"] = job["reward"]
        return conf | {"reward": {"model": job["reward"]}}
    conf["ppo"] |= {"algorithm": "grpo", "group": job["group"], "kl": {"where": "loss", "coef": 0.05}}
    return conf | {"reward": {"function": "elasticrl.ppo.tasks:sort"}}


def steps_of(times: Sequence[float], seen: Processes) -> Found:
    """What lies between two of these times is a step; the first are warm-up."""
    times = times[WARM_UP - 1 :]
    return Found(
        steps=[after - before for before, after in pairwise(times)],
        cpu=[after - before for before, after in pairwise(map(seen.used, times))],
    )


def elasticrl(job: Mapping[str, Any], folder: Path, world: int, steps: int, seen: Processes) -> Found:
    """Workers on seats of their own, as an agent gives them, with vaults beside them; no daemon."""
    sys.path.insert(0, str(ROOT / "tests" / "runtime"))
    from gang_kit import Nodes

    conf = configuration(job) | {"telemetry": {"format": "json"}, "timeouts": {"collective": "15m"}}
    with Nodes(folder, steps=steps, lanes=LANES, program="elasticrl.ppo.__main__", conf=conf, copies=world - 1) as gang:
        gang.plan(*(f"n{number}" for number in range(world)))
        log = gang.workers["n0"].log
        gang.until_done(within_s=steps * STEP_S)
        told = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"ts"')]
    made = [event for event in told if event["event"] == "ppo.step"]
    # A step is told when the next one has sealed it, so what lies between two is one whole step.
    times = [datetime.fromisoformat(event["ts"]).timestamp() for event in made[:-1]]
    found = steps_of(times, seen)
    found.lengths = [event["metrics"]["length"] for event in made]
    for event in made[WARM_UP:]:
        for phase, took in event["seconds"].items():
            found.phases.setdefault(phase, []).append(took)
    return found


def made(folder: Path) -> list[dict[str, Any]]:
    """The steps of whatever runs there, as far as it has got."""
    history = folder / HISTORY
    lines = history.read_text().split("\n")[:-1] if history.exists() else []
    return [json.loads(line) for line in lines]


def history_of(folder: Path, seen: Processes) -> Found:
    """What it says of its steps."""
    found = steps_of([step["made"] for step in made(folder)], seen)
    found.lengths = [step["length"] for step in made(folder) if "length" in step]
    return found


def daemon(
    job: Mapping[str, Any],
    folder: Path,
    world: int,
    steps: int,
    seen: Processes,
    *,
    vault: Mapping[str, int] = SELDOM,
    waits: Mapping[str, Mapping[str, str]] = WAITS,
) -> Found:
    """A node's daemon, agent and vault, and an etcd."""
    from chaos.live.local import Job

    folder.mkdir(parents=True)
    history = folder / HISTORY
    conf = configuration(job)
    conf["lanes"]["count"] = LANES
    conf |= {
        "job": {"program": "elasticrl.ppo", "args": [], "seed": 7, "steps": steps},
        "agent": {"env": {"ELASTICRL_HISTORY": str(history)}},
        "node": {"workers": world},
        "membership": {"min_nodes": 1, "max_nodes": 1, **waits["membership"]},
        "timeouts": waits["timeouts"],
        "vault": {"copies": 0, **vault, **waits["vault"]},
        "checkpoint": {"every": 100_000},
    }
    with Job(etcd=1, name="bench", conf=conf) as live:
        live.start("n0")
        (ended,) = live.daemons.values()
        deadline = time.monotonic() + steps * STEP_S
        while ended.poll() is None and time.monotonic() < deadline:
            time.sleep(0.5)  # between looks, seldom: the processors are the job's
        if ended.returncode != 0:
            raise SystemExit(f"the daemon ended with {ended.returncode}: see {live.folder}")
    return history_of(folder, seen)


def script(
    name: str, python: Path, job: Mapping[str, Any], folder: Path, world: int, steps: int, seen: Processes
) -> Found:
    """A trainer that is a script of its own, under torchrun; TRL's alone where one worker is all."""
    folder.mkdir(parents=True)
    where = {"folder": str(folder / "out"), "history": str(folder / HISTORY)}
    (folder / "job.json").write_text(json.dumps({**job, **where, "steps": steps}))
    command = [str(python), str(ROOT / "bench" / name), str(folder / "job.json")]
    if world > 1 or name == "ppo_plain.py":
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("ELASTICRL")}
    env |= {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "ACCELERATE_USE_CPU": "true",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=steps * STEP_S, check=False)
    if len(made(folder)) < steps:
        raise SystemExit(
            f"{name} did not train (exit {done.returncode}):\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
        )
    return history_of(folder, seen)


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
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--worlds", default="1,2")
    parser.add_argument("--algorithm", default="ppo", choices=("ppo", "grpo"))
    parser.add_argument("--lengths", default="equal", choices=("equal", "log-normal"))
    parser.add_argument("--sides", default=",".join(SIDES), type=some_of(SIDES))
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-trl")
    parser.add_argument("--json", action="store_true")
    end_cleanly()
    options = parser.parse_args(arguments)
    sides, worlds = options.sides, [int(word) for word in options.worlds.split(",")]
    watch = Watch()
    found = {(side, world): Found() for side in sides for world in worlds}
    with tempfile.TemporaryDirectory(prefix="bench-ppo-") as base:
        trl = ("grpo_trl.py", Path(sys.executable))
        if options.algorithm == "ppo" and "trl" in sides:
            trl = ("ppo_trl.py", environment(options.venv))
        scripts = {"plain": ("ppo_plain.py", Path(sys.executable)), "trl": trl}
        job = models(Path(base), options.algorithm, options.lengths)
        for number in range(options.rounds):
            for world in worlds:
                for side in sides if number % 2 == 0 else sides[::-1]:
                    folder = Path(base) / f"{number}-{side}-{world}"
                    ours = {"elasticrl": elasticrl, "daemon": daemon, "daemon-each": partial(daemon, vault={})}
                    run = ours[side] if side in ours else partial(script, *scripts[side])
                    with Processes() as seen:
                        one = run(job, folder, world, options.steps, seen)
                    told_of = f"{seconds(summary(one.steps))}, {fmean(one.cpu):.2f} processor s, {seen.largest:.0f} MiB"
                    print(f"round {number + 1}: {side}, W {world}: {told_of}", file=sys.stderr)
                    watch.look()
                    whole = found[side, world]
                    whole.steps += one.steps
                    whole.cpu.append(fmean(one.cpu))
                    whole.lengths += one.lengths
                    whole.peak = max(whole.peak, seen.largest)
                    whole.rounds.append(fmean(one.steps))
                    for phase, took in one.phases.items():
                        found[side, world].phases.setdefault(phase, []).extend(took)
    return told(found, sides, worlds, watch, job, as_json=options.json)


def pairs(found: Mapping[tuple[str, int], Found], world: int, side: str) -> dict[str, Any]:
    """A step under daemons by one without, round by round."""
    rows = [found[one, world].rounds for one in (side, "plain") if (one, world) in found]
    ratios = [ours / theirs for ours, theirs in zip(*rows, strict=True)] if len(rows) == 2 else []
    if not ratios:
        return {}
    between = interval(ratios)
    verdict = against(between, GOAL)
    return {"ratio": median(ratios), "ratio_95": between, "pairs": ratios, "goal": GOAL, "verdict": verdict}


def beside_trl(found: Mapping[tuple[str, int], Found], world: int, side: str) -> dict[str, Any]:
    """How many times our samples a second are TRL's, round by round: never fewer is demanded, three times is the goal."""
    both = [found[one, world] for one in ("trl", side) if (one, world) in found]
    if len(both) < 2:
        return {}
    ratios = [theirs / ours for theirs, ours in zip(both[0].rounds, both[1].rounds, strict=True)]
    cpu = [theirs / ours for theirs, ours in zip(both[0].cpu, both[1].cpu, strict=True)]
    between = interval(ratios)
    goals = {"never slower": 1.0, f"{TIMES:g} times its samples": TIMES}
    verdict = "; ".join(f"{name}: {against(between, goal, least=True)}" for name, goal in goals.items())
    return {
        "ratio": median(ratios), "ratio_95": between, "pairs": ratios, "verdict": verdict,
        "cpu": median(cpu) if cpu else None, "cpu_pairs": cpu,
    }  # fmt: skip


def told(
    found: Mapping[tuple[str, int], Found], sides: Sequence[str], worlds: Sequence[int], watch: Watch,
    job: Mapping[str, Any], *, as_json: bool,
) -> int:  # fmt: skip
    noise = watch.noise()
    steps = {key: median(one.steps) for key, one in found.items()}
    ratios = {
        (side, world): steps["trl", world] / steps[side, world] for side, world in found if ("trl", world) in found
    }
    answers = {key: fmean(one.lengths) if one.lengths else job["max_tokens"] for key, one in found.items()}
    tokens = {key: BATCH * (job["mean_prompt"] + answer) for key, answer in answers.items()}
    if as_json:
        results = {
            f"{side} W{world}": {
                "step_s": summary(one.steps),
                "samples_per_s": BATCH / steps[side, world],
                "tokens_per_s": tokens[side, world] / steps[side, world],
                "answer": answers[side, world],
                "cpu_s": summary(one.cpu),
                "peak_mib": one.peak,
                "phases_s": {phase: summary(row) for phase, row in one.phases.items()},
            }
            for (side, world), one in found.items()
        }
        names = ("algorithm", "batch", "prompt", "mean_prompt", "max_tokens", "micro_batch", "epochs", "group")
        shape = {name: job[name] for name in names}
        ratio = {f"{side} W{world}": value for (side, world), value in ratios.items()}
        cost = {f"{side} W{world}": pairs(found, world, side) for world in worlds for side in DAEMONS}
        dump(
            {"bench": "ppo", "results": results, "ratio": ratio, "daemon": cost, "job": shape, "noise": noise,
             "trl": {f"{side} W{world}": beside_trl(found, world, side) for world in worlds for side in OURS},
             "machine": watch.machine()}
        )  # fmt: skip
        return 0
    rows = [
        (
            side,
            str(world),
            f"{BATCH / steps[side, world]:.2f}",
            f"{tokens[side, world] / steps[side, world]:.0f}",
            seconds(summary(found[side, world].steps)),
            f"{BATCH / median(found[side, world].cpu):.2f}",
            f"{answers[side, world]:.1f}",
            f"{found[side, world].peak:.0f} MiB",
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
    for side, world in product(OURS, worlds):
        if beside := beside_trl(found, world, side):
            between = "95 % {:.2f}-{:.2f}, ".format(*beside["ratio_95"]) if beside["ratio_95"] else ""
            notes.append(
                f"{side} beside TRL, W {world}: {beside['ratio']:.2f} times its samples a second ({between}"
                f"{len(beside['pairs'])} pairs): {beside['verdict']}; {beside['cpu']:.2f} times its samples a processor second"
            )
    for side, world in product(DAEMONS, worlds):
        if cost := pairs(found, world, side):
            between = "95 % {:.3f}-{:.3f}, ".format(*cost["ratio_95"]) if cost["ratio_95"] else ""
            notes.append(
                f"{side} by plain, W {world}: {cost['ratio']:.3f} ({between}{len(cost['pairs'])} pairs); goal at most "
                f"{GOAL:.2f}: {cost['verdict']}"
            )
    show(
        f"a whole {job['algorithm'].upper()} step: {BATCH} samples of at most {job['prompt']} + {job['max_tokens']} tokens, "
        f"prompts of {job['mean_prompt']:.1f} on average, {job['epochs']} epochs",
        (
            "side",
            "W",
            "samples/s",
            "tokens/s",
            "step",
            "samples/processor s",
            "answer",
            "largest process",
            "of TRL's speed",
        ),
        rows,
        [*notes, *([noise] if noise else [])],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
