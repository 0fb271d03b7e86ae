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
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from elasticrl.runtime.experts import deal_experts
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.team import AXIS
from elasticrl.runtime.tokens import on_gradients, share_tokens, tokens_of

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    Model = TypeVar("Model", bound=nn.Module)

EXPERTS = "grouped_gemm"  # a parameter with a block for each expert
SUMMED = "replicated_with_grad_allreduce"  # whole on each member, which sees a part of the heads that it acts on
HEADS = ("num_attention_heads", "num_key_value_heads")  # as configurations call what is cut between members


def _styles() -> dict[str, ParallelStyle]:
    return {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
    }


def share(model: Model, mesh: DeviceMesh) -> Model:
    """The model itself, its layers cut over the team whose mesh a builder was given, and its tokens shared; Misuse where its
    plan has no way. Where no team is, nothing is done.
    """
    axes, tokens = mesh.mesh_dim_names or (), tokens_of(mesh)
    if AXIS in axes:
        _cut(model, mesh[AXIS])
    if tokens is not None:
        share_tokens(model, tokens, cuts=mesh[AXIS].size() if AXIS in axes else 1)
    return model


def _cut(model: nn.Module, team: DeviceMesh) -> None:
    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    kind = type(model).__name__
    if not plan:
        raise Misuse(f"transformers has no plan to share a {kind}: apply parallelize_module to it, or set model.tp: 1.")
    experts = _experts(model)
    plan = {name: word for name, word in plan.items() if not any(_within(name, pattern) for pattern in experts)}
    embeds = getattr(model, "get_input_embeddings", lambda: None)()
    for name in (name for name, module in model.named_modules() if module is embeds):
        plan.setdefault(name, "embedding_rowwise")  # which plans leave whole where no head is tied to it
    styles = _styles()
    if odd := sorted({word for word in plan.values() if word not in styles and word != SUMMED}):
        raise Misuse(
            f"The plan of {kind} says {', '.join(odd)}, which is not known here (known are {', '.join(sorted(styles))} and "
            f"{SUMMED}): apply parallelize_module to it, or set model.tp: 1."
        )
    _check_sizes(model, plan, team.size())
    tied = _tied(model)
    names = [name for name, _ in model.named_modules()]
    there = {pattern: word for pattern, word in plan.items() if any(fnmatchcase(name, pattern) for name in names)}
    applied = {name: styles[word] for name, word in there.items() if word != SUMMED}
    # All members have built the same, so nobody has to tell.
    parallelize_module(model, team, applied, src_data_rank=None)
    for name, module in list(model.named_modules()):
        if any(fnmatchcase(name, pattern) for pattern in experts):
            deal_experts(name, module, team)
    for name, source in tied.items():  # each module was given a parameter of its own
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, model.get_parameter(source))
    for pattern in (name for name, word in plan.items() if word == SUMMED):
        for name, module in model.named_modules():
            if fnmatchcase(name, pattern):
                _sum_gradients(module, team.get_group())


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


def _check_sizes(model: nn.Module, plan: dict[str, str], members: int) -> None:
    """Each member gets whole heads, and what it has of one projection fits what it has of the next."""
    config: Any = getattr(model, "config", None)
    for key in HEADS:
        count = getattr(config, key, None)
        if count is not None and count % members:
            raise Misuse(f"{key} is {count}, which is not divisible by model.tp: {members}. Set another tp.")
    for name, module in model.named_modules():
        word = next((word for pattern, word in plan.items() if fnmatchcase(name, pattern)), "")
        weight: torch.Tensor | None = getattr(module, "weight", None)
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
