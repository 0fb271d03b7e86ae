"""Optimizers whose result for an element depends on nothing but that element.

The idea: a shard's edges move when the world changes, so an update must not care where in a tensor an element lies, how
long the tensor is, or how many threads share it. Vectorised kernels do care at the end of a loop, where other instructions
finish what fills no whole vector and may round a multiply and an add differently. So shards are made of whole units of 64
zero-padded elements, of which every vector length is a divisor, and AdamW uses torch's fused kernel, which gives its threads
whole cache lines. SGD is spelled out in single operations, which IEEE 754 rounds in one way only, whatever computes them.

The new version is written beside the old one, never over it: until an update is sealed the old can be had back. Work goes
in chunks that stay in cache, so that copying first costs little.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from elasticrl.runtime.names import parameters

if TYPE_CHECKING:
    from collections.abc import Callable

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
        """As Rule.update."""
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
        """As Rule.update."""
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


def follow(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> Callable[[str], Rule]:
    """The rules that a torch optimizer's parameter groups stand for, by parameter name, read anew at every update so that
    torch's learning-rate schedulers work. The optimizer itself is never stepped and keeps no state.
    """
    names = {id(param): name for name, param in parameters(model)}
    group_of = {
        names[id(p)]: i for i, group in enumerate(optimizer.param_groups) for p in group["params"] if id(p) in names
    }
    kind = type(optimizer).__name__
    if kind not in ("AdamW", "SGD"):
        raise ValueError(f"torch.optim.{kind} has no exact form here; use AdamW or SGD, or write an optim.Rule for it")

    def rule(name: str) -> Rule:
        group = optimizer.param_groups[group_of[name]]
        odd = [key for key in ("amsgrad", "maximize", "dampening", "differentiable") if group.get(key)]
        if odd:
            raise ValueError(f"torch.optim.{kind} with {', '.join(odd)} has no exact form here; leave {odd[0]} off")
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        if kind == "SGD":
            return SGD(lr=lr, momentum=float(group["momentum"]), weight_decay=decay, nesterov=bool(group["nesterov"]))
        return AdamW(
            lr=lr,
            betas=(float(group["betas"][0]), float(group["betas"][1])),
            eps=float(group["eps"]),
            weight_decay=decay,
        )

    return rule


def apply(rule: Rule, old: Tensor, new: Tensor, grad: Tensor, *, scale: float, count: int) -> None:
    """One rule over one contiguous run, chunk by chunk: new[1 + slots, n] from old[1 + slots, n] and scale * grad[n]."""
    chunk = CHUNK if grad.device.type == "cpu" else max(grad.numel(), 1)  # a GPU wants few long kernels instead
    spare = torch.empty(2, min(chunk, grad.numel()), dtype=grad.dtype, device=grad.device)
    for start in range(0, grad.numel(), chunk):
        part = slice(start, start + chunk)
        g = grad[part]
        rule.update(old[:, part], new[:, part], g, spare[:, : g.numel()], scale, count)
