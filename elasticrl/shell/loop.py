"""The one loop: an event in, `core.step`, its actions out. All of a node's life passes through `Loop.run`.

The one idea: the loop waits for the next event or the time that the core asked to be woken at, and never for an action:
those run beside it, each with its own deadline, one at a time for each subject. What one of them achieves comes back as
an event; what it fails to do, the core decides again.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from math import inf
from typing import Protocol

from elasticrl.contract.events import Action, Event, Leave, Publish, Say, Seen, Tick
from elasticrl.core.node.state import Decision, State
from elasticrl.core.step import step, subject
from elasticrl.shell.trace import Trace
from elasticrl.store.protocol import StoreError

Perform = Callable[[Action], Awaitable[bool]]


class Log(Protocol):
    """What the loop needs of a logger; structlog's are such."""

    def info(self, event: str, **fields: object) -> object:
        """Something worth knowing."""

    def warning(self, event: str, **fields: object) -> object:
        """Something worth a look."""

    def exception(self, event: str, **fields: object) -> object:
        """Something that must not happen, with the present exception's trace."""


def nobody(*_: object) -> None:
    """Is told."""


class Loop:
    """One node's core at work."""

    def __init__(
        self, state: State, performers: tuple[Perform, ...], *, log: Log, trace: Trace | None = None,
        decided: Callable[[Event, Decision], None] = nobody,
    ) -> None:  # fmt: skip
        """`decided`: told after every step."""
        self.state = state
        self._decided = decided
        self._performers = performers
        self._log = log
        self._trace = trace
        self._events: deque[Event] = deque()
        self._something = asyncio.Event()
        self._running: dict[Hashable, asyncio.Task[None]] = {}
        self._newer: Publish | None = None  # the newest record, decided while an older one was being written
        self._left: Leave | None = None

    def post(self, event: Event) -> None:
        """Something has happened. Call it from the loop's own thread."""
        if isinstance(event, Seen) and self._events and isinstance(self._events[-1], Seen):
            self._events[-1] = event  # only the newest picture matters, and a big cluster paints many
        else:
            self._events.append(event)
        self._something.set()

    async def run(self) -> Leave:
        """Until the core decides to leave; returns that decision. Cancel it to stop without leaving."""
        wake_at = -inf
        try:
            while self._left is None:
                event = await self._next(wake_at)
                before, decision = self.state, step(self.state, event)
                self.state, wake_at = decision.state, decision.wake_at
                if self._trace is not None:
                    self._trace.write(before, event, decision.actions)
                for action in decision.actions:
                    self._start(action)
                self._decided(event, decision)
        finally:
            self._newer = None
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)
        return self._left

    async def _next(self, wake_at: float) -> Event:
        """The oldest event; or a tick, if it is time and nothing has happened."""
        while not self._events:
            self._something.clear()
            left_s = wake_at - time.monotonic()
            if left_s <= 0:
                return Tick(now=time.monotonic())
            try:
                async with asyncio.timeout(None if left_s == inf else left_s):
                    await self._something.wait()
            except TimeoutError:
                pass  # the wake-up time has come, or an event just now: look again
        return self._events.popleft()

    def _start(self, action: Action) -> None:
        match action:
            case Say(event=event, fields=fields):
                self._log.info(event, **fields)
            case Leave():
                self._left = action
            case _:
                about = subject(action)
                running = self._running.get(about)
                if running is not None and not running.done():
                    # Its answer is still awaited; the core asks again if it comes to nothing. But a record that changes
                    # before it is written would come a whole `retry_s` late, and with it a neighbour's second suspicion.
                    if isinstance(action, Publish):
                        self._newer = action
                    return
                task = asyncio.create_task(self._perform(action), name=f"{about}")
                self._running[about] = task
                task.add_done_callback(lambda ended: self._ended(about, action, ended))

    def _ended(self, about: Hashable, action: Action, task: asyncio.Task[None]) -> None:
        if self._running.get(about) is task:  # else its answer came first, and with it the next of its kind
            del self._running[about]
        if isinstance(action, Publish):
            newer, self._newer = self._newer, None
            if newer is not None and newer != action:
                self._start(newer)

    async def _perform(self, action: Action) -> None:
        try:
            for perform in self._performers:
                if await perform(action):
                    return
            raise AssertionError(f"nobody performs {action!r}")
        except StoreError as error:
            self._log.warning("store.failed", action=type(action).__name__, error=str(error))
        except Exception:  # noqa: BLE001 - the loop must outlive a bug in one action; the word `bug` fails every test run
            self._log.exception("bug", action=type(action).__name__)
