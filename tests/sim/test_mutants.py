"""Each guard of the core, broken in turn, is missed by somebody. The table is in the output."""

import pytest

from chaos.mutants import MUTANTS, table


def test_every_broken_guard_is_noticed(capsys: pytest.CaptureFixture[str]):
    assert len(MUTANTS) >= 25
    with capsys.disabled():
        missed = table(budget_s=280.0)
    assert missed == 0
