"""Context parallel: `model.cp` members of a team share the tokens of each sequence, and each computes the layers for its own.

The one idea: outside of attention a layer treats each token by itself. So a member takes its tokens in front of the first
layer, and all of them come together again behind the last one. Around attention the members exchange (Ulysses): each gets all
tokens for its share of the heads, and gives back what came of them. Whoever calls the model sees whole sequences.

What a layer's parameter gets as a gradient is the sum over a member's tokens. It is a leaf of the lane in the tree of sums
(`Deal.shared`), so nothing else has to add it up, and parameters are spread over these members as over other ranks. What lies
behind the last layer (norm, head) every member computes alike: `once` lets its gradient count on the first one alone. A module
of which neither is known is refused: its gradient would count `cp` times, and nobody would notice.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import lcm
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.team import group_of
from elasticrl.runtime.torch_names import all_gather_single

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import timedelta

    from torch.distributed.device_mesh import DeviceMesh

    Mesh = TypeVar("Mesh", bound=DeviceMesh)

AXIS: Final = "cp"
KINDS: Final = ("gemma", "llama", "mistral", "mixtral", "phi", "qwen2", "qwen3", "qwen3_moe")  # each is tested
PLAIN: Final = ("eager", "sdpa")  # attention that is computed for a part of the heads as it is
PREFIX: Final = "elasticrl_"  # what the same is called where members exchange around it
KEY: Final = "elasticrl_split"  # how a model hands a pass's split down to its layers
NOISE: Final = ("attention_dropout", "router_jitter_noise")  # what configurations call random numbers inside of layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The ranks that share sequences, and this one's place among them.

    Example: Tokens(size=2, index=1, group=...), which has the second half of each sequence
    """

    size: int
    index: int
    group: dist.ProcessGroup
    known: WeakSet[nn.Module] = field(default_factory=WeakSet)  # modules whose gradients come out right

    def on(self, mesh: Mesh) -> Mesh:
        """The mesh, which a builder is given, and which tells it of these."""
        mesh.elasticrl_tokens = self  # type: ignore[attr-defined]
        return mesh

    def mesh(self, device: str) -> DeviceMesh:
        """Of these ranks, where a model is not cut up beside."""
        from torch.distributed.device_mesh import DeviceMesh

        return self.on(DeviceMesh.from_group(self.group, device, mesh_dim_names=(AXIS,)))


def tokens_of(mesh: DeviceMesh) -> Tokens | None:
    """Who shares sequences, of the mesh that a builder was given; None: nobody."""
    return getattr(mesh, "elasticrl_tokens", None)


