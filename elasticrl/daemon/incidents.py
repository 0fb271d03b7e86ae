"""The incident that is told of a fault once it is over, or where a cap keeps it from being."""

import asyncio
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from elasticrl.base.apart import apart
from elasticrl.contract.cause import ORDERLY
from elasticrl.contract.events import Event, Workers
from elasticrl.contract.evidence import Sign
from elasticrl.contract.model import Outcome, Phase, Work
from elasticrl.contract.verdict import Fault, Known, surest
from elasticrl.core.judge.judge import judge
from elasticrl.core.node import dossier
from elasticrl.core.node.state import State
from elasticrl.core.step import found
from elasticrl.daemon.history import History
from elasticrl.daemon.machine import short_of
from elasticrl.daemon.shared import Desk, Plans
from elasticrl.status.recovery import Done

if TYPE_CHECKING:  # see Inquiry.prepare
    from elasticrl.diagnose.incident import Incident

LATER_S = 1.0  # after a recovery, until its incident is written: a dead worker's last words are read by then
SAVED_S = 5.0  # at the daemon's end, for incidents to be on the disk
EARLIER_S = 0.05  # before the first sign: lines of the same moment belong to the story
STOPPED_S = 60.0  # how far back the story of a job goes that was stopped for a fault
SIGNS = frozenset({"worker.exited", "worker.stalled", "neighbour.suspected", "agent.lost", "verdict.found"})


class Incidents:
    """Of one node. `starving`: what its machine is short of, by check."""

    def __init__(self, desk: Desk, plans: Plans, history: History, starving: Callable[[], Mapping[str, str]]) -> None:
        #: Told of each that was written, of the gang that it ended, and of the generation that it led to (`Inquiry.join`).
        self.kept: Callable[[Incident, int, int], None]
        self._desk, self._plans, self._history, self._starving = desk, plans, history, starving
        self._well = 0  # the newest generation in which this node's workers have trained
        self._written: tuple[int, int, datetime] | None = None  # the newest: its gang, what came of it, since when
        self._saving: asyncio.Task[None] | None = None  # its file
        self._capped = ""  # what a cap keeps us from, when that was looked at last
        self._led = False  # the job, when that was asked last
        self._known: dossier.Filed = ()  # what the leader knew when that was looked at last

    async def saved(self) -> None:
        """At the daemon's end."""
        if self._saving is not None:
            await asyncio.wait({self._saving}, timeout=SAVED_S)

    def decided(self, event: Event, state: State, done: Done | None, *, anew: bool) -> None:
        """After each step of the core. `anew`: it has brought a plan."""
        plan = state.view.plan
        if anew and plan and plan.phase is Phase.STOP and plan.exit_code == Outcome.CRASH_LOOP.value:
            self._write(state, self._well or plan.generation - 1, plan.generation, ago(STOPPED_S))
        self._correct(state)
        self._note_cap(state)
        if isinstance(event, Workers) and event.work is Work.TRAINING and event.stall is None:
            self._well = max(self._well, event.generation)
        if done is not None:
            self._desk.spawn(self._later(done), "incident")

    def _note_cap(self, state: State) -> None:
        """What a cap keeps the leader from doing is an incident, too: no recovery will end by which it would be told."""
        plan, finding = state.view.plan, state.lead.dossier.finding if state.lead else None
        capped = finding.capped if finding else ""
        if capped == self._capped or plan is None:
            return
        self._capped = capped
        if capped:
            self._desk.spawn(self._keep_capped(plan.generation, ago(EARLIER_S)), "incident")

    async def _keep_capped(self, generation: int, since: datetime) -> None:
        await asyncio.sleep(LATER_S)
        if self._desk.state().view.generation == generation:  # else the recovery's own incident tells it
            self._write(self._desk.state(), generation, generation + 1, since)

    async def _later(self, done: Done) -> None:
        await asyncio.sleep(LATER_S)
        self._write(self._desk.state(), done.broke, done.generation, ago(done.total_s + LATER_S))

    def _correct(self, state: State) -> None:
        """A node that was taken for dead has come back and says that it had lived: the incident is told anew."""
        led, self._led = self._led, state.lead is not None
        facts = state.known.facts
        if state.lead is not None and not led:
            self._known = facts  # what the leader before has told
        if state.lead is None or self._written is None or facts is self._known:
            return
        broken, generation, since = self._written
        fresh = set(map(dossier.identity, facts)) - set(map(dossier.identity, self._known))
        self._known = facts
        if any(f.sign is Sign.UNHEARD and f.generation == broken and dossier.identity(f) in fresh for f in self._known):
            self._write(state, broken, generation, since)

    def _write(self, state: State, broken: int, generation: int, since: datetime) -> None:
        """The incident that ended the gang `broken` and led to `generation`, if it was one; with all that is known by now."""
        from elasticrl.diagnose import incident

        lines = self._history.since(since)
        if not any(line.get("event") in SIGNS for line in lines):
            return  # a pause, or somebody who left in order
        if (starving := self._starving()) and not any(line.get("event") == "machine.starved" for line in lines):
            at = datetime.now(UTC).isoformat()
            lines.append({"at": at, "event": "machine.starved", "said": short_of(starving)})
        gang = self._plans.get(broken)
        nodes = gang.node_of if gang else {}
        known = state.known
        facts = dossier.concerning(known.facts, range(broken, generation), frozenset(nodes.values()), known.passed)
        plans = list(self._plans.between(broken, generation))
        planned = [plan.verdict for plan in plans if plan.verdict]
        judged = judge(facts, Known(world=gang.world if gang else None, nodes=nodes))
        verdict = surest([judged, *reversed(planned)] if state.lead else [*reversed(planned), judged])
        if verdict.fault is Fault.UNKNOWN and plans and plans[0].says(*ORDERLY):
            return  # somebody who left in order, whom the others could not spare: its silence after that is no sign
        told = incident.build(
            lines, verdict, facts or verdict.because, job=self._desk.site.job, node=self._desk.site.node
        )
        if told is None:
            return
        if state.lead and verdict.fault is not Fault.UNKNOWN and planned and verdict.said != planned[-1].said:
            # What came to be known after the plan: by now another gang may have broken.
            self._desk.log.info("verdict.found", generation=broken, **found(verdict).fields)
        self._written, self._known = (broken, generation, since), known.facts if state.lead else ()
        led = min(generation, state.view.generation)  # what a cap forbids has led to none yet
        self._saving = self._desk.spawn(self._save(told, broken, led, after=self._saving), "incident's file")

    async def _save(self, told: "Incident", broken: int, generation: int, *, after: asyncio.Task[None] | None) -> None:
        """One after the other. A disk may take long, most of all while checkpoints go there, and beats must not wait for it."""
        from elasticrl.diagnose import incident

        if after is not None:
            await asyncio.wait({after})
        folder = incident.folder_of(self._desk.site.state, self._desk.site.job, self._desk.site.node)
        try:
            path = await apart(lambda: incident.save(folder, told))
        except OSError as error:
            self._desk.log.info("incident.lost", id=told.id, error=str(error))
            return
        fault, cause = told.verdict.fault.value, told.verdict.said
        self._desk.log.info("incident.saved", id=told.id, fault=fault, cause=cause, cost_s=told.seconds, path=str(path))
        self.kept(told, broken, generation)


def ago(seconds: float) -> datetime:
    """So long ago, and a moment more."""
    return datetime.fromtimestamp(time.time() - seconds - EARLIER_S, UTC)
