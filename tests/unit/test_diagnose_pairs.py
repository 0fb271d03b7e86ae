"""Who tests whom, and what broken pairs have in common."""

from collections import Counter
from dataclasses import replace
from itertools import combinations
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos.patience import patience
from elasticrl.contract.evidence import Sign
from elasticrl.contract.pairs import Result, confirm, findings, result_of, schedule
from elasticrl.contract.partition import Pair, pieces, single_out
from elasticrl.contract.verdict import Confidence, Fault
from elasticrl.core.judge.judge import judge

VIEW = Result(node="n0", peer="n1", sent=100, answered=100, heard=100, latency_ms=0.3, p99_ms=0.5, tcp="ok", mbps=900.0,
              mtu=1500, largest=1500, gloo="ok")  # fmt: skip


def names(count: int) -> list[str]:
    return [f"n{i}" for i in range(count)]


@settings(deadline=None)
@given(st.integers(2, 80))
def test_each_node_tests_two_others_once_in_rounds_that_do_not_meet(count: int) -> None:
    rounds = schedule(names(count))
    for pairs in rounds:
        assert max(Counter(name for pair in pairs for name in pair).values()) == 1
    tested = [pair for pairs in rounds for pair in pairs]
    assert len(set(tested)) == len(tested) == (count if count > 2 else 1)
    assert set(Counter(name for pair in tested for name in pair).values()) == {2 if count > 2 else 1}
    assert len(pieces(names(count), tested)) == 1, "a healthy ring is one piece"
    assert schedule(reversed(names(count))) == rounds


def test_a_thousand_nodes_take_two_rounds_of_500_pairs() -> None:
    first, second = schedule(names(1000))
    assert [len(first), len(second)] == [500, 500]
    assert schedule(["a"]) == schedule([]) == ()
    assert ("n1", "n2") in {*first, *second}, "neighbours by name: n2 follows n1, not n10"


def probed(pairs: set[Pair], fails: set[Pair]) -> list[Result]:
    """Both ends' views; pairs in `fails` get nothing through."""
    fine = Result(
        node="", peer="", sent=100, answered=100, heard=100, latency_ms=0.2, tcp="ok", mtu=1500, largest=1500, gloo="ok"
    )
    found = []
    for a, b in sorted(pairs):
        for node, peer in ((a, b), (b, a)):
            broken = (a, b) in fails or (b, a) in fails
            found.append(
                Result(node=node, peer=peer, tcp="timed out") if broken else replace(fine, node=node, peer=peer)
            )
    return found


def all_pairs(count: int) -> set[Pair]:
    return {pair for pairs in schedule(names(count)) for pair in pairs}


@pytest.mark.parametrize("count", [3, 4, 5, 8, 64, 1000])
def test_a_node_that_nobody_reaches_is_singled_out(count: int) -> None:
    bad = f"n{count // 2}"
    verdict = judge(findings(probed(all_pairs(count), {pair for pair in all_pairs(count) if bad in pair})))
    assert (verdict.fault, verdict.nodes, verdict.confidence) == (Fault.NETWORK, (bad,), Confidence.HIGH)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 1000])
def test_a_link_names_both_ends_and_no_more(count: int) -> None:
    verdict = judge(findings(probed(all_pairs(count), {("n0", "n1")})))
    assert (verdict.fault, verdict.nodes, verdict.confidence) == (Fault.NETWORK, ("n0", "n1"), Confidence.MEDIUM)
    assert "between n0 and n1" in verdict.cause


def test_two_bad_nodes_side_by_side_are_two_bad_nodes() -> None:
    bad = {pair for pair in all_pairs(8) if {"n2", "n3"} & set(pair)}
    assert judge(findings(probed(all_pairs(8), bad))).nodes == ("n2", "n3")


def test_a_rack_that_is_cut_off_is_a_partition_and_the_smaller_side_is_named() -> None:
    cut = {(a, b) for a in names(9)[:3] for b in names(9)[3:]}
    verdict = judge(findings(probed(all_pairs(9), cut)))
    assert verdict.nodes == ("n0", "n1", "n2")
    assert "fallen apart" in verdict.cause


def test_when_nobody_reaches_anybody_nobody_is_named() -> None:
    verdict = judge(findings(probed(all_pairs(6), all_pairs(6))))
    assert (verdict.fault, verdict.nodes) == (Fault.NETWORK, ())
    assert "no node can reach any other" in verdict.cause


