"""Lanes: how a job's fixed parallelism is dealt to a changing number of ranks, and the one tree in which sums are taken.

The idea: floating-point addition is not associative, so a sum that should not depend on the number of workers must be
taken in an order that does not. Here the order is a binary tree over lanes that depends on the number of lanes alone: a
node of n lanes has the largest power of two below n on its left. Ranks only carry lanes. A rank adds whatever whole
subtrees its lanes make up and passes those on; whoever gets them finishes the same tree. Nothing here knows torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from elasticrl.contract.model import deal

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Node(NamedTuple):
    """A subtree: the leaves lo <= leaf < hi. Example: Node(4, 6) is the sum of leaves 4 and 5."""

    lo: int
    hi: int


def family(node: Node, leaves: int) -> tuple[Node, Node] | None:
    """(parent, sibling) of a subtree; None for the root. By arithmetic: a subtree of 2**k leaves begins at a multiple of it,
    and only one that ends with the last leaf is smaller than its place allows.
    """
    lo, hi = node
    size = 1 << (hi - lo - 1).bit_length()
    assert lo % size == 0, f"{node} is not a subtree of the tree over {leaves} leaves"
    assert hi == min(lo + size, leaves), f"{node} is not a subtree of the tree over {leaves} leaves"
    if node == (0, leaves):
        return None
    while not lo & size:
        end = min(lo + 2 * size, leaves)
        if hi < end:
            return Node(lo, end), Node(hi, end)
        size *= 2
    return Node(lo - size, hi), Node(lo - size, lo)


class Fold(Generic[T]):
    """The tree as it is being added up: give it subtrees in any order, it joins two siblings as soon as both are there.

    `add(left, right)` may reuse its first argument. Values may arrive in any order and from anywhere; the result is the same
    bits, because only siblings are ever added and always left to right.
    Example: fold = Fold(3, operator.add); fold.put(Node(0, 2), a + b); fold.put(Node(2, 3), c); fold.total() == (a + b) + c
    """

    def __init__(self, leaves: int, add: Callable[[T, T], T]) -> None:
        self.leaves = leaves
        self.parts: dict[Node, T] = {}
        self._add = add

    def put(self, node: Node, value: T) -> Node:
        """Takes in one subtree; returns the subtree it has become part of."""
        while True:
            assert not any(part.lo < node.hi and node.lo < part.hi for part in self.parts), f"{node} was put in twice"
            kin = family(node, self.leaves)
            if kin is None or kin[1] not in self.parts:
                self.parts[node] = value
                return node
            parent, sibling = kin
            other = self.parts.pop(sibling)
            value = self._add(other, value) if sibling < node else self._add(value, other)
            node = parent

    def take(self, leaf: int) -> tuple[Node, T | None]:
        """Where a leaf's value can be added at once: its sibling, taken out, and the node they make up together. Without a
        sibling it is the leaf itself and None. This saves a leaf the place and the pass of a value of its own.
        """
        node = Node(leaf, leaf + 1)
        kin = family(node, self.leaves)
        if kin is None or kin[1] not in self.parts:
            return node, None
        return kin[0], self.parts.pop(kin[1])

    def total(self) -> T:
        """The sum over all leaves."""
        assert list(self.parts) == [(0, self.leaves)], (
            f"the tree over {self.leaves} leaves has only {sorted(self.parts)}"
        )
        return self.parts[Node(0, self.leaves)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One forward and backward pass of one rank. A ghost repeats a lane that counts elsewhere; its leaf is thrown away.

    Example: Turn(lane=5, ghost=False)
    """

    lane: int
    ghost: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """Which rank carries which lanes, in which order.

    Example: Deal.contiguous(8, 3) carries ((0, 1, 2), (3, 4, 5), (6, 7)); rank 2 plays a ghost in its third round.
    """

    lanes: int
    carried: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        assert sorted(lane for mine in self.carried for lane in mine) == list(range(self.lanes)), self.carried
        assert all(self.carried), f"a rank without lanes: {self.carried}"

    @classmethod
    def contiguous(cls, lanes: int, world: int) -> Deal:
        """Neighbouring lanes to one rank, so that it can add most of them itself: what the plan does."""
        assert 1 <= world <= lanes, f"{lanes} lanes cannot be dealt to {world} ranks: each needs at least one"
        return cls(lanes=lanes, carried=tuple(tuple(mine) for mine in deal(lanes, world)))

    @classmethod
    def interleaved(cls, lanes: int, world: int) -> Deal:
        """Neighbouring lanes to one *round*. Where every round is reduced at once (FSDP), each round then folds away to the
        logarithm of the lanes in partial sums, where contiguous lanes would keep one per rank.
        """
        assert 1 <= world <= lanes, f"{lanes} lanes cannot be dealt to {world} ranks: each needs at least one"
        return cls(lanes=lanes, carried=tuple(tuple(range(rank, lanes, world)) for rank in range(world)))

    def leaves(self, parts: int) -> Deal:
        """The same with each lane cut into so many leaves, which stay together."""
        carried = tuple(tuple(lane * parts + i for lane in mine for i in range(parts)) for mine in self.carried)
        return Deal(lanes=self.lanes * parts, carried=carried)

    def shared(self, members: int) -> Deal:
        """The same with each rank in so many members' place, which carry its lanes together: a leaf of each lane for each of
        them. All leaves of the first members come first, so that a member can add up as much as the rank could.

        >>> Deal.contiguous(4, 2).shared(2).carried
        ((0, 1), (4, 5), (2, 3), (6, 7))
        """
        carried = tuple(
            tuple(member * self.lanes + lane for lane in mine) for mine in self.carried for member in range(members)
        )
        return Deal(lanes=self.lanes * members, carried=carried)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.carried)

    @property
    def rounds(self) -> int:
        """How many passes every rank makes where all must join the same collectives."""
        return max(len(mine) for mine in self.carried)

    def turns(self, rank: int, *, ghosts: bool) -> tuple[Turn, ...]:
        """The passes of one rank, with ghosts filling it up to `rounds` if asked."""
        mine = self.carried[rank]
        turns = tuple(Turn(lane=lane, ghost=False) for lane in mine)
        return turns + (Turn(lane=mine[-1], ghost=True),) * (self.rounds - len(mine)) if ghosts else turns

    def subtrees(self, rank: int) -> tuple[Node, ...]:
        """What one rank can add up by itself and sends: the subtrees it owns whole, in the order they become complete."""
        fold = Fold[None](self.lanes, lambda _left, _right: None)
        for lane in self.carried[rank]:
            fold.put(Node(lane, lane + 1), None)
        return tuple(sorted(fold.parts, key=lambda node: max(self.carried[rank].index(x) for x in range(*node))))
