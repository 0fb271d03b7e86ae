"""What worker processes do in test_group: break, stop, leave and form groups, and say how long each took."""

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.fsdp import fully_shard

from elasticrl.runtime import group
from elasticrl.runtime.agree import agree
from elasticrl.runtime.checkpoint.place import place
from elasticrl.runtime.checkpoint.shelf import newest_good
from elasticrl.runtime.group import ElasticGroup, Gang, settle
from elasticrl.runtime.interrupt import Broken, GangError, Interrupt, Interrupted
from elasticrl.runtime.torch_names import all_gather_single, reduce_scatter_single
from elasticrl.runtime.vault.holdings import Holding
from elasticrl.runtime.vault.version import Cut, Version

DEVICE = os.environ.get("ELASTICRL_TEST_DEVICE", "cpu")  # cuda: the same over NCCL, all ranks on one GPU
OVER_GLOO = bool(os.environ.get("ELASTICRL_TEST_GLOO"))  # a GPU's tensors over gloo, as where NCCL does not work


def form(**place) -> Gang:
    """A gang on the device under test."""
    torch.set_default_device(DEVICE)
    return group.form(**place, backend="elastic" if DEVICE == "cpu" or OVER_GLOO else "nccl")


def collective(op: str, world: int) -> None:
    """One of some size."""
    many, few = torch.ones(999), torch.ones(999 // world)
    if op == "all_reduce":
        dist.all_reduce(many)
    elif op == "all_gather":
        all_gather_single(many, few)
    elif op == "reduce_scatter":
        reduce_scatter_single(few, many)
    else:
        dist.all_to_all_single(torch.empty(999), many)
    settle(dist.group.WORLD)


def lose_one(
    rank: int, world: int, store: dist.Store, *, generation: int, victim: int, how: str, op: str, told_after_s: float
) -> dict[str, object]:
    """All in one collective after the other, until the victim is gone; the others form again without it."""
    gang = form(generation=generation, rank=rank, world=world, store=store)
    collective(op, world)
    told = [0.0]

    def tell() -> None:
        told[0] = time.monotonic()
        gang.interrupt("the victim is stopped")

    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    if how == "stop":  # nobody but a watcher can know
        threading.Timer(told_after_s, tell).start()
    begin = time.monotonic()
    try:
        while True:
            collective(op, world)
    except GangError as error:
        out = time.monotonic()
        kind, words = type(error).__name__, str(error)
    waiting = gang.collective.waiting
    gang.leave()
    left = time.monotonic()
    ranks = [r for r in range(world) if r != victim]
    gang = form(generation=generation + 1, rank=ranks.index(rank), world=world - 1, store=store)
    formed = time.monotonic()
    total = torch.ones(3)
    dist.all_reduce(total)
    first = time.monotonic()
    gang.leave()
    since = told[0] or begin
    stages = {"noticed": out - since, "left": left - out, "formed": formed - left, "first all_reduce": first - formed}
    return {
        "kind": kind,
        "words": words,
        "total": total.tolist(),
        "waiting": waiting,
        "ms": {name: round(1e3 * value, 1) for name, value in stages.items()},
        "all_ms": round(1e3 * (first - since), 1),
    }


def name_of(task: Path) -> str:
    """Of a thread, which may end meanwhile."""
    try:
        return (task / "comm").read_text()
    except OSError:
        return ""


def alone(rank: int, world: int, store: dist.Store, *, generation: int) -> dict[str, object]:
    """A gang of one, before and after it asks for what wants a gloo, and after it was told to leave."""

    def gloos() -> int:
        return sum("gloo" in name_of(task) for task in Path("/proc/self/task").iterdir())

    def told(work: dist.Work | None) -> list[object]:
        assert work is not None
        return [work.wait(), work.is_completed(), work.is_success(), work.get_future().done()]

    before = gloos()
    gang = form(generation=generation, rank=rank, world=world, store=store)
    given, got = torch.tensor([3.0, 4.0]), torch.zeros(2)
    works = [all_gather_single(got, given, async_op=True), dist.all_reduce(given, async_op=True)]
    dist.broadcast(given, 0)
    dist.barrier()
    settle(gang.group)
    said: dict[str, object] = {
        "same": torch.equal(got, given),
        "works": [told(work) for work in works],
        "without": gloos() - before,
        "number": gang.collective.number if gang.collective else None,
    }
    row = torch.zeros(2)
    reduce_scatter_single(row, given)
    said |= {"scattered": row.tolist(), "with": gloos() - before}
    gang.interrupt("the plan changed")
    try:
        all_gather_single(got, given)
    except Interrupted as error:
        said["interrupted"] = str(error)
    gang.leave()
    return said


def every_collective(rank: int, world: int, store: dist.Store, *, generation: int) -> list[str]:
    """All that c10d offers, against what plain arithmetic says. Returns what went wrong."""
    gang = form(generation=generation, rank=rank, world=world, store=store)
    wrong: list[str] = []

    def check(name: str, found: object, expected: object) -> None:
        if found != expected:
            wrong.append(f"{name}: {found} instead of {expected}")

    ones, ranks = torch.ones(4), list(range(world))
    mine = torch.full((2,), float(rank))
    total = sum(ranks)

    dist.all_reduce(ones)
    check("all_reduce", ones.tolist(), [world] * 4)
    value = torch.tensor([float(rank)])
    dist.broadcast(value, 1)
    check("broadcast", value.item(), 1.0)
    value = torch.tensor([float(rank)])
    dist.reduce(value, 0)
    check("reduce", rank != 0 or value.item() == total, True)
    parts = [torch.empty(2) for _ in ranks]
    dist.all_gather(parts, mine)
    check("all_gather", [part[0].item() for part in parts], ranks)
    flat = torch.empty(2 * world)
    all_gather_single(flat, mine)
    check("all_gather_single", flat[::2].tolist(), ranks)
    gathered = [torch.empty(2) for _ in ranks] if rank == 0 else None
    dist.gather(mine, gathered)
    check("gather", rank != 0 or [part[0].item() for part in gathered or []] == ranks, True)
    dist.scatter(value, [torch.tensor([float(r)]) for r in ranks] if rank == 0 else None)
    check("scatter", value.item(), rank)
    row = torch.arange(float(world))
    reduce_scatter_single(value, row.clone())
    check("reduce_scatter_single", value.item(), rank * world)
    dist.reduce_scatter(value, [row[r : r + 1].clone() for r in ranks])
    check("reduce_scatter", value.item(), rank * world)
    out = torch.empty(world)
    dist.all_to_all_single(out, torch.full((world,), float(rank)))
    check("all_to_all_single", out.tolist(), ranks)
    uneven = torch.empty(world - 1)
    comes = [1 if r < world - 1 else 0 for r in ranks]
    goes = [1 if rank < world - 1 else 0] * world
    dist.all_to_all_single(uneven, torch.full((sum(goes),), float(rank)), comes, goes)
    check("all_to_all_single, uneven", uneven.tolist(), ranks[:-1])
    if rank == 0:
        dist.send(torch.tensor([7.0]), 1)
    elif rank == 1:
        dist.recv(value, 0)
        check("recv", value.item(), 7.0)
    objects: list[object] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    check("all_gather_object", objects, [{"rank": r} for r in ranks])
    work = dist.all_reduce(ones, async_op=True)
    work.wait(timedelta(seconds=10))
    settle(gang.group)
    check("async", (work.is_completed(), ones[0].item()), (True, world * world))
    half = dist.new_group([0, 1])
    if rank < 2:
        value = torch.ones(1)
        dist.all_reduce(value, group=half)
        check("subgroup", value.item(), 2.0)
    dist.barrier()
    check("group", isinstance(_get_default_group(), ElasticGroup), True)
    check("numbered", gang.collective.number > 10 and not gang.collective.waiting, True)
    gang.leave()
    return wrong


def fsdp_and_dcp(
    rank: int, world: int, store: dist.Store, *, generation: int, folder: str, stuck: bool
) -> list[object]:
    """FSDP2 and DCP unchanged: the same numbers as over torch's own gloo; and with a stopped peer they are interruptible."""
    found: list[object] = []
    torchs = "gloo" if DEVICE == "cpu" else "nccl"
    for backend in (torchs, "elastic"):
        generation += 1
        if backend == torchs:
            torch.set_default_device(DEVICE)
            dist.init_process_group(
                torchs, store=dist.PrefixStore(f"p{generation}/", store), rank=rank, world_size=world
            )
        else:
            gang = form(generation=generation, rank=rank, world=world, store=store)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 9), nn.GELU(), nn.Linear(9, 3))
        fully_shard(model[0])
        fully_shard(model)
        model(torch.randn(5, 7)).square().sum().backward()
        grads = [param.grad.full_tensor().tolist() for param in model.parameters()]
        state = {"model": get_model_state_dict(model)}
        place = str(Path(folder, backend))
        dcp.save(state, checkpoint_id=place)
        for tensor in state["model"].values():
            tensor.zero_()
        dcp.load(state, checkpoint_id=place)
        found.append((grads, [tensor.full_tensor().tolist() for tensor in state["model"].values()]))
        if backend == torchs:
            dist.destroy_process_group()
    if stuck:
        if rank == world - 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        threading.Timer(0.3, gang.interrupt, ["told to"]).start()
        for act in (
            lambda: model(torch.randn(5, 7)).sum().backward(),
            lambda: dcp.save(state, checkpoint_id=place + "2"),
        ):
            try:
                act()
                settle(gang.group)
                found.append("it went through")
            except GangError as error:
                found.append(type(error).__name__)
            except dcp.api.CheckpointException as error:
                found.append(type(next(iter(error.failures.values()))[0]).__name__)
    gang.leave()
    return found


