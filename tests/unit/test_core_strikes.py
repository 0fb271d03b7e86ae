"""What happens again and again: how long is waited each time, and when the job stops."""

from dataclasses import replace

import pytest
from test_core_step import Life, leads, member, trains

from elasticrl.core.events import Tick
from elasticrl.core.model import Quarantine


@pytest.mark.parametrize("often", [1024, 1025, 5000])
def test_no_wait_is_too_long_to_be_computed(often: int) -> None:
    life = Life("n00/1")
    leads(life)
    put_out = Quarantine(member=member("n02"), reason="not heard", strikes=often)
    life.view = replace(life.view, quarantines={"n02": put_out})
    trains(life, 2.6, 1, "n00", "n01", backend="gloo", fallbacks=often)
    life.leased(2.9)
    life.at(3.0, Tick(now=0))
    health = life.state.settings.health
    assert life.state.lead is not None
    assert life.state.lead.confined.keys() == {"n02"}
    life.leased(health.quarantine_max_s)
    life.at(health.quarantine_max_s + 1.0, Tick(now=0))
    assert not any("Confine" in line or "on gloo" in line for line in life.lines)
    life.leased(health.quarantine_max_s + 3.0)
    life.at(health.quarantine_max_s + 4.0, Tick(now=0))
    told = "\n".join(life.lines)
    assert "Confine n02/1 let go" in told
    assert "on gloo: probing" in told
