"""The checkpoint that scored best stays on the disk and can be named: a real script, alone, and its run through the CLI."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from alone import live

from chaos.patience import patience
from elasticrl.runtime.checkpoint.place import place
from elasticrl.runtime.checkpoint.shelf import listing

SCRIPT = """
import json, sys, time
from pathlib import Path
import torch
import elasticrl.runtime
from elasticrl.runtime.optim import SGD

scores = {2: 0.25, 3: 0.75, 5: 0.5}
with elasticrl.runtime.join("job.yaml") as run:
    run.register(model=torch.nn.Linear(8, 8), optimizer=SGD(lr=0.1))
    for step in run.steps(int(sys.argv[1])):
        with step:
            for lane in run.lanes():
                run.model(torch.ones(4, 8)).mean().backward()
                lane.done()
            run.update()
            until = time.monotonic() + 30.0  # of steps that are too quick for the disk some would not be saved
            while step and not list(Path("saves/job").glob(f"step-{step:08}-g*")) and time.monotonic() < until:
                time.sleep(0.01)
            if step + 1 in scores:
                run.scored(scores[step + 1])
"""


@pytest.mark.parametrize(
    ("best", "steps"),
    [(True, [7]), pytest.param(True, [3, 7], marks=pytest.mark.slow), pytest.param(False, [7], marks=pytest.mark.slow)],
    ids=["kept", "kept, and gone on from", "not kept"],
)
def test_the_best_checkpoint_is_not_pruned_and_can_be_named(tmp_path: Path, best: bool, steps: list[int]):
    conf = {
        "job": {"name": "job", "program": "job.py"}, "store": {"embedded": True},
        "membership": {"max_nodes": 1}, "lanes": {"count": 1}, "vault": {"dir": str(tmp_path / "vault")},
        "checkpoint": {"dir": str(tmp_path / "saves"), "every": 1, "keep_last": 1, "keep_best": best},
    }  # fmt: skip
    (tmp_path / "job.yaml").write_text(json.dumps(conf))
    (tmp_path / "job.py").write_text(SCRIPT)
    for end in steps:
        ended = live(tmp_path / "job.py", str(end))
        assert ended.returncode == 0, ended.stderr
    wanted: dict[int, float | None] = {3: 0.75, 7: None} if best else {7: None}
    until = time.monotonic() + patience(30.0)  # the writer outlives its worker, and prunes last
    while (there := scores(tmp_path / "saves" / "job")) != wanted:
        assert time.monotonic() < until, there
        time.sleep(0.05)
    run = str(tmp_path / "saves" / "job")
    said = elasticrl("export", run, str(tmp_path / "out"), "--name", "best")
    if best:
        assert said.stdout.startswith("step-00000003-g"), said
        assert "scored 0.75" in elasticrl("list", run).stdout
    else:
        assert said.returncode == 2
        assert "no committed checkpoint" in said.stderr


def scores(folder: Path) -> dict[int, float | None]:
    """Of the checkpoints there, by step."""
    return {
        entry.version.step: entry.manifest.score for entry in listing(place(str(folder))) if entry.manifest is not None
    }


def elasticrl(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "elasticrl.cli.main", "checkpoint", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
