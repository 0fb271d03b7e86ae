"""Weights that FSDP2 puts together for a pass of autocast, sent in the narrow type that autocast would make of them.

The one idea: autocast narrows the weights of matrix products number by number, so it does not matter to any bit whether that
happens before or after they are put together; and half as many bytes are sent. What computes sees float32 as before, and so do
its gradients: only numbers that autocast would drop are missing.

A pass says by itself whether it is one of autocast: the unit that is put together looks. Other passes, such as those that
generate, get all of the numbers.
"""

# ruff: noqa: SLF001 - FSDP2 tells nobody what it has cut up
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import grad_mode
from torch.distributed.fsdp import FSDPModule

from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.torch_names import param_groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


def narrow(model: nn.Module, kinds: Sequence[type[nn.Module]], dtype: torch.dtype = torch.bfloat16) -> None:
    """Has the weights of modules of these `kinds`, which autocast narrows, sent in `dtype` in passes of autocast. Weights that
    another module reads too (tied embeddings) stay as they are, and so do biases, and what a team has cut up. The bytes must be
    the same on all ranks: so nothing here depends on which modules a rank's samples have asked until now.
    """
    for unit in [module for module in model.modules() if isinstance(module, FSDPModule)]:
        held = [one for group in param_groups(unit) for one in group.fsdp_params if _fits(one, kinds)]
        if held:
            _Unit(unit, held, dtype)


def _fits(held: FSDPParam, kinds: Sequence[type[nn.Module]]) -> bool:
    info = held._module_info
    # A bias may be read without its module being asked, and in float32. It is small, so nothing is gained by it.
    mine = (
        type(info.module) in kinds and info.param_name == "weight" and not info.shared_modules and not held.is_dtensor
    )
    return mine and held.sharded_param.dtype == torch.float32 and held.mesh_info.mesh.size() > 1


class _Unit:
    """What FSDP2 puts together in one go, of which some weights may be sent in the narrow type."""

    def __init__(self, module: FSDPModule, held: Sequence[FSDPParam], dtype: torch.dtype) -> None:
        self.module, self.held, self.dtype = module, held, dtype
        self.narrow = False  # in the newest forward pass; the backward pass is of the same kind
        self._known = False
        body: Any = module
        body.register_forward_pre_hook(self._look, prepend=True)  # before FSDP2's own, which puts together
        for one in {id(one._module_info.module): one._module_info.module for one in held}.values():
            one.register_forward_pre_hook(self._check)

    def _look(self, *_: Any) -> None:
        kind = self.held[0].device.type
        narrow = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == self.dtype
        if self._known and narrow == self.narrow:
            return
        self.module.reshard()  # the outermost unit stays together after a pass, in the type of that pass
        for one in self.held:
            one.all_gather_outputs = []  # memory of the other type
            if not self._known:
                self._take(one)
        self.narrow, self._known = narrow, True

    def _take(self, held: FSDPParam) -> None:
        """FSDP2 asks the tensor itself for these; it need not be of a kind of its own to have them."""
        local: Any = held._sharded_local_tensor

        def pre(_mesh: Any, _size: Any, _stride: Any, _module: Any, _policy: Any) -> Any:
            whole = held._sharded_param_data.view(held.padded_sharded_param_size)
            return (whole.to(self.dtype) if self.narrow else whole,), None

        def post(
            came: Sequence[torch.Tensor], _more: Any, dtype: torch.dtype, *, out: torch.Tensor | None = None
        ) -> Any:
            (found,) = came
            found = found[: held._orig_size[0]]  # the last ranks' parts are filled up
            if out is None:
                made = found.to(dtype, copy=True)
                result = made, (made,)
            else:
                with torch.no_grad(), grad_mode._unsafe_preserve_version_counter(out):
                    out.copy_(found)
                result = None
            held.all_gather_outputs[0].untyped_storage().resize_(0)  # it has room again before the next pass
            return result

        local.fsdp_pre_all_gather, local.fsdp_post_all_gather = pre, post
        held._init_extensions()

    def _check(self, module: nn.Module, _args: Any) -> None:
        if self.narrow and not torch.is_autocast_enabled(self.held[0].device.type):
            raise Misuse(
                f"A {type(module).__name__} is asked outside of autocast in a pass of autocast, and its weights were sent in "
                f"{self.dtype}: its result would be another one than without sharding. Set model.strategy: replicated, or "
                "model.dtype: float32."
            )
