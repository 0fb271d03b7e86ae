"""Stock torchrun as a member: `torchrun --rdzv-backend=elasticrl --rdzv-endpoint=h1:2379,h2:2379 --rdzv-id=J train.py`.

The one idea: torchrun's agent asks two questions, "may we start?" (`next_rendezvous`) and "must we start again?"
(`num_nodes_waiting`), and both are answered from the plan. The handler carries the core itself, in a thread, on the store:
no daemon is needed. torchrun can only restart workers, so every generation costs it its processes; that is what the daemon
and its own agent are for.

Options (`--rdzv-conf a=1,b=2`): ttl (seconds until a silent node is dead; 5), settle (seconds to wait for more nodes; 1),
join_timeout (600), end_timeout (seconds for which a node that has ended well stays for the others; 86400), host (this node's
address), username, password, cacert, cert, key (of etcd), client (grpc, etcd3).
"""

import asyncio
import atexit
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from enum import Enum
from typing import Any, Final

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from elasticrl.agent.rendezvous import BACKEND
from elasticrl.agent.tcp_stores import TcpStores
from elasticrl.base.address import loops, split
from elasticrl.contract.events import Action, Asked, Found, Leave, LookAt, Probe, Probed, Tried, Try, Workers
from elasticrl.contract.model import MEETING, Exit, Member, Record, Verb, Work
from elasticrl.contract.orders import Halt, Kill, Launch, Park, Place, Reform
from elasticrl.contract.settings import Health, Membership, Recovery, Settings
from elasticrl.core.node.follow import lease_held
from elasticrl.core.node.state import State
from elasticrl.shell import keys, route
from elasticrl.shell.node import Node
from elasticrl.store import StoreError, StoreSettings, Tls, open_store

SLICE: Final = timedelta(milliseconds=200)  # how long a wait in the store goes on before the plan is looked at again
CONNECT: Final = timedelta(seconds=2)
STORE: Final = timedelta(seconds=60)  # torchrun's exchange of ranks, among members that were all there a moment ago
LEAVE_S: Final = 5.0
SAY_S: Final = 5.0  # of waiting for others' ends, before anything is said of it
log = logging.getLogger(__name__)


class Mood(Enum):
    """What torchrun's agent is doing."""

    AWAY = "away"  # it has not asked yet, or has left
    ASKING = "asking"  # in next_rendezvous
    JOINING = "joining"  # has taken a plan, others may not have
    RUNNING = "running"
    DONE = "done"  # its workers have ended well


