"""Which version a gang can go on from, and where its shards are: pure functions of what the vaults hold.

The one idea: a version is whole when every shard of it is somewhere. Shards of one version may be cut for different worlds by
different generations; those sets never mix, but any of them will do. A version may lie on an earlier one, its base, whose
shards hold all that has not changed since: then those must be there as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from elasticrl.runtime.vault.layout import Sealed, Written, written
from elasticrl.runtime.vault.version import Lineage, Version, alive, mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding(Written):
    """One whole shard in one node's vault.

    Example: Holding(at="n02", node="n03", writer="w0", version=Version(1284), generation=14, shard=3, world=8, nbytes=...)
    """

    at: str  # the node whose memory it is in: a copy if another one's worker wrote it
    nbytes: int

    def to_json(self) -> dict[str, object]:
        """For the wire: of the lineage its mark alone, which many holdings share."""
        return {"at": self.at, **self.plain(), "nbytes": self.nbytes, "lineage": mark(self.lineage)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any], lineages: Mapping[str, Lineage]) -> Holding:
        """The reverse of `to_json`, with the lineages by their marks; ValueError, KeyError or TypeError for anything else."""
        return cls(at=str(row["at"]), **written(row, lineages[row["lineage"]]), nbytes=int(row["nbytes"]))


def holding_of(sealed: Sealed, at: str) -> Holding:
    """What one sealed file, in the vault of node `at`, holds."""
    same = {field.name: getattr(sealed.stamp, field.name) for field in fields(Written)}
    return Holding(at=at, **same, nbytes=sealed.shape.data_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """The newest version that is whole: where to get each shard, and why nothing newer will do."""

    version: Version
    generation: int
    world: int
    lineage: Lineage
    sources: tuple[tuple[str, ...], ...]  # by shard: the nodes that have it, the nearest first
    passed_over: tuple[str, ...] = ()  # a sentence for each newer version
    base: Whole | None = None  # what it lies on: the rest of its shards

    @property
    def layers(self) -> tuple[Whole, ...]:
        """It, and what it lies on."""
        return (self,) if self.base is None else (self, self.base)


def newest_whole(
    holdings: Iterable[Holding], *, here: str, floor: Version | None = None, committed: int | None = None
) -> Whole | None:
    """The greatest (step, update) of which all shards are present somewhere; of several sets, the newest generation's.

    Shards are taken from `here` first, then from the node that wrote them, then from a buddy. What lies on a branch that a
    later generation has left is not considered, nor what is older than `floor` (the disk has that). None: start from disk.

    `committed` is the generation that committed the floor, where that is known: who began below the floor after it had found
    that checkpoint rotten, and what has been made since counts. Found live: until there was a newer commit, each fault took the
    gang back to the disk, though nothing in memory was lost.
    """
    everything = sorted(holdings, key=lambda h: (h.version, h.generation, h.world, h.shard, h.at))
    lineage = max(everything, key=lambda h: (h.generation, h.version)).lineage if everything else ()
    if floor is not None and committed is not None:
        floor = min([floor, *(cut.start for cut in lineage if cut.generation > committed)])
    sets: dict[tuple[Version, int, int], dict[int, list[Holding]]] = {}
    for holding in everything:
        if alive(lineage, holding.generation, holding.version):
            key = (holding.version, holding.generation, holding.world)
            sets.setdefault(key, {}).setdefault(holding.shard, []).append(holding)
    passed_over: list[str] = []
    for version, generation, world in sorted(sets, reverse=True):
        if floor is not None and version < floor:
            break
        shards = sets[version, generation, world]
        layers = [(version, shards)]
        if (base := next(iter(shards.values()))[0].base) is not None:
            layers.append((base, sets.get((base, generation, world), {})))
        lacks = [_lack(number, generation, world, held) for number, held in layers]
        if any(lacks):
            on = f"step {version} lies on step {base}: " if not lacks[0] else ""
            passed_over.append(on + next(filter(None, lacks)))
            continue
        whole, *under = (_whole(number, generation, world, held, here) for number, held in layers)
        return replace(whole, passed_over=tuple(passed_over), base=under[0] if under else None)
    return None


def _lack(version: Version, generation: int, world: int, shards: Mapping[int, Sequence[Holding]]) -> str:
    absent = [shard for shard in range(world) if shard not in shards]
    names = ", ".join(map(str, absent))
    have = f"step {version} of generation {generation} has {world - len(absent)} of {world} shards (missing: {names})"
    return have if absent else ""


def _whole(version: Version, generation: int, world: int, shards: Mapping[int, Sequence[Holding]], here: str) -> Whole:
    ordered = [sorted(shards[n], key=lambda h: (h.at != here, h.at != h.node, h.at)) for n in range(world)]
    sources = tuple(tuple(dict.fromkeys(h.at for h in held)) for held in ordered)
    return Whole(version=version, generation=generation, world=world, lineage=ordered[0][0].lineage, sources=sources)
