"""A training loop that knows nothing of elasticrl, under torchrun or accelerate. It hangs while a file tells its rank to.

Steps are told by a file per rank, so that a test sees who goes on.
"""

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

FOLDER = Path(sys.argv[1])
RANK = int(os.environ["RANK"])


def ordered() -> str:
    """What this rank is to do now."""
    try:
        return (FOLDER / f"order-{RANK}").read_text()
    except OSError:
        return ""


def lasts() -> bool:
    return bool(ordered())


class Loader:
    """Data."""

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> torch.Tensor:
        while ordered() == "data":
            time.sleep(0.05)
        return torch.ones(64)


def save() -> None:
    while lasts():
        time.sleep(0.05)


def evaluate() -> None:
    while lasts():
        sum(range(2000))


def lock() -> None:
    held = threading.Lock()
    held.acquire()
    while lasts():
        held.acquire(timeout=0.5)


def fetch() -> None:
    here, there = socket.socketpair()
    here.settimeout(0.5)
    while lasts():
        try:
            here.recv(1)
        except TimeoutError:
            continue
    there.close()


def child() -> None:
    while lasts():
        subprocess.run(["sleep", "0.5"])


def wait_for_queue() -> None:
    line: queue.Queue[int] = queue.Queue()
    while lasts():
        try:
            line.get(timeout=0.5)
        except queue.Empty:
            continue


def fail() -> None:
    """An exception that ends nothing: a thread that is no daemon goes on, and the process waits for it."""
    threading.Thread(target=save).start()
    raise ValueError("this batch cannot be read")


HANGS = {
    "save": save,
    "evaluate": evaluate,
    "lock": lock,
    "fetch": fetch,
    "child": child,
    "queue": wait_for_queue,
    "fail": fail,
}


def form() -> None:
    """As the launcher's own library forms a group."""
    if sys.argv[2:] == ["accelerate"]:
        from accelerate import Accelerator

        Accelerator(cpu=True)
        assert dist.is_initialized()
    else:
        dist.init_process_group("gloo")


def main() -> None:
    while ordered() == "late":
        time.sleep(0.05)
    form()
    data = iter(Loader())
    for step in range(1_000_000):
        (FOLDER / f"step-{RANK}").write_text(str(step))
        batch = next(data)
        order = ordered()
        if hang := HANGS.get(order):
            hang()
        if order == "other":
            dist.barrier()
        dist.all_reduce(batch)
        time.sleep(0.05)


main()
