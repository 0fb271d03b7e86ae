"""A node that has begun: its place in the core's loop, and all that hears of what is decided there.

The one idea: it is made whole, once it is known who this node is, and so nothing in it has to ask whether something is there
yet. Before that there is only the daemon (`main`).
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from elasticrl.contract.events import Action, Event, Found, Probe, Seen, Tried, Try
from elasticrl.contract.evidence import Kind
from elasticrl.contract.model import Commit, Outcome, Phase, Plan, Record
from elasticrl.core.node.follow import lease_held, trains_on, unsaved
from elasticrl.core.node.names import namesake, yields
from elasticrl.core.node.state import Decision, State
from elasticrl.core.node.suspect import somebody_left
from elasticrl.daemon import asking, links
from elasticrl.daemon.asking import Where
from elasticrl.daemon.chronicle import Chronicle
from elasticrl.daemon.crew import Crew, Ears
from elasticrl.daemon.inquiry import Inquiry
from elasticrl.daemon.life import Home, Life
from elasticrl.daemon.measures import Measures
from elasticrl.daemon.neighbours import Neighbours
from elasticrl.daemon.steps import Line
from elasticrl.daemon.vault import Vault, ring_of
from elasticrl.diagnose import witness
from elasticrl.shell.node import Node
from elasticrl.shell.sight import AGAIN_S
from elasticrl.shell.trace import Trace
from elasticrl.store import Lease, Store, StoreError

PROBE_S: Final = 1.0  # for a sign; what does not answer by then cannot be reached


class Joined:
    """One node. `beats`: where its life listened under the daemon before, whose record may stand in the store still."""

    def __init__(
        self, state: State, store: Store, *, log: Any, home: Home, crew: Crew, vault: Vault, inquiry: Inquiry,
        neighbours: Neighbours, measures: Measures, trace: Trace | None, life: Life, adopted: bool = False, beats: str = "",
    ) -> None:  # fmt: skip
        self.crew, self.vault, self.inquiry, self.neighbours = crew, vault, inquiry, neighbours
        self.rival, self.rivalled = "", asyncio.Event()  # another machine has this node's name
        self.chronicle = Chronicle(life.node, store, inquiry.desk, measures)
        self.life = life  # as it was saved last
        self.met = 0  # the generation that was there before this daemon
        self._log, self._home, self._measures, self._beats = log, home, measures, beats
        self._plan: Plan | None = None
        self._trained_on = -1  # the newest plan that only added to the gang in which this node's workers trained on
        self._ring_plan: Plan | None = None  # whose ring the vault was last told
        self._doubted = 0  # the generation that somebody left
        self._commit: Commit | None = None
        self._unkept = False  # its life could not be saved, and that is said
        ttl_s = state.settings.membership.lease_ttl_s
        lease = Lease(id=life.lease, ttl_s=ttl_s, sent=0.0) if adopted and life.lease else None
        self.node = Node(
            state, store, (crew.perform, inquiry.perform, self._probe), log=log, trace=trace, lease=lease,
            decided=self._decided, met=self._meets, asked=self._asked_where,
            took=lambda action, seconds: measures.metrics.store_s.labels(action=action).observe(seconds),
        )  # fmt: skip
        inquiry.join(
            self.node.post, lambda: self.state, kept=self.chronicle.incident, latency=lambda: neighbours.latency
        )
        crew.join(state.me, Ears(post=self.node.post, broken=neighbours.doubt, reported=inquiry.heard))

    @property
    def state(self) -> State:
        """The core's."""
        return self.node.loop.state

    @property
    def elsewhere(self) -> bool:
        """Does the job go on without this node? Then its embedded etcd does, too: found by who drained the node that had it."""
        plan, me = self.state.view.plan, self.state.me.node
        if plan is None or plan.phase is Phase.STOP:
            return False
        return any(seat.member.node != me for seat in plan.ring)

    def stepped(self, line: Line) -> None:
        """A worker's steps, as they are written down."""
        self.chronicle.stepped(line)
        if self.inquiry.desk.tree.telemetry.metrics_port:
            self._measures.count(line)

    # ---- after every step of the core

    def _decided(self, event: Event, decision: Decision) -> None:
        """Who our neighbours are, what outlives us, what the metrics say."""
        state, view, before = decision.state, decision.state.view, self._plan
        done = self.chronicle.after(event, decision, before, state.settings.means)
        self.inquiry.decided(event, state, done)
        if view.plan is not before:
            self.met = view.generation if before is None else self.met
            self._plan = view.plan
            self.neighbours.follow(view.plan)
        self._turn_ring(state)
        if isinstance(event, Seen) and somebody_left(view) and view.generation != self._doubted:
            self._doubted = view.generation
            self.neighbours.doubt()  # our own workers may not have noticed yet
        if view.commit is not self._commit:
            self._commit = view.commit
            self._tell_commit(view.commit)
        if isinstance(event, Found):
            self._measures.metrics.timeouts.inc(sum(fact.kind is Kind.WATCHDOG_TIMEOUT for fact in event.evidence))
        self.chronicle.lead(view, leads=state.lead is not None)
        self.remember()
        self._measures.look(state, (self.neighbours.sent, self.neighbours.heard), time.monotonic())

    def _turn_ring(self, state: State) -> None:
        view = state.view
        if trains_on(state):
            self._trained_on = view.generation
        elif view.plan is not self._ring_plan:
            self._ring_plan = view.plan
            self.vault.follow(ring_of(view.plan, self.inquiry.desk.tree.vault.copies))
            if self._trained_on == view.generation:
                self.neighbours.doubt()  # it has parted to grow, or because somebody died

    def _tell_commit(self, commit: Commit | None) -> None:
        if commit is not None:
            self._log.info(
                "checkpoint.committed", step=commit.step, generation=commit.generation, manifest=commit.manifest
            )
        self.crew.inform(commit)

    def remember(self) -> None:
        """Keep what the next daemon needs, when it changes."""
        lease, report = self.node.office.lease, self.crew.report
        life = replace(
            self.life,
            lease=lease.id if lease else 0,
            agent_pid=report.pid if report else 0,
            agent_started=report.started if report else 0,
            beat=self.neighbours.address,
        )
        if life == self.life:
            return
        try:
            self._home.save(life)
        except OSError as error:  # a full disk; it is tried again at the next step of the core
            if not self._unkept:
                self._log.info("incarnation.unsaved", error=str(error))
            self._unkept = True
        else:
            self.life, self._unkept = life, False

    def _meets(self, record: Record) -> None:
        """What stands in the place of this node's record."""
        me, own = self.state.me, self.neighbours.address
        if record.member == me and record.beat == self._beats:
            return  # our own, of the daemon before this one, at the address that this node had then
        if not self.rival and yields(me, own, record):
            self.rival = namesake(record)
            self.rivalled.set()

    # ---- where the workers are

    async def diagnose(self, within_s: float) -> dict[str, Any]:
        """Where all workers of the job are; if the store is silent, those of this node."""
        state = self.state
        seats = state.view.plan.seats if state.view.plan else ()
        nodes = {seat.member.node for seat in seats} or {state.me.node}
        try:
            answers = await asking.ask(self.node.store, nodes, within_s)
        except (StoreError, TimeoutError):
            answers = {state.me.node: await self._where(0)}
        return asking.told(self.state, answers, nodes - answers.keys())

    async def _where(self, to: int) -> Where:
        within_s = self.inquiry.desk.tree.timeouts.dump_s
        return await asking.look(self.crew.report, witness.folder_of(self._home.folder), self.state.me, to, within_s)

    def _asked_where(self, to: int) -> None:
        """Somebody wants to know where all workers are."""
        self.inquiry.desk.spawn(self._say_where(to), "where")

    async def _say_where(self, to: int) -> None:
        said, lease = await self._where(to), self.node.office.lease
        if lease is None:
            return  # without one the answer would outlive this node
        try:
            await asking.answer(self.node.store, said, lease.id)
        except StoreError as error:
            self._log.info("store.failed", action="answer", error=str(error))

    async def _probe(self, action: Action) -> bool:
        """Ask each target for a sign. The rest takes longer."""
        if not isinstance(action, Probe | Try):
            return False
        probe_s = self.state.settings.recovery.probe_s
        unreachable = await self.neighbours.probe(action.targets, within_s=min(PROBE_S, probe_s / 2))
        if isinstance(action, Try):
            doors = {node: door for node, door in action.doors.items() if node not in unreachable}
            unreachable += await links.closed(doors, within_s=PROBE_S)
            reached = tuple(sorted(action.targets.keys() - set(unreachable)))
            self.node.post(Tried(now=time.monotonic(), found=action.found, reached=reached, unreachable=unreachable))
            return True
        self.inquiry.ways.answer(action, unreachable)
        return True

    # ---- its end

    async def drained(self, running: asyncio.Task[Any], orphaned: Callable[[], bool]) -> None:
        """Until this node has left, or its time is up. A run that was killed has taken its etcd along: then nobody hears that
        this node leaves.
        """
        deadline = time.monotonic() + self.state.settings.recovery.drain_s
        while not running.done() and (left_s := deadline - time.monotonic()) > 0:
            await asyncio.wait({running}, timeout=min(left_s, AGAIN_S))
            if orphaned() and not lease_held(self.state, time.monotonic()):
                return

    async def part(self, linger_s: float, *, ends: bool, told: bool) -> None:
        """This node leaves. The job's end ends the vault; otherwise others may still need what is in it. `ends`: nobody comes
        after this daemon.
        """
        state = self.state
        plan = state.view.plan
        # After a crash loop somebody mends the program and starts it again: the newest steps are in the vaults alone.
        over = plan is not None and plan.phase is Phase.STOP and plan.exit_code != Outcome.CRASH_LOOP.value
        over = over and not unsaved(state, time.monotonic())
        alone = plan is not None and all(seat.member.node == state.me.node for seat in plan.ring)
        if over or (told and (ends or alone)):
            await self.vault.end()
        else:
            await self.vault.leave(linger_s)
