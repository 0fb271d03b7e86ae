"""A rollout node's daemon: `elasticrl daemon` where `node.role` is rollout.

The one idea: a node that has no seat needs no core. It keeps a lease, says under it where its engine is asked, follows the plan
only as far as to see that the job is over, and leaves the rest to a keeper (`elasticrl.ppo.rollout.node`, by name: this layer
knows nothing of engines). It never stands for leader, is watched by no neighbour and counts nowhere: whether it lives shows
where it is asked, and by its lease.

A daemon that dies takes its keeper along and leaves the engine, which the next daemon's keeper adopts.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from elasticrl import __version__
from elasticrl.agent.spec import environment
from elasticrl.base.address import join
from elasticrl.base.owned import appended, write_private
from elasticrl.base.parsed import parsed
from elasticrl.base.pauses import pause
from elasticrl.config import dumps
from elasticrl.contract.model import REFUSED, Member, Phase, Plan, Record, Rollout, Verb, View, Work
from elasticrl.daemon import control
from elasticrl.daemon.background import background
from elasticrl.daemon.refusal import FAILED
from elasticrl.daemon.resident import Resident
from elasticrl.daemon.secret import engine_key, run_of
from elasticrl.daemon.spec import for_workers
from elasticrl.daemon.stored import how_it_ended, the_secret
from elasticrl.daemon.vault import folder_of
from elasticrl.shell import keys
from elasticrl.shell.sight import AGAIN_S, Sight
from elasticrl.store import Lease, Store, StoreError
from elasticrl.store.protocol import LeaseGone

KEEPER: Final = "elasticrl.ppo.rollout.node"
PAUSE_S: Final = 0.5  # before the first new keeper; each further one doubles it
PAUSE_MAX_S: Final = 30.0
STEADY_S: Final = 60.0  # a keeper that has lived for so long was started well
LOOK_S: Final = 0.5  # between looks whether a gang that ends still makes its last step
TRAINS: Final = (Work.JOINING, Work.TRAINING, Work.STALLED)
END_S: Final = 20.0  # for a keeper to end, with its engine or without


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Why this daemon ends. `over`: nothing stays behind; else, after a signal, systemd knows."""

    code: int
    reason: str
    over: bool


