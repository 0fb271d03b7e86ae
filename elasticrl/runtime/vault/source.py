"""Reading state back: tensors and values out of whatever shards there are, for whatever sharding is wanted now.

The one idea: a shard is a list of pieces with their bytes, wherever those lie (the vault's memory, a fetched part, a file on
disk). `fill` intersects boxes; neither side needs to know the other's world size.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch

from elasticrl.base.parsed import parsed
from elasticrl.runtime.names import bare
from elasticrl.runtime.vault.errors import StateError, VaultError
from elasticrl.runtime.vault.layout import Table
from elasticrl.runtime.vault.piece import Box, Piece, Reads, reads, within
from elasticrl.runtime.vault.slots import Pinned


def dtype_of(name: str) -> torch.dtype:
    """The dtype that torch calls by this name."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def name_of(dtype: torch.dtype) -> str:
    """The reverse of `dtype_of`."""
    return str(dtype).removeprefix("torch.")


def tensor_at(buffer: Any, start: int, piece: Piece) -> torch.Tensor:
    """The tensor of `piece` whose bytes are at `start` of a buffer, without a copy. It is alone in its storage."""
    dtype = dtype_of(piece.dtype)
    if not piece.numel:
        return torch.empty(piece.lengths, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=piece.numel, offset=start).view(piece.lengths)


def views(buffer: Any, start: int, table: Table) -> tuple[torch.Tensor, ...]:
    """A tensor for each piece of `table` over a buffer in which the data begins at `start`."""
    return tuple(tensor_at(buffer, start + at, piece) for piece, at in zip(table.pieces, table.starts, strict=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One shard, readable. `origin` is what an error calls it."""

    origin: str
    pieces: tuple[Piece, ...]
    tensors: tuple[torch.Tensor, ...]
    values: dict[str, Any]


def shard_of(pinned: Pinned, *, under: bool = False) -> Shard:
    """A pinned vault file as a shard; VaultError if its values are nothing that a vault writes. What lies `under` another gives
    its pieces alone.
    """
    sealed = pinned.sealed
    try:
        values = {} if under else parsed(sealed.values, most=len(sealed.values))
    except ValueError as error:
        raise VaultError(f"{pinned.path.name} keeps values that are not understood: {error}") from error
    return Shard(
        origin=pinned.path.name,
        pieces=sealed.table.pieces,
        tensors=views(pinned.mapping, sealed.shape.data_start, sealed.table),
        values=values,
    )


class Bringer(Protocol):
    """What has to bring the data of shards before it can be read, as `Far` does from a store at a URL."""

    def bring(self, boxes: Iterable[tuple[int, Box]], /) -> None:
        """These boxes of the pieces with these numbers are in their tensors' memory from now on."""


class Source:
    """Several shards of one version as one state."""

    def __init__(
        self, shards: Sequence[Shard], *, name: str, pins: ExitStack | None = None, far: Bringer | None = None
    ) -> None:
        self.name = name
        self._far = far
        self._pins = pins or ExitStack()
        self.shards = tuple(shards)
        self.pieces = tuple(piece for shard in shards for piece in shard.pieces)
        self._tensors = tuple(tensor for shard in shards for tensor in shard.tensors)
        self.read = 0  # bytes so far
        self.nearer: Callable[[], None] = lambda: None  # called as each part was filled
        self.values = merge((shard.origin, shard.values) for shard in shards)
        names = {piece.name for piece in self.pieces}
        # What was kept before names were bare has wrappers' words in it, and is read all the same.
        self._wrapped = {bare(name): name for name in names if bare(name) not in names}

    def close(self) -> None:
        """Let go of the files it reads from. What was filled stays."""
        self._pins.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def plan(self, targets: Sequence[Piece]) -> Reads:
        """What would be read for these targets."""
        return reads([self.called_here(piece) for piece in targets], self.pieces)

    def bring(self, targets: Sequence[Piece]) -> None:
        """Have the data for these targets here, all at once: `fill` would ask for them target by target."""
        if self._far is not None:
            self._far.bring((read.source, read.box) for read in self.plan(targets).reads)

    def called_here(self, piece: Piece) -> Piece:
        """The same piece under the name that it was kept under."""
        name = self._wrapped.get(piece.name)
        return piece if name is None else replace(piece, name=name)

    def fill(self, targets: Iterable[tuple[Piece, torch.Tensor]]) -> int:
        """Copy the state into the targets' tensors, in place; the bytes that were read. All of them or StateError."""
        wanted = tuple(targets)
        plan = self.plan([piece for piece, _ in wanted])
        if plan.missing:
            index, count = plan.missing[0]
            piece = wanted[index][0]
            held = sorted({(p.dtype, p.shape) for p in self.pieces if p.name == piece.name})
            raise StateError(
                f"{self.name} cannot give {piece.name} ({piece.dtype} {list(piece.shape)}): {count} elements of the part at "
                f"{list(piece.offset)} are missing; it holds {held or 'nothing of that name'}. "
                f"{len(plan.missing)} of {len(wanted)} pieces are affected. The model differs from the one that was saved, "
                "or a shard is missing."
            )
        if self._far is not None:
            self._far.bring((read.source, read.box) for read in plan.reads)
        nbytes = 0
        with torch.no_grad():
            for read in plan.reads:
                piece, tensor = wanted[read.target]
                part = self._tensors[read.source][within(read.box, self.pieces[read.source])]
                tensor[within(read.box, piece)].copy_(part)
                nbytes += part.numel() * part.element_size()
                self.nearer()
        self.read += nbytes
        return nbytes

    def wholes(self, prefix: str) -> dict[str, Piece]:
        """The whole tensors whose names start with `prefix`, by name, in the order in which they were saved."""
        found: dict[str, Piece] = {}
        for piece in self.pieces:
            if piece.name.startswith(prefix) and piece.name not in found:
                found[piece.name] = Piece(piece.name, piece.dtype, piece.shape, (0,) * len(piece.shape), piece.shape)
        return found


def merge(values: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The values of all shards as one. A part's values may be spread over shards by key, but not contradict each other."""
    merged: dict[str, Any] = {}
    for origin, of_shard in values:
        for part, value in of_shard.items():
            if part not in merged:
                merged[part] = value
            elif isinstance(value, dict) and isinstance(merged[part], dict):
                mine = dict(merged[part])
                for key, item in value.items():
                    if not _same(mine.setdefault(key, item), item):
                        raise StateError(_contradiction(origin, f"{part}.{key}"))
                merged[part] = mine
            elif not _same(merged[part], value):
                raise StateError(_contradiction(origin, part))
    return merged


def _same(one: Any, other: Any) -> bool:
    return bool(one == other) or json.dumps(one) == json.dumps(other)  # NaN is not itself


def _contradiction(origin: str, name: str) -> str:
    return (
        f"{origin} has another value for {name} than the shards before it. What all ranks share must be equal on all of them; "
        "give state that differs by lane a key for each lane."
    )
