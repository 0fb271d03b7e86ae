"""torch's elastic agent for one node, led by orders: it starts, seats, watches and ends workers, and decides nothing.

The one idea: torch's agent loop restarts everybody whenever anything changes. Here torch's classes start processes, read how
they ended and keep the worker group's books, while who is in comes from outside, as a generation with ranks. A living worker
is told of a new generation; only a dead or sick one is replaced, by a process that is warm already.

Long because each order is there with what ends, hinders or overtakes it.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from elasticrl.agent import exits, pool, warm, worker
from elasticrl.agent.dying import Dying
from elasticrl.agent.echo import Echo
from elasticrl.agent.ends import Ends
from elasticrl.agent.logs import Logs, TorchLogs
from elasticrl.agent.reports import REPORT_S, Reports
from elasticrl.agent.server import Server
from elasticrl.agent.spares import END_S, FORMED_S, Spares
from elasticrl.agent.spec import Spec
from elasticrl.agent.tcp_stores import TcpStores
from elasticrl.agent.turns import Turns
from elasticrl.agent.watch import Watch
from elasticrl.base.address import split
from elasticrl.base.parent import Led, stops
from elasticrl.contract import seat, wire
from elasticrl.contract.beats import Snapshot
from elasticrl.contract.evidence import Sign
from elasticrl.contract.model import LOADING, Commit, Exit, Facts, Work
from elasticrl.contract.orders import Halt, Kill, Launch, Park, Place, Reform
from elasticrl.contract.wire import Ended, Report
from elasticrl.shell.notify import Notify

LOOK_S: Final = 0.1  # how often beats are looked at while a gang forms, until its first step is sealed
STEADY_S: Final = 0.2  # and from then on, for hangs and saves alone: each waking disturbs what computes here
ENDS: Final = (signal.SIGTERM, signal.SIGINT)
SCRIPT_S: Final = 3.0  # spares wait no longer for a script to form its gang, as it tells of no step
START_S: Final = 60.0  # how long a rank waits for a process to be started for it


@dataclass(slots=True)
class Ordered:
    """What this node was told to do, as far as it goes on."""

    generation: int = 0  # the newest that an order spoke of
    place: Place | None = None
    launching: Place | None = None  # whose processes are not seated yet
    halting: Halt | None = None
    committed: Commit | None = None

    def enter(self, generation: int) -> None:
        """A newer generation: what the last one was told to do is over."""
        self.generation, self.halting, self.launching = generation, None, None


class Told(RendezvousHandler):
    """The rendezvous of an agent that is led: it was told the result. Nothing is negotiated, nobody is ever waiting."""

    def __init__(self, job: str) -> None:
        self._job = job
        self.place: Place | None = None
        self.chosen: list[pool.Process] = []  # who takes it

    def get_backend(self) -> str:
        """Its name."""
        return "elasticrl"

    @property
    def use_agent_store(self) -> bool:
        """The store at MASTER_ADDR is an agent's."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """The generation that was ordered, as torch wants to see it."""
        assert self.place is not None
        nodes = list(dict.fromkeys(self.place.nodes))
        address = RendezvousStoreInfo(*(split(self.place.endpoint) if self.place.endpoint else ("", 0)))
        return RendezvousInfo(HashStore(), nodes.index(self.place.nodes[self.place.rank]), len(nodes), address)

    def is_closed(self) -> bool:
        """Never: the agent ends when it is told to."""
        return False

    def set_closed(self) -> None:
        """Nothing to close."""

    def num_nodes_waiting(self) -> int:
        """Nobody; only the core decides who is in."""
        return 0

    def get_run_id(self) -> str:
        """The job's name."""
        return self._job

    def shutdown(self) -> bool:
        """Nothing is open."""
        return True


