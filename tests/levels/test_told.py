"""Scripts that tell their steps: what is known of them, and that they save and leave when they are asked to."""

import os
import subprocess
import sys
import time

import pytest
import torch

import elasticrl
from tests.levels.scripts import HERE, Running
from tests.loading import loaded_ahead

pytestmark = pytest.mark.timeout(420)
STOPPED = 75
CONF = {"timeouts": {"floor": "3s", "slack": 10, "default_phase": "60s", "confirm": "500ms"}}


def test_outside_of_elasticrl_the_lines_do_nothing() -> None:
    elasticrl.beat(step=3, phase="train")
    with elasticrl.phase("evaluate"):
        elasticrl.beat(step=4)
    assert not elasticrl.leaving()
    with pytest.raises(ValueError, match="the phase 'two words' cannot be used"):
        elasticrl.beat(phase="two words")
    code = "import elasticrl, sys; elasticrl.beat(step=1); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_script_that_tells_its_steps_is_watched_by_phase_and_saves_before_it_leaves() -> None:
    with Running("told.py", "--steps", "4000", "--hang", "{folder}/hang", level="told", conf=CONF) as run:
        hangs = run.job.folder / "hang"
        run.job.start("n0", "n1")
        run.trains(2, steps=60)
        picture = run.until(lambda: (told := run.job.ask("n0", "status"))["step"] > 20 and told, "steps in the status")
        assert {row["phase"] for row in picture["rows"]} <= {"train", "load"}
        assert picture["level"] == "told"
        assert any("Level kept" in line for line in picture["advice"])
        # One rank hangs in its loader: it is found by its phase, and named.
        run.warm()
        at = time.monotonic()
        hangs.touch()
        run.trains(2, after=run.until(lambda: not hangs.exists() and time.monotonic(), "the hang"))
        verdicts = [line for line in run.job.events("n0", "verdict.found") if line["fault"] == "host_hang"]
        assert verdicts, f"nobody was named {time.monotonic() - at:.1f} s after the hang"
        rank = next(row["rank"] for row in run.job.ask("n0", "status")["rows"] if row["node"] == "n1")
        assert verdicts[-1]["ranks"] == [1], (verdicts, rank)
        # A third node joins: all save, and go on from there.
        run.until(lambda: all(n.poll() is None for n in run.job.daemons.values()), "all daemons")
        run.job.start("n2")
        run.trains(3)
        first = min(line.step for line in run.lines() if line.world == 3)
        last = max(line.step for line in run.lines() if line.world == 2)
        assert first == last + 1, "growth has cost no step"
        # A stop: all save, and leave.
        run.job.ask("n0", "stop")
        assert set(run.ends()) == {STOPPED}
        newest = max(line.step for line in run.lines())
        assert torch.load(run.saves / "newest.pt")["step"] == newest
        run.job.check()


def test_what_a_script_loads_before_it_has_a_rank_is_loaded_ahead() -> None:
    load_s = 8.0
    conf = CONF | {"agent": {"load_ahead": True}}
    with Running("told.py", "--steps", "4000", "--load", str(load_s), level="told", conf=conf) as run:
        run.job.start("n0", "n1")
        run.trains(2)
        logs = run.job.folder / "log"
        run.until(lambda: all(loaded_ahead(logs, node) for node in ("n0", "n1")), "spares that have loaded")
        at = run.hit("n1")
        assert run.trains(2, after=at) < at + load_s - 1.0
        run.job.ask("n0", "stop")
        assert set(run.ends()) == {STOPPED}


def test_a_script_that_never_says_that_it_has_loaded_is_not_begun_without_a_rank() -> None:
    with Running("ddp.py", "--steps", "4000", conf={"agent": {"load_ahead": True}}) as run:
        run.job.start("n0", "n1")
        run.trains(2)
        logs = run.job.folder / "log"
        run.until(
            lambda: all(loaded_ahead(logs, node, "does not call elasticrl.loaded()") for node in ("n0", "n1")), "why"
        )
        run.trains(2, after=run.hit("n1"))
        assert {line.rank for line in run.lines()} == {0, 1}
        assert {line.world for line in run.lines()} == {2}


@pytest.mark.slow
def test_a_trainer_saves_as_it_is_stopped_and_resumes_from_a_whole_checkpoint() -> None:
    with Running("hf.py", "--steps", "4000", "--told", level="told", conf=CONF) as run:
        run.job.start("n0", "n1")
        run.trains(2, steps=15)
        run.until(lambda: run.job.ask("n0", "status")["step"] > 10, "steps in the status")
        run.job.ask("n0", "stop")
        assert set(run.ends()) == {STOPPED}
        newest = max(line.step for line in run.lines())
        assert elasticrl.hf.latest(run.saves) == str(run.saves / f"checkpoint-{newest}")
        # A save that was cut short is passed over.
        torn = run.saves / f"checkpoint-{newest + 10}"
        torn.mkdir()
        (torn / "model.safetensors").write_bytes(
            (run.saves / f"checkpoint-{newest}" / "model.safetensors").read_bytes()[:-9]
        )
        goes_on(run, newest)


def goes_on(run: Running, newest: int) -> None:
    """Started again, the job makes the step after the newest, on both nodes."""
    at = run.lines()[-1].at
    run.job.start("n0", "n1")
    run.trains(2, after=at)
    assert min(line.step for line in run.lines(at)) == newest + 1
    run.job.ask("n0", "stop")
    run.ends()
    run.job.check()


def test_the_scripts_of_these_tests_run_under_torchrun(tmp_path: os.PathLike[str]) -> None:
    """What is claimed is that they are ordinary."""
    history = f"{tmp_path}/history"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    more = [str(HERE / "told.py"), "--steps", "3", "--save", str(tmp_path), "--history", history]
    subprocess.run([*command, *more], check=True, timeout=120)
    with open(history) as lines:  # noqa: PTH123
        assert len(lines.readlines()) == 6


@pytest.mark.slow
def test_a_lightning_trainer_saves_as_it_is_stopped_and_goes_on_from_there() -> None:
    if os.environ.get("ELASTICRL_HF") != "required":  # `make hf` has it: that it is missing there is a failure
        pytest.importorskip("lightning.pytorch")
    with Running("lit.py", level="told", conf=CONF) as run:
        run.job.start("n0", "n1")
        run.trains(2, steps=15)
        run.until(lambda: run.job.ask("n0", "status")["step"] > 10, "steps in the status")
        run.job.ask("n0", "stop")
        assert set(run.ends()) == {STOPPED}
        newest = max(line.step for line in run.lines())
        assert elasticrl.lightning.latest(run.saves) == str(run.saves / "leaving.ckpt")
        goes_on(run, newest)
