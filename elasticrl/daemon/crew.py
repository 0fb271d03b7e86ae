"""This node's agent and workers, as the daemon knows them: the core's orders out, what they do as events in.

The one idea: the agent outlives this daemon, so it is looked for first, and started only where nobody else does that (systemd
has a unit for it). A lost agent is one event: no workers.
"""

import asyncio
import math
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from elasticrl.agent.link import Link, start_agent
from elasticrl.agent.spec import Spec
from elasticrl.base.parent import stops
from elasticrl.base.pauses import pause
from elasticrl.base.started import NOBODY, Started, last_line
from elasticrl.base.ticks import until_next
from elasticrl.base.value import dataclass
from elasticrl.contract.events import Action, Asked, Event, Workers
from elasticrl.contract.model import Commit, Member, Milestone, Verb, Work, meanwhile
from elasticrl.contract.orders import Halt, Kill, Launch, Park, Reform
from elasticrl.contract.wire import Acknowledge, Quit, Report
from elasticrl.daemon.history import History
from elasticrl.daemon.measures import Measures

LOOK_S = 0.2  # between looks whether the agent that we started still runs, while it does not speak to us
STEADY_S = 1.0  # and while it does: we are told when it falls silent
AGAIN_S = 1.0  # until an agent that could not be started is tried again
REST_S = 5.0  # and at most where each ends as it starts
# Codes of an agent that was told to end. Until it has imported torch a signal ends it at once.
TOLD_TO_END = (0, -signal.SIGTERM, -signal.SIGINT)
QUIT_LOOK_S = 0.02  # between looks whether it has ended
MILESTONE_S = 30.0  # between two lines of how far a script is by its log
KILL_S = 5.0  # for one that was killed to be gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Ears:
    """Who hears of the workers."""

    post: Callable[[Event], None]
    reported: Callable[[Report | None], None]  # told what the agent says; None: it is gone
    broken: Callable[[], None]  # told when a collective broke: neighbours are asked at once


