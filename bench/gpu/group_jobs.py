"""What worker processes do in bench/gpu/timeouts.py."""

import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from group_job import form

from elasticrl.runtime.group import settle
from elasticrl.runtime.interrupt import GangError

ABORT_S = 20.0  # for a group to be aborted


def total(world: int) -> float:
    """A sum over all, as a host reads it."""
    value = torch.ones(999)
    dist.all_reduce(value)
    settle(dist.group.WORLD)
    return value.sum().item() / world


def never_enters(rank: int, world: int, store: dist.Store, *, generation: int, limit_s: float) -> dict[str, Any]:
    """The last rank stays out of a collective until its peers have given it up; then all form again, in place."""
    gang = form(generation=generation, rank=rank, world=world, store=store, timeout_s=limit_s)
    said, begun = "", time.monotonic()
    assert total(world) == 999
    if rank == world - 1:
        time.sleep(limit_s + 1.0)  # the lateness under test
    else:
        begun = time.monotonic()
        try:
            total(world)
        except GangError as error:
            said = str(error)
    took_s = time.monotonic() - begun
    gang.interrupt("one did not come")
    gang.leave()
    begun = time.monotonic()
    gang = form(generation=generation + 1, rank=rank, world=world, store=store)
    again = total(world)
    found = {"said": said, "took_s": took_s, "again": again, "again_s": time.monotonic() - begun}
    gang.leave()
    return found


def keeps_a_graph(rank: int, world: int, store: dist.Store, *, generation: int) -> list[float]:
    """A CUDA graph without collectives is held while the gang is aborted in the middle of one, and replayed afterwards."""
    gang = form(generation=generation, rank=rank, world=world, store=store)
    value = torch.ones(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        value.mul_(2)
    if rank == 0:
        threading.Timer(0.5, gang.interrupt, ["told to"]).start()
        try:
            total(world)  # nobody else comes
        except GangError as error:
            print(error)
    else:
        time.sleep(1.0)  # the lateness under test
        gang.interrupt("told to")
    gang.leave()
    gang = form(generation=generation + 1, rank=rank, world=world, store=store)
    graph.replay()
    torch.cuda.synchronize()
    found = [value.mean().item(), total(world)]
    gang.leave()
    return found


def aborts_with_a_graph(
    rank: int, world: int, store: dist.Store, *, generation: int, dropped: bool
) -> dict[str, float | bool]:
    """torch's own NCCL group with a graph that holds one of its collectives: how long its abort takes, with the graph dropped
    before it or not.
    """
    torch.cuda.set_device(0)
    place = dist.PrefixStore(f"stock{generation}/", store)
    dist.init_process_group("nccl", store=place, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    value = torch.ones(1000, device="cuda")
    dist.all_reduce(value)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(value)
    graph.replay()
    torch.cuda.synchronize()
    if dropped:
        graph.reset()
    backend: Any = dist.group.WORLD._get_backend(torch.device("cuda"))  # noqa: SLF001 - torch's own way to it
    begun = time.monotonic()
    ending = threading.Thread(target=backend.abort, daemon=True)
    ending.start()
    ending.join(ABORT_S)
    return {"ended": not ending.is_alive(), "took_s": time.monotonic() - begun, "sum": value[0].item()}
