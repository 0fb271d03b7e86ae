"""Two ranks under torch's own group, of which the last never enters a collective: run by bench/gpu/timeouts.py."""

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    device, address, rank, limit_s = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    host, _, port = address.partition(":")
    store = dist.TCPStore(host, int(port), is_master=rank == 0, wait_for_workers=False)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=limit_s))
    value = torch.ones(9, device=device)
    dist.all_reduce(value)
    print(f"rank {rank}: {value[0].item()}", flush=True)
    if rank == 1:
        time.sleep(10 * limit_s)  # the fault
    dist.all_reduce(value)
    print(f"rank {rank}: {value[0].item()}, which nobody waited for", flush=True)


if __name__ == "__main__":
    main()
