"""What a training script's state is: the things it registers, as pieces and values, for any world size.

The one idea: what every rank has is cut among the ranks when it is kept (each keeps its share of every tensor), and what is
cut already says so itself (`Sharded`). Nobody keeps a whole, everybody can put one together.
"""

import random
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from elasticrl.runtime.checkpoint import tree
from elasticrl.runtime.vault.client import Content
from elasticrl.runtime.vault.errors import CheckpointRefused, StateError
from elasticrl.runtime.vault.layout import Table, known_dtype
from elasticrl.runtime.vault.piece import Piece, boxes, share, whole
from elasticrl.runtime.vault.source import Source, dtype_of, name_of


@runtime_checkable
class Replicated(Protocol):
    """State that is the same on all ranks: a schedule, a KL controller, a cursor, a module under data parallelism."""

    def state_dict(self) -> Mapping[str, Any]:
        """Plain values, dicts, lists and tensors. Tensors are read in the background: live ones are best."""

    def load_state_dict(self, state_dict: Any, /) -> object:
        """The reverse."""


@runtime_checkable
class Sharded(Protocol):
    """State of which this rank has its own part: sharded parameters, sharded optimizer state, the lanes' rollout buffer."""

    def pieces(self) -> Iterable[tuple[Piece, torch.Tensor]]:
        """This rank's pieces, with the live tensors they are in; also what is filled, in place, when state is restored.

        Names begin with the name under which it was registered, and a dot.
        """

    def values(self) -> Mapping[str, Any]:
        """Plain values of this rank, by a key that doesn't depend on the rank (the lane, say). All ranks' are merged."""

    def restored(self, values: Mapping[str, Any], /) -> None:
        """The pieces have been filled; these are the values of all ranks."""


@runtime_checkable
class Prepared(Protocol):
    """Sharded state whose pieces are not known before its values: it is shown these first, to make room."""

    def prepare(self, values: Mapping[str, Any], /) -> None:
        """What `restored` will get; `pieces` is asked next."""


@runtime_checkable
class Shared(Protocol):
    """Sharded state of which several ranks have some pieces: each is kept by one of them."""

    def kept(self) -> Iterable[tuple[Piece, torch.Tensor]]:
        """Of `pieces` those that this rank keeps."""


@runtime_checkable
class Lacking(Protocol):
    """Sharded state that a process has parts of already, as they should be."""

    def lacking(self) -> Iterable[tuple[Piece, torch.Tensor]]:
        """The pieces that have to be filled."""


@runtime_checkable
class Emptied(Protocol):
    """State in pieces that can be told to begin anew."""

    def empty(self) -> None:
        """As it was when it was registered."""


@runtime_checkable
class Roomy(Protocol):
    """Replicated state that makes room for its tensors itself: of a cut parameter an optimizer needs its part alone."""

    def room(self, wholes: Mapping[str, Piece], /) -> dict[str, torch.Tensor]:
        """A tensor for each of these, to be filled: a plain one is as long as the whole, a DTensor has this rank's part."""


Part = Replicated | Sharded


TABLES = 3  # of a step's states: with rows, without, those alone


