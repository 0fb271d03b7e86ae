"""A transformers model cut over a team, by the plan that transformers has for its kind.

    run.register(model=lambda mesh: share(Qwen3ForCausalLM(config), mesh), optimizer=AdamW(lr=1e-6))

The one idea: a plan's words (`model.tp_plan`: which projection is cut by columns, which by rows) are those of torch's
`parallelize_module`, so torch does the cutting, and what comes out are DTensors that `runtime.team` knows. Of a mixture the
experts are dealt whole (`model.ep_plan` says which modules these are). A plan that says anything else, or sizes that do not
divide, are refused by name: a model that is cut in a wrong place computes, and nobody would notice.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from elasticrl.runtime.experts import deal_experts
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.team import AXIS
from elasticrl.runtime.tokens import on_gradients, share_tokens, tokens_of
from elasticrl.runtime.vocabulary import cut_head, split_head

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    Model = TypeVar("Model", bound=nn.Module)

EXPERTS = "grouped_gemm"  # a parameter with a block for each expert
GATHERED = "colwise_gather_output"  # cut by columns, which are put together again
SUMMED = "replicated_with_grad_allreduce"  # whole on each member, which sees a part of the heads that it acts on
ADAPTERS = {"colwise": "lora_B", "rowwise": "lora_A"}  # of a layer that is cut so, the matrix that is cut as it is
HEADS = ("num_attention_heads", "num_key_value_heads")  # as configurations call what is cut between members


def _styles() -> dict[str, ParallelStyle]:
    return {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        GATHERED: ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
    }


def share(model: Model, mesh: DeviceMesh) -> Model:
    """The model itself, its layers cut over the team whose mesh a builder was given, and its tokens shared; Misuse where its
    plan has no way. Where no team is, nothing is done. Adapters of peft go with the layers that they are on.
    """
    axes, tokens = mesh.mesh_dim_names or (), tokens_of(mesh)
    plain: nn.Module = getattr(model, "get_base_model", lambda: model)()
    if AXIS in axes:
        _cut(plain, mesh[AXIS])
    if tokens is not None:
        split_head(plain, tokens)
        share_tokens(plain, tokens, cuts=mesh[AXIS].size() if AXIS in axes else 1)
    return model


def _cut(model: nn.Module, team: DeviceMesh) -> None:
    experts = _experts(model)
    plan = _plan(model, experts)
    _check_sizes(model, plan, team.size())
    tied = _tied(model)
    words = _words(model, plan)
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    vocabulary = len(head.weight) if head is not None else 0
    apart = next((name for name, word in words.items() if word == GATHERED and model.get_submodule(name) is head), None)
    applied: dict[str, ParallelStyle] = {}
    for name, word in words.items():
        applied |= _styled(name, model.get_submodule(name), word, apart=name == apart)
    # All members have built the same, so nobody has to tell.
    parallelize_module(model, team, applied, src_data_rank=None)
    if apart is not None:
        cut_head(model, team, vocabulary)
    for name, module in list(model.named_modules()):
        if any(fnmatchcase(name, pattern) for pattern in experts):
            deal_experts(name, module, team)
    for name, source in tied.items():  # each module was given a parameter of its own
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, model.get_parameter(source))
    for name in (name for name, word in words.items() if word == SUMMED):
        _sum_gradients(model.get_submodule(name), team.get_group())


def _plan(model: nn.Module, experts: set[str]) -> dict[str, str]:
    """A word for each pattern of a module's name, without the experts."""
    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    kind = type(model).__name__
    if not plan:
        raise Misuse(f"transformers has no plan to share a {kind}: apply parallelize_module to it, or set model.tp: 1.")
    plan = {name: word for name, word in plan.items() if not any(_within(name, pattern) for pattern in experts)}
    embeds = getattr(model, "get_input_embeddings", lambda: None)()
    for name in (name for name, module in model.named_modules() if module is embeds):
        plan.setdefault(name, "embedding_rowwise")  # which plans leave whole where no head is tied to it
    known = _styles()
    if odd := sorted({word for word in plan.values() if word not in known and word != SUMMED}):
        raise Misuse(
            f"The plan of {kind} says {', '.join(odd)}, which is not known here (known are {', '.join(sorted(known))} and "
            f"{SUMMED}): apply parallelize_module to it, or set model.tp: 1."
        )
    return plan


def _styled(name: str, module: nn.Module, word: str, *, apart: bool) -> dict[str, ParallelStyle]:
    """How the module is cut, and what is beside it."""
    if hasattr(module, "base_layer"):
        return _adapted(name, module, word)
    if apart:
        return {name: ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    return {name: _styles()[word]} if word != SUMMED else {}


def _words(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """What the plan says of each module, by its name."""
    found: dict[str, str] = {}
    for name, _ in model.named_modules():
        for pattern in (pattern for pattern in plan if fnmatchcase(name, pattern)):
            found.setdefault(name, plan[pattern])
    return found


def _adapted(name: str, module: Any, word: str) -> dict[str, ParallelStyle]:
    """Of a layer with adapters, what is cut beside it: the matrix on the side where the layer is cut. The other one is whole on
    each member, and so is what comes of the first one, or goes into the second one. So its gradient is alike on all of them.
    """
    side = ADAPTERS.get(word, "")
    if getattr(module, "lora_magnitude_vector", None) or not hasattr(module, side):
        raise Misuse(
            f"{name} has adapters that cannot be shared here: plain LoRA on projections that are cut by columns or by rows can "
            "be. Leave it out of the adapters' targets, or set model.tp: 1."
        )
    beside = {f"{name}.{side}.{key}": _styles()[word] for key in getattr(module, side)}
    return {f"{name}.base_layer": _styles()[word], **beside}


def _experts(model: nn.Module) -> set[str]:
    """Modules of experts, as patterns: what is cut expert by expert is a parameter of one."""
    plan: dict[str, str] = dict(getattr(model, "ep_plan", None) or {})
    return {name.rpartition(".")[0] for name, word in plan.items() if word == EXPERTS}


def _within(name: str, pattern: str) -> bool:
    """Is that the module of the pattern, or in it?

    >>> _within("layers.*.mlp.experts.down_proj", "layers.*.mlp.experts"), _within("layers.*.mlp", "layers.*.mlp.experts")
    (True, False)
    """
    return name == pattern or name.startswith(f"{pattern}.")


def _check_sizes(model: nn.Module, plan: Mapping[str, str], members: int) -> None:
    """Each member gets whole heads, and what it has of one projection fits what it has of the next."""
    config: Any = getattr(model, "config", None)
    for key in HEADS:
        count = getattr(config, key, None)
        if count is not None and count % members:
            raise Misuse(f"{key} is {count}, which is not divisible by model.tp: {members}. Set another tp.")
    for name, word in _words(model, plan).items():
        weight: torch.Tensor | None = getattr(model.get_submodule(name), "weight", None)
        if word not in ("colwise", "rowwise") or weight is None:
            continue
        length = weight.shape[word == "rowwise"]
        if length % members:
            raise Misuse(f"{name} is cut along {length} rows or columns, which model.tp: {members} does not divide.")


def _tied(model: nn.Module) -> dict[str, str]:
    """Parameters that are another one, by name: the name of that."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if (source := first.setdefault(id(param), name)) != name:
            found[name] = source
    return found


def _sum_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    def summed(grad: torch.Tensor) -> torch.Tensor:
        whole = grad.clone()
        dist.all_reduce(whole, group=group)
        return whole

    on_gradients(module, summed)
