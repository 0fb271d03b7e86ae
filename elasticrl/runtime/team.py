"""A team: `model.tp` consecutive ranks of one node that hold one copy of a model between them, each a part of its layers.
With `model.cp` a node's team is so many of these one after the other, which share a lane's tokens (`runtime.tokens`). Here each
of them is a team.

The one idea: lanes are dealt to teams, and a parameter that a team has cut is a parameter of its own on each of its members
(`q_proj.weight@0`, `q_proj.weight@1`). So the members of one index, one from each team, are to each other what ranks are
where there are no teams: they share out, reduce and gather what that index has. What a team does not cut all its members have
alike; where something is counted or kept once, the member of index 0 does it.

Which parameters are cut, and how, the model says itself: by the DTensors that `parallelize_module` has made of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from elasticrl.runtime.interrupt import Broken, GangError
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.torch_names import forget_meshes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta

    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from elasticrl.config.training import Model
    from elasticrl.contract.orders import Place

AXIS = "tp"  # the mesh's, for parallelize_module
ACROSS = "dp"  # the other one's, for fully_shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """A rank's team. `across` are the members of its index, one from each team, in the teams' order.

    Example: Team(size=2, index=1, number=0, group=..., across=..., everyone=...), of ranks 0 and 1 the second
    """

    size: int
    index: int  # this rank's, in its team
    number: int  # the team's
    group: dist.ProcessGroup
    across: dist.ProcessGroup
    everyone: dist.ProcessGroup

    def mesh(self, device: str) -> DeviceMesh:
        """Its members', one axis of the name `tp`."""
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self.group, device, mesh_dim_names=(AXIS,))

    def grid(self, device: str) -> DeviceMesh:
        """Of all teams: its axis `dp` goes from team to team, and `tp` through one."""
        import torch
        from torch.distributed.device_mesh import DeviceMesh

        ranks = torch.arange(self.everyone.size(), dtype=torch.int).view(-1, self.size)
        return DeviceMesh.from_group([self.across, self.group], device, mesh=ranks, mesh_dim_names=(ACROSS, AXIS))


def form_team(everyone: dist.ProcessGroup, size: int, *, form_s: timedelta, limit: timedelta) -> Team:
    """This rank's two groups in a gang that has formed. They live and end with it: its flag interrupts them, and who leaves it
    leaves them. Collective.
    """
    rank, world = everyone.rank(), everyone.size()
    assert world % size == 0, f"{world} ranks are no teams of {size}"
    number, index = divmod(rank, size)
    forget_meshes()
    within = group_of(range(number * size, (number + 1) * size), form_s=form_s, limit=limit)
    across = group_of(range(index, world, size), form_s=form_s, limit=limit)
    return Team(size=size, index=index, number=number, group=within, across=across, everyone=everyone)


def group_of(ranks: Sequence[int], *, form_s: timedelta, limit: timedelta) -> dist.ProcessGroup:
    """The group of these ranks, of which this one is. Collective among them."""
    try:
        group = dist.new_group(list(ranks), timeout=form_s, use_local_synchronization=True)
    except GangError:
        raise
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise Broken(f"forming the group of ranks {list(ranks)} failed: {error}") from error
    assert isinstance(group, dist.ProcessGroup)
    group.set_timeout(limit)
    return group


