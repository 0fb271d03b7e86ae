"""States inside of a step are kept as far as they are worth what they cost: a real script, alone, on one processor."""

import json
from pathlib import Path
from typing import Any

import pytest
from alone import live

SCRIPT = """
import json, os, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # copying takes from computing
import torch
import elasticrl.runtime
from elasticrl.runtime.optim import SGD

how = json.loads(sys.argv[1])
with elasticrl.runtime.join("job.yaml") as run:
    run.register(model=torch.nn.Linear(1000, 1000), optimizer=SGD(lr=0.1))
    for step in run.steps(4):
        with step:
            time.sleep(how["pause_s"])  # stands for work: what a state may cost is a part of the time since the last
            run.keep(always=how["always"])
            for number in run.updates(3):
                for lane in run.lanes():
                    run.model(torch.ones(4, 1000)).mean().backward()
                    time.sleep(how["pause_s"])
                    lane.done()
                run.update()
            print("marks", run.progress.mark, flush=True)
"""


def kept(folder: Path, **how: Any) -> list[int]:
    """How many states each step kept inside of it."""
    folder.mkdir()
    conf = {
        "job": {"name": "job", "program": "job.py"}, "store": {"embedded": True},
        "membership": {"max_nodes": 1}, "lanes": {"count": 1}, "checkpoint": {"dir": str(folder / "saves"), "every": 1000},
        "vault": {"dir": str(folder / "vault"), "inside": how.pop("inside"), "every": how.pop("every", 1)},
    }  # fmt: skip
    (folder / "job.yaml").write_text(json.dumps(conf))
    (folder / "job.py").write_text(SCRIPT)
    ended = live(folder / "job.py", json.dumps({"pause_s": 0.0, "always": True, **how}))
    assert ended.returncode == 0, ended.stderr
    return [int(line.split()[1]) for line in ended.stdout.splitlines() if line.startswith("marks")]


def test_all_or_the_rollouts_alone_where_that_is_asked_for(tmp_path: Path):
    assert kept(tmp_path / "all", inside=1) == [3] * 4, (
        "after the rollout and each update but the last, whose state is the step's"
    )
    assert kept(tmp_path / "rollouts", inside=0) == [1] * 4


# On a machine with five times as much work as processors a copy takes five times as long: the second part is ample.
@pytest.mark.parametrize(("inside", "pause_s", "marks"), [(0.02, 0.0, 1), (0.2, 0.5, 3)])
def test_as_many_as_their_part_of_the_time_allows(tmp_path: Path, inside: float, pause_s: float, marks: int):
    assert kept(tmp_path / "job", inside=inside, pause_s=pause_s)[-1] == marks


def test_a_rollout_is_kept_on_what_was_kept_before_it_and_not_where_nothing_was(tmp_path: Path):
    assert kept(tmp_path / "job", inside=0, every=2) == [1, 0, 1, 0]


@pytest.mark.parametrize(("inside", "pause_s", "marks"), [(1e-6, 0.0, 0), (0.2, 0.5, 3)])
def test_a_rollout_that_need_not_be_kept_is_where_it_took_long(
    tmp_path: Path, inside: float, pause_s: float, marks: int
):
    assert kept(tmp_path / "job", inside=inside, pause_s=pause_s, always=False)[-1] == marks
