"""Where the ranks of a generation meet before they form its group: nobody tries to connect to who is not there yet.

The one idea: a program may load its model for minutes before it asks for its rank. So each rank counts itself in the
generation's store when it comes, and the group is formed when all have. Who has something better to do meanwhile does that: a
gang that is to grow trains on until the newcomers are there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torch._C._distributed_c10d import Store

from elasticrl.runtime.interrupt import Broken, GangError, Interrupt, bounded

BRIEF_S, LONG_S = 0.0005, 0.05  # between two looks: a twentieth of what has been waited, within these
EACH_S = 1e-4  # for each rank: all of them ask one store


class Meeting:
    """One generation's. A key in its store is the number of ranks that have come; another says that these are all.

    A store asks its host and waits without a limit, so each wait asks in a thread of its own, which is forgotten with it.
    """

    def __init__(self, store: Store, *, generation: int, world: int) -> None:
        self._store, self._generation, self._world = store, generation, world
        self._here, self._all = f"g{generation}/here", f"g{generation}/all"
        self.count = 0  # so many have come, as it was seen last

    def wait_for_all(self, flag: Interrupt, within_s: float, turn: Callable[[], None]) -> None:
        """This rank is here: once for each. Until all are, with a `turn` of the caller's now and then. Raises GangError: the
        flag is set, the store is gone, or it has taken too long.
        """

        def come() -> bool:
            self.count = self._store.add(self._here, 1)
            if self.count == self._world:
                self._store.set(self._all, "")
            return self.count == self._world

        def look() -> bool:
            return self._store.check([self._all])

        self._wait(come, look, flag, within_s, turn)

    def wait_for(self, count: int, flag: Interrupt, within_s: float) -> None:
        """Until so many have come, for who does not come yet. Raises as `wait_for_all`."""

        def look() -> bool:
            self.count = self._store.add(self._here, 0)
            return self.count >= count

        self._wait(look, look, flag, within_s, lambda: None)

    def _wait(
        self,
        first: Callable[[], bool],
        look: Callable[[], bool],
        flag: Interrupt,
        within_s: float,
        turn: Callable[[], None],
    ) -> None:
        begun, over = time.monotonic(), threading.Event()

        def ask() -> None:
            there = first()
            while not (there or over.is_set()):
                waited_s = time.monotonic() - begun
                time.sleep(min(max(waited_s / 20, BRIEF_S), max(LONG_S, EACH_S * self._world)))  # a store tells nobody
                there = look()

        doing = f"waiting for the {self._world} ranks of generation {self._generation}"
        try:
            bounded(ask, doing, flag, limit_s=within_s, turn=turn)
        except GangError:
            raise
        except (RuntimeError, TimeoutError) as error:  # what torch's store raises are RuntimeErrors
            raise Broken(f"{doing} failed: {error}") from error
        finally:
            over.set()
        flag.check(doing)
