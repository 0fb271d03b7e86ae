"""Where a script's kept state goes, and comes from: its node's vault, and what all ranks know of all vaults.

The one idea: nobody decides for the others. At a start all ranks hear what all vaults hold, and find the same newest state that
is whole. From then on each says which step of its own is copied; the least of these is what a vault must not give up.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from elasticrl.contract.level import means_of
from elasticrl.runtime import told
from elasticrl.runtime.agree import exchange, exchange_with
from elasticrl.runtime.checkpoint import tree
from elasticrl.runtime.context import Context, context
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.script_state import Own
from elasticrl.runtime.vault.client import Ticket, Vault
from elasticrl.runtime.vault.errors import VaultError
from elasticrl.runtime.vault.holdings import Holding, Whole, newest_whole
from elasticrl.runtime.vault.version import Lineage, Version, grow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elasticrl.runtime.checkpoint.parts import Parts
    from elasticrl.runtime.vault.piece import Piece
    from elasticrl.runtime.vault.source import Source

SLICE_S: Final = 0.05  # between looks whether a copy has arrived
NO_NEARER: Final = 0.75  # of the shortest budget of a phase: who waits longer would be taken for one that hangs


def say(text: str) -> None:
    """Into this rank's log."""
    print(f"elasticrl: {text}", file=sys.stderr)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """The ranks of this generation, as this one sees them. They talk over gloo, beside the script's own collectives.

    Example: Gang(context=context(None, seated=True), generation=14, rank=3, world=8, slot=1, nodes=4, group=None)
    """

    context: Context
    generation: int
    rank: int
    world: int
    slot: int
    nodes: int
    group: dist.ProcessGroup | None  # None: a world of one
    backend: str = "gloo"

    @classmethod
    def here(cls) -> Gang | None:
        """None where nothing is kept. Collective elsewhere."""
        if told.seat_here() is None:
            return None
        found = context(None, seated=True)
        means = means_of(found.tree.job.level)
        if not means.keeps or means.joins:
            return None
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if world > 1 and not dist.is_initialized():
            raise Misuse("elasticrl.keep: call it after torch.distributed.init_process_group, on all ranks.")
        return cls(
            context=found, generation=int(os.environ["ELASTICRL_GENERATION"]), rank=rank, world=world,
            slot=int(os.environ["LOCAL_RANK"]), nodes=int(os.environ["GROUP_WORLD_SIZE"]),
            group=dist.new_group(backend="gloo") if world > 1 else None,
        )  # fmt: skip

    def words(self, mine: Any) -> list[Any]:
        """Everybody's, in rank order. Collective."""
        return [mine] if self.group is None else exchange(self, mine)

    def holdings(self, mine: tuple[Holding, ...]) -> list[Holding]:
        """What all vaults hold. Collective."""
        if self.group is None:
            return list(mine)
        said = [holding.to_json() for holding in mine]
        rows, lineages = exchange_with(self, {"vault": said}, (holding.lineage for holding in mine))
        return [Holding.from_json(row, lineages) for words in rows for row in words["vault"]]


