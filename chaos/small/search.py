"""The search: every state that a small world can come to, from the first on, each once, the nearest first.

The one idea: what is found first is reached by the fewest moves, so the way to it is a shortest one. When all states are known,
what has to happen at last is read off their graph: from each a way back to training without another fault, and no circle that
never comes there.
"""

import gc
import time
from array import array
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import permutations
from typing import Final

from chaos.small.judge import Complaint, complaints
from chaos.small.shelf import Held
from chaos.small.values import NEVER
from chaos.small.world import Move, Rules, World
from elasticrl.contract.model import Intent, Phase

NO_WAY: Final = "the_job_is_well_again"
CIRCLE: Final = "nobody_spins"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """How far the search goes."""

    faults: int
    turns: int = 0  # deviations from the order in which what is due has its turn
    states: int = 2_000_000
    seconds: float = 3600.0  # of computing
    boot: bool = False  # from the first moment on, in place of from when all train
    recovering: bool = True  # a further fault comes before the job is well again
    kinds: frozenset[str] = frozenset()  # of faults; none: all
    back_s: int = 0  # how long the way back may take by itself; 0: as long as it may
    one: bool = False  # the first complaint ends the search
    symmetric: bool = False  # states that differ in the nodes' names alone are one


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A guarantee that did not hold, and a shortest way to it."""

    check: str
    what: str
    way: tuple[Move, ...]


@dataclass(slots=True)
class Result:
    """What was searched, and what was found."""

    states: int = 0
    transitions: int = 0
    merged: int = 0
    depth: int = 0
    asked: int = 0
    seconds: float = 0.0
    back_s: int = 0  # the longest way back to training, where each thing has its turn
    left: int = 0  # states that were not gone on from
    cut: Counter[str] = field(default_factory=Counter)
    found: list[Found] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)


class Search:
    """One search."""

    def __init__(self, rules: Rules, bound: Bound) -> None:
        self.rules, self.bound = rules, bound
        self.result = Result()
        self.worlds: list[World] = []
        self.numbers: dict[World, int] = {}
        self.parents = array("i")
        self.moves: list[Move] = []
        self.depths = array("i")
        self.next: list[tuple[int, ...]] = []  # by moves that are no faults, the fair one first
        self.waits = bytearray()  # by state: does time go when each thing has its turn?
        self.todo: deque[tuple[int, bool]] = deque()  # states, and whether they are new or only to be struck
        self.struck: set[int] = set()  # states in which faults come

    def run(self) -> Result:
        """All of it."""
        begun = time.process_time()
        was = gc.isenabled()
        gc.disable()  # nothing here forms circles, and a million states are looked through each time
        try:
            self._explore(begun)
            if not (self.bound.one and self.result.found):
                self._come_back()
        finally:
            if was:
                gc.enable()
        self.result.states = len(self.worlds)
        self.result.asked = self.rules.cores.asked
        self.result.seconds = time.process_time() - begun
        return self.result

    # ---- all states

    def first(self) -> World:
        """Where the search begins: as all train, if nothing is wrong before."""
        rules, way = self.rules, list[Move]()
        world = start = rules.start(self.bound.faults, self.bound.turns)
        while not (self.bound.boot or self.well(world)):
            way.append(rules.moves(world)[0])
            turn = rules.after(world, way[-1])
            if wrong := complaints(rules, world, turn):
                self.result.found += [Found(check=check, what=what, way=tuple(way)) for check, what in wrong]
                return start
            world = turn.world
        return world

    def _explore(self, begun: float) -> None:
        bound, rules = self.bound, self.rules
        first = self.first()
        self._add(one_of(rules, first) if bound.symmetric else first, -1, ())
        self.todo.append((0, True))
        self.struck.add(0)
        while self.todo and not (bound.one and self.result.found):
            number, fresh = self.todo.popleft()
            world = self.worlds[number]
            if fresh:
                moves = rules.moves(world)
                self.waits[number] = moves[0] == ("time",)
                self.next[number] = tuple(self._go(number, move, strikes=False) for move in moves)
            if number in self.struck:
                for move in rules.faults(world):
                    if not bound.kinds or move[1] in bound.kinds:
                        self._go(number, move, strikes=True)
            if len(self.worlds) >= bound.states or time.process_time() - begun > bound.seconds:
                break
        self._count()

    def _go(self, number: int, move: Move, *, strikes: bool) -> int:
        """One transition: the number of the state that it leads to."""
        rules, world = self.rules, self.worlds[number]
        self.result.transitions += 1
        turn = rules.after(world, move)
        if wrong := complaints(rules, world, turn):
            self._complain(number, move, wrong)
        then = turn.world
        if self.bound.recovering and 0 < then.faults < self.bound.faults and self.well(then):
            then = then._replace(faults=0, turns=0)
        if self.bound.symmetric:
            then = one_of(rules, then)
        known = self.numbers.get(then)
        loud = bool(then.faults) and (strikes or not quiet(world, then))
        if known is None:
            known = self._add(then, number, move)
            if not turn.bug:
                self.todo.append((known, True))
        else:
            self.result.merged += 1
            if loud and known not in self.struck:
                self.todo.append((known, False))
        if loud:
            self.struck.add(known)
        return known

    def _add(self, world: World, parent: int, move: Move) -> int:
        number = len(self.worlds)
        self.numbers[world] = number
        self.worlds.append(world)
        self.parents.append(parent)
        self.moves.append(move)
        self.depths.append(self.depths[parent] + 1 if parent >= 0 else 0)
        self.next.append(())
        self.waits.append(0)
        return number

    def _count(self) -> None:
        result = self.result
        result.depth = max(self.depths)
        result.left = sum(1 for _, fresh in self.todo if fresh)
        result.kinds.update(move[1] for move in self.moves if move and move[0] == "fault")
        spared = sum(1 for i, world in enumerate(self.worlds) if world.faults and i not in self.struck)
        result.cut["states without a fault, as only news had been read just before"] = spared
        if result.left:
            result.cut["states not gone on from, as the bound was reached"] = result.left

    def _complain(self, number: int, move: Move, wrong: list[Complaint]) -> None:
        for check, what in wrong:
            if (check, what) not in {(f.check, f.what) for f in self.result.found}:
                self.result.found.append(Found(check=check, what=what, way=(*self.way(number), move)))

    def way(self, number: int) -> tuple[Move, ...]:
        """A shortest way to this state."""
        found = []
        while number > 0:
            found.append(self.moves[number])
            number = self.parents[number]
        return tuple(reversed(found))

    # ---- what has to happen at last

    def well(self, world: World) -> bool:
        """Do all train who are there, and nobody is to leave? Or has everybody left?"""
        rules = self.rules
        if rules.over(world):
            return True
        held: Held = rules.value(world.held)
        plan = held.shared.plan
        if plan is None or plan.phase is not Phase.TRAIN or held.shared.intent is Intent.STOP:
            return False
        if world.down or any(left != NEVER for _, _, left in world.cuts):
            return False
        if any(node.up and rules.value(node.core).leaving for node in world.nodes):
            return False
        gang = next((gang for gang in world.gangs if gang.generation == plan.generation), None)
        here = sum(bool(node.up or node.agent or node.timers) for node in world.nodes)
        here -= bool(world.cuts) and here > 1  # of two that never reach each other again one stays out
        return gang is not None and gang.running and not gang.halting and not gang.still and len(plan.seats) == here

    def _come_back(self) -> None:
        """From each state a way back, whatever order; and no circle that never comes there."""
        count = len(self.worlds)
        good = [self.well(world) for world in self.worlds]
        back: list[list[int]] = [[] for _ in range(count)]
        for number, after in enumerate(self.next):
            for then in after:
                back[then].append(number)
        ways = bytearray(count)
        todo = [number for number in range(count) if good[number] or not self.next[number]]  # (those not gone on from)
        for number in todo:
            ways[number] = 1
        while todo:
            for before in back[todo.pop()]:
                if not ways[before]:
                    ways[before] = 1
                    todo.append(before)
        lost = next((number for number in range(count) if not ways[number]), None)
        if lost is not None:
            what = f"{ways.count(0)} states have no way back to training"
            self.result.found.append(Found(check=NO_WAY, what=what, way=self.way(lost)))
            return
        self.result.back_s, slowest = self._slowest(good)
        if self.result.back_s > self.bound.back_s > 0 and not self.result.left:
            what = f"left alone, the job is well after {self.result.back_s} s, and {self.bound.back_s} s are enough"
            self.result.found.append(Found(check=NO_WAY, what=what, way=self.way(slowest)))
        elif (circle := next(self._circles(good), None)) is not None:
            what = f"a circle of {len(circle)} states, and the job is well in none"
            self.result.found.append(Found(check=CIRCLE, what=what, way=self.way(min(circle))))

    def _slowest(self, good: list[bool]) -> tuple[int, int]:
        """The longest that the job takes to be well when each thing has its turn, and from which state on."""
        count = len(self.worlds)
        took = [0 if good[number] or not self.next[number] else -1 for number in range(count)]
        for first in range(count):
            path, number = [], first
            while took[number] < 0:
                took[number] = count  # on the way: a circle takes for ever
                path.append(number)
                number = self.next[number][0]
            for before in reversed(path):
                took[before] = min(count, took[number] + self.waits[before])
                number = before
        longest = max(took)
        return longest, took.index(longest)

    def _circles(self, good: list[bool]) -> Iterator[list[int]]:
        """Strongly connected parts of the graph of states that are not well (Tarjan's way, without recursion)."""
        count = len(self.worlds)
        index, low, on = array("i", [0]) * count, array("i", [0]) * count, bytearray(count)
        stack: list[int] = []
        clock = 0
        for root in range(count):
            if good[root] or index[root]:
                continue
            work = [(root, 0)]
            while work:
                number, place = work.pop()
                if place == 0:
                    clock += 1
                    index[number] = low[number] = clock
                    stack.append(number)
                    on[number] = 1
                after = self.next[number]
                for i in range(place, len(after)):
                    then = after[i]
                    if good[then]:
                        continue
                    if not index[then]:
                        work += [(number, i + 1), (then, 0)]
                        break
                    if on[then]:
                        low[number] = min(low[number], index[then])
                else:
                    if low[number] == index[number]:
                        part = self._part(stack, on, number)
                        if len(part) > 1 or number in after:
                            yield part
                    if work:
                        above = work[-1][0]
                        low[above] = min(low[above], low[number])

    def _part(self, stack: list[int], on: bytearray, number: int) -> list[int]:
        part = []
        while True:
            one = stack.pop()
            on[one] = 0
            part.append(one)
            if one == number:
                return part


def quiet(before: World, after: World) -> bool:
    """Has a core only read something, and done nothing?"""
    if before[1:] != after[1:]:
        return False
    for was, now in zip(before.nodes, after.nodes, strict=True):
        if was is now:
            continue
        reads = now._replace(core=was.core, wake=was.wake, news=was.news, heard=was.heard, everyone=was.everyone)
        if reads != was:
            return False
    return True


def one_of(rules: Rules, world: World) -> World:
    """The one that stands for all worlds that differ from it in the nodes' names alone."""
    return min(rules.swapped(world, order) for order in permutations(range(rules.count)))


def told(rules: Rules, world: World, way: tuple[Move, ...]) -> Iterator[str]:
    """A way, move by move, for people."""
    seconds = 0.0
    for move in way:
        before = rules.plan(world)
        world = rules.after(world, move).world
        after = rules.plan(world)
        seconds += move[0] == "time"
        line = f"{seconds:4.0f} s  {words(rules, move)}"
        if after is not None and (before is None or after.generation != before.generation):
            seats = ", ".join(f"{seat.member}{'*' if seat.born == after.generation else ''}" for seat in after.seats)
            rung = after.rung.name.lower()
            line += f"  => generation {after.generation} {after.phase} ({rung}) of {seats}: {after.causes[0].why}"
        yield line


def words(rules: Rules, move: Move) -> str:
    """A move, for people."""
    if move[0] == "first":
        return "before its turn: " + words(rules, move[1])
    parts = []
    for part in move:
        if hasattr(part, "action"):
            stray = "stray " if part.stray else ""
            parts.append(f"{stray}{type(rules.value(part.action)).__name__} of {rules.names[part.node]}/{part.life}")
        elif hasattr(part, "what"):
            parts.append(part.what)
        elif hasattr(part, "sources"):
            parts.append(f"of step {part.version}")
        else:
            parts.append("everything" if part == "" else str(part))
    return " ".join(parts)
