"""What a new gang goes on from, as `agree` or `agree_on_disks` finds it, with the waits for what is not to be had yet.

The one idea: what does not answer now, or lies on a disk that is not here, is not lost. It is waited for, up to
`checkpoint.wait`; such a wait is no hang, and ends when a plan comes, or an order to end.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from elasticrl.contract.model import Rung
from elasticrl.runtime.agree import Agreed, agree
from elasticrl.runtime.checkpoint.local import NEWEST
from elasticrl.runtime.checkpoint.shelf import Found, newest_good
from elasticrl.runtime.disks import Disk, agree_on_disks
from elasticrl.runtime.interrupt import GangError
from elasticrl.runtime.keeper import SLICE_S
from elasticrl.runtime.vault.errors import CheckpointStorage

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticrl.runtime.generation import Generation, Worker
    from elasticrl.runtime.interrupt import Interrupt
    from elasticrl.runtime.keeper import Keeper

_T = TypeVar("_T")

SOON_S = 1.0  # a state that comes within this time comes soon


class Search:
    """One worker's, for all its generations: since when disks are missed outlasts each of them."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._context, self._tree = worker, worker.context, worker.context.tree
        self._lacking_since: float | None = None  # when disks that are not here were first missed
        self._damaged: dict[str, str] = {}  # checkpoints at a URL in which a changed block was found, with its sentence

    def agree(self, generation: Generation, keeper: Keeper) -> Agreed:
        """What all go on from. Collective."""
        place, gang = generation.place, generation.gang
        told = self._worker.seat.committed if self._worker.seat else None
        commit, reloads = told.manifest if told else None, place.rung == Rung.RELOAD
        committed = told.generation if told and told.step == place.resume else None
        holdings = keeper.holdings(speaks=place.slot == 0)
        if not self._context.own_disk:
            return agree(
                self._context.node, holdings, gang, lambda: self._look(keeper, commit, gang.flag),
                floor=0 if reloads else place.resume, committed=committed, disk=reloads, pace_s=keeper.pace_s,
                copy_s=keeper.copy_s,
            )  # fmt: skip
        since = self._lacking_since
        disk = Disk(
            place=keeper.place, vault=self._context.vault, job=self._context.job, node=self._context.node,
            speaks=place.slot == 0, timeout_s=self._tree.checkpoint.timeout_s,
            offers=max(NEWEST, self._tree.checkpoint.keep_last + 2),  # all that may be kept
        )  # fmt: skip
        agreed = agree_on_disks(
            disk, holdings, gang, floor=place.resume, committed=committed, reload=reloads, commit=commit,
            waited_s=0.0 if since is None else time.monotonic() - since, wait=partial(self._await_disks, generation),
            patiently=lambda read: self._patiently(read, gang.flag), pace_s=keeper.pace_s,
            copy_s=keeper.copy_s,
        )  # fmt: skip
        if agreed.version.step >= place.resume:  # else they have been waited for, and are not again at the next fault
            self._lacking_since = None
        return agreed

    def pass_over(self, checkpoint: str, why: str) -> None:
        """It was agreed on, and is not good: from now on it is not looked at."""
        self._damaged[checkpoint] = why

    def _look(self, keeper: Keeper, commit: str | None, flag: Interrupt) -> Found | None:
        """The newest good checkpoint."""
        alone, damaged = self._context.alone, self._damaged
        return self._patiently(
            lambda: newest_good(keeper.place, commit=commit, uncommitted=alone, damaged=damaged), flag
        )

    def _patiently(self, read: Callable[[], _T], flag: Interrupt) -> _T:
        """A place that does not answer, as file servers do not for a while after a loss of power, is waited for: nothing that
        it holds is lost.
        """
        limit_s, begun, said = self._tree.checkpoint.wait_s, time.monotonic(), False
        while True:
            try:
                return read()
            except CheckpointStorage as error:
                if time.monotonic() > begun + limit_s:
                    raise
                if not said:
                    self._worker.say(f"{error} It is waited for up to {limit_s:g} s (checkpoint.wait).")
                    said = True
            self._pause(flag, "checkpoints", "checkpoints cannot be read")

    def _await_disks(self, generation: Generation, why: str, waited_s: float) -> None:
        """A gang that lacks what is on others' disks counts as formed, and makes no steps: so they are let in as they come."""
        limit_s = self._tree.checkpoint.wait_s
        now = time.monotonic()
        self._lacking_since = now - waited_s
        if waited_s >= limit_s:
            return
        self._worker.say(
            f"{why}: waiting up to {limit_s - waited_s:.0f} s for nodes that may have it (checkpoint.wait)"
        )
        self._worker.beat.training()
        generation.misses = True
        try:
            with self._worker.beat.within("disks"):
                while time.monotonic() < now + limit_s - waited_s or generation.added:
                    self._pause(generation.flag, "disks", "parts of the newest checkpoint are still missing")
        finally:
            generation.misses = False

    def _pause(self, flag: Interrupt, what: str, lack: str) -> None:
        """Between two looks of a wait that `checkpoint.wait` bounds, and another plan or the order to end cuts short."""
        flag.check(f"waiting for {what}")
        if self._worker.seat and self._worker.seat.halt:
            raise GangError(f"it is time to end, and {lack}")
        self._worker.beat.still()
        time.sleep(SLICE_S)  # nobody tells when a file server is back


def thin(agreed: Agreed, copies: int, world: int, every: int) -> bool:
    """Does a part of what this gang goes on from lie with fewer nodes than it should, and would for long? The next state, which
    is kept after `every` steps, has all its copies. If that is soon, copies of this one would only delay it: also where
    making and taking copies is as long, which the step that all wait for would pay.
    """
    if 0 < agreed.pace_s * every <= max(SOON_S, agreed.copy_s):
        return False
    want = 1 + min(copies, world - 1)
    layers = agreed.whole.layers if agreed.whole is not None else ()
    return any(len(nodes) < want for layer in layers for nodes in layer.sources)
