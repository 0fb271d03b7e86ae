"""A digest of parameters and optimizer state that any spread over workers can compute, cheap enough for every step.

The idea: an element's bits are multiplied by an odd 64-bit weight that belongs to its place in its parameter, and everything
is summed modulo 2**64. Integers add in any order, so each rank digests what it has and the sums are added; a single changed
bit always changes the sum, and of two different states one in 2**33 or fewer go unnoticed. It finds corruption and drift, not
forgery.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

BLOCK = 65_536  # elements that share one row of weights; each block has an odd factor of its own
MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """The state after `version` updates: one sum per row (the parameters, then each optimizer slot).

    Example: Digest(version=1284, sums={"param": 0x1f3c..., "exp_avg": 0x77aa..., "exp_avg_sq": 0x02d1...})
    """

    version: int
    sums: Mapping[str, int]

    @property
    def hex(self) -> str:
        """16 digits for a log line."""
        words = f"{self.version} " + " ".join(f"{name}={self.sums[name]:016x}" for name in sorted(self.sums))
        return blake2b(words.encode(), digest_size=8).hexdigest()


def parting(ours: Mapping[int, str], theirs: Mapping[int, str]) -> int | None:
    """The first step, of those both logged, at which two runs' digests differ; None if they never do."""
    return next((step for step in sorted(ours.keys() & theirs.keys()) if ours[step] != theirs[step]), None)


def outliers(values: Sequence[int]) -> tuple[int, ...]:
    """The ranks whose replica differs from most others': silent corruption. All of them where there is no majority.

    >>> outliers([5, 5, 7]), outliers([5, 5]), outliers([5, 7])
    ((2,), (), (0, 1))
    """
    if len(set(values)) == 1:
        return ()
    most = max(sorted(set(values)), key=values.count)
    if 2 * values.count(most) <= len(values):
        return tuple(range(len(values)))
    return tuple(rank for rank, value in enumerate(values) if value != most)


def strangers(values: Sequence[int], members: int) -> tuple[int, ...]:
    """The outliers, where each rank is compared with those of its index in the other teams alone.

    >>> strangers([5, 8, 5, 8, 5, 9], 2)
    (5,)
    """
    odd = [outliers(values[index::members]) for index in range(members)]
    return tuple(sorted(index + members * number for index, found in enumerate(odd) for number in found))


def digest_of(flat: torch.Tensor, start: int, *names: str) -> int:
    """The part that elements start, start + 1, ... of the parameter and row of these names have in the sum."""
    import torch

    # Signed integers of at most half the weights' width, so that the top bits of two elements cannot cancel.
    bits = flat.detach().view(torch.int16 if flat.element_size() == 2 else torch.int32)
    start = start * bits.numel() // max(flat.numel(), 1)
    weights = _weights(str(flat.device))
    total, place = 0, start
    while place < start + bits.numel():
        column = place % BLOCK
        count = min(BLOCK - column, start + bits.numel() - place)
        part = (bits[place - start : place - start + count] * weights[column : column + count]).sum().item()
        total += int(part) * _odd("block", place // BLOCK)
        place += count
    return total * _odd(*names) & MASK


def signed(word: int) -> int:
    """A 64-bit word as the int64 that travels in tensors; `& MASK` is the way back."""
    return word - (1 << 64) if word >> 63 else word


def _odd(*names: str | int) -> int:
    return int.from_bytes(blake2b(repr(names).encode(), digest_size=8).digest(), "little") | 1


@cache
def _weights(device: str) -> torch.Tensor:
    import torch

    # From a hash, not a generator: the weights are part of what digests of different releases must agree on.
    words = b"".join(blake2b(b"elasticrl digest %d" % i, digest_size=64).digest() for i in range(BLOCK // 8))
    return (torch.frombuffer(bytearray(words), dtype=torch.int64) | 1).to(device)
