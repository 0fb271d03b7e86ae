"""What befell a job so far, for whoever asks how it is: since when it runs, how many faults, and the newest of them in words.

The one idea: one key of the store, which the leader writes after each incident (where it does not, a deputy). No decision reads
it, so it may be late, or lost with the store; a leader that comes to office goes on with what the last one wrote.
"""

import asyncio
from dataclasses import replace

from elasticrl.core.value import dataclass
from elasticrl.shell import keys
from elasticrl.store.protocol import Store, StoreError

PAUSES_S = (0.0, 1.0, 5.0, 30.0, 120.0)  # before each attempt to write it down: the store may be what broke


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A fault that is over, or not yet.

    Example: Broken(at=1764000000.0, fault="killed", said="n03: rank 1 died: signal 9 (SIGKILL)", generation=15, seconds=0.21)
    """

    at: float  # by the wall clock
    fault: str  # its class
    said: str
    generation: int  # that it led to
    seconds: float | None = None  # without a sealed step; None: it is not over


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """Of one job. Example: Past(began=1763990000.0, faults=2, last=Broken(...))"""

    began: float  # by the wall clock
    faults: int = 0
    last: Broken | None = None

    def after(self, broken: Broken) -> "Past":
        """With one more; or the newest one told anew, by who knows more of it."""
        newest = self.last.generation if self.last else -1
        if broken.generation < newest:
            return self  # an older one told anew is not the last
        return replace(self, faults=self.faults + (broken.generation > newest), last=broken)


async def read(store: Store) -> Past | None:
    """What was written; None if nothing was, or nothing that can be read."""
    entry = await store.get(keys.PAST)
    try:
        return keys.load(Past, entry.value, entry.key) if entry else None
    except keys.Unreadable:
        return None


class Scribe:
    """The leader's: writes down what comes, one after the other."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()

    async def write(
        self, store: Store, now: float, broken: Broken | None = None, *, anew: bool = True, after_s: float = 0.0
    ) -> None:
        """That the job runs; with `broken`, and what befell it, though it was told already or, without `anew`, only if it was
        not `after_s` later. After some attempts nobody is told.
        """
        await asyncio.sleep(after_s)
        async with self._one:
            for pause in PAUSES_S:
                await asyncio.sleep(pause)  # nothing waits for it
                try:
                    past = await read(store)
                    fresh = past or Past(began=now)
                    if broken and (anew or fresh.last is None or fresh.last.generation < broken.generation):
                        fresh = fresh.after(broken)
                    if fresh != past:
                        await store.put(keys.PAST, keys.dump(fresh))
                except StoreError:
                    continue
                return
