"""Strategy `fsdp`: FSDP2 shards the model, and its gradients are summed per lane in the tree's order.

The idea: FSDP2 reduces each unit's gradient at the end of every backward pass, through a reduce-scatter that it lets us
replace. Ours is an all-to-all that brings every lane's leaf, unsummed, to the rank that owns the slice; the slices are folded
into the tree there. So what is kept between lanes is sharded, and with lanes dealt round by round (Deal.interleaved) no more
than the logarithm of their number. All ranks must issue the same collectives: who has fewer lanes plays ghosts, and sends
nothing for them.

FSDP2 binds a model to one group for good. A new generation therefore builds the model anew, by the same function, and loads
its shard: what is lost is the object, not the state. What is to be loaded need not be there before (`runtime.outline`).
"""

# ruff: noqa: SLF001 - FSDP2 tells nobody which parameters it reduces together
from __future__ import annotations

from collections import deque
from functools import partial
from math import prod
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from elasticrl.runtime.lanes import Deal, Fold, Node, Turn
from elasticrl.runtime.layout import Layout, Piece, up
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.names import bare, parameters
from elasticrl.runtime.outline import check_memory
from elasticrl.runtime.shard import Shard
from elasticrl.runtime.strategy import Point, Strategy
from elasticrl.runtime.team import ACROSS, cuts_of, whole_name
from elasticrl.runtime.torch_names import param_groups, reduce_unused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.tensor import DTensor

    from elasticrl.runtime.optim import Rule
    from elasticrl.runtime.team import Team
    from elasticrl.runtime.tokens import Tokens

IN_FLIGHT = 2  # all-to-alls that a backward pass may be ahead of, on the CPU


class _Unit(NamedTuple):
    """What FSDP2 reduces in one go."""

    name: str
    module: FSDPModule
    params: tuple[tuple[str, torch.nn.Parameter], ...]  # the trainable ones, in FSDP2's order
    places: tuple[
        slice, ...
    ]  # of their slices in the shard; in what FSDP2 reduces these follow each other without gaps


class _Arrival(NamedTuple):
    """Leaves on their way to us."""

    unit: int
    work: dist.Work | None
    leaves: torch.Tensor  # [ranks with a real lane in this round, slice]; zeros without a slice if they were left out
    sent: torch.Tensor  # kept until the work is done


