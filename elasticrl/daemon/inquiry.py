"""What this node finds out about a fault, while it is there: logs as they are written, the scene of a stall, the machine's
health, the way to others; and, when it is over, the incident.

The one idea: everything here is a source of `Found` events. Each runs beside the daemon's loop, in a thread or a process of its
own, is bounded in time, and costs, if it fails, nothing but its facts: what is decided, and when, is the core's.
"""

import asyncio
import math
import os
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticrl.base.pauses import pause
from elasticrl.base.ticks import until_next
from elasticrl.config import Tree
from elasticrl.contract.events import Action, Cleared, Event, Found, LookAt, Suspected
from elasticrl.contract.evidence import Evidence
from elasticrl.contract.model import Plan, Stall, Work
from elasticrl.contract.wire import Report
from elasticrl.core.node import dossier
from elasticrl.core.node.state import State
from elasticrl.daemon.compare import Comparison
from elasticrl.daemon.history import History
from elasticrl.daemon.incidents import Incidents
from elasticrl.daemon.links import Ways
from elasticrl.daemon.machine import Machine
from elasticrl.daemon.shared import Desk, Plans, Site
from elasticrl.diagnose import witness
from elasticrl.diagnose.tail import Tail
from elasticrl.status.recovery import Done

if TYPE_CHECKING:  # see `prepare`
    from elasticrl.diagnose.incident import Incident

TAIL_S = 0.2  # between looks at the workers' logs
IDLE_S = 1.0  # the same, while there are none
AGAIN_S, SELDOM_S = 1.0, 60.0  # before a look that has failed begins again: the first time, and at most
ANSWER_S = (
    0.5  # for the recorder of a worker that is stuck outside of collectives: its stack tells more, and it is awaited
)
PAUSED_S = 10.0  # how long a node that stood still does not complain that it was not heard
ENDED = (Work.PARKED, Work.FAILED)  # whoever says so has written all that it has to say
GENERATION = re.compile(r"attempt_(\d+)/rank_\d+\.log$")
PIDS = 64  # of workers, that are remembered


