"""A node's daemon, with a seat for it or without: what its machine, its operators and its store see of it.

The one idea: who a node is (its name, its folders, its lives) and how it is spoken to have nothing to do with what it does for
the job: train (`main`) or generate (`rollout`).
"""

import asyncio
import os
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from elasticrl import __version__
from elasticrl.agent.spec import Spec
from elasticrl.base.parent import stops
from elasticrl.config import Tree, to_core
from elasticrl.contract.model import Record, Verb, View
from elasticrl.contract.settings import Settings
from elasticrl.daemon import asking, control, operators
from elasticrl.daemon.folders import not_ours
from elasticrl.daemon.history import History
from elasticrl.daemon.life import Home, Life, next_life
from elasticrl.daemon.measures import Measures
from elasticrl.daemon.refusal import Refusal
from elasticrl.daemon.spec import spec_of
from elasticrl.daemon.stored import highest_incarnation, remember
from elasticrl.diagnose.job_store import embedded, store_settings
from elasticrl.shell.notify import Notify
from elasticrl.shell.office import request
from elasticrl.shell.route import outward
from elasticrl.shell.sight import AGAIN_S
from elasticrl.status.answers import promise
from elasticrl.status.picture import Picture, on_level
from elasticrl.store import Store, StoreError, open_store

ROUTE_S = 20.0  # for a way out of this machine to be there, as while its network comes up
NOTE_S = 1.0  # for the store to take a note that nothing depends on
MARGIN_S = 2.0  # for all that an answer takes besides waiting


