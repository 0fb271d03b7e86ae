"""What runs beside a daemon's loop: beats, the crew, the vault, and whatever else ends with it.

The one idea: nobody waits for it. If it dies that is said at once, as the bug that it is, and the daemon goes on without it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def background(work: Any, name: str, log: Any) -> AsyncIterator[asyncio.Task[None]]:
    """Run something beside the rest until the end of the block. What ends it before is a bug: the daemon goes on without it."""
    task: asyncio.Task[None] = asyncio.create_task(work, name=name)
    task.add_done_callback(lambda ended: say_why(ended, log))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def say_why(ended: asyncio.Task[None], log: Any) -> None:
    """If it was an exception."""
    if not ended.cancelled() and (error := ended.exception()) is not None:
        log.error("bug", action=ended.get_name(), exc_info=error)
