"""Tiny random models and a tokenizer of digits, written to a folder: for trials and tests, where nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import tokenizers
import transformers

from elasticrl.ppo.models import quietly
from elasticrl.runtime.rng import Streams

PAD, EOS = "<pad>", "<eos>"
WORDS = (*"0123456789", PAD, EOS, "<user>", "<answer>")


def write(
    folder: str | Path,
    *,
    arch: Literal["qwen2", "llama", "qwen3_moe"] = "qwen2",
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    positions: int = 64,
    seed: int = 0,
    words: tuple[str, ...] = WORDS,
    kind: Literal["causal", "reward"] = "causal",
) -> str:
    """A folder with a randomly initialised model and a tokenizer that has one token per word; its path.

    Example: write(tmp_path / "actor", arch="llama", hidden=32, layers=1)
    """
    shape: dict[str, Any] = {
        "vocab_size": len(words),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        "pad_token_id": words.index(PAD),
        "eos_token_id": words.index(EOS),
        "bos_token_id": None,
        "num_labels": 1,
        # Both for learning fast from nothing: attention that is not flat, and positions that differ within a few tokens.
        "initializer_range": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 20.0},
    }
    if arch == "qwen3_moe":
        shape |= {
            "head_dim": hidden // heads,
            "moe_intermediate_size": hidden,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        }
    config = transformers.AutoConfig.for_model(arch, **shape)
    auto: Any = {
        "causal": transformers.AutoModelForCausalLM,
        "reward": transformers.AutoModelForSequenceClassification,
    }[kind]
    with Streams(seed=seed).ambient("initial weights"), quietly():
        auto.from_config(config).save_pretrained(folder)
        tokenizer(words).save_pretrained(folder)
    return str(folder)


def tokenizer(words: tuple[str, ...] = WORDS) -> Any:
    """One token per character or special word, with a chat template."""
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=PAD)
    raw = tokenizers.Tokenizer(model)
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    raw.decoder = tokenizers.decoders.Fuse()
    kind: Any = transformers.PreTrainedTokenizerFast
    found = kind(tokenizer_object=raw, pad_token=PAD, eos_token=EOS)
    found.add_special_tokens({"additional_special_tokens": ["<user>", "<answer>"]})
    found.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<answer>{% endif %}"
    )
    return found
