"""Two ranks that are one team, without a run around them: its norm, and what is said where they are not as a team must be."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from elasticrl.runtime.group import form
from elasticrl.runtime.lanes import Deal
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.optim import SGD
from elasticrl.runtime.replicated import Replicated
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


def norm_of_the_whole(width: int = 8) -> float:
    """The same in one process, by torch."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))
    model(torch.ones(5, 6)).square().sum().backward()
    return float(nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None]))
