"""Reading a checkpoint: as a source of pieces for any sharding, without unpickling anything.

The one idea: the tables say where raw bytes lie, so loading is mapping a file and copying boxes. What torch's readers use (the
pickled index, the blobs around the bytes) isn't looked at.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from elasticrl.runtime.checkpoint.far import LOOKS, Absent, Far, FarFile, Patience, answers
from elasticrl.runtime.checkpoint.manifest import (
    MANIFEST,
    Conditions,
    Difference,
    FileEntry,
    Manifest,
    ShardTable,
    differences,
)
from elasticrl.runtime.checkpoint.place import UNREAD, Place, Url, explained
from elasticrl.runtime.checkpoint.save import machine_facts, table_file
from elasticrl.runtime.checkpoint.shelf import looked_at, read_manifest
from elasticrl.runtime.vault.errors import CheckpointCorrupt, CheckpointRefused
from elasticrl.runtime.vault.piece import Box
from elasticrl.runtime.vault.source import Shard, Source, tensor_at


def open_checkpoint(place: Place, name: str, *, check: bool = True) -> Source:
    """One checkpoint as a source. With `check`, every file is hashed first; CheckpointCorrupt names the bad one. At a URL it is
    read as far as it is used, and what is read is checked; while its store fails it is asked again, for `place.wait_s`.
    """
    if check and (problems := looked_at(place, name)):
        raise CheckpointCorrupt("; ".join(problem.sentence for problem in problems))
    manifest = read_manifest(place, name)
    refuse_part(place, manifest)
    with explained(f"Loading {name}", place, UNREAD):
        if isinstance(place, Url):
            patience = Patience(wait_s=place.wait_s)
            return far_source(place, manifest, read_tables(place, manifest, manifest.shards, patience), patience)
        return Source(open_shards(place, manifest), name=f"checkpoint {name}")


def refuse_part(place: Place, manifest: Manifest) -> None:
    """CheckpointRefused if these are not all shards of a checkpoint."""
    if manifest.own is not None and len(manifest.own) < manifest.world:
        raise CheckpointRefused(
            f"{manifest.name} at {place} has {len(manifest.own)} of its {manifest.world} parts; the others are on the disks of "
            f"{', '.join(sorted({*manifest.nodes} - {manifest.nodes[shard] for shard in manifest.own})) or 'other nodes'}. Put "
            "all nodes' directories side by side, and make one of them: elasticrl checkpoint assemble RUN TARGET."
        )


def open_shards(place: Place, manifest: Manifest) -> list[Shard]:
    """The shards of a checkpoint that are here: all, or on a node's own disk that node's."""
    with explained(f"Loading {manifest.name}", place, UNREAD):
        tables = [table_of(manifest, shard, read_table(place, manifest, shard)) for shard in manifest.shards]
        return [_shard(place.buffer(manifest.name, table.data.name), table) for table in tables]


def far_source(place: Url, manifest: Manifest, texts: Mapping[int, bytes], patience: Patience) -> Source:
    """A checkpoint at a URL, from the texts of all its tables; of its data nothing is read yet."""
    tables = [table_of(manifest, shard, texts[shard]) for shard in manifest.shards]
    files = [FarFile(place, manifest.name, table) for table in tables]
    shards = [_shard(file.memory, file.table) for file in files]
    return Source(shards, name=f"checkpoint {manifest.name}", far=_Explained(place, manifest, Far(files, patience)))


class _Explained:
    """What is brought, with a sentence where the store fails."""

    def __init__(self, place: Place, manifest: Manifest, far: Far) -> None:
        self._place, self._name, self._far = place, manifest.name, far

    def bring(self, boxes: Iterable[tuple[int, Box]], /) -> None:
        with explained(f"Reading {self._name}", self._place, UNREAD):
            self._far.bring(boxes)


def permitted(
    place: Place, manifest: Manifest, facts: Conditions, *, allow: Collection[str] = ()
) -> tuple[Difference, ...]:
    """What differs between the run that wrote a checkpoint and this one, to be logged; CheckpointRefused if that is grave."""
    changed = differences(manifest.facts, machine_facts(facts), allow=allow)
    if refused := [change.sentence for change in changed if change.refuse]:
        raise CheckpointRefused(f"This run can't continue from {manifest.name} at {place}. " + " ".join(refused))
    return changed


def read_table(place: Place, manifest: Manifest, shard: int) -> bytes:
    """The text of a shard's table."""
    try:
        return place.read(manifest.name, table_file(shard))
    except FileNotFoundError:
        raise CheckpointCorrupt(f"{manifest.name}: {table_file(shard)} is missing.") from None


def read_tables(place: Url, manifest: Manifest, shards: Sequence[int], patience: Patience) -> dict[int, bytes]:
    """The texts of these shards' tables, each looked at. OSError where the store fails for too long."""
    with explained(f"Loading {manifest.name}", place, UNREAD):
        asks = [partial(_far_table, place, manifest, shard) for shard in shards]
        return {shards[at]: text for at, text in answers(asks, patience)}


def _far_table(place: Url, manifest: Manifest, shard: int) -> bytes:
    file = _file(manifest, table_file(shard))
    for look in range(1, LOOKS + 1):
        try:
            text = place.read(manifest.name, file.name)
        except FileNotFoundError:
            raise Absent(f"{manifest.name}: {file.name} is missing.") from None
        if len(text) < file.nbytes:
            raise Absent(f"{manifest.name}: {file.name} was cut off: {len(text)} of {file.nbytes} bytes are there.")
        try:
            table_of(manifest, shard, text)
            break
        except CheckpointCorrupt:
            if look == LOOKS:
                raise
    return text


def table_of(manifest: Manifest, shard: int, text: bytes) -> ShardTable:
    """The table of which this is the text; CheckpointCorrupt unless it is the one that the manifest lists."""
    file = _file(manifest, table_file(shard))
    table = ShardTable.decode(text, f"{manifest.name}/{file.name}")
    if table.shard != shard:
        raise CheckpointCorrupt(
            f"{manifest.name}/{file.name} is the table of shard {table.shard}: files were mixed up."
        )
    if hashlib.sha256(text).hexdigest() != file.sha256 or table.data != _file(manifest, table.data.name):
        raise CheckpointCorrupt(f"{manifest.name}/{file.name} is not the table that {MANIFEST} lists: it was changed.")
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
