"""Each guard of the core, broken in turn, is missed by somebody. The table is in the output."""

import pytest

from chaos.mutants import MUTANTS, table


@pytest.mark.timeout(1800)  # each mutant has so much of computing, which a busy machine gives it later
def test_every_broken_guard_is_noticed(capsys: pytest.CaptureFixture[str]):
    assert len(MUTANTS) >= 100
    with capsys.disabled():
        missed = table(budget_s=1700.0)
    assert missed == 0
