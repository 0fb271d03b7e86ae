"""The small loop for launchers that restart workers (torchrun, ft_launcher, DLRover's agent): all go on from one save."""

import time
from typing import Any

import torch
import torch.distributed as dist
from loop import SAVE_EVERY, Loop, arguments


def main() -> None:
    parser = arguments()
    parser.add_argument("--heartbeats", action="store_true", help="to NVRx's rank monitor")
    options = parser.parse_args()
    loop = Loop(options.folder, options.step_s, options.timeout_s)
    monitor: Any = None
    if options.heartbeats:
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

        monitor = RankMonitorClient()
        monitor.init_workload_monitoring()
    dist.init_process_group("gloo", **loop.timeout)
    rank, world = dist.get_rank(), dist.get_world_size()
    loop.load()
    start = torch.tensor([loop.step, int(time.monotonic() * 1000)])
    dist.broadcast(start, 0)
    dist.broadcast(loop.weights, 0)
    loop.step, generation = (int(value) for value in start)  # a generation is known by when its rank 0 began
    while True:
        if monitor is not None:
            monitor.send_heartbeat()
        total = loop.gradient(loop.deal(rank, world), generation=generation, rank=rank)
        dist.all_reduce(total)
        loop.apply(total)
        if rank == 0 and loop.step % SAVE_EVERY == 0:
            loop.save()
        loop.tell(generation=generation, rank=rank, world=world)


if __name__ == "__main__":
    main()
