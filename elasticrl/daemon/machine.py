"""What this node's machine says of its health: the kernel's log, memory, disks, cards.

The one idea: who asks a disk or a card may hang as long as it does. So each is asked by itself, once at a time, and what has
not answered keeps nothing else back.
"""

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from elasticrl.base.apart import apart
from elasticrl.contract.events import Found
from elasticrl.contract.evidence import Evidence, Kind, Sign
from elasticrl.daemon.shared import Desk

if TYPE_CHECKING:  # see Inquiry.prepare
    from elasticrl.diagnose import health, kernel_log

CARDS_S = 120.0  # between looks at cards that take a program to look at, which costs a second of processor time
PROMPT_S = 1.0  # a look at disks, and at cards without a program, is over by then, and is part of that at the machine
HUNG_S = 30.0  # a disk that has not answered for so long does not


class Machine:
    """Looked at all the while. `pids`: of this node's workers, present and past."""

    def __init__(self, desk: Desk, pids: Callable[[], Collection[int]]) -> None:
        self.starving: Mapping[str, str] = {}  # what it was short of when it was looked at last, by check
        self._desk, self._pids = desk, pids
        self._kernel: kernel_log.Watch | None = None
        self._bad: dict[str, Evidence] = {}  # what was not in order when it was looked at last, by check
        self._unseen: dict[str, str] = {}  # why cards cannot be asked, by who would tell of them
        self._told: Mapping[str, tuple[health.Check, ...]] = {}  # of disks and GPUs, found last, by who tells of them
        self._asked: dict[str, float] = {}  # since when each of those has not answered
        self._due: dict[str, float] = {}  # when each of those is asked again; never, while it has not answered
        self._amiss = ""  # why it could not be looked at last

    async def hear_kernel(self) -> None:
        """Until cancelled, and by itself: what hangs the look at cards or disks is what the kernel's log explains."""
        deaf = False
        while True:
            if facts := await apart(self._news):
                self._desk.post(Found(now=time.monotonic(), evidence=facts))
            if self._kernel is not None and self._kernel.deaf != deaf:
                deaf = self._kernel.deaf
                if deaf:
                    self._desk.log.info("kernel_log.unreadable", said=self._kernel.REMEDY)
            await asyncio.sleep(self._desk.tree.health.sample_s)

    def _news(self) -> tuple[Evidence, ...]:
        from elasticrl.diagnose import health, kernel_log

        self._kernel = self._kernel or kernel_log.Watch(self._desk.site.root)  # what was there before us is history
        _, said = health.kernel(self._kernel.read(), "news")
        return tuple(replace(fact, node=self._desk.site.node) for fact in said if self._concerns_us(fact))

    async def ask_all(self) -> None:
        """Disks and cards that are due, each by itself: where a server or a driver hangs so does what asks it."""
        from elasticrl.diagnose import amd, fabric, health, nvidia

        root = self._desk.site.root

        def disk(name: str, path: Path) -> tuple[health.Check, ...]:
            return tuple(health.disk(path, name, root=root, write=False))

        await asyncio.gather(
            *(self._ask(name, 0.0, partial(disk, name, path)) for name, path in self._desk.site.disks.items()),
            self._ask("NVML", 0.0, lambda: nvidia.gpus(root)[0]),
            self._ask("amd-smi", CARDS_S, lambda: amd.gpus(root)[0]),
            self._ask("bus", CARDS_S, lambda: tuple(fabric.gone(root))),
        )

    async def _ask(self, whom: str, every_s: float, look: "Callable[[], tuple[health.Check, ...]]") -> None:
        now = time.monotonic()
        if now < self._due.get(whom, -math.inf):
            return
        self._due[whom] = math.inf  # a driver may hang for ever: then one thread waits for it, not one more each time
        self._asked[whom] = now
        try:
            found = await apart(look)
            self._say_unseen(whom, found)
            self._told = {**self._told, whom: found}  # another one, as a thread may be reading the last
        finally:
            del self._asked[whom]
            self._due[whom] = now + every_s

    def _say_unseen(self, whom: str, found: "tuple[health.Check, ...]") -> None:
        """Once, and again where it is something else: cards that cannot be asked look like cards that are well."""
        said = "; ".join(f"{check.value}. {check.remedy}" for check in found if check.unseen)
        if said and said != self._unseen.get(whom):
            self._desk.log.info("cards.unseen", said=said)
        self._unseen[whom] = said

    async def sample(self) -> None:
        """Look at the machine, and tell what is not in order, until cancelled."""
        from elasticrl.diagnose import health

        before = health.counters(time.monotonic(), self._desk.site.root)
        while True:
            await asyncio.wait({self._desk.spawn(self.ask_all(), "disks and cards")}, timeout=PROMPT_S)
            amiss = ""
            try:
                before, facts, starving = await apart(partial(self.look, before))
            except OSError as error:
                amiss = str(error)
            else:
                if facts:
                    self._desk.post(Found(now=time.monotonic(), evidence=facts))
                if starving.keys() != self.starving.keys():
                    self._desk.log.info("machine.starved" if starving else "machine.recovered", said=short_of(starving))
                self.starving = starving
            if amiss and amiss != self._amiss:
                self._desk.log.info("machine.unseen", said=amiss)
            self._amiss = amiss
            await asyncio.sleep(self._desk.tree.health.sample_s)

    def look(self, before: "health.Counters") -> tuple["health.Counters", tuple[Evidence, ...], Mapping[str, str]]:
        """Its counters, now that they were `before`; what is wrong, or is so no longer; what it is short of."""
        from elasticrl.diagnose import health

        after, node = health.counters(time.monotonic(), self._desk.site.root), self._desk.site.node
        checks = health.look(before, after, root=self._desk.site.root)
        asked = {**self._asked}
        hung = {
            name for name, since in asked.items() if time.monotonic() - since > HUNG_S
        } & self._desk.site.disks.keys()
        checks += [health.silent(self._desk.site.disks[name], name) for name in sorted(hung)]
        checks += [check for whom, found in self._told.items() if whom not in hung for check in found]
        bad = {fact.check: fact for fact in health.evidence(checks, node=node)}
        well = [
            replace(fact, sign=Sign.HEALTHY, detail=f"{name}: in order again")
            for name, fact in self._bad.items()
            if name not in bad
        ]
        self._bad = bad
        return after, (*bad.values(), *well), health.starving(checks)

    def _concerns_us(self, fact: Evidence) -> bool:
        """The kernel ends many a process for want of memory; of the others it says whom."""
        if fact.kind is not Kind.OOM_KILLER:
            return True
        from elasticrl.diagnose import kernel_log

        return kernel_log.killed_pid(fact.line) in self._pids()


def short_of(starving: Mapping[str, str]) -> str:
    """In words; "" if of nothing."""
    return "; ".join(f"{name} {value}" for name, value in sorted(starving.items()))
