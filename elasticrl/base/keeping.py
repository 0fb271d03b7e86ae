"""Which of a shard's versions stay in a node's memory when a newer one is written.

The one idea: what is newest need not be sealed. While one vault copies nothing, the gang makes steps that a lost node takes
along. These push each other out, and never the newest sealed version, from which the gang then goes on.
"""

from collections.abc import Collection, Sequence
from typing import TypeVar

_V = TypeVar("_V")


def stays(held: Sequence[_V], sealed: Collection[_V], keep: int) -> frozenset[_V]:
    """Of the versions that are held, the newest first, those that none is written over: `keep` in all, and of these first what
    was sealed last (and what that lies on).

    >>> sorted(stays((56, 55, 54), (56,), 2)), sorted(stays((72, 71, 56), (56,), 2))
    ([55, 56], [56, 72])
    """
    first = [version for version in held if version in sealed]
    return frozenset([*first, *(version for version in held if version not in sealed)][:keep])
