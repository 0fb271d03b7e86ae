"""Silence, stalls and reach: the three pure judgements, as tables."""

from dataclasses import replace
from itertools import combinations

import pytest

from elasticrl.contract.model import Member, Phase, Plan, Record, Seat, View, Work
from elasticrl.contract.pairs import late_ways, turns
from elasticrl.contract.settings import Membership, Timeouts
from elasticrl.core.node.suspect import (
    Budgets,
    Detector,
    Progress,
    convict,
    conviction,
    neighbours,
    probe_links,
    probe_turns,
    somebody_left,
    split,
    watched,
)


def plan_of(*nodes, spares=()):
    seats = tuple(Seat(member=Member(node=node, incarnation=1), born=1, beat=f"{node}:1") for node in nodes)
    extra = tuple(Seat(member=Member(node=node, incarnation=1), born=0) for node in spares)
    return Plan(generation=1, phase=Phase.TRAIN, seats=seats, spares=extra)


@pytest.mark.parametrize(
    ("accusations", "guilty", "unsure"),
    [
        ("", "", False),
        ("ba", "", False),  # one witness proves nothing
        ("ba ca", "a", False),
        ("ba ca ab ac", "a", False),  # deaf and dumb: its own word counts no more
        ("ba ca ab ac ad", "a", False),
        ("ca da cb db", "ab", False),  # two at once, as if a switch died
        ("ac ad bc bd ca cb da db", "", True),  # a cut: nobody can tell who is where
        ("ba ca ea da fd", "a", False),
        ("ca cb cd da db dc", "", False),  # c and d are deaf: each is to the other as it is to the two that are well
        ("ca cb cd da", "", False),  # the word of d that it does not hear c is still on its way
        ("ba ca da db dc", "a", False),  # d is deaf, and a is gone: b and c hear each other
        ("ba ca da bc bd cb db", "ab", False),  # b is cut off, and a is gone
    ],
)
def test_two_unconvicted_witnesses_convict(accusations, guilty, unsure):
    verdict = convict((pair[0], pair[1]) for pair in accusations.split())
    assert ("".join(sorted(verdict.guilty)), verdict.unsure) == (guilty, unsure)


@pytest.mark.parametrize(
    ("nodes", "broken", "kept"),
    [
        ("abcd", {}, "abcd"),
        ("abcd", {"a": "c"}, "ab" + "d"),  # of two equal culprits the later rank goes
        ("abcde", {"b": "ace", "c": "b"}, "acde"),
        ("abcd", {"a": "cd", "b": "cd"}, "ab"),  # equal parts: that of the first rank
        ("abcde", {"a": "cde", "b": "cde"}, "cde"),  # the larger part
        ("ab", {"b": "a"}, "a"),
        (
            "abcdef",
            {"a": "bcef", "b": "acdf", "c": "abd", "d": "cebf", "e": "dfa", "f": "eadb"},
            "ce",
        ),  # not tested: be, cf
    ],
)
def test_after_a_probe_those_go_on_who_all_reach_each_other(nodes, broken, kept):
    tested = [pair for pair in combinations(nodes, 2) if pair not in {("b", "e"), ("c", "f")}]
    assert "".join(split(nodes, dict.fromkeys(nodes, "") | broken, tested)) == kept


def test_who_has_gone_from_a_half_costs_nobody_else_his_place():
    across = {"a": "def", "b": "df", "c": "de"}  # not tested: be, cf
    assert "".join(split("abcdef", dict.fromkeys("abcdef", "") | across)) == "abc"


@pytest.mark.parametrize(
    ("nodes", "answers", "kept"),
    [
        ("ab", {"b": "a"}, "b"),  # of two the one that speaks, though the other is first and accuses nobody
        ("abc", {"c": "a", "b": ""}, "bc"),
        ("abcde", {"d": "abc", "e": "abc"}, "de"),  # the larger part is silent
        ("abc", {}, "abc"),
    ],
)
def test_who_does_not_answer_a_probe_does_not_win_by_it(nodes, answers, kept):
    assert "".join(split(nodes, answers)) == kept


def test_neighbours_are_on_both_sides_of_the_ring_spares_included():
    plan = plan_of("a", "b", "c", "d", spares=("s",))
    assert neighbours(plan, "a", 1) == ("b", "s")
    assert set(neighbours(plan, "c", 2)) == {"a", "b", "d", "s"}
    assert neighbours(plan, "x", 2) == ()
    assert neighbours(plan_of("a", "b"), "a", 2) == ("b",)


def asked(plan, node):
    return {name for pair in probe_turns(plan, node) for name in pair} - {node}


def test_a_probe_asks_few_nodes_and_crosses_any_cut():
    nodes = [f"n{i:03d}" for i in range(256)]
    plan = plan_of(*nodes)
    targets = {node: asked(plan, node) for node in nodes}
    assert max(map(len, targets.values())) <= 16
    left = set(nodes[40:120])
    across = {n for n in left if targets[n] - left}
    assert {nodes[40], nodes[119]} <= across


