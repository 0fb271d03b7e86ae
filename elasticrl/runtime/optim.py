"""Optimizers whose result for an element depends on nothing but that element.

The idea: a shard's edges move when the world changes, so an update must not care where in a tensor an element lies, how
long the tensor is, or how many threads share it. Vectorised kernels do care at the end of a loop, where other instructions
finish what fills no whole vector and may round a multiply and an add differently. So shards are made of whole units of 64
zero-padded elements, of which every vector length is a divisor, and AdamW uses torch's fused kernel, which gives its threads
whole cache lines. SGD is spelled out in single operations, which IEEE 754 rounds in one way only, whatever computes them.
Every other optimizer of torch, and a script's own, is tried before it trains (`stock`).

The new version is written beside the old one, never over it: until an update is sealed the old can be had back. Work goes
in chunks that stay in cache, so that copying first costs little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.names import parameters
from elasticrl.runtime.stock import Stepper, Stock, of_group, settings_of, stock

__all__ = ["SGD", "AdamW", "Rule", "Stock", "apply", "follow", "rows_of", "scaled", "stock"]

Given = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

CHUNK = 131_072  # elements, whole units: a pass then costs more than its call, and the rows stay in cache


@runtime_checkable
class Rule(Protocol):
    """How one parameter is updated. `slots` names the state kept per element."""

    @property
    def lr(self) -> float:
        """The learning rate."""

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the state."""

    def update(self, old: Tensor, new: Tensor, grad: Tensor, spare: Tensor, scale: float, count: int) -> None:
        """Writes new[1 + slots, n] from old[1 + slots, n] and scale * grad[n]; row 0 is the parameter. `count` starts at 1;
        spare[2, n] is room to work in.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay, as torch.optim.AdamW.

    Example: AdamW(lr=3e-4, weight_decay=0.1)
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    @property
    def slots(self) -> tuple[str, ...]:
        """First and second moment, under torch's names."""
        return ("exp_avg", "exp_avg_sq")

    def update(self, old: Tensor, new: Tensor, grad: Tensor, spare: Tensor, scale: float, count: int) -> None:
        """One fused step of AdamW, into `new`. `scale` is applied to the gradient first."""
        new.copy_(old)
        torch.mul(grad, scale, out=spare[0])
        torch._fused_adamw_(
            [new[0]], [spare[0]], [new[1]], [new[2]], [], [torch.full((), float(count), device=grad.device)], lr=self.lr,
            beta1=self.betas[0], beta2=self.betas[1], weight_decay=self.weight_decay, eps=self.eps, amsgrad=False,
            maximize=False,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD:
    """Stochastic gradient descent, as torch.optim.SGD without dampening.

    Example: SGD(lr=0.1, momentum=0.9)
    """

    lr: float = 1e-2
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    @property
    def slots(self) -> tuple[str, ...]:
        """The momentum, under torch's name."""
        return ("momentum_buffer",) if self.momentum else ()

    def update(self, old: Tensor, new: Tensor, grad: Tensor, spare: Tensor, scale: float, count: int) -> None:
        """One step of SGD, with momentum if there is any, into `new`."""
        del count  # a buffer that starts at zero makes the first step like the others
        (step, a) = spare.unbind()
        torch.mul(grad, scale, out=step)
        if self.weight_decay:
            torch.mul(old[0], self.weight_decay, out=a)
            step.add_(a)
        if self.momentum:
            torch.mul(old[1], self.momentum, out=new[1])
            new[1].add_(step)
            if self.nesterov:
                torch.mul(new[1], self.momentum, out=a)
                step.add_(a)
            else:
                step = new[1]
        torch.mul(step, -self.lr, out=a)
        torch.add(old[0], a, out=new[0])


def scaled(rule: Any, factor: float) -> Any:
    """The same rule at a learning rate `factor` times its own: what a schedule gives."""
    return rule if factor == 1.0 else replace(rule, lr=rule.lr * factor)


def follow(optimizer: Given, model: torch.nn.Module) -> Callable[[str], Rule]:
    """The rules that the parameter groups of a torch optimizer, or of several, stand for, by parameter name. They are read anew
    at every update so that torch's learning-rate schedulers work. The optimizer itself is never stepped and keeps no state.
    Misuse if it does not work element by element.
    """
    named = parameters(model)
    names = {id(param): name for name, param in named}
    rules: dict[str, Callable[[], Rule]] = {}
    for one in optimizer if isinstance(optimizer, (list, tuple)) else (optimizer,):
        one._opt_called = True  # noqa: SLF001 - else a scheduler warns that nobody steps it
        for group, rule in _rules(one):
            for name in (names[id(param)] for param in group["params"] if id(param) in names):
                if name in rules:
                    raise Misuse(f"Two optimizers have {name}: give each parameter to one of them.")
                rules[name] = rule
    return lambda name: rules[name]()


def _rules(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Mapping[str, Any], Callable[[], Rule]]]:
    """Each parameter group, and what makes its rule at this moment."""
    tried: list[Stock] = []
    for group in optimizer.param_groups:
        exact = EXACT.get(type(optimizer))
        if exact is not None and not any(group.get(flag) for flag in FLAGS):
            yield group, partial(_exact, optimizer, exact, group)
            continue
        settings, dims = settings_of(optimizer, group), {param.dim() for param in group["params"]}
        dtype = next((param.dtype for param in group["params"]), torch.float32)
        known = next((one for one in tried if one.settings == settings and dims <= one.stepper.dims), None)
        found = known or of_group(optimizer, group, dims=dims, dtype=dtype)
        tried.append(found)
        yield group, partial(_stock, optimizer, found.stepper, group)


