"""What a worker of the lab tells of itself, and how it takes the driver's orders.

It writes what it does, one JSON line each, into `<folder>/<node>.jsonl`, with the machine's monotonic clock:

    {"at": 3656.81, "what": "began", "step": 455, "generation": 2, "rank": 0, "world": 3, "pid": 812}
    {"at": 3656.93, "what": "sealed", "step": 456, "generation": 2, "rank": 0, "world": 3, "pid": 812, "digest": "1c8d..."}
    {"at": 3657.02, "what": "here", "place": "before reduce", "token": 7, ...}

All workers of a node write into its one file, and an order may be for one of them alone (`slot`).

The one idea: faults at a position are done by the process that is there. An order in `<folder>/<node>.order` names the place
and what to do; the worker takes it, says `here`, and does it to itself, or waits for the driver to do it to the node. The
places are those of `chaos.faults`.
"""

import argparse
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elasticrl.runtime.run import Run
from elasticrl.runtime.strategy import Strategy

WAIT_S = 20.0  # for the driver, at a place where it wanted to strike
#: The stages of an update in their order: what the runtime calls each, and what a fault's position does.
STAGES = {"reduce": "reduce", "apply": "apply", "publish": "gather", "seal": "seal"}
ITS_OWN = ("raise", "hang")  # what only the training thread can do to itself


def options() -> argparse.Namespace:
    """What each job of the lab is told on its command line."""
    found = argparse.ArgumentParser()
    found.add_argument("--step-ms", type=float, default=100.0, help="a step takes no less")
    found.add_argument("--history", default="", help="the folder for what it tells, and for its orders")
    found.add_argument("--load-s", type=float, default=0.0, help="as if there were a large model to load")
    return found.parse_args()


class Told:
    """What the driver wants of this node's worker, and what the worker tells."""

    def __init__(self, folder: str, run: Run) -> None:
        self.run = run
        self.node = os.environ.get("ELASTICRL_NODE", "")
        self.slots = run.tree.node.workers
        self.folder = Path(folder) if folder else None
        self.ballast: list[bytearray] = []
        # The end of each stage of a reform is a place.
        run.timeline.hears = lambda stage: self.at(f"reform after {stage}", run.progress.step, named=True)
        self.told = 0  # token of the newest order that was taken: one that stays is told of once
        self.file = (
            os.open(self.folder / f"{self.node}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND) if self.folder else -1
        )

    def say(self, what: str, step: int, **more: Any) -> None:
        """One line."""
        if self.file < 0:
            return
        run = self.run
        body = {"at": round(time.monotonic(), 4), "what": what, "node": self.node, "step": step}
        body |= {"generation": run.generation, "rank": run.rank, "world": run.world, "pid": os.getpid(), **more}
        os.write(self.file, json.dumps(body).encode() + b"\n")

    def at(self, place: str, step: int, *, beside: bool = False, named: bool = False) -> None:
        """The job is at this place: is there an order for it? `beside`: the training thread goes on meanwhile. `named`: only
        one that names it; others are for steps.
        """
        order = self._order()
        if order is None or order.get("step", 0) > step or order.get("rank", self.run.rank) != self.run.rank:
            return
        if order.get("slot", slot := self.run.rank % self.slots) != slot:
            return
        if order["place"] != place and (order["place"] or beside or named):
            return
        if beside and order["do"] in ITS_OWN:
            return
        if not order.get("stays"):
            self._file.unlink(missing_ok=True)
        if order["token"] != self.told:
            self.told = order["token"]
            self.say("here", step, place=place, token=order["token"])
        self._do(order)

    @property
    def _file(self) -> Path:
        assert self.folder is not None
        return self.folder / f"{self.node}.order"

    def _order(self) -> dict[str, Any] | None:
        """What the driver wants now; None if nothing."""
        if self.folder is None or not self._file.exists():
            return None
        try:
            return dict(json.loads(self._file.read_text()))
        except (OSError, ValueError):
            return None

    def _do(self, order: dict[str, Any]) -> None:
        match order["do"]:
            case "slow":
                time.sleep(float(order["value"]))
            case "raise":
                raise ValueError(order.get("text", "bad prompt"))
            case "hang":
                time.sleep(3600)  # until it is killed for it: that is the fault
            case "grow":  # until the kernel ends this process, which the driver has put where it may not
                while self._let_go(order):
                    self.ballast.append(bytearray(os.urandom(1 << 20)) * 8)
            case "wait":
                self._let_go(order)

    def _let_go(self, order: dict[str, Any]) -> bool:
        """Wait for the driver's word; did it come?"""
        deadline = time.monotonic() + WAIT_S
        assert self.folder is not None
        go = self.folder / f"{self.node}.go.{order['token']}"
        while not (came := go.exists()) and time.monotonic() < deadline:
            time.sleep(0.001)
        return came

    @contextmanager
    def staged(self, live: Strategy, step: int) -> Iterator[None]:
        """Inside, each stage of the update is a place, before, during and after it. In steps without an order the runtime is
        left as it is.
        """
        if self._order() is None:
            yield
            return
        for method, phase in STAGES.items():
            setattr(live, method, self._stage(getattr(live, method), phase, step))
        try:
            yield
        finally:
            for method in STAGES:
                delattr(live, method)  # the class's own again

    def _stage(self, act: Callable[..., Any], phase: str, step: int) -> Callable[..., Any]:
        def told(*args: Any, **named: Any) -> Any:
            if phase != "reduce":  # before that the update waits for copies: its place is before all of the update
                self.at(f"before {phase}", step)
            self.during(phase, step)
            found = act(*args, **named)
            self.at(f"after {phase}", step)
            return found

        return told

    def during(self, phase: str, step: int) -> None:
        """This phase begins. Another thread says `here` while this one goes on; how far the phase is by then, is chance."""
        order = self._order()
        if order is None or order.get("slot", slot := self.run.rank % self.slots) != slot:
            return
        place = f"during {phase}"
        threading.Thread(target=self.at, args=(place, step), kwargs={"beside": True}, daemon=True).start()
        if order["do"] in ITS_OWN:
            self.at(place, step)

    def sealed_by(self, run: Run, sealed: int) -> int:
        """Tell of a step that was sealed since then, if one was."""
        if run.sealed > sealed:
            self.say("sealed", run.sealed, digest=run.sealed_digest or "")
        return max(sealed, run.sealed)