def form_tokens(everyone: dist.ProcessGroup, size: int, *, cuts: int, form_s: timedelta, limit: timedelta) -> Tokens:
    """This rank's group in a gang that has formed: neighbours, or where a model is cut up into `cuts` parts those that have the
    same part. Collective.
    """
    rank, of_team = everyone.rank(), size * cuts
    assert everyone.size() % of_team == 0, f"{everyone.size()} ranks are no teams of {size} x {cuts}"
    first = rank - rank % of_team + rank % cuts
    group = group_of(range(first, first + of_team, cuts), form_s=form_s, limit=limit)
    return Tokens(size=size, index=rank % of_team // cuts, group=group)


def share_tokens(model: nn.Module, tokens: Tokens, *, cuts: int = 1) -> None:
    """From here on the model's layers compute this member's tokens alone, in each pass that keeps no cache. `cuts`: parts that
    its heads are cut up into beside. Misuse where that would come to something else.
    """
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    if kind not in KINDS:
        raise Misuse(f"model.cp: {tokens.size} is not known for a {kind} (known are {', '.join(KINDS)}): set cp: 1.")
    base: Any = getattr(model, "base_model", model)
    _check(config, base, tokens.size, cuts)
    plain = str(config._attn_implementation).removeprefix(PREFIX)  # noqa: SLF001 - transformers has no other name for it
    if plain not in PLAIN:
        known = " or ".join(PLAIN)
        raise Misuse(f"model.cp: {tokens.size} goes with attention {known}, not with {plain}: set model.attention.")
    config._attn_implementation = _registered(plain)  # noqa: SLF001
    base.register_forward_pre_hook(_begins(tokens), with_kwargs=True)
    base.register_forward_hook(_ends, with_kwargs=True)
    first, *others = base.layers
    first.register_forward_pre_hook(_enters_first, with_kwargs=True)
    for layer in (first, *others):
        layer.register_forward_pre_hook(_enters, with_kwargs=True)
        tokens.known.update(layer.modules())
    base.layers[-1].register_forward_hook(_leaves_last, with_kwargs=True)
    embeds = base.get_input_embeddings()
    tokens.known.add(embeds)  # what it gets as a gradient is of this member's tokens too
    for module in model.modules():
        if module not in tokens.known:
            once(module, tokens)


def once(module: nn.Module, whose: Tokens | DeviceMesh, *, when: Callable[[], bool] = lambda: True) -> None:
    """The gradient of its own parameters counts on one member alone: all compute it alike, `when` a pass is of that kind. For
    what a model has behind its layers, such as a head of a script's own.
    """
    tokens = whose if isinstance(whose, Tokens) else tokens_of(whose)
    if tokens is None:
        return
    tokens.known.add(module)
    if next(module.parameters(recurse=False), None) is not None:
        # On the first member too, where it changes nothing. A generation takes other products for plain modules alone: found
        # by a team whose members had other bits in the head's products of one row.
        on_gradients(module, torch.zeros_like, when=lambda: tokens.index > 0 and when())


def on_gradients(
    module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor], *, when: Callable[[], bool] = lambda: True
) -> None:
    """In each pass through a module, what its own parameters get as gradients is changed so. A hook on a parameter would do the
    same, but for FSDP2, which puts other parameters in their places.
    """
    forward = module.forward

    def stood_in(*args: Any, **kwargs: Any) -> Any:
        if not when():
            return forward(*args, **kwargs)
        with _stand_ins(module, change):
            return forward(*args, **kwargs)

    module.forward = stood_in


def check_known(model: nn.Module, role: str, tokens: Tokens) -> None:
    """Misuse where a gradient would count once for each member."""
    odd = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if module not in tokens.known and any(param.requires_grad for param in module.parameters(recurse=False))
    ]
    if odd:
        raise Misuse(
            f"model.cp is {tokens.size}, and of {role} nothing is known of {', '.join(odd[:3])}{', ...' if odd[3:] else ''}: "
            "each member would count its gradient. Let elasticrl.runtime.planned.share(model, mesh) share the model's tokens; "
            "and call elasticrl.runtime.tokens.once(module, mesh) for what comes behind its layers."
        )


def _check(config: Any, base: Any, size: int, cuts: int) -> None:
    if (count := config.num_attention_heads) % (size * cuts):
        of = f"model.tp x model.cp: {cuts} x {size}" if cuts > 1 else f"model.cp: {size}"
        raise Misuse(f"num_attention_heads is {count}, which is not divisible by {of}. Set another cp.")
    noise = [f"{key}: {getattr(config, key)}" for key in NOISE if getattr(config, key, None)]
    drops = {
        f"a dropout of {one.p}"
        for layer in base.layers
        for one in layer.modules()
        if isinstance(one, nn.Dropout) and one.p
    }
    if found := [*noise, *sorted(drops)]:
        raise Misuse(
            f"model.cp: {size} knows no random numbers inside of layers, and this model has {', '.join(found)}: each member "
            "would draw the same ones for other tokens. Set them to 0."
        )


