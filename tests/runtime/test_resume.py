"""A job that is started again from its checkpoints with other lanes, batch or data than it had: refused, unless told."""

import re
from pathlib import Path

import pytest
from alone import Life, live

from elasticrl.runtime.chronicle import read

SCRIPT = """
import random
import sys
import numpy
import torch
import elasticrl
from elasticrl.runtime.data.cursor import Cursor, Walk
from elasticrl.runtime.optim import AdamW

steps, per_lane, name = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
with elasticrl.runtime.join(sys.argv[1]) as run:
    model = torch.nn.Linear(3, 5)
    cursor = Cursor(Walk(name=name, size=100, lanes=run.tree.lanes.count, per_lane=per_lane, seed=7))
    run.register(model=model, optimizer=AdamW(lr=1e-3), data=cursor)
    for step in run.steps(steps):
        for lane in run.lanes():
            points = torch.tensor([[sample.epoch, sample.index, 1.0] for sample in lane.ids()])
            model(points).square().mean().backward()
            lane.done()
        run.update()
        print(step, random.random(), numpy.random.rand(), torch.rand(1).item())
"""


def start(
    folder: Path, steps: int, *, lanes: int = 4, per_lane: int = 6, name: str = "numbers", allow: str = ""
) -> Life:
    """One life of the job, alone; what it made is in `folder`."""
    (folder / "job.py").write_text(SCRIPT)
    (folder / "job.yaml").write_text(
        f"job: {{name: small, program: job.py}}\nlanes: {{count: {lanes}}}\nnode: {{name: n0}}\nmembership: {{max_nodes: 1}}\n"
        f"checkpoint: {{dir: {folder}/run, every: 2, allow: [{allow}]}}\nvault: {{dir: {folder}/vault}}\n"
        "store: {embedded: true}\n"
    )
    return live(folder / "job.py", "job.yaml", str(steps), str(per_lane), name)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"lanes": 2}, "lanes"),
        pytest.param({"per_lane": 5}, "batch", marks=pytest.mark.slow),
        pytest.param({"name": "others"}, "data", marks=pytest.mark.slow),
    ],
)
def test_a_resume_with_other_lanes_batch_or_data_is_refused_unless_told(
    tmp_path: Path, change: dict[str, object], field: str
):
    first = start(tmp_path, 4)
    assert first.returncode == 0, first.stderr
    refused = start(tmp_path, 8, **change)
    assert refused.returncode != 0
    assert f"{field} was" in refused.stderr
    assert f"continue with --allow {field} (checkpoint.allow)" in refused.stderr
    assert max(read(tmp_path / "run" / "small").steps) == 4, "nothing was trained"
    names = "lanes, batch" if field == "lanes" else field  # fewer lanes of the same size are another batch as well
    allowed = start(tmp_path, 8, allow=names, **change)
    assert allowed.returncode == 0, allowed.stderr
    assert max(read(tmp_path / "run" / "small").steps) == 8


def test_a_resume_that_changes_nothing_needs_no_leave(tmp_path: Path):
    assert start(tmp_path, 4).returncode == 0
    second = start(tmp_path, 8)
    assert second.returncode == 0, second.stderr
    assert sorted(read(tmp_path / "run" / "small").steps) == list(range(9))


def test_generators_that_belong_to_no_lane_go_on_where_they_were(tmp_path: Path):
    """A library that draws from Python's, numpy's or torch's own generator must not draw the same again after a restart."""
    lives = tmp_path / "lives"
    lives.mkdir()
    once = drawn(start(tmp_path, 8))
    assert len(once) == 8
    assert [*drawn(start(lives, 4)), *drawn(start(lives, 8))] == once


def drawn(life: Life) -> list[str]:
    """What the job's script printed, without what its runtime says."""
    assert life.returncode == 0, life.stderr
    return [line for line in life.stdout.splitlines() if re.fullmatch(r"\d+( 0\.\d+){3}", line)]
