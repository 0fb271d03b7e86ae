"""The job that bench/gpu/steps.py and bench/gpu/trl_grpo.py train: a Qwen2 with random weights, on a card that of 0.5B."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GROUP = 4  # of GRPO: samples of a prompt
LANES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model's and a step's numbers. `shape` is Qwen2's configuration."""

    name: str
    shape: dict[str, Any]
    prompt: int
    answer: int
    batch: int  # samples of a step, and of an update
    micro_tokens: int
    steps: int
    dtype: str = "bfloat16"

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * (self.prompt + self.answer)


#: Qwen2-0.5B's own configuration.
HALF_B = {
    "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
SIZES = {
    "cuda": Size(name="Qwen2 0.5B", shape=HALF_B, prompt=64, answer=64, batch=32, micro_tokens=4096, steps=5),
    "cpu": Size(
        name="a tiny Qwen2", prompt=8, answer=8, batch=16, micro_tokens=64, steps=5,
        shape={
            "vocab_size": 512, "hidden_size": 56, "intermediate_size": 304, "num_hidden_layers": 2, "num_attention_heads": 14,
            "num_key_value_heads": 2, "tie_word_embeddings": True,
        },
    ),
}  # fmt: skip


def write(size: Size, folder: Path) -> tuple[Path, Path]:
    """The model and its prompts: two places."""
    import torch
    import transformers

    from elasticrl.ppo import tiny

    words = (*tiny.WORDS, *(f"w{number}" for number in range(size.shape["vocab_size"] - len(tiny.WORDS))))
    tokens = tiny.tokenizer(words)
    config = transformers.Qwen2Config(
        **size.shape, max_position_embeddings=2 * (size.prompt + size.answer), pad_token_id=tokens.pad_token_id,
        eos_token_id=tokens.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(7)
    torch.set_num_threads(8)
    model: Any = transformers.AutoModelForCausalLM
    model.from_config(config, dtype=getattr(torch, size.dtype)).save_pretrained(folder / "model")
    tokens.save_pretrained(folder / "model")
    chance = random.Random(7)
    rows = ["".join(chance.choice("0123456789") for _ in range(size.prompt)) for _ in range(1024)]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": row}) for row in rows), encoding="utf-8")
    return folder / "model", prompts


def configuration(size: Size, model: Path, prompts: Path, *, algorithm: str, device: str) -> dict[str, Any]:
    """What elasticrl is told."""
    grouped = {"group": GROUP, "kl": {"where": "loss"}} if algorithm == "grpo" else {}
    return {
        "ppo": {
            "algorithm": algorithm, "batch": size.batch, "mini_batch": size.batch, "micro_tokens": size.micro_tokens,
            **grouped,
        },
        "model": {"path": str(model), "dtype": size.dtype},
        "node": {"device": device},
        "reward": {"function": "elasticrl.ppo.tasks:reverse"},
        "rollout": {"max_tokens": size.answer},
        "data": {"path": str(prompts), "max_prompt": size.prompt, "chat_template": False},
        "lanes": {"count": LANES, "digest": "sample"},
        "membership": {"min_nodes": 1, "max_nodes": 1},
        "vault": {"copies": 0},
        "checkpoint": {"every": 100_000},
    }  # fmt: skip
