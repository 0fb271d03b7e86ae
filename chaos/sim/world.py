"""Virtual time, chance by name, and the network: the ground that virtual nodes stand on.

The one idea: everything that will happen lies in one queue, ordered by time and then by when it was put there. Nothing else
moves time, and every random number comes from a generator seeded by a name, so a seed is a run.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Collection
from itertools import count
from math import inf
from random import Random
from typing import TypeVarTuple

from chaos.history import Fact, History

Args = TypeVarTuple("Args")
Entry = tuple[float, int, Callable[..., object], tuple[object, ...]]

# Thousands of nodes have a hundred thousand things ahead of them, most of them seconds away. One heap of all would be searched
# through at each. So there is a heap of what is due in the present slice of time, and each later slice is a list.
SLICES_PER_S = 256


class World:
    """The queue, the clock and the history."""

    def __init__(self, seed: str) -> None:
        self.seed = seed
        self.now = 0.0
        self.history: History = []
        self.events = 0
        self.halted = False  # a run that spins would never end: what there is, is judged
        self.onlooker: Callable[[Fact], None] | None = None
        self.overseer: Callable[..., object] | None = None  # is shown each node, event and decision
        self._slice = -1  # the present one; what is due in it or before is in the heap
        self._heap: list[Entry] = []
        self._later: dict[int, list[Entry]] = {}  # by slice
        self._slices: list[int] = []  # a heap of those
        self._order = count()
        self._chance: dict[str, Random] = {}

    def chance(self, name: str) -> Random:
        """The generator of this name; asking one never disturbs another."""
        if name not in self._chance:
            self._chance[name] = Random(f"{self.seed}:{name}")
        return self._chance[name]

    def later(self, delay: float, what: Callable[[*Args], object], *args: *Args) -> None:
        """Do this after `delay` seconds of true time."""
        self._put(self.now + delay, what, args)

    def at(self, when: float, what: Callable[[*Args], object], *args: *Args) -> None:
        """Do this at that true time, to the last bit of it."""
        self._put(when, what, args)

    def _put(self, when: float, what: Callable[..., object], args: tuple[object, ...]) -> None:
        entry, number = (when, next(self._order), what, args), int(when * SLICES_PER_S)
        if number <= self._slice:
            heapq.heappush(self._heap, entry)
        elif number in self._later:
            self._later[number].append(entry)
        else:
            self._later[number] = [entry]
            heapq.heappush(self._slices, number)

    def note(self, fact: Fact) -> None:
        """Write down what an outsider could have seen."""
        self.history.append(fact)
        if self.onlooker is not None:
            self.onlooker(fact)

    def due(self) -> float:
        """When the next thing happens."""
        return self._heap[0][0] if self._heap or self._turn() else inf

    def _turn(self) -> bool:
        """On to the next slice in which something is due, if there is one."""
        if not self._slices:
            return False
        self._slice = heapq.heappop(self._slices)
        self._heap = self._later.pop(self._slice)
        heapq.heapify(self._heap)
        return True

    def run(self, until: float) -> None:
        """Let things happen until this time."""
        while not self.halted and (self._heap or self._turn()) and self._heap[0][0] <= until:
            heap = self._heap
            while heap and heap[0][0] <= until and not self.halted:
                self.now, _, what, args = heapq.heappop(heap)
                self.events += 1
                what(*args)
        self.now = max(self.now, until)


class Clock:
    """A node's monotonic clock: its own zero, and a rate that a fault may change. It never goes backwards."""

    __slots__ = ("_local", "_true", "_world", "rate")

    def __init__(self, world: World, zero: float, rate: float) -> None:
        self._world = world
        self._true = world.now
        self._local = zero
        self.rate = rate

    def now(self) -> float:
        """Seconds on this clock."""
        return self._local + (self._world.now - self._true) * self.rate

    def run_at(self, rate: float) -> None:
        """From now on at this rate."""
        self._local, self._true, self.rate = self.now(), self._world.now, rate

    def true(self, local: float) -> float:
        """When this clock will show `local`, in true time."""
        return inf if local == inf else self._true + (local - self._local) / self.rate


class Network:
    """Who can reach whom. Only what is broken is written down, so a healthy network costs nothing."""

    def __init__(self) -> None:
        self.cuts: Counter[tuple[str, str, str]] = Counter()  # (from, to, beat|data)
        self.cut_nodes: Counter[str] = Counter()  # that some cut or isolation concerns
        self.deaf: Counter[tuple[str, str]] = Counter()  # (node, scope): hears nobody
        self.dumb: Counter[tuple[str, str]] = Counter()  # (node, scope): is heard by nobody
        self.to_store: Counter[str] = Counter()
        self.from_store: Counter[str] = Counter()
        self.loss = 0.0  # of requests and answers
        self.losses: dict[str, float] = {}  # of one node's
        self.repeat = 0.0  # requests are applied again up to this much later
        self.delay = 0.0  # more than usual, up to
        self.lossy: dict[str, float] = {}  # share of the beats from and to a node that is lost
        self.holes: dict[str, int] = {}  # frames of a node over so many bytes are lost
        self.late: set[str] = set()  # the ways of these take long
        self.untried: Counter[str] = Counter()  # of these nobody finds out in time whether it does
        self.no_nccl: Counter[str] = Counter()  # over the ways of these NCCL does not work, and all else does

    def hears(self, src: str, dst: str, scope: str) -> bool:
        """Does what `src` sends reach `dst`?"""
        if not self.cut_nodes or (src not in self.cut_nodes and dst not in self.cut_nodes):
            return True
        return not (self.cuts.get((src, dst, scope)) or self.dumb.get((src, scope)) or self.deaf.get((dst, scope)))

    def linked(self, a: str, b: str) -> bool:
        """Can these two exchange data?"""
        return self.hears(a, b, "data") and self.hears(b, a, "data")

    def parted(self, names: Collection[str]) -> bool:
        """Are there two of these that cannot exchange data?"""
        if not self.cut_nodes or len(names) < 2:
            return False
        if any(self.deaf.get((n, "data")) or self.dumb.get((n, "data")) for n in self.cut_nodes if n in names):
            return True
        return any(n and scope == "data" and a in names and b in names for (a, b, scope), n in self.cuts.items())

    def swallowed(self, names: Collection[str]) -> bool:
        """Does next to nothing get through among these, as large frames are lost, or all are late?"""
        ill = self.holes.keys() | self.late
        return len(names) > 1 and not ill.isdisjoint(names) if ill else False

    def fabric_broken(self, names: Collection[str]) -> bool:
        """Does NCCL not work among these?"""
        return len(names) > 1 and any(self.no_nccl[name] for name in names) if self.no_nccl else False

    def lag(self, chance: Random) -> float:
        """How long a message to or from the store takes."""
        usual = 0.0005 + 0.002 * chance.random()
        return usual + self.delay * chance.random() if self.delay else usual
