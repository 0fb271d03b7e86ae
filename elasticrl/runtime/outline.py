"""Models without their weights, for where those are overwritten at once by what was kept: nobody reads them from a disk then.

The one idea: a model that is sharded, or that a team shares, is built anew for each gang, and its weights come from memory or a
vault anyway. So a builder may leave its parameters on torch's device `meta` where `run.fills` says so, and the strategy gives
each rank the memory of its own part alone. What does not train is kept nowhere: a builder that leaves it out is called again,
with `run.fills` false. Buffers come from nobody's memory: they are computed as ever, and have to be the same without weights
beside them: one that is drawn needs a generator of its own.

    def build(mesh):
        with outlined() if run.fills else nullcontext():
            model = Network(config)
        if not run.fills:
            model.load_state_dict(torch.load("model.pt"))
        return fully_shard(model, mesh=mesh)
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import deterministic

from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.names import parameters

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@contextmanager
def outlined() -> Iterator[None]:
    """Inside, modules that are built in this process get their parameters' shapes, and no memory for them.

    >>> with outlined():
    ...     made = nn.Linear(3, 2)
    >>> made.weight.device.type, tuple(made.weight.shape)
    ('meta', (2, 3))
    """
    plain = nn.Module.register_parameter
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # by the first one's id, which it keeps while it is in here

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            if id(param) not in made:
                made[id(param)] = param, nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
                param.data = param.data.new_empty(0)
            param = made[id(param)][1]  # one that is tied to another stays the very same
        plain(module, name, param)

    # What is never touched costs nothing; with deterministic algorithms torch writes NaNs all over it.
    torch_s: Any = deterministic  # whose attribute is a property
    fills, torch_s.fill_uninitialized_memory = torch_s.fill_uninitialized_memory, False
    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch_s.fill_uninitialized_memory = fills
        nn.Module.register_parameter = plain  # type: ignore[method-assign]


def give_memory(model: nn.Module, device: str, kept: Mapping[str, torch.Tensor] | None = None) -> None:
    """Memory for this rank's part of what was built without, once a team has cut it, and buffers beside it: zeros, or what was
    `kept` of each parameter. What FSDP2 cuts up as well gets its memory from `fsdp.give_memory`.
    """
    if not any(param.is_meta for param in model.parameters()):
        return
    named = {id(param): name for name, param in model.named_parameters()}
    made: dict[int, nn.Parameter] = {}  # by the first one's id: one that is tied to another stays the very same
    for module in model.modules():
        own, buffers = module._parameters, module._buffers  # noqa: SLF001 - torch asks nobody who replaces one
        for name, param in own.items():
            if param is not None and param.is_meta:
                if id(param) not in made:
                    memory = _zeros(param, device) if kept is None else _around(kept[named[id(param)]], param)
                    made[id(param)] = nn.Parameter(memory, requires_grad=param.requires_grad)
                own[name] = made[id(param)]
        buffers.update({name: None if buffer is None else buffer.to(device) for name, buffer in buffers.items()})


def _zeros(param: nn.Parameter, device: str) -> torch.Tensor:
    return torch.zeros_like(param, device=device)


def _around(part: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
    """What is as the parameter is, with this rank's part in it."""
    if not hasattr(param, "placements"):
        return part
    from torch.distributed.tensor import DTensor  # which is there already, where a parameter is one

    like: Any = param
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def check_memory(model: nn.Module, *, fills: bool) -> None:
    """Misuse where something was built without memory that nobody fills afterwards."""
    lost = [name for name, param in parameters(model) if param.is_meta and not (fills and param.requires_grad)]
    if made := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        raise Misuse(
            f"The buffer {made[0]} has no memory: nobody fills buffers. Compute it from no weight, or build the model whole."
        )
    if lost and fills:
        raise Misuse(
            f"{len(lost)} parameters have no memory ({lost[0]}, ...) and do not train: nobody fills them, so build them whole."
        )
    if lost:
        raise Misuse(
            f"{len(lost)} parameters have no memory ({lost[0]}, ...), and there is nothing yet that they are filled with: "
            "build them whole unless run.fills says otherwise."
        )
