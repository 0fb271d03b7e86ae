"""One more token of each row, without all that a model's own forward pass does around its operations.

The idea: a pass of one token is small, and half of its time went into Python. These are the same operations on the same values
in the same order, so their bits are the model's, for the few kinds of models whose layers are alike. Who uses it compares its
first pass with the model's, and goes on with the model where they differ.

Where a product's rows do not depend on each other (`products`), the answers of several blocks share a pass. What is not rounded
exactly, and may take another way with more rows, is done block by block: so the bits of an answer follow from its block alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

if TYPE_CHECKING:
    from collections.abc import Sequence

KINDS: Final = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
EVEN: Final = (
    64  # a multiple of what a processor takes at once: what is left over at the end it computes in another way
)
Norm = tuple[torch.Tensor, float]  # weight, epsilon


@dataclass(frozen=True, slots=True, kw_only=True)
class Next:
    """What a block's next token is made of."""

    tokens: torch.Tensor  # [rows, 1]
    seen: torch.Tensor  # [rows, width] bool: what they attend to, themselves included
    position: torch.Tensor  # [rows, 1]
    cache: Any


class Lean:
    """Of a model as its weights are now."""

    def __init__(self, model: Any) -> None:
        body = model.model
        self.embed, self.rotary, self.head = body.embed_tokens.weight, body.rotary_emb, model.lm_head.forward
        self.norm = _norm(body.norm)
        self.layers = [_Layer(layer) for layer in body.layers]

    @staticmethod
    def of(model: Any) -> Lean | None:
        """None where the model is of another kind, or somebody looks into its passes, as FSDP does."""
        if type(model).__name__ not in KINDS or model.config._attn_implementation != "sdpa":  # noqa: SLF001 - no other way
            return None
        modules: Sequence[Any] = list(model.modules())
        if any(chain.from_iterable((one._forward_hooks, one._forward_pre_hooks) for one in modules)):  # noqa: SLF001
            return None
        products = (
            "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head",
        )  # fmt: skip
        named = [one for name, one in model.named_modules() if name.rpartition(".")[2] in products]
        if len(named) != 7 * len(model.model.layers) + 1 or any(type(one) is not nn.Linear for one in named):
            return None
        return Lean(model)

    def __call__(self, blocks: Sequence[Next]) -> list[torch.Tensor]:
        """[rows, vocabulary] of each block."""
        rows = [len(block.tokens) for block in blocks]
        hidden = self.embed[_joined([block.tokens for block in blocks])]
        turns = [self.rotary(hidden, block.position) for block in blocks]
        cos, sin = (_joined(list(its)).unsqueeze(1) for its in zip(*turns, strict=True))
        masks = [None if bool(block.seen.all()) else block.seen[:, None, None, :] for block in blocks]
        for i, layer in enumerate(self.layers):
            kept = [block.cache.layers[i] for block in blocks]
            hidden = layer(hidden, cos, sin, list(zip(rows, masks, kept, strict=True)))
        return list(self.head(normed(hidden, self.norm))[:, -1].split(rows))


class _Layer:
    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.attention, self.act = attention, mlp.act_fn
        self.size, self.scaling = attention.head_dim, attention.scaling
        self.before, self.between = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self.q, self.k, self.v, self.o = (getattr(attention, f"{name}_proj").forward for name in "qkvo")
        self.gate, self.up, self.down = mlp.gate_proj.forward, mlp.up_proj.forward, mlp.down_proj.forward
        self.even = torch.get_num_threads() == 1 and not mlp.gate_proj.out_features % EVEN
        self.q_norm, self.k_norm = (
            _norm(getattr(attention, name)) if hasattr(attention, name) else None for name in ("q_norm", "k_norm")
        )

    def __call__(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, blocks: Sequence[tuple[int, Any, Any]]
    ) -> torch.Tensor:
        inner, shape, rows = normed(hidden, self.before), (len(hidden), 1, -1, self.size), [one[0] for one in blocks]
        q, k = self.q(inner).view(shape), self.k(inner).view(shape)
        if self.q_norm and self.k_norm:
            q, k = normed(q, self.q_norm), normed(k, self.k_norm)
        q, k = (turned(it.transpose(1, 2), cos, sin) for it in (q, k))
        each = zip(*(it.split(rows) for it in (q, k, self.v(inner).view(shape).transpose(1, 2))), blocks, strict=True)
        hidden = hidden + self.o(_joined([self._seen(*of) for of in each]))
        inner = normed(hidden, self.between)
        gate, up = self.gate(inner), self.up(inner)
        acted = self.act(gate) if self.even else _joined([self.act(its) for its in gate.split(rows)])
        made: torch.Tensor = hidden + self.down(acted * up)
        return made

    def _seen(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: tuple[int, Any, Any]) -> torch.Tensor:
        """What a block's rows attend to."""
        rows, mask, kept = block
        keys, values = kept.update(k, v)
        made: torch.Tensor = sdpa_attention_forward(self.attention, q, keys, values, mask, scaling=self.scaling)[0]
        return made.reshape(rows, 1, -1).contiguous()


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def normed(hidden: torch.Tensor, norm: Norm) -> torch.Tensor:
    """As the models' RMSNorm."""
    weight, epsilon = norm
    wide = hidden.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * wide.to(hidden.dtype)


def turned(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As the models' rotary embedding."""
    half = states.shape[-1] // 2
    return (states * cos) + (torch.cat((-states[..., half:], states[..., :half]), dim=-1) * sin)


def _norm(module: Any) -> Norm:
    return module.weight, module.variance_epsilon
