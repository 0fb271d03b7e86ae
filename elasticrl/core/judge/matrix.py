"""What was measured between all pairs of nodes, and the odd one out. Pure.

The one idea: no limit in milliseconds or Mbit/s fits all networks, so ways are compared with each other. What is usual is the
median of the nodes' *best* ways: one slow node spoils a way of everybody, and nobody's best one. A way that is far off that is
bad as a broken one is, and `reach` tells what the bad ones have in common: a node, a link, or two halves.
"""

from collections.abc import Callable, Iterable, Mapping
from math import exp, log
from statistics import median
from typing import Final, TypeVar

from elasticrl.base.value import dataclass
from elasticrl.contract.pairs import Result
from elasticrl.contract.partition import Pair, Reach, single_out

LATE_TIMES: Final = (
    4.0  # the usual round trip: another rack or switch may take two or three times as long as the next node
)
LATE_MS: Final = 0.5  # ... and this much more, below which nobody's step is slower for it
SLOW_TIMES: Final = 2.0  # below the usual rate
SPREADS: Final = (
    12.0  # median deviations, as ratios: where the best ways differ much among themselves, only the far is odd
)
LEAST: Final = 1e-3  # of ms and Mbit/s, below which a figure is no ratio
Name = TypeVar("Name", str, Pair)
Figure = TypeVar("Figure", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Odd:
    """Ways that are far off what is usual, and what they have in common.

    Example: Odd(usual=9400.0, worst=940.0, bad=(("n00", "n03"), ("n01", "n03"), ("n02", "n03")),
        reach=Reach(nodes=("n03",)))
    """

    usual: float
    worst: float
    bad: tuple[Pair, ...]
    reach: Reach

    @property
    def said(self) -> str:
        """Who or what it is."""
        if self.reach.apart:
            return "between " + " and ".join(", ".join(part) for part in self.reach.apart)
        return "; ".join([*self.reach.nodes, *(f"the way {a} - {b}" for a, b in self.reach.links)])


def late(trips: Mapping[Pair, float]) -> Odd | None:
    """The odd one out by round trips, in ms; None if there is none, or too few to tell.

    >>> late({("a", "b"): 0.1, ("a", "c"): 9.0, ("b", "c"): 9.1}).reach.nodes
    ('c',)
    """
    usual, times = _usual(trips, best=min)
    limit = usual * max(LATE_TIMES, times) + LATE_MS
    return _odd(trips, usual, {pair for pair, ms in trips.items() if ms > limit}, worst=max)


def slow(rates: Mapping[Pair, float]) -> Odd | None:
    """The odd one out by rates, in Mbit/s.

    >>> slow({("a", "b"): 940, ("a", "c"): 930, ("b", "c"): 95, ("a", "d"): 940, ("b", "d"): 935, ("c", "d"): 941}).reach.links
    (('b', 'c'),)
    """
    usual, times = _usual(rates, best=max)
    limit = usual / max(SLOW_TIMES, times)
    return _odd(rates, usual, {pair for pair, rate in rates.items() if rate < limit}, worst=min)


def _usual(values: Mapping[Pair, float], best: Callable[[float, float], float]) -> tuple[float, float]:
    """The median of the nodes' best ways, and how many times that a way may be off, as those differ."""
    own: dict[str, float] = {}
    for (a, b), value in values.items():
        for node in (a, b):
            own[node] = best(own.get(node, value), value)
    if not own:
        return 0.0, 1.0
    usual = median(own.values())
    spread = median(abs(log(max(value, LEAST) / max(usual, LEAST))) for value in own.values())
    return usual, exp(min(SPREADS * spread, 20.0))


def _odd(
    values: Mapping[Pair, float], usual: float, bad: set[Pair], worst: Callable[[Iterable[float]], float]
) -> Odd | None:
    if not bad or len({node for pair in values for node in pair}) < 3:
        return None  # of one way alone nobody can say that it is odd
    reach = single_out(bad, set(values) - bad)
    if reach.everywhere:
        return None
    return Odd(usual=usual, worst=worst(values[pair] for pair in bad), bad=tuple(sorted(bad)), reach=reach)


def trips(results: Iterable[Result]) -> dict[Pair, float]:
    """Of each pair the round trip in ms: the quicker of both ends' medians, as an end may have been busy."""
    return _least((_pair(result), result.latency_ms) for result in results)


def rates(results: Iterable[Result]) -> dict[Pair, float]:
    """Of each pair the rate in Mbit/s: that of its slower direction."""
    return _least((_pair(result), result.mbps) for result in results)


def mtus(results: Iterable[Result]) -> dict[str, int]:
    """What each node's interface sends in one piece: the least, if it has several."""
    return _least((result.node, result.mtu) for result in results)


def _least(values: Iterable[tuple[Name, Figure | None]]) -> dict[Name, Figure]:
    found: dict[Name, Figure] = {}
    for name, value in values:
        if value is not None:
            found[name] = min(found.get(name, value), value)
    return found


def _pair(result: Result) -> Pair:
    return (min(result.node, result.peer), max(result.node, result.peer))
