"""What a script gives to be trained: models, the rule of each of their parameters, and what else belongs to the state.

The one idea: the script's objects stay the script's. A model keeps its identity through generations (or is built anew by the
script's own function, where it is bound to one gang), and a torch optimizer is only looked at for its settings.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from elasticrl.runtime.audited import Audits
from elasticrl.runtime.buffers import Buffers
from elasticrl.runtime.checkpoint.flat import FlatShard
from elasticrl.runtime.checkpoint.parts import Ambient, Emptied, Part, Parts, Replicated
from elasticrl.runtime.data.cursor import Cursor, Segment
from elasticrl.runtime.data.loader import StreamLoader
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.names import parameters
from elasticrl.runtime.optim import Rule, follow

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from elasticrl.config import Tree
    from elasticrl.config.training import TrainedPlacement
    from elasticrl.runtime.data.ledger import Ledger
    from elasticrl.runtime.layout import Piece
    from elasticrl.runtime.progress import Progress
    from elasticrl.runtime.replicated import Rows
    from elasticrl.runtime.shard import Shard
    from elasticrl.runtime.strategy import Strategy
    from elasticrl.runtime.vault.version import Version

Build = Callable[["DeviceMesh"], torch.nn.Module]
NO_GANG = "There is no gang yet: this works inside of `for step in run.steps()`."
Optimizer = Rule | Callable[[str], Rule] | torch.optim.Optimizer


@dataclass(slots=True)
class Trained:
    """A model that is trained here: what the script gave, and the present generation's strategy around it."""

    given: torch.nn.Module | Build
    rule_of: Callable[[str], Rule]
    buffers: Buffers
    strategy: Strategy | None = None
    rows: Rows | None = None  # memory for the first strategy, which was made before there is a gang
    lacks: list[tuple[int, Piece]] | None = None  # of its shard's rows, what this process has not; None: everything

    @property
    def live(self) -> Strategy:
        """The strategy; there is one inside of a step."""
        if self.strategy is None:
            raise Misuse(NO_GANG)
        return self.strategy

    @property
    def model(self) -> torch.nn.Module:
        """The model as it computes now."""
        return self.live.model

    def let_go(self) -> None:
        """The generation is over: nothing of what it computed with is kept here."""
        if self.strategy is not None:
            self.strategy.close()
        self.strategy = self.lacks = None
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


class Registered:
    """All that one script has given, through all generations."""

    def __init__(self, tree: Tree) -> None:
        self.roles: dict[str, Trained] = {}
        self.others: dict[str, Part] = {}
        self.cursor: Cursor | None = None
        self.audits = Audits()
        self.asked: int | None = None  # so many steps, by the script or the file; None: as many as there are data for
        self.letting_go: list[Callable[[], None]] = []  # what others hold of a generation that is over
        self.parts = Parts()  # all of the state, as this generation keeps it
        self.counts: dict[Version, int] = {}  # a version's number of updates: what a shard calls it
        self.begun = False  # an update was sealed: there is no beginning anew
        self._tree = tree
        self._first: dict[str, Any] | None = None  # the others' state before anything was done, until `begun`

    def train(self, name: str, model: torch.nn.Module | Build, optimizer: Optimizer) -> None:
        """A role."""
        self.roles[name] = role = Trained(model, rules(optimizer, model), Buffers(name))
        if isinstance(model, torch.nn.Module):
            check_rules(name, model, role.rule_of)
        if isinstance(optimizer, torch.optim.Optimizer):
            self.others[f"{name}_settings"] = Settings(optimizer)

    def add(self, name: str, part: Part) -> None:
        """What else belongs to the state."""
        if name in self.others or name in self.roles or name in {"run", "ledger", "ambient"}:
            raise Misuse(f"There is a part called {name!r} already.")
        if isinstance(part, Cursor):
            if self.cursor is not None:
                raise Misuse("There can be one cursor: it is what the ledger is audited against.")
            self.cursor = part
        self.others[name] = part

    def role(self, name: str) -> Trained:
        """One of those that are trained."""
        try:
            return self.roles[name]
        except KeyError:
            raise Misuse(f"{name!r} is not trained here; there are {sorted(self.roles)}.") from None

    @property
    def limit(self) -> int | None:
        """So many steps; None: no end. A cursor that was restored may have more or fewer than it began with."""
        return self.asked if self.asked is not None else self.cursor.steps if self.cursor else None

    @property
    def interleaved(self) -> bool:
        """How lanes are dealt to ranks."""
        return any(strategy_of(self._tree, name) == "fsdp" for name in self.roles)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """What the ledger is audited against: the cursor's, else those of the stream that is registered."""
        streams = (part for part in self.others.values() if isinstance(part, StreamLoader))
        walked = self.cursor or next(streams, None)
        return walked.segments if walked else ()

    def let_go(self, count: int | None) -> dict[str, Shard]:
        """Ends the last generation's strategies, all before a new one is built: with a sharded model there would be two of it
        in memory. Returns the roles' shards that have the state after `count` updates.
        """
        for call in self.letting_go:
            call()
        held: dict[str, Shard] = {}
        built = False
        for name, role in self.roles.items():
            if role.strategy is not None:
                if count is not None and count in role.strategy.shard.held:
                    held[name] = role.strategy.shard
                built = built or not isinstance(role.given, torch.nn.Module)
            role.let_go()
        self.parts = Parts()
        if built:
            gc.collect()  # FSDP2 and DeepSpeed tie a model and its hooks into circles
        return held

    def capture(self, progress: Progress, ledger: Ledger) -> None:
        """From here on `parts` are all that is registered, and what a run keeps beside it."""
        self.parts = parts = Parts()
        for name, role in self.roles.items():
            live = role.live
            shard = FlatShard(
                live.shard, model=name, optimizer=f"{name}_optimizer", place=live.place, keeps=live.counted(), lacks=role.lacks
            )  # fmt: skip
            parts.register(name, shard, steady=True)
        for name, part in self.others.items():
            parts.register(name, part)
        parts.register("run", progress)
        parts.register("ambient", Ambient())  # for libraries that draw from nobody's stream
        parts.register("ledger", ledger)

    def note_first(self, *, made: bool) -> bool:
        """What a beginning anew would begin with, if nobody has put anything into it yet (`made`). Returns whether this process
        has lived through a beginning before.
        """
        if self._first is not None:
            return True
        if not (made or self.begun):
            whole = {name: self.parts.part(name) for name in (*self.others, "ambient")}
            self._first = {name: deepcopy(p.state_dict()) for name, p in whole.items() if isinstance(p, Replicated)}
        return False

    def begin_anew(self) -> None:
        """Nothing was kept yet: whoever lived through a fault of the very first step is put back to the beginning too."""
        assert self._first is not None
        for name in (*self.others, "ambient"):
            part = self.parts.part(name)
            if isinstance(part, Replicated):
                part.load_state_dict(deepcopy(self._first[name]))
            elif isinstance(part, Emptied):
                part.empty()

    def forget_first(self) -> None:
        """An update was sealed."""
        self._first, self.begun = None, True


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
