"""What a script gives to be trained: models, the rule of each of their parameters, and what else belongs to the state.

The one idea: the script's objects stay the script's. A model keeps its identity through generations (or is built anew by the
script's own function, where it is bound to one gang), and a torch optimizer is only looked at for its settings.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

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
Optimizer = Rule | Callable[[str], Rule] | torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


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
        self.looked = False  # whether samples are named, after a first step
        self.begun = False  # an update was sealed: there is no beginning anew
        self.hollow = False  # a restore has taken memory for a model, and has not filled it yet
        self._tree = tree
        self._first: dict[str, Any] | None = None  # the others' state before anything was done, until `begun`

    def train(self, name: str, model: torch.nn.Module | Build, optimizer: Optimizer) -> None:
        """A role."""
        if isinstance(model, torch.nn.Module):
            check_model(name, model)
        self.roles[name] = role = Trained(model, rules(optimizer, model), Buffers(name))
        if isinstance(model, torch.nn.Module):
            check_rules(name, model, role.rule_of)
        for i, one in enumerate(torch_optimizers(optimizer)):
            self.others[f"{name}_settings{i or ''}"] = Settings(one)

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
    def changed(self) -> bool:
        """Are models not what they began with, so that only a fresh process could begin anew?"""
        return self.begun or self.hollow

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
    if isinstance(optimizer, Rule):
        rule = optimizer
        return lambda _name: rule
    if given := torch_optimizers(optimizer):
        if not isinstance(model, torch.nn.Module):
            raise Misuse(
                "A torch optimizer belongs to one model's parameters, and this model is built anew in each generation: give "
                "its rule, stock(torch.optim.Adam, lr=3e-4) of elasticrl.runtime.optim, or a function from a parameter's name "
                "to a rule."
            )
        return follow(given, model)
    if isinstance(optimizer, type) or not callable(optimizer):
        raise Misuse(
            f"optimizer={_called(optimizer)} is no optimizer: give a rule such as AdamW(lr=3e-4), a function from a "
            "parameter's name to a rule, a torch optimizer, or a list of these."
        )
    return optimizer


def torch_optimizers(optimizer: object) -> list[torch.optim.Optimizer]:
    """Those of torch that were given, one or several; none if it is something else."""
    each: Sequence[object] = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    found = [one for one in each if isinstance(one, torch.optim.Optimizer)]
    return found if len(found) == len(each) else []


def check_model(role: str, model: torch.nn.Module) -> None:
    """Misuse if it is one that cannot be spread over a gang."""
    if isinstance(model, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
        raise Misuse(f"{role} is a {type(model).__name__}: register the model inside of it, which is its .module.")
    norms = [(name, one) for name, one in model.named_modules() if getattr(one, "track_running_stats", False)]
    if norms:
        (name, norm), *others = norms
        raise Misuse(
            f"{name or role} of {role}{f' and {len(others)} more' if others else ''} is a {type(norm).__name__} with running "
            "statistics, which belong to no lane: use LayerNorm or GroupNorm, or track_running_stats=False, or "
            "torchvision.ops.FrozenBatchNorm2d where the statistics are those of the model that is finetuned."
        )


def check_data(given: Registered, named: bool, step: int) -> None:
    """Misuse if samples are used that nobody names: the ledger, and what proves that each is used once, would be empty. Looked
    at after a process's first step.
    """
    looked, given.looked = given.looked, True
    if looked or named:
        return
    if given.cursor is not None:
        raise Misuse(
            f"Step {step} has used no sample of the registered cursor: take each lane's samples from lane.ids(), or name what "
            "you take by lane.used(ids). Or register no cursor, if the script has no data."
        )
    if any(issubclass(type(one), _BaseDataLoaderIter) for one in gc.get_objects()):  # isinstance would ask proxies
        raise Misuse(
            f"A torch DataLoader is read from, and step {step} has named no sample: each worker would read the same samples, "
            "begin anew after a fault, and leave the ledger empty. Take samples by their number: "
            "register(data=Cursor(Walk(size=len(dataset), lanes=run.tree.lanes.count, per_lane=...))) and lane.ids(), or a "
            "Loader of elasticrl.runtime.data.loader, which loads ahead."
        )


def check_rules(role: str, model: torch.nn.Module, rule_of: Callable[[str], Rule]) -> None:
    """Misuse unless each trainable parameter has a rule."""
    for name, param in parameters(model):
        if not param.requires_grad:
            continue
        try:
            rule = rule_of(name)
        except KeyError:
            raise Misuse(
                f"{name} of {role} has requires_grad and no rule: put it into the optimizer, or freeze it."
            ) from None
        if not isinstance(rule, Rule):
            raise Misuse(
                f"The optimizer of {role} gives {_called(rule)} for {name}, which is no rule: a rule has lr, slots and "
                "update, as AdamW of elasticrl.runtime.optim."
            )


def _called(value: object) -> str:
    return value.__name__ if isinstance(value, type) else f"a {type(value).__name__}"


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