def forms_at_the_third_try(rank: int, _world: int, store: dist.Store, *, generation: int) -> tuple[str, float, float]:
    """Rank 0's first two plans have a peer that never comes: forming is interruptible, has a deadline, and does not harm the
    third, to which rank 1 comes without that past.
    """
    words, waited, late = "", 0.0, 0.0
    if rank == 0:
        flag = Interrupt()
        threading.Timer(0.2, flag.set, ["n03/1 died (lease)"]).start()
        begin = time.monotonic()
        try:
            form(generation=generation, rank=0, world=2, store=store, flag=flag)
        except Interrupted as error:
            words = str(error)
        waited = time.monotonic() - begin
        try:
            form(generation=generation + 1, rank=0, world=2, store=store, form_s=0.3)
        except Broken as error:
            words += " / " + str(error).split(":")[0]
        late = time.monotonic() - begin - waited
    gang = form(generation=generation + 2, rank=rank, world=2, store=store)
    dist.all_reduce(torch.ones(1))
    settle(gang.group)
    gang.leave()
    return words, waited, late


def waits_for_a_message(rank: int, world: int, store: dist.Store, *, generation: int) -> str:
    """Point-to-point waits, which gloo would end by closing the connection if they were waited for in slices."""
    gang = form(generation=generation, rank=rank, world=world, store=store)
    value = torch.zeros(1)
    if rank == 1:
        time.sleep(0.1)  # the lateness under test
        dist.send(torch.ones(1), 0)
    else:
        dist.recv(value, 1)
    threading.Timer(0.1, gang.interrupt, ["told to"]).start()
    try:
        dist.recv(torch.zeros(1), 1 - rank)  # both wait for what never comes
        settle(gang.group)
    except Interrupted:
        return f"{value.item()}, then interrupted"
    finally:
        gang.leave()
    return "went through"


