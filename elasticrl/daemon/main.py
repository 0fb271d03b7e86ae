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
from pathlib import Path
from typing import Any

from elasticrl import __version__
from elasticrl.agent.echo import leave_note
from elasticrl.agent.spec import environment as environment_of
from elasticrl.base.address import join, split
from elasticrl.base.apart import apart
from elasticrl.base.process import started_at
from elasticrl.base.trim import trim
from elasticrl.config import ConfigError, Tree, changes, clash, taken_up, to_core
from elasticrl.contract.events import Asked, Cleared, Configured, Event, Suspected
from elasticrl.contract.model import REFUSED, Member, Record, Verb, View
from elasticrl.core.node.adopt import began
from elasticrl.core.node.follow import told_now
from elasticrl.core.node.names import elsewhere, namesake, twin
from elasticrl.core.node.state import State
from elasticrl.daemon import control
from elasticrl.daemon.adopt import Look, Lost, settle
from elasticrl.daemon.background import background
from elasticrl.daemon.crew import Crew
from elasticrl.daemon.history import History
from elasticrl.daemon.inquiry import Inquiry
from elasticrl.daemon.joined import Joined
from elasticrl.daemon.life import Life, end_of, this_boot
from elasticrl.daemon.neighbours import Neighbours
from elasticrl.daemon.refusal import FAILED, Refusal
from elasticrl.daemon.resident import Resident
from elasticrl.daemon.roll import NAME as ROLL
from elasticrl.daemon.roll import Roll
from elasticrl.daemon.secret import run_of
from elasticrl.daemon.shared import Site
from elasticrl.daemon.steps import NAME as STEPS
from elasticrl.daemon.steps import StepLog
from elasticrl.daemon.stored import at_first, how_it_ended, living_here, record_at, the_secret, written_secret
from elasticrl.daemon.vault import Options, Vault, folder_of
from elasticrl.diagnose.program import absent
from elasticrl.shell import keys
from elasticrl.shell.sight import AGAIN_S
from elasticrl.shell.trace import Trace
from elasticrl.store import Store, StoreError

AGENT_S = 30.0  # for an agent that runs already to answer, before this is taken for a new life
TRIM_S = 60.0  # between looks at logs that are written by others
QUIT_S = 20.0  # for an agent to end with all that is below it

#: What ends a daemon with a sentence instead of `bug`: nothing that a restart would mend.
REFUSALS = (Refusal, StoreError, keys.Unreadable, ConfigError)