def _stock(optimizer: torch.optim.Optimizer, stepper: Stepper, group: Mapping[str, Any]) -> Rule:
    return Stock(lr=float(group["lr"]), settings=settings_of(optimizer, group), stepper=stepper)


def _exact(
    optimizer: torch.optim.Optimizer, exact: Callable[[Mapping[str, Any]], Rule], group: Mapping[str, Any]
) -> Rule:
    if odd := [flag for flag in FLAGS if group.get(flag)]:
        raise Misuse(
            f"{type(optimizer).__name__} got {', '.join(odd)} after register(): set it where the optimizer is made."
        )
    return exact(group)


def _adamw(group: Mapping[str, Any]) -> AdamW:
    (one, two), lr = group["betas"], float(group["lr"])
    return AdamW(
        lr=lr, betas=(float(one), float(two)), eps=float(group["eps"]), weight_decay=float(group["weight_decay"])
    )


def _sgd(group: Mapping[str, Any]) -> SGD:
    return SGD(
        lr=float(group["lr"]), momentum=float(group["momentum"]), weight_decay=float(group["weight_decay"]),
        nesterov=bool(group["nesterov"]),
    )  # fmt: skip


# By the very class: a subclass may do anything.
EXACT: Final[Mapping[type, Callable[[Mapping[str, Any]], Rule]]] = {torch.optim.AdamW: _adamw, torch.optim.SGD: _sgd}
FLAGS: Final = ("amsgrad", "maximize", "dampening")  # which those have not


def rows_of(rule_of: Callable[[str], Rule], names: Iterable[str]) -> tuple[str, ...]:
    """The state that a shard keeps: of each element the parameter, and whatever any of the rules keeps."""
    return ("param", *dict.fromkeys(slot for name in names for slot in rule_of(name).slots))


def apply(
    rule: Rule, old: Tensor, new: Tensor, grad: Tensor, *, scale: float, count: int, rows: Sequence[str] = ()
) -> None:
    """One rule over one contiguous run, chunk by chunk: new[1 + slots, n] from old[1 + slots, n] and scale * grad[n]. With
    `rows` there may be more than this rule has slots: those stay as they are.
    """
    chunk = CHUNK if grad.device.type == "cpu" else max(grad.numel(), 1)  # a GPU wants few long kernels instead
    spare = torch.empty(2, min(chunk, grad.numel()), dtype=grad.dtype, device=grad.device)
    mine = [0, *(rows.index(slot) for slot in rule.slots)] if rows and tuple(rows[1:]) != rule.slots else []
    for start in range(0, grad.numel(), chunk):
        part = slice(start, start + chunk)
        g, before, after = grad[part], old[:, part], new[:, part]
        if not mine:
            rule.update(before, after, g, spare[:, : g.numel()], scale, count)
            continue
        after.copy_(before)
        made = torch.empty(len(mine), g.numel(), dtype=g.dtype, device=g.device)
        rule.update(before[mine], made, g, spare[:, : g.numel()], scale, count)
        after[mine] = made
