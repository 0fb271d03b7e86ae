"""What this node finds out about a fault, while it is there: logs as they are written, the scene of a stall, the machine's
health, the way to others; and, when it is over, the incident.

The one idea: everything here is a source of `Found` events. Each runs beside the daemon's loop, in a thread or a process of its
own, is bounded in time, and costs, if it fails, nothing but its facts: what is decided, and when, is the core's.
"""

import asyncio
import json
import math
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticrl.agent.wire import Report
from elasticrl.config import Tree
from elasticrl.core import dossier, versions
from elasticrl.core.address import join
from elasticrl.core.events import Action, Cleared, Event, Found, LookAt, Probe, Probed, Suspected, Workers
from elasticrl.core.evidence import HEALTH, Evidence, Kind, Sign
from elasticrl.core.grid import until_next
from elasticrl.core.heirs import inherited
from elasticrl.core.judge import judge
from elasticrl.core.model import Outcome, Phase, Plan, Record, Stall, Work
from elasticrl.core.pairs import Result, findings, late_ways, result_of
from elasticrl.core.state import State
from elasticrl.core.step import found
from elasticrl.core.value import dataclass
from elasticrl.core.verdict import Facts, Fault, surest
from elasticrl.daemon.history import History
from elasticrl.daemon.recovery import Done
from elasticrl.diagnose import witness
from elasticrl.diagnose.tail import Tail
from elasticrl.shell.apart import apart

if TYPE_CHECKING:  # what follows a fault no start waits for: `prepare` imports it, once the daemon's loop runs
    from elasticrl.diagnose import health, kernel_log
    from elasticrl.diagnose.incident import Incident

TAIL_S = 0.2  # between looks at the workers' logs
IDLE_S = 1.0  # the same, while there are none
LATER_S = 1.0  # after a recovery, until its incident is written: a dead worker's last words are read by then
ANSWER_S = (
    0.5  # for the recorder of a worker that is stuck outside of collectives: its stack tells more, and it is awaited
)
SAVED_S = 5.0  # at the daemon's end, for incidents to be on the disk
EARLIER_S = 0.05  # before the first sign: lines of the same moment belong to the story
CARDS_S = 120.0  # between looks at cards that take a program to look at, which costs a second of processor time
PROMPT_S = 1.0  # a look at disks, and at cards without a program, is over by then, and is part of that at the machine
HUNG_S = 30.0  # a disk that has not answered for so long does not
PAUSED_S = 10.0  # how long a node that stood still does not complain that it was not heard
STOPPED_S = 60.0  # how far back the story of a job goes that was stopped for a fault
TRIES = 20  # to find a port that is free for both
ENDED = (Work.PARKED, Work.FAILED)  # whoever says so has written all that it has to say
SIGNS = frozenset({"worker.exited", "worker.stalled", "neighbour.suspected", "agent.lost", "verdict.found"})
GENERATION = re.compile(r"attempt_(\d+)/rank_\d+\.log$")
STUB = "ELASTICRL_PROBE_NCCL"  # stub:FILE, for the NCCL round of a probe where there is no GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this node's things are."""

    node: str
    job: str
    host: str
    runtime: Path
    state: Path  # of all jobs and nodes
    disks: Mapping[str, Path]
    root: Path = Path("/")  # below which the kernel tells of this machine


