"""The file of one shard in the vault, byte by byte.

The one idea: the last eight bytes to be written, the seal, can't be there by accident (they contain a checksum of the prelude,
which contains one of the header), and they are the first to be cleared when the file is used again. So a writer killed at any
byte leaves a file without a seal, and a file with a seal is whole.

    0      prelude: magic, format, where everything lies, checksums of header and sums
    56     the seal
    64     header: three lines of JSON: identity, table of pieces, small values
    ...    data, from a page boundary: the pieces one after another, each aligned to 64 bytes
    ...    sums: one CRC-32 for each block (4 MiB) of data

CRC-32 by zlib-ng runs at 10 to 20 GB/s without holding the interpreter lock, eight times as fast as the standard library's, and
gives the same sums. Lane-wise hashes in numpy take the lock thousands of times per gigabyte, which the training thread feels.

A vault reads every header several times on its way and needs the identity alone: the table is the same at every step, so it is
understood once, and the values, where a ledger may make up half a megabyte, are for whoever restores from them.
"""

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from zlib_ng.zlib_ng import crc32

from elasticrl.base.parsed import parsed
from elasticrl.runtime.vault import faults
from elasticrl.runtime.vault.piece import ITEMSIZE, Piece, starts
from elasticrl.runtime.vault.version import (
    Lineage,
    Made,
    Version,
    lineage_from_json,
    version_from_json,
    version_to_json,
)

