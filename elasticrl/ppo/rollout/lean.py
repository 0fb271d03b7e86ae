"""One more token of each row, without all that a model's own forward pass does around its operations.

The idea: a pass of one token is small, and half of its time went into Python. These are the same operations on the same values
in the same order, so their bits are the model's, for the few kinds of models whose layers are alike. Who uses it compares its
first pass with the model's, and goes on with the model where they differ.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn.functional import linear
from transformers.integrations.sdpa_attention import sdpa_attention_forward

if TYPE_CHECKING:
    from collections.abc import Sequence

KINDS: Final = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
Product = tuple[torch.Tensor, torch.Tensor | None]  # weight, bias
Norm = tuple[torch.Tensor, float]  # weight, epsilon


class Lean:
    """Of a model as its weights are now."""

    def __init__(self, model: Any) -> None:
        body = model.model
        self.embed, self.rotary, self.head = body.embed_tokens.weight, body.rotary_emb, _product(model.lm_head)
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

    def __call__(self, tokens: torch.Tensor, seen: torch.Tensor, position: torch.Tensor, cache: Any) -> torch.Tensor:
        """[rows, vocabulary] of tokens [rows, 1]; `seen` [rows, width] says what they attend to, themselves included."""
        hidden = self.embed[tokens]
        mask = None if bool(seen.all()) else seen[:, None, None, :]
        cos, sin = (it.unsqueeze(1) for it in self.rotary(hidden, position))
        for layer, kept in zip(self.layers, cache.layers, strict=True):
            hidden = layer(hidden, cos, sin, mask, kept)
        return linear(normed(hidden, self.norm), *self.head)[:, -1]


class _Layer:
    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.attention, self.act = attention, mlp.act_fn
        self.size, self.scaling = attention.head_dim, attention.scaling
        self.before, self.between = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self.q, self.k, self.v, self.o = (_product(getattr(attention, f"{name}_proj")) for name in "qkvo")
        self.gate, self.up, self.down = _product(mlp.gate_proj), _product(mlp.up_proj), _product(mlp.down_proj)
        self.q_norm, self.k_norm = (
            _norm(getattr(attention, name)) if hasattr(attention, name) else None for name in ("q_norm", "k_norm")
        )

    def __call__(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None, kept: Any
    ) -> torch.Tensor:
        inner, shape = normed(hidden, self.before), (len(hidden), 1, -1, self.size)
        q, k = linear(inner, *self.q).view(shape), linear(inner, *self.k).view(shape)
        if self.q_norm and self.k_norm:
            q, k = normed(q, self.q_norm), normed(k, self.k_norm)
        q, k = (turned(it.transpose(1, 2), cos, sin) for it in (q, k))
        keys, values = kept.update(k, linear(inner, *self.v).view(shape).transpose(1, 2))
        made = sdpa_attention_forward(self.attention, q, keys, values, mask, scaling=self.scaling)[0]
        hidden = hidden + linear(made.reshape(len(hidden), 1, -1).contiguous(), *self.o)
        inner = normed(hidden, self.between)
        inner = self.act(linear(inner, *self.gate)) * linear(inner, *self.up)
        return hidden + linear(inner, *self.down)


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


def _product(module: Any) -> Product:
    return module.weight, module.bias


def _norm(module: Any) -> Norm:
    return module.weight, module.variance_epsilon
