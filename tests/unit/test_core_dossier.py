"""What is told after a plan: by whom it left out as dead, and by those whose ranks had parted."""

from dataclasses import replace

import pytest
from core_kit import member, plan

from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.evidence import Evidence, Kind, Sign
from elasticrl.contract.verdict import Confidence, Fault, Verdict
from elasticrl.core.node import dossier

BEFORE = plan(3, "n00/1", "n01/1", "n02/1")
DEAD = Verdict(fault=Fault.DEAD_NODE, nodes=("n02",), cause="n02 is silent", confidence=Confidence.HIGH)
WITHOUT = replace(plan(4, "n00/1", "n01/1"), verdict=DEAD)


def test_who_is_left_out_as_dead_and_reads_it_says_so_and_whom_it_does_not_hear():
    fact = dossier.unheard(member("n02/1"), BEFORE, WITHOUT, {"n00", "n07"})
    assert (fact.kind, fact.sign, fact.node, fact.generation) == (Kind.NODE, Sign.UNHEARD, "n02", 3)
    assert fact.detail == "it does not hear n00 either"
    assert dossier.unheard(member("n02/1"), BEFORE, WITHOUT, ()).detail == ""


@pytest.mark.parametrize(
    ("me", "before", "after"),
    [
        ("n01/1", BEFORE, WITHOUT),  # it is in
        ("n02/2", BEFORE, WITHOUT),  # it did die: this is another life
        ("n02/1", plan(3, "n00/1", "n01/1"), WITHOUT),  # it had no seat to lose
        ("n02/1", BEFORE, replace(WITHOUT, verdict=replace(DEAD, nodes=("n01",)))),
        ("n02/1", BEFORE, replace(WITHOUT, verdict=replace(DEAD, fault=Fault.NETWORK))),
        ("n02/1", BEFORE, replace(WITHOUT, verdict=None)),
        ("n02/1", BEFORE, replace(BEFORE, generation=4, verdict=DEAD)),  # blamed, and kept
    ],
)
def test_nobody_else_has_anything_to_say(me, before, after):
    assert dossier.unheard(member(me), before, after, {"n00"}) is None


@pytest.mark.parametrize("sign", [Sign.ABORTED, Sign.MISMATCH, Sign.PEER_GONE])
def test_ranks_have_parted_where_gloo_says_so(sign):
    because = (Evidence(kind=Kind.GLOO_ERROR, sign=sign, rank=1),)
    assert dossier.parted(replace(WITHOUT, verdict=replace(DEAD, because=because))) == (sign is not Sign.PEER_GONE)
    assert not dossier.parted(replace(WITHOUT, verdict=None))
    assert dossier.parted(replace(WITHOUT, verdict=None, causes=(Cause(why=Why.FAILED, signal=6),)))
