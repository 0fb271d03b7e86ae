"""A real job of real nodes: healthy minutes say nothing, and a probe ends in a verdict.

That what befalls a gang is named in time is in `test_injected.py`. Here is what happens between: silence while nothing is
wrong, and the way from a stall that nobody is to blame for, over the nodes' tests of each other, to who goes on.
"""

import os
import time

import pytest
from injected_bed import NODES, bed

from chaos.live import net
from chaos.live.box import missing
from chaos.patience import patience
from elasticrl.contract.verdict import Fault

MINUTES = float(os.environ.get("ELASTICRL_HEALTHY_MINUTES", "5"))
COMPLAINTS = (
    "verdict.found", "straggler.found", "worker.stalled", "worker.exited", "neighbour.suspected", "incident.saved",
    "policy.capped", "agent.lost", "bug",
)  # fmt: skip
HALVES = ("n0", "n1", "n2"), ("n3", "n4", "n5")
SIX = {
    "membership": {"min_nodes": 3, "max_nodes": 6}, "recovery": {"probe": "20s"},
    "health": {"quarantine": "60s", "quarantine_max": "60s"},
    "policy": {"network": "quarantine"},
}  # fmt: skip
pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"), pytest.mark.slow,
    pytest.mark.timeout(600 + 60 * MINUTES),
]  # fmt: skip


def test_real_healthy_minutes_are_no_incident() -> None:
    with bed(name="healthy") as job:
        job.until_well(150.0)
        struck, step, generation = job.mark(), job.steps("n0")[0], job.steps("n0")[1]
        until = time.monotonic() + patience(60.0 * MINUTES)
        while time.monotonic() < until:
            time.sleep(5.0)
            assert not (said := job.since(struck, *COMPLAINTS)), said[:5]
        assert not job.since(struck, "plan.adopted"), "nothing called for a new plan"
        assert not job.told(struck)
        assert {job.steps(n)[1] for n in NODES} == {generation}
        assert job.steps("n0")[0] > step + 60.0 * MINUTES, "it has trained, a step a second at the least"
        job.check()


def test_a_probe_ends_in_a_verdict_and_the_node_that_drops_large_packets_is_kept_out() -> None:
    with bed(
        {"policy": {"network": "quarantine"}, "health": {"quarantine": "20s", "quarantine_max": "20s"}}, "probed"
    ) as job:
        job.until_well(150.0)
        struck = job.mark("n1")
        rule = job.drop(*(f"{match} meta length gt 600" for match in job.between("n1")))

        def without() -> list[dict[str, object]]:
            return [
                line for line in job.since(struck, "plan.adopted") if line["phase"] == "train" and "n1" in line["nodes"]
            ]

        job.until(without, 60.0, "the probe's verdict is acted upon")
        assert job.lab.net.dropped(rule), "nothing was broken"
        probes = [line for line in job.since(struck, "plan.adopted") if line["phase"] == "probe"]
        assert probes, "nobody was blamed before the nodes had tested each other"
        done = job.since(struck, "probe.done")
        assert {line["generation"] for line in done} <= {line["generation"] for line in probes}
        told = next(line for line in job.since(struck, "verdict.found") if line["nodes"])
        assert (told["fault"], told["nodes"], told["confidence"]) == (Fault.NETWORK, ["n1"], "high"), told["cause"]
        went_on = without()[0]
        assert (went_on["phase"], went_on["members"]) == ("train", 2)
        step = max(job.steps(n)[0] for n in ("n0", "n2"))
        job.until(lambda: all(job.steps(n)[0] > step + 5 for n in ("n0", "n2")), 60.0, "the others train on")
        job.heal(rule)
        job.until_well(120.0)  # and it is let back
        assert all(
            "large packets" in each.verdict.cause for each in job.told(struck) if each.verdict.fault is Fault.NETWORK
        )
        job.check()


def test_where_the_tested_pairs_fall_apart_a_second_probe_tells_a_partition_from_broken_links() -> None:
    """Six nodes: the first probe leaves three pairs untested. Large packets vanish between the halves."""
    with bed(SIX, "confirmed", nodes=6) as job:
        job.until_well(240.0)
        struck = job.mark()
        near, far = ([job.box(n) for n in half] for half in HALVES)
        rule = job.drop(*(f"{match} meta length gt 600" for match in net.between(near, far)))

        def probes() -> list[dict[str, object]]:
            return [line for line in job.since(struck, "plan.adopted") if line["phase"] == "probe"]

        job.until(lambda: any("pieces" in line["causes"] for line in probes()), 90.0, "a second probe")
        job.until(
            lambda: any("fallen apart" in line["cause"] for line in job.since(struck, "verdict.found")),
            60.0,
            "its verdict",
        )
        told = next(line for line in job.since(struck, "verdict.found") if "fallen apart" in line["cause"])
        assert job.lab.net.dropped(rule), "nothing was broken"
        assert (told["fault"], told["cause"].count("|")) == (Fault.NETWORK, 1)
        assert all(", ".join(half) in told["cause"] for half in HALVES)
        job.heal(rule)
        job.until_well(240.0)
        job.check()
