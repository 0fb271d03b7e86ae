"""One node's daemon, put together: `elasticrl daemon --config FILE`.

The one idea: everything here is plumbing between parts that do not know each other. It decides who this member is (a new life,
or the one whose workers still run), joins the parts to the core's loop, and takes them apart again: handing over on SIGTERM,
for good when the core says to leave.
"""

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from datetime import datetime
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticrl import __version__
from elasticrl.agent.echo import leave_note
from elasticrl.agent.spec import environment as environment_of
from elasticrl.base.address import join, split
from elasticrl.base.apart import apart
from elasticrl.base.process import started_at
from elasticrl.base.trim import trim
from elasticrl.config import ConfigError, Tree, changes, clash, taken_up, to_core
from elasticrl.contract.events import (
    Action,
    Asked,
    Cleared,
    Configured,
    Event,
    Found,
    Probe,
    Seen,
    Suspected,
    Tried,
    Try,
)
from elasticrl.contract.evidence import Kind
from elasticrl.contract.model import REFUSED, Commit, Intent, Member, Outcome, Phase, Plan, Record, Verb, View
from elasticrl.core.node.follow import lease_held, told_now, trains_on, unsaved
from elasticrl.core.node.names import elsewhere, namesake, twin, yields
from elasticrl.core.node.state import Decision, State
from elasticrl.core.node.suspect import somebody_left
from elasticrl.core.step import deputies
from elasticrl.daemon import asking, control, links
from elasticrl.daemon.adopt import Look, Lost, settle
from elasticrl.daemon.asking import Where
from elasticrl.daemon.background import background
from elasticrl.daemon.crew import Crew
from elasticrl.daemon.history import History
from elasticrl.daemon.inquiry import Inquiry
from elasticrl.daemon.life import Life, end_of, this_boot
from elasticrl.daemon.neighbours import Neighbours
from elasticrl.daemon.refusal import FAILED, Refusal
from elasticrl.daemon.resident import Resident
from elasticrl.daemon.roll import NAME as ROLL
from elasticrl.daemon.roll import Roll
from elasticrl.daemon.secret import run_of
from elasticrl.daemon.shared import Place
from elasticrl.daemon.steps import NAME as STEPS
from elasticrl.daemon.steps import Line, StepLog
from elasticrl.daemon.stored import at_first, how_it_ended, living_here, record_at, the_secret, written_secret
from elasticrl.daemon.vault import Options, Vault, folder_of, ring_of
from elasticrl.diagnose import witness
from elasticrl.diagnose.program import absent
from elasticrl.shell import keys
from elasticrl.shell.node import Node
from elasticrl.shell.sight import AGAIN_S
from elasticrl.shell.trace import Trace
from elasticrl.status.past import Broken, Past, Roster, Scribe, lasting
from elasticrl.status.recovery import Done, Flow, Stages, kind_of
from elasticrl.store import Lease, Put, Store, StoreError

if TYPE_CHECKING:
    from elasticrl.diagnose.incident import Incident

LATE_S = 1.0  # after which others tell what the leader has not
AGENT_S = 30.0  # for an agent that runs already to answer, before this is taken for a new life
TRIM_S = 60.0  # between looks at logs that are written by others
QUIT_S = 20.0  # for an agent to end with all that is below it

#: What ends a daemon with a sentence instead of `bug`: nothing that a restart would mend.
REFUSALS = (Refusal, StoreError, keys.Unreadable, ConfigError)


