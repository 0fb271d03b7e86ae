"""What a script gives to be trained: a model, and the rule of each of its parameters.

The one idea: the script's objects stay the script's. A model keeps its identity through generations (or is built anew by the
script's own function, where it is bound to one gang), and a torch optimizer is only looked at for its settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from elasticrl.runtime.buffers import Buffers
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.names import parameters
from elasticrl.runtime.optim import Rule, follow

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from elasticrl.config import Tree
    from elasticrl.config.training import TrainedPlacement
    from elasticrl.runtime.strategy import Strategy

Build = Callable[["DeviceMesh"], torch.nn.Module]
Optimizer = Rule | Callable[[str], Rule] | torch.optim.Optimizer


@dataclass(slots=True)
class Trained:
    """A model that is trained here: what the script gave, and the present generation's strategy around it."""

    given: torch.nn.Module | Build
    rule_of: Callable[[str], Rule]
    buffers: Buffers
    strategy: Strategy | None = None

    @property
    def live(self) -> Strategy:
        """The strategy; there is one inside of a step."""
        if self.strategy is None:
            raise Misuse("There is no gang yet: this works inside of `for step in run.steps()`.")
        return self.strategy

    @property
    def model(self) -> torch.nn.Module:
        """The model as it computes now."""
        return self.live.model

    def let_go(self) -> None:
        """The generation is over: nothing of what it computed with is kept here."""
        if self.strategy is not None:
            self.strategy.close()
        self.strategy = None
        self.buffers.end()


class Settings:
    """What a scheduler changes in a torch optimizer's groups: state as much as the weights are. A scheduler's own state does
    not bring it back.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        """Each group's settings."""
        return {"groups": [{name: value for name, value in g.items() if name != "params"} for g in self._groups]}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """As they were."""
        for group, saved in zip(self._groups, state["groups"], strict=True):
            group.update({name: tuple(v) if isinstance(v, list) else v for name, v in saved.items()})


def rules(optimizer: Optimizer, model: torch.nn.Module | Build) -> Callable[[str], Rule]:
    """The rule of each parameter, by name."""
    if isinstance(optimizer, torch.optim.Optimizer):
        if not isinstance(model, torch.nn.Module):
            raise Misuse(
                "A torch optimizer belongs to one model's parameters, and this model is built anew in each generation: give "
                "a rule such as AdamW(lr=3e-4), or a function from a parameter's name to one."
            )
        return follow(optimizer, model)
    if isinstance(optimizer, Rule):
        rule = optimizer
        return lambda _name: rule
    return optimizer


def check_rules(role: str, model: torch.nn.Module, rule_of: Callable[[str], Rule]) -> None:
    """Misuse unless each trainable parameter has a rule, and all rules keep the same state: a shard has one row for each."""
    first: tuple[str, tuple[str, ...]] | None = None
    for name, param in parameters(model):
        if not param.requires_grad:
            continue
        try:
            slots = rule_of(name).slots
        except KeyError:
            raise Misuse(
                f"{name} of {role} has requires_grad and no rule: put it into the optimizer, or freeze it."
            ) from None
        first = first or (name, slots)
        if slots != first[1]:
            raise Misuse(
                f"The rule of {name} of {role} keeps {', '.join(slots) or 'nothing'}, and that of {first[0]} "
                f"{', '.join(first[1]) or 'nothing'}: all rules of a model must keep the same (one kind, momentum in all or "
                "in none). Train what needs another kind as a role of its own."
            )


def strategy_of(tree: Tree, role: str) -> str:
    """How a trained role is sharded: as its placement says, else as all models are."""
    placement = _placed(tree, role)
    return (placement and placement.strategy) or tree.model.strategy


def offloaded(tree: Tree, role: str) -> bool:
    """Whether a trained role's optimizer lives in the host's memory."""
    placement = _placed(tree, role)
    return placement is not None and placement.offload == "cpu"


def _placed(tree: Tree, role: str) -> TrainedPlacement | None:
    return {"actor": tree.placement.actor, "critic": tree.placement.critic}.get(role)