class Fsdp(Strategy):
    """`build(mesh)` returns the model with `fully_shard(..., mesh=mesh)` applied, with the same parameters for every world.

    Long because most of it is the course of a step, which all strategies share (`Strategy`).
    """

    def __init__(
        self, build: Callable[[DeviceMesh], torch.nn.Module], rule_of: Callable[[str], Rule], *, deal: Deal, rank: int,
        group: dist.ProcessGroup, device: str = "cpu", point: Point = lambda _name: None, shard: Shard | None = None,
        offload: bool = False, fills: bool = False, team: Team | None = None, tokens: Tokens | None = None,
    ) -> None:  # fmt: skip
        """With a `team` its members have cut the model up before FSDP2 does, so the mesh has two axes (`runtime.team`). With
        `tokens` each of its passes is for some of a lane's tokens (`runtime.tokens`).

        `shard` is that of an earlier generation, if it is cut as this one's will be: its versions are kept.

        With `offload` the optimizer's state is in the host's memory, and computed there. `fills`: the caller fills the shard
        and publishes it before anything is computed, so what trains may come without memory.
        """
        super().__init__(deal, rank, group, point, team, tokens)
        mesh = team.grid(device) if team else DeviceMesh.from_group(group, device, mesh_dim_names=(ACROSS,))
        self.model = build(tokens.on(mesh) if tokens else mesh)
        check_memory(self.model, fills=fills)
        give_memory(self.model, device)
        _check_cut(self.model, deal.world)
        self.cuts = cuts_of(parameters(self.model), team) if team else {}
        self._units, layout = _units(self.model, deal.world, self._part)
        kinds = {param.dtype for unit in self._units for _, param in unit.params}
        if len(kinds) != 1:
            raise ValueError(f"trainable parameters must be of one dtype, not {sorted(map(str, kinds))}")
        kept = shard is not None and (shard.layout, shard.rank) == (layout, rank)
        dtype = kinds.pop()
        self._device = torch.device(device)
        host = torch.device("cpu") if offload else self._device
        by_name = rule_of if team is None else lambda name: rule_of(whole_name(name))
        old = shard if team is None else None
        self._shard = shard if kept and shard else Shard(layout, rank, by_name, dtype=dtype, device=host, old=old)
        for u, unit in enumerate(self._units):
            unit.module.set_custom_reduce_scatter(_Leaves(partial(self._arrived, u)))
            unit.module.set_all_reduce_hook(partial(self._alone, u))  # in a world of one FSDP2 calls no reduce-scatter
            unit.module.set_gradient_divide_factor(1.0)  # the sum, and the caller's scale
            unit.module.set_force_sum_reduction_for_comms(True)
            reduce_unused(unit.module)
        for place, local in [] if kept else self._places():
            self._shard.state[0, place] = local
        self._drop()

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The passes this rank makes in each update, ghosts among them."""
        return self.dealt(ghosts=True)

    def close(self) -> None:
        """Nothing to take out: the model goes with its group."""

    def layouts(self) -> Sequence[Layout]:
        """One unit after the other, as FSDP2 has cut them, for each member."""
        members = range(self.members)
        return [_units(self.model, self.deal.world, partial(self._part, index=index))[1] for index in members]

    def _part(self, name: str, shape: tuple[int, ...], *, index: int | None = None) -> tuple[str, tuple[int, ...]]:
        """What FSDP2 cuts of this parameter on one member of a team, else here."""
        cut = self.cuts.get(name)
        if cut is None or self.team is None:
            return name, shape
        index = self.team.index if index is None else index
        return cut.called(index), cut.box(index)[1]

    def _arrived(self, u: int, leaf: torch.Tensor) -> None:
        """A unit's backward pass is over: its leaf goes out, one slice to each rank."""
        assert self.group is not None
        owners = self._owners()
        part = leaf.numel() // self.deal.world
        _check_all_in(self._units[u], part)
        inbox = leaf.new_empty(len(owners), part)
        comes = [part if rank in owners else 0 for rank in range(self.deal.world)]
        goes = [part if self.rank in owners else 0] * self.deal.world
        sent = leaf if self.rank in owners else leaf[:0]
        self._count(u)
        work = dist.all_to_all_single(inbox.view(-1), sent, comes, goes, group=self.group, async_op=True)
        self._arrivals.append(_Arrival(unit=u, work=work, leaves=inbox, sent=sent))
        # On a GPU the stream orders everything and waiting costs the host nothing; here waiting would stop the backward pass.
        while len(self._arrivals) > (IN_FLIGHT if leaf.device.type == "cpu" else 0):
            self._fold(self._arrivals.popleft())

    def _alone(self, u: int, leaf: torch.Tensor) -> None:
        if self.deal.world == 1:
            _check_all_in(self._units[u], leaf.numel())
            self._count(u)
            if leaf.is_cuda:  # FSDP has made it on another stream, whose next allocation may be its memory
                leaf.record_stream(torch.cuda.current_stream())
            self._fold(_Arrival(unit=u, work=None, leaves=leaf.unsqueeze(0), sent=leaf))

    def _count(self, u: int) -> None:
        if self.turn is None:
            raise RuntimeError(
                "a backward pass outside of a lane: call begin(turn) first, so that its gradient has an owner"
            )
        if u in self._seen:
            raise RuntimeError(
                f"unit '{self._units[u].name}' was reduced twice in lane {self.turn.lane}; "
                "a lane is one forward and one backward pass: take more lanes instead"
            )
        self._seen.add(u)

    def _fold(self, arrival: _Arrival) -> None:
        """Adds the round's leaves to the tree."""
        if arrival.work is not None:
            arrival.work.wait()
        fold = self._folds[arrival.unit]
        # Added up in the type of what is trained: a policy may compute gradients in a narrower one.
        leaves = arrival.leaves.to(self._shard.grad.dtype)
        for rank, leaf in zip(self._owners(), leaves, strict=True):
            lane = self.deal.carried[rank][len(self._done)]
            fold.put(Node(lane, lane + 1), leaf)
        if list(fold.parts) == [(0, self.deal.lanes)]:
            slices = [self._shard.grad[place] for place in self._units[arrival.unit].places]
            torch._foreach_copy_(slices, list(torch.split(fold.total(), [part.numel() for part in slices])))
            fold.parts.clear()
        elif self.deal.world > 1:
            # A sum that lives on in one of many leaves' rows would keep them all in memory.
            mine = {node for node, part in fold.parts.items() if _within(part, leaves)}
            if 2 * len(mine) <= len(leaves):
                fold.parts.update({node: fold.parts[node].clone() for node in mine})

    def _owners(self) -> list[int]:
        """The ranks that have a real lane in the present round."""
        return [rank for rank, mine in enumerate(self.deal.carried) if len(self._done) < len(mine)]

    def _finish(self, turn: Turn) -> None:
        while self._arrivals:
            self._fold(self._arrivals.popleft())
        missing = [unit.name for u, unit in enumerate(self._units) if u not in self._seen]
        if self.left_out and not self._seen:
            self._fold_zeros()
        elif missing:
            raise RuntimeError(
                f"unit '{missing[0]}' had no backward pass in lane {turn.lane}; every lane runs every unit once"
            )
        self._seen.clear()
        for unit in self._units:
            for _, param in unit.params:
                param.grad = None

    def _fold_zeros(self) -> None:
        """A round in which no rank had a backward pass: its leaves are 0."""
        for u in range(len(self._units)):
            zeros = torch.zeros(len(self._owners()), dtype=self._shard.grad.dtype, device=self._device)
            self._fold(_Arrival(unit=u, work=None, leaves=zeros, sent=zeros))

    def _reduce(self) -> None:
        self.point("reduce")  # the reducing itself was done lane by lane
        self._drop()

    def _drop(self) -> None:
        self._folds = [Fold[torch.Tensor](self.deal.lanes, _added) for _ in self._units]
        self._arrivals: deque[_Arrival] = deque()
        self._seen: set[int] = set()
        for unit in self._units:
            for _, param in unit.params:
                param.grad = None

    def _publish(self, params: torch.Tensor) -> None:
        self.point("gather")  # the gathering itself is the next forward pass's
        for unit in self._units:
            unit.module.reshard()  # or a unit that is still gathered would go on computing with the old version
        for place, local in self._places():
            local.copy_(params[place])

    def _places(self) -> list[tuple[slice, torch.Tensor]]:
        """Where each of this rank's pieces lies: in the shard, and in FSDP2's own memory."""
        pieces = {piece.name: piece for piece in self._shard.pieces}
        found: list[tuple[slice, torch.Tensor]] = []
        for unit in self._units:
            for name, param in unit.params:
                if name in pieces:
                    found.append((pieces[name].there, cast("DTensor", param)._local_tensor.detach().view(-1)))
        return found


