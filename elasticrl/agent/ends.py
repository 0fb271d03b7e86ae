"""How this node's processes ended, as its daemon is told until it has acknowledged it."""

from collections.abc import Collection
from pathlib import Path
from typing import Final

from torch.distributed.elastic.multiprocessing import ProcessFailure

from elasticrl.agent import exits, pool
from elasticrl.base.started import last_line
from elasticrl.contract.beats import Snapshot
from elasticrl.contract.evidence import Sign
from elasticrl.contract.model import LOADING, Exit
from elasticrl.contract.wire import Ended

MOST: Final = 64  # ends that are told of while no daemon has acknowledged them: a report has an end


class Ends:
    """One agent's. `script`: its program says nothing of itself, so its last line may be why it ended."""

    def __init__(self, *, script: bool) -> None:
        self.told: tuple[Ended, ...] = ()
        self._script = script
        self._memory = exits.Memory()
        self._number = 0

    def look(self, now: float) -> None:
        """At what the kernel says of memory."""
        self._memory.look(now)

    def add(
        self, process: pool.Process, beat: Snapshot, code: int | None, failure: ProcessFailure | None, generation: int
    ) -> Ended:
        """One has ended, in this generation if it had a rank."""
        told = failure.error_file_data if failure else None
        message, raised = exits.exception_of(told), exits.raised_of(told)
        if self._script and code and code > 0:
            message = message or said(process.log)
        seated = process.slot is not None
        facts = exits.Traces(
            code=code, message=message, raised=raised, killed=process.killed, sign=process.sign,
            memory=self._memory.evidence(process.pid, code), unjoined=code == 0 and seated and beat.phase == LOADING,
        )  # fmt: skip
        cause, own, sign = exits.judge(facts)
        self._number += 1
        end = Ended(
            number=self._number, rank=process.rank, core=exits.core_of(code), said=said(process.log),
            exit=Exit(
                generation=generation if seated else 0, slot=process.slot, step=beat.step, cause=cause, own=own,
                signal=facts.signal, sign=sign, raised=raised, phase=beat.phase if sign is Sign.HOST_STUCK else "",
            ),
        )  # fmt: skip
        self.told = (*self.told, end)[-MOST:]
        return end

    def forget(self, numbers: Collection[int]) -> None:
        """The daemon knows of these."""
        self.told = tuple(end for end in self.told if end.number not in numbers)


def said(log: Path) -> str:
    """The last line of a process: in its log, or in the one before if that was turned over just now."""
    return last_line(log) or last_line(log.with_name(f"{log.name}.1"))
