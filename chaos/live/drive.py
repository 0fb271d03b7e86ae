"""Runs scenarios on a job that lives on: each is some faults and the recovery from them, judged by itself.

The one idea: starting a lab costs more than a fault does, so one job takes many scenarios, one after the other. Each begins
when all nodes train, strikes, waits until what it broke is mended, heals the rest, waits until all nodes train again, and then
judges the history from its own beginning. What only the end can show (audit, bits, leftovers) is judged when the job is over.
"""

import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, Self

from chaos import history
from chaos.case import Case, Violation
from chaos.demands import caused
from chaos.faults import ALL, IN_A_REFORM, INSIDE, ITSELF, Fault
from chaos.history import (
    Bug,
    Committed,
    Confined,
    Eased,
    Elected,
    Ended,
    Fact,
    Healed,
    Loaded,
    Missed,
    Planned,
    Proved,
    Struck,
)
from chaos.live import stacks
from chaos.live.box import Box
from chaos.live.checks import judge_live
from chaos.live.errors import BoxError, Late, NotStruck
from chaos.live.eye import Eye
from chaos.live.lab import Lab
from chaos.live.labjob import LabJob, conf_of
from chaos.live.reach import Done
from chaos.live.strikes import Hands
from chaos.patience import patience
from chaos.scenario import Expect, Scenario
from elasticrl.cli.find import left_behind
from elasticrl.contract.model import Phase
from elasticrl.daemon.client import Unanswered
from elasticrl.runtime.checkpoint.manifest import parse_name
from elasticrl.runtime.chronicle import compare
from elasticrl.runtime.chronicle import read as chronicle
from elasticrl.runtime.data.audit import audit
from elasticrl.runtime.vault.errors import DataError

LOOK_S = 0.03
RETRY_S, GIVE_UP_S = (
    0.25,
    60.0,
)  # a fault that cannot act yet waits for its chance; another one may hold the job for long
PLACE_S = 60.0  # for the job to come to a place that shows in the store or on the disk
QUIET_S = 1.0  # of training before a scenario's first fault
START_S = 180.0  # for a job's first steps; a busy machine imports torch slowly
WELL_STEPS = 3
STOP_S = 90.0
LEFT_S = 20.0  # times the load: a vault lingers after its node was drained, a writer waits for the others' shards
IN_FILES = ("saving", "published", "copying")  # places that show in nothing else
SOON_S = 0.002
AHEAD = 5  # steps before the one that it is for, a worker is told of a fault


def load_factor() -> float:
    """How many times longer things may take than on a machine of their own, by the load of the last minute: 2 to 8."""
    return round(min(8.0, max(2.0, 1.0 + os.getloadavg()[0] / (os.cpu_count() or 1))), 1)


@dataclass(slots=True)
class Active:
    """A fault that is in, and when it goes."""

    fault: Fault
    done: Done
    until: float | None


@dataclass(slots=True)
class Waiting:
    """A fault that waits for a place that shows in the store or on the disk."""

    number: int
    fault: Fault
    arrivals: int = 0

    def there(self, place: str, step: int) -> bool:
        """The job has come to a place, at this step: is it the one?"""
        if place != self.fault.place or step < self.fault.step:
            return False
        self.arrivals += 1
        return self.arrivals >= self.fault.nth


@dataclass(frozen=True, slots=True)
class Armed:
    """A fault in a reform, of which the worker that is to wait there has been told."""

    number: int
    fault: Fault
    token: int


@dataclass(slots=True)
class Outcome:
    """What came of one scenario."""

    scenario: Scenario
    violations: list[Violation]
    struck: list[str] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0


