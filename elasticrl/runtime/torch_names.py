"""What is called otherwise in another version of torch, or is missing there: the one place that knows of it. It asks what is
there, and for no number.
"""

from typing import Any

import torch.distributed as dist

#: One tensor from each rank into one tensor, and a slice of the sum for each rank. torch before 2.13 has only the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def param_groups(module: Any) -> list[Any]:
    """The groups of parameters that `fully_shard` has made of a module. torch 2.11 makes one at most."""
    state = module._get_fsdp_state()  # noqa: SLF001 - torch shows them nowhere
    groups = getattr(state, "_fsdp_param_groups", None)
    return groups if groups is not None else [group for group in [state._fsdp_param_group] if group]  # noqa: SLF001 - likewise


def forget_meshes() -> None:
    """What torch keeps of operations on DTensors names meshes. To it a mesh of a later gang that has the same ranks is an
    earlier one, whose groups are gone.
    """
    from torch.distributed.tensor import debug  # half a second of imports, which only teams need

    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()


def reduce_unused(module: Any) -> None:
    """Parameters of a unit that a pass leaves out count as zeros. torch before 2.13 cannot: `fsdp` says so where it happens."""
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True, recurse=False)
