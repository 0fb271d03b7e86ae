"""Real agents for tests, led by hand: what the daemon would order, the test orders."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chaos.patience import patience
from elasticrl.agent import link
from elasticrl.agent.spec import Spec, environment
from elasticrl.contract import wire
from elasticrl.contract.beats import Page
from elasticrl.contract.model import Rung, Work
from elasticrl.contract.orders import Halt, Launch, Place

SCRIPT = str(Path(__file__).with_name("train_small.py"))
PRELOAD = ("torch", "torch.distributed", "elasticrl.runtime.group", "elasticrl.contract.seat")


@dataclass
class Node:
    """An agent and a test's connection to it."""

    name: str
    runtime: Path
    spec: Spec
    notify: Path | None = None  # the socket of what stands for systemd
    process: object = None
    reports: list[tuple[float, wire.Report]] = field(default_factory=list)
    link: link.Link | None = None
    task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.changed = asyncio.Event()

    def start(self) -> None:
        env = {**environment(self.spec), **({"NOTIFY_SOCKET": str(self.notify)} if self.notify else {})}
        self.process = subprocess.Popen(link.agent_command(self.spec, self.runtime), env=env, start_new_session=True)
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
        deadline = time.monotonic() + patience(within_s)
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

    async def idle(self) -> None:
        """End what is seated and forget what has ended."""
        if self.link is None:
            return
        self.send(Halt(generation=self.now.generation, save=False, within_s=0.0, reason="the next test"))
        self.send(wire.Acknowledge(ended=tuple(end.number for end in self.now.ended)))
        await self.until(lambda r: not r.workers and not r.ended and (r.warm or bool(r.problem)))

    async def stop(self) -> None:
        if self.task:
            # Killed alone, it would leave its workers' children running.
            if self.link and self.link.send(wire.Quit(reason="the tests are over")):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(self.process.wait, 10)
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
) -> Place:
    place = list(nodes).index(node)
    return Place(
        generation=generation, born=generation if born is None else born, rank=place * slots, slots=slots,
        world=len(nodes) * slots, all_lanes=lanes, resume=resume, rung=rung, endpoint=endpoint or nodes[0].now.endpoint,
        nodes=tuple(n.name for n in nodes for _ in range(slots)),
    )  # fmt: skip


def launch(nodes: Sequence[Node], **options: object) -> int:
    """Seat all of them in a new generation, and return its number."""
    generation = max(node.now.generation for node in nodes) + 1
    endpoint = nodes[0].now.endpoint
    for node in nodes:
        node.send(Launch(place=gang(generation, nodes, node, endpoint=endpoint, **options)))  # type: ignore[arg-type]
    return generation


async def training(nodes: Sequence[Node], generation: int, within_s: float = 30.0) -> None:
    for node in nodes:
        await node.until(lambda r: r.work is Work.TRAINING and r.generation == generation, within_s)


async def stepping(node: Node, step: int, within_s: float = 30.0) -> int:
    """Wait for a sealed step, straight from the beats; returns the one that was seen."""
    pages = [Page(Path(worker.beat)) for worker in node.now.workers]
    deadline = time.monotonic() + patience(within_s)
    while True:
        seen = min(beat.step if (beat := page.read()) else 0 for page in pages)
        if seen >= step:
            return seen
        assert time.monotonic() < deadline, f"{node.name}: step {seen}, not {step} within {within_s} s\n{node.logs()}"
        await asyncio.sleep(0.005)


@dataclass
class Lab:
    """Agents that serve a whole file of tests, one generation after the other, in one event loop."""

    runner: asyncio.Runner
    nodes: list[Node]
    faults: Path
    saves: Path

    def run(self, scenario: Callable[..., Coroutine[object, object, None]]) -> None:
        """A test. It finds all nodes idle and warm, and leaves them so."""
        self.faults.unlink(missing_ok=True)
        self.runner.run(self._between(scenario))

    async def _between(self, scenario: Callable[..., Coroutine[object, object, None]]) -> None:
        for node in self.nodes:
            await node.idle()
        await scenario(*self.nodes)

    def fault(self, do: str, *, step: int = 0, rank: int = 0) -> None:
        fresh = self.faults.with_suffix(".new")
        fresh.write_text(json.dumps({"do": do, "step": step, "rank": rank}))
        fresh.replace(self.faults)


@contextlib.contextmanager
def lab(
    tmp: Path, count: int = 1, args: Sequence[str] = (), notify: Path | None = None, **changes: object
) -> Iterator[Lab]:
    """Agents that are up and warm, or that have said why they cannot be."""
    faults, saves = tmp / "faults.json", tmp / "saves"
    made = []
    for i in range(count):
        name = f"n{i:02d}"
        common = {
            "job": "t", "node": name, "program": (SCRIPT,), "log_dir": str(tmp / name / "logs"), "preload": PRELOAD,
            "args": args if "program" in changes else (*args, "--faults", str(faults), "--save", str(saves)),
        }  # fmt: skip
        made.append(Node(name, tmp / name / "run", Spec(**{**common, **changes}), notify))  # type: ignore[arg-type]
    with asyncio.Runner() as runner:
        try:
            runner.run(_up(made))
            yield Lab(runner, made, faults, saves)
        finally:
            runner.run(_down(made))


async def _up(made: list[Node]) -> None:
    for node in made:
        node.start()
    for node in made:
        await node.until(lambda r: r.warm or bool(r.problem), 60.0)


async def _down(made: list[Node]) -> None:
    for node in made:
        await node.stop()