def test_spares_are_probed_and_probe():
    plan = plan_of("a", "b", spares=("s",))
    assert asked(plan, "a") == {"b", "s"}
    assert asked(plan, "s") == {"a", "b"}


@pytest.mark.parametrize(("accusers", "guilty"), [("bcyz", "a"), ("by", ""), ("bpq", ""), ("pqrs", "")])
def test_only_neighbours_in_the_present_ring_have_a_say(accusers, guilty):
    ring = "abcxyz"  # of these, b, c, y and z are a's neighbours; p, q, r and s were put out
    records = {n: Record(member=Member(node=n, incarnation=1), suspects=("a/1",)) for n in accusers}
    assert "".join(conviction(View(plan=plan_of(*ring), records=records), 2).guilty) == guilty


@pytest.mark.parametrize(
    ("born", "guilty"), [(1, {"a": ("b", "c")}), (2, {})], ids=["the plan's lives", "the next ones"]
)
def test_who_is_of_another_life_than_the_plan_knows_watches_nobody_in_it_and_has_no_say(born, guilty):
    plan = plan_of(*"abcd")
    records = {n: Record(member=Member(node=n, incarnation=born), suspects=("a/1",)) for n in "bc"}
    assert conviction(View(plan=plan, records=records), 2).guilty == guilty
    assert bool(watched(plan, Member(node="b", incarnation=born), 2)) == (born == 1)


def test_who_is_back_as_another_life_is_not_accused_of_the_silence_of_the_one_before():
    records = {n: Record(member=Member(node=n, incarnation=1), suspects=("a/1",)) for n in "bc"}
    records["a"] = Record(member=Member(node="a", incarnation=2))
    assert conviction(View(plan=plan_of(*"abcd"), records=records), 2).guilty == {}


def test_who_is_seated_anew_is_not_accused_by_those_who_have_not_read_it_yet():
    # Found live by drain-during-save: the plan that seats a/2, and records of before it, which accuse a/1.
    first, *others = plan_of(*"abcd").seats
    plan = replace(plan_of(*"abcd"), seats=(replace(first, member=Member(node="a", incarnation=2)), *others))
    records = {n: Record(member=Member(node=n, incarnation=1), suspects=("a/1",)) for n in "bc"}
    records["a"] = Record(member=Member(node="a", incarnation=2))
    assert conviction(View(plan=plan, records=records), 2).guilty == {}
    heard = {n: replace(each, suspects=("a/2",)) for n, each in records.items() if n != "a"}
    assert conviction(View(plan=plan, records={**records, **heard}), 2).guilty == {"a": ("b", "c")}


def test_silence_is_suspected_after_its_time_and_cleared_by_a_beat():
    detector = Detector(settings=Membership(beat_s=0.2, suspect_s=0.8), doubt_s=0.3).watch({"b": 1}, 10.0)
    detector, suspected, _ = detector.judge(10.79)
    assert suspected == ()
    detector, suspected, _ = detector.judge(10.8)
    assert suspected == ("b",)
    detector, suspected, cleared = detector.judge(10.9)
    assert (suspected, cleared) == ((), ())
    detector, suspected, cleared = detector.hear("b", 11.0).judge(11.0)
    assert (suspected, cleared) == ((), ("b",))


def test_a_node_s_next_life_is_not_suspected_for_the_silence_of_the_one_before():
    detector = Detector(settings=Membership(beat_s=0.2, suspect_s=0.8), doubt_s=0.3).watch({"b": 1, "c": 1}, 10.0)
    detector, suspected, _ = detector.judge(10.8)
    assert suspected == ("b", "c")
    detector = detector.watch({"b": 2, "c": 1}, 10.9)
    assert (detector.peers["b"].suspected, detector.peers["c"].suspected) == (False, True)
    assert detector.judge(11.6)[1:] == ((), ())
    assert detector.judge(11.71)[1] == ("b",)


def test_a_broken_connection_makes_silence_count_sooner():
    detector = Detector(settings=Membership(beat_s=0.2, suspect_s=0.8), doubt_s=0.3).watch({"b": 1}, 10.0)
    doubting = detector.hear("b", 10.1).doubt("b", 10.15)
    assert doubting.judge(10.44)[1] == ()
    assert doubting.judge(10.46)[1] == ("b",)
    assert doubting.hear("b", 10.3).judge(10.46)[1] == ()  # a beat came: it was only the worker


def test_a_doubted_neighbour_that_was_asked_has_the_time_for_an_answer():
    detector = Detector(settings=Membership(beat_s=0.2, suspect_s=0.8), doubt_s=0.1).watch({"b": 1}, 10.0)
    doubting = detector.hear("b", 10.1).doubt("b", 10.15)
    assert doubting.judge(10.24)[1] == ()
    assert doubting.judge(10.26)[1] == ("b",)
    assert doubting.hear("b", 10.2).judge(10.26)[1] == ()


