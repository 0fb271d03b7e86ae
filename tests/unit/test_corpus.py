"""The corpus of real shapes: each excerpt is whole, and the rules are as often right as the page says."""

import pytest

from bench.diagnose import CORPUS, KEYS, PARTS, corpus, judged, share
from elasticrl.contract.verdict import Fault

#: What was reached, less some excerpts that a change may cost for a good reason: (right, confidently wrong).
REACHED = {"work": (0.97, 0.003), "held": (0.875, 0.014)}
FEWEST = 2300


def test_every_excerpt_is_whole_and_says_where_its_shape_was_seen() -> None:
    found = 0
    for path in sorted(CORPUS.glob("*/*.txt")):
        head, dashes, log = path.read_text(encoding="utf-8").partition("\n---\n")
        assert [line[2:].partition(":")[0] for line in head.splitlines()] == list(KEYS), path.name
        assert dashes, path.name
        assert log.strip(), path.name
        found += 1
    assert found >= FEWEST
    for part in PARTS:
        for one in corpus(part):
            assert one.source.startswith("https://"), one.name
            assert one.proof, one.name
            assert one.family, one.name


def test_no_thread_is_in_both_parts() -> None:
    work, held = ({one.source for one in corpus(part)} for part in PARTS)
    assert work & held == set()


@pytest.mark.parametrize("part", PARTS)
def test_verdicts_are_as_often_right_as_was_reached(part: str) -> None:
    found = [judged(one) for one in corpus(part)]
    right, sure = REACHED[part]
    assert share(found, "right") >= right
    assert share(found, "sure") <= sure


def test_every_class_that_a_log_can_show_has_excerpts() -> None:
    proven = {one.proven for part in PARTS for one in corpus(part)}
    assert set(Fault) - proven <= {Fault.DIVERGENCE}
