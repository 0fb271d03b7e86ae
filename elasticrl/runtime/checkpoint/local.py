"""Checkpoints on the nodes' own disks: each has its shards, none has all, and no file system is shared.

The one idea: a shard on a disk is brought back into its node's vault, and from there on it is a shard like any other: the gang
agrees on the newest version that is whole among all nodes, a missing shard is named, and each rank fetches what it lacks from
its peers' memory. `held` says what is there, `newest_whole` chooses among everybody's words, `bring` brings the chosen one.
"""

from __future__ import annotations

from pathlib import Path

from elasticrl.runtime.checkpoint.load import open_shards
from elasticrl.runtime.checkpoint.manifest import name_of
from elasticrl.runtime.checkpoint.place import Place
from elasticrl.runtime.checkpoint.shelf import Entry, listing, read_manifest, verify
from elasticrl.runtime.vault.client import Content, Vault
from elasticrl.runtime.vault.errors import CheckpointCorrupt
from elasticrl.runtime.vault.holdings import Holding, Whole
from elasticrl.runtime.vault.layout import Table

NEWEST = 3  # versions that are hashed and offered: the others' newest may be one or two older


def held(
    place: Place, node: str, *, commit: str | None = None, uncommitted: bool = False, newest: int = NEWEST
) -> tuple[tuple[Holding, ...], tuple[str, ...]]:
    """The shards of the `newest` good checkpoints on this node's disk, and a sentence for each that is not good."""
    found: list[Holding] = []
    passed_over: list[str] = []
    versions = 0
    for entry in listing(place):
        if versions == newest:
            break
        if not (entry.committed or entry.name == commit or uncommitted):
            continue
        problem = entry.problem or next((p.sentence for p in verify(place, entry.name)), "")
        if problem:
            passed_over.append(f"{node}: step {entry.version} of generation {entry.generation} is not good: {problem}")
            continue
        versions += 1
        found += _holdings(entry, node)
    return tuple(found), tuple(passed_over)


def _holdings(entry: Entry, node: str) -> list[Holding]:
    manifest = entry.manifest
    assert manifest is not None
    sizes = {file.shard: file.nbytes for file in manifest.files if file.name.endswith(".distcp")}
    return [
        Holding(
            at=node,
            node=node,
            writer=_writer(shard),
            version=manifest.version,
            generation=manifest.generation,
            shard=shard,
            world=manifest.world,
            nbytes=sizes.get(shard, 0),
            lineage=manifest.lineage,
        )
        for shard in manifest.shards
    ]


def bring(place: Place, whole: Whole, directory: Path, *, job: str, node: str, timeout_s: float = 60.0) -> int:
    """Put this disk's shards of `whole` into the node's vault in `directory`; how many there were. The caller then waits until
    all nodes have done so, and gathers. VaultError if memory is short.
    """
    manifest = read_manifest(place, name_of(whole.version, whole.generation)) if _has(place, whole) else None
    if manifest is None:
        return 0
    if manifest.world != whole.world:
        raise CheckpointCorrupt(f"{manifest.name} at {place} is of {manifest.world} shards and not of {whole.world}.")
    for shard in open_shards(place, manifest):
        number = int(shard.origin.removeprefix("shard "))
        # A writer for each shard: a writer's files are versions of one shard, the older of which may go.
        vault = Vault(directory, job=job, node=node, writer=_writer(number), keep=1)
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


def _has(place: Place, whole: Whole) -> bool:
    return name_of(whole.version, whole.generation) in place.names()


def _writer(shard: int) -> str:
    return f"disk{shard}"
