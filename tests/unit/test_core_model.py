"""The vocabulary's few computations, and the invariants that guard plans and commits."""

from dataclasses import replace

import pytest

from elasticrl.contract import model
from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.events import WriteCommit
from elasticrl.contract.model import Member, Phase, Plan, Seat, View, deal, rounds
from elasticrl.core.node import invariants


def seat(node, born=1, slots=1, **more):
    return Seat(member=Member(node=node, incarnation=1), born=born, slots=slots, **more)


def test_every_lane_is_carried_once_whatever_the_world():
    for lanes in range(1, 40):
        for world in range(1, lanes + 1):
            ranges = deal(lanes, world)
            assert [lane for r in ranges for lane in r] == list(range(lanes))
            assert max(len(r) for r in ranges) == rounds(lanes, world)
            assert max(len(r) for r in ranges) - min(len(r) for r in ranges) <= 1


def test_ranks_are_member_and_slot():
    plan = Plan(generation=1, phase=Phase.TRAIN, seats=(seat("a", slots=2), seat("b", slots=4)), lanes=8)
    assert plan.world == 6
    assert plan.first_rank(Member(node="b", incarnation=1)) == 2
    assert plan.node_of == dict(enumerate("aabbbb"))
    with pytest.raises(KeyError, match="no seat"):
        plan.first_rank(Member(node="b", incarnation=2))


def test_a_seat_is_that_of_one_life_of_a_node():
    plan = Plan(generation=1, phase=Phase.TRAIN, seats=(seat("a", slots=2), seat("b")), spares=(seat("c"),), lanes=8)
    lives = [Member(node=node, incarnation=life) for node in "abcd" for life in (1, 2)]
    assert [plan.seat(life) for life in lives] == [plan.seat_of.get(life) for life in lives]
    assert plan.seat(lives[2]) is plan.seats[1]
    assert plan.around == (*plan.members, Member(node="c", incarnation=1))


GOOD = Plan(
    generation=4, phase=Phase.TRAIN, seats=(seat("a"), seat("b")), lanes=4, resume=10, causes=(Cause(why=Why.BEGUN),)
)
VIEW = View(plan=replace(GOOD, generation=3), commit=model.Commit(step=10, generation=3), revision=9, plan_revision=7)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"generation": 3}, "cannot follow"),
        ({"generation": 5}, "cannot follow"),
        ({"resume": 9}, "committed is 10"),
        ({"causes": ()}, "no cause"),
        ({"seats": (seat("a"), seat("a"))}, "a node twice"),
        ({"spares": (seat("a"),)}, "a node twice"),
        ({"lanes": 1}, "2 ranks, and 1 lanes have room for 1"),
        ({"seats": (seat("a", born=5),)}, "from the future"),
        ({"seats": ()}, "trains nobody"),
        ({"exit_code": 3}, "exit code"),
        ({"seats": (seat("b"), seat("a"))}, "reorders"),
    ],
)
def test_an_unsound_plan_is_never_proposed(change, says):
    invariants.check_plan(VIEW, GOOD)
    with pytest.raises(AssertionError, match=says):
        invariants.check_plan(VIEW, replace(GOOD, **change))


def test_a_commit_that_does_not_rise_is_never_asked_for():
    commit = WriteCommit(step=11, generation=3, manifest="m", if_plan=7, if_commit=1)
    invariants.check_commit(VIEW, commit)
    with pytest.raises(AssertionError, match="cannot follow commit 10"):
        invariants.check_commit(VIEW, replace(commit, step=10))
    with pytest.raises(AssertionError, match="commits under 3"):
        invariants.check_commit(VIEW, replace(commit, generation=2))


def test_nobody_asks_to_be_woken_in_the_past():
    invariants.check_wake(1.0, 1.1)
    invariants.check_wake(1.0, float("inf"))
    with pytest.raises(AssertionError, match=r"0\.500 s ago"):
        invariants.check_wake(1.0, 0.5)
