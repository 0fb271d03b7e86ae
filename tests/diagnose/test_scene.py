"""The scene of a stall, collected on each node by itself and judged together."""

from pathlib import Path

import pytest
from diagnose_gang import gang, until

from elasticrl.contract.evidence import Evidence, Kind, Sign
from elasticrl.contract.verdict import Fault, Known
from elasticrl.core.judge.judge import judge
from elasticrl.diagnose import stalled


@pytest.mark.parametrize(
    ("whats", "ranks", "word"),
    [
        (("wait", "wait", "loader"), (2,), "in its dataloader: __next__"),
        (("skip", "wait", "wait"), (0,), "in its own code: main"),
    ],
)  # fmt: skip
def test_nodes_that_see_only_their_own_rank_find_the_culprit_together(
    whats: tuple[str, ...], ranks: tuple[int, ...], word: str, tmp_path: Path
) -> None:
    facts: list[Evidence] = []
    with gang(tmp_path, *whats) as workers:

        def stuck() -> bool:
            facts.clear()
            for rank, pid in workers.items():
                found = stalled.collect(tmp_path, {rank: pid}, within_s=10.0, node_of=lambda r: f"n{r:02}")
                facts.extend(found.evidence)
            waiting = {fact.rank for fact in facts if fact.sign is Sign.WAITED and fact.seq == 4}
            # It says where it is going before it is there: its peers may wait while it still runs towards that place.
            there = {fact.rank for fact in facts if fact.kind is Kind.STACK and word in fact.detail}
            return waiting == set(workers) - set(ranks) and there == set(ranks)

        until(stuck, 30.0, lambda: f"all but {ranks} wait in collective 4, and {ranks} is {word}: {facts}")
        both = stalled.collect(tmp_path, workers, within_s=10.0)
    verdict = judge(facts, Known(world=3))
    assert (verdict.fault, verdict.ranks, verdict.nodes) == (Fault.HOST_HANG, ranks, tuple(f"n{r:02}" for r in ranks))
    assert word in verdict.cause
    assert "are in all_reduce" in both.said
    # Without any stacks the recorders tell as much, but for the place.
    only = judge([fact for fact in facts if fact.seq is not None], Known(world=3))
    assert (only.fault, only.ranks) == (Fault.HOST_HANG, ranks), only.cause


def test_who_is_gone_leaves_no_facts_against_anybody(tmp_path: Path) -> None:
    found = stalled.collect(tmp_path, {0: 2**22 - 1}, within_s=1.0)
    assert judge(found.evidence).ranks == ()
    assert found.said == "rank 0 gave no stack (the process is gone)"