class Resident(ABC):
    """One node of one job."""

    def __init__(self, tree: Tree, *, log: Any, history: History, keep: bool = True, starter: int = 0) -> None:
        self.tree = tree
        self.keep = keep  # hand over on SIGTERM; False: end everything (a foreground run)
        self.starter = starter  # the run that would start another daemon in this one's place; 0: nobody would
        # A foreground run's agent and vault end with the last of those who see to them: the daemon, and who would start another
        # one in its place (`elasticrl run`, Slurm's task). See decision 25.
        self.led: tuple[int, ...] = () if keep else tuple(pid for pid in (os.getpid(), starter) if pid)
        self.settings: Settings = to_core(tree)
        self.name = tree.node.name or socket.gethostname()
        self.home = Home(Path(tree.node.run_dir) / tree.job.name / self.name)
        self.state_dir = Path(tree.node.state_dir) / tree.job.name / self.name
        self.names: dict[str, object] = {"job": tree.job.name, "node": self.name}  # whose lines these are
        self.log = log
        self.history = history
        self.measures = Measures(tree.telemetry, log=log)
        self.notify = Notify()
        self.host = tree.node.address or own_address(tree.node.interface, tree.store.endpoints)
        self.foreground = not keep
        self.etcd = embedded(tree, dies_with_us=self.foreground) if tree.store.embedded else None

    def spec(self) -> Spec:
        """What the agent is told."""
        return spec_of(
            self.tree, node=self.name, host=self.host, home=self.home.folder, logs=self._logs,
            timeouts=self.settings.timeouts, led=self.led,
        )  # fmt: skip

    @property
    def _logs(self) -> Path:
        return Path(self.tree.telemetry.log_dir) / self.tree.job.name / self.name

    def _close_folders(self) -> None:
        """What is written below them may quote prompts and answers, and what lies there is believed."""
        if why := not_ours(self.tree, self.name):
            raise Refusal(why)

    @abstractmethod
    async def run(self) -> int:
        """Until this node is through (its exit code), or a signal hands over (0)."""

    # ---- beginnings

    async def _begin(self, store: Store, last: Life | None) -> Life:
        """A life that nobody has heard of. The store must be there: it remembers the earlier ones."""
        life = next_life(self.name, last, await self._patiently(lambda: highest_incarnation(store, self.name)))
        await self._patiently(lambda: remember(store, life.member))
        return life

    async def _patiently(self, call: Any, passing: tuple[type[Exception], ...] = (StoreError,)) -> Any:
        """Ask the store until it answers; say so when it does not. `passing`: what may pass."""
        said = False
        while True:
            try:
                return await call()
            except passing as error:
                if not said:
                    self.log.info("store.failed", action="Join", error=str(error))
                    self.notify.status(f"waiting for the store: {error}")
                    said = True
                await asyncio.sleep(AGAIN_S)

    async def _store(self) -> Store:
        """The store, started here first if the configuration says so."""
        endpoints = self.tree.store.endpoints
        if self.etcd is not None:
            from elasticrl.store.embedded import find_binary

            adopted = self.etcd.running() is not None
            if not adopted:
                find_binary(self.etcd.binary)  # one that is not there does not come by waiting: that is refused
            # A slow or full disk, no memory: that may pass.
            process = await self._patiently(self.etcd.ensure, (StoreError, OSError))
            self.log.info("store.started", endpoint=process.endpoint, adopted=adopted)
            endpoints = (process.endpoint,)
            # Should it have to be started again, it is looked for where it was, by other daemons too.
            self.etcd = replace(self.etcd, ports=(process.client_port, process.peer_port))
        return open_store(store_settings(self.tree, endpoints), say=self.log.info)

    async def _guard_store(self) -> None:
        """Start the embedded etcd again if it dies; its data and ports stay, so nobody notices more than an outage."""
        if (etcd := self.etcd) is None:
            return
        from elasticrl.store.embedded import Guard

        guard = Guard(etcd)
        while True:
            await asyncio.sleep(AGAIN_S)
            if self.etcd is None:  # it is being stopped
                return
            wrong, process = await guard.look()
            if wrong:
                self.log.info("store.failed", action="Start", error=wrong)
            if process is not None:
                self.log.info("store.started", endpoint=process.endpoint, adopted=False)

    async def _stop_store(self) -> None:
        """An embedded etcd ends with the job on this machine; its data stay."""
        etcd, self.etcd = self.etcd, None
        if etcd is not None:
            await etcd.stop()

    def _hear_signals(self, ended: Callable[[signal.Signals], None]) -> None:
        """From here on no signal ends this process by itself."""
        loop = asyncio.get_running_loop()
        for number in stops():
            loop.add_signal_handler(number, ended, number)
        loop.add_signal_handler(signal.SIGHUP, self.reload)

    @abstractmethod
    def reload(self) -> None:
        """SIGHUP: take up what may change while the daemon runs; say what may not."""

    async def _feed(self) -> None:
        """Tell systemd that the loop runs. It runs in the loop, so a stuck loop falls silent."""
        if not self.notify.watchdog_s:
            return
        while True:
            self.notify.alive()
            await asyncio.sleep(self.notify.watchdog_s / 4)

    # ---- what operators ask

    async def _open_control(self, stack: AsyncExitStack) -> None:
        server = control.Control(
            self.home.control, self._answer, {"events": self.history.read}, group="elasticrl", deadline_s=self.answer_s,
            failed=self.log.exception,
        )  # fmt: skip
        await server.open()
        stack.push_async_callback(server.close)

    @property
    def answer_s(self) -> float:
        """For an answer to an operator: more than whatever it waits for, each of which says best itself what has not come."""
        written, looked = operators.LOOK_FIRST_S + self.tree.store.timeout_s, self._ask_s + asking.LOOK_S
        return max(written, looked) + MARGIN_S

    @property
    def _ask_s(self) -> float:
        """For all nodes to say where their workers are."""
        return asking.LOOK_S + self.tree.store.try_timeout_s

    @property
    @abstractmethod
    def seen(self) -> tuple[Store, View, str]:
        """The store, what this daemon has seen of it, and what it says of itself."""

    @property
    def planned_s(self) -> float | None:
        """How long ago this daemon saw the present plan come; None: it was there before."""
        return None

    @property
    def own(self) -> Record | None:
        """What this node would say of its workers now; None: it has none."""
        return None

    @abstractmethod
    def _drain(self) -> None:
        """This node leaves, for which it needs nobody else."""

    async def _answer(self, verb: str, question: Mapping[str, Any], asker: control.Asker) -> Any:
        if verb == "ping":
            return {"version": __version__, "pid": os.getpid(), "state_dir": str(self.state_dir.parents[1].absolute())}
        if verb == "status":
            return asdict(await self.picture())
        try:
            asked = Verb(verb)
        except ValueError:
            raise control.Refused(f"this daemon does not know {verb!r}") from None
        node = question.get("node")
        if asked is Verb.ADMIT and not node:
            raise control.Refused("name the node to admit: elasticrl admit n03")
        if asked is Verb.DRAIN and not question.get("force"):
            return await operators.in_turn(
                partial(self._spared, node or self.name), partial(self._do, asked, node, asker)
            )
        return await self._do(asked, node, asker, None)

    async def _spared(self, node: str) -> int | None:
        store, view, _ = self.seen
        return await operators.spared(store, view, self.settings, node, own=self.name)

    async def _do(self, asked: Verb, node: str | None, asker: control.Asker, after: int | None) -> str:
        """What an operator asks, if no other drain came after that one (None: whatever came)."""
        self.log.info("control.asked", verb=asked.value, target=node or "", uid=asker.uid, pid=asker.pid)
        own = asked is Verb.DRAIN and node in (None, self.name)
        store, view, _ = self.seen
        if own and after is None:
            self._drain()
            with suppress(StoreError, TimeoutError):  # so that `status` says who wanted it; it leaves without that, too
                async with asyncio.timeout(NOTE_S):
                    await request(store, asked, self.name, view.generation)
            return promise(asked, self.tree.job.name, self.name)
        by = f"{await control.name_of(asker.uid)} on {self.name}"
        said = await operators.write_down(
            store, asked, self.name if own else node, view, job=self.tree.job.name, by=by,
            needs=self.settings.membership.min_nodes, within_s=self.tree.store.timeout_s, after=after,
        )  # fmt: skip
        if own:
            self._drain()
        return said

    async def picture(self) -> Picture:
        """What the whole job looks like."""
        store, view, here = self.seen
        made = await operators.look(
            store, view, job=self.tree.job.name, node=self.name, here=here, own=self.own, planned_s=self.planned_s,
            needs=self.settings.membership.min_nodes, engines=self.tree.rollout.nodes,
        )  # fmt: skip
        return on_level(made, self.settings.level)


def own_address(interface: str | None, endpoints: Sequence[str] = (), within_s: float = ROUTE_S) -> str:
    """This node's address on an interface; without one, that of the default route, or of the way to the store."""
    if interface:
        import fcntl
        import struct

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            try:
                packed = fcntl.ioctl(sock, 0x8915, struct.pack("256s", interface.encode()[:15]))  # SIOCGIFADDR
            except OSError as error:
                raise Refusal(
                    f"node.interface {interface!r} has no address ({error.strerror}); see: ip address"
                ) from None
            return socket.inet_ntoa(packed[20:24])
    deadline = time.monotonic() + within_s
    while (address := outward(endpoints)) is None:  # a network may come back
        if time.monotonic() > deadline:
            raise Refusal(
                "no way leads out of this machine, nor to the store: others could not reach it. See: ip route; or set "
                "node.interface, or node.address"
            )
        time.sleep(AGAIN_S)
    return address