def test_a_further_round_tells_two_broken_links_from_a_partition() -> None:
    links = {("n1", "n2"), ("n5", "n6")}
    first = probed(all_pairs(8), links)
    further = confirm(names(8), first)
    assert 0 < len(further) <= 4
    verdict = judge(findings([*first, *probed(set(further), links)]))
    assert "between n1 and n2" in verdict.cause
    assert "between n5 and n6" in verdict.cause
    cut = {(a, b) for a in names(8)[2:6] for b in names(8) if b not in names(8)[2:6]}
    first = probed(all_pairs(8), cut)
    verdict = judge(findings([*first, *probed(set(confirm(names(8), first)), cut)]))
    assert "fallen apart" in verdict.cause


@settings(deadline=None, max_examples=60)
@given(st.integers(6, 30), st.randoms(use_true_random=False))
def test_two_rounds_and_a_further_one_find_any_partition_into_two(count: int, chance) -> None:
    """However the two sides lie in the ring, if each side has two nodes that were tested together."""
    side = set(chance.sample(names(count), chance.randint(2, count // 2)))
    cut = {(min(p), max(p)) for p in combinations(names(count), 2) if (p[0] in side) != (p[1] in side)}
    pairs = all_pairs(count)
    results = probed(pairs, cut)
    for _ in range(2):
        results += probed(set(confirm(names(count), results)), cut)
    verdict = judge(findings(results))
    other = set(names(count)) - side
    # A side without any pair of its own in all rounds looks like so many bad nodes, which is as much as is known.
    assert set(verdict.nodes) in ({*side}, {*other}, {*side, *other}, set())
    if len(side) * 2 < count and verdict.nodes:
        assert set(verdict.nodes) in ({*side}, {*side, *other})


BACK = replace(VIEW, node="n1", peer="n0")


@pytest.mark.parametrize(
    ("one", "other", "sign", "node"),
    [
        (VIEW, BACK, Sign.HEALTHY, "n0"),
        (VIEW, None, Sign.HEALTHY, "n0"),
        # n0 hears n1 and is not heard: what n0 sends is lost.
        (replace(VIEW, sent=0, answered=0, tcp="timed out"), replace(BACK, sent=0, answered=0, heard=0, tcp="timed out"),
         Sign.ONE_WAY, "n0"),
        (replace(VIEW, sent=0, answered=0, heard=0, tcp="timed out"), replace(BACK, sent=0, answered=0, tcp="timed out"),
         Sign.ONE_WAY, "n1"),
        (replace(VIEW, largest=1200), replace(BACK, tcp="stalled"), Sign.MTU, "n0"),
        (replace(VIEW, tcp="refused"), replace(BACK, tcp="refused"), Sign.UNREACHABLE, "n0"),
        (replace(VIEW, answered=80), BACK, Sign.LOSSY, "n0"),
        (replace(VIEW, answered=97), BACK, Sign.HEALTHY, "n0"),
        (VIEW, replace(BACK, gloo="all_reduce: timed out"), Sign.UNREACHABLE, "n0"),
        (VIEW, replace(BACK, nccl="unhandled system error"), Sign.NCCL_BROKEN, "n0"),
        # Who ran out of time has tested nothing, and left the other in the middle of it.
        (replace(VIEW, gloo=None), replace(BACK, gloo="all_reduce: connection reset"), Sign.HEALTHY, "n0"),
        (replace(VIEW, tcp=None, gloo=None), replace(BACK, tcp=None, gloo=None), Sign.HEALTHY, "n0"),
    ],
)  # fmt: skip
def test_both_ends_views_of_a_pair_become_one_fact(one: Result, other: Result | None, sign: Sign, node: str) -> None:
    (fact,) = findings([one, *([other] if other else [])])
    assert (fact.sign, fact.node) == (sign, node), fact.detail


def test_an_end_that_was_alone_with_its_test_says_nothing_of_the_way() -> None:
    """Found live: a leader that had its answer already went on, and one node's probe met nobody."""
    alone = Result(node="n0", peer="n1", sent=9, tcp="connect: said otherwise", refused=True)
    assert findings([alone]) == ()
    assert [fact.sign for fact in findings([alone], waited=True)] == [Sign.UNREACHABLE], "it had time to begin"
    both = findings([alone, replace(alone, node="n1", peer="n0")])
    assert [fact.sign for fact in both] == [Sign.UNREACHABLE], "both were there, and something between them refuses"
    assert [fact.sign for fact in findings([replace(alone, tcp="connect: refused", refused=False)])] == [
        Sign.UNREACHABLE
    ]
    several = findings([alone, replace(alone, node="n2")])
    assert [fact.sign for fact in several] == [Sign.UNREACHABLE] * 2, "nobody is there"


def test_a_pair_that_nobody_reports_is_unreachable() -> None:
    (fact,) = findings([], asked=[("n0", "n1")])
    assert (fact.sign, fact.detail) == (Sign.UNREACHABLE, "neither end reported")


@pytest.mark.parametrize(("latency_ms", "nodes"), [(200.0, ("n3",)), (15.0, ())])
def test_late_answers_are_a_fault_only_where_the_others_are_far_faster(
    latency_ms: float, nodes: tuple[str, ...]
) -> None:
    results = [
        replace(r, latency_ms=latency_ms) if "n3" in {r.node, r.peer} else r for r in probed(all_pairs(5), set())
    ]
    assert judge(findings(results)).nodes == nodes
    far_apart = [replace(r, latency_ms=80.0) for r in probed(all_pairs(5), set())]
    assert {fact.sign for fact in findings(far_apart)} == {Sign.HEALTHY}


def test_a_connection_that_does_not_carry_its_bytes_in_time_over_a_late_way_is_late_and_not_cut() -> None:
    """Found live: a node's packets took 200 ms, TCP began and ran out of time, and its way was said to be cut."""
    for latency_ms, begun, sign in (
        (400.0, True, Sign.DELAYED),
        (0.3, True, Sign.UNREACHABLE),
        (400.0, False, Sign.UNREACHABLE),
    ):
        broken = [replace(VIEW, latency_ms=latency_ms, tcp="stalled after 9 bytes", begun=begun, gloo=None)]
        (fact, _) = findings([*broken, replace(VIEW, node="n1", peer="n2")])
        assert (fact.node, fact.sign) == ("n0", sign)


def test_gloo_fine_and_nccl_broken_is_the_fabric_and_names_what_the_pairs_have_in_common() -> None:
    def with_nccl(broken: set[Pair]) -> list[Result]:
        return [
            replace(r, nccl="remote error" if tuple(sorted((r.node, r.peer))) in broken else "ok")
            for r in probed(all_pairs(6), set())
        ]

    node = judge(findings(with_nccl({pair for pair in all_pairs(6) if "n4" in pair})))
    assert (node.fault, node.nodes) == (Fault.FABRIC, ("n4",))
    link = judge(findings(with_nccl({("n2", "n3")})))
    assert (link.fault, link.nodes) == (Fault.FABRIC, ("n2", "n3"))
    everywhere = judge(findings(with_nccl(all_pairs(6))))
    assert (everywhere.fault, everywhere.nodes) == (Fault.FABRIC, ())


def test_a_broken_way_outranks_a_slow_one_and_a_slow_way_is_a_way() -> None:
    results = [
        replace(r, latency_ms=300.0) if "n1" in {r.node, r.peer} else r
        for r in probed(all_pairs(6), {pair for pair in all_pairs(6) if "n4" in pair})
    ]
    assert judge(findings(results)).nodes == ("n4",)


def test_a_healthy_probe_is_no_fault() -> None:
    verdict = judge(findings(probed(all_pairs(7), set())))
    assert (verdict.fault, verdict.nodes) == (Fault.UNKNOWN, ())
    assert verdict.cause == "nothing in the evidence shows a failure"


def test_a_result_survives_json_and_what_is_none_is_refused() -> None:
    assert result_of(VIEW.plain()) == VIEW
    assert result_of(replace(VIEW, refused=True).plain()).refused
    known = VIEW.plain()
    bad = ({**known, "refused": 1}, {**known, "sent": True}, {**known, "sent": "x"}, {**known, "peer": 3})
    for wrong in (None, [], {}, {"node": "a"}, *bad):
        with pytest.raises(ValueError, match="result"):
            result_of(wrong)


def test_single_out_of_nothing_is_nothing() -> None:
    assert single_out([], []).blamed == ()


def test_the_pieces_of_thousands_are_found_at_once() -> None:
    """Found by reading: every pair joined anew what was joined already, 20 s for each event at 4,096 nodes."""
    everybody = names(2048)
    ways = [(node, everybody[(i + hop) % 2048]) for i, node in enumerate(everybody) for hop in (1, 2, 3, 5, 8, 13)]
    half = set(everybody[:1024])
    within = [(a, b) for a, b in ways if (a in half) == (b in half)]
    began = process_time()
    assert pieces(everybody, ways) == (tuple(sorted(everybody)),)
    assert pieces(everybody, reversed(ways)) == (tuple(sorted(everybody)),)
    spent_s = process_time() - began
    assert [len(piece) for piece in pieces(everybody, within)] == [1024, 1024]
    assert spent_s < patience(0.5)
