"""Real agents for tests, led by hand: what the daemon would order, the test orders."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elasticrl.agent import link, wire
from elasticrl.agent.beats import Page
from elasticrl.agent.spec import Spec
from elasticrl.core.model import Rung, Work

SCRIPT = str(Path(__file__).with_name("train_small.py"))
PRELOAD = ("torch", "torch.distributed", "elasticrl.runtime.group", "elasticrl.agent.seat")


@dataclass
class Node:
    """An agent and a test's connection to it."""

    name: str
    runtime: Path
    spec: Spec
    process: object = None
    reports: list[tuple[float, wire.Report]] = field(default_factory=list)
    link: link.Link | None = None
    task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.changed = asyncio.Event()

    def start(self) -> None:
        self.process = link.start_agent(self.spec, self.runtime)
        self.connect()

    def connect(self) -> None:
        self.link = link.Link(self.runtime / "agent.sock", self._reported)
        self.task = asyncio.get_running_loop().create_task(self.link.run())

    async def disconnect(self) -> None:
        assert self.task
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task
        self.link = None

    def _reported(self, report: wire.Report) -> None:
        self.reports.append((time.monotonic(), report))
        self.changed.set()

    @property
    def now(self) -> wire.Report:
        return self.reports[-1][1]

    def send(self, order: wire.Order) -> None:
        assert self.link
        assert self.link.send(order)

    async def until(self, true: Callable[[wire.Report], bool], within_s: float = 30.0) -> wire.Report:
        """The first report from now on (the present one included) of which this holds."""
        seen = max(0, len(self.reports) - 1)
        deadline = time.monotonic() + within_s
        while True:
            while seen < len(self.reports):
                if true(self.reports[seen][1]):
                    return self.reports[seen][1]
                seen += 1
            self.changed.clear()
            left = deadline - time.monotonic()
            try:
                await asyncio.wait_for(self.changed.wait(), max(0.0, left))
            except TimeoutError:
                last = self.reports[-1][1] if self.reports else None
                raise AssertionError(
                    f"{self.name}: not within {within_s} s; last report: {last}\n{self.logs()}"
                ) from None

    def logs(self) -> str:
        files = sorted(Path(self.spec.log_dir).rglob("*.log"))
        return "\n".join(f"--- {f}\n{f.read_text(errors='replace')[-3000:]}" for f in files)

    async def stop(self) -> None:
        if self.task:
            await self.disconnect()
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)
            await asyncio.to_thread(self.process.wait, 10)


def gang(
    generation: int,
    nodes: Sequence[Node],
    node: Node,
    *,
    born: int | None = None,
    slots: int = 1,
    resume: int = 0,
    lanes: int = 8,
    rung: Rung = Rung.START,
    endpoint: str = "",
) -> wire.Gang:
    place = list(nodes).index(node)
    return wire.Gang(
        generation=generation, born=generation if born is None else born, rank=place * slots, slots=slots,
        world=len(nodes) * slots, lanes=lanes, resume=resume, rung=rung, endpoint=endpoint or nodes[0].now.endpoint,
        nodes=tuple(n.name for n in nodes for _ in range(slots)),
    )  # fmt: skip


def launch(generation: int, nodes: Sequence[Node], **options: object) -> None:
    endpoint = nodes[0].now.endpoint
    for node in nodes:
        node.send(wire.Launch(gang=gang(generation, nodes, node, endpoint=endpoint, **options)))  # type: ignore[arg-type]


async def training(nodes: Sequence[Node], generation: int, within_s: float = 30.0) -> None:
    for node in nodes:
        await node.until(lambda r: r.work is Work.TRAINING and r.generation == generation, within_s)


async def stepping(node: Node, step: int, within_s: float = 30.0) -> int:
    """Wait for a sealed step, straight from the beats; returns the one that was seen."""
    pages = [Page(Path(worker.beat)) for worker in node.now.workers]
    deadline = time.monotonic() + within_s
    while True:
        seen = min(beat.step if (beat := page.read()) else 0 for page in pages)
        if seen >= step:
            return seen
        assert time.monotonic() < deadline, f"{node.name}: step {seen}, not {step} within {within_s} s\n{node.logs()}"
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def nodes(
    tmp: Path, count: int = 1, args: Sequence[str] = (), cold: bool = False, **changes: object
) -> AsyncIterator[list[Node]]:
    """Agents that are up and warm."""
    made = []
    for i in range(count):
        name = f"n{i:02d}"
        spec = Spec(
            **{  # type: ignore[arg-type]
                "job": "t", "node": name, "program": (SCRIPT,), "args": tuple(args), "log_dir": str(tmp / name / "logs"),
                "preload": PRELOAD, **changes,
            }
        )  # fmt: skip
        made.append(Node(name, tmp / name / "run", spec))
    try:
        for node in made:
            node.start()
        for node in made:
            await node.until(lambda r: r.warm or cold, 60.0)
        yield made
    finally:
        for node in made:
            await node.stop()
