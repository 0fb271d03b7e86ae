"""The shared disk: checkpoints that are written in the background from vaults, and may be torn or rot.

The one idea: a save is a promise by every node's vault to write its shards; it is whole only if all of them could.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from chaos.history import Saved
from elasticrl.runtime.vault.version import Lineage

if TYPE_CHECKING:
    from chaos.sim.cluster import Cluster
    from chaos.sim.gang import Gang
    from chaos.sim.node import Node


@dataclass(slots=True)
class Save:
    """One checkpoint, on its way or there."""

    step: int
    version: int
    digest: str
    manifest: str
    head: "Node"
    sources: "list[tuple[Node, int]]"  # whose vaults it is written from, and which life of each vault
    lineage: Lineage
    born: int  # of the head's worker, who is told of its end
    torn: bool = False
    rotten: bool = False

    @property
    def sound(self) -> bool:
        """Can it still become whole?"""
        return not self.torn and all(node.vault_life == life for node, life in self.sources)


class Disk:
    """All checkpoints of the job."""

    def __init__(self, cluster: "Cluster", save_s: float) -> None:
        self.cluster, self.world = cluster, cluster.world
        self.save_s = save_s
        self.factor = 1.0
        self.active: list[Save] = []
        self.saves: dict[str, Save] = {}
        self._number = 0

    def save_gang(self, gang: "Gang") -> None:
        """Begin to write what a running gang has just sealed."""
        self._begin(gang.seats, gang.version, gang.digest, gang.lineage)

    def _begin(self, seats: "list[Node]", version: int, digest: str, lineage: Lineage) -> None:
        step = version // self.cluster.updates
        if any(save.step == step and save.sound for save in self.active):
            return
        self._number += 1
        manifest = f"step-{step:08d}-{self._number}"
        sources = [(node, node.vault_life) for node in seats]
        save = Save(step, version, digest, manifest, seats[0], sources, lineage, seats[0].born)
        self.active.append(save)
        self.world.later(self.save_s * self.factor, self._end, save)
        self.cluster.reach(f"saving step {step}", seats[0])
        self.cluster.reach("saving", seats[0])

    def _end(self, save: Save) -> None:
        self.active.remove(save)
        whole = save.sound
        self.world.note(
            Saved(
                at=self.world.now,
                step=save.step,
                version=save.version,
                digest=save.digest,
                manifest=save.manifest,
                whole=whole,
            )
        )
        if whole:
            self.saves[save.manifest] = save
            head = save.head  # its worker tells of it, and of no save that outlives it
            if head.alive and head.born == save.born and save.step > head.saved:
                head.saved, head.manifest = save.step, save.manifest
                head.tell()
        elif self.cluster.finished(save.version) and all(node.alive for node, _ in save.sources):
            self._begin(
                [node for node, _ in save.sources], save.version, save.digest, save.lineage
            )  # nothing comes after the last one
        self.cluster.saved([node for node, _ in save.sources])

    def newest(self) -> Save | None:
        """The newest committed checkpoint that is good: a rotten one makes the loader step back."""
        good = (self.saves[manifest] for manifest in reversed(self.cluster.committed) if manifest in self.saves)
        return next((save for save in good if not save.rotten), None)