class Daemon(Resident):
    """A node that trains."""

    def __init__(
        self,
        tree: Tree,
        *,
        log: Any,
        history: History,
        keep: bool = True,
        starter: int = 0,
        reload: Callable[[], Tree] | None = None,
    ) -> None:
        super().__init__(tree, log=log, history=history, keep=keep, starter=starter)
        self.kept: Look = lambda _: None  # looks for the job's checkpoints
        self.adopt = False  # go on from them if the store has lost the job
        self.again = False  # in place of a daemon that died: nobody has asked anew for a job that has ended
        self._reload = reload or (lambda: tree)  # reads the configuration again
        self.metrics = self.measures.metrics
        managed = os.environ.get("ELASTICRL_AGENT") == "systemd"
        self._vaulting: asyncio.Task[None] | None = None  # what sees to the vault
        self.crew = Crew(self.home.folder, self.spec(), log=log, managed=managed)
        self.crew.ended = lambda cause: self.metrics.exits.labels(cause=kind_of(cause)).inc()
        self.crew.stalled = lambda phase: self.metrics.stalls.labels(phase=phase).inc()
        self.crew.unlogged = lambda: history.lost
        self.inquiry = Inquiry(tree, self._place(), log=log, history=history)
        self._ours = asyncio.Event()  # no other daemon has this node's name
        self.vault = Vault(self._vault_options(), log=log, changed=self._vault_moved, ours=self._ours)
        self.roll = Roll(self.home.folder / ROLL, log=log)
        self.node: Node | None = None
        self._boot, self._after = (
            this_boot(),
            "",
        )  # after which end of the daemon before, or of all of its life, this one runs
        self._formerly = ""  # where the daemon listened for beats whose life this one goes on with
        self._rival, self._rivalled = "", asyncio.Event()  # another machine has this node's name
        self.neighbours: Neighbours | None = None
        self._lasting: tuple[Put, ...] = ()  # what a store that has lost the job is told again, beside the plan
        self._stages = Stages()
        self._flow = Flow()
        self._plan: Plan | None = None
        self._trained_on = -1  # the newest plan that only added to the gang in which this node's workers trained on
        self._ring_plan: Plan | None = None  # whose ring the vault was last told
        self._doubted = 0  # the generation that somebody left
        self._commit: Commit | None = None
        self._life: Life | None = None  # as it was saved last
        self._unkept = False  # it could not be saved, and that is said
        self._scribe = Scribe()
        self._roster = Roster()
        self._leads = False
        self._broken_last: Broken | None = None  # what befell this node's gang last, as it knows it
        self._done: Done | None = None  # the newest recovery
        self._met = 0  # the generation that was there before this daemon
        self._told_of = 0  # the generation that the newest incident led to

    def _place(self) -> Place:
        tree = self.tree
        remote = "://" in tree.checkpoint.dir
        disks = {"state": Path(tree.node.state_dir), **({} if remote else {"checkpoint": Path(tree.checkpoint.dir)})}
        return Place(
            node=self.name,
            job=tree.job.name,
            host=self.host,
            runtime=self.home.folder,
            state=Path(tree.node.state_dir),
            disks=disks,
        )

    def _vault_options(self) -> Options:
        tree = self.tree
        return Options(
            job=tree.job.name,
            node=self.name,
            folder=folder_of(tree.vault.dir, tree.job.name, self.name),
            home=self.home.folder,
            host=self.host,
            port=tree.vault.port,
            window_bytes=tree.vault.window_bytes,
            deadline_s=tree.vault.timeout_s,
            log=self._logs / "vault.log",
            led=self.led,
        )

    def _vault_moved(self) -> None:
        self.crew.settle(self.vault.address, self.vault.away)

    async def run(self) -> int:
        """Until the core leaves (its exit code) or a signal hands over (0)."""
        self._close_folders()
        self.home.lock(self.state_dir)
        told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._hear_signals(lambda number: None if told.done() else told.set_result(number.name))
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(background(self._feed(), "watchdog", self.log))
            crew = await stack.enter_async_context(background(self.crew.run(), "crew", self.log))
            vault = await stack.enter_async_context(background(self.vault.run(), "vault", self.log))
            self._vaulting = vault
            stack.push_async_exit(self._broken)
            starting = asyncio.create_task(self._start(stack), name="start")
            try:
                either: set[asyncio.Future[Any]] = {starting, told}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            finally:
                starting.cancel()  # which does nothing to what is done
                await asyncio.gather(starting, return_exceptions=True)
            if starting.cancelled():
                return await self._given_up(told.result(), vault)
            node = starting.result()
            return node if isinstance(node, int) else await self._until_the_end(node, told, crew, vault)

    async def _start(self, stack: AsyncExitStack) -> Node | int:
        """Ask the store who this node is, and begin with that; or why it cannot (the exit code)."""
        last, adopted = await self._live()
        if not adopted and (why := absent(self.tree)):  # workers that run have read it
            raise Refusal(why)
        store = await stack.enter_async_context(await self._store())
        try:
            kept = await self._patiently(lambda: settle(store, self.kept, adopt=self.adopt))
        except Lost as lost:
            return await self._refuse(lost, adopted=adopted)
        since, met = await self._patiently(lambda: at_first(store))  # after the plan that `--adopt` writes
        if kept is not None:
            self.log.info("store.adopted", step=kept.step, manifest=kept.name, place=kept.place)
        booting = not adopted and await asyncio.to_thread(self.notify.booting)
        if booting or (self.again and not adopted):
            ended = await self._patiently(lambda: how_it_ended(store))
            if ended is not None:
                return await self._stay_out(*ended, booting=booting)
        beside = None if adopted else await self._patiently(lambda: living_here(store, self.name))
        if beside is not None and (last is None or beside.member != last.member):
            return await self._give_way(twin(beside), vault=self.vault.started)
        if not adopted and (taken := await self._name_taken(store, last)):
            return await self._give_way(taken)
        self._ours.set()
        life = last if last and adopted else replace(await self._begin(store, last), since=since)
        self._after = end_of(last, self._boot, adopted=adopted)
        self._formerly = life.beat
        self.home.save(life)
        me = life.member
        self.names["member"] = str(me)
        self.neighbours = await self._open_beats(store, me)
        stack.callback(self.neighbours.close)
        probe = self.inquiry.ways.open(self.tree.node.probe_port)
        # An adopted life has followed every plan so far; a new one takes a job that was stopped for a job to begin again.
        node = self._join(store, me, life, probe, adopted=adopted, met=0 if adopted else met)
        await self._open_control(stack)
        await stack.enter_async_context(background(self.neighbours.beat(), "beats", self.log))
        await stack.enter_async_context(background(self._guard_store(), "etcd", self.log))
        if self.tree.rollout.nodes:
            secret = await self._patiently(lambda: the_secret(store))
            await stack.enter_async_context(background(self.roll.run(store, secret), "roll", self.log))
        await stack.enter_async_context(background(self._trim_logs(), "logs", self.log))
        self.measures.serve(stack)
        steps = StepLog(
            self._logs / STEPS,
            self.name,
            lambda: self.crew.report.workers if self.crew.report else (),
            self._stepped,
        )
        await stack.enter_async_context(background(steps.run(), "steps", self.log))
        await self._serve_page(stack)
        await stack.enter_async_context(background(self._look_at(store), "store's health", self.log))
        self.log.info("daemon.started", member=str(me), pid=os.getpid(), adopted=adopted, version=__version__)
        self.notify.ready(f"{me} is up")
        await stack.enter_async_context(background(self.inquiry.run(environment_of(self.spec())), "inquiry", self.log))
        return node

    async def _given_up(self, reason: str, vault: asyncio.Task[None]) -> int:
        """Told to end before it was up, as while the store is away. What runs here goes on for the next daemon, or ends with
        this unit, where that is stopped for good.
        """

        async def ends(why: str) -> None:
            vault.cancel()
            await asyncio.gather(vault, return_exceptions=True)
            if not self.crew.awaited:
                await self._quit(why)
            await (self.vault.end() if self.foreground else self.vault.leave(self.tree.vault.linger_s))

        if self.keep and await asyncio.to_thread(self.notify.for_good):
            self.keep = False
        return await self._stop(0, reason, ends, kept=self.keep)

    # ---- beginnings

    async def _live(self) -> tuple[Life | None, bool]:
        """The life that was led here last, and whether its agent still runs: then this daemon goes on with it."""
        last = self.home.load()
        if last is None or last.node != self.name or not last.agent.alive:
            return last, False
        try:
            async with asyncio.timeout(AGENT_S):
                await self.crew.first.wait()
        except TimeoutError:
            return last, False
        return last, self.crew.report is not None and self.crew.report.pid == last.agent_pid

    async def _stay_out(self, code: int, reason: str, *, booting: bool) -> int:
        """Nobody asked for this job again: it had ended when this machine went down, and a boot is no operator; or it ended
        beside a daemon that died, in whose place this one is.
        """
        remedy = "this machine has just booted, which begins no job anew: systemctl start elasticrl does"
        remedy = remedy if booting else "this daemon was started in place of one that died, which begins no job anew"
        self.log.info("daemon.refused", reason=f"the job has ended ({reason}), and {remedy}")
        await self._withdraw(reason)
        await self._leave_vault()
        return code

    async def _name_taken(self, store: Store, last: Life | None) -> str:
        """Why this node cannot have its name; "" if it can. A dead one's record goes with its lease, which is awaited."""
        deadline, said = time.monotonic() + self.settings.membership.lease_ttl_s + 4 * AGAIN_S, False
        here = await asyncio.to_thread(numbers_of, self.host)
        while True:
            record = await self._patiently(lambda: record_at(store, keys.member_key(self.name)))
            if record is None or not elsewhere(record, here) or (last is not None and record.member == last.member):
                return ""
            if time.monotonic() > deadline:
                return namesake(record)
            if not said:
                said = True
                self.notify.status(f"waiting whether {record.member}, at {record.beat}, still lives")
            await asyncio.sleep(AGAIN_S)

    def _meets(self, record: Record) -> None:
        """What stands in the place of this node's record."""
        assert self.node is not None
        assert self.neighbours is not None
        me, own = self.node.loop.state.me, self.neighbours.address
        if record.member == me and record.beat == self._formerly:
            return  # our own, of the daemon before this one, at the address that this node had then
        if not self._rival and yields(me, own, record):
            self._rival = namesake(record)
            self._rivalled.set()

    async def _give_way(self, taken: str, *, vault: bool = True) -> int:
        """`vault`: that which answers here is this node's, and not the other daemon's."""
        self.log.info("daemon.refused", reason=taken)
        await self._withdraw("another daemon has this node's name")
        if vault:
            await self._leave_vault()
        return REFUSED

    async def _leave_vault(self) -> None:
        """To those who may still fetch from it; nobody here sees to it any more."""
        await self._forget_vault()
        await self.vault.leave(self.tree.vault.linger_s)

    async def _forget_vault(self) -> None:
        if self._vaulting is not None:
            self._vaulting.cancel()
            await asyncio.gather(self._vaulting, return_exceptions=True)

    async def _refuse(self, lost: Lost, *, adopted: bool) -> int:
        """The store is not this job's. What runs here already runs on: its memory is newer than any checkpoint."""
        self.log.info("daemon.refused", reason=str(lost))
        if not adopted:
            await self._withdraw("the store has lost the job")
        if left := self._left():
            self.log.info("daemon.left", left=left)
        return REFUSED

    async def _withdraw(self, reason: str) -> None:
        """Nothing has begun: end what was started for it. systemd starts the agent's unit once this one is up, or has failed to
        be: so it is let know that it is, and the agent is ended when it comes. Else one of this configuration would stay.
        """
        if self.crew.awaited:
            self.notify.ready(reason)
        with suppress(TimeoutError):
            async with asyncio.timeout(AGENT_S):
                await self.crew.first.wait()
        await self._quit(reason)
        await self._stop_store()

    async def _begin(self, store: Store, last: Life | None) -> Life:
        life = await super()._begin(store, last)
        if last is not None:
            self.crew.know(last.agent)  # if it hangs it ends with this life, at the latest
        return life

    async def _look_at(self, store: Store) -> None:
        """Say what an operator should know of it. Nobody waits for that: a member of it that is down takes its time."""
        with suppress(StoreError):  # it is away: whoever needs it says so
            for text in (await store.status()).warnings:
                self.log.info("store.warning", text=text)

    async def _trim_logs(self) -> None:
        """What agent, vault and etcd say of themselves, nobody else turns over."""
        logs = [self._logs / "agent.log", self._logs / "vault.log"]
        if self.etcd is not None:
            logs.append(self.etcd.log)
        while True:
            await asyncio.sleep(TRIM_S)
            await apart(lambda: [trim(log) for log in logs])

    async def _open_beats(self, store: Store, me: Member) -> Neighbours:
        secret = await self._patiently(lambda: the_secret(store))
        self.crew.run_of_job = self.names["run"] = run_of(secret)
        self.vault.know(secret)
        self.inquiry.ways.secret = secret
        self._lasting = (written_secret(secret),)
        neighbours = Neighbours(
            me,
            secret,
            self.settings.membership,
            post=self._heard,
            refused=lambda sender, problem, more: self.log.info(
                "beats.refused", sender=sender, problem=problem, more=more
            ),
            doubt_s=self.tree.membership.doubt_s,
        )
        port = self.tree.node.beat_port
        former = 0 if port or not self._formerly else split(self._formerly)[1]
        try:
            if former:  # those who know this node by the plan alone ask there
                with suppress(OSError):
                    await neighbours.open(self.host, former)
                    return self._noted(neighbours, me, secret)
            await neighbours.open(self.host, port)
        except OSError as error:
            raise Refusal(
                f"beats cannot be heard at {join(self.host, port)} ({error.strerror}): see who has that port (ss -lunp), and "
                "give each job of a machine a node.beat_port of its own (0 takes any); an address of another machine comes "
                "from node.address or node.interface"
            ) from None
        return self._noted(neighbours, me, secret)

    def _noted(self, neighbours: Neighbours, me: Member, secret: bytes) -> Neighbours:
        leave_note(self.home.folder, me, secret)
        return neighbours

    def _heard(self, event: Event) -> None:
        """What the beats say, for the log and for the core."""
        if isinstance(event, Suspected):
            self.log.info("neighbour.suspected", neighbour=event.node)
        elif isinstance(event, Cleared):
            self.log.info("neighbour.cleared", neighbour=event.node)
        if self.node is not None:
            self.node.post(event)

    def _join(self, store: Store, me: Member, life: Life, probe: str, *, adopted: bool, met: int) -> Node:
        assert self.neighbours is not None
        conf = self.tree.node
        taken_at = round(time.time(), 1) if self._after else 0.0
        card = Record(
            member=me, slots=conf.workers, beat=self.neighbours.address, probe=probe, taken_at=taken_at, taken=self._after,
            since=life.since,
        )  # fmt: skip
        state = State(settings=self.settings, me=me, card=card, met=met)
        trace = Trace(self.state_dir / "trace", self.tree.telemetry.trace_limit_bytes, self.log.info)
        lease = (
            Lease(id=life.lease, ttl_s=self.settings.membership.lease_ttl_s, sent=0.0)
            if adopted and life.lease
            else None
        )
        hands = (self.crew.perform, self.inquiry.perform, self._probe)
        node = Node(state, store, hands, log=self.log, trace=trace, lease=lease)
        node.loop.decided = self._decided
        node.took = lambda action, seconds: self.metrics.store_s.labels(action=action).observe(seconds)
        self.node = node
        node.office.lasting = self._lasting
        self.crew.me = me
        self.crew.post = node.post
        self.crew.broken = self.neighbours.doubt
        self.crew.reported = self.inquiry.heard
        self.inquiry.desk.post = node.post
        node.sight.met = self._meets
        node.sight.asked = self._asked_where
        self.inquiry.desk.state = lambda: node.loop.state
        self.inquiry.incidents.kept = self._tell_incident
        neighbours = self.neighbours
        self.inquiry.ways.latency = lambda: neighbours.latency
        self.crew.repeat()
        self.inquiry.heard(self.crew.report)
        return node

    async def _serve_page(self, stack: AsyncExitStack) -> None:
        if self.tree.web.port:  # else it need not even be imported
            from elasticrl.daemon import web

            await web.serve(stack, self.tree.web, self.picture, self.log)

    # ---- the middle

    async def _until_the_end(
        self, node: Node, told: asyncio.Future[str], crew: asyncio.Task[None], vault: asyncio.Task[None]
    ) -> int:
        """Run the node until it leaves, or until a signal ends this daemon."""

        async def ends(why: str) -> None:
            await self._quit(why)
            await self._part(vault, told=told.done())

        running = asyncio.create_task(node.run(), name="node")
        rivalled = asyncio.create_task(self._rivalled.wait(), name="namesake")
        some: set[asyncio.Future[Any]] = {running, told, crew, rivalled}
        await asyncio.wait(some, return_when=asyncio.FIRST_COMPLETED)
        rivalled.cancel()
        if self._rival and not running.done():
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            return await self._give_way(self._rival)
        if told.done() and not running.done() and self.keep and await asyncio.to_thread(self.notify.for_good):
            self.keep = False
        if told.done() and not running.done() and not self.keep:
            self.notify.stopping("draining", self.settings.recovery.drain_s + 2 * QUIT_S)
            node.post(Asked(now=time.monotonic(), verb=Verb.DRAIN))
            await self._drained(node, running)
        if running.done():
            left = running.result()
            return await self._stop(left.code, left.reason, ends, kept=False)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        # The crew goes on for ever, so if it has ended something in it is wrong: the next daemon adopts the workers.
        reason, code = (told.result(), 0) if told.done() else ("the crew failed", FAILED)
        # No time of its own: to hand over takes none, and for a drain that came to nothing systemd has been told.
        return await self._stop(code, reason, ends, kept=self.keep, status="handing over", within_s=0.0)

    async def _drained(self, node: Node, running: asyncio.Task[Any]) -> None:
        """Until this node has left, or its time is up. A run that was killed has taken its etcd along: then nobody hears that
        this node leaves.
        """
        deadline = time.monotonic() + self.settings.recovery.drain_s
        while not running.done() and (left_s := deadline - time.monotonic()) > 0:
            await asyncio.wait({running}, timeout=min(left_s, AGAIN_S))
            if self._orphaned and not lease_held(node.loop.state, time.monotonic()):
                return

    @property
    def _orphaned(self) -> bool:
        """Was the run killed that has started this daemon? It would have cleared away what is left now."""
        return bool(self.starter) and not started_at(self.starter)

    async def _broken(self, kind: object, error: BaseException | None, trace: object) -> bool:  # noqa: ARG002 - a context's end
        """By an exception. What the next daemon adopts goes on, and is named with what else ends it; after a foreground run no
        daemon comes.
        """
        if not isinstance(error, Exception):
            return False
        reason, code = f"{type(error).__name__}: {error}", REFUSED if isinstance(error, REFUSALS) else FAILED

        async def ends(why: str) -> None:
            await self._quit(why)
            if self._orphaned:
                await self._forget_vault()
                await self.vault.end()

        await self._stop(code, reason, ends, kept=self.keep)
        if self.keep and code == REFUSED and self.crew.awaited:
            await self._withdraw(reason)
        return False

    async def _stop(
        self, code: int, reason: str, ends: Callable[[str], Awaitable[None]], *,
        kept: bool, status: str = "", within_s: float = 3 * QUIT_S,
    ) -> int:  # fmt: skip
        """The end, told to systemd and in the log. What is not kept for the next daemon, `ends` ends, which is told why; an
        embedded etcd goes last. Returns the exit code.
        """
        self.notify.stopping(status or reason, within_s)
        left = self._left() if kept else ""
        more = {"left": left} if left else {}
        self.log.info("daemon.stopped", code=code, reason=reason, workers="kept" if kept else "ended", **more)
        if not kept:
            await ends(reason)
        if code != FAILED and self._life:
            with suppress(OSError):  # then the next one says that this one died
                self.home.save(replace(self._life, parted=True))
        if not kept and not self._others():
            await self._stop_store()
        return code

    def _others(self) -> bool:
        """Does the job go on without this node? Then its embedded etcd does, too: found by who drained the node that had it."""
        plan = self.node.loop.state.view.plan if self.node is not None else None
        if plan is None or plan.phase is Phase.STOP:
            return False
        return any(seat.member.node != self.name for seat in plan.ring)

    async def _quit(self, reason: str) -> None:
        """The agent ends, and all that is below it."""
        await self.crew.quit(reason, QUIT_S)

    def _left(self) -> str:
        """What goes on without this daemon, until another one or a person comes."""
        etcd = self.etcd.running() if self.etcd and not self._others() else None
        found = {"agent": self.crew.pid, "vault": self.vault.process.pid, "etcd": etcd.pid if etcd else 0}
        living = {name: pid for name, pid in found.items() if pid}
        if not living:
            return ""
        said, pids = " and ".join(f"{name} {pid}" for name, pid in living.items()), " ".join(map(str, living.values()))
        return f"{said}: the next daemon of this node adopts them; without one, kill {pids} ends them"

    async def _part(self, visits: asyncio.Task[None], *, told: bool) -> None:
        """This node leaves. The job's end ends the vault; otherwise others may still need what is in it."""
        assert self.node is not None
        visits.cancel()
        await asyncio.gather(visits, return_exceptions=True)
        state = self.node.loop.state
        plan = state.view.plan
        # After a crash loop somebody mends the program and starts it again: the newest steps are in the vaults alone.
        over = plan is not None and plan.phase is Phase.STOP and plan.exit_code != Outcome.CRASH_LOOP.value
        over = over and not unsaved(state, time.monotonic())
        alone = plan is not None and all(seat.member.node == self.name for seat in plan.ring)
        if over or (told and (self.foreground or alone)):
            await self.vault.end()
        else:
            await self.vault.leave(self.tree.vault.linger_s)

    def reload(self) -> None:
        """SIGHUP: take up what may change while the daemon runs; say what may not."""
        if self.node is None:
            self.log.info(
                "reload.refused", reason="it has not begun yet: what is read now may be old by then; ask again"
            )
            return
        self.notify.reloading()
        try:
            fresh = self._reload()
        except ConfigError as error:
            self.log.info("reload.refused", reason=str(error))
            self.notify.ready("the new configuration is refused: the old one stays")
            return
        found = changes(self.tree, fresh)
        live = [change for change in found if change.when == "live"]
        # What wants a restart still differs from this at the next reload, and is said again.
        mixed = taken_up(self.tree, fresh)
        if broken := clash(mixed):
            late = ", ".join(change.key for change in found if change.when != "live")
            self.log.info("reload.refused", reason=f"without what needs a restart ({late}) it would not hold: {broken}")
            self.notify.ready("the new configuration is refused: the old one stays")
            return
        if live:
            self.tree = mixed
            self.settings = to_core(self.tree)
            self.inquiry.desk.tree = self.tree
            self.node.post(Configured(now=time.monotonic(), settings=self.settings))
        self.log.info(
            "daemon.reloaded",
            changed=[f"{change.key}: {change.old} -> {change.new}" for change in live],
            ignored=[f"{change.key} needs a restart" for change in found if change.when != "live"],
        )
        self.notify.ready("configuration reloaded")

    def _decided(self, event: Event, decision: Decision) -> None:
        """After every step of the core: who our neighbours are, what outlives us, what the metrics say."""
        assert self.node is not None
        assert self.neighbours is not None
        view, now = decision.state.view, time.monotonic()
        before, was = self._plan, self._stages
        self._stages, done = self._stages.after(
            event, view.plan, decision.state.me,
            paused=view.intent is Intent.PAUSE, still_s=self._flow.still(event.now, before), means=self.settings.means,
        )  # fmt: skip
        if done is not None:
            self.measures.recovered(done)
            self._done = done
            if decision.state.lead is not None:
                now_s = time.time()
                self._change_past(lambda past: past.over(done, was.plan, now_s))
        self.inquiry.decided(event, decision.state, done)
        if view.plan is not self._plan:
            self._met = view.generation if self._plan is None else self._met
            self._plan = view.plan
            self.neighbours.follow(view.plan)
            began = now if was.sign_at is None else was.sign_at - was.detect_s
            at, paused = time.time() - (now - began), view.intent is Intent.PAUSE
            told = lasting(before, view.plan, was, at=at, paused=paused) if view.plan else ()
            if told and decision.state.lead is not None:
                self._change_past(lambda past: reduce(Past.after, told, past))
        if trains_on(decision.state):
            self._trained_on = view.generation
        elif view.plan is not self._ring_plan:
            self._ring_plan = view.plan
            self.vault.follow(ring_of(view.plan, self.tree.vault.copies))
            if self._trained_on == view.generation:
                self.neighbours.doubt()  # it has parted to grow, or because somebody died
        if isinstance(event, Seen) and somebody_left(view) and view.generation != self._doubted:
            self._doubted = view.generation
            self.neighbours.doubt()  # our own workers may not have noticed yet
        if view.commit is not self._commit:
            self._commit = view.commit
            self._tell_commit(view.commit)
        if isinstance(event, Found):
            self.metrics.timeouts.inc(sum(fact.kind is Kind.WATCHDOG_TIMEOUT for fact in event.evidence))
        leads, self._leads = self._leads, decision.state.lead is not None
        if self._leads and not leads:
            # Who led before may have left before he told it.
            self.inquiry.desk.spawn(
                self._scribe.write(self.node.store, time.time(), self._broken_last, anew=False), "past"
            )
        self._call_roll(view)
        self._remember()
        self.measures.look(decision.state, (self.neighbours.sent, self.neighbours.heard), now)

    def _stepped(self, line: Line) -> None:
        """A worker's steps, as they are written down."""
        self._flow = self._flow.after(line.generation, time.monotonic())
        if self.tree.telemetry.metrics_port:
            self.measures.count(line)

    def _call_roll(self, view: View) -> None:
        """Who is missing, those who ask for the status shall read, also when the leader is another one."""
        assert self.node is not None
        if not self._leads:
            self._roster.forget()
        elif (moves := self._roster.look(view)) is not None:
            now = time.time()
            self._change_past(lambda past: past.moved(moves, now))

    def _change_past(self, of: Callable[[Past], Past]) -> None:
        """Of the job, for those who ask for the status."""
        assert self.node is not None
        self.inquiry.desk.spawn(self._scribe.change(self.node.store, time.time(), of), "past")

    def _tell_incident(self, told: "Incident", broke: int, generation: int) -> None:
        """An incident was written, of the gang `broke`, which led to a generation. What the leader tells of it, those who ask
        for the status shall read.
        """
        if generation > self._told_of:  # an incident that is told anew has lost nothing more
            self._told_of = generation
            self.metrics.lost.inc(told.steps or 0)
        done = self._done if self._done and self._done.generation == generation else None
        at = datetime.fromisoformat(told.began).timestamp()
        self._broken_last = broken = replace(
            Broken.of(told.verdict, at=at, generation=generation, broke=broke),
            seconds=told.seconds, steps=told.steps, rung=done.rung if done else "",
        )  # fmt: skip
        if self.node is None:
            return
        if self._leads:
            self.inquiry.desk.spawn(self._scribe.write(self.node.store, time.time(), broken), "past")
        elif (done and done.silence) or self.name in deputies(self.node.loop.state):
            # A leader that the fault has cost its seat hears of no recovery; another knows less of what it cost.
            late = self._scribe.write(self.node.store, time.time(), broken, anew=False, after_s=LATE_S)
            self.inquiry.desk.spawn(late, "past")

    def _tell_commit(self, commit: Commit | None) -> None:
        if commit is not None:
            self.log.info(
                "checkpoint.committed", step=commit.step, generation=commit.generation, manifest=commit.manifest
            )
        self.crew.inform(commit)

    def _remember(self) -> None:
        """Keep what the next daemon needs, when it changes."""
        assert self.node is not None
        lease, report = self.node.office.lease, self.crew.report
        life = Life(
            node=self.name,
            incarnation=self.node.loop.state.me.incarnation,
            lease=lease.id if lease else 0,
            agent_pid=report.pid if report else 0,
            agent_started=report.started if report else 0,
            beat=self.neighbours.address if self.neighbours else "",
            boot=self._boot,
            since=self.node.loop.state.card.since,
        )
        if life == self._life:
            return
        try:
            self.home.save(life)
        except OSError as error:  # a full disk; it is tried again at the next step of the core
            if not self._unkept:
                self.log.info("incarnation.unsaved", error=str(error))
            self._unkept = True
        else:
            self._life, self._unkept = life, False

    # ---- what operators ask

    @property
    def seen(self) -> tuple[Store, View, str]:
        """As Resident's."""
        assert self.node is not None
        return self.node.store, self.node.sight.view, self.node.loop.state.reason

    @property
    def planned_s(self) -> float | None:
        """As Resident's."""
        assert self.node is not None
        state = self.node.loop.state
        return time.monotonic() - state.adopted if state.view.generation not in {state.met, self._met} else None

    @property
    def own(self) -> Record | None:
        """As Resident's."""
        assert self.node is not None
        return told_now(self.node.loop.state, time.monotonic())

    def _drain(self) -> None:
        assert self.node is not None
        self.node.post(Asked(now=time.monotonic(), verb=Verb.DRAIN, node=self.name))

    async def _answer(self, verb: str, question: Mapping[str, Any], asker: control.Asker) -> Any:
        report = self.crew.report
        match verb:
            case "diagnose":
                return await self._diagnose()
            case "crew":
                return (
                    {"spares": report.spares, "problem": report.problem}
                    if report
                    else {"spares": 0, "problem": "no agent"}
                )
            case "logs":
                seated = report.workers if report else ()
                return [{"rank": worker.rank, "pid": worker.pid, "log": worker.log} for worker in seated]
            case _:
                return await super()._answer(verb, question, asker)

    async def _diagnose(self) -> dict[str, Any]:
        """Where all workers of the job are; if the store is silent, those of this node."""
        assert self.node is not None
        state = self.node.loop.state
        seats = state.view.plan.seats if state.view.plan else ()
        nodes = {seat.member.node for seat in seats} or {self.name}
        try:
            answers = await asking.ask(self.node.store, nodes, self._ask_s)
        except (StoreError, TimeoutError):
            answers = {self.name: await self._where(0)}
        return asking.told(self.node.loop.state, answers, nodes - answers.keys())

    async def _where(self, to: int) -> Where:
        assert self.node is not None
        me, within_s = self.node.loop.state.me, self.tree.timeouts.dump_s
        return await asking.look(self.crew.report, witness.folder_of(self.home.folder), me, to, within_s)

    def _asked_where(self, to: int) -> None:
        """Somebody wants to know where all workers are."""
        self.inquiry.desk.spawn(self._say_where(to), "where")

    async def _say_where(self, to: int) -> None:
        assert self.node is not None
        said, lease = await self._where(to), self.node.office.lease
        if lease is None:
            return  # without one the answer would outlive this node
        try:
            await asking.answer(self.node.store, said, lease.id)
        except StoreError as error:
            self.log.info("store.failed", action="answer", error=str(error))

    async def _probe(self, action: Action) -> bool:
        """Ask each target for a sign; what does not answer within a second cannot be reached. The rest takes longer."""
        if not isinstance(action, Probe | Try):
            return False
        assert self.node is not None
        assert self.neighbours is not None
        unreachable = await self.neighbours.probe(action.targets, within_s=min(1.0, self.settings.recovery.probe_s / 2))
        if isinstance(action, Try):
            doors = {node: door for node, door in action.doors.items() if node not in unreachable}
            unreachable += await links.closed(doors, within_s=1.0)
            reached = tuple(sorted(action.targets.keys() - set(unreachable)))
            self.node.post(Tried(now=time.monotonic(), found=action.found, reached=reached, unreachable=unreachable))
            return True
        self.inquiry.ways.answer(action, unreachable)
        return True


def numbers_of(host: str) -> set[str]:
    """The addresses of this host, as beats tell them."""
    with suppress(OSError):
        return {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)}
    return {host}