class Plain:
    """The shell's events for torchrun's log, which knows only sentences."""

    def info(self, event: str, **fields: object) -> None:
        """Something worth knowing."""
        log.info("%s %s", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Something worth a look."""
        log.warning("%s %s", event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """Something that must not happen."""
        log.error("%s %s", event, fields, exc_info=sys.exc_info())


class ElasticRendezvous(RendezvousHandler):
    """One torchrun as a member of a job."""

    def __init__(self, params: RendezvousParameters) -> None:
        self._job = params.run_id
        self._store = store_settings(params)
        self._host = params.local_addr or params.get("host") or address_towards(params.endpoint)
        self._timeout_s = min(float(params.get("join_timeout", 600.0)), threading.TIMEOUT_MAX)
        self._end_timeout_s = min(float(params.get("end_timeout", 86400.0)), threading.TIMEOUT_MAX)
        self._settings = core_settings(params)
        # A name for one torchrun: several may run on one host, and containers share host names and pids.
        self._me = Member(node=f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}", incarnation=1)
        self._stores = TcpStores(self._host)
        self._changed = threading.Condition()
        self._mood = Mood.AWAY
        self._place: Place | None = None  # the newest that seats us, as ordered
        self._taken = 0  # generation of the newest plan that next_rendezvous took
        self._must_leave = False  # the workers that run must stop: another plan, or none, is ours
        self._exit: Exit | None = None
        self._left: str | None = None  # why this member is in the job no more
        self._loop: asyncio.AbstractEventLoop | None = None
        self._node: Node | None = None
        self._thread: threading.Thread | None = None
        self._running: asyncio.Task[Leave] | None = None
        self._outer: BaseException | None = None  # what torchrun's caller was dealing with when it was started

    # ---- what torchrun asks

    def get_backend(self) -> str:
        """Its name."""
        return BACKEND

    def get_run_id(self) -> str:
        """The job."""
        return self._job

    @property
    def use_agent_store(self) -> bool:
        """Workers meet in the plan's own store, which no worker has to keep open."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Blocks until a plan seats us and all its members have come."""
        self._start()
        self._outer = sys.exc_info()[1]
        with self._changed:
            if (
                self._mood is Mood.RUNNING and not self._must_leave
            ):  # nobody asked for it, so the workers must have failed
                cause = "its workers failed; see torchrun's log"
                self._exit = Exit(generation=self._taken, slot=None, step=0, cause=cause, own=False)
        deadline = time.monotonic() + self._timeout_s
        while True:
            with self._changed:
                self._mood, self._must_leave = Mood.ASKING, False
            self._tell()
            place = self._wait_for_place(deadline)
            store = self._meet(place, deadline)
            if store is not None:
                break
        with self._changed:
            self._mood = Mood.RUNNING
        self._tell()
        return RendezvousInfo(store, place.rank, place.world, RendezvousStoreInfo(*split(place.endpoint)))

    def num_nodes_waiting(self) -> int:
        """1 if the workers must be restarted for another plan. From memory: torchrun asks ten times a second."""
        return int(self._must_leave)

    def is_closed(self) -> bool:
        """Has the job ended?"""
        return self._left is not None

    def set_closed(self) -> None:
        """End the job for all."""
        self._post(Asked(now=time.monotonic(), verb=Verb.STOP))

    def shutdown(self) -> bool:
        """Leave; the others know at once, and go on if they are enough. Who has ended well stays until all have: that a member
        is gone restarts the others' workers, which may be writing their last checkpoint.
        """
        try:
            if sys.exc_info()[1] is self._outer:  # torchrun says no more: it calls this while its error passes through
                self._wait_for_the_others()
        finally:  # an operator's signal ends the wait
            self._retire()
        return True

    def _wait_for_the_others(self) -> None:
        with self._changed:
            if self._mood is not Mood.RUNNING or self._must_leave:
                return
            self._mood = Mood.DONE
        self._tell()
        begun = held = time.monotonic()
        said = False
        while not self._must_leave:
            now = time.monotonic()
            held = now if self._node is not None and lease_held(self._node.loop.state, now) else held
            if now >= begun + self._end_timeout_s:
                log.warning(
                    "job %s: the others' workers have not ended within %g s of this node's (rdzv-conf end_timeout): this node "
                    "leaves, and theirs are restarted", self._job, self._end_timeout_s,
                )  # fmt: skip
                return
            if now >= held + self._timeout_s:
                log.warning("job %s: the store has been away for %g s: this node leaves", self._job, self._timeout_s)
                return
            if not said and now >= begun + SAY_S:
                said = True
                log.warning("job %s: this node's workers have ended well; it stays until the others' have", self._job)
            with self._changed:
                self._changed.wait_for(lambda: self._must_leave, min(1.0, begun + self._end_timeout_s - now))

    def _retire(self) -> None:
        atexit.unregister(self._retire)
        loop, thread = self._loop, self._thread
        if loop is not None and thread is not None and thread.is_alive():
            with suppress(RuntimeError):  # the loop may have just ended
                loop.call_soon_threadsafe(self._cancel)
            thread.join(LEAVE_S)

    # ---- the round

    def _wait_for_place(self, deadline: float) -> Place:
        """One that we have not taken."""
        with self._changed:
            while self._place is None or self._place.generation <= self._taken:
                if self._left is not None:
                    raise RendezvousClosedError(f"job {self._job}: {self._left}")
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise RendezvousTimeoutError(
                        f"job {self._job}: no seat within {self._timeout_s:g} s (rdzv-conf join_timeout); "
                        f"{self._node.loop.state.reason if self._node else 'the store did not answer'}"
                    )
            place = self._place
            self._taken = place.generation
            self._exit = None
            self._mood = Mood.JOINING
            self._stores.plan_uses(place.endpoint)
        self._tell()
        return place

    def _meet(self, place: Place, deadline: float) -> PrefixStore | None:
        """Wait in the generation's store until all its members are there; None if it is overtaken meanwhile."""
        everybody = [f"here/{other}" for other in range(place.world)]
        host, port = split(place.endpoint)
        meeting: PrefixStore | None = None
        while not self._overtaken(place) and time.monotonic() < deadline:
            begun = time.monotonic()
            try:
                if meeting is None:
                    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=CONNECT)
                    fresh = PrefixStore(place.prefix, store)
                    fresh.set(f"here/{place.rank}", str(self._me))
                    meeting = fresh
                meeting.wait(everybody, SLICE)
            except RuntimeError as error:
                # torch's store errors are such: a member is not there yet, or the head has died.
                log.debug("generation %d: %s", place.generation, error)
                if time.monotonic() - begun < SLICE.total_seconds() / 2:  # a store that lives is waited for
                    meeting = None  # this one is reached anew
                    time.sleep(SLICE.total_seconds())  # as long as the wait that failed at once: then it is asked again
                continue
            meeting.set_timeout(STORE)
            return meeting
        return None

    def _overtaken(self, place: Place) -> bool:
        with self._changed:
            return self._must_leave or self._left is not None or self._place is not place

    # ---- the core, in its thread

    def _start(self) -> None:
        if self._thread is not None:
            return
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="elasticrl-core", daemon=True)
        self._thread.start()
        started.wait()
        atexit.register(self._retire)

    def _run(self, started: threading.Event) -> None:
        try:
            asyncio.run(self._live(started))
        except asyncio.CancelledError:
            self._leave("it was shut down")
        except StoreError as error:
            self._leave(str(error))
        except Exception as error:  # whoever waits in another thread must hear of it, or would for a day
            log.exception("job %s: bug", self._job)
            self._leave(f"bug: {type(error).__name__}: {error}")
        finally:
            started.set()

    async def _live(self, started: threading.Event) -> None:
        async with open_store(self._store) as store:
            state = State(settings=self._settings, me=self._me, card=Record(member=self._me))
            self._node = Node(state, store, (self._perform,), log=Plain())
            self._loop = asyncio.get_running_loop()
            self._running = asyncio.create_task(self._node.run())
            started.set()
            try:
                left = await self._running
                self._leave(left.reason)
            except asyncio.CancelledError:
                with suppress(StoreError):
                    await self._node.office.retire()
                self._leave("it was shut down")

    def _cancel(self) -> None:
        if self._running is not None:
            self._running.cancel()

    def _leave(self, why: str) -> None:
        with self._changed:
            self._left = why
            self._must_leave = True
            self._changed.notify_all()

    async def _perform(self, action: Action) -> bool:
        match action:
            case Launch(place=place) | Reform(place=place):
                with self._changed:
                    if self._place is None or place.generation > self._place.generation:
                        self._place = place
                    self._must_leave = self._mood in {Mood.RUNNING, Mood.DONE} and self._taken < self._place.generation
                    self._changed.notify_all()
            case Park() | Halt():
                with self._changed:
                    # What runs must stop, and what is being joined is void. The next plan that seats us comes as Launch.
                    self._must_leave = self._mood in {Mood.RUNNING, Mood.JOINING, Mood.DONE}
                    self._place = None
                    self._changed.notify_all()
            case Kill():
                pass  # torchrun's workers have no beats, so nothing is known that would ask for it
            case LookAt(request=request):
                self._post(Found(now=time.monotonic(), scene=request))  # nor a witness
            case Try(found=found, targets=targets):
                self._post(Tried(now=time.monotonic(), found=found, reached=tuple(sorted(targets))))
            case Probe(generation=generation):
                self._post(Probed(now=time.monotonic(), generation=generation, unreachable=()))
            case _:
                return False
        self._tell()
        return True

    def _post(self, event: Any) -> None:
        loop, node = self._loop, self._node
        if loop is not None and node is not None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(node.post, event)

    def _tell(self) -> None:
        """Say what torchrun's agent is doing, as the core wants to hear it."""
        with self._changed:
            event = Workers(
                now=time.monotonic(), work=WORKS[self._mood], generation=self._taken, born=self._taken,
                warm=self._mood not in {Mood.AWAY, Mood.DONE}, endpoint=self._stores.endpoint,
                phase=MEETING if self._mood is Mood.JOINING else "",
            )  # fmt: skip
            if self._exit is not None:
                event = replace(event, work=Work.FAILED, exit=self._exit)
            self._post(event)  # under the lock: of two that tell at once the later word is the later one


