"""A small job under `runtime.join` whose ranks do, when they are told to, what ranks do that bring a gang to a stop.

An order is a word in `<folder>/<node>.order`: loader, save (sleep there for ever), skip (leave a collective out), short, wide
(bring another size to it), other (enter another operation), stop, grow, slow, quick (no longer slow). It is taken once. While
`<folder>/<node>.noise` exists, that node's rank computes beside its work and prints what would frighten anybody.
"""

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # it is a program of its own under a daemon

import elasticrl
from chaos.live.job import ROWS, Warmup, data, fresh, rule
from elasticrl.runtime.data.cursor import Cursor, Walk

SIZE = 64  # elements of the collective of the program's own
SCARY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "Traceback (most recent call last):",
    '  File "/job/train.py", line 88, in step',
    "ValueError: bad prompt",
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "OSError: [Errno 28] No space left on device: '/tmp/cache'",
    (
        "[rank2]:[E419 10:42:28.858931807 ProcessGroupNCCL.cpp:616] [Rank 2] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=4486, OpType=ALLREDUCE, NumelIn=1024, NumelOut=1024, Timeout(ms)=600000) ran for 600013 "
        "milliseconds before timing out."
    ),
    "node7:3:12 [0] NCCL WARN Call to connect returned Connection timed out, retrying",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer [10.0.0.9]:4711",
)
slow_s = 0.0  # in each lane, from the order "slow" on


class Orders:
    """What this node's rank is to do."""

    def __init__(self, folder: Path) -> None:
        self.order = folder / f"{os.environ.get('ELASTICRL_NODE', '')}.order"
        self.digests = self.order.with_suffix(".digests")
        self.noise = self.order.with_suffix(".noise")
        threading.Thread(target=self._shout, daemon=True).start()

    def told(self, *words: str) -> str:
        """The order, if it is one of these; it is taken with that."""
        try:
            word = self.order.read_text()
        except OSError:
            return ""
        if word not in words:
            return ""
        self.order.unlink(missing_ok=True)
        return word

    def _shout(self) -> None:
        while True:
            if not self.noise.exists():
                time.sleep(0.2)  # until it is asked for
                continue
            for line in SCARY:
                print(line, flush=True)
            self.noise.with_suffix(".loud").touch()
            until = time.monotonic() + 0.1
            while time.monotonic() < until:
                sum(range(1000))
            time.sleep(0.1)  # half of a core is noise enough


class Loader:
    """The data of a step."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> torch.Tensor:
        if self.orders.told("loader"):
            time.sleep(3600)  # the fault itself
        return torch.ones(4)


def save_model(orders: Orders) -> None:
    if orders.told("save"):
        time.sleep(3600)  # the fault itself


def own_collective(orders: Orders, rank: int, world: int) -> None:
    """What the program itself wants of the others, beside the runtime."""
    match orders.told("skip", "short", "wide", "other"):
        case "skip":
            return
        case "short":
            dist.all_reduce(torch.ones(SIZE // 2))
        case "wide":
            dist.all_reduce(torch.ones(SIZE * 2))
        case "other":
            dist.broadcast(torch.ones(SIZE), src=(rank + 1) % world)
        case _:
            dist.all_reduce(torch.ones(SIZE))


def misbehave(orders: Orders) -> None:
    match orders.told("stop", "grow", "slow", "quick"):
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "grow":  # until the kernel ends this process
            held = []
            while True:
                held.append(bytearray(os.urandom(1 << 20)) * 8)
        case "slow" | "quick" as pace:
            globals()["slow_s"] = 0.1 if pace == "slow" else 0.0


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--folder", type=Path)
    options.add_argument("--step-ms", type=float, default=100.0)
    args = options.parse_args()
    with elasticrl.runtime.join() as run:
        lanes = run.tree.lanes.count
        run.register(
            model=fresh(), optimizer=rule, schedule=(schedule := Warmup()),
            data=Cursor(Walk(name="points", size=1000, lanes=lanes, per_lane=ROWS, seed=run.tree.job.seed)),
        )  # fmt: skip
        orders = Orders(args.folder)
        loader = Loader(orders)
        for step in run.steps():
            begun = time.monotonic()
            next(loader)
            misbehave(orders)
            for lane in run.lanes():
                points, labels = zip(*(data(sample.index) for sample in lane.ids()), strict=True)
                time.sleep(slow_s)
                with lane.rng("dropout"):
                    loss = nn.functional.cross_entropy(run.model(torch.stack(points)), torch.tensor(labels))
                    loss.backward()
                lane.done()
            with step:
                own_collective(orders, run.rank, run.world)
            run.update(max_norm=0.5, lr_factor=schedule.factor)
            schedule.steps += 1
            if int(step) % 5 == 0:
                with run.phase("save"):
                    save_model(orders)
            if run.sealed_digest:
                with orders.digests.open("a") as told:
                    told.write(f"{run.sealed} {run.sealed_digest}\n")
            # At once: who is busy stands still between emptying a file and filling it.
            with contextlib.suppress(OSError):
                told_step = orders.order.with_suffix(".stepped")
                told_step.write_text(f"{run.sealed} {run.generation} {run.rank} {run.world} {os.getpid()}")
                told_step.rename(orders.order.with_suffix(".step"))
            time.sleep(max(0.0, args.step_ms / 1000 - (time.monotonic() - begun)))


if __name__ == "__main__":
    main()
