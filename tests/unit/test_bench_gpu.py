"""The driver of `make gpu`: parts have budgets, one that hangs is ended with its children and told, and results read back."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from bench.gpu import prepare, run
from bench.gpu.drive import MARK, Task, drive, marked
from bench.gpu.found import Part, Result, Row, dumped, loaded, told
from bench.gpu.say import Say
from elasticrl.base.process import life

ROOT = Path(__file__).parents[2]
#: Says a row, starts a child in a session of its own, and hangs with it.
HANGS = """
import subprocess, sys, time
from pathlib import Path
from bench.gpu.say import Say
rows, folder = map(Path, sys.argv[1:])
Say("cpu", rows, folder).row("began", "passed")
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
(folder / "child").write_text(str(child.pid))
def stands_here():
    time.sleep(600)
stands_here()
"""
SAYS = """
import sys
from pathlib import Path
from bench.gpu.say import Say
say = Say("cpu", Path(sys.argv[1]), Path(sys.argv[2]))
with say.check("right"):
    pass
with say.check("only with a card", on_card="there is none"):
    pass
say.figure("a step", 1.5, "s")
"""
FAILS = (
    SAYS
    + """
with say.check("wrong"):
    raise ValueError("4 is not 5")
say.row("after it", "passed")
"""
)


def task(name: str, program: str, limit_s: float = 20.0, stage: int = 0) -> Task:
    command = (sys.executable, "-c", program, "{rows}", "{folder}")
    return Task(
        name=name,
        title=f"what {name} shows",
        command=command,
        limit_s=limit_s,
        stage=stage,
        env={"PYTHONPATH": str(ROOT)},
    )


def alone(tmp_path: Path, program: str, limit_s: float = 20.0) -> Part:
    (part,) = drive([task("one", program, limit_s)], tmp_path, limit_s=60.0, told=lambda _: None)
    return part


def rows(part: Part) -> dict[str, str]:
    return {row.name: row.state for row in part.rows}


def test_a_part_that_hangs_is_ended_with_its_children_and_told_with_its_stack_and_the_others_run(tmp_path: Path):
    tasks = [task("hangs", HANGS, limit_s=2.0), task("next", SAYS, stage=1)]
    begun = time.monotonic()
    late, after = drive(tasks, tmp_path, limit_s=60.0, told=lambda _: None)
    assert time.monotonic() - begun < 25.0
    assert late.end == "late"
    assert rows(late) == {"began": "passed"}, "what it had found stands"
    assert "stands_here" in late.stacks["part.log"]
    child = int((tmp_path / "hangs" / "child").read_text())
    assert life(child) is None, "it has gone too, or waits to be reaped"
    assert after.end == "passed"


def test_a_failed_row_fails_its_part_with_its_last_words_and_later_rows_are_tried(tmp_path: Path):
    part = alone(tmp_path, FAILS)
    assert part.end == "failed"
    assert rows(part) == {
        "right": "passed", "only with a card": "not on cpu", "a step": "figure", "wrong": "failed", "after it": "passed",
    }  # fmt: skip
    (wrong,) = (row for row in part.rows if row.name == "wrong")
    assert wrong.said == "ValueError: 4 is not 5"
    assert "ValueError: 4 is not 5" in part.said


@pytest.mark.parametrize("program", ["raise SystemExit('no card')", "pass"])
def test_a_part_that_breaks_or_finds_nothing_has_failed(tmp_path: Path, program: str):
    assert alone(tmp_path, program).end == "failed"


def test_what_the_time_of_all_does_not_reach_is_said_not_to_have_run(tmp_path: Path):
    tasks = [task("first", "import time; time.sleep(600)", limit_s=2.0), task("second", SAYS, stage=1)]
    _, second = drive(tasks, tmp_path, limit_s=6.0, told=lambda _: None)
    assert (second.end, second.rows) == ("no time", ())


def test_parts_of_a_stage_run_side_by_side_and_no_other_process_is_found(tmp_path: Path):
    slow = "import time; time.sleep(1.5)\n" + SAYS
    begun = time.monotonic()
    found = drive([task(name, slow) for name in "abc"], tmp_path, limit_s=60.0, at_once=3, told=lambda _: None)
    assert [part.end for part in found] == ["passed"] * 3
    assert sum(part.took_s for part in found) > time.monotonic() - begun
    assert list(marked("a word that nobody has")) == []
    assert MARK not in os.environ


RESULT = Result(
    device="cpu", limit_s=420.0, took_s=301.5, machine={"processors": "2 x one"},
    parts=(
        Part(
            name="bits", title="the same digests", end="failed", took_s=30.0, limit_s=90.0, said="digests part",
            rows=(
                Row(name="fsdp, 3", state="failed", said="digests part"),
                Row(name="a step", state="figure", value=0.25, unit="s"),
                Row(name="NCCL", state="not on cpu", said="gloo carries it"),
            ),
        ),
        Part(name="zero", title="DeepSpeed", end="late", took_s=60.0, limit_s=60.0, stacks={"n0-1.log": "Thread 0x1\n  here"}),
    ),
)  # fmt: skip


def test_results_read_back_as_they_were_written_and_nothing_unknown_is_read():
    assert loaded(dumped(RESULT)) == RESULT
    assert not RESULT.good
    with pytest.raises(ValueError, match="'fine' is not how a row comes out"):
        loaded(dumped(RESULT).replace('"not on cpu"', '"fine"'))
    with pytest.raises(ValueError, match="'over' is not how a part ends"):
        loaded(dumped(RESULT).replace('"late"', '"over"'))


def test_the_text_says_what_failed_and_that_a_rehearsal_is_no_result_of_a_card():
    text = told(RESULT)
    assert text.startswith("make gpu on CPUs: a rehearsal, no result of a card: NOT all parts passed, 302 s of 420 s\n")
    for line in (
        "bits  failed  30 s of 90 s  1 failed, 1 figure, 1 not on cpu",
        "  a step   figure      0.25 s",
        "  n0-1.log was at:",
    ):
        assert line in text, text


def test_a_check_without_a_card_is_not_passed(tmp_path: Path):
    for device, state in (("cuda", "passed"), ("cpu", "not on cpu")):
        say = Say(device, tmp_path / device, tmp_path)
        with say.check("NCCL", on_card="there is none"):
            pass
        assert json.loads((tmp_path / device).read_text())["state"] == state
    assert not Say("cpu", tmp_path / "lacks", tmp_path).has("an engine", "there_is_no_such_package")
    assert json.loads((tmp_path / "lacks").read_text())["state"] == "missing"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_part_has_a_program_and_its_budgets_are_over_what_all_may_take_at_most_twice(device: str):
    """A part that needs all of its own time leaves some to the others."""
    found = run.tasks(device, [])
    assert [one.stage for one in found] == sorted(one.stage for one in found), "they run in this order"
    for one in found:
        assert (ROOT / "bench" / "gpu" / f"{one.name}.py").exists()
    stages = {one.stage: max(two.limit_s for two in found if two.stage == one.stage) for one in found}
    assert sum(stages.values()) < 2 * 420


def test_wheels_are_named_with_their_pins():
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert len(prepare.pins((*prepare.NAMES, *prepare.BUILT), constraints)) == len(prepare.NAMES) + len(prepare.BUILT)
