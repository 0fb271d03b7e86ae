"""Which nodes test each other, and what the tests of all pairs say together. Pure.

The one idea: both ends' views of a pair make one fact, and a few pairs of each node are enough to tell a bad node (all of its
pairs fail) from a bad link (one pair fails) from a partition (the pairs that work fall into pieces). Under a PROBE plan these
are the pairs of `suspect.probe_links`. `elasticrl doctor --nodes` tests all pairs of few nodes (`everyone`), and of many one
ring (`schedule`). Where what works has fallen into pieces, `confirm` names a few pairs more.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from statistics import median
from typing import Any, Final

from elasticrl.base.value import dataclass
from elasticrl.contract.evidence import Evidence, Kind, Sign
from elasticrl.contract.partition import Pair, pieces

LOSS = 0.05  # a share of lost packets from which TCP becomes useless for collectives
LATE_S = 0.05  # a round trip that no way within a cluster takes, nor a daemon that is merely busy, time after time ...
SLOW_MS = 1000 * LATE_S
SLOW_TIMES = 10.0  # ... unless all of them do: so it must also be this many times the fastest
SILENT: Final = "nothing arrives, either way"  # of a pair of which no end has had an answer of any kind


def ring(nodes: Iterable[str]) -> tuple[str, ...]:
    """The nodes in the order of their ring: the same on every node, without talking.

    In the order of their names, since racks and switches hold nodes of like names: a switch that is cut off then breaks two
    pairs, not all.
    """
    names = sorted(set(nodes), key=lambda node: [int(part) if part.isdigit() else part for part in _PARTS.split(node)])
    return tuple(names)


_PARTS = re.compile(r"(\d+)")  # n2 before n10


def schedule(nodes: Iterable[str]) -> tuple[tuple[Pair, ...], ...]:
    """Rounds of pairs in which each node is in one pair at most. Two rounds; an odd ring needs a third for its last pair.

    >>> schedule(["a", "b"])
    ((('a', 'b'),),)
    >>> [len(pairs) for pairs in schedule(map(str, range(1000)))]
    [500, 500]
    """
    order = ring(nodes)
    count = len(order)
    if count < 2:
        return ()
    if count == 2:
        return ((_pair(*order),),)
    edges = [_pair(order[i], order[(i + 1) % count]) for i in range(count)]
    even = count - count % 2
    rounds = [edges[0:even:2], edges[1:even:2], edges[even:]]
    return tuple(tuple(pairs) for pairs in rounds if pairs)


def everyone(nodes: Iterable[str]) -> tuple[tuple[Pair, ...], ...]:
    """All pairs, in rounds in which each node is in one pair at most: one stays, the others walk around a table. For few nodes.

    >>> everyone("abcd")
    ((('a', 'd'), ('b', 'c')), (('a', 'c'), ('b', 'd')), (('a', 'b'), ('c', 'd')))
    >>> [len(pairs) for pairs in everyone("abcde")]
    [2, 2, 2, 2, 2]
    """
    order = list(ring(nodes))
    seats: list[str | None] = [*order, *([None] if len(order) % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        met = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append(tuple(_pair(a, b) for a, b in met if a is not None and b is not None))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return tuple(rounds)


def turns(pairs: Iterable[Pair]) -> tuple[tuple[Pair, ...], ...]:
    """Any pairs in rounds, each node in one pair of a round at most: two that wait for each other then never do so in a ring.

    >>> turns([("a", "b"), ("b", "c"), ("c", "d")])
    ((('a', 'b'), ('c', 'd')), (('b', 'c'),))
    """
    rounds: list[list[Pair]] = []
    busy: list[set[str]] = []
    for a, b in pairs:
        place = next((i for i, names in enumerate(busy) if a not in names and b not in names), len(rounds))
        if place == len(rounds):
            rounds.append([])
            busy.append(set())
        rounds[place].append((a, b))
        busy[place] |= {a, b}
    return tuple(map(tuple, rounds))


def late_ways(took: Mapping[str, float]) -> frozenset[str]:
    """Neighbours that are far away although others are near. (To whom all are far, he is far himself: they say so.)

    >>> sorted(late_ways({"n1": 0.4, "n2": 0.0003}))
    ['n1']
    """
    usual = min(took.values(), default=0.0) if len(took) > 1 else 0.0
    return frozenset(node for node, seconds in took.items() if seconds > LATE_S and seconds > SLOW_TIMES * usual)


def confirm(nodes: Iterable[str], results: Sequence["Result"]) -> tuple[Pair, ...]:
    """Pairs for one further round, about two for each piece that the pairs that work fall into: are they really apart?

    Two links that broke by themselves look like a partition, and a partition through the middle of racks like many bad
    nodes. Each piece is tested against the two largest others.
    """
    tested = {_pair(result.node, result.peer) for result in results}
    _, good = verdicts(results)
    parts = pieces(nodes, good)
    if len(parts) < 2 or not good:
        return ()
    found: list[Pair] = []
    for part in parts[1:]:
        for home in parts[:2]:
            across = (_pair(a, b) for a in part for b in home if home != part)
            fresh = next((pair for pair in across if pair not in tested and pair not in found), None)
            found += [fresh] if fresh else []
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one node found out about one other. None: not tested.

    Example: Result(node="n00", peer="n01", sent=100, answered=100, heard=100, latency_ms=0.2, p99_ms=0.4, tcp="ok",
        mbps=9400.0, mtu=1500, largest=1500, gloo="ok")
    """

    node: str
    peer: str
    sent: int = 0  # datagrams, from the first answer on
    answered: int = 0
    heard: int = 0  # the peer's datagrams
    latency_ms: float | None = None  # the median round trip
    p99_ms: float | None = None
    mtu: int | None = None  # what the way should carry
    largest: int | None = None  # what it did carry; None: nothing of any size was answered
    tcp: str | None = None  # "ok", or what happened
    refused: bool = False  # the peer's kernel did: nobody listened there
    begun: bool = False  # a connection was made, and did not carry all in time
    mbps: float | None = None  # from node to peer, over one connection
    gloo: str | None = None  # "ok", or what happened
    nccl: str | None = None  # "ok", or what happened
    transport: str = ""  # what NCCL chose: NET/IB, NET/Socket, P2P, SHM
    offset_s: float | None = None  # the peer's clock is ahead of the node's by this much
    facts: str = ""  # what the peer says of itself: versions, as JSON

    @property
    def loss(self) -> float:
        """Of datagrams there or of their answers back."""
        return 1.0 - self.answered / self.sent if self.sent else 0.0

    def plain(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


_WHOLE = frozenset({"sent", "answered", "heard", "mtu", "largest"})
_FLAGS = frozenset({"refused", "begun"})
_REAL = frozenset({"latency_ms", "p99_ms", "mbps", "offset_s"})
FACTS: Final = 4000  # characters of a node's facts at most


def result_of(plain: object) -> Result:
    """A result again; ValueError if it is none. What comes from another node's program is looked at before it is believed."""
    if not isinstance(plain, Mapping) or not all(isinstance(plain.get(key), str) for key in ("node", "peer")):
        raise ValueError(f"a probe's result names no node and peer: {str(plain)[:80]}")
    known: dict[str, Any] = {}
    for field in fields(Result):
        value, flag = plain.get(field.name, field.default), field.name in _FLAGS
        allowed = bool if flag else int if field.name in _WHOLE else (int, float) if field.name in _REAL else str
        if value != field.default and (isinstance(value, bool) is not flag or not isinstance(value, allowed)):
            raise ValueError(f"a probe's result has {field.name}={str(value)[:80]!r}")
        known[field.name] = value[: FACTS if field.name == "facts" else 300] if isinstance(value, str) else value
    return Result(**known)


def findings(results: Iterable[Result], *, asked: Iterable[Pair] = (), waited: bool = False) -> tuple[Evidence, ...]:
    """One fact for each pair, from both ends' views. A pair that was `asked` for and that nobody reports is unreachable.
    `waited`: so is one whose partner has not come, as each was to wait for the others.
    """
    views: dict[Pair, dict[str, Result]] = {_pair(*pair): {} for pair in asked}
    for result in results:
        views.setdefault(_pair(result.node, result.peer), {})[result.node] = result
    times = [view.latency_ms for pair in views.values() for view in pair.values() if view.latency_ms is not None]
    usual = min(times, default=0.0)
    met_nobody = Counter(view.peer for ends in views.values() if (view := _alone(ends)))
    told = {
        pair: ends
        for pair, ends in views.items()
        # The word of one proves nothing: the other may be about to begin. That several found nobody does.
        if waited or not (view := _alone(ends)) or met_nobody[view.peer] > 1
    }
    return tuple(_finding(pair, ends, usual) for pair, ends in sorted(told.items()))


def _alone(ends: Mapping[str, Result]) -> Result | None:
    """What one end says whose partner had not begun its test: its kernel refused, as nobody listened there."""
    views = tuple(ends.values())
    alone = len(views) == 1 and not views[0].answered and not views[0].heard and views[0].refused
    return views[0] if alone else None


def _finding(pair: Pair, ends: Mapping[str, Result], usual_ms: float) -> Evidence:
    """What the reports of both ends say about a pair of nodes: the worst trouble that they prove, or that it is well."""
    a, b = pair
    seen = [ends[node] for node in pair if node in ends]
    arrives = {(a, b): False, (b, a): False}
    for view in seen:
        there, back = (view.node, view.peer), (view.peer, view.node)
        arrives[there] |= view.answered > 0
        arrives[back] |= view.heard > 0 or view.answered > 0
    spoke = any(view.tcp == "ok" for view in seen)
    if not seen:
        return _fact(Sign.UNREACHABLE, a, b, "neither end reported")
    if not spoke and not any(arrives.values()):
        return _fact(Sign.UNREACHABLE, a, b, f"{SILENT} ({_said(seen, 'tcp')})")
    if not spoke and not all(arrives.values()) and len(seen) == 2:
        sender, receiver = next(way for way, fine in arrives.items() if not fine)
        return _fact(Sign.ONE_WAY, sender, receiver, f"packets from {sender} do not arrive at {receiver}; back they do")
    for view in seen:
        if view.mtu and view.largest and view.largest < view.mtu:
            said = f"packets over {view.largest} bytes vanish, the interface says {view.mtu}"
            return _fact(Sign.MTU, view.node, view.peer, said)
    slow = [view.latency_ms for view in seen if view.latency_ms is not None]
    late = bool(slow) and median(slow) > max(SLOW_MS, SLOW_TIMES * usual_ms)
    began = next((view.begun for view in seen if view.tcp not in {None, "ok"}), False)
    # Where a round trip takes half a second no connection has carried its bytes in time: that it began to is no broken way.
    if not spoke and (said := _said(seen, "tcp")) and not (late and began):
        return _fact(Sign.UNREACHABLE, a, b, f"datagrams pass, TCP does not ({said})")
    loss = max(view.loss for view in seen)
    if loss > LOSS:
        return _fact(Sign.LOSSY, a, b, f"{loss:.0%} of packets are lost")
    if late:
        return _fact(Sign.DELAYED, a, b, f"a round trip takes {median(slow):.0f} ms, elsewhere {usual_ms:.1f} ms")
    # An end that ran out of time left the other alone with it: that proves nothing.
    if all(view.gloo is not None for view in seen) and (said := _said(seen, "gloo")):
        return _fact(Sign.UNREACHABLE, a, b, f"TCP passes, gloo does not ({said})")
    if said := _said(seen, "nccl"):
        return _fact(Sign.NCCL_BROKEN, a, b, said)
    return _fact(Sign.HEALTHY, a, b, _well(seen))


def _said(views: Iterable[Result], what: str) -> str:
    """The first complaint about this part of the test."""
    answers = [getattr(view, what) for view in views]
    return next((str(answer) for answer in answers if answer not in {None, "ok"}), "")


def _well(views: Sequence[Result]) -> str:
    times = [view.latency_ms for view in views if view.latency_ms is not None]
    rates = [view.mbps for view in views if view.mbps is not None]
    said = [f"{median(times):.2f} ms"] if times else []
    said += [f"{min(rates):.0f} Mbit/s"] if rates else []
    return ", ".join(said + [view.transport for view in views[:1] if view.transport])


def verdicts(results: Iterable[Result]) -> tuple[frozenset[Pair], frozenset[Pair]]:
    """The bad pairs and the good ones."""
    facts = findings(results)
    good = frozenset(_pair(str(f.node), str(f.peer)) for f in facts if f.sign is Sign.HEALTHY)
    return frozenset(_pair(str(f.node), str(f.peer)) for f in facts) - good, good


def _fact(sign: Sign, node: str, peer: str, detail: str) -> Evidence:
    return Evidence(kind=Kind.PROBE, sign=sign, node=node, peer=peer, detail=detail[:300], source="probe")


def _pair(a: str, b: str) -> Pair:
    return (a, b) if a < b else (b, a)
