"""Processes without a seat: those that start, those that get warm, and those that wait for a rank.

The one idea: what a gang needs now comes first. One seat's worth of processes is always wanted while nothing is seated; beside
a gang that trains further ones are started only when the fork server has imported for all of them what they need.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from elasticrl.agent import pool, warm
from elasticrl.agent.logs import Logs
from elasticrl.agent.spec import Spec
from elasticrl.agent.turns import Turns
from elasticrl.base.pauses import pause
from elasticrl.base.process import killed_by

END_S: Final = 10.0  # how long killed processes may take to be gone before their places are given away
FORMED_S: Final = 10.0  # spares wait no longer for a gang that forms, nor for a fork server that imports
FIRST_S, MOST_S = 0.2, 10.0  # before the next start, after starts that came to nothing
log = logging.getLogger(__name__)


class Spares:
    """One agent's. `seated`: whether anything is. `others`: processes that are not here. `died` is told of an end."""

    def __init__(
        self, spec: Spec, runtime: Path, logs: Logs, turns: Turns, *,
        seated: Callable[[], bool], others: Callable[[], list[pool.Process]], died: Callable[[pool.Process], None],
    ) -> None:  # fmt: skip
        self.processes: list[pool.Process] = []
        self.contexts = ThreadPoolExecutor(1, "elasticrl-contexts")  # see pool: one thread for all of torch's contexts
        self.starting = 0
        self.closed = False  # none is started any more
        self.problem = ""  # why there is none
        self.bits = self.versions = ""  # as the first warm process has found out; the others need not
        self._spec, self._turns = spec, turns
        self._seated, self._others, self._died = seated, others, died
        self._begin = partial(pool.start, runtime=runtime, logs=logs)
        self._number = 0
        self._pause_s = 0.0
        self._asked = 0  # the fork server that was told to import the rest
        self._complete = 0  # and the one that has

    @property
    def ready(self) -> list[pool.Process]:
        """Processes that can take a rank, the warm ones first."""
        living = (p for p in self.processes if not (p.killed or p.ended or killed_by(p.pid)))
        return sorted(living, key=lambda p: (not p.warm, p.number))

    def fill(self, at_least: int = 0) -> None:
        """Start what is missing, beside everything else."""
        missing = max(self._wanted(), at_least) - len(self.processes) - self.starting
        for _ in range(missing):
            self.starting += 1
            self._turns.spawn(self._start())

    def spare(self) -> None:
        """The gang trains: what only spares need is done now, when it is in nobody's way, and first for them all at once."""
        if self._asked != (server := warm.server()):
            if not warm.complete(server):
                asyncio.get_running_loop().call_later(FORMED_S, self.spare)
                return
            self._asked = server
            asyncio.get_running_loop().call_later(FORMED_S, self.completed)

    def completed(self) -> None:
        """The fork server has imported the rest."""
        self._complete = self._asked
        self.fill()

    def spoilt(self) -> None:
        """What the fork server has imported has started threads. Those who wait import it by themselves then."""
        log.warning(
            "an import of the program has started threads, which a fork would lose: each spare process now imports by itself"
        )
        warm.renew()
        self.spare()

    def lost(self, process: pool.Process, cause: str) -> None:
        """One has ended, of this cause."""
        self.processes.remove(process)
        self.problem = f"a process ended before it was warm: {cause}" if not process.warm else ""
        if self._spec.load_ahead and process.warm and not (process.loaded or process.killed or process.orphaned()):
            self._spec = replace(self._spec, load_ahead=False)
            log.warning("agent.load_ahead: a spare process ended as it loaded (%s); no other one loads ahead", cause)
        self._slow_down()

    def end(self, why: str) -> None:
        """Kill all of them."""
        self.closed = True
        for process in self.processes:
            process.end(why)

    def _wanted(self) -> int:
        """How many processes should be warm: a seat's worth; none beside a seat that is to have no spares, or none yet."""
        if self.closed or (self._seated() and not (self._spec.spares and self._complete == warm.server())):
            return 0
        return max(self._spec.slots, self._spec.spares)

    async def _start(self) -> None:
        self._number += 1
        number, pause_s, turns = self._number, self._pause_s, self._turns
        try:
            await turns.until(turns.over.is_set, pause_s)
            # Of a fork server that has died all processes die. How they ended is asked in the same thread, which a start holds
            # until the next server has imported torch: meanwhile nobody would hear that the gang has failed.
            await turns.until(lambda: not any(p.orphaned() for p in (*self.processes, *self._others())), END_S)
            if turns.over.is_set():
                return
            loop = asyncio.get_running_loop()
            start = partial(self._begin, self._spec, number, tells_bits=not self.bits)
            process = await loop.run_in_executor(self.contexts, start)
        except (OSError, EOFError, RuntimeError) as error:
            self.problem = f"no process can be started: {error}"
            log.warning("%s", self.problem)
            self._slow_down()
            return
        finally:
            self.starting -= 1
        self.processes.append(process)
        loop.add_reader(process.channel, self._heard, process)
        loop.add_reader(process.pidfd, self._died, process)
        if turns.over.is_set():
            process.end("the agent ends")
        turns.poke()

    def _slow_down(self) -> None:
        self._pause_s = pause(self._pause_s, 0.0, first_s=FIRST_S, most_s=MOST_S, steady_s=0.0)
        asyncio.get_running_loop().call_later(self._pause_s, self.fill)

    def _heard(self, process: pool.Process) -> None:
        if not process.hear():
            asyncio.get_running_loop().remove_reader(process.channel)
        elif process.warm and process.slot is None:
            self._pause_s, self.problem = 0.0, ""
            self.bits, self.versions = self.bits or process.bits, self.versions or process.versions
        self._turns.poke()
