"""What samples of unlike lengths cost a trainer's step: passes cut to real lengths, passes of whole rows, and no padding.

    python bench/widths.py [--rounds 3] [--algorithms ppo,grpo] [--sides cut,whole,unpadded,trl] [--json]

A Qwen2 of 3 million random parameters, prompts and answers of at most 128 tokens, 32 samples in two lanes, one update,
float32, one thread, no daemon. Lengths are log-normal: the median is a quarter of the most, the tail reaches it. The answers
are given, so nothing is generated: measured is a step of log-probabilities, reference, values and update, in processor seconds
of a process of its own, which other processes on the machine disturb least. `cut` is the trainer as it is. `whole` puts each
sample through the models at the full width, in passes of as many tokens: as if lengths were not known. `unpadded` is a job of
as many samples that are all as long as these are on average, and cannot be longer. `trl` is TRL's GRPO trainer on the same
answers (bench/widths_trl.py).
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.report import Watch, dump, end_cleanly, show, some_of

ROOT = Path(__file__).parents[1]
PROMPT, ANSWER, BATCH, LANES, GROUP = 128, 128, 32, 2, 4
TOKENS = 2048  # of a pass
ALGORITHMS, SIDES = ("ppo", "grpo"), ("cut", "whole", "unpadded", "trl")
WARM_UP, STEPS = 1, 1


def lengths(most: int, count: int, seed: int) -> list[int]:
    """Log-normal: the median is a quarter of the most."""
    import random

    chance = random.Random(seed)
    return [min(max(int(chance.lognormvariate(0.0, 0.7) * most / 4), 1), most) for _ in range(count)]


def samples(algorithm: str, side: str) -> list[tuple[int, int]]:
    """(tokens of the prompt, of the answer) of each sample of a step."""
    group = GROUP if algorithm == "grpo" else 1
    prompts = [size for size in lengths(PROMPT, BATCH // group, 1) for _ in range(group)]
    answers = lengths(ANSWER, BATCH, 2)
    if side == "unpadded":
        return [(round(sum(prompts) / BATCH), round(sum(answers) / BATCH))] * BATCH
    return list(zip(prompts, answers, strict=True))


def one(job: dict[str, Any]) -> dict[str, float]:
    """In a process of its own: the processor seconds of a step, and what memory it came to."""
    import torch

    from bench.fixed_run import FixedRun
    from elasticrl.config.training import Kl, Model, Ppo
    from elasticrl.ppo import models, sizes
    from elasticrl.ppo.prompts import Prompt
    from elasticrl.ppo.rewards import Function
    from elasticrl.ppo.roles import Roles
    from elasticrl.ppo.rollout.engine import Samples, Sampling
    from elasticrl.ppo.rollout.inline import left_padded
    from elasticrl.ppo.trainer import Trainer
    from elasticrl.runtime.lanes import Deal
    from elasticrl.runtime.optim import AdamW

    class Whole(sizes.Sizes):
        def width(self, length: int) -> int:  # noqa: ARG002 - whatever it is: that is the side without cutting
            return self.sample

    class Silent:
        def decode(self, *_: Any, **__: Any) -> str:
            return ""

    torch.set_num_threads(1)
    algorithm, side, made = job["algorithm"], job["side"], job["samples"]
    group = GROUP if algorithm == "grpo" else 1
    prompt, answer = made[0] if side == "unpadded" else (PROMPT, ANSWER)
    ppo = Ppo(
        algorithm=algorithm, batch=BATCH, mini_batch=BATCH, micro_tokens=TOKENS, group=group, lr=1e-6, critic_lr=1e-6,
        kl=Kl(where="loss") if algorithm == "grpo" else Kl(),
    )  # fmt: skip
    share = models.shares(job["model"], Model(path=job["model"]), ppo, LANES, prompt=prompt, answer=answer)
    passes = sizes.of(ppo, prompt=prompt, answer=answer, device="cpu", share=share and side != "whole")
    if side == "whole":
        passes = Whole(tokens=passes.tokens, sample=passes.sample, answer=passes.answer)

    class Given:
        """An engine whose answers are there."""

        by_lane, version = True, 0
        sampling = Sampling(prompt_tokens=prompt, max_tokens=answer, rows=8, eos=(1,), pad=0)

        def publish(self, version: int) -> None:
            self.version = version

        def crowds(self, sizes: Sequence[int]) -> list[list[int]]:
            return [[at] for at in range(len(sizes))]

        def generate(self, requests: Sequence[Any], *, version: int) -> Samples:
            prompts, seen = left_padded([request.prompt for request in requests], prompt, 0)
            places = [(request.id + ".0").split(".")[:2] for request in requests]  # prompt, sample of it
            mask = torch.arange(answer) < torch.tensor([[made[int(p) * group + int(i)][1]] for p, i in places])
            tokens = torch.where(mask, 7, 0)
            return Samples(
                ids=tuple(request.id for request in requests), tokens=torch.cat([prompts, tokens], 1),
                attention=torch.cat([seen, mask], 1), mask=mask, logprobs=torch.where(mask, -8.0, 0.0),
                ended=torch.ones(len(requests), dtype=torch.bool), version=version,
            )  # fmt: skip

    def feed(_step: int, lane: int) -> list[tuple[str, Prompt]]:
        each = BATCH // LANES // group
        return [
            (str(place), Prompt(place=place, tokens=(5,) * made[place * group][0], text="", record={}))
            for place in range(lane * each, (lane + 1) * each)
        ]

    conf = Model(path=job["model"])
    actor, ref = models.actor(conf, job["model"], seed=7), models.reference(conf, job["model"])
    critic = models.critic(conf, job["model"]) if algorithm == "ppo" else None
    trained = {"actor": actor} | ({"critic": critic} if critic else {})
    rule = AdamW(lr=ppo.lr)
    run = FixedRun(
        {name: (model, lambda _name: rule) for name, model in trained.items()}, deal=Deal.contiguous(LANES, 1), seed=7,
        parts=sizes.parts_of(ppo, LANES, passes),
    )  # fmt: skip
    trainer = Trainer(
        run, Roles(model=conf, actor=actor, critic=critic, ref=ref, tokenizer=Silent()), ppo=ppo, lanes=LANES,
        steps=0, feed=feed, sizes=passes, engine=Given(), scorer=Function("ones", lambda answers: [1.0] * len(answers)),
    )  # fmt: skip
    took = []
    for step in range(WARM_UP + STEPS):
        begun = time.process_time()
        report = trainer.step(step)
        took.append(time.process_time() - begun)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"step_s": median(took[WARM_UP:]), "peak_mib": peak, "padding": report.metrics["padding"]}


@dataclass(slots=True)
class Found:
    """Of one side."""

    rounds: list[dict[str, float]]

    def of(self, name: str) -> float:
        return median(each[name] for each in self.rounds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS), type=some_of(ALGORITHMS))
    parser.add_argument("--sides", default=",".join(SIDES), type=some_of(SIDES))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    end_cleanly()
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(one(json.loads(options.one))))
        return 0
    watch = Watch()
    with tempfile.TemporaryDirectory(prefix="bench-widths-") as base:
        from elasticrl.ppo import tiny

        words = (*tiny.WORDS, *(f"w{number}" for number in range(4096 - len(tiny.WORDS))))
        model = tiny.write(Path(base) / "model", hidden=192, layers=4, heads=8, positions=PROMPT + ANSWER, words=words)
        pairs = [(a, s) for a in options.algorithms for s in options.sides if (a, s) != ("ppo", "trl")]
        found = {pair: Found([]) for pair in pairs}
        for number in range(options.rounds):
            for pair in pairs if number % 2 == 0 else pairs[::-1]:
                job = {"algorithm": pair[0], "side": pair[1], "model": model, "samples": samples(*pair), "folder": base}
                program = [str(ROOT / "bench/widths_trl.py")] if pair[1] == "trl" else [__file__, "--one"]
                done = subprocess.run(
                    [sys.executable, *program, json.dumps(job)],
                    capture_output=True,
                    text=True,
                    timeout=1800,
                    check=False,
                )
                if done.returncode != 0:
                    raise SystemExit(f"{pair} ended with {done.returncode}:\n{done.stderr[-3000:]}")
                found[pair].rounds.append(json.loads(done.stdout.splitlines()[-1]))
                print(f"round {number + 1}: {pair} {found[pair].rounds[-1]}", file=sys.stderr)
                watch.look()
    return told(found, watch, as_json=options.json)


def told(found: dict[tuple[str, str], Found], watch: Watch, *, as_json: bool) -> int:
    """Samples in a processor second, by what the same step takes cut."""
    rows, results = [], {}
    for (algorithm, side), one_side in found.items():
        least = found.get((algorithm, "cut"), one_side).of("step_s")
        rate, times = BATCH / one_side.of("step_s"), one_side.of("step_s") / least
        padding, peak = one_side.of("padding"), one_side.of("peak_mib")
        results[f"{algorithm} {side}"] = {
            "samples_per_cpu_s": rate, "times_cut": times, "padding": padding, "peak_mib": peak, "rounds": one_side.rounds,
        }  # fmt: skip
        rows.append((algorithm, side, f"{rate:.1f}", f"{times:.2f}x", f"{padding:.0%}", f"{peak:.0f} MiB"))
    if as_json:
        shape = {"prompt": PROMPT, "answer": ANSWER, "batch": BATCH, "lanes": LANES, "micro_tokens": TOKENS}
        dump({"bench": "widths", "results": results, "job": shape, "noise": watch.noise(), "machine": watch.machine()})
        return 0
    noise = watch.noise()
    show(
        f"a step of {BATCH} samples of at most {PROMPT} + {ANSWER} tokens, log-normal, passes of {TOKENS} tokens",
        ("algorithm", "side", "samples/processor s", "step by cut's", "padding", "peak memory"),
        rows,
        [noise] if noise else [],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
