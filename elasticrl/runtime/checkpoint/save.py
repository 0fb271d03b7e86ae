"""Writing a checkpoint out of vault files: each shard by whoever has it, the manifest by one.

The one idea: writers share a staging directory and no other contact. Each leaves its data and, last, a table of it; the
finisher waits for all tables, adds what torch's readers need and the manifest, and publishes.
"""

import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

from elasticrl.runtime import provenance
from elasticrl.runtime.checkpoint import dcp, tree
from elasticrl.runtime.checkpoint.manifest import (
    MANIFEST,
    Conditions,
    FileEntry,
    Manifest,
    Row,
    ShardTable,
    block_of,
    name_of,
)
from elasticrl.runtime.checkpoint.place import UNWRITTEN, Place, Url, explained
from elasticrl.runtime.checkpoint.shelf import read_manifest, verify
from elasticrl.runtime.vault import faults
from elasticrl.runtime.vault.errors import CheckpointCorrupt, CheckpointError, CheckpointStorage, StateError
from elasticrl.runtime.vault.layout import Stamp
from elasticrl.runtime.vault.slots import Pinned
from elasticrl.runtime.vault.source import merge, shard_of
from elasticrl.runtime.vault.version import Lineage, Version

OBJECTS = "objects.distcp"
METADATA = ".metadata"
POLL_S = 0.02
TORN_S = 5.0  # for a small file that is being written
PACKAGES = ("elasticrl", "torch", "numpy", "transformers", "safetensors", "vllm", "deepspeed", "nvidia-nccl-cu12",
            "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")  # fmt: skip


def data_file(shard: int) -> str:
    """A shard's data. The world size is in no name: shard 3 of 8 and shard 3 of 5 are called the same."""
    return f"data-{shard:04d}.distcp"


def table_file(shard: int) -> str:
    """A shard's table."""
    return f"data-{shard:04d}.json"


def refused_file(shard: int) -> str:
    """Says that this shard will not come. It is empty, as the disk may be full."""
    return f"data-{shard:04d}.refused"


def machine_facts(facts: Conditions) -> Conditions:
    """`facts` with what decides the bits on this machine: thread count, instruction set, versions."""
    return replace(
        facts,
        threads=facts.threads or torch.get_num_threads(),
        isa=facts.isa or torch.backends.cpu.get_cpu_capability(),
        versions=facts.versions or installed(),
    )