def many_generations(rank: int, world: int, store: dist.Store, *, generation: int, count: int) -> tuple[int, int, int]:
    """How many more file descriptors and threads there are after `count` generations, one in two of them interrupted."""

    def measure() -> tuple[int, int]:
        return sum(1 for _ in Path("/proc/self/fd").iterdir()), sum(1 for _ in Path("/proc/self/task").iterdir())

    before = (0, 0)
    for n in range(count):
        gang = form(generation=generation + n, rank=rank, world=world, store=store)
        dist.all_reduce(torch.ones(10))
        if n % 2:
            work = dist.all_reduce(torch.ones(10), async_op=True) if rank else None  # rank 0 never joins in
            gang.interrupt("on purpose")
            try:
                if work is not None:
                    work.wait()
                    settle(gang.group)
            except Interrupted:
                pass
            del work  # whoever keeps a work keeps its group's connections
        gang.leave()
        if n == 3:
            before = measure()
    deadline = time.monotonic() + 5
    while (after := measure()) > before and time.monotonic() < deadline:
        time.sleep(0.02)
    return count, after[0] - before[0], after[1] - before[1]


def agrees(rank: int, world: int, store: dist.Store, *, generation: int, past: int, folder: str) -> dict[str, object]:
    """All agree on what the latest of `past` generations has left in their vaults, beside a state of the one before on rank 1's
    node. Says what came of it, and what it took.
    """
    gang = form(generation=generation, rank=rank, world=world, store=store)
    lineage = tuple(Cut(number, Version(10 * number)) for number in range(1, past + 1))
    step = 10 * past + 5
    held = [(step - 1, lineage), (step, lineage)] + ([(step - 9, lineage[:-1])] if rank == 1 else [])
    holdings = [
        Holding(
            at=f"n{rank}", node=f"n{rank}", writer="w0", version=Version(step), generation=len(lineage), shard=rank,
            world=world, nbytes=100, lineage=lineage,
        )
        for step, lineage in held
    ]  # fmt: skip
    gang.flag.meter.taken()
    agreed = agree(
        f"n{rank}",
        holdings,
        gang,
        lambda: newest_good(place(Path(folder))),
        floor=0,
        committed=None,
        disk=False,
    )
    costs, _ = gang.flag.meter.taken()
    gang.leave()
    return {
        "step": agreed.version.step,
        "cuts": len(agreed.lineage),
        "same": agreed.lineage == lineage,
        "gathered": costs["all_gather"].bytes,
        "told": costs["other"].times if "other" in costs else 0,
    }