# ---- a pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One pass's sequences, as a member has them: tokens index * part <= i < (index + 1) * part of `length`, then padding.

    Example: Split(tokens=Tokens(size=2, index=1, group=...), length=9), of which this member has 4 and padding
    """

    tokens: Tokens
    length: int

    @property
    def part(self) -> int:
        """Tokens of each member, of which the last ones may be padding."""
        return -(-self.length // self.tokens.size)

    def mine(self, whole: torch.Tensor) -> torch.Tensor:
        """[batch, part, ...] of [batch, length, ...]."""
        start = self.tokens.index * self.part
        there = whole[:, start : start + self.part]
        return _padded(there, self.part).contiguous()  # a view would keep all of it in memory

    def taken(self, whole: torch.Tensor) -> torch.Tensor:
        """As `mine`, of what all members have alike: its gradient is made of all their parts', so it is alike on them too."""
        found: torch.Tensor = _Taken.apply(whole, self)  # type: ignore[no-untyped-call]
        return found

    def together(self, mine: torch.Tensor) -> torch.Tensor:
        """The reverse."""
        found: torch.Tensor = _Together.apply(mine, self.tokens)  # type: ignore[no-untyped-call]
        return found[:, : self.length]

    def heads(self, mine: torch.Tensor) -> torch.Tensor:
        """[batch, heads / size, length, head] of [batch, heads, part, head]."""
        found: torch.Tensor = _Exchanged.apply(mine, self.tokens, 1, 2)  # type: ignore[no-untyped-call]
        return found[:, :, : self.length]

    def back(self, attended: torch.Tensor) -> torch.Tensor:
        """[batch, part, heads, head] of [batch, length, heads / size, head]."""
        whole = _padded(attended, self.part * self.tokens.size)
        found: torch.Tensor = _Exchanged.apply(whole, self.tokens, 1, 2)  # type: ignore[no-untyped-call]
        return found


def _padded(rows: torch.Tensor, length: int) -> torch.Tensor:
    """[batch, length, ...] with zeros behind what is there."""
    lacks = length - rows.shape[1]
    return rows if not lacks else torch.cat([rows, rows.new_zeros(rows.shape[0], lacks, *rows.shape[2:])], 1)


class _Exchanged(torch.autograd.Function):
    """Each member gives every other one a part along dimension `cut`, and puts what it gets together along `grown`."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, tokens: Tokens, cut: int, grown: int) -> torch.Tensor:
        ctx.how = tokens, grown, cut
        return _exchange(mine, tokens, cut, grown)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _exchange(grads[0], *ctx.how), None, None, None


def _exchange(mine: torch.Tensor, tokens: Tokens, cut: int, grown: int) -> torch.Tensor:
    sent = torch.stack(mine.chunk(tokens.size, cut))
    come = torch.empty_like(sent)
    dist.all_to_all_single(come, sent, group=tokens.group)
    return torch.cat(come.unbind(), grown)


class _Together(torch.autograd.Function):
    """All members' parts of a sequence. Each has the same gradient of the whole, and takes its own part of it."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        ctx.tokens = tokens
        return _gathered(mine, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0].chunk(ctx.tokens.size, 1)[ctx.tokens.index].contiguous(), None


class _Taken(torch.autograd.Function):
    """The reverse: a member goes on with its own part of what all have alike."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, split: Split) -> torch.Tensor:
        ctx.split = split
        return split.mine(whole)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _gathered(grads[0], ctx.split.tokens)[:, : ctx.split.length], None


def _gathered(mine: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """[batch, size * part, ...] of each member's [batch, part, ...]."""
    come = mine.new_empty(tokens.size * len(mine), *mine.shape[1:])
    all_gather_single(come, mine.contiguous(), group=tokens.group)
    return torch.cat(come.chunk(tokens.size), 1)


# ---- hooks: what a model's parts are given, and what they give


