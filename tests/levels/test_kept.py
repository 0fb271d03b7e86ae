"""Scripts whose state is kept in memory: no fault costs a step that was kept, no disk is read, and the bits stay the same."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.levels.rides import TRAINERS, environ, models
from tests.levels.scripts import HERE, NODES, Running

pytestmark = pytest.mark.timeout(600)
CONF: dict[str, dict[str, Any]] = {
    "vault": {"copies": 1},
    "timeouts": {"floor": "3s", "slack": 10, "default_phase": "60s", "confirm": "500ms"},
    "agent": {"env": {"OMP_NUM_THREADS": "1"}},  # as torchrun sets it
}
LAST = ("--steps", "100000", "--last", "{folder}/last")
SCRIPT = (*LAST, "--die", "{folder}/die")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def undisturbed(script: str, folder: Path, steps: int, world: int, *more: str) -> dict[int, str]:
    """The digests of all steps of the same script under torchrun, where it finds no elasticrl.

    Its exit code says nothing: gloo's threads now and then abort a process that has done all its work and is ending.
    """
    (folder / "own").mkdir()
    (folder / "last").write_text(str(steps))
    own = ["--save", str(folder / "own"), "--history", str(folder / "steps"), "--last", str(folder / "last")]
    words = ["--steps", "100000", *own, *more]
    subprocess.run([*TORCHRUN, str(world), str(HERE / script), *words], timeout=240)
    rows = dict(digests(folder, world))
    assert set(range(1, steps + 1)) <= set(rows), "all steps were made"
    return rows


def digests(folder: Path, world: int) -> list[tuple[int, str]]:
    """What rank 0 has written down: step and digest of the state, in a world of this size."""
    rows = [line.split() for line in (folder / "digests").read_text().splitlines()]
    return [(int(step), digest) for size, step, digest in rows if int(size) == world]


def goes_on(run: Running, world: int, at: float, *, copied: bool = False) -> float:
    """After a fault at this time: no step that was kept is made again. `copied`: it had to be on another node too, for which
    the next step waits. When a step of the new gang was made.
    """
    before = [line for line in run.lines() if line.at <= at]
    pids = {line.pid for line in before}
    by_rank = {line.rank: line.step for line in before if line.pid in {last.pid for last in before[-len(pids) :]}}
    newest = min(by_rank[rank] for rank in {line.rank for line in before[-3:]})
    run.trains(world, after=at + 0.1)
    again = [line for line in run.lines(at) if line.pid not in pids]
    first = min(line.step for line in again)
    assert newest - copied <= first <= newest + 2, (newest, first)
    return again[-1].at


def one_dies_and_then_all(run: Running) -> None:
    """A worker of two nodes, and then all workers."""
    run.job.start("n0", "n1")
    run.trains(2, steps=5)
    run.warm()
    goes_on(run, 2, run.hit("n1"))
    run.warm()
    at = time.monotonic()
    for node in ("n0", "n1"):
        run.hit(node)
    goes_on(run, 2, at)


def finished(run: Running, more: int = 20) -> int:
    """Let the job end after some more steps; how many there were."""
    last = max(line.step for line in run.lines()) + more
    (run.job.folder / "last").write_text(str(last))
    assert set(run.ends()) == {0}
    assert {line.step for line in run.lines()} == set(range(1, last + 1)), "each step was made"
    assert [path for path in run.saves.rglob("*") if path.is_file()] == [], "nothing is on the disk"
    run.job.check()
    return last


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_no_death_of_workers_costs_a_step_or_changes_a_bit(kind: str, tmp_path: Path) -> None:
    more = ("--fsdp",) if kind == "fsdp" else ()
    with Running("kept.py", *SCRIPT, *more, level="kept", conf=CONF) as run:
        run.job.start(*NODES)
        run.trains(3, steps=5)
        run.warm()
        goes_on(run, 3, run.hit("n1"))
        run.warm()
        at = time.monotonic()
        for node in NODES:  # all workers of all nodes
            run.hit(node)
        goes_on(run, 3, at)
        run.warm()
        die = run.job.folder / "die"
        die.touch()  # in the middle of a step that is being kept
        goes_on(run, 3, run.until(lambda: not die.exists() and time.monotonic(), "a death while the state is read"))
        picture = run.job.ask("n0", "status")
        assert picture["level"] == "kept"
        assert any("Level exact" in line for line in picture["advice"])
        last = finished(run)
        as_if_nothing = undisturbed("kept.py", tmp_path, last, 3, *more)
        assert [row for row in digests(run.job.folder, 3) if as_if_nothing[row[0]] != row[1]] == []


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_the_death_of_a_node_costs_no_step_and_the_state_fits_another_world(kind: str) -> None:
    more = ("--fsdp",) if kind == "fsdp" else ()
    with Running("kept.py", *SCRIPT, *more, level="kept", conf=CONF) as run:
        run.job.start(*NODES)
        run.trains(3, steps=5)
        at = run.kill_node("n2")
        goes_on(run, 2, at, copied=True)
        before = max(line.step for line in run.lines())
        run.job.start("n2")
        run.trains(3, after=run.lines()[-1].at)
        first = min(line.step for line in run.lines() if line.world == 3 and line.step > before)
        assert first <= max(line.step for line in run.lines() if line.world == 2) + 1
        finished(run)


def test_the_script_runs_under_torchrun_and_says_what_cannot_be_kept(tmp_path: Path) -> None:
    assert len(undisturbed("kept.py", tmp_path, 3, 2)) == 3


@pytest.mark.slow
def test_a_trainer_goes_on_from_memory_with_the_same_samples_and_bits(tmp_path: Path) -> None:
    with Running("hf.py", "--steps", "100000", "--last", "{folder}/last", "--kept", level="kept", conf=CONF) as run:
        one_dies_and_then_all(run)
        last = finished(run, 15)
        as_if_nothing = undisturbed("hf.py", tmp_path, last, 2, "--kept")
        assert [row for row in digests(run.job.folder, 2) if as_if_nothing[row[0]] != row[1]] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_trl_goes_on_from_memory_with_the_same_rollouts_and_bits(kind: str, tmp_path: Path) -> None:
    if os.environ.get("ELASTICRL_HF") != "required":  # `make hf` has it: that it is missing there is a failure
        pytest.importorskip("trl")
    from tests.hf.hf_job import model_of

    model_of(tmp_path, kind)
    own = (kind, "--model", str(tmp_path))
    with Running("kept_trl.py", *own, "--last", "{folder}/last", level="kept", conf=CONF) as run:
        run.job.start("n0", "n1")
        run.trains(2, steps=4)
        run.warm()
        goes_on(run, 2, run.hit("n1"))
        last = finished(run, 6)
        as_if_nothing = undisturbed("kept_trl.py", tmp_path, last, 2, *own)
        assert [row for row in digests(run.job.folder, 2) if as_if_nothing[row[0]] != row[1]] == []


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """Another trainer's script. `rows`: of a pass over its data, which it writes down; 0: it writes none down.

    Example: Other(script="kept_accel.py", name="accelerate", rows=192)
    """

    script: str
    name: str  # in the table of trainers
    rows: int = 0
    args: tuple[str, ...] = ()

    def here(self, folder: Path) -> tuple[str, ...]:
        """Its arguments; a skip where it is not installed."""
        trainer = TRAINERS[self.name]
        if trainer.lacks and os.environ.get("ELASTICRL_HF") != "required":  # else that it is missing is a failure
            pytest.skip(trainer.lacks)
        assert not trainer.lacks
        model = ("--model", str(models(folder, trainer) / trainer.model)) if trainer.model is not None else ()
        return (*self.args, *model)


ACCELERATE = Other(script="kept_accel.py", name="accelerate", rows=192)
LIGHTNING = Other(script="kept_lit.py", name="lightning", rows=192)
TITAN = Other(script="titan.py", name="torchtitan", args=("--kept",))
PPO = Other(script="trl_ppo.py", name="ppo", args=("--kept",))
OTHERS = pytest.mark.parametrize("other", [ACCELERATE, LIGHTNING, TITAN, PPO], ids=lambda other: other.name)


@pytest.mark.slow
@OTHERS
def test_deaths_of_workers_change_no_bit_and_cost_no_step(other: Other, tmp_path: Path) -> None:
    args = other.here(tmp_path)
    with environ(TRAINERS[other.name]), Running(other.script, *args, *LAST, level="kept", conf=CONF) as run:
        one_dies_and_then_all(run)
        last = finished(run, 40 if other.rows else 8)
        as_if_nothing = undisturbed(other.script, tmp_path, last, 2, *args)
        assert [row for row in digests(run.job.folder, 2) if as_if_nothing[row[0]] != row[1]] == []


@pytest.mark.slow
@OTHERS
def test_the_death_of_a_node_and_its_return_cost_no_step_and_no_sample(other: Other, tmp_path: Path) -> None:
    args = other.here(tmp_path)
    with environ(TRAINERS[other.name]), Running(other.script, *args, *LAST, level="kept", conf=CONF) as run:
        run.job.start(*NODES)
        run.trains(3, steps=5)
        goes_on(run, 2, run.kill_node("n2"), copied=True)
        run.job.start("n2")
        run.trains(3, after=run.lines()[-1].at)
        finished(run, 60 if other.rows else 8)
        passes = used(run.job.folder) if other.rows else []
        assert len(passes) >= 3 or not other.rows
        for rows in passes[:-1]:
            assert set(rows) == set(range(other.rows)), "each sample of a pass is used"
            # Twice come those of a step that a fault has cut short, and up to a batch where another size begins.
            assert len(rows) - other.rows <= 2 * (2 * 2 * 3 + 2)


def used(folder: Path) -> list[list[int]]:
    """The rows that were trained on in each pass, by all ranks."""
    found: dict[int, list[int]] = {}
    for line in (folder / "rows").read_text().splitlines():
        _, number, *rows = map(int, line.split())
        found.setdefault(number, []).extend(rows)
    return [found[number] for number in sorted(found)]
