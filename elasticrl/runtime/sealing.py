"""The states that one generation makes, on their way to be sealed: kept, voted on, told, and saved at the end.

The one idea: a vote is heard by all from all, so what it says of a state holds everywhere at the same moment. That a state is
sealed, that the job is to end, that the gang parts to grow: no rank finds it out before the others.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from elasticrl.contract.model import OUTSIDE
from elasticrl.runtime import alike, notes
from elasticrl.runtime.agree import exchange
from elasticrl.runtime.checkpoint.manifest import parse_name
from elasticrl.runtime.interrupt import GangError
from elasticrl.runtime.keeper import SLICE_S, Keeper
from elasticrl.runtime.search import thin
from elasticrl.runtime.vault.version import Version

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from elasticrl.runtime.agree import Agreed
    from elasticrl.runtime.digest import Digest
    from elasticrl.runtime.generation import Generation, Worker
    from elasticrl.runtime.progress import Progress, Sealed
    from elasticrl.runtime.trained import Registered


class Sealing:
    """One generation's, once everything registered is as it was after `agreed`."""

    def __init__(
        self, generation: Generation, keeper: Keeper, given: Registered, progress: Progress, sealed: Sealed,
        agreed: Agreed,
    ) -> None:  # fmt: skip
        self.generation, self.worker, self.keeper = generation, generation.worker, keeper
        self.given, self.progress = given, progress
        self.now = agreed.version  # of the newest state that was kept
        self.worth = True  # whether to keep another state inside of this step, as all ranks know
        self.ending = False  # all ranks know that some of them are asked to end
        self.parting = False  # all ranks know that those are there who join, and part at the next state that is kept
        self.saved_last = False
        self._sealed = sealed
        self._digest: tuple[Digest, ...] = ()  # of the newest version, this rank's part
        self._restored: int | None = None  # steps of a state that was restored, and not told of yet
        self._on_disk = progress.count if agreed.checkpoint is not None else -1  # so many updates are in the checkpoint
        given.counts = {self.now: progress.count}
        # Into the vaults at once: what lies there of another history is dead from now on; and what a node kept for one that
        # died would lie with it alone until the next step is sealed.
        vault = self.worker.context.tree.vault
        if not agreed.remembered or thin(agreed, vault.copies, generation.gang.world, vault.every):
            self.keep(self.now, whole=not self.now.update)
            if keeper.kept is not None:
                keeper.kept.asked = agreed.checkpoint is not None  # it is on the disk already
                keeper.kept.again = agreed.remembered
        if agreed.remembered and keeper.kept is None and not self.now.update:
            # What was restored is digested too: it must be what it was. (What is kept anew is, as all that is kept.)
            self._digest, self._restored = self._digests(), self.now.step
        self._tell(self.now.step, None)

    def keep(self, version: Version, *, whole: bool, unchanged: Collection[str] = ()) -> None:
        """The state as it is now becomes the newest, and is kept if it is due."""
        progress, given = self.progress, self.given
        if not whole:
            progress.mark = version.update
        due = version.step % self.worker.context.tree.vault.every == 0 or version.step == given.limit
        if due or not whole or self.ending or self.parting:
            self.keeper.keep(given.parts, version, steps=progress.step, whole=whole, unchanged=unchanged)
            self._digest = self._digests() if whole else ()
        # A shard holds two versions: older ones need not be looked for in it.
        given.counts = {v: c for v, c in given.counts.items() if c >= progress.count - 1} | {version: progress.count}
        self.now = version

    def await_copies(self) -> None:
        """Before a vote: its outcome tells everybody that everybody had waited."""
        self.keeper.await_copies(self._check, self.worker.beat.waiting)

    def say(self) -> tuple[float, ...]:
        """What this rank has to say with its vote."""
        keeper, generation = self.keeper, self.generation
        said = notes.write(
            ending=self.worker.asked_to_end,
            added=2 if generation.joined else 1 if generation.added else 0,
            late=keeper.late,
            cost_s=keeper.cost_s,
            since_s=keeper.since_s,
            digests=self._digest,
        )
        return (*said, *keeper.say())

    def hear(self, rows: Sequence[Sequence[float]]) -> Sequence[int]:
        """The gang has voted, so everybody had waited for copies: what was kept is sealed. Returns the ranks that diverged."""
        keeper = self.keeper
        heard = notes.read(keeper.hear(rows), self._digest, members=self.generation.alike)
        self._digest = ()  # told once
        self.worth = heard.worth(self.worker.context.tree.vault.inside)
        self.ending, self.parting = self.ending or heard.ending, self.parting or heard.parting
        alike.check_replicas(heard.odd, self.generation.gang, self.now, self.worker.say)
        if keeper.kept is None and self._restored is not None:
            self._tell(self._restored, heard.digest)
            keeper.chronicled(self._restored, heard.digest)
            self._restored = None
        kept = keeper.sealed(heard.digest, late=heard.late)
        if kept is not None and self.progress.count:
            self.given.forget_first()
        if kept is not None and kept.whole and not heard.late:  # late: it is not yet beyond the reach of a fault
            self._tell(kept.steps, heard.digest)
        return heard.odd

    def settle(self) -> None:
        """A second state of a step is kept: the one before must be sealed by then, as before an update. Collective."""
        kept = self.keeper.kept
        if self._restored is not None or (kept is not None and not kept.sealed):
            self.await_copies()
            self.hear(exchange(self.generation.gang, self.say()))

    def heed_halts(self) -> None:
        """Before a gang parts to grow: all are through with what was kept, and nobody has been asked to end meanwhile."""
        if self.parting and not self.ending:
            self.ending = any(exchange(self.generation.gang, self.worker.asked_to_end))

    def part_inside(self) -> None:
        """A state inside of the step is kept: the gang that is to grow goes on from it."""
        self.heed_halts()
        if self.parting and not self.ending:
            raise GangError("the gang grows, and this state is kept")

    def finish(self) -> None:
        """All steps are made: what they came to is sealed and on the disk before this worker says so."""
        self.settle()
        if self._on_disk != self.progress.count:
            if self.keeper.kept is None:  # restored from memory: whoever was to save it died
                self.keep(self.now, whole=True)
            self.save_last()
        self.worker.beat.done()

    def save_last(self) -> None:
        """The state that the job ends with, or is interrupted at, is on the disk when this returns. Collective."""
        keeper, beat = self.keeper, self.worker.beat
        self.settle()
        if (kept := keeper.kept) is not None and kept.whole and kept.steps:
            with beat.within("save"):
                with beat.alone():
                    keeper.save_last(kept, self._check, lambda: beat.still(OUTSIDE))
                self.saved_last = True
                exchange(self.generation.gang, [])  # nobody ends before everybody's shard is written
                keeper.written(kept)
        self.poll()

    def poll(self) -> None:
        """Saves that have ended, and commits that were made."""
        poll(self.worker, self.keeper, self.generation.place.generation)

    def _tell(self, steps: int, digest: str | None) -> None:
        self._sealed.add(steps, digest)
        self.worker.beat.sealed(steps, self.worker.untold)

    def _check(self) -> None:
        self.generation.flag.check("waiting for copies")

    def _digests(self) -> tuple[Digest, ...]:
        strategies = {name: role.live for name, role in self.given.roles.items()}
        return notes.digests(strategies, self.progress.count, self.worker.context.tree.lanes.digest)