WORKS: Final = {
    Mood.AWAY: Work.NONE,
    Mood.ASKING: Work.NONE,
    Mood.JOINING: Work.JOINING,
    Mood.RUNNING: Work.TRAINING,
    Mood.DONE: Work.DONE,
}


def core_settings(params: RendezvousParameters) -> Settings:
    """What the core decides by, under torchrun."""
    ttl_s = float(params.get("ttl", 5.0))
    return Settings(
        job=params.run_id,
        lanes=max(params.max_nodes, 1),
        exact="off",
        membership=Membership(
            min_nodes=params.min_nodes, max_nodes=params.max_nodes, grow="always", lease_ttl_s=ttl_s, keepalive_s=ttl_s / 4,
            settle_s=float(params.get("settle", 1.0)),
        ),
        # torchrun gives a worker 30 s to end, and limits restarts itself (--max-restarts).
        recovery=Recovery(start_s=600.0, reform_s=120.0, replace_s=120.0, restart_s=120.0, no_progress_limit=1_000_000),
        health=Health(node_strikes=1_000_000),
    )  # fmt: skip


def store_settings(params: RendezvousParameters) -> StoreSettings:
    """How to reach etcd."""
    endpoints = tuple(endpoint.strip() for endpoint in params.endpoint.split(",") if endpoint.strip())
    tls = Tls(ca=params.get("cacert"), cert=params.get("cert"), key=params.get("key"))
    try:
        return StoreSettings(
            endpoints=endpoints,
            namespace=keys.namespace(params.run_id),
            client=params.get("client", "grpc"),
            username=params.get("username"),
            password=params.get("password"),
            tls=tls if tls != Tls() else None,
        )
    except StoreError as error:
        raise RendezvousConnectionError(f"--rdzv-endpoint or --rdzv-conf: {error}") from None


def address_towards(endpoints: str, way: Callable[[str], str] = route.way_to) -> str:
    """This host's address on the way to the store: where other nodes, too, most likely reach us.

    On a host that runs a member of etcd its own name is often a loopback address (Debian's 127.0.1.1), which is the way to
    itself alone: another member's way is better, and then the way out. Who writes localhost means this machine.
    """
    hosts = route.hosts(endpoints.split(","))
    here = route.found(hosts, way)
    if not here:
        raise RendezvousConnectionError(
            f"--rdzv-endpoint: this host knows no way to {' or '.join(hosts)}; say its own address (--local-addr)"
        )
    abroad = [address for address in here if not loops(address)]
    if not abroad and not any(map(loops, hosts)):
        abroad = route.found([route.ABROAD], way)
    return (abroad or here)[0]