class Parts:
    """The registered state of one worker."""

    def __init__(self, **parts: Part) -> None:
        self._parts: dict[str, Part] = {}
        self._shared: dict[str, Shared] = {}
        self._sharded: dict[str, Sharded] = {}  # asked once: a protocol with members is slow to ask about
        self._replicated: dict[str, Replicated] = {}
        self._tables: list[Table] = []  # the newest first: making one and its text takes milliseconds
        self._shares: dict[str, tuple[tuple[object, ...], _Share]] = {}
        self._steady: set[str] = set()
        for name, part in parts.items():
            self.register(name, part)

    def register(self, name: str, part: Part, *, steady: bool = False) -> None:
        """Have `part` kept under `name`. `steady`: only an update changes its tensors. Such parts come before all others."""
        if not name.isidentifier():
            raise StateError(f"{name!r} cannot name a part of the state: use a word, as for a variable.")
        if name in self._parts:
            raise StateError(f"There is a part called {name!r} already.")
        if not isinstance(part, Sharded) and not isinstance(part, Replicated):
            raise StateError(
                f"{name} is a {type(part).__name__} without state_dict and load_state_dict: it could not be kept or restored."
            )
        assert not steady or len(self._steady) == len(self._parts), (
            f"{name} is steady and comes after a part that is not"
        )
        self._parts[name] = part
        if steady:
            self._steady.add(name)
        if isinstance(part, Shared):
            self._shared[name] = part
        if isinstance(part, Sharded):
            self._sharded[name] = part
        elif isinstance(part, Replicated):
            self._replicated[name] = part

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def part(self, name: str) -> Part:
        """What was registered under that name."""
        return self._parts[name]

    # -- out

    def capture(self, rank: int, world: int, *, but: Collection[str] = ()) -> Content:
        """This rank's shard as it is now. The training thread runs this, so it only looks, and copies nothing large. The pieces
        of sharded parts named in `but` are left out, and their values are not.
        """
        pieces: list[Piece] = []
        tensors: list[torch.Tensor] = []
        values: dict[str, Any] = {}
        steady = 0
        for name, part in self._parts.items():
            if isinstance(part, Sharded):
                shared = self._shared.get(name)
                for piece, tensor in () if name in but else part.pieces() if shared is None else shared.kept():
                    pieces.append(_checked(name, piece, tensor))
                    tensors.append(tensor.detach())
                own, loose = tree.split(name, dict(part.values()))
                if loose:
                    raise StateError(
                        f"{name}.values() has a tensor ({next(iter(loose))}): tensors belong into pieces()."
                    )
                values[name] = own
            else:
                skeleton, found = tree.split(name, part.state_dict())
                if rank == 0:
                    values[name] = skeleton
                for key, tensor in found.items():
                    own_pieces, own_tensors = self._share(key, tensor, rank, world)
                    pieces += own_pieces
                    tensors += own_tensors
            if name in self._steady:
                steady = len(tensors)
        made, tables = tuple(pieces), self._tables
        table = next((table for table in tables if table.pieces == made), None) or Table(made)
        self._tables = [table, *(other for other in tables if other is not table)][:TABLES]
        return Content(table=table, tensors=tuple(tensors), values=values, steady=steady)

    def _share(self, name: str, tensor: torch.Tensor, rank: int, world: int) -> "_Share":
        """This rank's share of a tensor; cut once, and again when it is another tensor or another gang."""
        key = (tensor.data_ptr(), tensor.shape, tensor.dtype, rank, world) if _local(tensor) else ()
        known = self._shares.get(name)
        if key and known is not None and known[0] == key:
            return known[1]
        made = _cut(name, tensor, rank, world)
        if key and tensor.is_contiguous():  # the views keep the storage, so no other tensor can come to that address
            self._shares[name] = (key, made)
        return made

    # -- in

    def needs(self, source: Source, *, but: Collection[str] = ()) -> list[Piece]:
        """The pieces that this rank will read from such a source: for `Vault.gather`, so that only those are fetched. `but`
        names parts that are as they should be already.
        """
        known = source.wholes("")
        found: list[Piece] = []
        for name, part in self._parts.items():
            if name in but:
                continue
            if name in self._sharded:
                self._prepare(name, source)
                found.extend(source.called_here(piece) for piece, _ in self._lacking(name))
            elif isinstance(part, torch.nn.Module):
                skeleton, live = tree.split(name, part.state_dict())
                if skeleton == source.values.get(name):
                    found.extend(piece for key, t in live.items() for piece, _ in pieces_of(key, t))
                else:  # as `_fill_module` does then: whole tensors
                    found.extend(known[key] for key in tree.names(source.values.get(name)) if key in known)
            elif isinstance(part, Roomy):
                room = part.room(_mentioned(source, source.values.get(name)))
                found.extend(piece for key, t in room.items() for piece, _ in pieces_of(key, t))
            else:
                found.extend(known[key] for key in tree.names(source.values.get(name)) if key in known)
        return found

    def _lacking(self, name: str) -> Iterable[tuple[Piece, torch.Tensor]]:
        part = self._sharded[name]
        return part.lacking() if isinstance(part, Lacking) else part.pieces()

    def _prepare(self, name: str, source: Source) -> None:
        part = self._sharded[name]
        if isinstance(part, Prepared) and name in source.values:
            part.prepare(tree.join(source.values[name], {}))

    def restore(self, source: Source, *, allow: Collection[str] = (), but: Collection[str] = ()) -> None:
        """Make everything registered, `but` these parts, what it was. Refused as a whole, before anything is changed, if the
        parts differ.
        """
        missing = sorted(self._parts.keys() - source.values.keys())
        extra = sorted(source.values.keys() - self._parts.keys())
        if (missing or extra) and "parts" not in allow:
            raise CheckpointRefused(
                f"{source.name} keeps {sorted(source.values)} and this run has registered {sorted(self._parts)}: "
                + (f"{', '.join(missing)} would start anew" if missing else "")
                + ("; " if missing and extra else "")
                + (f"{', '.join(extra)} would be lost" if extra else "")
                + ". Register the same parts, or continue with --allow parts (checkpoint.allow)."
            )
        for name, part in self._parts.items():
            if name in missing or name in but:
                continue
            if name in self._sharded:
                self._prepare(name, source)
                source.fill(self._lacking(name))
                self._sharded[name].restored(tree.join(source.values[name], {}))
            elif isinstance(part, torch.nn.Module):
                _fill_module(name, part, source)
            else:
                saved = source.values[name]
                found = part.room(_mentioned(source, saved)) if isinstance(part, Roomy) else None
                self._replicated[name].load_state_dict(tree.join(saved, wholes(source, saved, found)))