def _begins(tokens: Tokens) -> Callable[..., Any]:
    """Of the model without its head: is this pass split? It tells the layers by an argument, which they all hand on."""

    def begins(_module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        more = dict(kwargs)
        if more.get("output_attentions"):
            raise Misuse(f"output_attentions cannot be had with model.cp: {tokens.size}: no member has all heads.")
        if torch.is_grad_enabled():
            if more.get("past_key_values") is not None:
                raise Misuse("A pass with gradients takes no past_key_values where members share tokens (model.cp).")
            more["use_cache"] = False
        if more.get("past_key_values") is None and more.get("use_cache") is False:
            given = next(it for it in (*args, more.get("input_ids"), more.get("inputs_embeds")) if it is not None)
            more[KEY] = Split(tokens=tokens, length=given.shape[1])
        return args, more  # with a cache each member computes all: a token that comes next is too short to share

    return begins


def _enters_first(_module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Of the first layer: from here on there are this member's tokens alone."""
    split: Split | None = kwargs.get(KEY)
    return None if split is None else ((split.mine(args[0]), *args[1:]), kwargs)


def _enters(_module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Of each layer: what belongs to tokens is theirs. The mask is attention's, which has all of them."""
    split: Split | None = kwargs.get(KEY)
    if split is None:
        return None
    more = dict(kwargs)
    cos, sin = more["position_embeddings"]
    more["position_embeddings"] = split.mine(cos), split.mine(sin)
    if more.get("position_ids") is not None:
        more["position_ids"] = split.mine(more["position_ids"])
    return args, more


def _leaves_last(_module: nn.Module, _args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
    """Of the last layer: the sequences are whole again."""
    split: Split | None = kwargs.get(KEY)
    return out if split is None else split.together(out)


def _ends(_module: nn.Module, _args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
    """Of the model without its head: what it has collected from its layers is put together too."""
    split: Split | None = kwargs.get(KEY)
    if split is None:
        return out
    if (logits := getattr(out, "router_logits", None)) is not None:
        rows = (one.view(-1, split.part, one.shape[-1]) for one in logits)  # of each layer [batch * part, experts]
        out["router_logits"] = tuple(split.together(one).flatten(0, 1) for one in rows)
    if (states := getattr(out, "hidden_states", None)) is not None:
        last = out.last_hidden_state
        out["hidden_states"] = tuple(one if one is None or one is last else split.together(one) for one in states)
    return out


def _registered(plain: str) -> str:
    """The name under which transformers finds this attention with the exchange around it. Without a split it is as it was."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **more: Any
    ) -> tuple[torch.Tensor, Any]:
        attention: Any = ALL_ATTENTION_FUNCTIONS.get_interface(plain, _eager(module))
        split: Split | None = more.pop(KEY, None)
        if split is None:
            found: tuple[torch.Tensor, Any] = attention(module, query, key, value, mask, **more)
            return found
        times = lcm(key.shape[1], split.tokens.size) // key.shape[1]  # of heads that each member gets a whole number
        key, value = (part.repeat_interleave(times, 1) if times > 1 else part for part in (key, value))
        query, key, value = (split.heads(part) for part in (query, key, value))
        with _grouped(module, times):
            out, _ = attention(module, query, key, value, mask, **more)
        return split.back(out), None

    name = PREFIX + plain
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[plain])
    return name


def _eager(module: nn.Module) -> Any:
    """The plain attention of a module's kind, which lies beside its class: FSDP2 may have put another one around that."""
    beside = (sys.modules[kind.__module__] for kind in type(module).__mro__)
    return next(one.eager_attention_forward for one in beside if hasattr(one, "eager_attention_forward"))


@contextmanager
def _grouped(module: Any, times: int) -> Iterator[None]:
    """Inside, so many times fewer heads share a key's: attention asks its module how many."""
    groups = module.num_key_value_groups
    module.num_key_value_groups = groups // times
    try:
        yield
    finally:
        module.num_key_value_groups = groups


@contextmanager
def _stand_ins(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Inside, its own parameters are others that lead to them, where gradients are asked for."""
    own = {name: param for name, param in module._parameters.items() if param is not None}  # noqa: SLF001
    stand_ins: dict[str, Any] = {}
    for name, param in own.items():
        if param.requires_grad and torch.is_grad_enabled():
            stand_ins[name] = param.view_as(param)
            stand_ins[name].register_hook(change)
    module._parameters.update(stand_ins)  # noqa: SLF001
    try:
        yield
    finally:
        module._parameters.update(own)  # noqa: SLF001
