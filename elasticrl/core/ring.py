"""The nodes of a plan in a ring: whose state each of them keeps beside its own.

The one idea: who copies (the vaults) and who reckons what was lost with whom (the leader) go by one rule.
"""

from collections.abc import Sequence

from elasticrl.core.value import dataclass


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


def buddies(ring: Sequence[str], node: str, copies: int) -> tuple[str, ...]:
    """Who keeps this node's copies: the next distinct nodes of the ring, never itself.

    >>> buddies(["n00", "n01", "n02"], "n02", 1)
    ('n00',)
    """
    nodes = list(dict.fromkeys(ring))
    if node not in nodes:
        return ()
    at = nodes.index(node)
    return tuple((nodes[at + 1 :] + nodes[:at])[:copies])