class Inquiry:
    """One node's."""

    def __init__(self, tree: Tree, place: Place, *, log: Any, history: History) -> None:
        self.post: Callable[[Event], None] = lambda _: None
        self.state: Callable[[], State]
        self.latency: Callable[[], Mapping[str, float]] = dict  # seconds of a round trip to each neighbour
        self.kept: Callable[[Incident], None] = lambda _: None  # told of each incident that was written
        self.tree, self.place, self.log, self._history = tree, place, log, history  # a reload sets another tree
        self._tail = Tail(node=place.node)
        self._ended = asyncio.Event()  # its workers have: their last lines are read at once
        self._report: Report | None = None
        self._stall: tuple[object, ...] | None = None  # which one has been looked at
        self._pids: dict[int, None] = {}  # of workers, the newest last
        self._kernel: kernel_log.Watch | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._plans: dict[int, Plan] = {}
        self._well = (0, 0)  # the two newest generations in which this node's workers have trained
        self._probing = 0
        self._bad: dict[str, Evidence] = {}  # what was not in order when this machine was looked at last, by check
        self._starving: Mapping[str, str] = {}  # what it was short of then, by check
        self._unseen: dict[str, str] = {}  # why cards cannot be asked, by who would tell of them
        self._told: Mapping[str, tuple[health.Check, ...]] = {}  # of disks and GPUs, found last, by who tells of them
        self._asked: dict[str, float] = {}  # since when each of those has not answered
        self._due: dict[str, float] = {}  # when each of those is asked again; never, while it has not answered
        self._amiss = ""  # why this machine could not be looked at last
        self._ways: frozenset[str] = frozenset()  # that NCCL has chosen, as far as it has said so
        self._records: Mapping[str, Record] | None = None  # that were compared last
        self._claimed: set[Evidence] = set()  # versions that differ, as they were named
        self._differ = ""  # what else does, in words
        self._late: tuple[int, frozenset[str]] = (0, frozenset())  # neighbours that are far away, and under which plan
        self._port: Reserved | None = None
        self._env: Mapping[str, str] = {}  # that this node's workers get
        self._written: tuple[int, int, datetime] | None = (
            None  # the newest incident: its gang, what came of it, since when
        )
        self._saving: asyncio.Task[None] | None = None  # the newest incident's file
        self._capped = ""  # what a cap keeps us from, when that was looked at last
        self._led = False  # the job, when that was asked last
        self._known: dossier.Facts = ()  # what the leader knew when that was looked at last
        self._paused_at = -math.inf  # when this process was last seen to have stood still
        self._silent: frozenset[str] = frozenset()  # whom we did not hear, when that last changed

    # ---- beginnings

    def open(self) -> str:
        """Keep a port for probes; where this node is tested."""
        self._port = Reserved(self.place.host, self.tree.node.probe_port)
        if not self._port.held:
            self.log.info("probe.taken", address=self._port.address)
        return self._port.address

    def prepare(self, env: Mapping[str, str]) -> None:
        """Import what the rest of this needs, so that no fault has to wait for it; and look at the environment of workers."""
        from elasticrl.diagnose import amd, fabric, health, incident, kernel_log, scene, transport  # noqa: F401 - see above

        self.lint(env)

    def lint(self, env: Mapping[str, str]) -> None:
        """Say what is wrong with the environment that workers get (`env`), but for what we mean, and what the profile has set
        in it. A probe gets it too: what NCCL does by other settings would prove nothing.
        """
        from elasticrl.diagnose import doctor, environment, health

        self._env = env
        theirs = {**os.environ, **self.tree.agent.env}
        added = environment.PROFILES[self.tree.comm.profile].apply(theirs)
        if added:
            said = [f"{name}={value}" for name, value in sorted(added.items())]
            self.log.info("environment.profile", profile=self.tree.comm.profile, added=said)
        nodes = None if self.tree.node.interface == "lo" else self.tree.membership.max_nodes  # all on this machine
        for check in doctor.linted(self.tree, env, nodes):
            name = check.name.removeprefix("environment.")
            ours = env.get(name) != theirs.get(name) and name not in added
            if check.remedy and check.level in {health.WARN, health.FAIL} and not ours:
                self.log.info("environment.warning", name=name, value=check.value, remedy=check.remedy)

    async def run(self, env: Mapping[str, str]) -> None:
        """Until cancelled. `env`: what workers get."""
        self._env = env
        looking: list[asyncio.Task[None]] = []
        try:
            await self._guarded(asyncio.to_thread(self.prepare, env))
            looking += [
                asyncio.create_task(self._read_logs(), name="logs"),
                asyncio.create_task(self._hear_kernel(), name="kernel"),
                asyncio.create_task(self._sample(), name="health"),
            ]
            await asyncio.gather(*looking)
        finally:
            if self._saving is not None:
                await asyncio.wait({self._saving}, timeout=SAVED_S)
            for task in (*looking, *self._tasks):
                task.cancel()
            await asyncio.gather(*looking, *self._tasks, return_exceptions=True)
            self._tail.close()
            if self._port is not None:
                self._port.close()

    def spawn(self, work: Any, name: str) -> None:
        """Let it find out something beside the loop."""
        self._begin(work, name)

    def _begin(self, work: Any, name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(self._guarded(work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guarded(self, work: Any) -> None:
        try:
            await work
        except Exception:  # an inquiry that fails costs its facts; the word `bug` fails every test run
            self.log.exception("bug", action="inquiry")

    # ---- what workers say

    def heard(self, report: Report | None) -> None:
        """The agent's newest word; None: there is none.

        A log that an agent names first is history: its workers may be old, and adopted. What it names later is read from its
        beginning: a worker may have written why it cannot go on before this is called.
        """
        before, self._report = self._report, report
        seated = report.workers if report else ()
        self._tail.follow({worker.rank: Path(worker.log) for worker in seated}, begin=before is not None)
        if report and report.work in ENDED and (before is None or before.work is not report.work):
            self._ended.set()
        for worker in seated:
            self._pids[worker.pid] = None
        for old in list(self._pids)[:-64]:
            del self._pids[old]
        stall = report.stall if report else None
        which = None if stall is None or report is None else (report.generation, stall.slot, stall.phase, stall.step)
        if which is not None and which != self._stall and report is not None and stall is not None:
            self.spawn(self._look(report, stall, 0), "scene")
        self._stall = which

    async def perform(self, action: Action) -> bool:
        """The core's wish to know where our workers are."""
        if not isinstance(action, LookAt):
            return False
        report = self._report
        if report is not None and report.generation == action.generation:
            await self._look(report, None, action.request)
        else:
            self.post(Found(now=time.monotonic(), scene=action.request))
        return True

    async def _look(self, report: Report, stall: Stall | None, request: int) -> None:
        """Where are all of this node's workers, now that one of theirs or others' has stalled?"""
        from elasticrl.diagnose import scene

        begun, dump_s = time.monotonic(), self.tree.timeouts.dump_s
        generation = report.generation
        found = await asyncio.to_thread(
            scene.collect,
            witness.folder_of(self.place.runtime),
            {worker.rank: worker.pid for worker in report.workers},
            within_s=dump_s,
            recorders_s=min(ANSWER_S, dump_s) if stall is not None and not stall.waiting else dump_s,
            node_of=lambda _: self.place.node,
        )
        facts = tuple(replace(fact, generation=generation) for fact in found.evidence)
        if report.work is Work.JOINING:
            facts = ()  # it was seen on its way from one gang to the next: that belongs to neither
        now = time.monotonic()
        self.post(Found(now=now, evidence=facts, scene=request))
        self.log.info("scene.taken", generation=generation, said=found.said, took_s=round(now - begun, 3))

    async def _look_back(self, report: Report, generation: int, until_ns: int) -> None:
        """Which collectives had those of our workers that live on entered, when their gang of that generation ended?"""
        from elasticrl.diagnose import scene

        facts = await asyncio.to_thread(
            scene.entered, witness.folder_of(self.place.runtime), {worker.rank: worker.pid for worker in report.workers},
            until_ns=until_ns, within_s=self.tree.timeouts.dump_s, node_of=lambda _: self.place.node,
        )  # fmt: skip
        if facts:
            self.post(
                Found(now=time.monotonic(), evidence=tuple(replace(fact, generation=generation) for fact in facts))
            )

    async def _read_logs(self) -> None:
        looked_at, pause_s = time.monotonic(), TAIL_S
        while True:
            now = time.monotonic()
            if now - looked_at > pause_s + self.tree.membership.suspect_s / 2:
                self._paused_at = now
            looked_at = now
            self._time_ways()
            facts = self._tail.look(now, over=self._ended.is_set())
            self._ended.clear()
            self._note_sockets(self._tail.ways)
            if facts:
                self.post(Found(now=time.monotonic(), evidence=tuple(map(of_its_gang, facts))))
            pause_s = TAIL_S if self._tail.files else IDLE_S
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), until_next(pause_s, time.time()))

    def _note_sockets(self, ways: Collection[str]) -> None:
        """NCCL has fallen back to sockets, as its own lines say, where it need not: said once."""
        fresh = frozenset(ways) - self._ways
        self._ways |= fresh
        if not fresh:
            return
        from elasticrl.diagnose import fabric, transport

        if said := transport.sockets(fresh, fabric.active(self.place.root)):
            self.log.info("transport.sockets", said=said, remedy=transport.REMEDY)

    # ---- what the machine says

    async def _hear_kernel(self) -> None:
        """By itself: what hangs the look at cards or disks is what the kernel's log explains."""
        deaf = False
        while True:
            if facts := await apart(self._news):
                self.post(Found(now=time.monotonic(), evidence=facts))
            if self._kernel is not None and self._kernel.deaf != deaf:
                deaf = self._kernel.deaf
                if deaf:
                    self.log.info("kernel.unheard", said=self._kernel.REMEDY)
            await asyncio.sleep(self.tree.health.sample_s)

    def _news(self) -> tuple[Evidence, ...]:
        from elasticrl.diagnose import health, kernel_log

        self._kernel = self._kernel or kernel_log.Watch(self.place.root)  # what was there before us is history
        _, said = health.kernel(self._kernel.read(), "news")
        return tuple(replace(fact, node=self.place.node) for fact in said if self._concerns_us(fact))

    async def _ask_all(self) -> None:
        """Disks and cards that are due, each by itself: where a server or a driver hangs so does what asks it."""
        from elasticrl.diagnose import amd, fabric, health

        root = self.place.root

        def disk(name: str, path: Path) -> tuple[health.Check, ...]:
            return tuple(health.disk(path, name, root=root, write=False))

        await asyncio.gather(
            *(self._ask(name, 0.0, partial(disk, name, path)) for name, path in self.place.disks.items()),
            self._ask("NVML", 0.0, lambda: health.gpus(root)[0]),
            self._ask("amd-smi", CARDS_S, lambda: amd.gpus(root)[0]),
            self._ask("bus", CARDS_S, lambda: tuple(fabric.gone(root))),
        )

    async def _ask(self, whom: str, every_s: float, look: "Callable[[], tuple[health.Check, ...]]") -> None:
        now = time.monotonic()
        if now < self._due.get(whom, -math.inf):
            return
        self._due[whom] = math.inf  # a driver may hang for ever: then one thread waits for it, not one more each time
        self._asked[whom] = now
        try:
            found = await apart(look)
            self._say_unseen(whom, found)
            self._told = {**self._told, whom: found}  # another one, as a thread may be reading the last
        finally:
            del self._asked[whom]
            self._due[whom] = now + every_s

    def _say_unseen(self, whom: str, found: "tuple[health.Check, ...]") -> None:
        """Once, and again where it is something else: cards that cannot be asked look like cards that are well."""
        from elasticrl.diagnose.health import WHY_UNSEEN

        said = "; ".join(f"{check.value}. {check.remedy}" for check in found if check.why.startswith(WHY_UNSEEN))
        if said and said != self._unseen.get(whom):
            self.log.info("cards.unseen", said=said)
        self._unseen[whom] = said

    async def _sample(self) -> None:
        from elasticrl.diagnose import health

        before = health.counters(time.monotonic(), self.place.root)
        while True:
            await asyncio.wait({self._begin(self._ask_all(), "disks and cards")}, timeout=PROMPT_S)
            amiss = ""
            try:
                before, facts, starving = await apart(partial(self._machine, before))
            except OSError as error:
                amiss = str(error)
            else:
                if facts:
                    self.post(Found(now=time.monotonic(), evidence=facts))
                if starving.keys() != self._starving.keys():
                    self.log.info("machine.starved" if starving else "machine.calm", said=short_of(starving))
                self._starving = starving
            if amiss and amiss != self._amiss:
                self.log.info("machine.unseen", said=amiss)
            self._amiss = amiss
            await asyncio.sleep(self.tree.health.sample_s)

    def _machine(self, before: "health.Counters") -> tuple["health.Counters", tuple[Evidence, ...], Mapping[str, str]]:
        from elasticrl.diagnose import health

        after, node = health.counters(time.monotonic(), self.place.root), self.place.node
        checks = health.look(before, after, root=self.place.root)
        asked = {**self._asked}
        hung = {name for name, since in asked.items() if time.monotonic() - since > HUNG_S} & self.place.disks.keys()
        checks += [health.silent(self.place.disks[name], name) for name in sorted(hung)]
        checks += [check for whom, found in self._told.items() if whom not in hung for check in found]
        bad = {fact.detail.partition(":")[0]: fact for fact in health.evidence(checks, node=node)}
        well = [
            replace(fact, sign=Sign.HEALTHY, detail=f"{name}: in order again")
            for name, fact in self._bad.items()
            if name not in bad
        ]
        self._bad = bad
        return after, (*bad.values(), *well), health.starving(checks)

    def _concerns_us(self, fact: Evidence) -> bool:
        """The kernel ends many a process for want of memory; of the others it says whom."""
        if fact.kind is not Kind.OOM_KILLER:
            return True
        from elasticrl.diagnose import kernel_log

        return kernel_log.killed_pid(fact.line) in self._pids

    # ---- the way to others

    def _time_ways(self) -> None:
        """A way that takes long holds all ranks up, and none of them stands still: it is known by the beats' round trips."""
        took = self.latency()
        late = late_ways(took)
        plan = self.state().view.plan if took else None
        if plan is None or plan.phase is not Phase.TRAIN or (plan.generation, late) == self._late:
            return
        before, self._late = self._late, (plan.generation, late)
        if not late and (before[0] != plan.generation or not before[1]):
            return  # else it is taken back
        facts = tuple(
            Evidence(
                kind=Kind.PROBE, sign=Sign.DELAYED if peer in late else Sign.HEALTHY, node=self.place.node, peer=peer,
                detail=f"a round trip takes {1000 * seconds:.0f} ms, elsewhere {1000 * min(took.values()):.1f} ms"
                if peer in late else "", source=dossier.WAYS, generation=plan.generation,
            )
            for peer, seconds in sorted(took.items())
        )  # fmt: skip
        self.post(Found(now=time.monotonic(), evidence=facts))

    def probe(self, action: Probe, unreachable: tuple[str, ...]) -> None:
        """Answer at once who cannot be reached; if all can, test the way to them thoroughly, in a process of its own."""
        deep = bool(action.pairs) and not unreachable and self._port is not None
        ways = tuple(
            Evidence(
                kind=Kind.PROBE, sign=Sign.UNREACHABLE if peer in unreachable else Sign.HEALTHY, node=self.place.node,
                peer=peer, detail="does not answer datagrams" if peer in unreachable else "", source="probe",
                generation=action.generation,
            )
            for peer in sorted(action.targets)
        )  # fmt: skip
        if unreachable:
            self.post(Found(now=time.monotonic(), evidence=ways))
        self.post(Probed(now=time.monotonic(), generation=action.generation, unreachable=unreachable, more=deep))
        if deep and self._probing != action.generation:
            self._probing = action.generation
            self.spawn(self._test(action), "probe")

    @property
    def _on_gpus(self) -> bool:
        """NCCL is what carries this job, or would be."""
        from elasticrl.diagnose.health import NVIDIA

        wanted, device = self.tree.comm.backend, self.tree.node.device
        there = device == "cuda" or (device == "auto" and (self.place.root / NVIDIA).exists())
        return wanted != "gloo" and there

    async def _test(self, action: Probe) -> None:
        """Runs this node's part of a probe in a process of its own, and posts what it said within the time."""
        from elasticrl.diagnose import doctor

        assert self._port is not None
        begun, within_s = time.monotonic(), 0.8 * self.tree.recovery.probe_s
        task = {
            "me": self.place.node, "token": f"{self.place.job}/g{action.generation}", "nodes": dict(action.nodes),
            "rounds": [[list(pair)] for pair in action.pairs], "within_s": within_s,
            "start_s": min(4.0, 0.4 * within_s), "gloo_s": min(4.0, 0.4 * within_s),
            "facts": json.dumps(doctor.versions()), "nccl": os.environ.get(STUB) or ("on" if self._on_gpus else "off"),
        }  # fmt: skip
        self._port.release()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "elasticrl.diagnose.probe", "-",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            env={**inherited(os.environ), **self._env},
        )  # fmt: skip
        said: list[bytes] = []
        self.spawn(self._end(process, within_s + 2.0), "probe's end")
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(task).encode())
        process.stdin.close()
        with suppress(TimeoutError):  # what it has not said by then comes too late
            async with asyncio.timeout(within_s + 1.0):
                while len(said) < len(action.pairs) and (line := await process.stdout.readline()):
                    said.append(line)
        results = tuple(results_of(said))
        self._note_sockets({result.transport for result in results if result.transport})
        now = time.monotonic()
        self.post(Probed(now=now, generation=action.generation, unreachable=(), results=results))
        told = "; ".join(f"{fact.node}-{fact.peer}: {fact.sign.value} ({fact.detail})" for fact in findings(results))
        self.log.info(
            "probe.done", generation=action.generation, pairs=len(results), said=told or "nothing",
            took_s=round(now - begun, 3),
        )  # fmt: skip

    async def _end(self, process: asyncio.subprocess.Process, within_s: float) -> None:
        """A probe that has said all goes on to answer others; not for ever."""
        try:
            async with asyncio.timeout(within_s):
                await process.wait()
        except TimeoutError:
            pass
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            if self._port is not None:
                self._port.keep()

    # ---- what became of it

    def decided(self, event: Event, state: State, done: Done | None) -> None:
        """After each step of the core: which gangs there were, and whether a fault is over."""
        plan = state.view.plan
        if isinstance(event, Suspected | Cleared):
            self._silent = state.suspects
        if plan is not None and plan.generation not in self._plans:
            self._plans[plan.generation] = plan
            for old in sorted(self._plans)[:-16]:
                del self._plans[old]
            self._compare_later(plan)
            self._speak_up(plan, state)
            if plan.phase is Phase.STOP and plan.exit_code == Outcome.CRASH_LOOP.value:
                self._write(state, self._well[0] or plan.generation - 1, plan.generation, ago(STOPPED_S))
        self._correct(state)
        self._note_cap(state)
        self._compare_versions(state)
        training = isinstance(event, Workers) and event.work is Work.TRAINING and event.stall is None
        if training and isinstance(event, Workers) and event.generation > self._well[0]:
            self._well = (event.generation, self._well[0])
        if done is not None:
            newest, before = self._well
            broken = before if done.generation == newest else newest
            self.spawn(self._later(broken, done), "incident")

    def _compare_later(self, plan: Plan) -> None:
        """Where a rank ended as gloo ends who was sent more than it expects, the others' recorders say who differed.

        It is asked for after the fact, so that no recovery waits for it; what is entered after the plan came is left out.
        """
        broken, report = max((number for number in self._plans if number < plan.generation), default=0), self._report
        if dossier.parted(plan) and broken and report is not None:
            self.spawn(self._look_back(report, broken, time.time_ns()), "look back")

    def _compare_versions(self, state: State) -> None:
        """The leader sees what every node runs. Who has another torch or NCCL is named, seated or not; of all else that differs
        an operator is told.
        """
        records, plan = state.view.records, state.view.plan
        if state.lead is None or not records or records is self._records:
            return
        from elasticrl.diagnose import doctor

        self._records = records
        odd = versions.odd(versions.claimed(records))
        fatal = versions.FATAL if self._on_gpus else versions.FATAL - {"nccl"}
        said = versions.sentence(each for each in odd if each.name not in fatal)
        if said and said != self._differ:
            self.log.info("versions.differ", said=said, remedy=versions.REMEDY)
        self._differ = said
        differ = {replace(doctor.evidence(each), source=HEALTH) for each in odd if each.name in fatal}
        facts = sorted(differ - self._claimed, key=str)
        over = sorted(self._claimed - differ, key=str)  # it has come back with the others' torch, or not at all
        self._claimed = differ
        if over:
            well = tuple(replace(fact, sign=Sign.HEALTHY, detail=f"{fact.detail}: no longer") for fact in over)
            self.post(Found(now=time.monotonic(), evidence=well))
        seated = {seat.member.node for seat in plan.seats} if plan else set()
        if facts:
            self.post(Found(now=time.monotonic(), evidence=tuple(facts)))
        for fact in facts:
            if fact.node not in seated:  # else the verdict on the gang says it
                self.log.info("verdict.found", **found(judge([fact])).fields)

    def _speak_up(self, plan: Plan, state: State) -> None:
        """The plan goes on without us, as we are taken for dead: that we read this proves that it is the way to us."""
        before = self._plans.get(max((number for number in self._plans if number < plan.generation), default=0))
        paused = time.monotonic() < self._paused_at + PAUSED_S  # then they were right to hear nothing
        fact = dossier.unheard(state.me, before, plan, self._silent) if before is not None and not paused else None
        if fact is not None:
            self.post(Found(now=time.monotonic(), evidence=(fact,)))

    def _note_cap(self, state: State) -> None:
        """What a cap keeps the leader from doing is an incident, too: no recovery will end by which it would be told."""
        plan, finding = state.view.plan, state.lead.finding if state.lead else None
        capped = finding.capped if finding else ""
        if capped == self._capped or plan is None:
            return
        self._capped = capped
        if capped:
            self.spawn(self._keep_capped(plan.generation, ago(EARLIER_S)), "incident")

    async def _keep_capped(self, generation: int, since: datetime) -> None:
        await asyncio.sleep(LATER_S)
        if self.state().view.generation == generation:  # else the recovery's own incident tells it
            self._write(self.state(), generation, generation + 1, since)

    async def _later(self, broken: int, done: Done) -> None:
        await asyncio.sleep(LATER_S)
        self._write(self.state(), broken, done.generation, ago(done.total_s + LATER_S))

    def _correct(self, state: State) -> None:
        """A node that was taken for dead has come back and says that it had lived: the incident is told anew."""
        led, self._led = self._led, state.lead is not None
        if state.lead is not None and not led:
            self._known = state.lead.facts  # what the leader before has told
        if state.lead is None or self._written is None or state.lead.facts is self._known:
            return
        broken, generation, since = self._written
        fresh = set(map(dossier.identity, state.lead.facts)) - set(map(dossier.identity, self._known))
        self._known = state.lead.facts
        if any(f.sign is Sign.UNHEARD and f.generation == broken and dossier.identity(f) in fresh for f in self._known):
            self._write(state, broken, generation, since)

    def _write(self, state: State, broken: int, generation: int, since: datetime) -> None:
        """The incident that ended the gang `broken` and led to `generation`, if it was one; with all that is known by now."""
        from elasticrl.diagnose import incident

        lines = self._history.since(since)
        if not any(line.get("event") in SIGNS for line in lines):
            return  # a pause, or somebody who left in order
        if self._starving and not any(line.get("event") == "machine.starved" for line in lines):
            at = datetime.now(UTC).isoformat()
            lines.append({"at": at, "event": "machine.starved", "said": short_of(self._starving)})
        plan = self._plans.get(broken)
        nodes = plan.node_of if plan else {}
        known = state.lead.facts if state.lead else state.evidence
        passed = state.lead.passed if state.lead else None
        facts = dossier.concerning(known, range(broken, generation), frozenset(nodes.values()), passed)
        planned = [
            p.verdict for number, p in sorted(self._plans.items()) if broken < number <= generation and p.verdict
        ]
        judged = judge(facts, Facts(world=plan.world if plan else None, nodes=nodes))
        verdict = surest([judged, *reversed(planned)] if state.lead else [*reversed(planned), judged])
        told = incident.build(lines, verdict, facts or verdict.because, job=self.place.job, node=self.place.node)
        if told is None:
            return
        if state.lead and verdict.fault is not Fault.UNKNOWN and planned and verdict.said != planned[-1].said:
            # What came to be known after the plan: by now another gang may have broken.
            self.log.info("verdict.found", generation=broken, **found(verdict).fields)
        self._written, self._known = (broken, generation, since), state.lead.facts if state.lead else ()
        self._saving = self._begin(self._save(told, after=self._saving), "incident's file")

    async def _save(self, told: "Incident", *, after: asyncio.Task[None] | None) -> None:
        """One after the other. A disk may take long, most of all while checkpoints go there, and beats must not wait for it."""
        from elasticrl.diagnose import incident

        if after is not None:
            await asyncio.wait({after})
        folder = incident.folder_of(self.place.state, self.place.job, self.place.node)
        try:
            path = await apart(lambda: incident.save(folder, told))
        except OSError as error:
            self.log.info("incident.lost", id=told.id, error=str(error))
            return
        fault, cause = told.verdict.fault.value, told.verdict.said
        self.log.info("incident.saved", id=told.id, fault=fault, cause=cause, cost_s=told.seconds, path=str(path))
        self.kept(told)


