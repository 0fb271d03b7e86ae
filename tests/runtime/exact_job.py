"""A small job with everything that tends to break bits, run by worker processes: dropout, odd shapes, AdamW with two groups,
clipping, a learning rate that changes, uneven lanes. `segment` trains from one version to another; state passes from gang to
gang through files in `vault`, one per rank and version, written before the version is sealed.
"""

import hashlib
import os
import pickle
import signal
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from elasticrl.runtime.fsdp import Fsdp
from elasticrl.runtime.group import Gang, form
from elasticrl.runtime.interrupt import GangError
from elasticrl.runtime.lanes import Deal
from elasticrl.runtime.layout import Layout
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.optim import SGD, AdamW, Rule, stock
from elasticrl.runtime.replicated import Replicated
from elasticrl.runtime.rng import Streams
from elasticrl.runtime.scalars import Tally
from elasticrl.runtime.strategy import Strategy

Whole = dict[tuple[str, str], torch.Tensor]
ROWS = 9  # of a lane's batch: odd, and above the five below which matrix products take other paths


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(23, 17)
        self.first = nn.Sequential(nn.Linear(17, 37), nn.LayerNorm(37), nn.GELU(), nn.Dropout(0.2))
        self.second = nn.Sequential(nn.Linear(37, 131, bias=False), nn.Tanh(), nn.Dropout(0.1), nn.Linear(131, 5))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.table(tokens).mean(1))) * self.scale


def fresh() -> Model:
    torch.manual_seed(3)
    return Model()


