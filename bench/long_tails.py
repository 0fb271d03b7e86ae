"""Lengths of prompts and answers as they are: many short ones, a few long ones.

The idea: a random model that really generates, and ends each answer with nearly the same probability at each token, so that
lengths are geometric: the median is a quarter of the most, and the tail reaches it. Its weights alone do it. One hidden
dimension is a constant, which all embeddings set, no layer writes to, and only the end token's row of the head reads. So any
trainer has the same distribution, and nothing of it is changed.
"""

from __future__ import annotations

import random
from math import exp, log

MEDIAN = 4  # the most, by the median


def lengths(most: int, count: int, seed: int) -> list[int]:
    """Log-normal, of prompts."""
    chance = random.Random(seed)
    return [min(max(int(chance.lognormvariate(0.0, 0.7) * most / MEDIAN), 1), most) for _ in range(count)]


def mean_answer(most: int) -> float:
    """Tokens that an answer of at most so many has on average, with the end token."""
    stay = 1 - hazard(most)
    return (1 - stay**most) / (1 - stay)


def hazard(most: int) -> float:
    """How probable it must be at each token that an answer ends.

    >>> round(hazard(128), 4), round(mean_answer(128), 1)
    (0.0214, 43.8)
    """
    return 1 - exp(-log(2) * MEDIAN / most)


def end_at_random(folder: str, most: int) -> None:
    """Rewrites a model of `elasticrl.ppo.tiny` so that its answers have such lengths."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    eos, goal = model.config.eos_token_id, hazard(most)
    with torch.no_grad():
        writers = [(layer.self_attn.o_proj, layer.mlp.down_proj) for layer in model.model.layers]
        for module in (module for pair in writers for module in pair):
            module.weight[0] = 0.0
        head = model.lm_head.weight
        head[:, 0] = 0.0
        head[eos] = 0.0
        tokens = torch.randint(0, 10, (16, most), generator=torch.Generator().manual_seed(3))
        # So large that what the last norm makes of it hardly depends on the rest: to 1 %, and the probability to 7 %.
        embeddings = model.model.embed_tokens.weight
        embeddings[:, 0] = 6 * embeddings[:, 1:].norm(dim=1).mean()
        hidden = model.model(tokens).last_hidden_state
        logits = hidden @ head.T
        logits[..., eos] = -torch.inf
        others, constant = logits.logsumexp(-1), hidden[..., 0]
        low, high = -50.0, 50.0
        for _ in range(60):
            head[eos, 0] = middle = (low + high) / 2
            low, high = (middle, high) if torch.sigmoid(middle * constant - others).mean() < goal else (low, middle)
    model.save_pretrained(folder)