class RolloutDaemon(Resident):
    """A node that generates, and its keeper.

    Long because most of it is what every resident has (`Resident`).
    """

    store: Store
    sight: Sight
    me: Member

    async def run(self) -> int:
        """Until the job is over (its exit code), this node is drained, or a signal hands over (0)."""
        self._close_folders()
        self.home.lock(self.state_dir)
        self._ending: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self._stirred = asyncio.Event()
        self._over: asyncio.Future[Plan] = asyncio.get_running_loop().create_future()
        self._told: dict[str, Any] = {"note": "its keeper starts"}
        self._met: int | None = None
        self._keeper: asyncio.subprocess.Process | None = None
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(background(self._feed(), "watchdog", self.log))
            self.store = await stack.enter_async_context(await self._store())
            if await asyncio.to_thread(self.notify.booting):
                ended = await self._patiently(lambda: how_it_ended(self.store))
                if ended is not None:
                    self.log.info("daemon.refused", reason=f"the job has ended ({ended[1]}); a boot begins none anew")
                    return int(ended[0])
            life = await self._begin(self.store, self.home.load())
            self.home.save(life)
            self.me = life.member
            secret = await self._patiently(lambda: the_secret(self.store))
            self.names |= {"run": run_of(secret), "member": str(self.me)}
            self._write_down_what_it_needs(secret)
            self.sight = Sight(self.store, self.me, changed=self._saw, complain=self._unreadable)
            await self._open_control(stack)
            self.measures.serve(stack)
            watching = self.sight.watch_for_ever(self.log, everyone=False)
            await stack.enter_async_context(background(watching, "watch", self.log))
            await stack.enter_async_context(background(self._guard_store(), "etcd", self.log))
            belongs = await stack.enter_async_context(background(self._belong(), "lease", self.log))
            keeps = await stack.enter_async_context(background(self._keep(), "keeper", self.log))
            await stack.enter_async_context(background(self._outlast(), "end", self.log))
            self._hear_signals(self._signalled)
            self.log.info("daemon.started", member=str(self.me), pid=os.getpid(), adopted=False, version=__version__)
            self.notify.ready(f"{self.me} is up")
            some: set[asyncio.Future[Any]] = {self._ending, belongs, keeps}
            await asyncio.wait(some, return_when=asyncio.FIRST_COMPLETED)
            if not self._ending.done():
                return FAILED  # one of the two has ended, and `bug` was said of it
            return await self._finish(self._ending.result(), keeps, belongs)

    # ---- its end

    def _signalled(self, number: signal.Signals) -> None:
        self._end(End(code=0, reason=number.name, over=not self.keep))

    def _end(self, end: End) -> None:
        if not self._ending.done():
            self._ending.set_result(end)

    async def _finish(self, end: End, keeps: asyncio.Task[None], belongs: asyncio.Task[None]) -> int:
        over = end.over or await asyncio.to_thread(self.notify.for_good)
        self.notify.stopping(end.reason, END_S)
        for task in (belongs, keeps):
            task.cancel()
        if over and self._lease is not None:
            with suppress(StoreError):
                await self.store.revoke(self._lease.id)  # first: nobody is to ask an engine that ends
        await self._end_keeper("end" if over else "")
        if over and self._is_over(self.sight.view):
            await self._stop_store()
        self.log.info(
            "daemon.stopped", code=end.code, reason=end.reason, workers="ended" if over else "kept"
        )  # fmt: skip
        return end.code

    # ---- what it sees and says

    def _saw(self, view: View) -> None:
        """A STOP that was there before this life is history, as for those who train: somebody wants the job again."""
        if self._met is None:
            self._met = view.generation
        if view.drain == self.me:
            self._drain()
        if self._is_over(view) and not self._over.done():
            assert view.plan is not None
            self._over.set_result(view.plan)

    async def _outlast(self) -> None:
        """The job is to end: with a step that it may have begun, for which it asks this node's engine. So that stays until
        rank 0 has ended, or the time is up in which a gang makes its last step and saves.

        Found by its test, in which nothing happened for a minute: engines went at the word, the gang waited for them until it
        was killed, and what it had made since the last save was lost.
        """
        plan = await self._over
        limit = time.monotonic() + 2 * self.settings.recovery.drain_s
        try:
            while time.monotonic() < limit and await self._trains(plan):  # noqa: ASYNC110 # the store tells it, when asked
                await asyncio.sleep(LOOK_S)
        finally:
            self._end(End(code=plan.exit_code or 0, reason=plan.reason, over=True))

    async def _trains(self, plan: Plan) -> bool:
        """Whether rank 0 of this plan has workers; of others one would have to watch all."""
        if not plan.seats:
            return False
        first = plan.seats[0].member
        key = keys.member_key(first.node)
        try:
            entry = await self.store.get(key)
            record = keys.load(Record, entry.value, key) if entry else None
        except StoreError:
            return True  # nobody knows, and it has its time
        except ValueError as error:
            self._unreadable(str(error))
            return False
        return record is not None and record.member == first and record.work in TRAINS

    def _is_over(self, view: View) -> bool:
        return view.plan is not None and view.plan.phase is Phase.STOP and view.generation != self._met

    def _unreadable(self, text: str) -> None:
        self.log.info("store.unreadable", text=text)

    _lease: Lease | None = None

    async def _belong(self) -> None:
        """Hold a lease, and keep true what is said under it."""
        said: Rollout | None = None
        membership = self.settings.membership
        renewed, failed = 0.0, False
        while True:
            self._stirred.clear()
            try:
                if self._lease is None:
                    self._lease, said = await self.store.grant(membership.lease_ttl_s), None
                    renewed = time.monotonic()
                elif time.monotonic() >= renewed + membership.keepalive_s:
                    renewed = time.monotonic()
                    lease = await self.store.keepalive(self._lease.id)
                    self._lease = lease if lease.held else None
                    if self._lease is None:
                        continue
                if said != (now := self._rollout()):
                    await self.store.put(keys.rollout_key(self.name), keys.dump(now), self._lease.id)
                    said = now
                failed = False
            except LeaseGone:
                self._lease = None
                continue
            except StoreError as error:
                if not failed:
                    self.log.info("store.failed", action="rollout", error=str(error))
                failed = True
                await asyncio.sleep(AGAIN_S)
                continue
            left = max(0.0, renewed + membership.keepalive_s - time.monotonic())
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._stirred.wait()

    def _rollout(self) -> Rollout:
        return Rollout(member=self.me, **self._told)

    # ---- its keeper

    @property
    def _key_file(self) -> Path:
        return self.home.folder / "rollout.key"

    @property
    def _config_file(self) -> Path:
        return self.home.folder / "rollout.json"

    def _write_down_what_it_needs(self, secret: bytes) -> None:
        write_private(self._key_file, engine_key(secret))
        write_private(self._config_file, dumps(for_workers(self.tree)))
        self._logs.mkdir(parents=True, exist_ok=True)

    async def _keep(self) -> None:
        """A keeper, always."""
        pause_s = 0.0
        while True:
            begun = time.monotonic()
            try:
                code = await self._one_keeper()
            except OSError as error:  # no memory, a full disk: that may pass
                self._keeper_says({"up": False, "note": f"the keeper cannot be started: {error}"})
                code = -1
            self.log.info("rollout.keeper", code=code, log=str(self._log_file))
            if code == REFUSED or not self._told.get("up"):
                note = self._told.get("note") or f"the keeper ended with exit code {code}; see {self._log_file}"
                self._keeper_says({"up": False, "note": note})
            lived_s = time.monotonic() - begun
            pause_s = pause(pause_s, lived_s, first_s=PAUSE_S, most_s=PAUSE_MAX_S, steady_s=STEADY_S)
            await asyncio.sleep(pause_s)

    @property
    def _log_file(self) -> Path:
        return self._logs / "keeper.log"

    async def _one_keeper(self) -> int:
        tree = self.tree
        command = [
            sys.executable, "-m", KEEPER, "--config", str(self._config_file), "--node", self.name,
            "--vault", str(folder_of(tree.vault.dir, tree.job.name, self.name)),
            "--listen", join(self.host, tree.rollout.port),
            "--key-file", str(self._key_file),
        ]  # fmt: skip
        with appended(self._log_file) as log:
            keeper = self._keeper = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log, start_new_session=True,
                env=environment(self.spec()),
            )  # fmt: skip
        assert keeper.stdout is not None
        async for told in told_by(keeper.stdout):
            self._keeper_says(told)
        return await keeper.wait()

    def _keeper_says(self, told: Mapping[str, Any]) -> None:
        before = self._told
        self._told = {name: told[name] for name in ("up", "address", "pid", "version", "note") if name in told}
        now, was = self._rollout(), Rollout(member=self.me, **before)
        if replace(now, version=None) != replace(was, version=None):
            self.log.info("rollout.changed", up=now.up, address=now.address, pid=now.pid, reason=now.note)
        self._stirred.set()

    async def _end_keeper(self, word: str) -> None:
        """With `end` its engine ends too; without a word it stays."""
        keeper = self._keeper
        if keeper is None or keeper.returncode is not None:
            return
        assert keeper.stdin is not None
        with suppress(OSError):
            if word:
                keeper.stdin.write(f"{word}\n".encode())
            keeper.stdin.close()
        try:
            async with asyncio.timeout(END_S):
                await keeper.wait()
        except TimeoutError:
            keeper.kill()
            await keeper.wait()

    # ---- what operators ask

    def reload(self) -> None:
        """SIGHUP."""
        self.log.info(
            "reload.refused", reason="a rollout node takes nothing up while it runs: restart it; its engine stays"
        )
        self.notify.ready("a rollout node takes nothing up while it runs")

    @property
    def seen(self) -> tuple[Store, View, str]:
        """The store, the newest view of it, and what the engine's keeper says."""
        return self.store, self.sight.view, self._told.get("note") or "generates for those who train"

    async def _answer(self, verb: str, question: Mapping[str, Any], asker: control.Asker) -> Any:
        if verb == "diagnose":
            raise control.Refused(f"{self.name} only generates: there is no worker to look at; see {self._log_file}")
        if verb == "logs":
            return []
        if verb == Verb.DRAIN and question.get("node") in (None, self.name):
            question = {**question, "force": True}  # it has no seat: the others can always spare it
        return await super()._answer(verb, question, asker)

    def _drain(self) -> None:
        self._end(End(code=0, reason="drained by an operator", over=True))


async def told_by(output: asyncio.StreamReader) -> AsyncIterator[Mapping[str, Any]]:
    """What a keeper says of its engine until it ends, without what libraries print in between."""
    while True:
        try:
            line = await output.readline()
            told = parsed(line) if line else None
        except ValueError:  # it is no JSON, or longer than anything that a keeper says
            continue
        if not line:
            return
        if isinstance(told, dict) and "up" in told:
            yield told
