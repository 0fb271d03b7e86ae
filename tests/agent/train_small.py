"""A small real data-parallel trainer for tests: gloo, steps of 50 ms, survivors reform in place through their seat.

The model is one vector; a step adds the mean over lanes of a vector that is known from (step, lane), so anybody can say what
step N must look like, whatever happened on the way. It prints one line a step:

    step 12 generation 3 rank 0 world 2 digest 1f0c

    train_small.py [--steps N] [--step-ms 50] [--save DIR --save-every 10] [--history FILE]
                   [--faults FILE] [--child]

FILE may appear at any time: {"step": 12, "rank": 0, "do": "raise" | "hang" | "segv" | "exit" | "torn" | "tee"}. It happens
once; the file goes.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist

from elasticrl.contract.model import Commit
from elasticrl.contract.orders import Halt, Place
from elasticrl.contract.seat import Order, OwnSeat
from elasticrl.runtime.group import Gang, form
from elasticrl.runtime.interrupt import GangError, Interrupt

SIZE = 4096


def lane_gradient(step: int, lane: int) -> torch.Tensor:
    """What a lane contributes to a step. Whole numbers, so that sums are exact in any order."""
    return torch.full((SIZE,), float((step * 31 + lane * 7) % 1024))


class Tee:
    """What a program may put in place of its output: it has no more than it needs."""

    def __init__(self, to: TextIO) -> None:
        self.to = to

    def write(self, text: str) -> int:
        return self.to.write(text)

    def flush(self) -> None:
        self.to.flush()


class Model:
    """The state that survivors keep."""

    def __init__(self, save_s: float) -> None:
        self.save_s = save_s
        self.weights = torch.zeros(SIZE, dtype=torch.float64)
        self.step = -1  # newest step in `weights`; -1: nothing yet

    @property
    def digest(self) -> str:
        return f"{zlib.crc32(self.weights.numpy().tobytes()):08x}"

    def save(self, folder: Path) -> str:
        name = f"step-{self.step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / f".{name}"
        fresh.write_text(json.dumps({"step": self.step, "weight": self.weights[0].item()}))
        time.sleep(self.save_s)
        fresh.replace(folder / name)
        return name

    def load(self, folder: Path | None, step: int) -> None:
        """The checkpoint of a step; step 0 needs none."""
        self.weights.zero_()
        self.step = step
        if step > 0 and folder is not None:
            self.weights.fill_(json.loads((folder / f"step-{step:08d}").read_text())["weight"])


class Trainer:
    def __init__(self, options: argparse.Namespace, seat: OwnSeat) -> None:
        self.options = options
        self.seat = seat
        self.model = Model(options.save_s)
        self.saves = Path(options.save) if options.save else None
        self.committed: Commit | None = None  # as we have printed it

    def run(self) -> None:
        while (place := self.seat.wait()) is not None:
            flag = Interrupt()
            self.seat.on_order(lambda order, flag=flag: None if finishes(order) else flag.set(order.reason))
            gang: Gang | None = None
            try:
                with self.seat.beat.waiting():
                    gang = join(place, flag)
                    self.agree(place)
                self.seat.beat.training()
                self.train(place)
            except GangError as error:
                print(f"left generation {place.generation}: {error}")
            finally:
                self.seat.on_order(None)
                if gang is not None:
                    gang.leave()
            if self.seat.halt is not None:
                return

    def agree(self, place: Place) -> None:
        """Go on from the newest step that anybody has; who is behind gets the weights from who is not."""
        steps = torch.zeros(place.world, dtype=torch.int64)
        steps[place.rank] = self.model.step
        dist.all_reduce(steps)
        newest = int(steps.max())
        if newest < place.resume:
            self.model.load(self.saves, place.resume)
            return
        source = int((steps == newest).nonzero()[0])
        fresh = self.model.weights.clone()
        dist.broadcast(fresh, source)
        self.model.weights, self.model.step = fresh, newest

    def train(self, place: Place) -> None:
        beat, model, options = self.seat.beat, self.model, self.options
        while model.step < options.steps:
            begun = time.monotonic()
            step = model.step + 1
            beat.phase("update")
            self.misbehave(step, place)
            gradient = torch.zeros(SIZE + 1, dtype=torch.float64)
            for lane in place.lanes:
                gradient[:SIZE] += lane_gradient(step, lane)
            halt = self.seat.halt
            gradient[SIZE] = float(halt is not None)  # all must end at the same step
            beat.collective(step, "allreduce", gradient.nbytes)
            dist.all_reduce(gradient)
            beat.arrived()
            model.weights = model.weights + gradient[:SIZE] / place.all_lanes
            model.step = step
            beat.sealed(step)
            self.tell(step, place)
            last = step == options.steps or gradient[SIZE] > 0
            if place.rank == 0 and self.saves and (last or step % options.save_every == 0):
                beat.saved(step, model.save(self.saves))
            if gradient[SIZE] > 0:
                return
            if (order := self.seat.poll()) is not None and not finishes(order):
                return
            time.sleep(max(0.0, options.step_ms / 1000 - (time.monotonic() - begun)))
        beat.done()

    def misbehave(self, step: int, place: Place) -> None:
        path = Path(self.options.faults or "/nonexistent")
        try:
            fault = json.loads(path.read_text())
        except OSError:  # none is due, or its rank has just taken it
            return
        if fault["rank"] != place.rank or fault["step"] > step:
            return
        path.unlink()
        match fault["do"]:
            case "raise":
                raise ValueError("bad prompt")
            case "hang":
                time.sleep(3600)
            case "segv":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "exit":
                sys.exit(3)
            case "torn":  # as on a disk that is full: the account of its end is begun, and empty
                Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text("")
                sys.exit(1)
            case "record":  # as a script does whose main function has torch's `@record`, and that ends by itself
                from torch.distributed.elastic.multiprocessing.errors import record

                try:
                    record(lambda: {}["reward"])()
                except KeyError:
                    sys.exit(4)
            case "tee":  # as some logging libraries do
                sys.stdout = Tee(sys.stdout)

    def tell(self, step: int, place: Place) -> None:
        if self.seat.committed != self.committed:
            self.committed = self.seat.committed
            print(f"{self.committed}")
        line = f"step {step} generation {place.generation} rank {place.rank} world {place.world} digest {self.model.digest}"
        print(line)
        if self.options.history:
            with Path(self.options.history).open("a") as history:
                history.write(f"{time.monotonic():.4f} {os.environ.get('ELASTICRL_NODE', '')} {os.getpid()} {line}\n")


def finishes(order: Order) -> bool:
    """An order that lets the present step be finished."""
    return isinstance(order, Halt) and order.save


def join(place: Place, flag: Interrupt) -> Gang:
    store = dist.TCPStore(
        place.host, place.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30)
    )
    return form(generation=place.generation, rank=place.rank, world=place.world, store=store, flag=flag)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--save", default="")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--save-s", type=float, default=0.0, help="how long a save takes")
    parser.add_argument("--history", default="")
    parser.add_argument("--faults", default="")
    parser.add_argument("--child", action="store_true", help="start a child process that sleeps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child:
        child = subprocess.Popen(["sleep", "600"])
        print(f"child {child.pid}")
    Trainer(options, OwnSeat.here()).run()


if __name__ == "__main__":
    main()
