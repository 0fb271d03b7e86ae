"""Checkpoints on the nodes' own disks: each has its shards, none has all, and no file system is shared.

The one idea: a shard on a disk is brought back into its node's vault, and from there on it is a shard like any other: each rank
fetches what it lacks from its peers' memory. `held` says what a disk has, `choose` finds the newest of which everybody's disks
together have all, `bring` brings it. On the way out, `Published` knows which steps all nodes have on their disks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elasticrl.runtime.checkpoint.load import open_shards
from elasticrl.runtime.checkpoint.manifest import Manifest, name_of
from elasticrl.runtime.checkpoint.place import Place, explained
from elasticrl.runtime.checkpoint.save import finish
from elasticrl.runtime.checkpoint.shelf import listing, mark_committed, read_manifest, verify
from elasticrl.runtime.vault.client import Content, Vault
from elasticrl.runtime.vault.errors import CheckpointCorrupt, CheckpointRefused
from elasticrl.runtime.vault.holdings import Holding, Whole, newest_whole
from elasticrl.runtime.vault.layout import Table
from elasticrl.runtime.vault.slots import FETCHED
from elasticrl.runtime.vault.version import Lineage, alive, mark

CHUNK = 16 << 20
NEWEST = 8  # checkpoints of a disk that are offered at least: the others' newest may be some older


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one node's disk has of one checkpoint, by its manifest.

    Example: Held(node="n01", manifest=Manifest(version=Version(1280), generation=14, own=(1,), ...), committed=True)
    """

    node: str
    manifest: Manifest  # without its files, which are this node's business alone
    committed: bool  # as far as this node knows

    def to_json(self) -> dict[str, object]:
        """For the wire: of the lineage its mark alone, which many manifests share."""
        bare = replace(self.manifest, lineage=())
        return {
            "node": self.node, "manifest": bare.encode().decode(), "lineage": mark(self.manifest.lineage),
            "committed": self.committed,
        }  # fmt: skip

    @classmethod
    def from_json(cls, row: Mapping[str, Any], lineages: Mapping[str, Lineage]) -> Held:
        """The reverse, with the lineages by their marks."""
        bare = Manifest.decode(str(row["manifest"]).encode(), f"a manifest of {row['node']}")
        manifest = replace(bare, lineage=lineages[row["lineage"]])
        return cls(node=str(row["node"]), manifest=manifest, committed=bool(row["committed"]))


