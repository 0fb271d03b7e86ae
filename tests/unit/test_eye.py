"""What the live driver's eye makes of the store: a plan that a quarantine overtook is no plan with a confined seat."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from chaos.history import CROSSING_S, Planned
from chaos.live.eye import Eye
from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.model import Member, Phase, Plan, Quarantine, Seat
from elasticrl.shell import keys
from elasticrl.store.protocol import Entry
from elasticrl.store.protocol import Event as Change

BAD = Member(node="n3", incarnation=3)
GOOD = Member(node="n1", incarnation=1)
PLAN = Plan(generation=35, phase=Phase.TRAIN, seats=(Seat(member=GOOD, born=32), Seat(member=BAD, born=34)), lanes=12)


def seen(key: str, value: Any) -> Change:
    """A key that was written."""
    entry = Entry(key=key, value=keys.dump(value), create_revision=1, mod_revision=1)
    return Change(key=key, entry=entry, revision=1)


@pytest.mark.parametrize(("later_s", "held"), [(0.01, ()), (CROSSING_S + 0.1, (str(BAD),))])
def test_a_quarantine_counts_once_it_has_stood_for_a_while(later_s: float, held: tuple[str, ...]) -> None:
    # Found by live seed 41: two nodes were put out 10 ms apart, and the second quarantine overtook the first's plan.
    eye = Eye(cast("Any", SimpleNamespace()), 0.0)
    eye._changed(
        1.0, seen(keys.quarantine_key("n3"), Quarantine(member=BAD, cause=Cause(why=Why.POLICY, said="not heard")))
    )
    eye._changed(1.0 + later_s, seen(keys.PLAN, PLAN))
    eye._loop.close()
    planned = [fact for fact in eye.facts if isinstance(fact, Planned)]
    assert [fact.held for fact in planned] == [held]
