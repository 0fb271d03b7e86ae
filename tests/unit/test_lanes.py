"""Lanes: every way of dealing and grouping them gives the one sum."""

import random
from itertools import pairwise

import pytest

from elasticrl.runtime.lanes import Deal, Fold, Node, Turn, family


def add(left: float, right: float) -> float:
    return left + right


def cut(node: Node) -> tuple[Node, Node]:
    """The two children, as the tree is defined: (0, 5) is (0, 4) and (4, 5)."""
    middle = node.lo + (1 << (node.hi - node.lo - 1).bit_length() - 1)
    return Node(node.lo, middle), Node(middle, node.hi)


def whole(lo: int, hi: int, leaves: int) -> tuple[Node, ...]:
    """The fewest subtrees of the tree over `leaves` that make up exactly lo <= leaf < hi, from left to right.

    Example: whole(3, 6, 8) is (3, 4), (4, 6).
    """
    found: list[Node] = []
    todo = [Node(0, leaves)]
    while todo:
        node = todo.pop()
        if node.hi <= lo or hi <= node.lo:
            continue
        if lo <= node.lo and node.hi <= hi:
            found.append(node)
        else:
            left, right = cut(node)
            todo += (right, left)
    return tuple(found)


def reference(values: list[float], node: Node) -> float:
    """The tree, as its definition says."""
    if node.hi - node.lo == 1:
        return values[node.lo]
    left, right = cut(node)
    return reference(values, left) + reference(values, right)


def awkward(count: int, chance: random.Random) -> list[float]:
    """Numbers whose sum depends on the order."""
    return [chance.uniform(-1, 1) * 10.0 ** chance.randrange(-8, 9) for _ in range(count)]


@pytest.mark.parametrize("lanes", range(1, 34))
def test_subtrees_in_any_order_and_any_grouping_give_the_same_bits(lanes: int):
    chance = random.Random(lanes)
    values = awkward(lanes, chance)
    expected = reference(values, Node(0, lanes))
    for _ in range(20):
        edges = sorted({0, lanes, *(chance.randrange(lanes + 1) for _ in range(chance.randrange(6)))})
        nodes = [node for lo, hi in pairwise(edges) for node in whole(lo, hi, lanes)]
        chance.shuffle(nodes)
        fold = Fold(lanes, add)
        for node in nodes:
            fold.put(node, reference(values, node))
        assert fold.total() == expected


def test_a_plain_sum_from_left_to_right_would_differ():
    chance = random.Random(1)
    values = [chance.uniform(-1, 1) for _ in range(100)]
    assert sum(values) != reference(values, Node(0, 100))


@pytest.mark.parametrize("lanes", [1, 2, 5, 8, 13])
def test_whole_is_exact_and_cannot_be_said_with_fewer(lanes: int):
    for lo in range(lanes + 1):
        for hi in range(lo, lanes + 1):
            nodes = whole(lo, hi, lanes)
            assert [leaf for node in nodes for leaf in range(*node)] == list(range(lo, hi))
            for node in nodes:
                kin = family(node, lanes)
                assert kin is None or not (lo <= kin[0].lo and kin[0].hi <= hi), "its parent is whole too"


@pytest.mark.parametrize("leaves", [*range(1, 40), 127, 130])
def test_families_are_those_of_the_tree(leaves: int):
    todo = [Node(0, leaves)]
    assert family(todo[0], leaves) is None
    while todo:
        parent = todo.pop()
        if parent.hi - parent.lo > 1:
            left, right = cut(parent)
            assert family(left, leaves) == (parent, right)
            assert family(right, leaves) == (parent, left)
            todo += [left, right]


def test_the_largest_power_of_two_stands_left():
    assert cut(Node(0, 5)) == (Node(0, 4), Node(4, 5))
    assert cut(Node(0, 8)) == (Node(0, 4), Node(4, 8))
    assert cut(Node(4, 7)) == (Node(4, 6), Node(6, 7))


