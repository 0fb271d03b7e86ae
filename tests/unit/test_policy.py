"""From verdict to action: the operator's word is the most that is done."""

from dataclasses import replace
from typing import get_args

import pytest

from elasticrl.config.cluster import Policy
from elasticrl.contract.evidence import Evidence, Kind, Sign
from elasticrl.contract.verdict import Confidence, Fault, Verdict
from elasticrl.core.judge.policy import Act, Answer, Scope, answer, proven

EIGHT = Scope(known=8, min_nodes=4)
DEFAULTS = {Fault(name): Act(act) for name, act in Policy().model_dump().items() if name in set(Fault)}


def verdict(
    fault: Fault, *nodes: str, confidence: Confidence = Confidence.HIGH, ranks: tuple[int, ...] = ()
) -> Verdict:
    return Verdict(
        fault=fault, nodes=nodes, ranks=ranks, cause=f"{', '.join(nodes) or 'it'} broke", confidence=confidence
    )


def done(what: Verdict, scope: Scope = EIGHT, **policy: str) -> Answer:
    return answer(what, DEFAULTS | {Fault(name): Act(act) for name, act in policy.items()}, scope)


@pytest.mark.parametrize(
    ("what", "act"),
    [
        (verdict(Fault.DEAD_RANK, "n1", ranks=(3,)), Act.RESTART),
        (verdict(Fault.DEAD_NODE, "n1"), Act.RESTART),
        (verdict(Fault.NETWORK, "n1"), Act.QUARANTINE),
        (verdict(Fault.DESYNC, ranks=(3,)), Act.STOP),
        (verdict(Fault.STRAGGLER, ranks=(3,)), Act.REPORT),
        (verdict(Fault.HOST_HANG, ranks=(3,)), Act.RESTART),
        (verdict(Fault.GPU_FAULT, "n1"), Act.QUARANTINE),
        (verdict(Fault.UNKNOWN), Act.RESTART),
    ],
)
def test_a_sure_verdict_is_answered_by_the_operators_word(what: Verdict, act: Act) -> None:
    given = done(what)
    assert (given.act, given.milder) == (act, "")
    assert given.reason.startswith(what.cause)


@pytest.mark.parametrize(("act", "fault"), [("quarantine", "network"), ("stop", "network"), ("fallback", "fabric")])
def test_weak_evidence_costs_nobody_more_than_a_restart(act: str, fault: str) -> None:
    given = done(verdict(Fault(fault), "n1", confidence=Confidence.LOW), **{fault: act})
    assert given.act is Act.RESTART
    assert "weak" in given.reason


def test_no_job_is_stopped_for_what_is_not_proven_and_it_is_said() -> None:
    given = done(verdict(Fault.NETWORK, "n1", confidence=Confidence.MEDIUM), network="stop")
    assert given.act is Act.RESTART
    assert "policy says stop, and it is not proven" in given.reason


def test_a_death_that_was_seen_is_proof_and_one_that_a_log_speaks_of_is_none() -> None:
    seen = Evidence(kind=Kind.EXIT, sign=Sign.KILLED, rank=3, node="n1", source="leader")
    for fact, act in ((seen, Act.STOP), (replace(seen, line_no=40), Act.RESTART)):
        death = replace(verdict(Fault.DEAD_RANK, "n1", confidence=Confidence.MEDIUM), because=(fact,))
        assert done(death, dead_rank="stop").act is act
        assert proven(death) == (act is Act.STOP)


def test_nobody_is_replaced_or_kept_out_whom_the_evidence_does_not_name() -> None:
    assert done(verdict(Fault.NETWORK)).act is Act.RESTART
    assert done(verdict(Fault.HOST_HANG)).act is Act.RESTART
    assert done(verdict(Fault.NETWORK, ranks=(3,))).act is Act.RESTART, "a rank is named, and no node to keep out"


@pytest.mark.parametrize(
    ("scope", "act"),
    [
        (Scope(known=8, min_nodes=4), Act.QUARANTINE),
        (Scope(known=4, min_nodes=4), Act.RESTART),
        (Scope(known=5, min_nodes=4), Act.QUARANTINE),
        (Scope(known=8, min_nodes=4, held=frozenset({"n2", "n3", "n4", "n5"})), Act.RESTART),
        (Scope(known=8, min_nodes=1, held=frozenset({"n2", "n3", "n4", "n5"})), Act.RESTART),
        (Scope(known=8, min_nodes=1, held=frozenset({"n1", "n3"})), Act.QUARANTINE),
        (Scope(known=8, min_nodes=1, recent=4), Act.RESTART),
        (Scope(known=4, min_nodes=4, recent=4, held=frozenset({"n1"})), Act.QUARANTINE),  # it is out already
        (Scope(known=2, min_nodes=1, share=0.4), Act.RESTART),
    ],
)
def test_never_below_min_nodes_and_never_more_than_a_share_at_once_or_in_an_hour(scope: Scope, act: Act) -> None:
    given = done(verdict(Fault.NETWORK, "n1"), scope)
    assert given.act is act, given.reason


def test_falling_back_to_gloo_needs_proof_that_nccl_is_broken_and_that_gloo_carries_it() -> None:
    broken = verdict(Fault.FABRIC, "n1")
    assert done(broken, Scope(known=8, gloo=True), fabric="fallback").act is Act.FALLBACK
    assert "gloo cannot" in done(broken, EIGHT, fabric="fallback").reason
    doubtful = verdict(Fault.FABRIC, "n1", confidence=Confidence.MEDIUM)
    assert done(doubtful, Scope(known=8, gloo=True), fabric="fallback").act is Act.RESTART
    assert done(verdict(Fault.NETWORK, "n1"), Scope(known=8, gloo=True), network="fallback").act is Act.RESTART


def test_every_class_has_a_word_in_the_configuration_and_every_word_is_known() -> None:
    assert set(DEFAULTS) == set(Fault)
    words = {word for f in Policy.model_fields.values() for word in get_args(f.annotation)}
    assert words == set(Act)
