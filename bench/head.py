"""What log-probabilities by parts of a pass cost and save, at a vocabulary of users' size: memory and processor time.

    python bench/head.py [--tokens 1024,4096] [--rounds 3] [--json]
    python bench/head.py --entropy [--tokens 1024] [--rounds 5]

The head of a Qwen2 of 0.5 billion parameters: 896 wide, 151,936 words, under one layer. A pass of so many tokens, all of them
answers, forward and backward, in float32, one thread. `whole` has all its logits at once; `parts` is `ppo.logits_mib` at its
default. Each runs in a process of its own; its memory is the process's peak, less what it was before the pass.

With `--entropy`: what log-probabilities of given logits of 32,000 words cost with their entropies and without, in turns.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.report import Watch, dump, end_cleanly, show, summary

SIDES = ("whole", "parts")
HIDDEN, WORDS, FEWER = 896, 151_936, 32_000


def one(side: str, tokens: int) -> dict[str, float]:
    """In a process of its own."""
    import torch
    import transformers

    from elasticrl.config.training import Model, Ppo
    from elasticrl.ppo.batches import Block, take
    from elasticrl.ppo.roles import Roles
    from elasticrl.ppo.sizes import most_logits

    torch.set_num_threads(1)
    torch.manual_seed(0)
    actor = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=WORDS, hidden_size=HIDDEN, intermediate_size=4864, num_hidden_layers=1, num_attention_heads=14,
            num_key_value_heads=2, tie_word_embeddings=True,
        )
    )  # fmt: skip
    roles = Roles(model=Model(), actor=actor, most_logits=most_logits(Ppo()) if side == "parts" else 0)
    rows, answer = 4, tokens // 4
    words = torch.randint(WORDS, (rows, 1 + answer))
    seen = torch.ones_like(words, dtype=torch.bool)
    given = take(
        {"tokens": words, "attention": seen, "mask": seen[:, 1:]}, Block(torch.arange(rows), 1 + answer, answer)
    )
    for param in actor.parameters():
        param.grad = torch.zeros_like(param)  # which are there in any case
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    roles.said(actor, given, entropy=True).logprobs.sum().backward()
    took = time.process_time() - begun
    return {"seconds": took, "mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024}


def entropies(tokens: int, rounds: int) -> list[tuple[str, str, str]]:
    """Rows of a table: the passes without a gradient, and those with one."""
    import torch

    from elasticrl.ppo.losses import logprobs, with_entropy

    torch.set_num_threads(1)
    torch.manual_seed(0)
    logits, said = torch.randn(1, tokens, FEWER, requires_grad=True), torch.randint(FEWER, (1, tokens))
    found: dict[tuple[bool, bool], list[float]] = {}
    for _, trains, asked in product(range(rounds), (False, True), (True, False)):
        begun = time.process_time()
        with torch.set_grad_enabled(trains):
            made = with_entropy(logits, said)[0] if asked else logprobs(logits, said)
        if trains:
            made.sum().backward()  # type: ignore[no-untyped-call]
            logits.grad = None
        found.setdefault((trains, asked), []).append(time.process_time() - begun)
    cost = {case: f"{median(took) * 1000:.0f} ms" for case, took in found.items()}
    names = {False: "without a gradient", True: "forward and backward"}
    return [(names[trains], cost[trains, True], cost[trains, False]) for trains in names]


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1024,4096")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--entropy", action="store_true", help="what entropies cost")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    end_cleanly()
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one[0], int(options.one[1]))))
        return 0
    if options.entropy:
        tokens = int(options.tokens.split(",")[0])
        title = f"log-probabilities of {tokens:,} tokens, {FEWER:,} words, processor time"
        show(title, ("pass", "with entropies", "without"), entropies(tokens, options.rounds), [])
        return 0
    watch, results = Watch(), list[dict[str, Any]]()
    for tokens in options.tokens.split(","):
        found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for _ in range(options.rounds):
            for side in SIDES:
                command = [sys.executable, __file__, "--one", side, tokens]
                env = {**os.environ, "OMP_NUM_THREADS": "1"}
                done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
                found[side].append(json.loads(done.stdout.splitlines()[-1]))
        results += [
            {"tokens": int(tokens), "side": side} | {key: summary([it[key] for it in its]) for key in its[0]}
            for side, its in found.items()
        ]
    noise = watch.noise()
    if options.json:
        dump({"bench": "head", "results": results, "noise": noise, "machine": watch.machine()})
        return 0
    rows = [
        (f"{it['tokens']:,}", it["side"], f"{it['seconds']['median']:.1f} s", f"{it['mib']['median']:,.0f} MiB")
        for it in results
    ]
    title = f"log-probabilities of a pass, {WORDS:,} words, forward and backward"
    show(title, ("tokens", "side", "processor", "memory of the pass"), rows, [noise] if noise else [])
    return 0


if __name__ == "__main__":
    sys.exit(main())
