"""What a node tells of the job's past: how each recovery went, what befell the gang, and who is missing.

The one idea: what the leader tells, those who ask for the status read from the store; whoever knows more than a leader that the
fault has cost its seat tells it later, so nobody tells it twice.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from functools import reduce
from typing import TYPE_CHECKING, Final

from elasticrl.contract.events import Event
from elasticrl.contract.level import Means
from elasticrl.contract.model import Intent, Plan, View
from elasticrl.core.node.state import Decision
from elasticrl.core.step import deputies
from elasticrl.daemon.measures import Measures
from elasticrl.daemon.shared import Desk
from elasticrl.daemon.steps import Line
from elasticrl.status.past import Broken, Past, Roster, Scribe, lasting
from elasticrl.status.recovery import Done, Flow, Stages
from elasticrl.store import Store

if TYPE_CHECKING:
    from elasticrl.diagnose.incident import Incident

LATE_S: Final = 1.0  # after which others tell what the leader has not


class Chronicle:
    """One node's."""

    def __init__(self, name: str, store: Store, desk: Desk, measures: Measures) -> None:
        self._name, self._store, self._desk, self._measures = name, store, desk, measures
        self._stages = Stages()
        self._flow = Flow()
        self._scribe = Scribe()
        self._roster = Roster()
        self._leads = False
        self._broken: Broken | None = None  # what befell this node's gang last, as it knows it
        self._done: Done | None = None  # the newest recovery
        self._told_of = 0  # the generation that the newest incident led to

    def after(self, event: Event, decision: Decision, before: Plan | None, means: Means) -> Done | None:
        """A step of the core; the recovery that it says is over. `before`: the plan until now."""
        state, view, now = decision.state, decision.state.view, time.monotonic()
        leads, was, paused = state.lead is not None, self._stages, view.intent is Intent.PAUSE
        still_s = self._flow.still(event.now, before)
        self._stages, done = was.after(event, view.plan, state.me, paused=paused, still_s=still_s, means=means)
        if done is not None:
            self._measures.recovered(done)
            self._done = done
            if leads:
                now_s = time.time()
                self._change(lambda past: past.over(done, was.plan, now_s))
        if leads and view.plan is not None and view.plan is not before:
            began = now if was.sign_at is None else was.sign_at - was.detect_s
            told = lasting(before, view.plan, was, at=time.time() - (now - began), paused=paused)
            if told:
                self._change(lambda past: reduce(Past.after, told, past))
        return done

    def lead(self, view: View, *, leads: bool) -> None:
        """Whether this node does. Who is missing, those who ask for the status shall read, also when the leader is another."""
        led, self._leads = self._leads, leads
        if leads and not led:  # who led before may have left before he told it
            self._desk.spawn(self._scribe.write(self._store, time.time(), self._broken, anew=False), "past")
        if not leads:
            self._roster.forget()
        elif (moves := self._roster.look(view)) is not None:
            now = time.time()
            self._change(lambda past: past.moved(moves, now))

    def stepped(self, line: Line) -> None:
        """A worker's steps, as they are written down."""
        self._flow = self._flow.after(line.generation, time.monotonic())

    def incident(self, told: "Incident", broke: int, generation: int) -> None:
        """An incident was written, of the gang `broke`, which led to a generation. What the leader tells of it, those who ask
        for the status shall read.
        """
        if generation > self._told_of:  # an incident that is told anew has lost nothing more
            self._told_of = generation
            self._measures.metrics.lost.inc(told.steps or 0)
        done = self._done if self._done and self._done.generation == generation else None
        at = datetime.fromisoformat(told.began).timestamp()
        self._broken = broken = replace(
            Broken.of(told.verdict, at=at, generation=generation, broke=broke),
            seconds=told.seconds, steps=told.steps, rung=done.rung if done else "",
        )  # fmt: skip
        if self._leads:
            self._desk.spawn(self._scribe.write(self._store, time.time(), broken), "past")
        elif (done and done.silence) or self._name in deputies(self._desk.state()):
            # A leader that the fault has cost its seat hears of no recovery; another knows less of what it cost.
            late = self._scribe.write(self._store, time.time(), broken, anew=False, after_s=LATE_S)
            self._desk.spawn(late, "past")

    def _change(self, of: Callable[[Past], Past]) -> None:
        """The past of the job, for those who ask for the status."""
        self._desk.spawn(self._scribe.change(self._store, time.time(), of), "past")
