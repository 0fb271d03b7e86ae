"""Three lines in a script, and a restart costs no step and reads no disk: its whole state is in memory after each step.

    kept = elasticrl.keep(model=model, optimizer=optimizer, scheduler=scheduler)  # after init_process_group
    step = kept.restore()  # the newest step that is whole in memory, loaded into all of them; 0 if there is none
    while step < steps:
        train(step)
        step += 1
        kept.step(step)

The one idea: each rank's part goes into its node's vault, which outlives the workers and copies it to the next node. A step
counts when all parts of all ranks are there. All ranks see the same parts, so they find the same step, in any world size.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Final

from elasticrl.runtime import told
from elasticrl.runtime.memory import Gang, Memory, say
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.script_state import Optimizer, heads, parts_of, unlike

if TYPE_CHECKING:
    from elasticrl.runtime.checkpoint.parts import Parts

KEEP: Final = "keep"  # phases
RESTORE: Final = "restore"
_kept: Kept | None = None  # this process's
_memory: Memory | None = None
_over = False  # what came after that would be taken for the same training


def keep(*, every: int = 1, random: bool = True, frozen: bool = True, **state: object) -> Kept:
    """Have `state` kept: modules, optimizers, and whatever else has state_dict and load_state_dict, by name. To be called by
    all ranks, once, after init_process_group. Outside of elasticrl, or where job.level is not kept, `restore` returns 0 and
    `step` is a beat.

    `every`: steps from one that is kept to the next. `random`: also the generators of Python, numpy and torch. `frozen`: also
    parameters that need no gradient; False: the script itself makes them as they were.

    Example: kept = elasticrl.keep(model=model, optimizer=optimizer, every=1)
    """
    global _kept  # noqa: PLW0603 - a process writes one worker's files
    if every < 1:
        raise Misuse(f"elasticrl.keep: every is {every}; it is a number of steps, 1 or more.")
    if _kept is not None:
        raise Misuse("elasticrl.keep was called twice: name everything in one call, or close() the first.")
    there = memory()
    parts = parts_of(state, there.gang.rank if there else 0, random=random, frozen=frozen, say=say)  # refused anywhere
    _kept = Kept(state, parts, every=every, memory=there)
    return _kept


def memory() -> Memory | None:
    """This rank's; None where nothing is kept, or nothing more. Collective when it is called first."""
    global _memory  # noqa: PLW0603
    if _memory is None and not _over and (gang := Gang.here()) is not None:
        _memory = Memory(gang)
    return _memory


class Kept:
    """A script's state in memory. Made by `keep`."""

    def __init__(self, state: dict[str, object], parts: Parts, *, every: int, memory: Memory | None) -> None:
        self._state, self._parts, self._every, self._memory = state, parts, every, memory
        self._checked = False

    def restore(self) -> int:
        """Loads the newest step that is whole in memory into everything that is kept, and returns it. 0: there is none, and
        nothing is changed. To be called by all ranks, before the first step.
        """
        there = self._memory
        if there is None:
            return 0
        with told.phase(RESTORE):
            whole = there.newest()
            if whole is not None:
                with closing(there.gather(self._parts.needs)) as source:
                    self._parts.restore(source)
            there.begin(whole)
            return whole.version.step if whole else 0

    def step(self, step: int) -> None:
        """So many steps are made. Keeps the state, if it is due, and tells the step. To be called by all ranks, after the
        optimizer's step. When it returns, the state survives this process. Copies travel on; the next call waits for them.
        """
        if self._memory is not None and step % self._every == 0:
            with told.phase(KEEP):
                self._check(self._memory)
                self._memory.keep(self._parts, step)
        told.beat(step=step)

    def close(self) -> None:
        """Nothing more is kept by this process. What is in memory stays until the job ends: a job keeps one training."""
        global _kept, _memory, _over  # noqa: PLW0603
        if self._memory is not None:
            self._memory.close()
            _over = True
        self._memory = _kept = _memory = None

    def _check(self, there: Memory) -> None:
        """Once, at the first step: is this one state?"""
        if self._checked:
            return
        self._checked = True
        if why := unlike(there.gang.words(heads(self._state))):
            raise Misuse(why)
        for name in self._state:
            if isinstance(part := self._parts.part(name), Optimizer):
                part.check()
