"""What goes on at once in the agent's loop: its tasks, and what waits for something to be so.

The one idea: nothing is asked again by the clock. Whoever changes something pokes, and then all that waits looks whether what
it waits for is so.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from elasticrl.base.ticks import until_next

log = logging.getLogger(__name__)


class Turns:
    """One agent's, to be used in its loop."""

    def __init__(self) -> None:
        self.over = asyncio.Event()  # the agent ends
        self._changed = asyncio.Event()  # there is something to look at
        self._stirred = asyncio.Event()  # replaced at each change: what `until` waits for
        self._tasks: set[asyncio.Task[None]] = set()

    def poke(self) -> None:
        """Look at once."""
        self._changed.set()
        stirred, self._stirred = self._stirred, asyncio.Event()
        stirred.set()

    def looks(self) -> None:
        """What has changed until now is looked at."""
        self._changed.clear()

    async def pause(self, look_s: float) -> None:
        """Until there is something to look at, or so many seconds have passed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(until_next(look_s, time.time())):
                await self._changed.wait()

    async def until(self, true: Callable[[], bool], within_s: float) -> bool:
        """Wait for this to hold; False if it does not in time."""
        deadline = time.monotonic() + within_s
        while not true():
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._stirred.wait()
            except TimeoutError:
                return true()
        return True

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it beside everything else."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    async def end(self) -> None:
        """Give up what is not done."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("bug", exc_info=error)
