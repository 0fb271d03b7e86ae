"""Calls that may take long, or for ever, beside the event loop."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def apart(call: Callable[[], T]) -> T:
    """Call it in a thread that nothing waits for but who asked. The default executor's threads are few, and are joined at the
    daemon's end: one that a dead driver or disk holds would hold that up too.
    """
    done = Future[T]()

    def run() -> None:
        done.set_running_or_notify_cancel()  # from here on its result is taken, though nobody may want it any more
        try:
            done.set_result(call())
        except Exception as error:  # noqa: BLE001 - whoever asked gets it
            done.set_exception(error)

    threading.Thread(target=run, name="elasticrl-apart", daemon=True).start()
    return await asyncio.wrap_future(done)
