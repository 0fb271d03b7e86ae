"""Waits that end when a flag is set: for whatever blocks in C++, and for a generation's store.

The one idea: nobody blocks in torch. What may block runs in a thread of its own, or is asked for again and again; between two
looks at a flag, which any thread may set, no more than a moment passes.

Errors: GangError (a RuntimeError) is what ends a wait: Interrupted by our own decision, or Broken by a peer.
"""

from __future__ import annotations

import math
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from torch._C._distributed_c10d import Store, TCPStore

from elasticrl.runtime.traffic import Meter

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

SLICE = timedelta(milliseconds=20)  # the longest that a decision to leave goes unnoticed


class GangError(RuntimeError):
    """A collective of this generation will not complete; the process and its state are fine."""


class Interrupted(GangError):
    """We were told to leave while waiting."""


class Broken(GangError):
    """A peer's connection ended, or the group's timeout passed. What gloo said is in the message."""


class Interrupt:
    """The flag. Any thread may set it; it stays set, since a generation is left only once."""

    def __init__(
        self, on_wait: Callable[[str | None], None] = lambda _doing: None, meter: Meter | None = None,
        on_done: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.meter = meter or Meter()  # of the collectives that this flag may end
        self.reason: str | None = None
        # Told what is waited for once it takes long, and None when it came; by the waiting thread.
        self.on_wait = on_wait
        self.on_done = on_done  # told of each collective that has come, by the thread that waited

    def set(self, reason: str) -> None:
        """The first reason stands."""
        self.reason = self.reason or reason

    def check(self, doing: str) -> None:
        """Raises Interrupted if the flag is set."""
        if self.reason is not None:
            raise Interrupted(f"{doing} was given up: {self.reason}")


def bounded(
    make: Callable[[], T],
    doing: str,
    flag: Interrupt,
    *,
    limit_s: float = math.inf,
    turn: Callable[[], None] | None = None,
) -> T:
    """Runs what may block in C++ in a thread of its own, which is forgotten if we are told to leave before it is done, or it
    takes too long. Meanwhile the caller has a `turn` now and then.
    """
    deadline = time.monotonic() + limit_s
    made: list[T] = []
    failed: list[Exception] = []
    done = threading.Event()

    def run() -> None:
        try:
            made.append(make())
        except Exception as error:  # noqa: BLE001 - raised again, in the thread that asked
            failed.append(error)
        done.set()

    threading.Thread(target=run, name="elasticrl-blocked", daemon=True).start()
    while not done.wait(SLICE.total_seconds()):
        flag.check(doing)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{doing} was not done within {limit_s:g} s")
        if turn is not None:
            turn()
    if failed:
        raise failed[0]
    return made[0]


def reach(host: str, port: int, flag: Interrupt, timeout_s: float) -> Store:
    """A connection to a generation's TCPStore, given up when the flag is set: its host may be what died."""

    def connect() -> Store:
        timeout = timedelta(seconds=timeout_s)
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)

    try:
        return bounded(connect, f"reaching the store at {host}:{port}", flag)
    except GangError:
        raise
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise Broken(f"the store at {host}:{port} could not be reached within {timeout_s:g} s: {error}") from error


class Asking(Store):
    """A store on which no wait blocks: it asks until the key is there, or the flag says to stop asking.

    A TCPStore's own wait holds its one connection for all of its timeout, so a wait for a peer that died would bar the next
    generation from the store. And a second connection is not free: torch resolves the peer's name for each, in the client
    and in the server's only thread, so a name server that does not answer costs everybody 5 seconds.
    """

    def __init__(self, store: Store, flag: Interrupt, limit: timedelta) -> None:
        super().__init__()
        self._store, self._flag, self._limit = store, flag, limit

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Asks until all keys are there; ends early where the flag is set, or the limit is over."""
        deadline = time.monotonic() + min(timeout or self._limit, self._limit).total_seconds()
        pause_s = 0.0005
        while not self._store.check(keys):
            self._flag.check(f"waiting for {keys[0]}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{keys[0]} did not appear in time")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.005)

    def get(self, key: str) -> bytes:
        """Waits for the key, and has its value."""
        self.wait([key])
        return self._store.get(key)

    def set(self, key: str, value: str) -> None:
        """Writes at once: nothing waits for it."""
        self._store.set(key, value)

    def add(self, key: str, value: int) -> int:
        """Adds at once, and has the sum."""
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there now."""
        return self._store.check(keys)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Writes if the value is the expected one, and has the value that is there then."""
        return self._store.compare_set(key, expected_value, desired_value)

    def delete_key(self, key: str) -> bool:
        """Removes at once; False if there was none."""
        return self._store.delete_key(key)