def short_of(starving: Mapping[str, str]) -> str:
    """In words; "" if of nothing."""
    return "; ".join(f"{name} {value}" for name, value in sorted(starving.items()))


def ago(seconds: float) -> datetime:
    """So long ago, and a moment more."""
    return datetime.fromtimestamp(time.time() - seconds - EARLIER_S, UTC)


def of_its_gang(fact: Evidence) -> Evidence:
    """A log's line speaks of the gang whose log it is."""
    named = GENERATION.search(fact.source)
    return replace(fact, generation=int(named[1])) if named else fact


def results_of(said: list[bytes]) -> Iterator[Result]:
    """What a probe's process has printed; a line that is none is passed over."""
    for line in said:
        with suppress(ValueError):
            yield result_of(json.loads(line))


class Reserved:
    """A port, TCP and UDP, that nobody else gets while nobody uses it."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port  # 0: any, until one was taken; others are told of that one
        self._held: list[socket.socket] = []
        self.keep()
        self.address = join(host, self._port)

    @property
    def held(self) -> bool:
        """It is ours."""
        return bool(self._held)

    def keep(self) -> None:
        """Take it (again). If somebody was quicker, probes find this node unreachable over it, which is said there."""
        for _ in range(TRIES):
            number = self._port
            try:
                for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                    number = self._bind(kind, number)
            except OSError:
                self.release()
                continue
            self._port = number  # only now: one that is free for TCP alone would be tried again and again
            return

    def _bind(self, kind: socket.SocketKind, number: int) -> int:
        """The port that it has become: where none was asked for, the kernel chooses."""
        sock = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET, kind)
        self._held.append(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((self._host, number))
        return int(sock.getsockname()[1])

    def release(self) -> None:
        """For who uses it now."""
        for sock in self._held:
            sock.close()
        self._held = []

    close = release