class LedAgent(LocalElasticAgent):
    """One node's agent. `run()` serves until it is told to quit."""

    def __init__(self, spec: Spec, runtime: Path, notify: Notify) -> None:
        self._told = Told(spec.job)
        torch_spec = WorkerSpec(
            role="train",
            local_world_size=spec.slots,
            rdzv_handler=self._told,
            entrypoint=worker.main,
            max_restarts=0,
            local_addr=spec.host,
        )
        super().__init__(torch_spec, TorchLogs(runtime / "errors" / "none"), start_method="forkserver")
        self._spec = spec
        self._notify = notify
        self._runtime = runtime
        for folder in ("beats", "errors"):
            (runtime / folder).mkdir(mode=0o700, exist_ok=True)
            for left in (runtime / folder).iterdir():
                left.unlink()
        self._logs = Logs(Path(spec.log_dir), limit_bytes=spec.log_limit_bytes, keep=spec.log_keep)
        self._stores = TcpStores(spec.host)
        self._echo = Echo(runtime)
        self._turns = Turns()
        self._ends = Ends(script=spec.script)
        self._watch = Watch(spec, self._logs)
        self._reports = Reports()
        self._spares = Spares(
            spec, runtime, self._logs, self._turns, seated=lambda: bool(self._seated), others=self._others, died=self._died
        )  # fmt: skip
        self._seated: dict[int, pool.Process] = {}  # by slot
        self._ending: set[pool.Process] = set()  # killed by us, not yet gone
        self._ordered = Ordered()
        self._exit: Exit | None = None
        self._last = Facts()
        self._stopping = ""
        self._alone = False  # daemon and vault have ended
        self._server: Server | None = None

    # ---- the loop, in place of torch's

    def _invoke_run(self, role: str = "default") -> RunResult:  # noqa: ARG002 - torch's signature
        try:
            return asyncio.run(self._serve())
        finally:
            for number in (*ENDS, warm.COMPLETE, warm.SPOILT):
                signal.signal(number, signal.SIG_IGN)  # else Python gives them back to the kernel as it ends

    async def _serve(self) -> RunResult:
        for number in stops():
            self._hear(number, partial(self._drain, f"the agent was sent {number.name}"))
        self._hear(warm.COMPLETE, self._spares.completed)
        self._hear(warm.SPOILT, self._spares.spoilt)
        await self._echo.open(self._spec.host)
        async with Server(self._runtime / "agent.sock", self._take, self._report_now, self._turns.poke) as server:
            self._server = server
            led = Led(asyncio.get_running_loop(), self._left_alone)
            led.by(self._spec.led)
            self._spares.fill()
            if not self._spec.on_cards:  # there a fresh process must wait until the dead one's memory is free
                self._turns.spawn(self._see_dying(Dying()))
            while not self._turns.over.is_set() and (server.connected or not self._alone):
                self._turns.looks()
                self._look()
                await self._turns.pause(self._look_s())
            led.by(())
            self._stopping = self._stopping or "nobody sees to this node any more"
            self._echo.close()  # the neighbours shall not hear that this node lives
            await self._end_all()
        return RunResult(state=WorkerState.SUCCEEDED, return_values={w.global_rank: None for w in self._group.workers})

    def _left_alone(self) -> None:
        """At once, and not in order: the vault has ended too, so what the workers went on to make would be copied nowhere."""
        self._alone = True
        self._turns.poke()

    def _hear(self, number: signal.Signals, do: Callable[[], None]) -> None:
        """As the loop would, which gives the signal back to the kernel when it closes. Found live: a fork server that was ready
        as its agent ended, killed it before that had cleared away.
        """
        loop = asyncio.get_running_loop()

        def heard(*_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed
                loop.call_soon_threadsafe(do)

        signal.signal(number, heard)

    def _look_s(self) -> float:
        """How long until beats are looked at again."""
        if not self._seated:
            return REPORT_S
        steady = self._reports.steady(self._ordered.generation, self._last.work, self._last.step)
        return STEADY_S if steady else LOOK_S

    @property
    def _group(self) -> WorkerGroup:
        return self.get_worker_group()

    # ---- orders

    def _take(self, order: wire.Command) -> None:
        """Perform an order. What was performed already is passed over, so it may be sent any number of times."""
        match order:
            case Launch(place=place, leave_s=leave_s) if place.generation > self._ordered.generation:
                self._enter(place.generation, place.endpoint)
                self._begin_launch(place, leave_s)
            case Reform(place=place) if place.generation > self._ordered.generation:
                self._enter(place.generation, place.endpoint)
                self._reform(place)
            case Park() if order.generation > self._ordered.generation:
                self._enter(order.generation, order.endpoint)
                self._park(order)
            case Halt():
                self._halt(order)
            case Kill(slot=slot, cause=cause, sign=sign):
                if slot in self._seated:
                    self._seated[slot].end(cause, sign)
            case Commit():
                self._inform(order)
            case wire.Acknowledge(ended=numbers):
                self._ends.forget(numbers)
            case wire.Quit(reason=reason):
                self._stopping = reason
                self._close()
            case _:
                pass
        self._turns.poke()

    def _inform(self, committed: Commit) -> None:
        """Commits only rise: an older one is news of yesterday."""
        if self._ordered.committed is None or committed.step > self._ordered.committed.step:
            self._ordered.committed = committed
            for process in self._seated.values():
                if not process.finished:
                    process.inform(committed)

    def _enter(self, generation: int, endpoint: str) -> None:
        self._ordered.enter(generation)
        self._stores.plan_uses(endpoint)

    def _begin_launch(self, place: Place, leave_s: float = 0.0) -> None:
        # Marked at once: a report that goes out before the launch has run must not show the old workers in the new generation.
        self._ordered.place = self._ordered.launching = place
        self._turns.spawn(self._launch(place, leave_s))

    async def _launch(self, place: Place, leave_s: float = 0.0) -> None:
        """End whoever is seated, and seat warm processes. Torch's own agent does the books on the way."""
        self._exit, self._last = None, Facts(step=place.resume)
        self._dismiss(self._seated.values(), "fresh processes take over", leave_s)

        def overtaken() -> bool:
            return self._ordered.launching is not place

        # Those we killed must be gone first: they hold GPU memory, or a script's ports. Else they need only run no more.
        await self._turns.until(lambda: not self._in_the_way() or overtaken(), self._ends_within(leave_s))
        self._spares.fill(at_least=place.slots)

        def chosen() -> bool:  # once: each look may find one more of them dead
            self._told.chosen = self._spares.ready[: place.slots]
            return len(self._told.chosen) == place.slots

        await self._turns.until(lambda: overtaken() or chosen(), START_S)
        if overtaken():
            return
        self._ordered.launching = None
        if len(self._told.chosen) < place.slots:
            cause = f"no process could be started within {START_S:g} s"
            cause = f"{cause}: {self._spares.problem}" if self._spares.problem else cause
            self._exit = Exit(
                generation=place.generation, slot=None, step=place.resume, cause=cause, own=False, sign=Sign.GONE
            )
        else:
            self._told.place = place
            self._initialize_workers(self._group)
            self._last = self._look_at()
            self._spares.fill()
            asyncio.get_running_loop().call_later(SCRIPT_S if self._spec.script else FORMED_S, self._spares.spare)
        self._turns.poke()

    def _reform(self, place: Place) -> None:
        """Tell the living; where there are none, or some have finished, all are started afresh."""
        if not self._seated or any(p.finished for p in self._seated.values()):
            self._begin_launch(replace(place, born=place.generation))
            return
        self._ordered.place = self._told.place = place
        self._rendezvous(self._group)
        for slot, process in self._seated.items():
            self._assign(process, place, slot)

    def _park(self, park: Park) -> None:
        for process in self._seated.values():
            self._tell(process, park)

    def _halt(self, halt: Halt) -> None:
        before = self._ordered.halting
        if before and not (before.save and not halt.save):
            return  # it is going on already
        if halt.save:
            # What is saved is committed under it. Where nothing is, fresh processes may be launched under the very same one.
            self._ordered.generation = max(self._ordered.generation, halt.generation)
        self._ordered.launching = None
        if not halt.save:
            self._ordered.halting = halt
            self._dismiss(self._seated.values(), halt.reason)
        elif self._seated:
            self._ordered.halting = halt
            self._ask_to_end(halt)
            self._clear_ended()  # a script ends when it likes

    def _ask_to_end(self, order: Halt) -> None:
        asked = [p for p in self._seated.values() if not p.finished]
        for process in asked:
            if self._spec.script and not process.listens:
                if not process.term(order.reason):
                    process.end(order.reason)
            else:
                self._tell(process, order)
        self._turns.spawn(self._end_later(asked, order))

    async def _end_later(self, processes: list[pool.Process], order: Halt) -> None:
        def left() -> list[pool.Process]:
            return [p for p in processes if p in self._seated.values() and not p.finished]

        def overtaken() -> bool:  # those that are told of another gang go on in that one
            return self._ordered.halting is not order

        if not await self._turns.until(lambda: not left() or overtaken(), order.within_s):
            self._dismiss(left(), f"it had not ended {order.within_s:g} s after it was asked to ({order.reason})")

    def _drain(self, reason: str) -> None:
        """The agent itself shall end. A daemon that hears of it leaves the plan first, and then ends us; else we do."""
        if self._stopping:
            return
        self._stopping = reason
        self._spares.closed = True
        order = Halt(generation=self._ordered.generation, save=True, within_s=self._spec.stop_s, reason=reason)
        self._turns.spawn(self._end_then_quit(order))
        self._turns.poke()

    async def _end_then_quit(self, order: Halt) -> None:
        if self._server and self._server.connected:
            await self._turns.until(lambda: not self._seated or self._ordered.halting is not None, self._spec.stop_s)
        self._halt(order)
        order = self._ordered.halting or order  # the daemon's, which gives a save of its gang more time than ours does
        self._notify.stopping(order.reason, order.within_s + 2 * END_S)
        await self._turns.until(lambda: all(p.finished for p in self._seated.values()), order.within_s + 1.0)
        self._close()
        self._turns.poke()

    def _close(self) -> None:
        self._spares.closed = True
        self._turns.over.set()

    def _assign(self, process: pool.Process, place: Place, slot: int) -> None:
        path = self._logs.ranked(place.generation, place.rank + slot, process.log)
        if self._ordered.committed is not None and place.generation == place.born:
            process.inform(self._ordered.committed)  # first, so that it is there when the program takes its seat
        try:
            process.assign(place.at(slot, str(path)))
        except OSError as error:
            process.end(f"it takes no orders ({error})")
        if process.log == path:
            self._logs.show(place.generation)

    def _tell(self, process: pool.Process, order: seat.Order) -> None:
        try:
            process.tell(order)
        except OSError as error:
            process.end(f"it takes no orders ({error})")

    # ---- torch's hooks

    def _assign_worker_ranks(self, *_: object) -> list[Worker]:
        """As ordered, instead of as negotiated through the store."""
        place = self._told.place
        assert place is not None
        return [
            Worker(
                local_rank=slot, global_rank=place.rank + slot, role_rank=place.rank + slot, world_size=place.world,
                role_world_size=place.world,
            )
            for slot in range(place.slots)
        ]  # fmt: skip

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Hand each rank to a process that torch's contexts have started already. One that has died since it was chosen fails
        the seat, as any does.
        """
        place = self._told.place
        assert place is not None
        self._seated = dict(enumerate(self._told.chosen))
        self._spares.processes = [process for process in self._spares.processes if process not in self._seated.values()]
        for slot, process in self._seated.items():
            self._assign(process, place, slot)
        return {worker.local_rank: self._seated[worker.local_rank].pid for worker in worker_group.workers}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002 - torch's signature
        self._dismiss(self._seated.values(), "the worker group was stopped")

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:  # noqa: ARG002 - torch's signature
        """What torch's loop would ask; ours is told by the kernel and needs no asking."""
        work = self._report_now().work
        if work is Work.FAILED:
            return RunResult(state=WorkerState.FAILED)
        if work is Work.DONE:
            return RunResult(state=WorkerState.SUCCEEDED)
        return RunResult(state=WorkerState.HEALTHY)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:  # noqa: ARG002
        for process in (*self._spares.processes, *self._others()):
            process.end("the agent ends")
        self._spares.contexts.shutdown(wait=False)

    # ---- processes

    def _others(self) -> list[pool.Process]:
        """Processes with a seat, or that had one, whose end is still to be seen."""
        return [p for p in (*self._seated.values(), *self._ending) if not p.finished]

    def _in_the_way(self) -> bool:
        """Does somebody who was killed still have what fresh processes need?"""
        return any(self._spec.script or not process.dying for process in self._ending)

    async def _see_dying(self, dying: Dying) -> None:
        """A worker that a signal ends has failed now, and not when the kernel has freed its memory."""
        while not self._turns.over.is_set():
            running = [process for process in self._others() if not process.dying]
            await self._turns.until(self._turns.over.is_set, dying.pause_s(running))
            for process, sign in dying.look(running):
                if sign in exits.BAD or process not in self._others():
                    continue  # what it wrote as it failed says more; or it has ended meanwhile
                process.dying, beat = True, process.beat()
                if process in self._seated.values() and not self._ends_in_order(process, beat, -sign):
                    process.sweep()
                    process.writes_elsewhere(beat)
                    self._ending.add(process)
                    self._fail(process, self._end_of(process, beat, -sign, None))
                self._turns.poke()

    def _dismiss(self, processes: Iterable[pool.Process], why: str, leave_s: float = 0.0) -> None:
        """End seated processes whose end is no failure. Scripts that listen have `leave_s` to save and leave by themselves."""
        for process in list(processes):
            if process.slot is not None and self._seated.get(process.slot) is process:
                del self._seated[process.slot]
                if process.finished:
                    process.close()
                else:
                    self._ending.add(process)
                    if self._spec.script:
                        self._turns.spawn(self._end_gently(process, why, leave_s))
                    else:
                        process.end(why)

    async def _end_gently(self, process: pool.Process, why: str, leave_s: float) -> None:
        """As torchrun ends a script: SIGTERM, some time for a save, SIGKILL. One that listens is asked before that."""

        def ended() -> bool:
            return process not in self._ending

        if leave_s and process.listens and not process.killed:
            self._tell(process, Halt(generation=self._ordered.generation, save=True, within_s=leave_s, reason=why))
            await self._turns.until(ended, leave_s)
        if not ended() and process.term(why):
            await self._turns.until(ended, self._spec.grace_s)
        if not ended():
            process.end(why)

    def _ends_within(self, leave_s: float = 0.0) -> float:
        """How long processes that were told to end may take until they are gone."""
        if not self._spec.script:
            return END_S
        return END_S + self._spec.grace_s + leave_s

    def _died(self, process: pool.Process) -> None:
        """The kernel says that a process has ended."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(process.pidfd)
        loop.remove_reader(process.channel)
        self._turns.spawn(self._bury(process))

    async def _bury(self, process: pool.Process) -> None:
        loop = asyncio.get_running_loop()
        code, failure = await loop.run_in_executor(self._spares.contexts, process.collect)
        beat = process.beat()
        process.writes_elsewhere(beat)  # its last words lie where it wrote last
        if process in self._ending:
            self._ending.discard(process)
        elif process in self._spares.processes:
            self._spares.lost(process, self._end_of(process, beat, code, failure).exit.cause)
        elif self._ends_in_order(process, beat, code):
            process.finished = True
            self._last = self._look_at()
        else:
            self._fail(process, self._end_of(process, beat, code, failure))
        if not process.finished:
            process.close()
        self._clear_ended()
        self._spares.fill()
        self._turns.poke()

    def _ends_in_order(self, process: pool.Process, beat: Snapshot, code: int | None) -> bool:
        asked = self._ordered.halting is not None
        if code == 0 and (asked or beat.phase != LOADING):
            return True
        return asked and (bool(process.killed) or self._spec.script)

    def _clear_ended(self) -> None:
        """Those who were asked to end have, all of them."""
        if self._ordered.halting and all(p.finished for p in self._seated.values()):
            self._last = replace(self._look_at(), work=Work.NONE, stall=None) if self._seated else self._last
            for done in self._seated.values():
                done.close()
            self._seated.clear()

    def _fail(self, process: pool.Process, end: Ended) -> None:
        """A seated process ended: the seat fails whole, the node's other workers with it, since the core plans by seats."""
        self._last = replace(self._look_at(), work=Work.FAILED, stall=None)
        self._exit = end.exit
        if process.slot is not None and self._seated.get(process.slot) is process:
            del self._seated[process.slot]
        self._dismiss(self._seated.values(), f"its neighbour in slot {process.slot} ended: {end.exit.cause}")

    def _end_of(self, process: pool.Process, beat: Snapshot, code: int | None, failure: ProcessFailure | None) -> Ended:
        return self._ends.add(process, beat, code, failure, self._ordered.generation)

    async def _end_all(self) -> None:
        """Kill what is left, and see it gone."""
        self._dismiss(self._seated.values(), "the agent ends")
        self._spares.end("the agent ends")
        await self._turns.until(
            lambda: not (self._spares.processes or self._ending or self._spares.starting), self._ends_within()
        )
        await self._turns.end()

    # ---- what is reported

    def _look(self) -> None:
        """Look at all beats, and report what has changed."""
        if any(not p.finished for p in self._seated.values()):
            self._last = self._look_at()
            self._watch.rotate(self._seated.values())
        report, place = self._report_now(), self._ordered.place
        self._ends.look(time.monotonic())
        if self._reports.steps(report):
            self._spares.spare()
        self._reports.send(self._server, report, grows=place is not None and place.grows)

    def _look_at(self) -> Facts:
        return self._watch.look(self._seated, self._ordered.generation)

    def _report_now(self) -> Report:
        """The whole picture."""
        here, place, spares = self._last, self._ordered.place, self._spares
        work = self._work()
        warm = sum(p.warm for p in spares.ready)
        left = Facts(step=here.step, saved=here.saved, manifest=here.manifest, milestone=here.milestone)
        seated = here if self._seated else left
        return seated.into(
            Report,
            work=work,
            generation=self._exit.generation if self._exit else self._ordered.generation,
            born=place.born if place and (self._seated or work is Work.JOINING) else 0,
            warm=warm >= self._spec.slots,
            exit=self._exit,
            endpoint=self._stores.endpoint,
            echo=self._echo.address,
            bits=spares.bits,
            versions=spares.versions,
            problem=spares.problem,
            unlogged=self._logs.problem,
            pace=self._watch.pace if self._seated else (),
            lap=self._watch.lap,
            pid=self._reports.me.pid,
            started=self._reports.me.born,
            workers=tuple(
                wire.Worker(
                    slot=slot, rank=p.rank or 0, pid=p.pid, started=p.started, beat=str(p.page.path), log=str(p.log)
                )
                for slot, p in sorted(self._seated.items())
            ),
            spares=warm,
            ended=self._ends.told,
            stopping=self._stopping,
        )

    def _work(self) -> Work:
        if self._exit is not None:
            return Work.FAILED
        if self._ordered.launching:
            return Work.JOINING
        return self._last.work if self._seated else Work.NONE
