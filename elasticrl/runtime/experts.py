"""Expert parallel: a mixture's experts are dealt whole to the members of a team.

The one idea: each member computes its own experts' part for all tokens of the lane, and the parts are added up. The router,
which every member has, chooses a token's experts, so nothing has to be sent but that sum. To an expert that is elsewhere a
member gives no token: transformers' experts pass over the number behind their last one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from elasticrl.runtime.misuse import Misuse

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def deal_experts(name: str, experts: nn.Module, mesh: DeviceMesh) -> None:
    """Of a module of fused experts, whose parameters are one block for each of them, this member keeps its share."""
    module: Any = experts
    count, members = module.num_experts, mesh.size()
    if count % members:
        raise Misuse(f"{name} has {count} experts, which model.tp: {members} does not divide. Set another tp.")
    for key, param in list(module.named_parameters(recurse=False)):
        if len(param) != count:
            raise Misuse(
                f"{name}.{key} is no block for each of {count} experts: {tuple(param.shape)}. Set model.tp: 1."
            )
        cut = distribute_tensor(param.data, mesh, [Shard(0)], src_data_rank=None)  # all members have built the same
        module.register_parameter(key, nn.Parameter(cut, requires_grad=param.requires_grad))
    here, group, forward = count // members, mesh.get_group(), module.forward
    first = here * mesh.get_local_rank()
    module.num_experts, module._is_expert_parallel = here, True  # noqa: SLF001 - what transformers asks of its own

    def dealt(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        hidden, weights = (_Summed.apply(it, group) for it in (hidden, weights))  # type: ignore[no-untyped-call]
        at = chosen - first
        elsewhere = (at < 0) | (at >= here)
        whole = dict(module.named_parameters(recurse=False))
        module._parameters.update({key: _here(param) for key, param in whole.items()})  # noqa: SLF001
        try:
            out = forward(hidden, at.masked_fill(elsewhere, here), weights.masked_fill(elsewhere, 0.0))
        finally:
            module._parameters.update(whole)  # noqa: SLF001
        # A member without tokens must enter the sums of gradients all the same: the others wait there.
        if torch.is_grad_enabled() and not out.requires_grad:
            out = out + 0.0 * (hidden.sum() + weights.sum())
        found: torch.Tensor = _Sum.apply(out, group)  # type: ignore[no-untyped-call]
        return found

    module.forward = dealt


def _here(param: torch.Tensor) -> torch.Tensor:
    """What of it is this member's, as a part of the graph."""
    return param.to_local() if isinstance(param, DTensor) else param


class _Sum(torch.autograd.Function):
    """The sum over the members. Each has the same gradient of it, which is that of its part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # noqa: ARG004 - nothing is kept
        return _added_up(part, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # noqa: ARG004
        return grads[0], None


class _Summed(torch.autograd.Function):
    """The same numbers, of which each member uses a part: their gradient is the sum."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _added_up(grads[0], ctx.group), None


def _added_up(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    whole = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole, group=group)
    return whole