class Inquiry:
    """One node's."""

    def __init__(self, tree: Tree, site: Site, *, log: Any, history: History) -> None:
        self.desk = Desk(tree, site, log)
        self.ways = Ways(self.desk)
        self.machine = Machine(self.desk, lambda: self._pids)
        self._plans = Plans()
        self.incidents = Incidents(self.desk, self._plans, history, lambda: self.machine.starving)
        self.comparison = Comparison(self.desk)
        self._tail = Tail(node=site.node)
        self._ended = asyncio.Event()  # its workers have: their last lines are read at once
        self._report: Report | None = None
        self._stall: tuple[object, ...] | None = None  # which one has been looked at
        self._pids: dict[int, None] = {}  # of workers, the newest last
        self._paused_at = -math.inf  # when this process was last seen to have stood still
        self._silent: frozenset[str] = frozenset()  # whom we did not hear, when that last changed

    # ---- beginnings

    def join(
        self, post: Callable[[Event], None], state: Callable[[], State], *, kept: Callable[["Incident", int, int], None],
        latency: Callable[[], Mapping[str, float]],
    ) -> None:  # fmt: skip
        """It is known who this node is: what is found out has somebody to be told to."""
        self.desk.post, self.desk.state = post, state
        self.incidents.kept, self.ways.latency = kept, latency

    def prepare(self, env: Mapping[str, str]) -> None:
        """Import what the rest of this needs, so that no fault has to wait for it; and look at the environment of workers."""
        from elasticrl.diagnose import (  # noqa: F401 - see above
            amd,
            fabric,
            health,
            incident,
            kernel_log,
            nvidia,
            stalled,
            transport,
        )

        self.lint(env)

    def lint(self, env: Mapping[str, str]) -> None:
        """Say what is wrong with the environment that workers get (`env`), but for what we mean, and what the profile has set
        in it. A probe gets it too: what NCCL does by other settings would prove nothing.
        """
        from elasticrl.diagnose import doctor, environment, health

        self.desk.env = env
        theirs = {**os.environ, **self.desk.tree.agent.env}
        added = environment.PROFILES[self.desk.tree.comm.profile].apply(theirs)
        if added:
            said = [f"{name}={value}" for name, value in sorted(added.items())]
            self.desk.log.info("environment.profile", profile=self.desk.tree.comm.profile, added=said)
        nodes = (
            None if self.desk.tree.node.interface == "lo" else self.desk.tree.membership.max_nodes
        )  # all on this machine
        for check in doctor.linted(self.desk.tree, env, nodes):
            name = check.name.removeprefix("environment.")
            ours = env.get(name) != theirs.get(name) and name not in added
            if check.remedy and check.level in {health.WARN, health.FAIL} and not ours:
                self.desk.log.info("environment.warning", name=name, value=check.value, remedy=check.remedy)

    async def run(self, env: Mapping[str, str]) -> None:
        """Until cancelled. `env`: what workers get."""
        self.desk.env = env
        looking: list[asyncio.Task[None]] = []
        try:
            await self.desk.guarded(asyncio.to_thread(self.prepare, env))
            looking += [
                asyncio.create_task(self._always(self._read_logs), name="logs"),
                asyncio.create_task(self._always(self.machine.hear_kernel), name="kernel"),
                asyncio.create_task(self._always(self.machine.sample), name="health"),
            ]
            await asyncio.gather(*looking)
        finally:
            await self.incidents.saved()
            for task in looking:
                task.cancel()
            await asyncio.gather(*looking, return_exceptions=True)
            await self.desk.clear()
            self._tail.close()
            self.ways.close()

    async def _always(self, look: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Until cancelled. What ends it is a bug, or a machine that gives no thread, and costs neither the other looks nor what
        there is to see later.
        """
        rest_s = 0.0
        while True:
            begun = time.monotonic()
            await self.desk.guarded(look())
            lived_s = time.monotonic() - begun
            rest_s = pause(rest_s, lived_s, first_s=AGAIN_S, most_s=SELDOM_S, steady_s=SELDOM_S)
            await asyncio.sleep(rest_s)

    # ---- what workers say

    def heard(self, report: Report | None) -> None:
        """The agent's newest word; None: there is none.

        A log that an agent names first is history: its workers may be old, and adopted. What it names later is read from its
        beginning: a worker may have written why it cannot go on before this is called.
        """
        before, self._report = self._report, report
        seated = report.workers if report else ()
        self._tail.follow({worker.rank: Path(worker.log) for worker in seated}, begin=before is not None)
        if report and report.work in ENDED and (before is None or before.work is not report.work):
            self._ended.set()
        for worker in seated:
            self._pids[worker.pid] = None
        for old in list(self._pids)[:-PIDS]:
            del self._pids[old]
        stall = report.stall if report else None
        which = None if stall is None or report is None else (report.generation, stall.slot, stall.phase, stall.step)
        if which is not None and which != self._stall and report is not None and stall is not None:
            self.desk.spawn(self._look(report, stall, 0), "scene")
        self._stall = which

    async def perform(self, action: Action) -> bool:
        """The core's wish to know where our workers are."""
        if not isinstance(action, LookAt):
            return False
        report = self._report
        if report is not None and report.generation == action.generation:
            await self._look(report, None, action.request)
        else:
            self.desk.post(Found(now=time.monotonic(), scene=action.request))
        return True

    async def _look(self, report: Report, stall: Stall | None, request: int) -> None:
        """Where are all of this node's workers, now that one of theirs or others' has stalled?"""
        from elasticrl.diagnose import stalled

        begun, dump_s = time.monotonic(), self.desk.tree.timeouts.dump_s
        generation = report.generation
        found = await asyncio.to_thread(
            stalled.collect,
            witness.folder_of(self.desk.site.runtime),
            {worker.rank: worker.pid for worker in report.workers},
            within_s=dump_s,
            recorders_s=min(ANSWER_S, dump_s) if stall is not None and not stall.waiting else dump_s,
            node_of=lambda _: self.desk.site.node,
        )
        facts = tuple(replace(fact, generation=generation) for fact in found.evidence)
        if report.work is Work.JOINING:
            facts = ()  # it was seen on its way from one gang to the next: that belongs to neither
        now = time.monotonic()
        self.desk.post(Found(now=now, evidence=facts, scene=request))
        self.desk.log.info("scene.taken", generation=generation, said=found.said, took_s=round(now - begun, 3))

    async def _look_back(self, report: Report, generation: int, until_ns: int) -> None:
        """Which collectives had those of our workers that live on entered, when their gang of that generation ended?"""
        from elasticrl.diagnose import stalled

        facts = await asyncio.to_thread(
            stalled.entered, witness.folder_of(self.desk.site.runtime), {worker.rank: worker.pid for worker in report.workers},
            until_ns=until_ns, within_s=self.desk.tree.timeouts.dump_s, node_of=lambda _: self.desk.site.node,
        )  # fmt: skip
        if facts:
            self.desk.post(
                Found(now=time.monotonic(), evidence=tuple(replace(fact, generation=generation) for fact in facts))
            )

    async def _read_logs(self) -> None:
        looked_at, pause_s = time.monotonic(), TAIL_S
        while True:
            now = time.monotonic()
            if now - looked_at > pause_s + self.desk.tree.membership.suspect_s / 2:
                self._paused_at = now
            looked_at = now
            self.ways.look()
            facts = self._tail.look(now, over=self._ended.is_set())
            self._ended.clear()
            self.ways.note_sockets(self._tail.ways)
            if facts:
                self.desk.post(Found(now=time.monotonic(), evidence=tuple(map(of_its_gang, facts))))
            pause_s = TAIL_S if self._tail.files else IDLE_S
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), until_next(pause_s, time.time()))

    # ---- what the core decides

    def decided(self, event: Event, state: State, done: Done | None) -> None:
        """After each step of the core: which gangs there were, and whether a fault is over."""
        plan = state.view.plan
        if isinstance(event, Suspected | Cleared):
            self._silent = state.suspects
        anew = plan is not None and self._plans.add(plan)
        if plan is not None and anew:
            self._compare_later(plan)
            self._speak_up(plan, state)
        self.incidents.decided(event, state, done, anew=anew)
        self.comparison.decided(state)

    def _compare_later(self, plan: Plan) -> None:
        """Where a rank ended as gloo ends who was sent more than it expects, the others' recorders say who differed.

        It is asked for after the fact, so that no recovery waits for it; what is entered after the plan came is left out.
        """
        broken, report = self._plans.before(plan), self._report
        if dossier.parted(plan) and broken is not None and report is not None:
            self.desk.spawn(self._look_back(report, broken.generation, time.time_ns()), "look back")

    def _speak_up(self, plan: Plan, state: State) -> None:
        """The plan goes on without us, as we are taken for dead: that we read this proves that it is the way to us."""
        before = self._plans.before(plan)
        paused = time.monotonic() < self._paused_at + PAUSED_S  # then they were right to hear nothing
        fact = dossier.unheard(state.me, before, plan, self._silent) if before is not None and not paused else None
        if fact is not None:
            self.desk.post(Found(now=time.monotonic(), evidence=(fact,)))


def of_its_gang(fact: Evidence) -> Evidence:
    """A log's line speaks of the gang whose log it is."""
    named = GENERATION.search(fact.source)
    return replace(fact, generation=int(named[1])) if named else fact
