"""A team of one gang that asks somebody outside, without a run around it."""

import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from elasticrl.ppo.handed import SAMPLES, SCORES, VERDICTS
from elasticrl.ppo.rewards import Scored
from elasticrl.ppo.rollout.engine import EngineFailed, Samples
from elasticrl.runtime.asked import Found, Hop, Kind, ask_once, asks
from elasticrl.runtime.group import Gang, form
from elasticrl.runtime.interrupt import GangError
from elasticrl.runtime.team import form_team
from elasticrl.runtime.tokens import form_tokens

LIMIT = timedelta(seconds=30)
ODD = [0.1 + 0.2, 1e-300, -0.0, 3.0]  # as floats of Python


def joined(rank: int, world: int, store: dist.Store, *, generation: int, tp: int, cp: int) -> tuple[Gang, list[Hop]]:
    gang = form(generation=generation, rank=rank, world=world, store=store)
    hops = []
    if cp > 1:
        tokens = form_tokens(gang.group, cp, cuts=tp, form_s=LIMIT, limit=LIMIT)
        hops.append(Hop(group=tokens.group, index=tokens.index))
    if tp > 1:
        team = form_team(gang.group, tp, form_s=LIMIT, limit=LIMIT)
        hops.append(Hop(group=team.group, index=team.index))
    return gang, hops


def samples(rank: int) -> dict[int, Samples]:
    chance = torch.Generator().manual_seed(rank)
    return {
        lane: Samples(
            ids=(f"0:{lane}", "0:ü"), tokens=torch.randint(99, (2, 5), generator=chance), version=12,
            attention=torch.rand(2, 5, generator=chance) > 0.5, mask=torch.rand(2, 3, generator=chance) > 0.5,
            logprobs=torch.rand(2, 3, generator=chance), ended=torch.tensor([True, False]),
        )
        for lane in (3, 7)
    }  # fmt: skip


def everything(
    rank: int, world: int, store: dist.Store, *, generation: int, tp: int, cp: int
) -> tuple[str, str, str, bool, int]:
    """What came of three questions, in words; whether this rank asks, and how often it did."""
    gang, hops = joined(rank, world, store, generation=generation, tp=tp, cp=cp)
    times = 0

    def counted(value):
        nonlocal times
        times += 1
        return value

    lanes = {3: Scored(scores=[*ODD, rank]), 4: Scored(scores=[[0.5], []], parts={"brief": [rank, [0.5]]})}
    verdicts = [torch.full((2, 3), rank + 0.1), torch.empty(0, 4), torch.tensor(rank, dtype=torch.bfloat16)]
    try:
        said = ask_once(hops, lambda: counted(samples(rank)), SAMPLES)
        scored = ask_once(hops, lambda: counted(lanes), SCORES)
        judged = ask_once(hops, lambda: counted(verdicts), VERDICTS)
        assert all(isinstance(one, Samples) for one in said.values())
        return repr(said), repr(scored), repr(judged), asks(hops), times
    finally:
        gang.leave()


def failing(rank: int, world: int, store: dist.Store, *, generation: int) -> tuple[str, str]:
    """Which failure each member meets, and that the team can ask again behind it."""
    gang, hops = joined(rank, world, store, generation=generation, tp=2, cp=1)

    def fails() -> dict[int, Samples]:
        raise EngineFailed(f"rank {rank} found no engine")

    try:
        ask_once(hops, fails, SAMPLES)
    except EngineFailed as error:
        word = ask_once(
            hops, lambda: f"from rank {rank}", Kind(pack=lambda it: Found(words=it), unpack=lambda it: it.words)
        )
        return str(error), word
    finally:
        gang.leave()
    return "", ""


def interrupted(rank: int, world: int, store: dist.Store, *, generation: int) -> str:
    """A member that waits is told to leave while the other one still asks."""
    gang, hops = joined(rank, world, store, generation=generation, tp=2, cp=1)

    def asking() -> dict[int, Samples]:
        store.get(f"left {generation}")  # until the other one is gone
        return samples(rank)

    try:
        if rank:
            threading.Timer(0.3, gang.interrupt, ("a test says so",)).start()
        ask_once(hops, asking, SAMPLES)
    except GangError as error:
        return str(error)
    finally:
        gang.leave()
        if rank:
            store.set(f"left {generation}", "1")
    return "nobody left"
