"""The on-disk format of `torch.distributed.checkpoint`, written without its savers: everything that depends on torch's insides.

The one idea: torch keeps each tensor as a `torch.save` blob at an offset of a file, and a pickled index of them. We write the
same, with torch's own functions, and note where the raw bytes lie within each blob: our loader maps those and never unpickles
anything; torch's own tools read the index. `tests/runtime/test_checkpoint_stock.py` notices a release that changes it.
"""

import io
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, cast

import torch

from elasticrl.runtime.checkpoint.manifest import ShardTable
from elasticrl.runtime.checkpoint.place import Output
from elasticrl.runtime.vault.source import dtype_of

ALIGN = 64
HEAD = 1 << 16  # the raw bytes start within this much of a blob
_LOCAL_HEADER = b"PK\x03\x04"
_RECORD = b"/data/0"  # the archive's entry that holds the storage


@dataclass(frozen=True, slots=True)
class Blob:
    """Where a `torch.save` blob lies in its file, and where the raw bytes of its tensor do."""

    at: int
    nbytes: int
    raw_at: int


class _Sink(io.RawIOBase):
    """The file object that torch.save writes to: it passes everything on and keeps the beginning."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self.head = bytearray()
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(self.head) < HEAD:
            self.head += view[: HEAD - len(self.head)]
        try:
            return self._out.write(view)
        except OSError as error:
            self.error = error
            raise


def write_tensor(out: Output, tensor: torch.Tensor) -> Blob:
    """Append one tensor; its raw bytes are aligned, so that they can be mapped."""
    assert tensor.is_contiguous()
    assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), (
        "torch.save would write all of it"
    )
    at = _align(out)
    sink = _Sink(out)
    _save(tensor, sink)
    raw_at = at + _raw_offset(bytes(sink.head)) if tensor.numel() else at
    return Blob(at, out.nbytes - at, raw_at)


def write_object(out: Output, value: object) -> Blob:
    """Append a plain value, as torch keeps what is no tensor."""
    at = _align(out)
    _save(value, _Sink(out))
    return Blob(at, out.nbytes - at, at)


def _save(value: object, sink: _Sink) -> None:
    """torch.save that says "the disk is full" when the disk is full: its archive writer buries that under a RuntimeError."""
    try:
        torch.save(value, cast("IO[bytes]", sink))
    except RuntimeError:
        if sink.error is not None:
            raise sink.error from None
        raise


def _align(out: Output) -> int:
    if out.nbytes % ALIGN:
        out.write(bytes(ALIGN - out.nbytes % ALIGN))
    return out.nbytes


def _raw_offset(head: bytes) -> int:
    """Where the storage's record begins: after its local header, whose name ends in /data/0."""
    at = head.find(_RECORD)
    while at >= 0:
        header = head.rfind(_LOCAL_HEADER, 0, at)
        name_bytes = int.from_bytes(head[header + 26 : header + 28], "little")
        extra_bytes = int.from_bytes(head[header + 28 : header + 30], "little")
        if header >= 0 and header + 30 + name_bytes == at + len(_RECORD):
            return header + 30 + name_bytes + extra_bytes
        at = head.find(_RECORD, at + 1)
    raise AssertionError("torch.save's archive has no storage record in its first 64 KiB: its format has changed")


Leaf = tuple[tuple[str | int, ...], object]
"""A path in a state dict, and the plain value there."""


def write_objects(out: Output, leaves: Iterable[Leaf]) -> dict[tuple[str | int, ...], Blob]:
    """All plain values of a checkpoint in one file."""
    return {path: write_object(out, value) for path, value in leaves}


def metadata(
    tables: Sequence[ShardTable],
    objects: Mapping[tuple[str | int, ...], Blob],
    objects_file: str,
    paths: Mapping[str, tuple[str | int, ...]],
) -> bytes:
    """The `.metadata` that torch's readers begin with. `paths` says where in a nested state dict a tensor belongs."""
    # Imported by the one who finishes only: it takes half a second (if the fork server has not done it yet).
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    state: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    planner: dict[str, tuple[str | int, ...]] = {}
    for table in tables:
        for row in table.rows:
            piece = row.piece
            offsets, sizes = torch.Size(piece.offset), torch.Size(piece.lengths)
            index = MetadataIndex(piece.name, offsets)
            if index in storage:
                continue  # a replica: torch wants each chunk once
            entry = state.setdefault(
                piece.name,
                TensorStorageMetadata(TensorProperties(dtype=dtype_of(piece.dtype)), torch.Size(piece.shape), []),
            )
            entry.chunks.append(ChunkStorageMetadata(offsets, sizes))
            storage[index] = _StorageInfo(table.data.name, row.blob_at, row.blob_bytes)
            planner[piece.name] = paths.get(piece.name) or tuple(piece.name.split(".", 1))
    for path, blob in objects.items():
        name = ".".join(map(str, path))
        state[name] = BytesStorageMetadata()
        storage[MetadataIndex(name)] = _StorageInfo(objects_file, blob.at, blob.nbytes)
        planner[name] = path
    whole = Metadata(
        state_dict_metadata=state,
        planner_data=planner,
        storage_data=storage,
        storage_meta=StorageMeta(),
        version=CURRENT_DCP_VERSION,
    )
    return pickle.dumps(whole)  # written for torch's readers, who unpickle it; we never do
