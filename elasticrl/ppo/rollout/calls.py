"""Asking environments: many at once, each call with a deadline, again where something between us and the answer failed.

The idea: a call ends with a reply, or with nothing at all. Trouble on the way (`environments.is_trouble`) is never a reward. A
reply is on the tape before anyone sees it. A call that was under way as the gang was cut short stays under way: whoever asks
the same again waits for it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from elasticrl.base.words import count
from elasticrl.ppo.environments import (
    Environment,
    EnvironmentFault,
    Message,
    Reply,
    Task,
    checked,
    is_trouble,
    observed,
)
from elasticrl.ppo.rewards import outcomes
from elasticrl.ppo.rollout.tape import Tape, Taped, key_of, plain, taped_of

_T = TypeVar("_T")
PAUSE_S = (0.1, 5.0)  # before the second try, and at most
RESET = -1  # the turn before the first


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One message to one environment, or its reset. `past` tells the messages before it, `heard` all tokens, observations and
    all: where an engine's text may be another after a fault, a reply is to all that was said before it.

    Example: Call(lane=0, task=Task(...), turn=0, message=Message(...), state=None)
    """

    lane: int
    task: Task
    turn: int
    message: Message | None = None
    past: Callable[[], Sequence[Message]] = tuple
    state: str | None = None  # what the environment saved of itself after the turn before
    heard: tuple[int, ...] = ()

    @property
    def whole(self) -> tuple[int, ...]:
        """All tokens up to its end."""
        return (*self.heard, *(self.message.tokens if self.message else ()))

    @property
    def key(self) -> str:
        """Its name on the tape."""
        return key_of(self.task.id, self.turn, self.whole)

    def follows(self, before: Call) -> bool:
        """Whether that one is the call before it, in the very same episode."""
        return before.turn == self.turn - 1 and self.heard[: len(before.whole)] == before.whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a call came to, and how often there was trouble. `taped` is None if there is no answer: the sample is lost."""

    taped: Taped | None
    troubles: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long and how often. Example: Patience(timeout_s=30.0, retries=3, at_once=16, holds=False, deadline_s=300.0)"""

    timeout_s: float  # of one try
    retries: int  # tries after the first, before the sample is lost
    at_once: int
    holds: bool  # a sample is never lost: it is tried until the deadline, and then the worker fails
    deadline_s: float
    key: str = "timeouts.phase.rollout"  # which says so
    may_lose: float = 1.0  # the share of a step's samples