class Drive:
    """One job, from its start to its end. Use it as a context: it ends the job, whatever happened."""

    def __init__(self, lab: Lab, shape: Scenario, *, name: str, say: Callable[[str], None] = print) -> None:
        self.lab, self.shape, self.say = lab, shape, say
        settings = shape.shape.settings
        nodes = len(lab.boxes)
        self.job = LabJob(
            lab, name, conf=conf_of(settings, nodes=nodes), load_s=shape.shape.load_s, trainer=shape.shape.trainer,
            slots=shape.shape.slots, team=settings.team,
        )  # fmt: skip
        self.begun = time.monotonic()
        self.eye = Eye(self.job, self.begun)
        self.hands = Hands(self.job, self.eye)
        self.active: dict[int, Active] = {}
        self.number = 0  # of the next fault: they are counted over the whole job
        self.over = False
        self._waiting: list[Waiting] = []
        self._reforms: list[tuple[int, Fault]] = []  # what is to strike in reforms, one after the other
        self._armed: Armed | None = None
        late = sorted(lab.boxes)[nodes - shape.shape.late :] if shape.shape.late else []
        self.hands.off.update(late)

    # ---- the job's life

    def __enter__(self) -> Self:
        self.eye.__enter__()
        try:
            for node in self.lab.boxes:
                if node not in self.hands.off:
                    self.job.start(node)
            self.until(lambda: self.over or self.well(0.0), START_S, "all nodes train for the first time")
            if self.over:
                raise Late(f"the job ended before it trained; {self.lacks()}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(BoxError, OSError):
            self._ease_all()
        self.eye.__exit__()
        self.job.kill_all()

    @property
    def want(self) -> int:
        """How many nodes ought to train when all is well, at least: of those that come some are kept as spares."""
        there = sum(box.on and name not in self.hands.off for name, box in self.lab.boxes.items())
        membership = self.job.tree.membership
        return min(max(there - membership.spares, min(there, membership.min_nodes)), membership.max_nodes)

    def well(self, since: float, steps: int = WELL_STEPS) -> bool:
        """Do all nodes train, with new steps since then?"""
        return self.eye.training(self.want, steps, since)

    def tick(self) -> None:
        """Look, and do what is due."""
        for fact in self.eye.look():
            self._react(fact)
        for name in self.lab.revive():
            self.say(f"  {self.eye.now:7.1f} s  {name} ended of itself and was started again")
        for number in self._due():
            self.ease(number)

    def _due(self) -> list[int]:
        """Whose time is over. A store that is full is emptied by a member that is up: first its other faults end. To take a
        pause back somebody who is up writes to the store: first all of the store's faults end, and who has been told to leave
        for good is back.
        """
        due = [n for n, active in self.active.items() if active.until is not None and self.eye.now >= active.until]
        kinds = {n: active.fault.kind for n, active in self.active.items()}
        if any(ALL[kind].reach == "store" and kind != "store_full" for kind in kinds.values()):
            due = [n for n in due if kinds[n] != "store_full"]
        others = [n for n in due if self.active[n].fault.kind != "pause"]
        if self.over or others == due:
            return due
        if any(ALL[active.fault.kind].reach == "store" for active in self.active.values()):
            return others
        return (
            due if self.hands.askable() else others or [n for n, active in self.active.items() if active.until is None]
        )

    def until(self, claim: Callable[[], bool], within_s: float, what: str) -> None:
        """Wait for something; `Late` says what was seen instead."""
        deadline = time.monotonic() + patience(within_s)
        while not claim():
            if time.monotonic() > deadline:
                raise Late(f"{what}: not within {within_s:.0f} s; {self.lacks()}")
            self.tick()
            time.sleep(LOOK_S)

    def lacks(self) -> str:
        """In what state everything is."""
        plan = self.eye.plan
        said = (
            f"generation {plan.generation} {plan.phase} {[str(s.member) for s in plan.seats]}: {plan.reason}"
            if plan
            else "no plan"
        )
        known = self.eye.sealed.get(plan.generation, {}) if plan else {}
        ended = {node: code for node in self.job.daemons if (code := self.job.ended(node)) is not None}
        works = {n: f"{r.work} g{r.generation}{' warm' if r.warm else ''}" for n, r in sorted(self.eye.members.items())}
        return (
            f"wanted {self.want} nodes; {said}; sealed {known}, the last {self.eye.now - self.eye.sealed_at:.1f} s ago; "
            f"records {works}; quarantined {sorted(self.eye.held)}; daemons ended {ended}"
        )

    # ---- faults

    def put(self, number: int, fault: Fault) -> bool:
        """Put a fault in, if it can act now."""
        at = self.eye.now
        try:
            done = self.hands.strike(fault)
        except NotStruck as missed:
            self.eye.note(Missed(at=self.eye.now, number=number, kind=fault.kind, why=str(missed)))
            return True
        if done is None:
            return False
        self.eye.note(Loaded(at=at, factor=load_factor()))
        self.eye.note(Struck(at=at, number=number, kind=fault.kind, nodes=done.nodes, detail=done.detail))
        self.say(f"  {at:7.1f} s  {fault.kind} {'+'.join(done.nodes) or '-'} {done.detail}")
        if done.undo is not None:
            # What the nemesis leaves in for good, the healing takes out.
            self.active[number] = Active(fault, done, None if fault.for_s is None else self.eye.now + fault.for_s)
        elif done.proof is not None and (why := done.proof()):
            self.eye.note(Missed(at=self.eye.now, number=number, kind=fault.kind, why=why))
        return True

    def ease(self, number: int) -> None:
        """Take a fault out, and demand its proof first."""
        active = self.active.pop(number)
        why = active.done.proof() if active.done.proof else ""
        if why:
            self.eye.note(Missed(at=self.eye.now, number=number, kind=active.fault.kind, why=why))
        if active.done.undo is not None:
            try:
                active.done.undo()
            except NotStruck as missed:  # of what shows only afterwards, such as what a daemon is started with
                self.eye.note(Missed(at=self.eye.now, number=number, kind=active.fault.kind, why=str(missed)))
        self.eye.note(Eased(at=self.eye.now, number=number, kind=active.fault.kind))
        self.say(f"  {self.eye.now:7.1f} s  {active.fault.kind} is over")

    def _ease_all(self) -> None:
        for number in sorted(
            self.active,
            key=lambda n: (ALL[(kind := self.active[n].fault.kind)].reach != "store", kind == "store_full", n),
        ):
            self.ease(number)

    def _react(self, fact: Fact) -> None:
        if isinstance(fact, Planned):
            plan = fact.plan
            what = f"plan {plan.generation} {plan.phase} {len(plan.seats)} seats ({plan.rung.name.lower()})"
            self.say(f"  {fact.at:7.1f} s  {what}: {plan.reason}")
            if plan.phase is Phase.STOP:
                self.over = True
        elif isinstance(fact, Bug):
            self.say(f"  {fact.at:7.1f} s  BUG on {fact.node}: {fact.error[-300:]}")
        step = fact.step if isinstance(fact, Committed) else self.eye.newest
        for waiting in list(self._waiting):
            here = any(waiting.there(place, step) for place in places(fact))
            if here and self.put(waiting.number, waiting.fault):
                self._waiting.remove(waiting)

    # ---- one scenario

    def scenario(self, scenario: Scenario) -> Outcome:
        """Strike, recover, heal, judge."""
        opened, begun = self.eye.now, time.monotonic()
        first, steps = self.number, self.eye.newest
        numbers = {self.number + i: due_in(fault, steps) for i, fault in enumerate(scenario.faults)}
        self.number += len(numbers)
        self._waiting = []
        self.say(f"{scenario.name}: {scenario.about or ', '.join(fault.kind for fault in scenario.faults)}")
        problem = ""
        try:
            self._strike(numbers)
            problem = self._mend(scenario, opened)
        except (Late, BoxError, Unanswered, OSError) as error:
            problem = f"{type(error).__name__}: {error}"
        self._waiting = []
        self.eye.look()
        alive = tuple(n for n, box in self.lab.boxes.items() if box.on and self.job.ended(n) is None)
        seated = tuple(seat.member.node for seat in self.eye.plan.seats) if self.eye.plan else ()
        self.eye.note(
            Ended(at=self.eye.now, alive=alive, seated=seated, want=self.want, lively=not problem, lacks=problem)
        )
        found = judge_live(
            self._as_it_is(scenario), sorted(self.eye.facts, key=lambda fact: fact.at), since=opened, first=first
        )
        struck = [f.kind for f in self.eye.facts if isinstance(f, Struck) and f.number >= first]
        outcome = Outcome(scenario, found, struck, time.monotonic() - begun, self.eye.newest - steps)
        for violation in found[:6]:
            self.say(f"  VIOLATION  {violation}")
        self.say(f"  {'ok' if not found else 'FAILED'}: {outcome.seconds:.1f} s, {outcome.steps} steps")
        return outcome

    def _as_it_is(self, scenario: Scenario) -> Scenario:
        """A scenario with the nodes and settings that the job really has."""
        return replace(scenario, shape=replace(scenario.shape, nodes=len(self.lab.boxes), settings=self.settings))

    @property
    def settings(self) -> Any:
        """What the daemons decide by, as the judge wants to know it."""
        from elasticrl.config import to_core

        return to_core(self.job.tree)

    def _strike(self, numbers: dict[int, Fault]) -> None:
        """Put all in, each at its time or place."""
        start = self.eye.now + QUIET_S
        zero = min((fault.at for fault in numbers.values() if fault.at is not None), default=0.0)
        due: dict[int, float] = {}
        for number, fault in numbers.items():
            if fault.at is not None:
                due[number] = start + fault.at - zero
            elif fault.place in INSIDE:
                due[number] = start
            elif fault.place in IN_A_REFORM:
                self._reforms.append((number, fault))
            else:
                self._waiting.append(Waiting(number, fault))
        tried: dict[int, float] = {}  # since when
        struck_at = start
        while due or self._waiting or self._armed or self._reforms:
            self._arm()
            self.tick()
            if self._in_a_reform():
                struck_at = self.eye.now
            for number in [n for n, at in due.items() if self.eye.now >= at and self._near(numbers[n])]:
                tried.setdefault(number, self.eye.now)
                if self._at_place(number, numbers[number]):
                    del due[number]
                    struck_at = self.eye.now
                else:
                    due[number] = self.eye.now + RETRY_S
            first = bool(due) and struck_at <= start  # still to come: a place is one of what that sets off
            self._look_at_files(-inf if first else min(due.values(), default=inf))
            late = [number for number in due if self.eye.now > tried.get(number, self.eye.now) + GIVE_UP_S]
            late += [n for n, at in due.items() if n not in tried and self.eye.now > max(at, struck_at) + PLACE_S]
            if not due and self.eye.now > struck_at + PLACE_S:
                late += [waiting.number for waiting in self._waiting] + [number for number, _ in self._reforms]
                late += [self._armed.number] if self._armed else []
                self._armed, self._reforms = None, []
            for number in late:
                kind = numbers[number].kind
                self.eye.note(Missed(at=self.eye.now, number=number, kind=kind, why="it never had its chance"))
                due.pop(number, None)
            self._waiting = [waiting for waiting in self._waiting if waiting.number not in late]
            time.sleep(LOOK_S if self._armed is None else SOON_S)

    def _arm(self) -> None:
        """A reform is quick: whoever is to wait in it, a process that may only just have begun, is told beforehand."""
        node = self.hands.whom(self._reforms[0][1].node) if self._reforms and self._armed is None else ""
        if not node:
            return
        number, fault = self._reforms.pop(0)
        self.hands.tokens += 1
        what = {"place": fault.place, "step": fault.step, "slot": self.job.slot(fault.slot)}
        self.job.order(node, do="wait", token=self.hands.tokens, **what)
        self._armed = Armed(number, replace(fault, node=node), self.hands.tokens)

    def _in_a_reform(self) -> bool:
        """Strike whoever waits there; the next one is told first, as this blow begins the next reform."""
        armed = self._armed
        if armed is None or armed.token not in self.eye.here:
            return False
        self._armed = None
        self._arm()
        if not self.put(armed.number, armed.fault):
            self.eye.note(
                Missed(
                    at=self.eye.now, number=armed.number, kind=armed.fault.kind, why="it could not act in the reform"
                )
            )
        (self.job.history / f"{armed.fault.node}.go.{armed.token}").touch()
        return True

    def _near(self, fault: Fault) -> bool:
        """Is its step at hand, if it is for one?"""
        return fault.place not in INSIDE or self.eye.newest + AHEAD >= fault.step

    def _at_place(self, number: int, fault: Fault) -> bool:
        """A place in the job: the worker that is there waits for the blow, or deals it to itself."""
        if not fault.when or fault.kind in ITSELF:
            return self.put(number, fault)
        node, slot = self.hands.whom(fault.node), self.job.slot(fault.slot)
        if not node or not self.job.worker(node, slot):
            return False
        self.hands.tokens += 1
        token = self.hands.tokens
        path = self.job.order(node, do="wait", place=fault.place, step=fault.step, token=token, slot=slot)
        deadline = time.monotonic() + 6.0
        while token not in self.eye.here:
            if time.monotonic() > deadline:
                path.unlink(missing_ok=True)
                return False
            self.tick()
            time.sleep(0.002)
        try:
            return self.put(number, replace(fault, node=node))
        finally:
            (self.job.history / f"{node}.go.{token}").touch()

    def _look_at_files(self, due: float) -> None:
        """Places that show in files alone, for milliseconds: they are looked for without a pause until another is due."""
        waiting = [waiting for waiting in self._waiting if waiting.fault.place in IN_FILES]
        before = {waiting.number: self._files(waiting.fault) for waiting in waiting}
        deadline = time.monotonic() + min(15.0, due - self.eye.now)
        come = False
        while waiting and not come and time.monotonic() < deadline:
            for entry in waiting:
                fresh = self._files(entry.fault) - before[entry.number]
                come = come or bool(fresh)
                step = max(map(step_of, fresh), default=0) or self.eye.newest
                if fresh and entry.there(entry.fault.place, step) and self.put(entry.number, entry.fault):
                    self._waiting.remove(entry)
            time.sleep(0.001)

    def _files(self, fault: Fault) -> set[Path]:
        """In which a fault's place shows, when there is one more."""
        if fault.place == "copying":
            return self.job.copying(self.hands.whom(fault.node))
        there = self.job.saves.iterdir() if self.job.saves.is_dir() else ()
        saves = {path for path in there if step_of(path)}
        published = {path for path in saves if parse_name(path.name)}
        # When one is published, its folder has another name, of the same step.
        return published if fault.place == "published" else {self.job.saves / f"step-{step_of(path)}" for path in saves}

    def _mend(self, scenario: Scenario, opened: float) -> str:
        """Wait out what is in, heal the rest, and wait until all is well; what is lacking, if anything."""
        timed = max((a.until for a in self.active.values() if a.until is not None), default=self.eye.now)
        grace = 3.0 if any(a.until is None for a in self.active.values()) else 0.0
        while self.eye.now < timed + grace or any(a.until is not None for a in self.active.values()):
            self.tick()
            time.sleep(LOOK_S)
        if self.active:  # what lasts for good: a member that is heard is waited for for three leases without one
            self._wait_for_answer(scenario, opened, 6)
        if wanted_end(scenario):  # before that nothing is healed: what ends the job may take several attempts
            self.until(lambda: self.over, scenario.liveness_s, "the job is over")
        going = "some gang trains on, or the job is over"
        self.until(lambda: self.over or self._going_on(), 20.0 * load_factor(), going)
        self._ease_all()
        for node in [*self.hands.off] if not self.over else []:
            if node in self.job.daemons:  # one that came late on purpose stays away
                self.hands.off.discard(node)
                self.job.start(node)
        for path in self.job.history.glob("*.order"):
            path.unlink(missing_ok=True)
        healed = self.eye.now
        self.eye.note(Healed(at=healed))
        if self.over:
            self.until(lambda: all(p.poll() is not None for p in self.job.daemons.values()), STOP_S, "all daemons end")
            return self._unasked(scenario)
        self.until(self._daemons_back, 30.0 * load_factor(), "all daemons answer")
        self.until(lambda: self.over or self.well(healed), scenario.liveness_s * load_factor(), "all nodes train again")
        # Workers whose plan nobody knows train on for two leases before something comes of it.
        self._wait_for_answer(scenario, opened, 3)
        return self._unasked(scenario)

    def _wait_for_answer(self, scenario: Scenario, opened: float, leases: int) -> None:
        late = self.eye.now + leases * self.settings.membership.lease_ttl_s
        while not (self.over or self._answered(scenario, opened) or self.eye.now > late):
            self.tick()
            time.sleep(LOOK_S)

    def _answered(self, scenario: Scenario, opened: float) -> bool:
        """Has what the scenario expects come of it?"""
        told: list[Fact] = [
            fact for fact in self.eye.facts if fact.at >= opened and isinstance(fact, Planned | Confined | Healed)
        ]
        return not scenario.expect.caused or (bool(told) and not any(caused(Case(scenario, told))))

    def _unasked(self, scenario: Scenario) -> str:
        """A program that fails by its own doing as often as the limit says is stopped; else somebody has to have asked."""
        own = sum(fault.kind in ITSELF for fault in scenario.faults)
        if not self.over or wanted_end(scenario) or own >= self.settings.recovery.no_progress_limit:
            return ""
        return "the job is over, though nobody asked for that"

    def _going_on(self) -> bool:
        """Is there anything to wait for before healing? Faults that last for good may need to be healed first."""
        if any(a.until is None for a in self.active.values()):
            return True
        return (
            self.eye.now - self.eye.sealed_at < 2.0 or self.eye.plan is None or self.eye.plan.phase is not Phase.TRAIN
        )

    def _daemons_back(self) -> bool:
        """A daemon that ended of itself with a failure is started again, as systemd does; a clean leave is not."""
        ok = True
        for node, process in list(self.job.daemons.items()):
            if process.poll() is not None and self.lab.boxes[node].on and not self.over:
                self.say(
                    f"  {self.eye.now:7.1f} s  the daemon of {node} had ended with {process.returncode}; started again"
                )
                self.job.start(node)
                ok = False
            elif self.lab.boxes[node].on and node not in self.hands.off:
                ok = ok and not left_behind(self.job.control(node))
        return ok

    # ---- the end

    @property
    def _code(self) -> int | None:
        """With which all daemons are to end."""
        return self.eye.plan.exit_code if self.eye.plan else None

    def finish(self) -> list[Violation]:
        """Stop the job, and judge what only the end can show."""
        opened, asked = self.eye.now, not self.over
        self._ease_all()
        try:
            if not self.over and self.hands.strike(Fault(kind="stop", at=0.0)) is None:
                raise Late("no daemon takes the order to stop")
            self.until(lambda: all(p.poll() is not None for p in self.job.daemons.values()), STOP_S, "all daemons end")
            ended = {node: process for node, process in self.job.daemons.items() if node not in self.hands.dark}
            codes = {node: process.returncode for node, process in ended.items()}
            self.eye.note(
                Proved(at=self.eye.now, what="exit codes", ok=set(codes.values()) == {self._code}, sentence=str(codes))
            )
            if asked:  # what ends of itself, or by a fault, need not have been well
                self.eye.look()
                last = max(
                    self.eye.sealed.get(max(self.eye.sealed, default=0), {}).values(), default=0
                )  # of the last gang
                said = f"step {self.eye.commit} is committed, {last} was sealed"
                self._prove("last save", ok=self.eye.commit >= last, sentence=said)
            self._proofs()
        except (Late, BoxError, DataError, RuntimeError, OSError) as error:
            self.eye.note(
                Proved(at=self.eye.now, what="the end", ok=False, sentence=f"{type(error).__name__}: {error}")
            )
        self.eye.look()
        mine = self._as_it_is(replace(self.shape, faults=(), expect=Expect()))  # its own faults have been judged
        found = judge_live(mine, sorted(self.eye.facts, key=lambda fact: fact.at), since=opened, first=self.number)
        for violation in found[:6]:
            self.say(f"  VIOLATION  {violation}")
        return found

    def _proofs(self) -> None:
        """Each by itself: what is wrong with one says nothing of the others."""
        with suppress(Late):
            within_s = LEFT_S * load_factor()
            self.until(lambda: not any(self.job.processes().values()), within_s, "no process is left")
        left = [f"{node}: {line}" for node, lines in self.job.processes().items() for line in lines]
        self._prove("processes", ok=not left, sentence="; ".join(left[:8]) or "none is left")
        used = audit(self.job.saves)
        self._prove("audit", ok=used.ok, sentence=used.sentence)
        ours = chronicle(self.job.saves)
        same = compare(chronicle(self.job.alone(max(ours.steps) + 1)), ours)
        self._prove("bits", ok=same.ok and ours.ok, sentence=f"{same.sentence}; {ours.sentence}")
        files = [
            f"{name}:{path}"
            for name, box in self.lab.boxes.items()
            for path in left_files(box, self.job.name)
            if box.on
        ]
        self._prove("files", ok=not files, sentence=", ".join(files[:8]) or "no socket or shared memory is left")
        ttl = self.job.tree.membership.lease_ttl_s
        with suppress(Late):
            self.until(lambda: not self.eye.members and not self.eye.leader, 3 * ttl, "no key of a member is left")
        keys = [*self.eye.members, *([f"leader {self.eye.leader}"] if self.eye.leader else [])]
        self._prove("keys", ok=not keys, sentence=f"left in the store: {keys}" if keys else "no leased key is left")

    def _prove(self, what: str, *, ok: bool, sentence: str) -> None:
        self.eye.note(Proved(at=self.eye.now, what=what, ok=ok, sentence=sentence))
        self.say(f"  {what}: {sentence}")

    def keep(self, folder: Path, again: str) -> None:
        """Everything that somebody needs who wants to know what happened."""
        folder.mkdir(parents=True, exist_ok=True)
        stacks.keep(self.job, folder / "stacks")  # first: they are of this moment
        history.write(sorted(self.eye.facts, key=lambda fact: fact.at), folder / "history.jsonl")
        (folder / "again").write_text(again + "\n", encoding="utf-8")
        shutil.copytree(
            self.job.folder, folder / "job", dirs_exist_ok=True, ignore=shutil.ignore_patterns("alone", "*.sock")
        )
        for log in self.lab.folder.glob("*.log"):
            shutil.copy(log, folder)
        (folder / "state").write_text(self.lacks() + "\n" + str(self.job.processes()), encoding="utf-8")


def left_files(box: Box, job: str) -> list[str]:
    """Sockets of the daemons, and whatever lies in shared memory."""
    found: list[str] = []
    for folder in (f"/dev/shm/elasticrl/{job}", f"/run/elasticrl/{job}"):
        top = box.path(folder)
        every = top.rglob("*") if top.is_dir() else ()
        mine = [path for path in every if path.is_socket() or ("shm" in folder and path.is_file())]
        found += [f"{folder}/{path.relative_to(top)}" for path in mine]
    return found


def wanted_end(scenario: Scenario) -> bool:
    """Does it ask for the end of the job?"""
    return scenario.expect.exit_code is not None or any(f.kind in ("stop", "crash_loop") for f in scenario.faults)


def due_in(fault: Fault, made: int) -> Fault:
    """A fault with the step that it is for, in a job that had made so many before the scenario.

    A place in a step comes once in each: the nth is that of the nth step from now.

    >>> due_in(Fault(kind="kill_worker", when="before apply", nth=10), 480).when
    'before apply step 490'
    """
    inside = fault.place in INSIDE
    if not fault.when or not (fault.step or (inside and fault.nth > 1)):
        return fault
    step = made + fault.step + (fault.nth if inside and fault.nth > 1 else 0)
    return replace(fault, when=f"{fault.place} step {step}", nth=1 if inside else fault.nth)


def places(fact: Fact) -> tuple[str, ...]:
    """The places that the job has come to, by what shows in the store."""
    if isinstance(fact, Planned):
        return {Phase.TRAIN: ("reform", "forming"), Phase.PROBE: ("probing",), Phase.HOLD: ("held",)}.get(
            fact.plan.phase, ()
        )
    if isinstance(fact, Elected):
        return ("elected",)
    return ("committing",) if isinstance(fact, Committed) else ()


def step_of(save: Path) -> int:
    """The step of a checkpoint's folder, whole or not; 0 if its name says none."""
    found = re.search(r"step-(\d+)", save.name)
    return int(found[1]) if found else 0


def terminal(text: str) -> None:
    """For people who watch."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


__all__ = ["ALL", "Drive", "Outcome", "load_factor", "terminal", "wanted_end"]