def poll(worker: Worker, keeper: Keeper, generation: int) -> None:
    """Saves that have ended are told, and commits that were made are marked."""
    keeper.poll()
    parsed = parse_name(keeper.saved or "")
    if keeper.saved and parsed and keeper.saved != worker.beat.now.manifest:
        worker.beat.saved(parsed[0].step, keeper.saved)
        if worker.context.alone:
            keeper.committed(keeper.saved, generation=generation)
    told = worker.seat.committed if worker.seat else None
    if told is not None:
        # Of a gang that grows the commit has the next one's number; and what an earlier one saves its writers finish.
        keeper.committed(told.manifest, generation=min(told.generation, generation))


def see_committed(worker: Worker, keeper: Keeper, generation: int) -> None:
    """What was saved last is marked as committed on the disk too, by us: nobody does when we have ended."""
    seat, parsed = worker.seat, parse_name(keeper.marked or "")
    if seat is None or parsed is None:
        return  # not one that published, or alone, where a save is a commit
    limit_s = (seat.halt.within_s if seat.halt else worker.context.tree.recovery.drain_s) / 2
    limit = time.monotonic() + limit_s
    if worker.beat.now.phase != "done":
        worker.beat.parked(generation)  # waiting for the store is no hang
    while (told := seat.committed) is None or told.step < parsed[0].step:
        if time.monotonic() > limit:
            worker.say(
                f"step {parsed[0].step} is saved as {keeper.marked}, but was not committed within {limit_s:g} s: the store "
                "was away, or the plan had changed. If `elasticrl status` does not name it either, a later run goes on "
                "from the commit before it."
            )
            return
        time.sleep(SLICE_S)
    poll(worker, keeper, generation)
