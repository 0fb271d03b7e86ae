"""What all parts of a node's inquiry share: the settings, where things are, whom to tell, and work beside the daemon's loop."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elasticrl.base.value import dataclass
from elasticrl.config import Tree
from elasticrl.contract.events import Event
from elasticrl.contract.model import Plan
from elasticrl.core.node.state import State

PLANS = 16  # that are remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where this node's things are."""

    node: str
    job: str
    host: str
    runtime: Path
    state: Path  # of all jobs and nodes
    disks: Mapping[str, Path]
    root: Path = Path("/")  # below which the kernel tells of this machine


class Desk:
    """One node's."""

    def __init__(self, tree: Tree, site: Site, log: Any) -> None:
        self.tree, self.site, self.log = tree, site, log  # a reload sets another tree
        self.env: Mapping[str, str] = {}  # that this node's workers get
        self.post: Callable[[Event], None]  # both from `Inquiry.join` on: nothing is found out before
        self.state: Callable[[], State]
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Any, name: str) -> asyncio.Task[None]:
        """Let it find out something beside the loop."""
        task = asyncio.create_task(self.guarded(work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def guarded(self, work: Any) -> None:
        """An inquiry that fails costs its facts; the word `bug` fails every test run."""
        try:
            await work
        except Exception:
            self.log.exception("bug", action="inquiry")

    async def clear(self) -> None:
        """Nothing goes on."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def on_gpus(self) -> bool:
        """NCCL is what carries this job, or would be."""
        from elasticrl.diagnose.nvidia import NVIDIA

        wanted, device = self.tree.comm.backend, self.tree.node.device
        there = device == "cuda" or (device == "auto" and (self.site.root / NVIDIA).exists())
        return wanted != "gloo" and there


class Plans:
    """The newest plans that this node has seen."""

    def __init__(self) -> None:
        self._seen: dict[int, Plan] = {}

    def add(self, plan: Plan) -> bool:
        """Whether it is a new one."""
        if plan.generation in self._seen:
            return False
        self._seen[plan.generation] = plan
        for old in sorted(self._seen)[:-PLANS]:
            del self._seen[old]
        return True

    def get(self, generation: int) -> Plan | None:
        """That of a generation."""
        return self._seen.get(generation)

    def before(self, plan: Plan) -> Plan | None:
        """The newest one of an earlier generation."""
        return self._seen.get(max((number for number in self._seen if number < plan.generation), default=0))

    def between(self, after: int, upto: int) -> tuple[Plan, ...]:
        """Those after one generation, and up to another, in order."""
        return tuple(plan for number, plan in sorted(self._seen.items()) if after < number <= upto)
