"""The odd one out of what was measured between all pairs."""

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticrl.contract.pairs import Result, everyone
from elasticrl.contract.partition import Pair
from elasticrl.core.judge.matrix import late, mtus, rates, slow, trips


def names(count: int) -> list[str]:
    return [f"n{i:02}" for i in range(count)]


def ways(count: int, usual: float) -> dict[Pair, float]:
    return dict.fromkeys(combinations(names(count), 2), usual)


@settings(deadline=None)
@given(st.integers(0, 33))
def test_all_pairs_meet_once_in_rounds_in_which_nobody_is_twice(count: int) -> None:
    rounds = everyone(names(count))
    for pairs in rounds:
        assert not pairs or max(Counter(name for pair in pairs for name in pair).values()) == 1
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(names(count), 2))
    assert len(rounds) <= count


@pytest.mark.parametrize("count", [3, 4, 5, 8, 16])
def test_one_slow_node_is_that_node_however_few_there_are(count: int) -> None:
    bad = f"n{count // 2:02}"
    for odd in (
        late({pair: 9.0 if bad in pair else 0.2 for pair in ways(count, 0)}),
        slow({pair: 95.0 if bad in pair else 9400.0 for pair in ways(count, 0)}),
    ):
        assert odd is not None
        assert (odd.reach.nodes, odd.reach.links, odd.said) == ((bad,), (), bad)
        assert len(odd.bad) == count - 1


@pytest.mark.parametrize("count", [3, 4, 5, 8, 16])
def test_one_slow_link_is_that_link(count: int) -> None:
    link = ("n00", "n01")
    for odd in (
        late({**ways(count, 0.2), link: 30.0}),
        slow({**ways(count, 9400.0), link: 940.0}),
    ):
        assert odd is not None
        assert (odd.reach.nodes, odd.reach.links, odd.said) == ((), (link,), "the way n00 - n01")


def test_a_slow_node_and_a_slow_link_elsewhere_are_both_named() -> None:
    found = late({pair: 9.0 if "n05" in pair or pair == ("n00", "n01") else 0.2 for pair in ways(8, 0)})
    assert found is not None
    assert found.said == "n05; the way n00 - n01"


def test_two_halves_with_a_slow_way_between_them_are_told_as_such() -> None:
    left = set(names(3))
    found = slow({pair: 900.0 if (pair[0] in left) != (pair[1] in left) else 9400.0 for pair in ways(8, 0)})
    assert found is not None
    assert found.said == "between n03, n04, n05, n06, n07 and n00, n01, n02"


@settings(deadline=None)
@given(st.integers(2, 16), st.randoms(use_true_random=False))
def test_a_network_that_is_only_uneven_has_no_odd_one(count: int, chance) -> None:
    assert late({pair: chance.uniform(0.15, 0.45) for pair in ways(count, 0)}) is None
    assert slow({pair: chance.uniform(5200.0, 9800.0) for pair in ways(count, 0)}) is None


def test_where_figures_are_noisy_only_what_is_far_off_is_odd() -> None:
    """Rates of five nodes that share two cores: they differ sevenfold, and n02 is worse all the same."""
    measured = (1227, 10, 1235, 3188, 10.5, 683, 2682, 67, 19, 462)
    found = slow(dict(zip(ways(5, 0), measured, strict=True)))
    assert found is not None
    assert (found.said, found.worst) == ("n02", 10.0)


def test_racks_of_a_usual_network_and_a_microsecond_more_are_no_fault() -> None:
    left = set(names(4))
    assert late({pair: 0.12 if (pair[0] in left) == (pair[1] in left) else 0.31 for pair in ways(8, 0)}) is None
    assert late({**ways(4, 0.002), ("n00", "n01"): 0.09}) is None, "45 times the usual, and nobody notices"


def test_of_two_nodes_or_of_nothing_nobody_can_say_who_is_odd() -> None:
    assert slow({("a", "b"): 3.0}) is None
    assert late({("a", "b"): 900.0}) is None
    assert (late({}), slow({})) == (None, None)
    assert slow({**ways(4, 940.0), ("n00", "n01"): 0.0}) is not None, "nothing at all got through in time"


def test_both_ends_views_of_a_way_are_one_figure() -> None:
    views = [
        Result(node="a", peer="b", latency_ms=0.3, mbps=900.0, mtu=9000),
        Result(node="b", peer="a", latency_ms=0.2, mbps=400.0, mtu=1500),
        Result(node="c", peer="a", tcp="connect: refused"),
    ]
    assert trips(views) == {("a", "b"): 0.2}, "an end may have been busy"
    assert rates(views) == {("a", "b"): 400.0}, "a collective waits for the slower direction"
    assert mtus(views) == {"a": 9000, "b": 1500}
