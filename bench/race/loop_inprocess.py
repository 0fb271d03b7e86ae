"""The small loop under NVRx's in-process wrapper: survivors keep their weights, and agree on the newest of them."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from loop import SAVE_EVERY, Loop, arguments
from nvidia_resiliency_ext import inprocess

PORT = int(os.environ["MASTER_PORT"])  # of the script's own store; the wrapper's is the next
# The wrapper's defaults are a minute and more; these are the shortest that its rules and a loaded machine allow.
SOON = timedelta(milliseconds=250)
SETTINGS = {
    "store_kwargs": {"port": PORT + 1},
    "monitor_thread_interval": SOON,
    "monitor_process_interval": SOON,
    "heartbeat_interval": SOON,
    "progress_watchdog_interval": SOON,
    "heartbeat_timeout": timedelta(seconds=3),
    "soft_timeout": timedelta(seconds=3),
    "hard_timeout": timedelta(seconds=5),
    "last_call_wait": timedelta(milliseconds=250),
    "termination_grace_time": timedelta(seconds=1),
    "barrier_timeout": timedelta(seconds=30),
    "completion_timeout": timedelta(seconds=30),
}


def main() -> None:
    options = arguments().parse_args()
    loop = Loop(options.folder, options.step_s, options.timeout_s)
    loop.load()
    first = os.environ["RANK"] == "0"
    store = dist.TCPStore("127.0.0.1", PORT, int(os.environ["WORLD_SIZE"]), first, multi_tenant=True)
    train(store, loop)


@inprocess.Wrapper(**SETTINGS)
def train(base: dist.Store, loop: Loop, call: inprocess.CallWrapper = None) -> None:
    store = dist.PrefixStore(str(call.iteration), base)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, **loop.timeout)
    steps = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(steps, torch.tensor([loop.step]))
    newest = max(range(world), key=lambda each: int(steps[each]))
    dist.broadcast(loop.weights, newest)
    loop.step = int(steps[newest])
    while True:
        call.ping()
        total = loop.gradient(loop.deal(rank, world), generation=call.iteration, rank=rank)
        dist.all_reduce(total)
        loop.apply(total)
        if rank == 0 and loop.step % SAVE_EVERY == 0:
            loop.save()
        loop.tell(generation=call.iteration, rank=rank, world=world)


if __name__ == "__main__":
    main()
