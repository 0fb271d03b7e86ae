"""The digests of a model: of its exported tensors, and of the state in a checkpoint's files, computed from their bytes.

The one idea: a model is its tensors, by name, type and shape, in whatever files they lie. So an exported folder is compared
with a checkpoint without this program's formats.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from elasticrl.base.parsed import parsed
from elasticrl.base.regular import open_regular

if TYPE_CHECKING:
    from elasticrl.runtime.checkpoint.place import Place
    from elasticrl.runtime.vault.source import Source

HEADER: Final = 100_000_000  # bytes of a safetensors file's header, as its own readers bound it
CHUNK: Final = 1 << 22
NAMES: Final[Mapping[str, str]] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "float16": "F16", "bfloat16": "BF16",
    "int32": "I32", "uint32": "U32", "float32": "F32", "int64": "I64", "uint64": "U64", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


class NoModel(Exception):
    """There is no model to be compared; the sentence says why."""


def sum_of(tensors: Iterable[tuple[str, str, tuple[int, ...], str]]) -> str:
    """The digest of a model's tensors: name, type, shape and SHA-256 of the bytes of each."""
    found = sha256()
    for name, kind, shape, digest in sorted(tensors):
        found.update(f"{name}\0{kind}\0{','.join(map(str, shape))}\0{digest}\n".encode())
    return found.hexdigest()


def of_folder(folder: Path) -> str:
    """Of an exported model: all safetensors files in a folder."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise NoModel(f"there is no .safetensors file in {folder}")
    rows = []
    for path in files:
        try:
            with open_regular(path) as file:
                rows += list(_rows(file, path))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, struct.error) as error:
            raise NoModel(f"{path} is no safetensors file that can be read: {error}") from error
    return sum_of(rows)


def _rows(file: BinaryIO, path: Path) -> Iterable[tuple[str, str, tuple[int, ...], str]]:
    size = path.stat().st_size
    (length,) = struct.unpack("<Q", file.read(8))
    if length > min(HEADER, size):
        raise ValueError("its header is longer than the file")
    room = size - 8 - length  # no byte is in two tensors
    for name, row in parsed(file.read(length), most=HEADER).items():
        if name == "__metadata__":
            continue
        begin, end = map(int, row["data_offsets"])
        room -= end - begin
        if not 0 <= begin <= end <= size - 8 - length or room < 0:
            raise ValueError(f"{name[:80]} lies outside of it, or in another tensor")
        file.seek(8 + length + begin)
        found, left = sha256(), end - begin
        while left and (data := file.read(min(left, CHUNK))):
            found.update(data)
            left -= len(data)
        yield str(name), str(row["dtype"]), tuple(map(int, row["shape"])), found.hexdigest()


def of_checkpoint(place: Place, name: str) -> tuple[str, int, int]:
    """Of the model in a checkpoint, as `elasticrl checkpoint export` would write it: its digest, tensors and bytes. The
    checkpoint's files are hashed first.
    """
    import torch

    from elasticrl.runtime.checkpoint.export import model_of
    from elasticrl.runtime.checkpoint.load import open_checkpoint
    from elasticrl.runtime.vault.errors import StateError
    from elasticrl.runtime.vault.source import dtype_of

    try:
        with open_checkpoint(place, name) as source:
            pieces = model_of(source, name)
            rows = []
            for short, piece in pieces.items():
                tensor = torch.empty(piece.shape, dtype=dtype_of(piece.dtype))
                source.fill([(piece, tensor)])
                data = bytes(tensor.reshape(-1).view(torch.uint8).numpy().data) if tensor.numel() else b""
                rows.append((short, NAMES.get(piece.dtype, piece.dtype), piece.shape, sha256(data).hexdigest()))
    except StateError as error:
        raise NoModel(str(error)) from error
    return sum_of(rows), len(rows), sum(piece.nbytes for piece in pieces.values())


def digest_of_state(place: Place, name: str, kind: str) -> str:
    """The digest of a step's state, computed from the bytes of its checkpoint: what the run must have written of that step."""
    from elasticrl.runtime.checkpoint import tree
    from elasticrl.runtime.checkpoint.load import open_checkpoint
    from elasticrl.runtime.digest import Digest
    from elasticrl.runtime.notes import SAMPLE
    from elasticrl.runtime.vault.errors import StateError

    try:
        with open_checkpoint(place, name, check=False) as source:
            count = int(tree.join(source.values["run"], {})["count"])
            found = []
            for role, values in sorted(source.values.items()):
                if not isinstance(values, dict) or values.keys() != {"version"}:
                    continue
                names = sorted(source.wholes(f"{role}."))
                if kind == "sample":
                    names = names[count % SAMPLE :: SAMPLE] or names[:1]
                found.append(Digest(version=int(values["version"]), sums=_sums(source, role, names)).hex)
    except (StateError, LookupError, TypeError, ValueError) as error:
        raise NoModel(f"the digest cannot be computed from {name}: {error}") from error
    return "-".join(found)


def _sums(source: Source, role: str, names: list[str]) -> dict[str, int]:
    import torch

    from elasticrl.runtime.digest import MASK, digest_of
    from elasticrl.runtime.vault.source import dtype_of

    wholes: dict[str, Any] = {**source.wholes(f"{role}."), **source.wholes(f"{role}_optimizer.state.")}
    sums: dict[str, int] = {"param": 0}
    for full, piece in wholes.items():
        if full.startswith(f"{role}."):
            parameter, row = full.removeprefix(f"{role}."), "param"
        else:
            parameter, _, row = full.removeprefix(f"{role}_optimizer.state.").rpartition(".")
        sums.setdefault(row, 0)
        if f"{role}.{parameter}" not in names:
            continue
        tensor = torch.empty(piece.shape, dtype=dtype_of(piece.dtype))
        source.fill([(piece, tensor)])
        sums[row] = (sums[row] + digest_of(tensor.reshape(-1), 0, row, parameter)) & MASK
    return sums