@cache
def installed() -> Mapping[str, str]:
    """The version of each package that may decide bits, of those that are here."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def write_shard(place: Place, pinned: Pinned, *, block: int = 0) -> None:
    """Stage the shard that is in a pinned vault file; the file is checked as it is read. At a URL each `block` bytes get a
    checksum; 0: as many as suit its size. A disk's files are read whole and pay for none.
    """
    stamp = pinned.sealed.stamp
    name = name_of(stamp.version, stamp.generation)
    with explained(f"Saving shard {stamp.shard} of step {stamp.version}", place):
        pinned.verify()
        shard = shard_of(pinned)
        place.begin(name)
        for file in (table_file(stamp.shard), refused_file(stamp.shard)):
            place.unstage(name, file)  # of an earlier try, that the finisher must not take for this one's
        block = (block or block_of(sum(piece.nbytes for piece in shard.pieces))) if isinstance(place, Url) else 0
        blobs: list[dcp.Blob] = []
        with place.output(name, data_file(stamp.shard)) as out:
            if block:
                out.cut(block)
            for tensor in shard.tensors:
                faults.reach("checkpoint.tensor", name)
                blobs.append(dcp.write_tensor(out, tensor))
        entry = out.entry(data_file(stamp.shard), shard=stamp.shard, node=stamp.node)
        table = ShardTable(
            shard=stamp.shard,
            node=stamp.node,
            data=entry,
            rows=tuple(
                Row(piece, blob.raw_at, blob.at, blob.nbytes) for piece, blob in zip(shard.pieces, blobs, strict=True)
            ),
            values=shard.values,
            block=block,
            sums=out.sums,
        )
        with place.output(name, table_file(stamp.shard)) as out:
            out.write(table.encode())


def withdraw(place: Place, stamp: Stamp) -> None:
    """Take away what is staged of this shard, as its save failed: on a full disk that is the room for the next one. What the
    others have staged stays, for they may not be asked again.
    """
    name = name_of(stamp.version, stamp.generation)
    with suppress(StateError, OSError):
        if name in place.names():  # in an object store these are files of the published one
            return
        for file in (table_file(stamp.shard), data_file(stamp.shard)):
            place.unstage(name, file)


def refuse(place: Place, stamp: Stamp) -> None:
    """This shard will not come; whoever waits for it need not. On a disk that takes not even that they hear it with a vote.

    Found live: after a moment of a full disk no checkpoint was written for `checkpoint.timeout`, as rank 0 waited for a shard
    whose writer had failed long ago.
    """
    name = name_of(stamp.version, stamp.generation)
    with suppress(StateError, OSError):
        place.begin(name)
        with place.output(name, refused_file(stamp.shard)):
            pass


def finish(
    place: Place, *, version: Version, generation: int, world: int, facts: Conditions, parent: str | None = None,
    lineage: Lineage = (), timeout_s: float = 600.0, own: Collection[int] | None = None, nodes: Sequence[str] = (),
    hopeless: Callable[[], str] = lambda: "", chain: str = "",
) -> Manifest:  # fmt: skip
    """Wait until every shard is staged, then publish. One process of the gang does this. `hopeless` may say why the missing
    ones will not come.

    `own`: where each node writes to its own disk, the shards of this node; one process of each node does it then. `nodes`: on
    whose disk each shard is. `chain`: the link of the digests there.
    """
    name = name_of(version, generation)
    with explained(f"Saving step {version}", place):
        if (done := _already(place, name)) is not None:
            return done
        tables, files = _collect(place, name, range(world) if own is None else sorted(own), timeout_s, hopeless)
        values = merge((f"shard {table.shard}", dict(table.values)) for table in tables)
        paths: dict[str, tree.Path] = {}
        plain: list[tuple[tree.Path, object]] = []
        for part, skeleton in values.items():
            found, leaves = tree.leaves(part, skeleton)
            paths.update(found)
            plain.extend(leaves)
        with place.output(name, OBJECTS) as out:
            objects = dcp.write_objects(out, plain)
        files.append(out.entry(OBJECTS))
        with place.output(name, METADATA) as out:
            out.write(dcp.metadata(tables, objects, OBJECTS, paths))
        files.append(out.entry(METADATA))
        manifest = Manifest(
            version=version, generation=generation, world=world, parent=parent, facts=machine_facts(facts),
            contents=_contents(tables, values), files=tuple(files), lineage=lineage,
            written=datetime.now(UTC).isoformat(timespec="seconds"), own=None if own is None else tuple(sorted(own)),
            nodes=tuple(nodes), code=provenance.package(), chain=chain, score=_score(values.get("run"), version),
        )  # fmt: skip
        faults.reach("checkpoint.manifest", name)
        with place.output(name, MANIFEST) as out:
            out.write(manifest.encode())
        place.publish(name)
    return manifest


def _score(run: object, version: Version) -> float | None:
    """What the state itself says that it scored; it also remembers what an earlier one did."""
    scored = run.get("score") if isinstance(run, Mapping) else None
    return float(scored[1]) if scored and not version.update and scored[0] == version.step else None


def _already(place: Place, name: str) -> Manifest | None:
    """A save that is asked for again after it had been published. A published one that is not good is cleared away first.
    CheckpointStorage where that cannot be told, as the place is away or fails, CheckpointRefused where another version wrote
    it: then it stays.
    """
    if name not in place.names():
        return None
    with suppress(CheckpointCorrupt):
        read_manifest(place, name)
    problems = verify(place, name)
    if not problems:
        place.abandon(name)
        return read_manifest(place, name)
    if not all(problem.proven for problem in problems):
        raise CheckpointStorage(f"{problems[0].sentence}. It stays, as nobody knows whether it is good. {UNWRITTEN}")
    place.remove(name)
    return None


def _collect(
    place: Place, name: str, wanted: Sequence[int], timeout_s: float, hopeless: Callable[[], str]
) -> tuple[list[ShardTable], list[FileEntry]]:
    limit = time.monotonic() + timeout_s
    tables: dict[int, ShardTable] = {}
    files: list[FileEntry] = []
    torn: dict[int, float] = {}  # since when; some stores show what is still being written
    while len(tables) < len(wanted):
        for shard in wanted:
            if shard in tables:
                continue
            file = table_file(shard)
            text = place.staged(name, file)
            if text is None:
                continue
            try:
                table = tables[shard] = ShardTable.decode(text, f"{name}/{file}")
            except CheckpointCorrupt:
                if time.monotonic() > torn.setdefault(shard, time.monotonic()) + TORN_S:
                    raise
                continue
            files += [table.data, _entry_of(file, text, table)]
        why = f"not within {timeout_s:g} s" if time.monotonic() > limit else _refused(place, name, wanted) or hopeless()
        if len(tables) < len(wanted) and why:
            absent = ", ".join(str(shard) for shard in wanted if shard not in tables)
            raise CheckpointError(
                f"step {name} has {len(tables)} of {len(wanted)} shards (missing: {absent}; {why}): it is not "
                "published, and the commit stays where it is. See the logs of the nodes that carry those shards."
            )
        if len(tables) < len(wanted):
            time.sleep(POLL_S)
    return [tables[shard] for shard in wanted], files


def _refused(place: Place, name: str, wanted: Sequence[int]) -> str:
    failed = [str(shard) for shard in wanted if place.staged(name, refused_file(shard)) is not None]
    return f"the writing of {', '.join(failed)} failed" if failed else ""


def _entry_of(file: str, text: bytes, table: ShardTable) -> FileEntry:
    return FileEntry(
        name=file, nbytes=len(text), sha256=hashlib.sha256(text).hexdigest(), shard=table.shard, node=table.node
    )


def _contents(tables: list[ShardTable], values: Mapping[str, object]) -> dict[str, int]:
    """Bytes of tensors by part, each box once."""
    sizes = dict.fromkeys(values, 0)
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for table in tables:
        for row in table.rows:
            key = (row.piece.name, row.piece.offset)
            if key not in seen:
                seen.add(key)
                part = row.piece.name.split(".", 1)[0]
                sizes[part] = sizes.get(part, 0) + row.piece.nbytes
    return sizes
