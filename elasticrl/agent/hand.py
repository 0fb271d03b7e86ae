"""torch's elastic agent for one node, led by orders: it starts, seats, watches and ends workers, and decides nothing.

The one idea: torch's agent loop restarts everybody whenever anything changes. Here torch's classes start processes, read how
they ended and keep the worker group's books, while who is in comes from outside, as a generation with ranks. A living worker
is told of a new generation; only a dead or sick one is replaced, by a process that is warm already.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from elasticrl.agent import exits, pool, warm, worker
from elasticrl.agent.echo import Echo
from elasticrl.agent.gather import Beating, Stride, Usual, look
from elasticrl.agent.logs import Logs, TorchLogs
from elasticrl.agent.outside import Outside, length
from elasticrl.agent.server import Server
from elasticrl.agent.spec import Spec
from elasticrl.agent.stores import Stores
from elasticrl.base.address import split
from elasticrl.base.parent import Led, stops
from elasticrl.base.process import life
from elasticrl.base.started import last_line
from elasticrl.base.ticks import until_next
from elasticrl.contract import seat, wire
from elasticrl.contract.beats import Snapshot
from elasticrl.contract.model import LOADING, MEETING, OUTSIDE, UNTOLD, Commit, Exit, Facts, Work
from elasticrl.contract.orders import Halt, Kill, Launch, Park, Place, Reform
from elasticrl.contract.wire import Ended, Report
from elasticrl.core.node.suspect import Budgets
from elasticrl.shell.notify import Notify

LOOK_S: Final = 0.1  # how often beats are looked at while a gang forms, until its first step is sealed
STEADY_S: Final = 0.2  # and from then on, for hangs and saves alone: each waking disturbs what computes here
REPORT_S: Final = 1.0  # the longest that a daemon hears nothing
ENDS: Final = (signal.SIGTERM, signal.SIGINT)
END_S: Final = 10.0  # how long killed processes may take to be gone before their places are given away
FORMED_S: Final = 10.0  # spares wait no longer for a gang that forms, nor for a fork server that imports
SCRIPT_S: Final = 3.0  # likewise, for a script, which tells of no step
START_S: Final = 60.0  # how long a rank waits for a process to be started for it
ROTATE_S: Final = 1.0  # between looks at the sizes of logs
MOST_ENDED: Final = 64  # ends that are told of while no daemon has acknowledged them: a report has an end
QUIET_S: Final = 0.5  # a beat younger than this needs no look at the kernel's word
log = logging.getLogger(__name__)


class Told(RendezvousHandler):
    """The rendezvous of an agent that is led: it was told the result. Nothing is negotiated, nobody is ever waiting."""

    def __init__(self, job: str) -> None:
        self._job = job
        self.place: Place | None = None

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


class Hand(LocalElasticAgent):
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
        self._stores = Stores(spec.host)
        self._echo = Echo(runtime)
        self._memory = exits.Memory()
        self._contexts = ThreadPoolExecutor(1, "elasticrl-contexts")  # see pool: one thread for all of torch's contexts
        self._spares: list[pool.Process] = []
        self._chosen: list[pool.Process] = []  # for the seat that is launched now
        self._seated: dict[int, pool.Process] = {}  # by slot
        self._ending: set[pool.Process] = set()  # killed by us, not yet gone
        self._place: Place | None = None
        self._generation = 0  # the newest that an order spoke of
        self._halting: Halt | None = None
        self._launching: Place | None = None  # whose processes are not seated yet
        self._exit: Exit | None = None
        self._ended: list[Ended] = []
        self._ends = 0
        self._last = Facts()
        self._usual = Usual(budgets=Budgets(settings=spec.timeouts))
        self._stride = Stride()
        self._outside = Outside()
        self._problem = ""
        self._stopping = ""
        self._committed: Commit | None = None
        self._bits = ""  # as the first warm process has found out; the others need not
        self._versions = ""  # likewise
        self._number = 0
        self._starting = 0
        self._pause_s = 0.0  # before the next start, after starts that came to nothing
        self._sent: Report | None = None
        self._sent_at = 0.0
        self._rotated_at = 0.0
        self._asked = 0  # the fork server that was told to import the rest
        self._complete = 0  # and the one that has
        self._began = (-1, 0)  # the newest generation that trains, and the step that it went on from
        self._changed = asyncio.Event()  # there is something to look at
        self._stirred = asyncio.Event()  # replaced at each change: what `_until` waits for
        self._quit = asyncio.Event()
        self._alone = False  # who would see to us has ended
        self._server: Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._me = life(os.getpid())

    # ---- the loop, in place of torch's

    def _invoke_run(self, role: str = "default") -> RunResult:  # noqa: ARG002 - torch's signature
        try:
            return asyncio.run(self._serve())
        finally:
            for number in (*ENDS, warm.COMPLETE):
                signal.signal(number, signal.SIG_IGN)  # else Python gives them back to the kernel as it ends

    async def _serve(self) -> RunResult:
        for number in stops():
            self._hear(number, partial(self._drain, f"the agent was sent {number.name}"))
        self._hear(warm.COMPLETE, self._completed)
        await self._echo.open(self._spec.host)
        async with Server(self._runtime / "agent.sock", self._take, self._report_now, self._poke) as server:
            self._server = server
            led = Led(asyncio.get_running_loop(), self._left_alone)
            led.by(self._spec.led)
            self._fill()
            while not self._quit.is_set() and (server.connected or not self._alone):
                self._changed.clear()
                self._look()
                await self._pause()
            led.by(())
            self._stopping = self._stopping or "nobody sees to this node any more"
            self._echo.close()  # the neighbours shall not hear that this node lives
            await self._end_all()
        return RunResult(state=WorkerState.SUCCEEDED, return_values={w.global_rank: None for w in self._group.workers})

    def _left_alone(self) -> None:
        """At once, and not in order: the vault has ended too, so what the workers went on to make would be copied nowhere."""
        self._alone = True
        self._poke()

    def _hear(self, number: signal.Signals, do: Callable[[], None]) -> None:
        """As the loop would, which gives the signal back to the kernel when it closes. Found live: a fork server that was ready
        as its agent ended, killed it before that had cleared away.
        """
        loop = asyncio.get_running_loop()

        def heard(*_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed
                loop.call_soon_threadsafe(do)

        signal.signal(number, heard)

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(until_next(self._look_s(), time.time())):
                await self._changed.wait()

    def _look_s(self) -> float:
        """How long until beats are looked at again."""
        if not self._seated:
            return REPORT_S
        generation, begun = self._began
        steady = self._last.work is Work.TRAINING and generation == self._generation and self._last.step > begun
        return STEADY_S if steady else LOOK_S

    def _poke(self) -> None:
        """Look at once."""
        self._changed.set()
        stirred, self._stirred = self._stirred, asyncio.Event()
        stirred.set()

    async def _until(self, true: Callable[[], bool], within_s: float) -> bool:
        """Wait for this to hold; False if it does not in time."""
        deadline = time.monotonic() + within_s
        while not true():
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._stirred.wait()
            except TimeoutError:
                return true()
        return True

    @property
    def _group(self) -> WorkerGroup:
        return self.get_worker_group()

    # ---- orders

    def _take(self, order: wire.Command) -> None:
        """Perform an order. What was performed already is passed over, so it may be sent any number of times."""
        match order:
            case Launch(place=place, leave_s=leave_s) if place.generation > self._generation:
                self._enter(place.generation, place.endpoint)
                self._begin_launch(place, leave_s)
            case Reform(place=place) if place.generation > self._generation:
                self._enter(place.generation, place.endpoint)
                self._reform(place)
            case Park() if order.generation > self._generation:
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
                self._ended = [end for end in self._ended if end.number not in numbers]
            case wire.Quit(reason=reason):
                self._stopping = reason
                self._quit.set()
            case _:
                pass
        self._poke()

    def _inform(self, committed: Commit) -> None:
        """Commits only rise: an older one is news of yesterday."""
        if self._committed is None or committed.step > self._committed.step:
            self._committed = committed
            for process in self._seated.values():
                if not process.finished:
                    process.inform(committed)

    def _enter(self, generation: int, endpoint: str) -> None:
        self._generation = generation
        self._halting = self._launching = None
        self._stores.plan_uses(endpoint)

    def _begin_launch(self, place: Place, leave_s: float = 0.0) -> None:
        # Marked at once: a report that goes out before the launch has run must not show the old workers in the new generation.
        self._place = self._launching = place
        self._spawn(self._launch(place, leave_s))

    async def _launch(self, place: Place, leave_s: float = 0.0) -> None:
        """End whoever is seated, and seat warm processes. Torch's own agent does the books on the way."""
        self._exit, self._last = None, Facts(step=place.resume)
        self._dismiss(self._seated.values(), "fresh processes take over", leave_s)

        def overtaken() -> bool:
            return self._launching is not place

        # Those we killed must be gone first: they hold GPU memory.
        await self._until(lambda: not self._ending or overtaken(), self._ends_within(leave_s))
        self._fill(at_least=place.slots)

        def chosen() -> bool:  # once: each look may find one more of them dead
            self._chosen = self._candidates()[: place.slots]
            return len(self._chosen) == place.slots

        await self._until(lambda: overtaken() or chosen(), START_S)
        if overtaken():
            return
        self._launching = None
        if len(self._chosen) < place.slots:
            cause = f"no process could be started within {START_S:g} s"
            cause = f"{cause}: {self._problem}" if self._problem else cause
            self._exit = Exit(generation=place.generation, slot=0, step=place.resume, cause=cause, own=False)
        else:
            self._told.place = place
            self._initialize_workers(self._group)
            self._last = self._look_at()
            self._fill()
            asyncio.get_running_loop().call_later(SCRIPT_S if self._spec.script else FORMED_S, self._spare)
        self._poke()

    def _reform(self, place: Place) -> None:
        """Tell the living; where there are none, or some have finished, all are started afresh."""
        if not self._seated or any(p.finished for p in self._seated.values()):
            self._begin_launch(replace(place, born=place.generation))
            return
        self._place = self._told.place = place
        self._rendezvous(self._group)
        for slot, process in self._seated.items():
            self._assign(process, place, slot)

    def _park(self, park: Park) -> None:
        for process in self._seated.values():
            self._tell(process, park)

    def _halt(self, halt: Halt) -> None:
        if self._halting and not (self._halting.save and not halt.save):
            return  # it is going on already
        if halt.save:
            # What is saved is committed under it. Where nothing is, fresh processes may be launched under the very same one.
            self._generation = max(self._generation, halt.generation)
        self._launching = None
        if not halt.save:
            self._halting = halt
            self._dismiss(self._seated.values(), halt.reason)
        elif self._seated:
            self._halting = halt
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
        self._spawn(self._end_later(asked, order))

    async def _end_later(self, processes: list[pool.Process], order: Halt) -> None:
        def left() -> list[pool.Process]:
            return [p for p in processes if p in self._seated.values() and not p.finished]

        if not await self._until(lambda: not left(), order.within_s):
            self._dismiss(left(), f"it had not ended {order.within_s:g} s after it was asked to ({order.reason})")

    def _drain(self, reason: str) -> None:
        """The agent itself shall end. A daemon that hears of it leaves the plan first, and then ends us; else we do."""
        if self._stopping:
            return
        self._stopping = reason
        order = Halt(generation=self._generation, save=True, within_s=self._spec.stop_s, reason=reason)
        self._spawn(self._end_then_quit(order))
        self._poke()

    async def _end_then_quit(self, order: Halt) -> None:
        if self._server and self._server.connected:
            await self._until(lambda: not self._seated or self._halting is not None, self._spec.stop_s)
        self._halt(order)
        order = self._halting or order  # the daemon's, which gives a save of its gang more time than ours does
        self._notify.stopping(order.reason, order.within_s + 2 * END_S)
        await self._until(lambda: all(p.finished for p in self._seated.values()), order.within_s + 1.0)
        self._quit.set()
        self._poke()

    def _assign(self, process: pool.Process, place: Place, slot: int) -> None:
        path = self._logs.ranked(place.generation, place.rank + slot, process.log)
        if self._committed is not None and place.generation == place.born:
            process.inform(self._committed)  # first, so that it is there when the program takes its seat
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
        self._seated = dict(enumerate(self._chosen))
        self._spares = [process for process in self._spares if process not in self._seated.values()]
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
        for process in self._living():
            process.end("the agent ends")
        self._contexts.shutdown(wait=False)

    # ---- processes

    def _living(self) -> list[pool.Process]:
        """Processes whose end is still to be seen."""
        return [p for p in (*self._spares, *self._seated.values(), *self._ending) if not p.finished]

    def _candidates(self) -> list[pool.Process]:
        """Processes that can take a rank, the warm ones first."""
        living = (p for p in self._spares if not (p.killed or p.ended))
        return sorted(living, key=lambda p: (not p.warm, p.number))

    def _wanted(self) -> int:
        """How many processes should be warm: a seat's worth; none beside a seat that is to have no spares, or none yet."""
        if self._stopping or self._quit.is_set():
            return 0
        if self._seated and not (self._spec.spares and self._complete == warm.server()):
            return 0
        return max(self._spec.slots, self._spec.spares)

    def _fill(self, at_least: int = 0) -> None:
        """Start what is missing, beside everything else."""
        missing = max(self._wanted(), at_least) - len(self._spares) - self._starting
        for _ in range(missing):
            self._starting += 1
            self._spawn(self._start())

    def _spare(self) -> None:
        """The gang trains: what only spares need is done now, when it is in nobody's way, and first for them all at once."""
        if self._asked != (server := warm.server()):
            if not warm.complete(server):
                asyncio.get_running_loop().call_later(FORMED_S, self._spare)
                return
            self._asked = server
            asyncio.get_running_loop().call_later(FORMED_S, self._completed)

    def _completed(self) -> None:
        self._complete = self._asked
        self._fill()

    async def _start(self) -> None:
        self._number += 1
        number, pause_s = self._number, self._pause_s
        try:
            await self._until(self._quit.is_set, pause_s)
            # Of a fork server that has died all processes die. How they ended is asked in the same thread, which a start holds
            # until the next server has imported torch: meanwhile nobody would hear that the gang has failed.
            await self._until(lambda: not any(process.orphaned() for process in self._living()), END_S)
            if self._quit.is_set():
                return
            loop = asyncio.get_running_loop()
            start = partial(pool.start, tells_bits=not self._bits)
            process = await loop.run_in_executor(self._contexts, start, self._spec, number, self._runtime, self._logs)
        except (OSError, EOFError, RuntimeError) as error:
            self._problem = f"no process can be started: {error}"
            log.warning("%s", self._problem)
            self._slow_down()
            return
        finally:
            self._starting -= 1
        self._spares.append(process)
        loop.add_reader(process.channel, self._heard, process)
        loop.add_reader(process.pidfd, self._died, process)
        if self._quit.is_set():
            process.end("the agent ends")
        self._poke()

    def _slow_down(self) -> None:
        self._pause_s = min(10.0, max(0.2, 2 * self._pause_s))
        asyncio.get_running_loop().call_later(self._pause_s, self._fill)

    def _heard(self, process: pool.Process) -> None:
        if not process.hear():
            asyncio.get_running_loop().remove_reader(process.channel)
        elif process.warm and process.slot is None:
            self._pause_s, self._problem = 0.0, ""
            self._bits, self._versions = self._bits or process.bits, self._versions or process.versions
        self._poke()

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
                        self._spawn(self._end_gently(process, why, leave_s))
                    else:
                        process.end(why)

    async def _end_gently(self, process: pool.Process, why: str, leave_s: float) -> None:
        """As torchrun ends a script: SIGTERM, some time for a save, SIGKILL. One that listens is asked before that."""

        def ended() -> bool:
            return process not in self._ending

        if leave_s and process.listens and not process.killed:
            self._tell(process, Halt(generation=self._generation, save=True, within_s=leave_s, reason=why))
            await self._until(ended, leave_s)
        if not ended() and process.term(why):
            await self._until(ended, self._spec.grace_s)
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
        self._spawn(self._bury(process))

    async def _bury(self, process: pool.Process) -> None:
        loop = asyncio.get_running_loop()
        code, failure = await loop.run_in_executor(self._contexts, process.collect)
        beat = process.beat()
        process.writes_elsewhere(beat)  # its last words lie where it wrote last
        if process in self._ending:
            self._ending.discard(process)
        elif process in self._spares:
            self._spares.remove(process)
            end = self._end_of(process, beat, code, failure)
            self._problem = f"a process ended before it was warm: {end.exit.cause}" if not process.warm else ""
            self._slow_down()
        elif (code == 0 and (self._halting or beat.phase != LOADING)) or (
            self._halting and (process.killed or self._spec.script)
        ):
            process.finished = True
            self._last = self._look_at()
        else:
            self._fail(process, self._end_of(process, beat, code, failure))
        if not process.finished:
            process.close()
        self._clear_ended()
        self._fill()
        self._poke()

    def _clear_ended(self) -> None:
        """Those who were asked to end have, all of them."""
        if self._halting and all(p.finished for p in self._seated.values()):
            self._last = replace(self._look_at(), work=Work.NONE, stall=None) if self._seated else self._last
            for done in self._seated.values():
                done.close()
            self._seated.clear()

    def _fail(self, process: pool.Process, end: Ended) -> None:
        """A seated process ended: the seat fails whole, since the core plans by seats."""
        self._last = replace(self._look_at(), work=Work.FAILED, stall=None)
        self._exit = end.exit
        if process.slot is not None and self._seated.get(process.slot) is process:
            del self._seated[process.slot]
        self._dismiss(self._seated.values(), f"its neighbour in slot {process.slot} ended: {end.exit.cause}")

    def _end_of(self, process: pool.Process, beat: Snapshot, code: int | None, failure: ProcessFailure | None) -> Ended:
        message = exits.exception_of(failure.error_file_data) if failure else ""
        if self._spec.script and code and code > 0:
            message = message or last_line(process.log)
        memory = self._memory.evidence(process.pid, code)
        facts = exits.Traces(
            code=code, message=message, killed=process.killed, sign=process.sign, memory=memory,
            unjoined=code == 0 and process.slot is not None and beat.phase == LOADING,
        )  # fmt: skip
        cause, own, sign = exits.judge(facts)
        self._ends += 1
        generation = self._generation if process.slot is not None else 0
        end = Ended(
            number=self._ends, rank=process.rank, core=exits.core_of(code), said=last_line(process.log),
            exit=Exit(
                generation=generation, slot=process.slot or 0, step=beat.step, cause=cause, own=own, signal=facts.signal,
                sign=sign,
            ),
        )  # fmt: skip
        self._ended = [*self._ended, end][-MOST_ENDED:]
        return end

    async def _end_all(self) -> None:
        """Kill what is left, and see it gone."""
        self._dismiss(self._seated.values(), "the agent ends")
        for process in self._spares:
            process.end("the agent ends")
        await self._until(lambda: not (self._spares or self._ending or self._starting), self._ends_within())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished_task)

    def _finished_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("bug", exc_info=error)

    # ---- what is reported

    def _look(self) -> None:
        """Look at all beats, and report what has changed."""
        if any(not p.finished for p in self._seated.values()):
            self._last = self._look_at()
            self._rotate()
        report = self._report_now()
        now = time.monotonic()
        self._memory.look(now)
        if report.work is Work.TRAINING and self._began[0] != report.generation:
            self._began = (report.generation, report.step)
        begun = self._began[1]
        if report.work is Work.TRAINING and report.step > begun:
            self._spare()
        grows = self._place is not None and self._place.grows
        changed = news(report, begun, grows=grows) != news(self._sent, begun, grows=grows)
        if self._server and (changed or now >= self._sent_at + REPORT_S):
            self._sent, self._sent_at = report, now
            self._server.send(report)

    def _rotate(self) -> None:
        """A log that has grown too large, once a second."""
        if (now := time.monotonic()) < self._rotated_at + ROTATE_S:
            return
        self._rotated_at = now
        for process in self._seated.values():
            if self._logs.rotate(process.log):
                process.reopen()

    def _look_at(self) -> Facts:
        now = time.monotonic()
        beating = []
        self._look_from_outside(now)
        for slot, process in sorted(self._seated.items()):
            beat = self._outside.since(process.pid, process.beat())
            if process.writes_elsewhere(beat):
                self._logs.show(self._generation)
            quiet = now - beat.since > QUIET_S
            alive = life(process.pid) if quiet and not process.finished else None
            stopped = alive is not None and alive.stopped
            beating.append(
                Beating(slot=slot, beat=beat, stopped=stopped, finished=process.finished, script=self._spec.script)
            )
        self._usual = self._usual.learn(beating, now)
        self._stride = self._stride.after(beating, now, REPORT_S)
        return look(beating, self._generation, self._usual.budgets, now, time.time())

    def _look_from_outside(self, now: float) -> None:
        """At scripts that have told nothing."""
        silent = [p for p in self._seated.values() if not p.finished and p.beat().phase == UNTOLD]
        found = {p.pid: (alive, length(p.log)) for p in silent if (alive := life(p.pid)) is not None}
        self._outside = self._outside.after(now, found)

    def _report_now(self) -> Report:
        """The whole picture."""
        warm = sum(p.warm for p in self._candidates())
        here = self._last
        work = here.work
        if self._exit is not None:
            work = Work.FAILED
        elif self._launching:
            work = Work.JOINING
        elif not self._seated:
            work = Work.NONE
        place = self._place
        seated = here if self._seated else Facts(step=here.step, saved=here.saved, manifest=here.manifest)
        return seated.into(
            Report,
            work=work,
            generation=self._exit.generation if self._exit else self._generation,
            born=place.born if place and (self._seated or work is Work.JOINING) else 0,
            warm=warm >= self._spec.slots,
            exit=self._exit,
            endpoint=self._stores.endpoint,
            echo=self._echo.address,
            bits=self._bits,
            versions=self._versions,
            problem=self._problem,
            unlogged=self._logs.problem,
            pace=self._stride.took if self._seated else (),
            lap=self._stride.lap,
            pid=self._me.pid if self._me else 0,
            started=self._me.started if self._me else 0,
            workers=tuple(
                wire.Worker(
                    slot=slot, rank=p.rank or 0, pid=p.pid, started=p.started, beat=str(p.page.path), log=str(p.log)
                )
                for slot, p in sorted(self._seated.items())
            ),
            spares=warm,
            ended=tuple(self._ended),
            stopping=self._stopping,
        )


def news(report: Report | None, begun: int, *, grows: bool = False) -> Report | None:
    """A report without what changes all the time. Of steps only the first that a generation seals, beyond that with which it
    has `begun`, is news: it says that a recovery is over. Where a gang `grows`, so is that it has parted.
    """
    if report is None:
        return None
    stall = replace(report.stall, for_s=0.0, budget_s=0.0) if report.stall else None
    phase = report.phase if report.phase in (OUTSIDE, *([MEETING] if grows else [])) else ""
    return replace(report, step=int(report.step > begun), stall=stall, pace=(), lap=None, phase=phase, beat_at=0.0)
