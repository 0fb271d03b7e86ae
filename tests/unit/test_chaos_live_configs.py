"""What is played on real nodes begins: each scenario's settings make a configuration that `config check` accepts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chaos.live.labjob import LabJob, conf_of
from chaos.live.play import why_not
from chaos.scenario import Scenario, load

ROOT = Path(__file__).parents[2] / "chaos" / "scenarios"
PLAYED = [scenario for path in sorted(ROOT.rglob("*.yaml")) if not why_not(scenario := load(path))]
#: One scenario of each kind of job.
UNLIKE = {f"{s.shape.settings} {max(2, s.shape.nodes)} {s.shape.trainer} {s.shape.slots}": s for s in PLAYED}


@pytest.mark.parametrize("scenario", UNLIKE.values(), ids=lambda scenario: scenario.name)
def test_a_scenario_that_is_played_on_real_nodes_has_a_job_that_can_begin(scenario: Scenario, tmp_path: Path) -> None:
    # Found by playing them all: two had settings that the simulator takes and no configuration may have.
    shape, nodes = scenario.shape, max(2, scenario.shape.nodes)
    boxes = {f"n{i}": None for i in range(nodes)}
    lab: Any = SimpleNamespace(folder=tmp_path, disk=tmp_path, endpoints=["http://127.0.0.1:1"], boxes=boxes)
    conf = conf_of(shape.settings, nodes=nodes)
    LabJob(lab, "j1", conf=conf, trainer=shape.trainer, slots=shape.slots, team=shape.settings.team)


def test_many_are_played() -> None:
    assert len(PLAYED) > 100
