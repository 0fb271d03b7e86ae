"""What one member of a team asks somebody outside for, and all of the team get: samples of an engine, scores of an endpoint.

The one idea: what comes from outside is no function of anything that a team's members know alike. So one of them asks, and the
others get its very bits from it, or its failure with the same sentence. A member that waits for them waits in a collective: it
leaves when the gang is interrupted, and is measured by the phase that it is in.

What travels is JSON and the bytes of tensors, whose kinds and shapes the JSON says.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.distributed as dist

from elasticrl.base.parsed import parsed
from elasticrl.runtime.group import settle
from elasticrl.runtime.vault.source import dtype_of, name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One of the groups that make up a team, and this rank's place in it. With the tokens of a sequence shared beside a model's
    layers there are two, and what is told goes through one after the other.

    Example: Hop(group=..., index=1)
    """

    group: dist.ProcessGroup
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What came, as it travels: plain words, and tensors on the host by name.

    Example: Found(words=[[3, ["0:17"], 12]], tensors={"3.tokens": tensor[1, P+R]})
    """

    words: Any = None
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind(Generic[T]):
    """How something travels, and which failures to get it are told. Others end the worker that meets them, and so the gang.

    Example: see SAMPLES of `ppo.handed`.
    """

    pack: Callable[[T], Found]
    unpack: Callable[[Found], T]
    fails: tuple[type[Exception], ...] = ()


def asks(hops: Sequence[Hop]) -> bool:
    """Whether this rank is the member that asks: the first in each group."""
    return not any(hop.index for hop in hops)


def ask_once(hops: Sequence[Hop], ask: Callable[[], T], kind: Kind[T]) -> T:
    """What `ask` comes to on the member that asks, on all of them. Collective of the team, by the training thread."""
    if not asks(hops):
        return _read(_passed(hops, b""), kind)
    try:
        came = ask()
    except kind.fails as failure:
        known = next(one.__name__ for one in kind.fails if isinstance(failure, one))
        _passed(hops, _written(Found(), {"failed": known, "why": str(failure)}))
        raise
    _passed(hops, _written(kind.pack(came), {}))
    return came


def _written(found: Found, failure: Mapping[str, str]) -> bytes:
    """The JSON's size, itself, and the tensors' bytes."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in found.tensors.items()}
    listed = [[name, name_of(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()]
    head = json.dumps({**failure, "words": found.words, "tensors": listed}).encode()
    raw = [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors.values()]
    return b"".join([len(head).to_bytes(8, "little"), head, *raw])


def _read(data: bytes, kind: Kind[T]) -> T:
    start = 8 + int.from_bytes(data[:8], "little")
    text = data[8:start].decode()
    head = parsed(text, most=len(text))  # the gang's own
    if "failed" in head:
        raise next(one for one in kind.fails if one.__name__ == head["failed"])(head["why"])
    tensors: dict[str, torch.Tensor] = {}
    for name, dtype, shape in head["tensors"]:
        nbytes = prod(shape) * dtype_of(dtype).itemsize
        # As a copy: in memory of its own a tensor lies where its numbers may begin.
        raw = torch.frombuffer(bytearray(data[start : start + nbytes] or b"\0"), dtype=torch.uint8)[:nbytes].clone()
        tensors[name] = raw.view(dtype_of(dtype)).reshape(shape)
        start += nbytes
    return kind.unpack(Found(words=head["words"], tensors=tensors))


def _passed(hops: Sequence[Hop], data: bytes) -> bytes:
    """The asker's bytes, on all members. Of each group but the last the other members are not there: the last brings it."""
    for number, hop in enumerate(hops):
        if any(later.index for later in hops[number + 1 :]):
            continue
        data = _broadcast(hop, data)
    return data


def _broadcast(hop: Hop, data: bytes) -> bytes:
    size = torch.tensor([len(data)])
    dist.broadcast(size, group=hop.group, group_src=0)
    settle(hop.group)
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8) if hop.index == 0 else None
    whole = torch.empty(int(size), dtype=torch.uint8) if mine is None else mine
    dist.broadcast(whole, group=hop.group, group_src=0)
    settle(hop.group)
    return data if mine is not None else whole.numpy().tobytes()
