"""A strategy's shard as a part of the state: ranges of flattened parameters, in two versions of which one stays unchanged.

The one idea: a range of a flattened parameter is a few boxes of it, so whatever a strategy cuts, a checkpoint holds whole named
tensors in their own shapes, and any other strategy or world size can read them.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from elasticrl.runtime.vault.piece import Piece, boxes
from elasticrl.runtime.vault.source import name_of


class Range(Protocol):
    """Elements start <= i < stop of a flattened parameter, at `at` in the shard's rows."""

    @property
    def name(self) -> str:
        """The parameter."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""

    @property
    def start(self) -> int:
        """First element."""

    @property
    def stop(self) -> int:
        """After the last element."""

    @property
    def at(self) -> int:
        """Place in a row."""


Within = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A parameter, its shape, and where a part of it begins."""


class TwoVersions(Protocol):
    """What `elasticrl.runtime.shard.Shard` is: rows (parameters first, then each optimizer slot) of equal length."""

    rows: tuple[str, ...]
    version: int
    applied: bool

    @property
    def pieces(self) -> Sequence[Range]:
        """What this rank has."""

    @property
    def state(self) -> torch.Tensor:
        """[rows, size] of `version`."""


class FlatShard:
    """A `Sharded` part: parameters are called `model.NAME`, optimizer slots `optimizer.state.NAME.SLOT`, as torch's are.

    Restoring fills the shard in place; publishing its parameters to the model is the strategy's business. A parameter may be
    a part of one of another name: its `place` in that says which, that one's shape, and where the part begins. `keeps` are
    the parameters that are kept by this rank, where others have some of them too.
    """

    def __init__(
        self, shard: TwoVersions, *, model: str = "model", optimizer: str = "optimizer",
        place: Callable[[str], "Within | None"] = lambda _name: None, keeps: Collection[str] | None = None,
        lacks: Sequence[tuple[int, Range]] | None = None,
    ) -> None:  # fmt: skip
        """Of rows, and of these ranges alone it `lacks` the data when it is to be restored; None: of all."""
        self._lacks = lacks
        self._shard = shard
        self._model = model
        self._optimizer = optimizer
        self._place = place
        self._keeps = keeps if keeps is None else frozenset(keeps)
        self._cut: dict[
            tuple[int, bool], list[tuple[Piece, torch.Tensor]]
        ] = {}  # by version in memory: two, used in turn

    def pieces(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        """The unchanged version's boxes, as views."""
        return self._views(kept=False)

    def kept(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Those that this rank keeps."""
        return self._views(kept=True)

    def _views(self, *, kept: bool) -> Iterator[tuple[Piece, torch.Tensor]]:
        state = self._shard.state
        key = state.data_ptr(), kept
        if key not in self._cut:
            some = self._keeps if kept else None
            mine = [part for part in self._shard.pieces if some is None or part.name in some]
            every = [(number, part) for number in range(len(self._shard.rows)) for part in mine]
            self._cut[key] = list(self._boxes(state, every))
        return iter(self._cut[key])

    def lacking(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Those of them whose data has to come from elsewhere."""
        if self._lacks is None:
            return self.pieces()
        return self._boxes(self._shard.state, self._lacks)

    def values(self) -> Mapping[str, Any]:
        """How many updates it has had; the same on all ranks."""
        return {"version": self._shard.version}

    def restored(self, values: Mapping[str, Any], /) -> None:
        """The unchanged version is now that one."""
        self._shard.version, self._shard.applied = int(values["version"]), False

    def _boxes(self, state: torch.Tensor, parts: Sequence[tuple[int, Range]]) -> Iterator[tuple[Piece, torch.Tensor]]:
        dtype = name_of(state.dtype)
        for number, part in parts:
            row = self._shard.rows[number]
            param, shape, base = self._place(part.name) or (part.name, part.shape, (0,) * len(part.shape))
            name = f"{self._model}.{param}" if number == 0 else f"{self._optimizer}.state.{param}.{row}"
            at = part.at
            for offset, lengths in boxes(part.shape, part.start, part.stop):
                there = tuple(map(sum, zip(base, offset, strict=True)))
                piece = Piece(name, dtype, shape, there, lengths)
                yield piece, state[number, at : at + piece.numel].view(lengths)
                at += piece.numel