class Crew:
    """The agent and its workers.

    Long because it keeps two accounts of the same workers: what the agent says, and what core and log were told of that.
    """

    def __init__(
        self, folder: Path, spec: Spec, *, log: Any, managed: bool, measures: Measures | None = None,
        history: History | None = None,
    ) -> None:  # fmt: skip
        self.me: Member | None = None  # once it is known: nothing is ordered before
        self.run_of_job = ""  # for the workers' logs
        self.report: Report | None = None  # the newest; None while there is no agent
        self.first = asyncio.Event()  # the first report has come
        self._ears: Ears | None = None  # once it is known who this node is; they are told then what has happened before
        self._folder = folder
        self._spec = spec
        self.log = log
        self._managed = managed  # by systemd
        self._measures, self._history = measures, history
        self._link = Link(folder / "agent.sock", self._heard, self._lost)
        self._begun = NOBODY  # the agent that we have started last
        self._told = Workers(now=0.0)
        self._milestone: Milestone | None = None  # what the log says of how far a script is,
        self._milestone_at = -math.inf  # and when
        self._shown = Work.NONE, 0, 0  # what the log says of them: what they do, in which generation, born when
        self._vault = ""  # this node's
        self._vaultless = ""  # why it has none
        self._bits = self._versions = ""
        self._committed: Commit | None = None
        self._silent = asyncio.Event()  # the agent's socket has closed
        self._logged = 0
        self._over = False  # it was told to end: none is started in its place
        self._leaves = False  # nor in that of one that somebody else has told so: this node is to leave
        self._known = NOBODY  # the agent that has spoken last, or one of an earlier daemon
        self._said, self._rest_s = "", 0.0  # why there is no agent, and how long it was waited before the last try

    def join(self, me: Member, ears: Ears) -> None:
        """It is known who this node is: what the workers do is told from here on, what they did already first. So is that the
        agent is to stop, or was and has ended since; that it is gone, or why there is none.
        """
        self.me, self._ears, report = me, ears, self.report
        if report is not None:
            ears.post(self._event(report))
        elif self._told.now:
            ears.post(replace(self._told, now=time.monotonic()))
        if self._leaves:  # who leaves without workers goes at once, so it is known first whether there are any
            self._drain()
        ears.reported(report)

    def _post(self, event: Event) -> None:
        if self._ears is not None:
            self._ears.post(event)

    def _leave(self, report: Report, before: Report | None) -> None:
        """The agent's unit is being stopped: that asks this node to leave. It is remembered until it is known who this node is:
        the store may be away for longer than the agent takes to end. An agent that was started after that takes it back.

        Found by reading: a daemon that waited for the store started another agent, and its node took part again.
        """
        if before is None or report.stopping:
            self._leaves = bool(report.stopping)
        if report.stopping and not (before and before.stopping):
            self._drain()

    def _drain(self) -> None:
        self._post(Asked(now=time.monotonic(), verb=Verb.DRAIN))

    def _drain_if_told(self) -> None:
        if self._leaves:
            self._drain()

    async def run(self) -> None:
        """Keep an agent there, and stay connected to it. Until cancelled."""
        linking = asyncio.create_task(self._link.run(), name="agent link")
        tried = asyncio.create_task(self._link.tried.wait(), name="is there an agent?")
        try:
            await asyncio.wait({linking, tried}, return_when=asyncio.FIRST_COMPLETED)  # one of an earlier daemon, first
            while True:
                if linking.done():
                    linking.result()  # it goes on for ever, so this raises what ended it
                if not (self._managed or self._over or self._leaves or self._link.connected or self._begun.alive):
                    if why := self._stillborn():
                        self._complain(why)
                        self._drain_if_told()
                        self._rest_s = pause(self._rest_s, 0.0, first_s=AGAIN_S / 2, most_s=REST_S, steady_s=0.0)
                        await asyncio.sleep(self._rest_s)
                        continue
                    try:
                        self._begun = start_agent(self._spec, self._folder)
                    except OSError as error:  # a full disk, no memory: that may pass
                        self._complain(str(error))
                        await asyncio.sleep(AGAIN_S)
                        continue
                if not self._link.connected:
                    await asyncio.sleep(LOOK_S)
                    continue
                self._silent.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(until_next(STEADY_S, time.time())):
                        await self._silent.wait()
        finally:
            linking.cancel()
            tried.cancel()
            await asyncio.gather(linking, tried, return_exceptions=True)

    def _stillborn(self) -> str:
        """How an agent of ours ended that had not said a word: another would end like it, so it is not started at once. Told
        once; empty where none did. One that was told to end asks this node to leave, as one that has spoken does.
        """
        begun = self._begun
        if begun is NOBODY or self._known.pid == begun.pid:
            return ""
        self._begun = NOBODY
        if begun.code in TOLD_TO_END:
            self._leaves = True
            return "the agent was told to end as it started: this node leaves"
        last = last_line(Path(self._spec.log_dir) / "agent.log")
        return f"the agent ended as it started (exit code {begun.code}){f': {last}' if last else ''}"

    def _complain(self, why: str) -> None:
        """Why there is no agent: once, and in this node's record."""
        if why == self._said:
            return
        self._said = why
        self.log.info("agent.failed", error=why)
        self._told = replace(self._told, now=time.monotonic(), problem=why)
        self._post(self._told)

    def _heard(self, report: Report) -> None:
        before, self.report = self.report, report
        self._said, self._rest_s = "", 0.0
        self._known = Started(pid=report.pid, born=report.started)
        if before is None:
            adopted = self._begun.pid != report.pid
            self.log.info("agent.started", pid=report.pid, adopted=adopted)
        self._leave(report, before)
        self._log_ends(report)
        if report.unlogged and report.unlogged != (before.unlogged if before else ""):
            self.log.info("logs.refused", why=report.unlogged)
        if before is None:
            self._tell_commit()
        workers = self._event(report)
        self._log_change(workers)
        broke = workers.work is Work.PARKED and self._told.work in (Work.TRAINING, Work.JOINING)
        self._told = workers
        self.first.set()
        if (ears := self._ears) is not None:
            if broke:
                ears.broken()
            ears.post(workers)
            ears.reported(report)

    def _event(self, report: Report) -> Workers:
        """What the agent says, and what only we know. A node whose vault is not there yet cannot take a seat."""
        self._bits, self._versions = report.bits or self._bits, report.versions or self._versions
        return report.into(
            Workers,
            now=time.monotonic(),
            bits=self._bits,
            versions=self._versions,
            vault=self._vault,
            warm=report.warm and bool(self._vault),
            problem=report.problem or self._vaultless,
            unlogged="; ".join(filter(None, (report.unlogged, self._history.lost if self._history else ""))),
        )

    def settle(self, vault: str, away: str = "") -> None:
        """The node's vault listens there; or nowhere yet, for this reason."""
        self._vault, self._vaultless = vault, "" if vault else f"its vault does not start: {away}"
        if self.report is not None:
            self._post(self._event(self.report))

    def inform(self, commit: Commit | None) -> None:
        """The workers shall know of the newest commit; a new agent will be told as well."""
        if commit is not None:
            self._committed = commit
            self._tell_commit()

    def _tell_commit(self) -> None:
        if self._committed is not None:
            self._link.send(self._committed)

    def _log_change(self, workers: Workers) -> None:
        told, stall = self._told, workers.stall
        state = workers.work, workers.generation, workers.born
        if state != self._shown and not meanwhile(workers.work, workers.phase):
            self._shown = state
            self._log_milestone(workers, 0.0)
            self.log.info(
                "workers.changed", work=workers.work.value, generation=workers.generation, born=workers.born, step=workers.step
            )  # fmt: skip
        self._log_milestone(workers, MILESTONE_S)
        if stall and (
            told.stall is None
            or (stall.slot, stall.phase, stall.silent) != (told.stall.slot, told.stall.phase, told.stall.silent)
        ):
            if self._measures:
                self._measures.stalled(stall.phase)
            self.log.info(
                "worker.stalled", slot=stall.slot, phase=stall.phase, for_s=round(stall.for_s, 3),
                budget_s=round(stall.budget_s, 3), waiting=stall.waiting, stopped=stall.stopped, silent=stall.silent,
            )  # fmt: skip

    def _log_milestone(self, workers: Workers, every_s: float) -> None:
        """How far a script is by its log, now and then: for who reads the run when it is over."""
        now, newest = time.monotonic(), workers.milestone
        if newest is not None and newest != self._milestone and now >= self._milestone_at + every_s:
            self._milestone, self._milestone_at = newest, now
            self.log.info(
                "milestone.read",
                generation=workers.generation,
                said=str(newest),
                unit=newest.unit,
                count=newest.at,
                of=newest.of,
            )

    def _log_ends(self, report: Report) -> None:
        """Log each end once, then let the agent forget it."""
        if not report.ended:
            return
        for ended in report.ended:
            # A spare that was ended because the agent ends, or because its place is wanted, is no fault; one that crashes is.
            if ended.number > self._logged and (ended.rank is not None or ended.exit.own):
                end = ended.exit
                if self._measures:
                    self._measures.exited(end)
                self.log.info(
                    "worker.exited",
                    generation=end.generation,
                    slot=end.slot,
                    step=end.step,
                    cause=end.cause,
                    own=end.own,
                    **({"core": ended.core} if ended.core else {}),
                    **({"said": ended.said} if ended.said else {}),
                )
        numbers = tuple(ended.number for ended in report.ended)
        self._logged = max(self._logged, *numbers)
        self._link.send(Acknowledge(ended=numbers))

    def _lost(self, why: str) -> None:
        """The agent is gone, and with it, by its own construction, its workers."""
        self._silent.set()
        self.log.info("agent.lost", reason=why)
        self.report, self._logged = None, 0
        if self._ears is not None:
            self._ears.reported(None)
        told = self._told
        self._shown = Work.NONE, told.generation, 0
        self._told = Workers(
            now=time.monotonic(),
            generation=told.generation,
            exit=told.exit,
            vault=self._vault,
            bits=self._bits,
            versions=self._versions,
        )
        self._post(self._told)

    async def perform(self, action: Action) -> bool:
        """The core's actions on workers. Without an agent they are lost, and the core will decide them again."""
        match action:
            case Launch(place=place) | Reform(place=place):
                self._link.send(replace(action, place=replace(place, run=self.run_of_job)))
            case Park() | Halt() | Kill():
                self._link.send(action)
            case _:
                return False
        return True

    @property
    def pid(self) -> int:
        """The agent's; 0 if there is none that is known."""
        return self.report.pid if self.report else self._begun.pid if self._begun.alive else 0

    def know(self, agent: Started) -> None:
        """An agent of an earlier daemon that may run still, and that has not spoken to this one."""
        self._known = agent

    async def quit(self, reason: str, within_s: float) -> None:
        """End the agent and all processes below it. One that has not by then is killed, and what is below it dies with it."""
        self._over, told, asked = True, False, False
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline and (self._living.alive or self.awaited):
            told = told or self._link.send(Quit(reason=reason))
            if not (told or asked or self._living is NOBODY):
                self._living.send(stops()[0])  # one that cannot be told, or imports torch still, for some seconds
                asked = True
            await asyncio.sleep(QUIT_LOOK_S)
        if (agent := self._living).alive:
            self.log.info("agent.killed", pid=agent.pid, after_s=within_s)
            await agent.kill(KILL_S)
        if not (self._managed or self._living.alive):
            # Of one that was killed, where none had followed yet that takes them over.
            for left in ("agent.sock", "fork.sock"):
                (self._folder / left).unlink(missing_ok=True)

    @property
    def _living(self) -> Started:
        """The agent that must end: the one that has spoken last, else the one that we started; NOBODY: none runs."""
        return next((agent for agent in (self._known, self._begun) if agent.alive), NOBODY)

    @property
    def awaited(self) -> bool:
        """Will there be one of which nothing is known yet? systemd starts it, for a node that has none."""
        return self._managed and not self.first.is_set()