@pytest.mark.parametrize("lanes", range(1, 20))
def test_taking_a_sibling_and_adding_to_it_is_the_same_as_putting_the_leaf(lanes: int):
    values = awkward(lanes, random.Random(lanes))
    fold = Fold(lanes, add)
    saved = 0
    for lane, value in enumerate(values):
        node, sibling = fold.take(lane)
        saved += sibling is not None
        fold.put(node, value if sibling is None else sibling + value)
    assert fold.total() == reference(values, Node(0, lanes))
    assert saved >= lanes // 2, "every second leaf needs no place of its own"


def test_a_subtree_that_is_put_twice_or_missing_is_refused():
    fold = Fold(4, add)
    fold.put(Node(0, 2), 1.0)
    with pytest.raises(AssertionError, match="put in twice"):
        fold.put(Node(1, 2), 1.0)
    with pytest.raises(AssertionError, match="has only"):
        fold.total()
    with pytest.raises(AssertionError, match="not a subtree"):
        family(Node(1, 3), 4)


@pytest.mark.parametrize("lanes", [1, 4, 5, 8, 13])
def test_every_lane_is_carried_once_and_every_rank_makes_as_many_rounds(lanes: int):
    for world in range(1, lanes + 1):
        for deal in (Deal.contiguous(lanes, world), Deal.interleaved(lanes, world)):
            assert sorted(lane for mine in deal.carried for lane in mine) == list(range(lanes))
            assert deal.rounds == -(-lanes // world)
            for rank in range(world):
                turns = deal.turns(rank, ghosts=True)
                assert len(turns) == deal.rounds
                assert tuple(turn.lane for turn in turns if not turn.ghost) == deal.carried[rank]
                assert deal.turns(rank, ghosts=False) == tuple(turn for turn in turns if not turn.ghost)


def test_eight_lanes_over_three_ranks_have_one_ghost():
    deal = Deal.contiguous(8, 3)
    assert deal.carried == ((0, 1, 2), (3, 4, 5), (6, 7))
    assert deal.turns(2, ghosts=True)[-1] == Turn(lane=7, ghost=True)


def test_more_ranks_than_lanes_are_refused():
    with pytest.raises(AssertionError, match="cannot be dealt"):
        Deal.contiguous(3, 4)


@pytest.mark.parametrize("lanes", range(1, 33))
def test_what_the_ranks_send_is_the_whole_tree_and_little(lanes: int):
    for world in range(1, min(lanes, 6) + 1):
        deal = Deal.contiguous(lanes, world)
        sent = [deal.subtrees(rank) for rank in range(world)]
        assert [x for mine in sent for node in mine for x in range(*node)] == list(range(lanes))
        if lanes % world == 0 and (lanes // world).bit_count() == 1:
            assert all(len(mine) == 1 for mine in sent), "one subtree each: the bytes of a reduce-scatter"
        assert all(len(mine) <= 2 * lanes.bit_length() for mine in sent)


@pytest.mark.parametrize("members", [2, 3])
@pytest.mark.parametrize("lanes", [1, 2, 5, 8, 12])
def test_what_members_add_up_of_lanes_that_they_share_is_one_sum_for_any_number_of_teams(lanes: int, members: int):
    values = awkward(lanes * members, random.Random(lanes))
    expected = reference(values, Node(0, lanes * members))
    for teams in range(1, lanes + 1):
        for dealt in (Deal.contiguous, Deal.interleaved):
            deal = dealt(lanes, teams).shared(members)
            fold = Fold(deal.lanes, add)
            for rank in range(deal.world):
                carried = deal.carried[rank]
                assert [leaf % lanes for leaf in carried] == list(dealt(lanes, teams).carried[rank // members])
                own = Fold(deal.lanes, add)
                for leaf in carried:
                    own.put(Node(leaf, leaf + 1), values[leaf])
                for node, value in own.parts.items():
                    fold.put(node, value)
            assert fold.total() == expected


def test_members_that_share_lanes_keep_no_more_rows_than_ranks_do_without():
    assert Deal.contiguous(8, 2).subtrees(0) == (Node(0, 4),)
    assert [Deal.contiguous(8, 2).shared(2).subtrees(rank) for rank in range(4)] == [
        (Node(0, 4),), (Node(8, 12),), (Node(4, 8),), (Node(12, 16),),
    ]  # fmt: skip