def held(
    place: Place, node: str, *, commit: str | None = None, most: int = NEWEST
) -> tuple[tuple[Held, ...], tuple[str, ...]]:
    """The newest checkpoints on this node's disk, of which only manifests are read, and a sentence for each without one."""
    found: list[Held] = []
    problems: list[str] = []
    for entry in listing(place)[:most]:
        committed = entry.committed or entry.name == commit
        if entry.manifest is None and committed:
            problems.append(
                f"{node}: step {entry.version} of generation {entry.generation} is not good: {entry.problem}"
            )
        if entry.manifest is not None:
            found.append(Held(node=node, manifest=replace(entry.manifest, files=()), committed=committed))
    return tuple(found), tuple(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Short:
    """A checkpoint that lacks parts. `nodes`: on whose disks those are, where that is known.

    Example: Short(step=1280, said="step 1280 of generation 14 has 2 of its 3 parts on the disks ...", nodes=("n01",))
    """

    step: int
    said: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What everybody's disks come to. `whole`: the newest with all its parts here; `short`: all that is newer."""

    whole: Whole | None = None
    short: tuple[Short, ...] = ()

    @property
    def step(self) -> int:
        """Of the newest that is whole; 0 where none is."""
        return self.whole.version.step if self.whole else 0


def choose(everybody: Iterable[Held], *, here: str, uncommitted: bool = False) -> Choice:
    """The newest checkpoint of which all shards are on these disks. One that any node knows to be committed is committed: a
    node may have died between the commit and its own record of it. `uncommitted` takes the others too.
    """
    everything = list(everybody)
    counting = {each.manifest.name for each in everything if each.committed or uncommitted}
    everything = [each for each in everything if each.manifest.name in counting]
    whole = newest_whole([holding for each in everything for holding in _holdings(each)], here=here)
    newest = max(everything, key=lambda each: (each.manifest.generation, each.manifest.version), default=None)
    short: dict[str, Short] = {}
    for each in sorted(everything, key=lambda each: (each.manifest.version, each.manifest.generation), reverse=True):
        manifest = each.manifest
        if whole is not None and manifest.version <= whole.version:
            break
        if newest is not None and alive(newest.manifest.lineage, manifest.generation, manifest.version):
            short.setdefault(manifest.name, _short(manifest, everything))
    return Choice(whole=whole, short=tuple(short.values()))


def _short(manifest: Manifest, everything: Sequence[Held]) -> Short:
    here = {shard for each in everything if each.manifest.name == manifest.name for shard in each.manifest.shards}
    absent = [shard for shard in range(manifest.world) if shard not in here]
    nodes = tuple(dict.fromkeys(manifest.nodes[shard] for shard in absent if shard < len(manifest.nodes)))
    where = f" on the disk of {' and '.join(nodes)}" if nodes else ""
    said = (
        f"step {manifest.version.step} of generation {manifest.generation} has {manifest.world - len(absent)} of its "
        f"{manifest.world} parts on the disks that are here (missing: {', '.join(map(str, absent))}{where})"
    )
    return Short(step=manifest.version.step, said=said, nodes=nodes)


def _holdings(each: Held) -> list[Holding]:
    manifest = each.manifest
    return [
        Holding(
            at=each.node,
            node=each.node,
            writer=_writer(shard),
            version=manifest.version,
            generation=manifest.generation,
            shard=shard,
            world=manifest.world,
            nbytes=0,
            lineage=manifest.lineage,
        )
        for shard in manifest.shards
    ]


def bring(place: Place, whole: Whole, directory: Path, *, job: str, node: str, timeout_s: float = 60.0) -> int:
    """Put this disk's shards of `whole` into the node's vault in `directory`, each file hashed first; how many there were. The
    caller then waits until all nodes have done so, and gathers. CheckpointCorrupt names what is not good here; VaultError if
    memory is short.
    """
    name = name_of(whole.version, whole.generation)
    if name not in place.names():
        return 0
    if problems := verify(place, name):
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise CheckpointCorrupt(
            f"{node}: step {whole.version} of generation {whole.generation} is not good: {problems[0].sentence}{more}"
        )
    manifest = read_manifest(place, name)
    if manifest.world != whole.world:
        raise CheckpointCorrupt(f"{manifest.name} at {place} is of {manifest.world} shards and not of {whole.world}.")
    for shard in open_shards(place, manifest):
        number = int(shard.origin.removeprefix("shard "))
        # A writer for each shard: a writer's files are versions of one shard, the older of which may go.
        vault = Vault(directory, job=job, node=node, writer=_writer(number), keep=0)
        try:
            ticket = vault.snapshot(
                Content(table=Table(shard.pieces), tensors=shard.tensors, values=shard.values),
                version=whole.version,
                generation=whole.generation,
                shard=number,
                world=whole.world,
                lineage=whole.lineage,
            )
            ticket.wait_sealed(timeout_s)
        finally:
            vault.close()
    return len(manifest.shards)


def _writer(shard: int) -> str:
    """Like what was fetched from a peer it is for this restore: nobody copies it, and the gang's first sealed step ends it."""
    return f"{FETCHED}disk{shard}"


def assemble(disks: Mapping[str, Place], target: Place, *, name: str | None = None) -> Manifest:
    """One checkpoint as a shared place has it, from what several nodes' disks have: the newest that is whole, or `name`.

    CheckpointError says what is missing, or not good; nothing is published then.
    """
    everybody = [each for node, place in disks.items() for each in held(place, node)[0]]
    if name is not None:
        everybody = [each for each in everybody if each.manifest.name == name]
    choice = choose(everybody, here="", uncommitted=name is not None)
    if choice.whole is None:
        none = f"there is no {name or 'committed checkpoint'} at all"
        found = "; ".join(short.said for short in choice.short) or none
        raise CheckpointRefused(f"No checkpoint is whole in {', '.join(map(str, disks.values()))}: {found}.")
    whole = choice.whole
    chosen = name_of(whole.version, whole.generation)
    parts = [each for each in everybody if each.manifest.name == chosen]
    with explained(f"Assembling {chosen}", target):
        target.begin(chosen)
        for part in parts:
            _copy(disks[part.node], target, chosen)
    first = parts[0].manifest
    manifest = finish(
        target, version=whole.version, generation=whole.generation, world=whole.world, facts=first.facts,
        parent=first.parent, lineage=whole.lineage, timeout_s=1.0, chain=first.chain,
    )  # fmt: skip
    if any(part.committed for part in parts):
        mark_committed(target, chosen)
    return manifest


def _copy(place: Place, target: Place, name: str) -> None:
    """A disk's shards into what is staged; their tables last, as those say that the data are there."""
    if problems := verify(place, name):
        raise CheckpointCorrupt("; ".join(problem.sentence for problem in problems))
    files = [file.name for file in read_manifest(place, name).files if file.shard is not None]
    for file in sorted(files, key=lambda file: file.endswith(".json")):
        with target.output(name, file) as out, memoryview(place.buffer(name, file)) as data:
            for at in range(0, len(data), CHUNK):
                out.write(data[at : at + CHUNK])


class Published:
    """The steps of one generation that nodes have published, each on its own disk: one is whole once all have it.

    Each node tells one step with each vote, so that all know the same at the same moment. What a vote that broke was to tell is
    lost with its generation: the next one looks at the disks.
    """

    def __init__(self, ranks: Collection[int]) -> None:
        self._steps: dict[int, set[int]] = {rank: set() for rank in ranks}  # of those who speak for their nodes
        self._untold: deque[int] = deque()

    def add(self, step: int) -> None:
        """This node has published it."""
        self._untold.append(step)

    def say(self) -> float:
        """What this node tells next; 0: nothing."""
        return float(self._untold.popleft() if self._untold else 0)

    def hear(self, said: Sequence[float]) -> int | None:
        """Everybody's words, in rank order. The newest step that all nodes have by now, each once; None: there is none."""
        for rank, steps in self._steps.items():
            if said[rank]:
                steps.add(int(said[rank]))
        whole = max(set.intersection(*self._steps.values()), default=None)
        if whole is not None:
            for steps in self._steps.values():
                steps.difference_update({step for step in steps if step <= whole})
        return whole
