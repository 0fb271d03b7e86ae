"""Matrix products of a few rows, on a processor.

The idea: oneDNN's products read weights that were packed for it, which is quicker than torch's own products of a few rows. And
the bits of a row do not depend on how many others there are, so answers of several blocks can go through a product together.
Inside `quick` all of a model's products are of this kind, so its own passes and the lean ones stay alike bit for bit.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn.functional import linear

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SHAPES: Final = (
    (12, 32),
    (77, 333),
    (384, 256),
)  # of weights, by which it is found out what this machine's products do
ROWS: Final = (1, 2, 3, 5, 16, 33, 64)
SHARED: Final = 512  # longer sums oneDNN may share out among threads, in parts that follow from the number of rows


class Product:
    """In place of a `Linear`'s own product. `keep`: its weights are packed once, and are there twice until it goes."""

    def __init__(self, module: Any, *, keep: bool) -> None:
        self.module, self.keep = module, keep
        self._packed: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Of rows, [..., inner]."""
        weight, bias = self.module.weight, self.module.bias
        if not (x.numel() and _plain(weight) and _plain(x)):
            return linear(x, weight, bias)
        if self.keep:
            if self._packed is None:
                self._packed = packed(weight)
            return product(x, self._packed, bias)
        if x.numel() > x.shape[-1]:
            return product(x, weight, bias)
        # One row takes another way unless the weights are packed.
        return product(torch.cat([x.reshape(1, -1)] * 2), weight, bias)[:1].view(*x.shape[:-1], -1)


@contextmanager
def quick(model: nn.Module, *, keep: bool) -> Iterator[bool]:
    """Inside, a model's products on a processor are `Product`s. True: so each of its rows has its bits by itself."""
    if not fits(found := _products(model)):
        yield False
        return
    for module in found:
        module.forward = Product(module, keep=keep)
    try:
        yield apart(found)
    finally:
        for module in found:
            del module.forward


def stand_alone(model: nn.Module) -> bool:
    """Whether rows will have their bits by themselves inside `quick`."""
    found = _products(model)
    return fits(found) and apart(found)


def fits(found: Sequence[Any]) -> bool:
    """Whether these are on a processor that has such products."""
    if not found or any(module.weight.device.type != "cpu" for module in found):
        return False
    threads, longest = torch.get_num_threads(), max(module.in_features for module in found)
    return (threads == 1 or longest <= SHARED) and alike()


def apart(found: Sequence[Any]) -> bool:
    """Whether all of them are of plain float32 weights."""
    return all(_plain(module.weight) for module in found)


def _products(model: nn.Module) -> list[Any]:
    return [it for it in model.modules() if type(it).forward is nn.Linear.forward and "forward" not in vars(it)]


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As `linear`, by oneDNN."""
    made: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # noqa: SLF001 - torch shows it nowhere
    return made


def packed(weight: torch.Tensor) -> torch.Tensor:
    """As oneDNN reads it best."""
    made: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)  # noqa: SLF001 - likewise
    return made


@cache
def alike() -> bool:
    """Are there such products here, with the same bits in a row however many others there are, packed or not?"""
    ops = torch.ops.mkldnn
    if not (torch.backends.mkldnn.enabled and torch.backends.mkldnn.is_available()):  # type: ignore[no-untyped-call]
        return False
    if not (hasattr(ops, "_linear_pointwise") and hasattr(ops, "_reorder_linear_weight")):
        return False
    chance = torch.Generator("cpu").manual_seed(20)
    for outer, inner in SHAPES:
        weight, x = (torch.randn(n, inner, generator=chance, device="cpu") for n in (outer, ROWS[-1]))
        try:
            ready = packed(weight)
            whole = product(x, ready, None)
            few = [product(x[:rows].clone(), ready, None) for rows in ROWS]
        except (RuntimeError, NotImplementedError):
            return False
        if not (torch.equal(product(x, weight, None), whole) and torch.allclose(linear(x, weight), whole, 1e-3, 1e-3)):
            return False
        if not all(torch.equal(some, whole[: len(some)]) for some in few):
            return False
        means = x.mean(-1)  # as in norms
        if not all(torch.equal(x[:rows].clone().mean(-1), means[:rows]) for rows in ROWS):
            return False
    return True


def _plain(it: torch.Tensor) -> bool:
    return type(it) in {torch.Tensor, nn.Parameter} and it.device.type == "cpu" and it.dtype == torch.float32