def sharded(mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> nn.Module:
    model = fresh()
    fully_shard(model.first, mesh=mesh, mp_policy=policy)
    fully_shard(model.second, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def adamw(name: str) -> Rule:
    return AdamW(lr=1e-2, weight_decay=0.1 if name.endswith("weight") else 0.0)


def sgd(_name: str) -> Rule:
    return SGD(lr=0.1, momentum=0.9, weight_decay=0.01)


class Lion(torch.optim.Optimizer):
    """A script's own optimizer."""

    def __init__(self, params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for param in group["params"]:
                state, (one, two) = self.state[param], group["betas"]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(torch.sign(state["exp_avg"] * one + param.grad * (1 - one)), alpha=-group["lr"])
                state["exp_avg"] = state["exp_avg"] * two + param.grad * (1 - two)  # a new tensor, as many scripts do


@cache
def _amsgrad() -> Rule:
    return stock(torch.optim.Adam, lr=1e-2, amsgrad=True, weight_decay=0.1)


@cache
def _lion() -> Rule:
    return stock(Lion, lr=1e-2, weight_decay=0.1)


def amsgrad(_name: str) -> Rule:
    return _amsgrad()


def lion(name: str) -> Rule:
    """With another rule, which keeps other state, for some parameters."""
    return _lion() if name.endswith("weight") else SGD(lr=0.1, momentum=0.9)


def none(_point: str) -> None: ...


def policy_of(kind: str) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16 if kind == "fsdp-narrow" else None)


def make(
    kind: str, lanes: int, gang: Gang | None, rule: Callable[[str], Rule] = adamw, point: Callable[[str], None] = none
) -> tuple[Strategy, nn.Module]:
    """`kind` is replicated, fsdp (lanes dealt round by round), fsdp-contiguous or fsdp-narrow, which computes in bfloat16."""
    rank, world, group = (gang.rank, gang.world, gang.group) if gang else (0, 1, None)
    if kind == "replicated":
        model = fresh()
        deal = Deal.contiguous(lanes, world)
        return Replicated(model, rule, deal=deal, rank=rank, group=group, bucket_bytes=6000, point=point), model
    deal = Deal.contiguous(lanes, world) if kind == "fsdp-contiguous" else Deal.interleaved(lanes, world)
    assert group is not None
    strategy = Fsdp(partial(sharded, policy=policy_of(kind)), rule, deal=deal, rank=rank, group=group, point=point)
    return strategy, strategy.model


def update(strategy: Strategy, model: nn.Module, step: int, *, seal: bool = True) -> dict[str, object]:
    """One update; what all ranks must agree on. The weights of samples need a batch-wide scalar before the backward pass."""
    lanes = strategy.deal.lanes
    streams = Streams(seed=1, step=step)
    batch = {lane: torch.randn(ROWS, generator=streams.at(lane=lane).torch("advantage")) for lane in range(lanes)}
    before = {lane: Tally() for lane in strategy.deal.carried[strategy.rank]}
    for lane, tally in before.items():
        tally.spread("advantage", batch[lane])
    advantage = strategy.exchange(before).moments["advantage"]
    for turn in strategy.turns:
        tally = strategy.begin(turn)
        here = streams.at(lane=turn.lane)
        tokens = torch.randint(23, (ROWS, 6), generator=here.torch("tokens"))
        with here.ambient("dropout"):
            out = model(tokens)
        weights = (batch[turn.lane] - advantage.mean) / (advantage.std() + 1e-8)
        loss = (torch.log_softmax(out, -1)[:, 0] * weights).mean()
        loss.backward()
        tally.add(loss=loss.item(), samples=ROWS)
        strategy.done()
    reduced = strategy.update(scale=1 / lanes, max_norm=0.05, lr_factor=1 / (1 + step), seal=seal)
    return {"norm": reduced.norm, "loss": reduced.tally.sums["loss"], "samples": reduced.tally.sums["samples"]}


def keep(strategy: Strategy, vault: str) -> None:
    """What a vault does: this rank's shard of the newest version, whole or not there."""
    shard = strategy.shard
    version = shard.version + shard.applied
    state = (shard.next if shard.applied else shard.state).numpy()
    name = f"{version}.{strategy.rank}of{strategy.deal.world}"
    path = Path(vault, f"{os.getpid()}.part")
    path.write_bytes(pickle.dumps((shard.rows, shard.pieces, state)))
    path.rename(Path(vault, name))


def newest(vault: str) -> int:
    """The newest version that is whole: some world's every shard is there."""
    found: dict[tuple[int, int], int] = {}
    for path in Path(vault).iterdir():
        if path.suffix == ".part":
            continue
        version, world = int(path.name.split(".")[0]), int(path.name.split("of")[1])
        found[version, world] = found.get((version, world), 0) + 1
    return max((version for (version, world), count in found.items() if count == world), default=0)


def everything(vault: str, version: int) -> Whole:
    """Any world's shards put together, whichever strategy wrote them."""
    whole: Whole = {}
    for path in sorted(Path(vault).glob(f"{version}.*of*")):
        rows, pieces, state = pickle.loads(path.read_bytes())
        for i, row in enumerate(rows):
            for piece in pieces:
                values = whole.setdefault((row, piece.name), torch.full((piece.size,), torch.nan))
                values[piece.start : piece.stop] = torch.from_numpy(state[i, piece.there])
    return whole


def load(strategy: Strategy, vault: str, version: int) -> None:
    """From files alone."""
    whole = everything(vault, version)
    shard = strategy.shard
    for i, row in enumerate(shard.rows):
        for piece in shard.pieces:
            shard.state[i, piece.there] = whole[row, piece.name][piece.start : piece.stop]
    shard.version = version
    strategy.publish()


def fingerprint(strategy: Strategy) -> str:
    """SHA-256 of all parameters and all optimizer state, gathered: the slow, certain counterpart of the digest."""
    layout: Layout = strategy.shard.layout
    state = strategy.shard.state.contiguous()
    everyone = [torch.empty_like(state) for _ in range(strategy.deal.world)]
    if strategy.group is None:
        everyone = [state]
    else:
        dist.all_gather(everyone, state, group=strategy.group)
    whole = {
        name: torch.empty(len(strategy.shard.rows), torch.Size(shape).numel()) for name, shape in layout.shapes.items()
    }
    for pieces, theirs in zip(layout.pieces, everyone, strict=True):
        for piece in pieces:
            whole[piece.name][:, piece.start : piece.stop] = theirs[:, piece.there]
    digest = hashlib.sha256()
    for name in sorted(whole):
        digest.update(name.encode() + whole[name].numpy().tobytes())
    return digest.hexdigest()


def segment(
    rank: int,
    world: int,
    store: dist.Store,
    *,
    generation: int,
    kind: str,
    lanes: int,
    until: int,
    vault: str | None = None,
    rule: Callable[[str], Rule] = adamw,
    groupless: bool = False,
) -> dict[str, object]:
    """Trains to version `until` from the newest whole version in the vault, or from scratch."""
    gang = None if groupless else form(generation=generation, rank=rank, world=world, store=store)
    strategy, model = make(kind, lanes, gang, rule)
    if vault:
        load(strategy, vault, newest(vault)) if newest(vault) else keep(strategy, vault)
    said: list[dict[str, object]] = []
    digests = []
    for step in range(strategy.shard.version, until):
        said.append(update(strategy, model, step))
        digests.append(strategy.digest().hex)
        if vault:
            keep(strategy, vault)
    result = {
        "sha256": fingerprint(strategy),
        "digest": strategy.digest().hex,
        "digests": digests,
        "said": said,
        "version": strategy.shard.version,
    }
    strategy.close()
    if gang:
        gang.leave()
    return result


def through_a_death(
    rank: int,
    world: int,
    store: dist.Store,
    *,
    generation: int,
    kind: str,
    lanes: int,
    until: int,
    vault: str,
    victim: int,
    at_step: int,
    point: str,
    rule: Callable[[str], Rule] = adamw,
) -> dict[str, object]:
    """As `segment`, but the victim is killed at a point of one update; the others go on without it, in the same processes, from
    the newest version that is whole in the vault.
    """
    gang = form(generation=generation, rank=rank, world=world, store=store)
    now = [0]

    def fire(name: str) -> None:
        if gang.rank == victim and gang.generation == generation and now[0] == at_step and name == point:
            os.kill(os.getpid(), signal.SIGKILL)

    strategy, model = make(kind, lanes, gang, rule, point=fire)
    keep(strategy, vault)
    result: dict[str, object] = {}
    while strategy.shard.version < until:
        now[0] = strategy.shard.version
        try:
            update(strategy, model, now[0], seal=False)
            keep(strategy, vault)
            dist.barrier()  # every shard of it is kept: only now may it be built upon
            strategy.seal()
        except GangError:
            gang.leave()
            strategy.close()
            homes = {old: new for new, old in enumerate(r for r in range(world) if r != victim)}
            gang = form(generation=generation + 1, rank=homes[rank], world=len(homes), store=store)
            strategy, model = make(kind, lanes, gang, rule, point=fire)
            load(strategy, vault, newest(vault))
            result = {"resumed": strategy.shard.version}
    result["sha256"] = fingerprint(strategy)
    gang.leave()
    return result


class Counting(nn.Module):
    """Its gradient is whatever integers a lane hands in, so that float sums are exact and can be compared with int64's."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return (self.weight * numbers).sum()


def counting(mesh: DeviceMesh | None = None, policy: MixedPrecisionPolicy | None = None) -> nn.ModuleDict:
    model = nn.ModuleDict({"a": Counting(7, 3), "b": Counting(129, 5), "c": Counting(1), "d": Counting(64, 64)})
    if mesh is not None:
        for part in model.values():
            fully_shard(part, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    return model


def count_lanes(
    rank: int, world: int, store: dist.Store, *, generation: int, kind: str, lanes: int, bucket_bytes: int = 2000,
    left_out: int | None = None, forgotten: int | None = None,
) -> bool:  # fmt: skip
    """Whether the reduced gradient is, to the bit, the int64 sum over all lanes: none lost, none twice, no ghost in it. In the
    round `left_out` no rank has a backward pass, and says so; in the round `forgotten` none has one, and none says so.
    """
    gang = form(generation=generation, rank=rank, world=world, store=store)
    strategy: Strategy
    if kind == "replicated":
        model = counting()
        deal = Deal.contiguous(lanes, world)
        strategy = Replicated(model, sgd, deal=deal, rank=rank, group=gang.group, bucket_bytes=bucket_bytes)
    else:
        deal = Deal.contiguous(lanes, world) if kind == "fsdp-contiguous" else Deal.interleaved(lanes, world)
        strategy = Fsdp(partial(counting, policy=policy_of(kind)), sgd, deal=deal, rank=rank, group=gang.group)
        model = strategy.model
    shapes = {name: strategy.shard.layout.shapes[f"{name}.weight"] for name in "abcd"}

    def numbers(lane: int, name: str) -> torch.Tensor:
        # Of those a lane's are exact in bfloat16, and sums of lanes are not.
        most = 127 if kind == "fsdp-narrow" else 9999
        return torch.randint(-most, most, shapes[name], generator=Streams(seed=5, lane=lane).torch(name))

    for number, turn in enumerate(strategy.turns):
        strategy.begin(turn)
        if number == left_out:
            strategy.leave_out()
        elif number != forgotten:
            loss = sum(part(numbers(turn.lane, name).float()) for name, part in model.items())
            loss.backward()
        try:
            strategy.done()
        except RuntimeError:
            gang.leave()
            raise
    strategy.reduce()
    good = True
    counts = [lane for mine in deal.carried for number, lane in enumerate(mine) if number != left_out]
    for piece in strategy.shard.pieces:
        exact = sum(numbers(lane, piece.name[0]) for lane in counts).view(-1)[piece.start : piece.stop]
        good &= torch.equal(strategy.shard.grad[piece.there].to(torch.int64), exact)
    gang.leave()
    return good


class Picky(nn.Module):
    """One unit with a parameter that a lane may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(4))

    def forward(self, lane: int) -> torch.Tensor:
        return self.a.sum() * (lane + 1) + (self.b.sum() if lane == 2 else 0)


def leave_out_a_parameter(
    rank: int, world: int, store: dist.Store, *, generation: int, as_old_torch: bool = False
) -> list[tuple[str, float]] | str:
    """The summed gradients of four lanes of which one uses `b`. `as_old_torch`: a torch that does not sum what is unused, and
    what this rank is told of it.
    """
    gang = form(generation=generation, rank=rank, world=world, store=store)

    def build(mesh: DeviceMesh) -> nn.Module:
        model = nn.ModuleDict({"unit": Picky()})
        fully_shard(model["unit"], mesh=mesh)
        return model

    strategy = Fsdp(build, sgd, deal=Deal.interleaved(4, world), rank=rank, group=gang.group)
    if as_old_torch and hasattr(strategy.model["unit"], "set_reduce_scatter_unused_params"):  # else it is one
        strategy.model["unit"].set_reduce_scatter_unused_params(False, recurse=False)
    try:
        for turn in strategy.turns:
            strategy.begin(turn)
            strategy.model["unit"](turn.lane).backward()
            strategy.done()
        strategy.reduce()
        return [
            (piece.name.rpartition(".")[2], number)
            for piece in strategy.shard.pieces
            for number in strategy.shard.grad[piece.there].tolist()
        ]
    except (Misuse, GangError) as error:
        if as_old_torch:
            return str(error)
        raise
    finally:
        gang.leave()


def corrupt(
    rank: int, world: int, store: dist.Store, *, generation: int, victim: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which ranks are said to have diverged before and after one bit flips in the victim's copy of the parameters."""
    gang = form(generation=generation, rank=rank, world=world, store=store)
    strategy, model = make("replicated", 4, gang)
    update(strategy, model, 0)
    assert isinstance(strategy, Replicated)
    before = strategy.diverged()
    if rank == victim:
        model.second[0].weight.data.view(-1).view(torch.int32)[77] ^= 1
    after = strategy.diverged()
    gang.leave()
    return before, after


def tally_otherwise(rank: int, world: int, store: dist.Store, *, generation: int) -> str:
    """What each rank is told where the last one tallies another name."""
    gang = form(generation=generation, rank=rank, world=world, store=store)
    strategy, _ = make("replicated", 2 * world, gang)
    tallies = {lane: Tally() for lane in strategy.deal.carried[rank]}
    for tally in tallies.values():
        tally.add(**{"entropy" if rank == world - 1 else "loss": 1.0})
    try:
        strategy.exchange(tallies)
    except Misuse as error:
        return str(error)
    finally:
        gang.leave()
    return ""
