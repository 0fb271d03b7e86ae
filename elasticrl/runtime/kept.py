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

import os
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from elasticrl.core.level import means_of
from elasticrl.runtime import told
from elasticrl.runtime.agree import exchange, exchange_with
from elasticrl.runtime.checkpoint.parts import Parts
from elasticrl.runtime.context import Context, context
from elasticrl.runtime.given import Optimizer, heads, parts_of, unlike
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.vault.client import Ticket, Vault
from elasticrl.runtime.vault.errors import VaultError
from elasticrl.runtime.vault.holdings import Holding, Whole, newest_whole
from elasticrl.runtime.vault.version import Lineage, Version, grow

if TYPE_CHECKING:
    from elasticrl.runtime.vault.source import Source

SLICE_S: Final = 0.05  # between looks whether a copy has arrived
NO_NEARER: Final = (
    0.75  # of the shortest budget that a phase can have: who waits longer would be taken for one that hangs
)
KEEP, RESTORE = "keep", "restore"  # phases
_here: Kept | None = None  # this process's


def keep(*, every: int = 1, random: bool = True, **state: object) -> Kept:
    """Have `state` kept: modules, optimizers, and whatever else has state_dict and load_state_dict, by name. To be called by
    all ranks, once, after init_process_group. `every`: steps from one that is kept to the next. `random`: also the generators
    of Python, numpy and torch. Outside of elasticrl, or where job.level is not kept, `restore` returns 0 and `step` is a beat.

    Example: kept = elasticrl.keep(model=model, optimizer=optimizer, every=1)
    """
    global _here  # noqa: PLW0603 - a process has one vault's files
    if every < 1:
        raise Misuse(f"elasticrl.keep: every is {every}; it is a number of steps, 1 or more.")
    if _here is not None:
        raise Misuse(
            "elasticrl.keep was called twice in this process: name everything in one call, or close() the first."
        )
    _here = Kept(state, every=every, random=random, gang=Gang.here())
    return _here


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
            context=found, generation=int(os.environ["TORCHELASTIC_RESTART_COUNT"]), rank=rank, world=world,
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


class Kept:
    """A script's state in memory. Made by `keep`."""

    def __init__(self, state: dict[str, object], *, every: int, random: bool, gang: Gang | None) -> None:
        self._state, self._every, self._gang = state, every, gang
        self._parts = parts_of(
            state, gang.rank if gang else 0, random=random, say=self._say
        )  # refuses under torchrun too
        self._home = Home(gang) if gang else None
        self._checked = False

    def newest(self) -> int:
        """The newest step that is whole in memory; 0: none is. Collective: all ranks find the same one."""
        whole = self._home.newest() if self._home else None
        return whole.version.step if whole else 0

    def restore(self) -> int:
        """Loads the newest step that is whole in memory into everything that is kept, and returns it. 0: there is none, and
        nothing is changed. To be called by all ranks, before the first step.
        """
        home = self._home
        if home is None:
            return 0
        with told.phase(RESTORE):
            if home.newest() is not None:
                with closing(home.gather(self._parts)) as source:
                    self._parts.restore(source)
            return home.begin()

    def step(self, step: int) -> None:
        """So many steps are made. Keeps the state, if it is due, and tells the step. To be called by all ranks, after the
        optimizer's step. When it returns, the state survives this process. Copies travel on; the next call waits for them.
        """
        if self._home is not None and step % self._every == 0:
            with told.phase(KEEP):
                self._check()
                self._home.keep(self._parts, step)
        told.beat(step=step)

    def close(self) -> None:
        """Nothing more is kept. What is in memory stays until the job ends."""
        global _here
        if self._home is not None:
            self._home.vault.close()
        self._home, _here = None, None

    def _check(self) -> None:
        """Once, at the first step: is this one state?"""
        if self._checked or self._gang is None:
            return
        self._checked = True
        if why := unlike(self._gang.words(heads(self._state))):
            raise Misuse(why)
        for name in self._state:
            if isinstance(part := self._parts.part(name), Optimizer):
                part.check()

    def _say(self, text: str) -> None:
        print(f"elasticrl: {text}", file=sys.stderr)


class Home:
    """Where a rank's part goes: its node's vault, and what all ranks know of it."""

    def __init__(self, gang: Gang) -> None:
        found = gang.context
        self._gang, self._timeout_s = gang, found.tree.vault.timeout_s
        self._patience_s = min(self._timeout_s, NO_NEARER * found.tree.timeouts.floor_s)
        self._copies = min(found.tree.vault.copies, gang.nodes - 1)
        self.vault = Vault(
            found.vault, job=found.job, node=found.node, writer=f"w{gang.slot}", deadline_s=found.tree.vault.timeout_s
        )
        self._whole: Whole | None = None
        self._looked = False
        self._lineage: Lineage = ()  # () until it is known what this generation goes on from
        self._ticket: Ticket | None = None
        self._copied = -1  # the newest step of this rank's that is whole, with its copies
        self._least = Least(gang.group)
        self._late = self._released = False

    # ---- back

    def newest(self) -> Whole | None:
        """The newest version that is whole in the vaults. Looked for once. Collective."""
        if not self._looked:
            mine = self.vault.holdings(own=self._gang.slot != 0)  # of a node's workers one speaks for it
            self._whole = newest_whole(self._gang.holdings(mine), here=self._gang.context.node)
            self._looked = True
        return self._whole

    def gather(self, parts: Parts) -> Source:
        """Its state, of which this rank's part has been fetched and checked."""
        assert self._whole is not None
        return self.vault.gather(self._whole, parts.needs, timeout_s=self._timeout_s)

    def begin(self) -> int:
        """This generation goes on from what was found; which step that is."""
        whole, generation = self._whole, self._gang.generation
        if self._lineage:
            raise Misuse("elasticrl.keep: restore() was called after the first step, or twice.")
        start = whole.version if whole else Version(0)
        self._lineage = grow(whole.lineage if whole else (), generation, start)
        self.vault.sealed = ((whole.version, whole.generation),) if whole else ()
        if whole and self._gang.rank == 0:
            print(
                f"elasticrl: goes on from step {start.step}, which generation {whole.generation} kept in memory",
                file=sys.stderr,
            )
        return start.step

    # ---- there

    def keep(self, parts: Parts, step: int) -> None:
        """This rank's part goes into the vault. It is whole there when this returns."""
        self._await_copies()
        self._know(self._least.of(self._copied))
        if not self._lineage:
            self.begin()
        gang = self._gang
        self._ticket = self.vault.snapshot(
            parts.capture(gang.rank, gang.world), version=Version(step), generation=gang.generation, shard=gang.rank,
            world=gang.world, lineage=self._lineage,
        )  # fmt: skip
        self._ticket.wait_sealed(self._timeout_s)

    def _know(self, step: int) -> None:
        """All ranks have this step whole and copied: no vault gives it up before a newer one is, and older ones may go."""
        if step < 0:
            return
        self.vault.sealed = ((Version(step), self._gang.generation),)
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
            print(f"elasticrl: step {ticket.stamp.version.step} has too few copies: {why}", file=sys.stderr)
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
        known = -1
        if self._said is not None:
            word, work = self._said
            work.wait()
            known = int(word.item())
        word = torch.tensor([mine])
        self._said = (word, dist.all_reduce(word, dist.ReduceOp.MIN, group=self._group, async_op=True))
        return known
