"""A driver as those of Ray: one process that starts its own workers, who train together and whose output it hands on."""

import argparse
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

WORKER = """
import sys
import torch.distributed as dist
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=int(sys.argv[1]), world_size=2)
import torch
for line in sys.stdin:
    dist.all_reduce(torch.ones(1))
    print(line.strip(), flush=True)
"""


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--steps", type=int, default=60)
    asked.add_argument("--save", type=Path, required=True)
    asked.add_argument("--history", type=Path, required=True)
    args = asked.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, str(rank), port], stdin=-1, stdout=-1, text=True)
        for rank in range(2)
    ]
    saved = args.save / "newest"
    for step in range(int(saved.read_text()) if saved.exists() else 0, args.steps):
        for worker in workers:
            assert worker.stdin
            with suppress(BrokenPipeError):  # its answer says so
                worker.stdin.write(f"{step + 1}\n")
                worker.stdin.flush()
        for worker in workers:
            assert worker.stdout
            if not worker.stdout.readline():
                raise RuntimeError(f"worker {worker.pid} died")
        print(f"step:{step + 1} - actor/loss:0.5", flush=True)
        with args.history.open("a") as out:
            out.write(f"{time.monotonic():.4f} {os.getpid()} rank 0 world 1 step {step + 1}\n")
        saved.write_text(str(step + 1))
        time.sleep(0.05)
    for worker in workers:
        worker.communicate()


if __name__ == "__main__":
    main()
