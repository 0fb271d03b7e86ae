"""Two ranks that are one team, without a run around them: its norm, and what is said where they are not as a team must be."""

import sys
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from elasticrl.ppo.rollout import weights
from elasticrl.runtime.experts import deal_experts
from elasticrl.runtime.fsdp import Fsdp
from elasticrl.runtime.group import form
from elasticrl.runtime.lanes import Deal
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.optim import SGD
from elasticrl.runtime.planned import share
from elasticrl.runtime.replicated import Replicated
from elasticrl.runtime.strategy import Strategy
from elasticrl.runtime.team import form_team
from elasticrl.runtime.tokens import form_tokens


def one_update(
    rank: int, world: int, store: dist.Store, *, generation: int, cut: bool = True, width: int = 8, unlike: bool = False
) -> str | float:
    """The gradient's norm, or what was refused. `unlike`: each member tallies what is its own."""
    gang = form(generation=generation, rank=rank, world=world, store=store)
    limit = timedelta(seconds=30)
    team = form_team(gang.group, world, form_s=limit, limit=limit)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))
    if cut:
        parallelize_module(
            model, team.mesh("cpu")["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()}, src_data_rank=None
        )
    try:
        strategy = Replicated(
            model, lambda _name: SGD(lr=0.1), deal=Deal.contiguous(1, 1), rank=team.number, group=None, team=team
        )
        for turn in strategy.turns:
            tally = strategy.begin(turn)
            loss = model(torch.ones(5, 6)).square().sum()
            loss.backward()
            tally.add(loss=loss.item() + rank * unlike)
            strategy.done()
        return strategy.update().norm
    except Misuse as error:
        return str(error)
    finally:
        gang.leave()


def one_update_of_shared_tokens(
    rank: int, world: int, store: dist.Store, *, generation: int, unlike: bool = False
) -> str | float:
    """The same of ranks that have a lane's tokens between them, here some of its rows each."""
    gang = form(generation=generation, rank=rank, world=world, store=store)
    limit = timedelta(seconds=30)
    tokens = form_tokens(gang.group, world, cuts=1, form_s=limit, limit=limit)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    try:
        deal = Deal.contiguous(1, 1).shared(world)
        strategy = Replicated(model, lambda _name: SGD(lr=0.1), deal=deal, rank=rank, group=gang.group, tokens=tokens)
        for turn in strategy.turns:
            assert turn.lane == 0, "a script's lanes are the job's"
            tally = strategy.begin(turn)
            model(torch.ones(5, 6)[rank::world]).square().sum().backward()
            tally.add(loss=2.5 + rank * unlike)
            strategy.done()
        found = strategy.update()
        assert found.tally.sums == {"loss": 2.5}, "a lane's tally counts once"
        return found.norm
    except Misuse as error:
        return str(error)
    finally:
        gang.leave()


def called_of_teams(rank: int, world: int, store: dist.Store, *, generation: int, fsdp: bool) -> list[str]:
    """What of the modules that make teams a step calls where there are none. `share` is asked for, and has nothing to do."""
    gang = form(generation=generation, rank=rank, world=world, store=store)
    called = set[str]()

    def model(mesh: DeviceMesh) -> nn.Module:
        torch.manual_seed(1)
        made = share(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), mesh)
        return fully_shard(made, mesh=mesh["dp"]) if fsdp else made

    def see(frame: FrameType, event: str, _arg: object) -> None:
        if event == "call" and Path(frame.f_code.co_filename).name in (
            "team.py",
            "tokens.py",
            "planned.py",
            "experts.py",
        ):
            called.add(f"{Path(frame.f_code.co_filename).name}: {frame.f_code.co_name}")

    deal, more = Deal.contiguous(world, world), {"rank": rank, "group": gang.group}
    try:
        strategy: Strategy = (
            Fsdp(model, lambda _name: SGD(lr=0.1), deal=deal, **more)
            if fsdp
            else Replicated(model(init_device_mesh("cpu", (world,))), lambda _name: SGD(lr=0.1), deal=deal, **more)
        )
        for _ in range(2):
            called.clear()
            sys.setprofile(see)
            for turn in strategy.turns:
                tally = strategy.begin(turn)
                loss = strategy.model(torch.ones(5, 6)).square().sum()
                loss.backward()
                tally.add(loss=loss.item())
                strategy.done()
            strategy.update(max_norm=1.0)
            sys.setprofile(None)
        return sorted(called)
    finally:
        sys.setprofile(None)
        gang.leave()


class Block(nn.Module):
    """Some of it is cut by rows and by columns, evenly and not, some is experts', and some of it everybody has."""

    def __init__(self, *, even: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8 if even else 7), nn.Linear(8 if even else 7, 3)
        self.norm = nn.LayerNorm(4)
        self.experts = nn.Module()
        self.experts.num_experts = 4
        self.experts.weight = nn.Parameter(torch.randn(4, 5, 2))


def sent_in_buckets(
    rank: int, world: int, store: dist.Store, *, generation: int, fsdp: bool, even: bool
) -> tuple[bool, int, int]:
    """Ranks in teams of two send their weights: are they those of the whole model, in how many buckets, and how many elements
    had the largest collective?
    """
    gang = form(generation=generation, rank=rank, world=world, store=store)
    limit = timedelta(seconds=30)
    team = form_team(gang.group, 2, form_s=limit, limit=limit)
    torch.manual_seed(1)
    whole = Block(even=even)
    torch.manual_seed(1)
    model, grid = Block(even=even), team.grid("cpu")
    mesh = grid["tp"] if fsdp else team.mesh("cpu")["tp"]
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}, src_data_rank=None)
    deal_experts("experts", model.experts, mesh)
    if fsdp:
        fully_shard(model, mesh=grid["dp"])
    largest, gathers = 0, weights.all_gather_single

    def counted(out: torch.Tensor, mine: torch.Tensor, **named: object) -> object:
        nonlocal largest
        largest = max(largest, out.numel())
        return gathers(out, mine, **named)

    weights.all_gather_single = counted
    try:
        kept = rank == world - 1
        found = list(weights.buckets(model, nbytes=4 * 48, dtype=torch.float32, kept=kept))
        wanted = dict(whole.named_parameters())
        sent = {name: part for bucket in found for name, part in bucket}
        same = sent.keys() == wanted.keys() and all(torch.equal(sent[name], wanted[name]) for name in sent)
        return same if kept else not sent, len(found), largest
    finally:
        weights.all_gather_single = gathers
        gang.leave()


def norm_of_the_whole(width: int = 8) -> float:
    """The same in one process, by torch."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))
    model(torch.ones(5, 6)).square().sum().backward()
    return float(nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None]))