def wholes(source: Source, skeleton: Any, room: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """The tensors that a part's values mention, put together from all shards: in this `room`, or whole."""
    tensors = whole_room(_mentioned(source, skeleton)) if room is None else room
    source.fill(pair for name, tensor in tensors.items() for pair in pieces_of(name, tensor))
    return tensors


def whole_room(wholes: Mapping[str, Piece]) -> dict[str, torch.Tensor]:
    """Room for whole tensors."""
    return {name: torch.empty(piece.shape, dtype=dtype_of(piece.dtype)) for name, piece in wholes.items()}


def _mentioned(source: Source, skeleton: Any) -> dict[str, Piece]:
    known, named = source.wholes(""), tuple(tree.names(skeleton))
    for name in named:
        if name not in known:
            raise StateError(f"{source.name} mentions a tensor {name} that none of its shards has a piece of.")
    return {name: known[name] for name in named}


def pieces_of(name: str, tensor: torch.Tensor) -> list[tuple[Piece, torch.Tensor]]:
    """The piece of a tensor that this rank has: all of it, or a DTensor's local part (what FSDP2 makes of parameters)."""
    dtype, shape = name_of(tensor.dtype), tuple(tensor.shape)
    if _local(tensor):  # asked first: importing DTensor takes a second that few need
        return [(whole(name, dtype, shape), tensor)]
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(tensor, DTensor)
    lengths, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local().detach()
    if not local.numel():
        return []
    return [(Piece(name, dtype, shape, tuple(offset), tuple(lengths)), local)]


_Share = tuple[list[Piece], list[torch.Tensor]]


def _local(tensor: torch.Tensor) -> bool:
    return not hasattr(tensor, "to_local")


def _cut(name: str, tensor: torch.Tensor, rank: int, world: int) -> _Share:
    """This rank's share of a tensor that all ranks have; of one that is cut already, its part."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise StateError(
            f"{name} is a {type(tensor).__name__} (layout {tensor.layout}): its owner has to say what plain tensors it is "
            "made of; register it as an object with pieces()."
        )
    pieces: list[Piece] = []
    tensors: list[torch.Tensor] = []
    if not _local(tensor):
        for piece, local in pieces_of(name, tensor):
            pieces.append(_checked(name, piece, local))
            tensors.append(local)
        return pieces, tensors
    dtype, shape = name_of(tensor.dtype), tuple(tensor.shape)
    if not tensor.numel() and rank == 0:
        return [_checked(name, whole(name, dtype, shape), tensor)], [tensor]
    flat = tensor.contiguous().view(-1)
    start, stop = share(tensor.numel(), rank, world)
    for offset, lengths in boxes(shape, start, stop):
        piece = Piece(name, dtype, shape, offset, lengths)
        pieces.append(_checked(name, piece, None))
        tensors.append(flat[start : start + piece.numel].view(lengths))
        start += piece.numel
    return pieces, tensors


def _checked(part: str, piece: Piece, tensor: torch.Tensor | None) -> Piece:
    if not known_dtype(piece.dtype):
        raise StateError(f"{piece.name} has dtype {piece.dtype}, which checkpoints don't know.")
    if tensor is not None and (tuple(tensor.shape) != piece.lengths or name_of(tensor.dtype) != piece.dtype):
        raise StateError(
            f"{part}: the piece {piece.name} says {piece.dtype} {list(piece.lengths)} and its tensor is "
            f"{name_of(tensor.dtype)} {list(tensor.shape)}."
        )
    return piece


def _fill_module(name: str, module: torch.nn.Module, source: Source) -> None:
    """Straight into the parameters, without a second copy of the model in memory; extra state goes the module's own way."""
    skeleton, live = tree.split(name, module.state_dict())
    saved = source.values[name]
    if skeleton != saved:
        module.load_state_dict(tree.join(saved, wholes(source, saved)))
        return
    source.fill(pair for n, t in live.items() for pair in pieces_of(n, t))
    lives = {_address(t) for t in (*module.parameters(), *module.buffers())}
    if not all(_address(t) in lives for t in live.values()):
        module.load_state_dict(tree.join(saved, live))  # its hooks make tensors anew (torchtitan's fused attention)


def _address(tensor: torch.Tensor) -> int:
    return (tensor if _local(tensor) else tensor.to_local()).data_ptr()  # type: ignore[attr-defined] # a DTensor's


class Ambient:
    """The generators that libraries use when nobody gives them one: Python's, numpy's, torch's, each GPU's.

    Lanes have streams of their own that need no keeping (they are computed from names); this is for everything else. One
    rank's state stands for all, so code whose randomness must differ between ranks has to draw from a lane.
    """

    def state_dict(self) -> dict[str, Any]:
        """All of them."""
        import numpy as np

        version, words, gauss = random.getstate()
        kind, keys, pos, has_gauss, cached = np.random.get_state()  # noqa: NPY002 - the legacy global generator is what libraries use
        state: dict[str, Any] = {
            "python": {"version": version, "words": array("Q", words).tobytes(), "gauss": gauss},
            "numpy": {
                "kind": str(kind),
                "keys": bytes(np.asarray(keys, dtype="<u4").tobytes()),
                "pos": int(pos),
                "has_gauss": int(has_gauss),
                "cached": float(cached),
            },
            "torch": bytes(torch.get_rng_state().numpy().tobytes()),
            "cuda": [],
        }
        if _on_card():
            state["cuda"] = [
                bytes(torch.cuda.get_rng_state().numpy().tobytes())
            ]  # of the GPU that this process computes on
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Set all of them."""
        import numpy as np

        python, numbers = state_dict["python"], state_dict["numpy"]
        random.setstate((python["version"], tuple(array("Q", python["words"])), python["gauss"]))
        keys = np.frombuffer(numbers["keys"], dtype="<u4")
        np.random.set_state((numbers["kind"], keys, numbers["pos"], numbers["has_gauss"], numbers["cached"]))  # noqa: NPY002
        torch.set_rng_state(_bytes_tensor(state_dict["torch"]))
        if state_dict["cuda"] and _on_card():
            torch.cuda.set_rng_state(_bytes_tensor(state_dict["cuda"][0]))


def _on_card() -> bool:
    """Does this process compute on a GPU? Asking whether there is one would put a context on it."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call] # torch has not annotated it


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
