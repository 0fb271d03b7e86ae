"""Models without their weights, for where those are overwritten at once by what was kept: nobody reads them from a disk then.

The one idea: a sharded model is built anew for each gang, and its weights come from memory or a vault anyway. So a builder may
leave its parameters on torch's device `meta` where `run.fills` says so, and the strategy gives each rank the memory of its own
slices alone. Buffers come from nobody's memory: they are computed as ever, and have to be the same without weights beside
them: one that is drawn needs a generator of its own.

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

from torch import nn
from torch.utils import deterministic

if TYPE_CHECKING:
    from collections.abc import Iterator


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
