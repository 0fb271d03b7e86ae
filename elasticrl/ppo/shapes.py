"""What a model's config.json says of its size: parameters, activations, caches. No torch, no weights.

The idea: the field's decoder models are one block repeated, so a handful of numbers gives every count; and each count is a
formula that can be read, checked by hand, and is checked by a test against a real model's bytes.

Letters, as in the formulas that `elasticrl plan` prints: L layers, H hidden, I intermediate (of a mixture one expert's), Q =
heads x head size, K = key and value heads x head size, V vocabulary, E experts of a layer, C those that a token goes through.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from elasticrl.base.parsed import parsed

HUB_NAME: Final = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # a model's; a path that begins with a dot or a slash is none


class ShapeError(ValueError):
    """A model whose size cannot be told, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What tells one family from another, beyond its numbers."""

    qkv_bias: bool = False
    qk_norm: bool = False
    inner: str = "intermediate_size"  # as its configurations call I
    mixture: bool = False  # of experts


KINDS: Mapping[str, Kind] = {
    "llama": Kind(),
    "mistral": Kind(),
    "qwen2": Kind(qkv_bias=True),
    "qwen3": Kind(qk_norm=True),
    "mixtral": Kind(mixture=True),
    "qwen3_moe": Kind(qk_norm=True, inner="moe_intermediate_size", mixture=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One matrix of a layer. A team cuts its outputs, or `by_inputs`.

    Example: Linear(name="q_proj", inputs=64, outputs=64, bias=True)
    """

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    by_inputs: bool = False

    @property
    def count(self) -> int:
        """Its parameters."""
        return self.inputs * self.outputs + self.bias * self.outputs

    def adapter(self, rank: int, cuts: int) -> int:
        """Of its two low-rank matrices a member has one whole, and of the other its part."""
        whole, cut = (self.outputs, self.inputs) if self.by_inputs else (self.inputs, self.outputs)
        return rank * (whole + -(-cut // cuts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder model's numbers. Example: Shape(layers=2, hidden=64, inner=128, heads=4, kv_heads=4, head=16, words=14)"""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    words: int
    tied: bool = False  # input and output embeddings are one
    attention_bias: bool = False
    mlp_bias: bool = False
    experts: int = 0  # of a layer; 0: it is no mixture
    chosen: int = 0  # that a token goes through
    kind: Kind = KINDS["llama"]

    @property
    def q(self) -> int:
        """The width of all queries."""
        return self.heads * self.head

    @property
    def kv(self) -> int:
        """The width of all keys."""
        return self.kv_heads * self.head

    @property
    def linears(self) -> tuple[Linear, ...]:
        """A layer's matrices. Experts are none of them: transformers has all of a layer in one block."""
        h, q, k, i = self.hidden, self.q, self.kv, self.inner
        bias, inner_bias = self.attention_bias or self.kind.qkv_bias, self.mlp_bias
        attention = (
            Linear(name="q_proj", inputs=h, outputs=q, bias=bias),
            Linear(name="k_proj", inputs=h, outputs=k, bias=bias),
            Linear(name="v_proj", inputs=h, outputs=k, bias=bias),
            Linear(name="o_proj", inputs=q, outputs=h, bias=self.attention_bias, by_inputs=True),
        )
        if self.experts:
            return attention
        return (
            *attention,
            Linear(name="gate_proj", inputs=h, outputs=i, bias=inner_bias),
            Linear(name="up_proj", inputs=h, outputs=i, bias=inner_bias),
            Linear(name="down_proj", inputs=i, outputs=h, bias=inner_bias, by_inputs=True),
        )

    @property
    def expert(self) -> int:
        """Parameters of one expert: 3 H I."""
        return 3 * self.hidden * self.inner

    @property
    def layer(self) -> int:
        """Parameters of one layer: its matrices and norms, and of a mixture its experts and their router."""
        norms = 2 * self.hidden + (2 * self.head if self.kind.qk_norm else 0)
        return sum(linear.count for linear in self.linears) + norms + self.experts * (self.expert + self.hidden)

    @property
    def ends(self) -> int:
        """Parameters outside of the layers: embeddings and the last norm."""
        return self.words * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def matrices(self) -> int:
        """Parameters that matrix products alone read: what a frozen reference keeps in bfloat16 (`models.narrowed`)."""
        head = 0 if self.tied else self.words * self.hidden
        return self.layers * sum(linear.count for linear in self.linears) + head

    @property
    def count(self) -> int:
        """All parameters: V H (twice if not tied) + H + L x a layer."""
        return self.ends + self.layers * self.layer

    @property
    def scorer(self) -> int:
        """Parameters of the model with a head of one number in place of the output embedding: a critic."""
        return self.words * self.hidden + self.hidden + self.layers * self.layer + self.hidden + 1

    @property
    def reward(self) -> int:
        """Of a reward model, whose head has no bias."""
        return self.scorer - 1

    def adapters(self, rank: int, targets: Sequence[str] = (), *, cuts: int = 1) -> int:
        """Trained parameters with low-rank adapters: rank x (inputs + outputs) of each matrix that has them, of which a team of
        so many `cuts` has one side whole on each member.
        """
        chosen = [linear for linear in self.linears if not targets or linear.name in targets]
        return self.layers * sum(linear.adapter(rank, cuts) for linear in chosen)

    def saved(self, tokens: int, answer: int, *, checkpointing: bool, sharers: int = 1, cuts: int = 1) -> int:
        """Numbers that autograd keeps for a pass of `tokens`, of which `answer` go through the head. So many `sharers` have the
        tokens of layers and head between them, and heads, matrices and the vocabulary are cut into so many parts.

        A layer keeps for each token 6 H (two norms: what came in, normed, scaled), 5 Q (queries, keys, values, what came out of
        attention, twice; norms of queries and keys keep 3 (Q + K) / 2 more), 4 I (gate before and after its activation, up,
        product) and one number for each head. Experts keep C (2 H + 4 I + 8) + E in place of 4 I. With checkpointing a layer
        keeps its input alone, and one layer at a time all of that.
        """
        here = -(-tokens // sharers)
        norms = 3 * (self.q + self.kv) // 2 if self.kind.qk_norm else 0
        cut = 5 * self.q + norms + self.heads + (0 if self.experts else 4 * self.inner)
        # A member has rows for the experts of all others as well.
        mixed = self.chosen * (2 * self.hidden + 4 * self.inner + 8) + self.experts if self.experts else 0
        layer = here * (6 * self.hidden + cut // cuts + mixed)
        layers = self.layers * here * self.hidden + layer if checkpointing else self.layers * layer
        through = -(-answer // sharers)
        return layers + 4 * tokens * self.hidden + through * self.hidden + self.logits(through) // cuts

    def logits(self, answer: int) -> int:
        """Numbers of the logits of so many tokens of responses."""
        return answer * self.words

    @property
    def cached(self) -> int:
        """Numbers of the KV cache for one token."""
        return 2 * self.layers * self.kv

    def flops(self, tokens: float, length: int) -> float:
        """Of a forward pass: 2 for each parameter that a token goes through, and 2 L Q times half the length for scores and for
        values.
        """
        idle = self.layers * (self.experts - self.chosen) * self.expert
        used = self.count - self.words * self.hidden - idle
        return tokens * (2.0 * used + 2.0 * self.layers * self.q * length)


UNKNOWN = Shape(layers=0, hidden=0, inner=0, heads=0, kv_heads=0, head=0, words=0)
"""Of a model of which it is only known how many parameters it has."""


def _of_hub(name: str) -> Path:
    """Its config.json, from the cache of models or from the hub."""
    named = "name a folder here (model.path=FOLDER; model.critic_path and reward.model likewise) with its config.json"
    if not HUB_NAME.fullmatch(name) or Path(name).exists():
        raise ShapeError(f"{Path(name) / 'config.json'} does not exist; {named}.")
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(name, "config.json"))
    except ImportError:
        raise ShapeError(
            f"{name} is no folder here; pip install 'elasticrl[train]' asks the hub, or {named}."
        ) from None
    except (OSError, ValueError, RuntimeError) as error:  # what the hub's client raises is one of these
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ShapeError(f"{name} is neither a folder here nor to be had from the hub ({said}); {named}.") from error


def shape_of(config: Mapping[str, Any], where: str = "config.json") -> Shape:
    """From a config.json's fields."""
    name = str(config.get("model_type"))
    if name not in KINDS:
        raise ShapeError(
            f"{where} is of model_type {name!r}, whose size is not known here; known are {', '.join(sorted(KINDS))}. "
            "The job may well run: only this estimate does not know the architecture."
        )
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ShapeError(
            f"{where} has layers without experts among those with them, which this estimate does not know."
        )
    kind = KINDS[name]
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        return Shape(
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            inner=int(config[kind.inner]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head=int(config.get("head_dim") or hidden // heads),
            words=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            # Older files of one family say it in the other's word.
            experts=int(config.get("num_experts") or config["num_local_experts"]) if kind.mixture else 0,
            chosen=int(config["num_experts_per_tok"]) if kind.mixture else 0,
            kind=kind,
        )
    except KeyError as error:
        raise ShapeError(f"{where} has no {error}, which every {name} model has; is the file whole?") from error


def read(model: str) -> Shape:
    """Of a model in a folder in Hugging Face's layout, or of one that the hub has, of which only config.json is fetched."""
    path = Path(model) / "config.json"
    if not path.is_file():
        path = _of_hub(model)
    try:
        plain = parsed(path.read_bytes())
    except ValueError as error:
        raise ShapeError(f"{path} is not JSON ({error}); write it anew from the model's source") from error
    return shape_of(plain, str(path))
