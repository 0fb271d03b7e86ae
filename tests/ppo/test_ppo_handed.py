"""What one member of a team asks for, all of the team have: its very bits, or its failure."""

import sys
from itertools import count
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

import handed_parts
from forked_workers import Workers

GENERATION = count(1)


@pytest.fixture(scope="module")
def workers():
    gang = Workers(4)
    yield gang
    gang.close()


@pytest.mark.parametrize(("tp", "cp"), [(2, 1), (1, 2), (2, 2)])
def test_one_member_asks_and_all_get_its_bits(workers: Workers, tp: int, cp: int):
    """Four ranks: two teams, or one of four."""
    found = workers.run(handed_parts.everything, 4, generation=next(GENERATION), tp=tp, cp=cp)
    for first in range(0, 4, tp * cp):
        team = found[first : first + tp * cp]
        assert len({its[:3] for its in team}) == 1
        assert [its[3:] for its in team] == [(True, 3)] + [(False, 0)] * (tp * cp - 1)
    assert len({its[0] for its in found}) == 4 // (tp * cp), "teams have their own"


def test_a_failure_is_raised_on_all_members_with_its_sentence(workers: Workers):
    found = workers.run(handed_parts.failing, 2, generation=next(GENERATION))
    assert found == [("rank 0 found no engine", "from rank 0")] * 2


def test_a_member_that_waits_for_the_one_that_asks_leaves_when_it_is_told_to(workers: Workers):
    asker, other = workers.run(handed_parts.interrupted, 2, generation=next(GENERATION))
    assert "a test says so" in other
    assert "broken by a peer" in asker or "left" in asker, asker