class Desk:
    """All environments of a worker. `make` makes one, `name` is what errors call it."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Environment],
        patience: Patience,
        tape: Tape,
        *,
        check: Callable[[], None] = lambda: None,
        waits: Callable[[], None] = lambda: None,
        alone: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.name, self.make, self.patience, self.tape = name, make, patience, tape
        self.check, self.waits, self.alone = check, waits, alone
        self._step = -1
        self._live: dict[str, tuple[Call, Environment]] = {}  # by sample: the last call that it has answered
        self._flights: dict[str, Future[Outcome]] = {}
        self._lock = threading.Lock()

    def ask(self, calls: Sequence[Call]) -> list[Outcome]:
        """What they come to, in order. Raises what cuts the step short, or EnvironmentFault."""
        ends = time.monotonic() + self.patience.deadline_s
        found: list[Future[Outcome]] = []
        todo: list[tuple[Call, Future[Outcome]]] = []
        with self._lock:
            for call in calls:
                future = self._flights.get(call.key)
                if future is None:
                    future = Future()
                    taped = self.tape.find(call.lane, call.key)
                    if taped is not None:
                        future.set_result(Outcome(taped=taped))
                    else:
                        todo.append((call, future))
                found.append(future)
        gone = threading.Event()
        queue = iter(todo)
        for _ in range(min(self.patience.at_once, len(todo))):
            threading.Thread(target=self._work, args=(queue, ends, gone), name="environment", daemon=True).start()
        try:
            with self.alone():
                return outcomes(found, check=self.check, waits=self.waits)
        finally:
            gone.set()

    def begin(self, step: int) -> None:
        """A step's episodes come now, or go on."""
        if step != self._step:
            self.forget()
        self._step = step
        self.tape.begin(step)

    def forget(self) -> None:
        """The step's episodes are over. Nobody waits for what takes its time to close."""
        with self._lock:
            over = [environment for _, environment in self._live.values()]
            self._live = {}
        if over:
            threading.Thread(target=lambda: list(map(close, over)), name="environment", daemon=True).start()

    def _work(self, queue: Any, ends: float, gone: threading.Event) -> None:
        while not gone.is_set():
            with self._lock:
                call, future = next(queue, (None, None))
                if call is None or future is None:
                    return
                self._flights[call.key] = future
            try:
                outcome = self._answer(call, ends)
                if outcome.taped is not None:
                    with self._lock:
                        self.tape.add(call.lane, call.key, outcome.taped)
                future.set_result(outcome)
            except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
                future.set_exception(error)
                gone.set()  # the rest is asked in vain
            finally:
                with self._lock:  # whoever asks again finds it under way, or on the tape
                    self._flights.pop(call.key, None)

    def _answer(self, call: Call, ends: float) -> Outcome:
        """Again and again, as long as patience lasts."""
        patience, chance = self.patience, random.Random()
        troubles, pause_s = 0, PAUSE_S[0]
        while True:
            try:
                environment = self._ready(call, ends)
                # Its own: by the time of a late answer `environment` is that of a later try.
                late = partial(_closed, environment)
                taped = within(partial(self._once, call, environment), patience.timeout_s, late=late)
            except _Failed as trouble:
                last = trouble
            else:
                with self._lock:  # not in `_once`, which may come to an end when nobody waits for it any more
                    self._live[call.task.id] = (call, environment)
                return Outcome(taped=taped, troubles=troubles)
            troubles += 1
            if patience.holds and time.monotonic() > ends:
                raise EnvironmentFault(
                    f"{self.name} did not answer sample {call.task.id} ({count(troubles, 'attempt')} in "
                    f"{patience.deadline_s:g} s): {last}; see that it runs, raise environment.timeout or "
                    f"{patience.key}, or set environment.trouble: mask"
                ) from last
            if not patience.holds and troubles > patience.retries:
                return Outcome(taped=None, troubles=troubles)
            time.sleep(chance.uniform(0.0, pause_s))
            pause_s = min(2 * pause_s, PAUSE_S[1])

    def _ready(self, call: Call, ends: float) -> Environment:
        """The environment, where this call finds it: the living one, or a fresh one that was told all before. That may be many
        calls, each of which may take its time, up to what is left until `ends`.
        """
        with self._lock:
            before, environment = self._live.pop(call.task.id, (call, None))
        if environment is not None and call.follows(before):
            return environment
        timeout_s = self.patience.timeout_s
        if environment is not None:
            with suppress(_Failed):  # that it does not close is no trouble of the call
                within(partial(close, environment), timeout_s, late=lambda _: None)
        calls = 1 if call.turn == RESET or call.state is not None else 1 + len(call.past())
        left_s = max(ends - time.monotonic(), timeout_s)
        return within(partial(self._again, call), min(calls * timeout_s, left_s), late=close)

    def _again(self, call: Call) -> Environment:
        """A fresh one, brought to where this call finds it."""
        with self._judged(call, self.make):
            environment = self.make()
        with self._judged(call, environment):
            if call.turn == RESET:
                pass
            elif call.state is not None:
                environment.load(call.state)  # type: ignore[attr-defined] # what saves can load
            else:
                environment.reset(call.task)
                for message in call.past():
                    environment.step(message)
        return environment

    def _once(self, call: Call, environment: Environment) -> Taped:
        who = self._who(call)
        with self._judged(call, environment):
            if call.message is None:
                reply = Reply(observation=observed(who, environment.reset(call.task)))
            else:
                reply = checked(who, environment.step(call.message), call.message)
            # As it comes from a tape, or from another member of a team, so that all make the same of it.
            return taped_of(
                plain(Taped(reply=reply, state=environment.save() if hasattr(environment, "save") else None))
            )

    @contextmanager
    def _judged(self, call: Call, environment: object) -> Iterator[None]:
        """What fails inside is trouble, or the environment's own fault. It is closed then: nobody knows what it has heard."""
        try:
            yield
        except EnvironmentFault:
            raise
        except Exception as error:
            if environment is not self.make:
                close(environment)
            if is_trouble(error, tuple(getattr(environment, "troubles", ()))):
                raise _Failed(f"{type(error).__name__}: {error}") from error
            raise EnvironmentFault(f"{self._who(call)} failed: {error!r}") from error

    def _who(self, call: Call) -> str:
        return f"{self.name}, asked in turn {call.turn} of sample {call.task.id},"


class _Failed(Exception):
    """Of one try: what it was."""


def close(environment: object) -> None:
    """If it can be; what comes of it changes nothing."""
    with suppress(Exception):
        getattr(environment, "close", lambda: None)()


def _closed(environment: object, _answer: object) -> None:
    close(environment)


def within(work: Callable[[], _T], timeout_s: float, *, late: Callable[[_T], None]) -> _T:
    """What `work` returns or raises; _Failed if it takes longer. Nobody waits for it any more then, and what it returns
    after all is given to `late`.
    """
    future: Future[_T] = Future()

    def run() -> None:
        try:
            found = work()
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            future.set_exception(error)
        else:
            future.set_result(found)

    threading.Thread(target=run, name="environment call", daemon=True).start()
    if not wait([future], timeout_s).done:
        future.add_done_callback(lambda it: None if it.exception() else late(it.result()))
        raise _Failed(f"no answer within {timeout_s:g} s")
    return future.result()