class _Leaves(ReduceScatter):
    """Hands FSDP2's reduce-scatter input to us. Its output is never looked at."""

    def __init__(self, arrived: Callable[[torch.Tensor], None]) -> None:
        self._arrived = arrived

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        del group, op, async_op
        output_tensor.zero_()
        self._arrived(input_tensor)


def _units(
    model: torch.nn.Module, world: int, part: Callable[[str, tuple[int, ...]], tuple[str, tuple[int, ...]]]
) -> tuple[list[_Unit], Layout]:
    """FSDP2's units and where each rank's slices lie. `part` says what is cut of a parameter of that name and shape. FSDP2 cuts
    that along its first dimension into `world` chunks of equal height, the last ones shorter or empty; a rank's slice is one
    such chunk, padded.
    """
    names = {id(param): name for name, param in parameters(model)}
    units: list[_Unit] = []
    ranks: list[list[Piece]] = [[] for _ in range(world)]
    at = 0
    for name, module, params in _groups(model):
        sharded = (held.sharded_param for held in params)
        parts = [(*part(names[id(param)], tuple(param.shape)), param) for param in sharded if param.requires_grad]
        if not parts:
            continue
        places: list[slice] = []
        for param_name, shape, _ in parts:
            height, row = -(-shape[0] // world), prod(shape[1:])
            for rank in range(world):
                start, stop = min(rank * height, shape[0]) * row, min((rank + 1) * height, shape[0]) * row
                if start < stop:
                    ranks[rank].append(Piece(name=param_name, shape=shape, start=start, stop=stop, at=at))
            places.append(slice(at, at + height * row))
            at = up(at + height * row)
        mine = tuple((param_name, param) for param_name, _, param in parts)
        units.append(_Unit(name=bare(name) or "the root", module=module, params=mine, places=tuple(places)))
    return units, Layout(size=at, pieces=tuple(tuple(mine) for mine in ranks))


def _held(model: torch.nn.Module) -> list[FSDPParam]:
    """All that FSDP2 has cut up."""
    return [held for _, _, params in _groups(model) for held in params]


def _groups(model: torch.nn.Module) -> Iterator[tuple[str, FSDPModule, list[FSDPParam]]]:
    """What FSDP2 keeps to itself: (name, module, parameters) of each unit. Modules sharded together are one unit."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            for group in param_groups(module):
                if id(group) not in seen:
                    seen.add(id(group))
                    yield name, module, group.fsdp_params


def give_memory(model: torch.nn.Module, device: str) -> None:
    """Zeros for this rank's slices of what was built without memory (`runtime.outline`), once `fully_shard` was applied."""
    for held in [held for held in _held(model) if held.sharded_param.is_meta]:
        zeros = torch.zeros_like(held.sharded_param, device="cpu" if held.offload_to_cpu else device)
        trains = held.sharded_param.requires_grad
        held._setattr_on_modules(torch.nn.Parameter(zeros, requires_grad=trains))  # in all modules that share it
        held.reset_sharded_param()  # type: ignore[no-untyped-call] # torch has not annotated it


def _check_cut(model: torch.nn.Module, world: int) -> None:
    """Misuse where FSDP2 does not cut all that trains, along the first dimension, over the whole gang."""
    cut = {id(held.sharded_param): held for held in _held(model)}
    trains = [(name, param) for name, param in parameters(model) if param.requires_grad]
    if left := [name for name, param in trains if id(param) not in cut]:
        raise Misuse(
            f"{len(left)} parameters that train are no part of what fully_shard put together ({left[0]}, ...): nobody would "
            "reduce or keep them. Apply it to the whole model at last, and ignore none that trains."
        )
    for name, param in trains:
        held = cut[id(param)]
        if held.fsdp_placement.dim != 0:
            raise Misuse(
                f"{name} is cut along dimension {held.fsdp_placement.dim}: shards are rows here; leave shard_placement_fn out."
            )
        if held.mesh_info.mesh.ndim != 1 or held.mesh_info.mesh.size() != world:
            raise Misuse(
                f"{name} is not cut over all {world} ranks of the gang: give fully_shard the mesh that the function was given."
            )


def _check_all_in(unit: _Unit, numbers: int) -> None:
    """Misuse where torch has left a parameter out of a unit's gradient: see `torch_names.reduce_unused`."""
    if numbers != sum(place.stop - place.start for place in unit.places):
        raise Misuse(
            f"A parameter of '{unit.name}' took no part in this pass: torch {torch.__version__} leaves it out of the "
            "sum. Install torch 2.13 or later, or set model.strategy: replicated."
        )


def _added(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """In place; of a leaf that was left out there is one 0 alone."""
    return right.add_(left) if left.dim() < right.dim() else left.add_(right)


def _within(part: torch.Tensor, whole: torch.Tensor) -> bool:
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