def check_team(model: Model, place: Place) -> None:
    """Misuse where this process's file says another size than the plan that gives it its place."""
    if model.team == place.team:
        return
    said = f"model.tp x model.cp is {model.tp} x {model.cp}" if model.cp > 1 else f"model.tp is {model.tp}"
    if place.world == 1:
        raise Misuse(
            f"{said}, and one process alone is no team: start the job with `elasticrl run`, or set tp: 1 and cp: 1."
        )
    raise Misuse(
        f"{said} in this node's configuration, and the job's plan has teams of {place.team}: give all nodes the "
        "same file, and start the job anew if it was changed."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A parameter of which each member of a team has a part: equal heights along one dimension, the last ones shorter.

    Example: Cut(name="q_proj.weight", shape=(64, 32), dim=0, parts=2)
    """

    name: str
    shape: tuple[int, ...]  # of the whole
    dim: int
    parts: int

    def called(self, index: int) -> str:
        """The name of one member's part.

        >>> Cut(name="q_proj.weight", shape=(64, 32), dim=0, parts=2).called(1)
        'q_proj.weight@1'
        """
        return f"{self.name}@{index}"

    def box(self, index: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offset and lengths of one member's part.

        >>> Cut(name="w", shape=(5, 4), dim=0, parts=2).box(1)
        ((3, 0), (2, 4))
        """
        length = self.shape[self.dim]
        height = -(-length // self.parts)
        start, stop = min(index * height, length), min((index + 1) * height, length)
        offset = tuple(start if d == self.dim else 0 for d in range(len(self.shape)))
        lengths = tuple(stop - start if d == self.dim else n for d, n in enumerate(self.shape))
        return offset, lengths


def whole_name(name: str) -> str:
    """What a part's parameter is called.

    >>> whole_name("q_proj.weight@1"), whole_name("norm.weight")
    ('q_proj.weight', 'norm.weight')
    """
    return name.partition("@")[0]


def cuts_of(named: Sequence[tuple[str, torch.nn.Parameter]], team: Team) -> Mapping[str, Cut]:
    """What of these the team has cut, by name. Misuse where it is cut in a way that is not known here, or nothing is."""
    found: dict[str, Cut] = {}
    for name, param in named:
        axes: tuple[str, ...] = param.device_mesh.mesh_dim_names or () if hasattr(param, "device_mesh") else ()
        if AXIS not in axes:
            continue  # it is whole, or FSDP2's alone
        placement: Any = param.placements[axes.index(AXIS)]  # type: ignore[attr-defined]
        if not placement.is_shard():
            continue
        cut = Cut(name=name, shape=tuple(param.shape), dim=placement.dim, parts=team.size)
        lengths, here = cut.box(team.index)[1], tuple(local(param).shape)
        rows = 1 if len(axes) > 1 else 0  # of which FSDP2 has cut the first dimension once more
        if lengths[rows:] != here[rows:]:
            raise Misuse(
                f"{name} is cut into {here} here, and {lengths} was expected: parallelize the model over the mesh that the "
                f'function was given (mesh["{AXIS}"]), each parameter along one dimension.'
            )
        if not all(0 not in cut.box(index)[1] for index in range(team.size)):
            raise Misuse(
                f"{name} has {cut.shape[cut.dim]} rows along dimension {cut.dim}, and not each of {team.size} members of a "
                "team would get some: leave it whole, or lower model.tp."
            )
        found[name] = cut
    if not found:
        raise Misuse(
            f"The members of a team would all compute the same: no parameter is cut over them. Apply parallelize_module over "
            f'mesh["{AXIS}"], or set model.tp: 1.'
        )
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What of it this rank has in memory."""
    return tensor._local_tensor if hasattr(tensor, "placements") else tensor  # type: ignore[attr-defined] # noqa: SLF001


def part_of(param: torch.Tensor) -> tuple[slice, ...]:
    """What of the whole this rank has: what a team has cut for it, and of that the rows that FSDP2 has."""
    where = [slice(0, length) for length in param.shape]
    axes: tuple[str, ...] = param.device_mesh.mesh_dim_names or () if hasattr(param, "device_mesh") else ()
    for axis in (axis for axis in (AXIS, ACROSS) if axis in axes):
        mesh, placement = param.device_mesh[axis], param.placements[axes.index(axis)]  # type: ignore[attr-defined]
        if not placement.is_replicate():
            dim = placement.dim  # is_shard() is false of rows that are cut twice
            within, rank = where[dim], mesh.get_local_rank()
            height = -(-(within.stop - within.start) // mesh.size())
            start, stop = (min(within.start + height * edge, within.stop) for edge in (rank, rank + 1))
            where[dim] = slice(start, stop)
    return tuple(where)


def lie_in(param: torch.nn.Parameter, memory: torch.Tensor) -> None:
    """This rank's part of the parameter lies in this memory from now on."""
    if hasattr(param, "placements"):
        param._local_tensor = memory  # type: ignore[attr-defined] # noqa: SLF001 - as FSDP2 does with its shards
    else:
        param.data = memory


def local_grad(param: torch.nn.Parameter) -> torch.Tensor:
    """The gradient of this rank's part. A parameter that a team has whole may have got a part of the sum on each member."""
    grad: Any = param.grad
    if not hasattr(grad, "placements"):
        return grad  # type: ignore[no-any-return]
    wanted = param.placements  # type: ignore[attr-defined] # it is a DTensor where its gradient is one
    found = grad if grad.placements == wanted else grad.redistribute(placements=wanted)
    return found._local_tensor  # type: ignore[no-any-return] # noqa: SLF001
