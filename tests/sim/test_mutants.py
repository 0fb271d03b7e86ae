"""Each guard of the core, broken in turn, is missed by somebody. The table is in the output."""

from chaos.mutants import MUTANTS, table


def test_every_broken_guard_is_noticed():
    assert len(MUTANTS) >= 25
    assert table(budget_s=280.0) == 0