MAGIC = b"elasticV"
FORMAT = 3
BLOCK = 4 << 20
PAGE = 4096
_PRELUDE = struct.Struct(
    "<8sIIIIQQQI4x"
)  # magic, format, header bytes, header crc, block, data start, data bytes, sums start, sums crc
_SEAL = struct.Struct("<Q")
SEAL_AT = _PRELUDE.size
HEADER_AT = SEAL_AT + _SEAL.size
_SEALED = 0x5EA1ED << 40
assert HEADER_AT == 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Which part of which version one worker wrote.

    Example: Written(node="n03", writer="w0", version=Version(1284), generation=14, shard=3, world=8)
    """

    node: str  # whose worker wrote it
    writer: str  # which worker of that node
    version: Version
    generation: int
    shard: int
    world: int
    lineage: Lineage = ()
    base: Version | None = None  # the rest of this shard is in the shard of that version: it has not changed since

    def plain(self) -> dict[str, Any]:
        """For JSON, but for the lineage."""
        return {
            "node": self.node, "writer": self.writer, "step": self.version.step, "update": self.version.update,
            "generation": self.generation, "shard": self.shard, "world": self.world, "base": version_to_json(self.base),
        }  # fmt: skip


def written(row: Mapping[str, Any], lineage: Lineage) -> dict[str, Any]:
    """The reverse of `plain`, by field; ValueError, KeyError or TypeError for anything else."""
    return {
        "node": str(row["node"]), "writer": str(row["writer"]), "version": Version(int(row["step"]), int(row["update"])),
        "generation": int(row["generation"]), "shard": int(row["shard"]), "world": int(row["world"]), "lineage": lineage,
        "base": version_from_json(row["base"]),
    }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp(Written):
    """What a shard is a shard of.

    Example: Stamp(job="ppo", node="n03", writer="w0", version=Version(1284), generation=14, shard=3, world=8)
    """

    job: str
    sealed: tuple[Made, ...] = ()  # what the gang had sealed last when this was written, and what that lies on


@dataclass(frozen=True)  # no slots: the JSON of the table is made once
class Table:
    """The pieces of a shard and where each starts in its data. It is the same at every step, so its JSON is kept."""

    pieces: tuple[Piece, ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each piece starts; the last number is the size of the data."""
        return starts(self.pieces)

    @cached_property
    def text(self) -> str:
        """The table in JSON."""
        return json.dumps([piece.to_json() for piece in self.pieces], separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Where everything lies in one file."""

    header_bytes: int
    data_start: int
    data_bytes: int
    sums_start: int
    total: int

    @property
    def blocks(self) -> int:
        """How many blocks of data there are, the last one perhaps short."""
        return -(-self.data_bytes // BLOCK)

    def block(self, index: int) -> tuple[int, int]:
        """Where block `index` starts and stops in the file."""
        start = self.data_start + index * BLOCK
        return start, min(start + BLOCK, self.data_start + self.data_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """A whole file: what it holds and where. `text` is the header as it was written, to be passed on unchanged."""

    stamp: Stamp
    table: Table
    shape: Shape
    text: bytes
    sums: bytes
    seal: int  # changes with every version that is written here

    @property
    def values(self) -> bytes:
        """The small values, in JSON."""
        return self.text[self.text.rindex(b"\n") :]


@dataclass(frozen=True, slots=True)
class Torn:
    """Not a whole file, and why."""

    reason: str


def header(stamp: Stamp, table: Table, values: Mapping[str, Any]) -> bytes:
    """The header: three lines."""
    identity = {
        "job": stamp.job,
        **stamp.plain(),
        "lineage": [cut.to_json() for cut in stamp.lineage],
        "sealed": [[version.step, version.update, generation] for version, generation in stamp.sealed],
    }
    return "\n".join((json.dumps(identity), table.text, json.dumps(values, separators=(",", ":")))).encode()


def shape_of(text: bytes, data_bytes: int) -> Shape:
    """Where everything lies for this header and that much data."""
    data_start = -(-(HEADER_AT + len(text)) // PAGE) * PAGE
    sums_start = data_start + -(-data_bytes // 64) * 64
    total = sums_start + 4 * -(-data_bytes // BLOCK)
    return Shape(
        header_bytes=len(text), data_start=data_start, data_bytes=data_bytes, sums_start=sums_start, total=total
    )


def unseal(memory: memoryview) -> None:
    """From now on the file is not whole. The first thing to do with a file that is used again."""
    _SEAL.pack_into(memory, SEAL_AT, 0)


def sums_of(memory: memoryview, shape: Shape) -> bytes:
    """The checksum of every block of data."""
    return b"".join(checksum(memory[start:stop]) for start, stop in map(shape.block, range(shape.blocks)))


def checksum(block: memoryview) -> bytes:
    """Four bytes that tell a changed block."""
    return crc32(block).to_bytes(4, "little")


def seal(memory: memoryview, shape: Shape, text: bytes, sums: bytes) -> int:
    """Write sums, header and prelude around data that is there already; the seal last. The new seal is returned."""
    assert len(text) == shape.header_bytes
    assert len(sums) == 4 * shape.blocks
    faults.reach("vault.seal.sums")
    memory[shape.sums_start : shape.total] = sums
    faults.reach("vault.seal.header")
    memory[HEADER_AT : HEADER_AT + len(text)] = text
    _PRELUDE.pack_into(
        memory, 0, MAGIC, FORMAT, len(text), crc32(text), BLOCK, shape.data_start, shape.data_bytes, shape.sums_start,
        crc32(sums),
    )  # fmt: skip
    faults.reach("vault.seal.last")
    value = _SEALED | crc32(memory[:SEAL_AT])
    _SEAL.pack_into(memory, SEAL_AT, value)
    faults.reach("vault.seal.done")
    return value


def copy(memory: memoryview, to: memoryview) -> None:
    """One file's bytes into another, empty one; the seal last."""
    to[HEADER_AT : len(memory)] = memory[HEADER_AT:]
    to[:SEAL_AT] = memory[:SEAL_AT]
    to[SEAL_AT:HEADER_AT] = memory[SEAL_AT:HEADER_AT]


def seal_now(memory: memoryview) -> int:
    """The seal as it stands: a reader that finds the same one after reading has read one version."""
    value: int = _SEAL.unpack_from(memory, SEAL_AT)[0]
    return value


def read(memory: memoryview) -> Sealed | Torn:
    """What the file holds, if it is whole. The data itself is checked by `damage`."""
    if len(memory) < HEADER_AT:
        return Torn("shorter than a prelude")
    prelude = bytes(memory[:SEAL_AT])
    seal_value = seal_now(memory)
    if seal_value != _SEALED | crc32(prelude):
        return Torn("not sealed")
    magic, form, header_bytes, header_crc, block, data_start, data_bytes, sums_start, sums_crc = _PRELUDE.unpack(
        prelude
    )
    if magic != MAGIC or form != FORMAT or block != BLOCK:
        return Torn(f"of another format (magic {magic!r}, format {form}, block {block})")
    total = sums_start + 4 * -(-data_bytes // BLOCK)
    if HEADER_AT + header_bytes > data_start or data_start + data_bytes > sums_start or total > len(memory):
        return Torn("parts lie outside the file")
    text = bytes(memory[HEADER_AT : HEADER_AT + header_bytes])
    sums = bytes(memory[sums_start:total])
    if crc32(text) != header_crc or crc32(sums) != sums_crc:
        return Torn("header or sums changed")
    shape = Shape(
        header_bytes=header_bytes, data_start=data_start, data_bytes=data_bytes, sums_start=sums_start, total=total
    )
    try:
        stamp, table = parse_header(text)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        return Torn(f"header is not understood: {error}")
    if table.starts[-1] != data_bytes:
        return Torn(f"the table tells of {table.starts[-1]} bytes, the prelude of {data_bytes}")
    return Sealed(stamp=stamp, table=table, shape=shape, text=text, sums=sums, seal=seal_value)


def parse_header(text: bytes) -> tuple[Stamp, Table]:
    """The reverse of `header`, the values unread; ValueError, KeyError or TypeError for what it never wrote."""
    first = text.index(b"\n")
    of: Mapping[str, Any] = parsed(text[:first])
    same = written(of, lineage_from_json(of["lineage"]))
    made = of.get("sealed", ())
    sealed = tuple((Version(int(step), int(update)), int(generation)) for step, update, generation in made)
    return Stamp(job=str(of["job"]), sealed=sealed, **same), _table(text[first : text.index(b"\n", first + 1)])


@lru_cache(maxsize=32)
def _table(text: bytes) -> Table:
    return Table(tuple(Piece.from_json(row) for row in parsed(text)))


def damage(memory: memoryview, sealed: Sealed, blocks: Iterable[int] | None = None) -> tuple[int, ...]:
    """The blocks whose data is not what was written."""
    return tuple(
        index
        for index in (range(sealed.shape.blocks) if blocks is None else blocks)
        if checksum(memory[slice(*sealed.shape.block(index))]) != sealed.sums[4 * index : 4 * index + 4]
    )


def blocks_of(sealed: Sealed, piece: int) -> range:
    """The blocks that hold piece number `piece`."""
    start = sealed.table.starts[piece]
    nbytes = sealed.table.pieces[piece].nbytes
    return range(start // BLOCK, -(-(start + nbytes) // BLOCK)) if nbytes else range(0)


def known_dtype(name: str) -> bool:
    """Whether a tensor of this dtype can be kept."""
    return name in ITEMSIZE