def test_what_was_refused_before_a_doubt_is_no_answer_to_it():
    detector = Detector(settings=Membership(beat_s=0.2, suspect_s=0.8), doubt_s=0.3).watch({"b": 1}, 10.0).gone("b")
    assert detector.judge(10.7)[1] == ()
    assert detector.doubt("b", 10.1).judge(10.15)[1] == ()
    assert detector.doubt("b", 10.1).gone("b").judge(10.15)[1] == ("b",)


def test_budgets_are_learned_between_the_floor_and_the_cap():
    budgets = Budgets(settings=Timeouts(default_phase_s=30, floor_s=2, slack=10))
    assert budgets.budget("update") == 30
    assert budgets.learn("update", 0.05).budget("update") == 2
    assert budgets.learn("update", 0.5).learn("update", 0.4).budget("update") == 5
    assert budgets.learn("update", 9).budget("update") == 30
    worker = Progress(slot=1, step=7, phase="update", since=100.0, waiting=True)
    learned = budgets.learn("update", 0.5)
    assert learned.stalled(worker, 104.9) is None
    assert str(learned.stalled(worker, 105.0)) == "stalled in update for 5.0 s (budget 5.0 s)"


def test_who_has_what_it_waited_for_has_not_stood_still_meanwhile():
    budgets = Budgets(settings=Timeouts(default_phase_s=5))
    at_work = Progress(slot=0, step=7, phase="update", since=100.0, waiting=False, waited_s=60.0)
    assert budgets.stalled(at_work, 164.9) is None
    assert str(budgets.stalled(at_work, 165.0)) == "stalled in update for 5.0 s (budget 5.0 s)"
    assert budgets.stalled(replace(at_work, waiting=True), 165.0).for_s == 65.0
    assert budgets.stalled(replace(at_work, waited_s=2.0), 105.0).for_s == 5.0, "as usual: then both count"
    assert budgets.stalled(replace(at_work, waited_s=4.9), 105.1) is None, "nobody waits as long for nothing"


def test_a_rare_slow_phase_counts_twice_and_not_tenfold():
    budgets = Budgets(settings=Timeouts(default_phase_s=100, floor_s=1, slack=10))
    for _ in range(40):
        budgets = budgets.learn("update", 0.2)
    assert budgets.budget("update") == 2
    waited = budgets.learn("update", 6.0)  # for a vault that stood still
    assert waited.budget("update") == 12
    for _ in range(40):
        waited = waited.learn("update", 0.2)
    assert waited.budget("update") == 12, "what was seen once may come again"
    for _ in range(4):
        waited = waited.learn("update", 3.0)
    assert waited.budget("update") == 30, "more than one of ten: that is usual now"


def test_a_worker_that_left_the_present_gang_is_a_reason_to_ask_neighbours():
    seats = tuple(Seat(member=Member(node=name, incarnation=1), born=1) for name in "ab")
    plan = Plan(generation=4, phase=Phase.TRAIN, seats=seats)

    def seen(work: Work, generation: int, **changed: object) -> bool:
        record = Record(member=seats[1].member, work=work, generation=generation)
        return somebody_left(View(plan=replace(plan, **changed), records={"b": record}))

    assert seen(Work.PARKED, 4)
    assert not seen(Work.PARKED, 3), "it has not heard of this plan yet"
    assert not seen(Work.TRAINING, 4)
    assert not seen(Work.PARKED, 4, phase=Phase.HOLD), "all are out, as asked"
    assert not somebody_left(View(plan=plan)), "who sees no records knows nothing"


@pytest.mark.parametrize("count", [2, 3, 5, 12])
def test_each_node_takes_its_turns_in_the_order_of_all(count):
    """Or two would wait for each other in a ring, each with another partner in mind."""
    plan = plan_of(*(f"n{i:02}" for i in range(count)))
    everything = [pair for turn in turns(probe_links(plan)) for pair in turn]
    assert sum(len(probe_turns(plan, f"n{i:02}")) for i in range(count)) == 2 * len(everything)
    for node in (f"n{i:02}" for i in range(count)):
        assert probe_turns(plan, node) == tuple(pair for pair in everything if node in pair)
    assert probe_turns(plan, "n99") == ()


@pytest.mark.parametrize(
    ("took", "late"),
    [
        ({"n1": 0.4, "n2": 0.0003}, {"n1"}),
        ({"n1": 0.02, "n2": 0.0003}, set()),  # a busy daemon's answer
        ({"n1": 0.4, "n2": 0.2}, set()),  # all are far: then this node is, and the others say so
        ({"n1": 0.4}, {"n1"}),  # of two nodes both say so: it is the link
        ({}, set()),
    ],
)
def test_a_way_is_late_only_beside_quick_ones(took, late):
    assert late_ways(took) == late
