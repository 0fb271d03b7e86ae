"""The seated nodes of a plan in a ring: who keeps whose state beside its own.

The one idea: who copies (the vaults) and who reckons what was lost with whom (the leader) go by one rule.
"""

from collections.abc import Iterable, Sequence

from elasticrl.base.value import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Who copies to whom: the seated nodes of a plan in rank order, and where their vaults listen.

    Example: Ring(generation=14, nodes=("n00", "n03"), addresses=(("n00", "10.0.0.1:7462"), ("n03", "10.0.0.3:7462")), copies=1)
    """

    generation: int
    nodes: tuple[str, ...]
    addresses: tuple[tuple[str, str], ...]
    copies: int


NOBODY = Ring(generation=0, nodes=(), addresses=(), copies=0)  # before there is a plan


def keepers(ring: Sequence[str], copies: int, of: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Who keeps these nodes' state, for each that is in the ring: itself, and the next distinct nodes.

    >>> keepers(["n00", "n01", "n02"], 1, ["n02", "n07"])
    {'n02': ('n02', 'n00')}
    """
    nodes = tuple(dict.fromkeys(ring))
    at = {node: place for place, node in enumerate(nodes)}
    hops = range(min(copies, len(nodes) - 1) + 1)
    return {node: tuple(nodes[(at[node] + hop) % len(nodes)] for hop in hops) for node in of if node in at}


def buddies(ring: Sequence[str], node: str, copies: int) -> tuple[str, ...]:
    """Who keeps this node's copies: as `keepers`, without itself.

    >>> buddies(["n00", "n01", "n02"], "n02", 1)
    ('n00',)
    """
    return keepers(ring, copies, [node]).get(node, ())[1:]
