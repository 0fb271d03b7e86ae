"""Reading a checkpoint: as a source of pieces for any sharding, without unpickling anything.

The one idea: the tables say where raw bytes lie, so loading is mapping a file and copying boxes. What torch's readers use (the
pickled index, the blobs around the bytes) isn't looked at.
"""

from collections.abc import Collection
from typing import Any

from elasticrl.runtime.checkpoint.manifest import (
    Conditions,
    Difference,
    FileEntry,
    Manifest,
    ShardTable,
    differences,
)
from elasticrl.runtime.checkpoint.place import UNREAD, Place, explained
from elasticrl.runtime.checkpoint.save import machine_facts, table_file
from elasticrl.runtime.checkpoint.shelf import read_manifest, verify
from elasticrl.runtime.vault.errors import CheckpointCorrupt, CheckpointRefused
from elasticrl.runtime.vault.source import Shard, Source, tensor_at


def open_checkpoint(place: Place, name: str, *, check: bool = True) -> Source:
    """One checkpoint as a source. With `check`, every file is hashed first; CheckpointCorrupt names the bad one."""
    if check and (problems := verify(place, name)):
        raise CheckpointCorrupt("; ".join(problem.sentence for problem in problems))
    manifest = read_manifest(place, name)
    if manifest.own is not None and len(manifest.own) < manifest.world:
        raise CheckpointRefused(
            f"{name} at {place} has {len(manifest.own)} of its {manifest.world} parts; the others are on the disks of "
            f"{', '.join(sorted({*manifest.nodes} - {manifest.nodes[shard] for shard in manifest.own})) or 'other nodes'}. Put "
            "all nodes' directories side by side, and make one of them: elasticrl checkpoint assemble RUN TARGET."
        )
    return Source(open_shards(place, manifest), name=f"checkpoint {name}")


def open_shards(place: Place, manifest: Manifest) -> list[Shard]:
    """The shards of a checkpoint that are here: all, or on a node's own disk that node's."""
    with explained(f"Loading {manifest.name}", place, UNREAD):
        tables = [_table(place, manifest, shard) for shard in manifest.shards]
        return [_shard(place.buffer(manifest.name, table.data.name), table) for table in tables]


def permitted(
    place: Place, manifest: Manifest, facts: Conditions, *, allow: Collection[str] = ()
) -> tuple[Difference, ...]:
    """What differs between the run that wrote a checkpoint and this one, to be logged; CheckpointRefused if that is grave."""
    changed = differences(manifest.facts, machine_facts(facts), allow=allow)
    if refused := [change.sentence for change in changed if change.refuse]:
        raise CheckpointRefused(f"This run can't continue from {manifest.name} at {place}. " + " ".join(refused))
    return changed


def _table(place: Place, manifest: Manifest, shard: int) -> ShardTable:
    file = _file(manifest, table_file(shard))
    table = ShardTable.decode(place.read(manifest.name, file.name), f"{manifest.name}/{file.name}")
    if table.shard != shard:
        raise CheckpointCorrupt(
            f"{manifest.name}/{file.name} is the table of shard {table.shard}: files were mixed up."
        )
    return table


def _file(manifest: Manifest, name: str) -> FileEntry:
    for file in manifest.files:
        if file.name == name:
            return file
    raise CheckpointCorrupt(f"{manifest.name} does not list {name}: its manifest is not one that a whole save leaves.")


def _shard(buffer: Any, table: ShardTable) -> Shard:
    for row in table.rows:
        if row.raw_at + row.piece.nbytes > len(buffer):
            raise CheckpointCorrupt(f"{table.data.name} ends before {row.piece.name} does: it was cut off.")
    return Shard(
        origin=f"shard {table.shard}",
        pieces=tuple(row.piece for row in table.rows),
        tensors=tuple(tensor_at(buffer, row.raw_at, row.piece) for row in table.rows),
        values=dict(table.values),
    )
