"""What a checkpoint says of itself. Pure values and JSON.

The one idea: every document carries the checksum of its own body, and the manifest those of all other files, so a chain of
SHA-256 leads from one small file to every byte (and `sha256sum` can follow it by hand).
"""

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from elasticrl.base.parsed import parsed
from elasticrl.runtime.vault.errors import CheckpointCorrupt, CheckpointRefused
from elasticrl.runtime.vault.piece import MOST, Piece
from elasticrl.runtime.vault.version import Lineage, Version, lineage_from_json

FORMAT = 2
BLOCKS = 2048  # of a data file, about
WHOLE = 1 << 30  # bytes of a document: a shard's table has all of its small values
MANIFEST = "manifest.json"
COMMITTED = "COMMITTED"
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?-g(\d+)")


def name_of(version: Version, generation: int) -> str:
    """A checkpoint's name. It tells what is in it and not how it was cut: no world size.

    >>> name_of(Version(1280), 14), name_of(Version(1280, 2), 14)
    ('step-00001280-g14', 'step-00001280.2-g14')
    """
    update = f".{version.update}" if version.update else ""
    return f"step-{version.step:08d}{update}-g{generation}"


def block_of(nbytes: int) -> int:
    """How many bytes of a data file have a checksum of their own: what is read of it at a URL is as many at least. Few, so that
    little is read in vain; and not so few that the checksums are long.

    >>> [block_of(nbytes) >> 10 for nbytes in (0, 60_000_000, 600_000_000, 60_000_000_000)]
    [16, 32, 512, 1024]
    """
    return min(max(1 << (nbytes // BLOCKS).bit_length(), 1 << 14), 1 << 20)


def parse_name(name: str) -> tuple[Version, int] | None:
    """The reverse of `name_of`; None for any other name."""
    match = _NAME.fullmatch(name)
    return (Version(int(match[1]), int(match[2] or 0)), int(match[3])) if match else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What a run is, as far as a checkpoint cares. A later run is compared with it before it continues.

    Example: Conditions(job="ppo", lanes=8, batch=64, data="mydata:10000:seed=7", config="sha256:ab...", threads=1)
    """

    job: str = ""
    lanes: int = 0
    batch: int = 0  # samples of a whole step
    data: str = ""  # the cursor's own description of what it walks over
    config: str = ""  # hash of the configuration
    threads: int = 0
    tp: int = 0  # ranks that a model is cut up between
    cp: int = 0  # those that share a sequence's tokens
    isa: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Conditions":
        """The reverse of `asdict`."""
        versions = {str(name): str(version) for name, version in row.get("versions", {}).items()}
        plain: dict[str, Any] = {
            name: (int if name in {"lanes", "batch", "threads", "tp", "cp"} else str)(row[name])
            for name in row
            if name != "versions"
        }
        return cls(**plain, versions=versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint. `shard` is None for those that belong to all."""

    name: str
    nbytes: int
    sha256: str
    shard: int | None = None
    node: str = ""  # who wrote it

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "FileEntry":
        """The reverse of `asdict`. No name leads out of the checkpoint."""
        name, shard = str(row["name"]), row.get("shard")
        if name.startswith("/") or ".." in name.split("/") or "\0" in name:
            raise ValueError(f"{name!r} is no file of a checkpoint")
        return cls(
            name=name, nbytes=_natural(row["nbytes"]), sha256=str(row["sha256"]), shard=None if shard is None else int(shard),
            node=str(row.get("node", "")),
        )  # fmt: skip


def _natural(number: object) -> int:
    """A place in a file, or its length; ValueError if no file has it."""
    if not isinstance(number, int) or not 0 <= number < MOST:
        raise ValueError(f"{number!r} is no place in a file")
    return number


@dataclass(frozen=True, slots=True)
class Row:
    """Where one piece lies in a shard's data file: the raw bytes, and the blob around them that torch reads."""

    piece: Piece
    raw_at: int
    blob_at: int
    blob_bytes: int

    def to_json(self) -> list[object]:
        """One line of the shard's table."""
        return [*self.piece.to_json(), self.raw_at, self.blob_at, self.blob_bytes]

    @classmethod
    def from_json(cls, row: list[Any]) -> "Row":
        """The reverse of `to_json`."""
        raw_at, blob_at, blob_bytes = map(_natural, row[5:])
        return cls(Piece.from_json(row[:5]), raw_at, blob_at, blob_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTable:
    """What one shard's data file holds, and the small values of that shard. Written beside it.

    Example: ShardTable(shard=3, node="n01", data=FileEntry(...), rows=(Row(...),), values={}, block=262144, sums=("ab...",))
    """

    shard: int
    node: str
    data: FileEntry
    rows: tuple[Row, ...]
    values: Mapping[str, Any]
    block: int = 0  # bytes; 0: it has no checksums of blocks, as on a disk, but for that of the whole
    sums: tuple[
        str, ...
    ] = ()  # the SHA-256 of each block of the data file, so that a part of it can be read and trusted

    def encode(self) -> bytes:
        """The document."""
        return seal(
            {
                "shard": self.shard,
                "node": self.node,
                "data": asdict(self.data),
                "rows": [row.to_json() for row in self.rows],
                "values": self.values,
                "block": self.block,
                "sums": self.sums,
            }
        )

    def in_blocks(self) -> "ShardTable":
        """The same, of one block if it has none: a checkpoint of a disk that was copied to a URL is read file by file."""
        return (
            self
            if self.block
            else replace(self, block=max(1, self.data.nbytes), sums=(self.data.sha256,) if self.data.nbytes else ())
        )

    @classmethod
    def decode(cls, text: bytes, where: str) -> "ShardTable":
        """The reverse; CheckpointCorrupt names `where`."""
        body = unseal(text, where)
        try:
            table = cls(
                shard=int(body["shard"]),
                node=str(body["node"]),
                data=FileEntry.from_json(body["data"]),
                rows=tuple(Row.from_json(row) for row in body["rows"]),
                values=body["values"],
                block=int(body["block"]),
                sums=tuple(map(str, body["sums"])),
            )
            blocks = -(-table.data.nbytes // table.block) if table.block else 0
            if table.block < 0 or len(table.sums) != blocks:
                raise ValueError(f"{len(table.sums)} checksums of blocks of {table.block} bytes")
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            raise CheckpointCorrupt(f"{where} is not a shard's table as this version writes it: {error!r}") from error
        return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The last file to be written. Example: see `elasticrl checkpoint list --json`."""

    version: Version
    generation: int
    world: int
    parent: str | None  # the commit it follows
    facts: Conditions
    contents: Mapping[str, int]  # bytes of tensors by part; parts without tensors have 0
    files: tuple[FileEntry, ...]
    lineage: Lineage = ()
    written: str = ""  # wall clock, for people
    own: tuple[int, ...] | None = None  # the shards that are here, on a node's own disk; None: all of them
    nodes: tuple[str, ...] = ()  # with `own`: on whose disk each shard is
    code: str = ""  # hash of the package's files
    chain: str = ""  # the link of the digests' chain at its step; empty where digests are not made, or not in each step
    score: float | None = None  # of the evaluation of just this state; None if it was not evaluated

    @property
    def name(self) -> str:
        """Its directory."""
        return name_of(self.version, self.generation)

    @property
    def shards(self) -> tuple[int, ...]:
        """The shards that are here."""
        return tuple(range(self.world)) if self.own is None else self.own

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return sum(file.nbytes for file in self.files)

    def encode(self) -> bytes:
        """The document."""
        return seal(
            {
                "format": FORMAT,
                "step": self.version.step,
                "update": self.version.update,
                "generation": self.generation,
                "world": self.world,
                "parent": self.parent,
                "facts": asdict(self.facts),
                "contents": dict(self.contents),
                "lineage": [cut.to_json() for cut in self.lineage],
                "written": self.written,
                "own": self.own,
                "nodes": self.nodes,
                "code": self.code,
                "chain": self.chain,
                "score": self.score,
                "files": [asdict(file) for file in self.files],
            }
        )

    @classmethod
    def decode(cls, text: bytes, where: str) -> "Manifest":
        """The reverse; CheckpointCorrupt names `where`, and CheckpointRefused too where it is whole and of another format."""
        body = unseal(text, where)
        if body.get("format") != FORMAT:
            raise CheckpointRefused(
                f"{where} has format {body.get('format')!r} and this version reads {FORMAT}. It is not damaged: go on from it "
                "with the version that wrote it, or begin anew in another place (checkpoint.dir)."
            )
        try:
            return cls(
                version=Version(int(body["step"]), int(body["update"])),
                generation=int(body["generation"]),
                world=int(body["world"]),
                parent=None if body["parent"] is None else str(body["parent"]),
                facts=Conditions.from_json(body["facts"]),
                contents={str(part): int(nbytes) for part, nbytes in body["contents"].items()},
                lineage=lineage_from_json(body["lineage"]),
                written=str(body["written"]),
                own=None if body.get("own") is None else tuple(map(int, body["own"])),
                nodes=tuple(map(str, body.get("nodes", ()))),
                code=str(body["code"]),
                chain=str(body["chain"]),
                score=None if body.get("score") is None else float(body["score"]),
                files=tuple(map(FileEntry.from_json, body["files"])),
            )
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            raise CheckpointCorrupt(f"{where} is not a manifest as this version writes it: {error!r}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """Written into a checkpoint after the transaction that made it the newest: a store that lost its data can't deny it.

    Example: Committed(name="step-00001280-g14", generation=14, manifest_sha256="ab...")
    """

    name: str
    generation: int
    manifest_sha256: str

    def encode(self) -> bytes:
        """The document."""
        return seal(asdict(self))

    @classmethod
    def decode(cls, text: bytes, where: str) -> "Committed":
        """The reverse; CheckpointCorrupt names `where`."""
        try:
            return cls(**unseal(text, where))
        except TypeError as error:
            raise CheckpointCorrupt(f"{where} is not a commit record as this version writes it: {error!r}") from error


def seal(body: Mapping[str, Any]) -> bytes:
    """A JSON document with the checksum of its own body."""
    text = json.dumps(body, separators=(",", ":"))
    return f'{{"body":{text},\n"sha256":"{hashlib.sha256(text.encode()).hexdigest()}"}}\n'.encode()


def unseal(text: bytes, where: str) -> dict[str, Any]:
    """The body of such a document; CheckpointCorrupt if a byte of it has changed."""
    try:
        body = parsed(text, most=WHOLE)["body"]
        same = isinstance(body, dict) and seal(body) == text
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointCorrupt(f"{where} is not a whole document ({error!r}): it was torn or changed.") from error
    if not same:
        raise CheckpointCorrupt(f"{where} does not have the checksum of its own contents: it was changed.")
    return dict(body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How a run differs from the one that wrote a checkpoint. `refuse`: it must be allowed by name."""

    field: str
    refuse: bool
    sentence: str


_CONSEQUENCE: Mapping[str, tuple[bool, str]] = {
    "job": (True, "it belongs to another job"),
    "lanes": (
        True,
        "samples, random streams and the gradient tree belong to lanes, so every bit from here on would differ",
    ),
    "batch": (True, "the learning rate and the data position were chosen for the old one"),
    "data": (True, "the data position would point at other samples, so some would be seen twice and some never"),
    "tp": (True, "a team of another size adds up other parts of a layer, so every bit from here on would differ"),
    "cp": (True, "tokens that others share are added up in another order, so every bit from here on would differ"),
    "config": (False, "something in the configuration has changed; `elasticrl config diff FILE OTHER` shows what"),
    "threads": (False, "sums are split differently, so bits will differ"),
    "isa": (False, "another instruction set computes other last bits"),
    "versions": (False, "other library versions may compute other last bits"),
}


def differences(saved: Conditions, now: Conditions, *, allow: Collection[str] = ()) -> tuple[Difference, ...]:
    """What has changed, with the consequence of each. Fields named in `allow` are never refused."""
    found: list[Difference] = []
    for name, (grave, consequence) in _CONSEQUENCE.items():
        old, new = getattr(saved, name), getattr(now, name)
        if old == new or not old or not new:  # unknown on either side is no difference
            continue
        refuse = grave and name not in allow
        remedy = f" Set it back, or continue with --allow {name} (checkpoint.allow)." if refuse else ""
        sentence = f"{name} was {_show(old)} and is {_show(new)}: {consequence}.{remedy}"
        found.append(Difference(field=name, refuse=refuse, sentence=sentence))
    return tuple(found)


def _show(value: object) -> str:
    return ", ".join(f"{k} {v}" for k, v in sorted(value.items())) if isinstance(value, Mapping) else repr(value)
