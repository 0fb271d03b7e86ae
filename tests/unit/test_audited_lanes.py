"""Which lane is computed twice, by whom, and who is named if the results differ: never one who is right."""

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrl.runtime.audit import Computed, Finding, Judgement, deciders, drawn, judge, second

GANGS = [
    ["n0"],
    ["n0", "n0"],
    ["n0", "n1"],
    ["n0", "n0", "n1", "n1"],
    ["n0", "n1", "n2"],
    ["n0", "n0", "n1", "n1", "n2"],
]


def tried(nodes: list[str], owner: int, chance: int, result) -> Judgement | None:
    """What an audit comes to if rank r comes to result(r, n) in its n-th pass; None: no difference is seen."""
    made: Counter[int] = Counter()

    def by(rank: int) -> Computed:
        made[rank] += 1
        return Computed(rank=rank, result=result(rank, made[rank]))

    other = second(nodes, owner, chance)
    found = [by(owner), by(other)]
    if found[0].result == found[1].result:
        return None
    return judge(nodes, [*found, *map(by, deciders(nodes, owner, other, chance))])


def test_at_each_rate_so_many_updates_are_looked_at_and_each_lane_as_often() -> None:
    lanes = [drawn(7, "model", step, 0, lanes=8, rate="1/20") for step in range(20_000)]
    found = Counter(lane for lane in lanes if lane is not None)
    assert 900 < found.total() < 1100
    assert set(found) == set(range(8))
    assert max(found.values()) < 1.6 * min(found.values())
    assert all(drawn(7, "model", step, 0, lanes=8, rate="0") is None for step in range(100))
    assert all(drawn(7, "model", step, 0, lanes=8, rate="1") is not None for step in range(100))


def test_roles_and_updates_are_drawn_by_themselves() -> None:
    places = product(("actor", "critic"), range(50), range(4))
    found = [drawn(7, role, step, update, lanes=64, rate="1") for role, step, update in places]
    assert len(set(found)) > 60


@pytest.mark.parametrize("nodes", GANGS, ids=" ".join)
def test_a_lane_is_computed_again_on_another_node_where_there_is_one(nodes: list[str]) -> None:
    for owner, chance in product(range(len(nodes)), range(20)):
        other = second(nodes, owner, chance)
        assert other != owner or len(nodes) == 1
        assert nodes[other] != nodes[owner] or len(set(nodes)) == 1
        thirds = deciders(nodes, owner, other, chance)
        if len(set(nodes)) > 2:
            (third,) = thirds
            assert nodes[third] not in {nodes[owner], nodes[other]}


@given(nodes=st.sampled_from(GANGS), bad=st.integers(0, 4), owner=st.integers(0, 4), chance=st.integers(0, 99))
def test_a_device_that_is_wrong_alike_each_time_is_named_by_three_nodes_and_nobody_else_ever_is(
    nodes: list[str], bad: int, owner: int, chance: int
) -> None:
    bad, owner = bad % len(nodes), owner % len(nodes)
    found = tried(nodes, owner, chance, lambda rank, _: "wrong" if rank == bad else "right")
    if found is None or found.finding is Finding.DOUBTED:
        assert len(set(nodes)) < 3 or bad not in {owner, second(nodes, owner, chance)}
    else:
        assert found == Judgement(finding=Finding.NAMED, ranks=(bad,))


@given(nodes=st.sampled_from(GANGS), bad=st.integers(0, 4), owner=st.integers(0, 4), chance=st.integers(0, 99))
def test_a_bit_that_flips_once_is_named_by_any_gang(nodes: list[str], bad: int, owner: int, chance: int) -> None:
    bad, owner = bad % len(nodes), owner % len(nodes)
    found = tried(nodes, owner, chance, lambda rank, n: "wrong" if (rank, n) == (bad, 1) else "right")
    assert found in {None, Judgement(finding=Finding.NAMED, ranks=(bad,))}


@pytest.mark.parametrize("nodes", GANGS, ids=" ".join)
def test_a_program_that_never_comes_to_the_same_is_at_fault_and_no_node_is(nodes: list[str]) -> None:
    found = tried(nodes, 0, 0, lambda rank, n: f"{rank} {n}")
    assert found is not None
    assert found == Judgement(finding=Finding.UNLIKE)


def test_of_two_nodes_the_one_that_differs_from_itself_is_named() -> None:
    passes = {(0, 1): "a", (0, 2): "a", (1, 1): "b", (1, 2): "c"}
    assert tried(["n0", "n1"], 0, 0, lambda *one: passes[one]) == Judgement(finding=Finding.NAMED, ranks=(1,))
