"""The buffers of a model that is trained, which nobody saves: they have to stay as they were built.

The one idea: whoever takes a dead worker's place builds its buffers anew, so one that changes, or differs between ranks, makes
the bits depend on faults. It is refused by its name, unless a part of the registered state has the very same tensor.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from elasticrl.runtime.misuse import Misuse

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch


class _Seen(NamedTuple):
    """What tells at no cost that a buffer was written to: most kernels count that."""

    at: int
    version: int
    shape: tuple[int, ...]


class _Built(NamedTuple):
    """What a buffer held when this process first saw it."""

    hash: str
    shape: tuple[int, ...]


class Buffers:
    """Those of one role, through all generations that this process is in."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._first: dict[str, _Built] = {}
        self._owners: dict[str, tuple[torch.nn.Module, str]] = {}  # the module may put another tensor in its place
        self._seen: dict[str, _Seen] = {}
        self._next = 0

    def begin(self, model: torch.nn.Module, registered: Collection[int]) -> str:
        """A generation begins with this model, the same or one built anew. The digest of what its buffers were built with, to
        be compared between ranks; "" where there are none. Those in `registered` storages are state like any other.
        """
        fresh = not self._first
        self._owners, self._seen = {}, {}
        for path, module in model.named_modules():
            for key, buffer in module._buffers.items():  # noqa: SLF001 - by their owner, which is told by no public call
                if buffer is None or buffer.is_meta or buffer.untyped_storage().data_ptr() in registered:
                    continue
                name = f"{path}.{key}".lstrip(".")
                if fresh:
                    self._first[name] = _Built(_hash(buffer), tuple(buffer.shape))
                if name in self._first:  # one that came later is a cache
                    self._owners[name] = (module, key)
        told = sorted((name, self._first[name].hash) for name in self._owners)
        for name in list(self._owners):
            self._compare(name)
        return blake2b(repr(told).encode(), digest_size=8).hexdigest() if told else ""

    def end(self) -> None:
        """The generation is over, and its model may go."""
        self._owners = {}

    def check(self) -> None:
        """Misuse if one has changed. Each is looked at, and one of them read: some kernels (BatchNorm's) write uncounted."""
        names = list(self._owners)
        if names:
            self._next = (self._next + 1) % len(names)
            self._seen.pop(names[self._next], None)
        for name in names:
            self._compare(name)

    def _compare(self, name: str) -> None:
        owner, key = self._owners[name]
        buffer, first = owner._buffers.get(key), self._first[name]  # noqa: SLF001
        now = None if buffer is None else _seen(buffer)
        if now is not None and now == self._seen.get(name):
            return
        if (now is None or now.shape != first.shape) and key in owner._non_persistent_buffers_set:  # noqa: SLF001
            del self._owners[name]  # a cache that grows with what is asked of it
            return
        if buffer is None or now is None or _hash(buffer) != first.hash:
            raise Misuse(
                f"The buffer {name} of {self._role} has changed since the model was built. Buffers are neither kept nor "
                "restored, so the bits would depend on faults. Either switch that off (eval() of its module, or a layer "
                "without running statistics), or register the module that owns it (run.register(norm=...)) and change "
                "it outside of the lanes, on all ranks alike."
            )
        self._seen[name] = now


def _seen(buffer: torch.Tensor) -> _Seen:
    version = 0 if buffer.is_inference() else buffer._version  # noqa: SLF001
    return _Seen(buffer.data_ptr(), version, tuple(buffer.shape))


def _hash(buffer: torch.Tensor) -> str:
    import torch

    flat = buffer.detach().cpu().contiguous().view(-1)
    words = f"{buffer.dtype} {tuple(buffer.shape)}".encode()
    return blake2b(words + flat.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