class Memory:
    """What this rank keeps, and what all have kept."""

    def __init__(self, gang: Gang) -> None:
        found = gang.context
        self.gang, self._timeout_s = gang, found.tree.vault.timeout_s
        self._patience_s = min(self._timeout_s, NO_NEARER * found.tree.timeouts.floor_s)
        self._copies = min(found.tree.vault.copies, gang.nodes - 1)
        self.vault = Vault(
            found.vault, job=found.job, node=found.node, writer=f"w{gang.slot}", deadline_s=self._timeout_s
        )
        self._whole: Whole | None = None
        self._looked = False
        self._lineage: Lineage = ()  # () until it is known what this generation goes on from
        self._ticket: Ticket | None = None
        self._copied = -1  # the newest step of this rank's that is whole, with its copies
        self._least = Least(gang.group)
        self._late = self._released = self._slower = False

    # ---- back

    def newest(self) -> Whole | None:
        """The newest state that is whole in the vaults. Looked for once. Collective."""
        if not self._looked:
            mine = self.vault.holdings(own=self.gang.slot != 0)  # of a node's workers one speaks for it
            # What bears a later generation's number is of a store that is no more: nothing can be grown from it.
            held = [each for each in self.gang.holdings(mine) if each.generation < self.gang.generation]
            self._whole = newest_whole(held, here=self.gang.context.node)
            self._looked = True
        return self._whole

    def gather(self, needs: Callable[[Source], Sequence[Piece]]) -> Source:
        """That state; the pieces that this rank needs have been fetched and checked."""
        assert self._whole is not None
        return self.vault.gather(
            self._whole, needs, timeout_s=self._timeout_s, check=told.beat
        )  # it comes nearer: no hang

    def own(self, *names: str) -> dict[str, Any]:
        """What this rank had for itself under these names, or the first rank if this one is new. Nothing is loaded."""
        with closing(self.gather(lambda _: ())) as source:
            found = {name: tree.join(source.values[name], {}) for name in names if name in source.values}
            return {name: Own.state_of(values, self.gang.rank) for name, values in found.items()}

    def begin(self, whole: Whole | None) -> None:
        """This generation goes on from there, or anew."""
        if self._lineage:
            raise Misuse("elasticrl.keep: restore() was called after the first step, or twice.")
        generation, start = self.gang.generation, whole.version if whole else Version(0)
        self._lineage = grow(whole.lineage if whole else (), generation, start)
        self.vault.sealed = ((whole.version, whole.generation),) if whole else ()
        if whole and self.gang.rank == 0:
            say(f"goes on from step {start.step}, which generation {whole.generation} kept in memory")

    # ---- there

    def keep(self, parts: Parts, step: int) -> None:
        """This rank's part goes into the vault. It is whole there when this returns."""
        self._await_copies()
        self._know(self._least.of(self._copied))
        if not self._lineage:
            self.begin(None)
        gang = self.gang
        self._ticket = self.vault.snapshot(
            parts.capture(gang.rank, gang.world), version=Version(step), generation=gang.generation, shard=gang.rank,
            world=gang.world, lineage=self._lineage,
        )  # fmt: skip
        self._ticket.wait_sealed(self._timeout_s)
        if self.vault.slower and not self._slower:
            self._slower = True
            say(self.vault.slower)

    def close(self) -> None:
        """Keeps nothing more. The files stay."""
        self._least.read()
        self.vault.close()

    def _know(self, step: int) -> None:
        """All ranks have this step whole and copied: no vault gives it up before a newer one is, and older ones may go."""
        if step < 0:
            return
        self.vault.sealed = ((Version(step), self.gang.generation),)
        if not self._released:
            self._released = True
            self.vault.release(self._lineage[-1].start)

    def _await_copies(self) -> None:
        """Until the last part is on the next nodes too. Copies that are late are said to be, and not waited for."""
        ticket = self._ticket
        if ticket is None:
            return
        limit = time.monotonic() + (2 * SLICE_S if self._late else self._patience_s)  # of late ones little is expected
        while (why := self._lacks(ticket)) and time.monotonic() < limit:
            time.sleep(SLICE_S / 5)  # a vault that is down refuses at once
        if why and not self._late:
            say(f"step {ticket.stamp.version.step} has too few copies: {why}")
        self._late = bool(why)
        if not why:
            self._copied = ticket.stamp.version.step

    def _lacks(self, ticket: Ticket) -> str:
        """Why the copies of a part are not all there; "": they are."""
        if not self._copies:
            return ""
        if ticket.path is not None and not ticket.path.exists():  # somebody has cleared the vault's folder
            self.vault.mend()
        try:
            found = self.vault.wait_copied(ticket, SLICE_S)
        except VaultError as error:
            return str(error)
        return "" if found >= self._copies else f"this node's vault knows {found} of {self._copies} others"


class Least:
    """The least of all ranks' numbers, as it was one call before: nobody waits for it."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._said: Any = None  # the tensor and the work of the call before

    def of(self, mine: int) -> int:
        """To be called by all ranks. -1 at the first call."""
        if self._group is None:
            return mine
        known = self.read()
        word = torch.tensor([mine])
        self._said = (word, dist.all_reduce(word, dist.ReduceOp.MIN, group=self._group, async_op=True))
        return known

    def read(self) -> int:
        """What was said last; also before a rank leaves, while another may still speak."""
        if self._said is None:
            return -1
        (word, work), self._said = self._said, None
        work.wait()
        return int(word.item())