class Daemon(Resident):
    """A node that trains.

    Long because it holds all parts of a node, one attribute for each, beside what every resident has.
    """

    def __init__(
        self,
        tree: Tree,
        *,
        log: Any,
        history: History,
        keep: bool = True,
        starter: int = 0,
        reload: Callable[[], Tree] | None = None,
        kept: Look = lambda _: None,
        adopt: bool = False,
        again: bool = False,
    ) -> None:
        """`kept` looks for the job's checkpoints; `adopt`: go on from them if the store has lost the job; `again`: in place of
        a daemon that died, so nobody has asked anew for a job that has ended.
        """
        super().__init__(tree, log=log, history=history, keep=keep, starter=starter)
        self._kept, self._adopt, self._again = kept, adopt, again
        self._reload = reload or (lambda: tree)  # reads the configuration again
        managed = os.environ.get("ELASTICRL_AGENT") == "systemd"
        self._vaulting: asyncio.Task[None] | None = None  # what sees to the vault
        self.crew = Crew(
            self.home.folder, self.spec(), log=log, managed=managed, measures=self.measures, history=history
        )
        self.inquiry = Inquiry(tree, self._site(), log=log, history=history)
        self._ours = asyncio.Event()  # no other daemon has this node's name
        self.vault = Vault(self._vault_options(), log=log, changed=self._vault_moved, ours=self._ours)
        self.roll = Roll(self.home.folder / ROLL, log=log)
        self._joined: Joined | None = None  # once it is known who this node is
        self._boot = this_boot()

    @property
    def joined(self) -> Joined:
        """This node, for what is asked only of one that has begun."""
        assert self._joined is not None
        return self._joined

    def _site(self) -> Site:
        tree = self.tree
        remote = "://" in tree.checkpoint.dir
        disks = {"state": Path(tree.node.state_dir), **({} if remote else {"checkpoint": Path(tree.checkpoint.dir)})}
        return Site(
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
            joined = starting.result()
            return joined if isinstance(joined, int) else await self._until_the_end(joined, told, crew, vault)

    async def _start(self, stack: AsyncExitStack) -> Joined | int:
        """Ask the store who this node is, and begin with that; or why it cannot (the exit code)."""
        last, adopted = await self._live()
        if not adopted and (why := absent(self.tree)):  # workers that run have read it
            raise Refusal(why)
        store = await stack.enter_async_context(await self._store())
        try:
            kept = await self._patiently(lambda: settle(store, self._kept, adopt=self._adopt))
        except Lost as lost:
            return await self._refuse(lost, adopted=adopted)
        since, met = await self._patiently(lambda: at_first(store))  # after the plan that `--adopt` writes
        if kept is not None:
            self.log.info("store.adopted", step=kept.step, manifest=kept.name, place=kept.place)
        booting = not adopted and await asyncio.to_thread(self.notify.booting)
        if booting or (self._again and not adopted):
            ended = await self._patiently(lambda: how_it_ended(store))
            if ended is not None:
                return await self._stay_out(*ended, booting=booting)
        beside = None if adopted else await self._patiently(lambda: living_here(store, self.name))
        if beside is not None and (last is None or beside.member != last.member):
            return await self._give_way(twin(beside), vault=self.vault.started)
        if not adopted and (taken := await self._name_taken(store, last)):
            return await self._give_way(taken)
        self._ours.set()
        since = began(last.since, since) if last and adopted else since
        life = replace(last if last and adopted else await self._begin(store, last), since=since)
        formerly, life = life.beat, replace(life, boot=self._boot, parted=False)
        self.home.save(life)
        me = life.member
        self.names["member"] = str(me)
        secret = await self._patiently(lambda: the_secret(store))
        neighbours = await self._open_beats(secret, me, formerly)
        stack.callback(neighbours.close)
        conf, after = self.tree.node, end_of(last, self._boot, adopted=adopted)
        card = Record(
            member=me, slots=conf.workers, beat=neighbours.address, probe=self.inquiry.ways.open(conf.probe_port),
            taken_at=round(time.time(), 1) if after else 0.0, taken=after, since=life.since,
        )  # fmt: skip
        # An adopted life has followed every plan so far; a new one takes a job that was stopped for a job to begin again.
        state = State(settings=self.settings, me=me, card=card, met=0 if adopted else met)
        trace = Trace(self.state_dir / "trace", self.tree.telemetry.trace_limit_bytes, self.log.info)
        stack.callback(trace.close)
        joined = self._join(state, store, neighbours, life, trace=trace, adopted=adopted, beats=formerly)
        joined.node.office.lasting = (written_secret(secret),)
        await self._open_control(stack)
        await stack.enter_async_context(background(neighbours.beat(), "beats", self.log))
        await stack.enter_async_context(background(self._guard_store(), "etcd", self.log))
        if self.tree.rollout.nodes:
            await stack.enter_async_context(background(self.roll.run(store, secret), "roll", self.log))
        await stack.enter_async_context(background(self._trim_logs(), "logs", self.log))
        self.measures.serve(stack)
        steps = StepLog(
            self._logs / STEPS,
            self.name,
            lambda: self.crew.report.workers if self.crew.report else (),
            joined.stepped,
        )
        await stack.enter_async_context(background(steps.run(), "steps", self.log))
        await self._serve_page(stack)
        await stack.enter_async_context(background(self._look_at(store), "store's health", self.log))
        self.log.info("daemon.started", member=str(me), pid=os.getpid(), adopted=adopted, version=__version__)
        self.notify.ready(f"{me} is up")
        await stack.enter_async_context(background(self.inquiry.run(environment_of(self.spec())), "inquiry", self.log))
        return joined

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
                self.notify.status(f"checking whether {record.member}, at {record.beat}, is still alive")
            await asyncio.sleep(AGAIN_S)

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

    def _join(
        self, state: State, store: Store, neighbours: Neighbours, life: Life, *, trace: Trace | None = None,
        adopted: bool = False, beats: str = "",
    ) -> Joined:  # fmt: skip
        self._joined = Joined(
            state, store, log=self.log, home=self.home, crew=self.crew, vault=self.vault, inquiry=self.inquiry,
            neighbours=neighbours, measures=self.measures, trace=trace, life=life, adopted=adopted,
            beats=beats,
        )  # fmt: skip
        return self._joined

    async def _open_beats(self, secret: bytes, me: Member, formerly: str) -> Neighbours:
        self.crew.run_of_job = self.names["run"] = run_of(secret)
        self.vault.know(secret)
        self.inquiry.ways.secret = secret
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
        former = 0 if port or not formerly else split(formerly)[1]
        for asked in dict.fromkeys(
            (former or port, port)
        ):  # those who know this node by the plan alone ask at the former
            try:
                await neighbours.open(self.host, asked)
                break
            except OSError as error:
                if asked != port:
                    continue
                raise Refusal(
                    f"beats cannot be heard at {join(self.host, port)} ({error.strerror}): see who has that port (ss -lunp), "
                    "and give each job of a machine a node.beat_port of its own (0 takes any); an address of another machine "
                    "comes from node.address or node.interface"
                ) from None
        leave_note(self.home.folder, me, secret)
        return neighbours

    def _heard(self, event: Event) -> None:
        """What the beats say, for the log and for the core."""
        if isinstance(event, Suspected):
            self.log.info("neighbour.suspected", neighbour=event.node)
        elif isinstance(event, Cleared):
            self.log.info("neighbour.cleared", neighbour=event.node)
        if self._joined is not None:
            self._joined.node.post(event)

    async def _serve_page(self, stack: AsyncExitStack) -> None:
        if self.tree.web.port:  # else it need not even be imported
            from elasticrl.daemon import web

            await web.serve(stack, self.tree.web, self.picture, self.log)

    # ---- the middle

    async def _until_the_end(
        self, joined: Joined, told: asyncio.Future[str], crew: asyncio.Task[None], vault: asyncio.Task[None]
    ) -> int:
        """Run the node until it leaves, or until a signal ends this daemon."""

        async def ends(why: str) -> None:
            await self._quit(why)
            vault.cancel()
            await asyncio.gather(vault, return_exceptions=True)
            await joined.part(self.tree.vault.linger_s, ends=self.foreground, told=told.done())

        running = asyncio.create_task(joined.node.run(), name="node")
        rivalled = asyncio.create_task(joined.rivalled.wait(), name="namesake")
        some: set[asyncio.Future[Any]] = {running, told, crew, rivalled}
        await asyncio.wait(some, return_when=asyncio.FIRST_COMPLETED)
        rivalled.cancel()
        if joined.rival and not running.done():
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            return await self._give_way(joined.rival)
        if told.done() and not running.done() and self.keep and await asyncio.to_thread(self.notify.for_good):
            self.keep = False
        if told.done() and not running.done() and not self.keep:
            self.notify.stopping("draining", self.settings.recovery.drain_s + 2 * QUIT_S)
            joined.node.post(Asked(now=time.monotonic(), verb=Verb.DRAIN))
            await joined.drained(running, lambda: self._orphaned)
        if running.done():
            left = running.result()
            return await self._stop(left.code, left.reason, ends, kept=False)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        # The crew goes on for ever, so if it has ended something in it is wrong: the next daemon adopts the workers.
        reason, code = (told.result(), 0) if told.done() else ("the crew failed", FAILED)
        # No time of its own: to hand over takes none, and for a drain that came to nothing systemd has been told.
        return await self._stop(code, reason, ends, kept=self.keep, status="handing over", within_s=0.0)

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
        if code != FAILED and self._joined:
            with suppress(OSError):  # then the next one says that this one died
                self.home.save(replace(self._joined.life, parted=True))
        if not kept and not self._elsewhere:
            await self._stop_store()
        return code

    @property
    def _elsewhere(self) -> bool:
        return self._joined is not None and self._joined.elsewhere

    async def _quit(self, reason: str) -> None:
        """The agent ends, and all that is below it."""
        await self.crew.quit(reason, QUIT_S)

    def _left(self) -> str:
        """What goes on without this daemon, until another one or a person comes."""
        etcd = self.etcd.running() if self.etcd and not self._elsewhere else None
        found = {"agent": self.crew.pid, "vault": self.vault.process.pid, "etcd": etcd.pid if etcd else 0}
        living = {name: pid for name, pid in found.items() if pid}
        if not living:
            return ""
        said, pids = " and ".join(f"{name} {pid}" for name, pid in living.items()), " ".join(map(str, living.values()))
        return f"{said}: the next daemon of this node adopts them; without one, kill {pids} ends them"

    def reload(self) -> None:
        """SIGHUP: take up what may change while the daemon runs; say what may not."""
        if self._joined is None:
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
            self._joined.node.post(Configured(now=time.monotonic(), settings=self.settings))
        self.log.info(
            "daemon.reloaded",
            changed=[f"{change.key}: {change.old} -> {change.new}" for change in live],
            ignored=[f"{change.key} needs a restart" for change in found if change.when != "live"],
        )
        self.notify.ready("configuration reloaded")

    # ---- what operators ask

    @property
    def seen(self) -> tuple[Store, View, str]:
        """The store, the newest view of it, and why the core does what it does."""
        node = self.joined.node
        return node.store, node.sight.view, node.loop.state.reason

    @property
    def planned_s(self) -> float | None:
        """How long ago the plan was adopted; None for one that was there before this daemon."""
        state = self.joined.state
        return time.monotonic() - state.adopted if state.view.generation not in {state.met, self.joined.met} else None

    @property
    def own(self) -> Record | None:
        """What this node would write of itself now."""
        return told_now(self.joined.state, time.monotonic())

    def _drain(self) -> None:
        self.joined.node.post(Asked(now=time.monotonic(), verb=Verb.DRAIN, node=self.name))

    async def _answer(self, verb: str, question: Mapping[str, Any], asker: control.Asker) -> Any:
        report = self.crew.report
        match verb:
            case "diagnose":
                return await self.joined.diagnose(self._ask_s)
            case "crew":
                return (
                    {"spares": report.spares, "problem": report.problem}
                    if report
                    else {"spares": 0, "problem": "no agent"}
                )
            case "logs":
                seated = report.workers if report else ()
                plan = self.joined.state.view.plan
                teams = {worker.rank: plan.team_of(worker.rank) if plan else None for worker in seated}
                return [
                    {"rank": worker.rank, "team": teams[worker.rank], "pid": worker.pid, "log": worker.log}
                    for worker in seated
                ]
            case _:
                return await super()._answer(verb, question, asker)


def numbers_of(host: str) -> set[str]:
    """The addresses of this host, as beats tell them."""
    with suppress(OSError):
        return {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)}
    return {host}
