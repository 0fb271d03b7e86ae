"""Where a block of answers keeps its keys and values while it is generated.

The idea: room for some more tokens is taken at once, and a token is written into it, where a cache that is put together anew
for each token copies all that is there. Rows that have ended leave it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

MORE: Final = 64  # tokens that room is taken for at once


class Room(DynamicLayer):  # type: ignore[no-untyped-call] # transformers' __init_subclass__
    """One layer's. `keys` and `values` are what is there, [rows, heads, tokens, size], and views of the room."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_args: Any,
        **_more: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the new keys and values behind the old ones, into the room that there is; and has all of them."""
        assert self.keys is not None
        assert self.values is not None
        begin, end = self.keys.shape[2], self.keys.shape[2] + key_states.shape[2]
        if end > self.room[0].shape[2]:
            self._take([self.keys, self.values])
        for whole, new in zip(self.room, (key_states, value_states), strict=True):
            whole[:, :, begin:end] = new
        self._hold(end)
        return self.keys, self.values

    def forget(self) -> None:
        """The last token."""
        assert self.keys is not None
        self._hold(self.keys.shape[2] - 1)

    def leave(self, stay: torch.Tensor, begin: int) -> None:
        """These rows stay, and of them what comes after the first `begin` tokens."""
        assert self.keys is not None
        assert self.values is not None
        self._take([it[:, :, begin:].index_select(0, stay) for it in (self.keys, self.values)])

    def fill(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor, Any]], width: int) -> None:
        """With what passes over prompts left: the rows of each, their places in it, and its layer. They end at `width`; what is
        before them is 0, and nobody attends to it.
        """
        first, rows = parts[0][2], sum(len(index) for index, *_ in parts)
        self.dtype, self.device, self.is_initialized = first.keys.dtype, first.keys.device, True
        self.room = [
            torch.zeros(rows, like.shape[1], width + MORE, like.shape[3], dtype=like.dtype, device=like.device)
            for like in (first.keys, first.values)
        ]
        for index, places, layer in parts:
            for whole, made in zip(self.room, (layer.keys, layer.values), strict=True):
                whole[index, :, width - made.shape[2] : width] = made[places]
        self._hold(width)

    def _take(self, held: Sequence[torch.Tensor]) -> None:
        """Room for these, and more."""
        there = held[0].shape[2]
        self.room = [it.new_empty(*it.shape[:2], there + MORE, it.shape[3]) for it in held]
        for whole, it in zip(self.room, held, strict=True):
            whole[:, :, :there] = it
        self._hold(there)

    def _hold(self, tokens: int) -> None:
        self.keys, self.values = (whole[:, :, :tokens] for whole in self.room)


def fits(model: Any) -> bool:
    """Whether all of the model's layers keep what they have seen, as `Room` does: none has a window or a state."""
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)


def joined(parts: Sequence[tuple[torch.Tensor, torch.Tensor, Cache]], width: int) -> Cache:
    """The caches of several passes over prompts as one."""
    layers: list[Any] = [cast("Any", Room)() for _ in parts[0][2].layers]
    for i, layer in enumerate(layers):
        layer.fill([(index, places, cache.layers[i]) for index, places, cache in parts], width)
        for *_, cache in parts:
            spent: Any = cache.layers[i]
            spent.keys = spent.values = None  # else all would be there twice
    return Cache(layers=layers)
