"""The buffers of a model that is trained, which nobody saves: they have to stay as they were built.

The one idea: whoever takes a dead worker's place builds its buffers anew, so one that changes, or differs between ranks, makes
the bits depend on faults. It is refused by its name, unless a part of the registered state has the very same tensor.

One that a forward pass puts in its place is let be where it is the only other one: it depends on the call alone (transformers'
`longrope` has one `inv_freq` for short texts and one for long ones). Whatever goes on from the last value comes to a third.
"""

from __future__ import annotations

import weakref
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

from zlib_ng.zlib_ng import crc32

from elasticrl.runtime.misuse import Misuse

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    import torch

PART: Final = 1 << 20  # bytes: so much is read after a step, of one buffer, where nothing tells that any was written to


class _Seen(NamedTuple):
    """What tells at no cost that a buffer is another one, or was written to: most kernels count that. Its storage may move."""

    tensor: weakref.ref[torch.Tensor]
    version: int


class _Built(NamedTuple):
    """What a buffer held when this process first saw it."""

    sums: tuple[int, ...]  # of each `PART`
    shape: tuple[int, ...]


class Buffers:
    """Those of one role, through all generations that this process is in."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._begun = False  # what comes from now on was not built, but made by a pass
        self._first: dict[str, _Built] = {}
        self._other: dict[str, tuple[int, ...]] = {}  # the sums of what a pass has put in place of some
        self._model: weakref.ref[torch.nn.Module] | None = None
        self._owners: dict[str, tuple[torch.nn.Module, str]] = {}  # the module may put another tensor in its place
        self._seen: dict[str, _Seen] = {}
        self._turn = 0

    def begin(self, model: torch.nn.Module, registered: Collection[int]) -> str:
        """A generation begins with this model, the same or one built anew. The digest of what its buffers were built with, to
        be compared between ranks; "" where there are none. Those in `registered` storages are state like any other.
        """
        if self._model is None or self._model() is not model:
            self._model, self._seen = weakref.ref(model), {}
        self._owners = {}
        for path, module in model.named_modules():
            for key, buffer in module._buffers.items():  # noqa: SLF001 - by their owner, which is told by no public call
                if buffer is None or buffer.is_meta or buffer.untyped_storage().data_ptr() in registered:
                    continue
                name = f"{path}.{key}".lstrip(".")
                if not self._begun:
                    self._first[name], self._seen[name] = _Built(_sums(buffer), tuple(buffer.shape)), _seen(buffer)
                if name in self._first:  # one that came later is a cache
                    self._owners[name] = (module, key)
        for name in list(self._owners) if self._begun else ():
            self._compare(name, read=True)
        self._begun = True
        told = sorted(self._first.items())
        return blake2b(repr(told).encode(), digest_size=8).hexdigest() if told else ""

    def end(self) -> None:
        """The generation is over, and its model may go."""
        self._owners = {}

    def check(self) -> None:
        """Misuse if one has changed. Each is looked at, and some of one read: some kernels (BatchNorm's) write uncounted."""
        for name in list(self._owners):
            self._compare(name)
        if names := list(self._owners):
            around, which = divmod(self._turn, len(names))
            self._turn += 1
            self._read(names[which], around)

    def _compare(self, name: str, *, read: bool = False) -> None:
        """All of it, if it may have changed or is to be `read` anyway."""
        owner, key = self._owners[name]
        buffer, first, seen = owner._buffers.get(key), self._first[name], self._seen.get(name)  # noqa: SLF001 - as in begin
        passing = key in owner._non_persistent_buffers_set  # noqa: SLF001 - state_dict() leaves them out, and tells no reason
        if buffer is None or tuple(buffer.shape) != first.shape:
            if not passing:
                raise self._changed(name)
            del self._owners[name]  # a cache that grows with what is asked of it
            return
        same = seen is not None and seen.tensor() is buffer
        if not read and same and seen is not None and seen.version == _version(buffer):
            return
        if (found := _sums(buffer)) not in (first.sums, self._other.get(name)):
            if same or seen is None or not passing or name in self._other or _remembers(owner):
                raise self._changed(name)
            self._other[name] = found
        self._seen[name] = _seen(buffer)

    def _read(self, name: str, turn: int) -> None:
        """One part of it."""
        owner, key = self._owners[name]
        buffer, sums = owner._buffers[key], self._first[name].sums  # noqa: SLF001 - as in begin
        assert buffer is not None, "it was compared"
        part = turn % len(sums)
        if _sums(buffer, [part])[0] not in (sums[part], self._other.get(name, sums)[part]):
            raise self._changed(name)

    def _changed(self, name: str) -> Misuse:
        return Misuse(
            f"The buffer {name} of {self._role} has changed since the model was built. Buffers are neither kept nor "
            "restored, so the bits would depend on faults. Either switch that off (eval() of its module, or a layer "
            "without running statistics), or register the module that owns it (run.register(norm=...), whose state_dict() "
            "has to return the buffer itself, no copy) and change it outside of the lanes, on all ranks alike."
        )


def _remembers(owner: torch.nn.Module) -> bool:
    """Whether what it puts in place of a buffer depends on more than the call: transformers' dynamic NTK keeps the frequencies
    of the longest text so far, and a new worker has those of its own first one.
    """
    return "dynamic" in str(getattr(owner, "rope_type", ""))


def _seen(buffer: torch.Tensor) -> _Seen:
    return _Seen(weakref.ref(buffer), _version(buffer))


def _version(buffer: torch.Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version  # noqa: SLF001 - no public call tells it


def _sums(buffer: torch.Tensor, parts: Iterable[int] | None = None) -> tuple[int, ...]:
    """Of these parts, or of all. What is not contiguous is copied where it is, and each part before numpy sees it: a storage
    that it has seen cannot be resized any more.
    """
    import torch

    flat, size = buffer.detach().reshape(-1), PART // buffer.element_size()
    head = crc32(f"{buffer.dtype} {tuple(buffer.shape)}".encode())
    parts = range(max(1, -(-flat.numel() // size))) if parts is None else parts
    pieces = (flat[part * size : (part + 1) * size].to("cpu", copy=True) for part in parts)
    return tuple(crc32(piece.view(torch.uint8).numpy(), head) for piece in pieces)
