"""What the broken pairs have in common: a node, a link, or a cut through the middle. Pure.

The one idea: take the pairs that work as a graph. A node that is alone in it, and failed with two others, is at fault itself;
a broken pair inside of one piece is a link; pieces of several nodes with broken pairs between them are a partition.
"""

from collections import Counter
from collections.abc import Iterable

from elasticrl.base.value import dataclass

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The answer. At most one of `apart` and `everywhere` is set; nodes and links may stand beside each other.

    Example: Reach(nodes=("n03",), links=(("n00", "n07"),))
    """

    nodes: tuple[str, ...] = ()
    links: tuple[Pair, ...] = ()
    apart: tuple[tuple[str, ...], ...] = ()  # the pieces, the largest first
    everywhere: bool = False  # no pair of more than one works

    @property
    def blamed(self) -> tuple[str, ...]:
        """The nodes to name: the smaller pieces of a partition, the culprits, else both ends of the links."""
        if self.everywhere:
            return ()
        if self.apart:
            first, *others = self.apart
            small = [part for part in others if len(part) < len(first)]
            return tuple(sorted(name for part in (small or self.apart) for name in part))
        return self.nodes or tuple(sorted({name for link in self.links for name in link}))


def pieces(nodes: Iterable[str], good: Iterable[Pair]) -> tuple[tuple[str, ...], ...]:
    """The connected pieces of the pairs that work, the largest first.

    >>> pieces("abcd", [("a", "b")])
    (('a', 'b'), ('c',), ('d',))
    """
    piece = {node: [node] for node in nodes}
    for pair in good:
        less, more = sorted((piece.setdefault(node, [node]) for node in pair), key=len)
        if less is not more:  # the smaller one moves: so each node does, a few times at the most
            more.extend(less)
            piece.update(dict.fromkeys(less, more))
    parts = {id(part): tuple(sorted(part)) for part in piece.values()}
    return tuple(sorted(parts.values(), key=lambda part: (-len(part), part)))


def single_out(bad: Iterable[Pair], good: Iterable[Pair]) -> Reach:
    """Who or what is at fault.

    >>> single_out([("a", "d"), ("c", "d")], [("a", "b"), ("b", "c")]).nodes
    ('d',)
    """
    bad = sorted({(min(pair), max(pair)) for pair in bad})
    good = sorted({(min(pair), max(pair)) for pair in good} - set(bad))
    names = {name for pair in (*bad, *good) for name in pair}
    share = Counter(name for pair in bad for name in pair)
    works = {name for pair in good for name in pair}
    nodes = tuple(sorted(name for name, count in share.items() if count > 1 and name not in works))
    if len(nodes) == len(names) > 2:
        return Reach(everywhere=True)
    links = tuple(pair for pair in bad if not set(pair) & set(nodes))
    large = [part for part in pieces(names, good) if len(part) > 1]
    home = {name: part for part in large for name in part}
    if any(a in home and b in home and home[a] != home[b] for a, b in links):
        return Reach(apart=tuple(large), nodes=nodes)
    return Reach(nodes=nodes, links=links)
