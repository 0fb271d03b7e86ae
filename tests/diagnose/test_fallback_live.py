"""NCCL breaks on a link, and gloo is fine: a real job goes on over gloo, and back when a probe finds NCCL in order.

There is no GPU. What stands for a broken NCCL are the connections that the gang has between two nodes: their packets vanish,
while every new connection works, as the probe's and those of the gang over gloo do. For the probe a file says which links fail
(`ELASTICRL_PROBE_NCCL=stub:FILE`). Which link it is, is drawn.
"""

import json
import random
from pathlib import Path

import pytest
from injected_bed import NODES, bed, when

from chaos.live.box import missing
from elasticrl.contract.cause import Why
from elasticrl.contract.verdict import Fault

CONF = {"comm": {"fallback": "gloo"}, "policy": {"fabric": "fallback"}}
pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"), pytest.mark.timeout(300), pytest.mark.slow,
]  # fmt: skip


def test_a_gang_whose_nccl_breaks_goes_on_over_gloo_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = tmp_path / "broken.json"
    stub.write_text("[]")
    monkeypatch.setenv("ELASTICRL_PROBE_NCCL", f"stub:{stub}")
    with bed(CONF, "fallback") as job:
        job.until_well()
        a, b = random.sample(NODES, 2)
        struck = job.mark(a)
        step = job.steps(a)[0]
        stub.write_text(json.dumps([[a, b]]))
        rule = job.drop(*job.connections(a, b))

        def planned(why: Why) -> list[dict[str, object]]:
            return [line for line in job.since(struck, "plan.adopted") if why in line["causes"]]

        job.until(lambda: planned(Why.ON_GLOO), 60.0, "the gang goes on over gloo")
        assert job.lab.net.dropped(rule), "nothing was broken"
        fell = planned(Why.ON_GLOO)[0]
        told = next(line for line in job.since(struck, "verdict.found") if line["fault"] == Fault.FABRIC)
        assert set(told["nodes"]) == {a, b}
        assert (told["confidence"], Why.PRICE in fell["causes"]) == ("high", True), "what it costs is computed"
        job.until(lambda: all(job.steps(n)[0] > step + 5 for n in NODES), 60.0, "all train on over gloo")
        job.until(lambda: job.since(struck, "fallback.measured"), 60.0, "what it costs is measured")
        assert not [line for line in job.since(struck, "plan.adopted") if line["members"] < len(NODES)], (
            "nobody is put out"
        )
        job.until(lambda: planned(Why.NCCL_ILL), 60.0, "it is probed again, and not gone back")
        stub.write_text("[]")
        mended = job.mark(a)
        job.until(lambda: planned(Why.NCCL_WELL), 60.0, "a clean probe brings it back")
        step = job.steps(a)[0]
        job.until(lambda: all(job.steps(n)[0] > step + 5 for n in NODES), 60.0, "all train as before")
        assert not job.since(mended, "worker.stalled")
        assert {len(found) for found in job.digests().values()} == {1}, "the same bits, whatever carried them"
        assert len(job.digests()) > 10
        assert when(str(fell["at"])) - struck.at < 25.0
        job.heal(rule)
        job.check()
