"""Below job.level exact: what is seen of a script from outside, what its text says of it, and what its recovery costs."""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import pytest

from elasticrl.agent.gather import Beating, Usual, look
from elasticrl.agent.outside import Outside
from elasticrl.agent.spec import Spec, common_env
from elasticrl.base.process import Life
from elasticrl.cli.script import Script, level_of
from elasticrl.contract.beats import Snapshot, Stage
from elasticrl.contract.events import Event, Seen, Workers
from elasticrl.contract.level import GIVES, MEANS, Level
from elasticrl.contract.model import UNTOLD, Exit, Member, Milestone, Phase, Plan, Rung, Seat, View, Work
from elasticrl.contract.orders import Place
from elasticrl.contract.seat import rank_env
from elasticrl.contract.settings import Timeouts
from elasticrl.core.node.suspect import Budgets
from elasticrl.diagnose.program import imports, unfit
from elasticrl.runtime.misuse import Misuse
from elasticrl.status.recovery import Stages


def alive(cpu_s: float, *, stopped: bool = False) -> Life:
    return Life(pid=7, started=1, stopped=stopped, cpu_s=cpu_s, memory=1)


def test_every_level_has_its_means_and_names_the_next_one() -> None:
    assert set(MEANS) == set(GIVES) == set(Level)
    assert [level for level in Level if not GIVES[level]] == [Level.EXACT]
    assert all(len(text) < 256 and "docs/LEVELS.md" in text for text in GIVES.values() if text)


def test_a_script_lives_as_long_as_it_computes_or_writes() -> None:
    beat = Snapshot(phase=UNTOLD, since=0.0, state=Stage.TRAINING)
    seen = Outside().after(0.0, {7: (alive(1.0), 10)})
    for now, cpu_s, written, since in (
        (1.0, 1.5, 10, 1.0),  # it has computed
        (2.0, 1.51, 10, 1.0),  # its watchdogs have woken up, no more
        (3.0, 1.52, 11, 3.0),  # it has written a line
        (4.0, 1.53, 11, 3.0),
        (9.0, 1.58, 11, 3.0),
    ):
        seen = seen.after(now, {7: (alive(cpu_s), written)})
        assert seen.since(7, beat).since == since
    assert seen.after(10.0, {7: (alive(9.0, stopped=True), 11)}).since(7, beat).since == 3.0
    told = Snapshot(phase="train", since=2.5)
    assert seen.since(7, told) is told, "what it has told itself goes before"


@pytest.mark.parametrize(
    ("quiet_s", "stopped", "work", "waiting"),
    [(0.0, False, Work.TRAINING, None), (5.0, False, Work.STALLED, True), (0.0, True, Work.TRAINING, False)],
)
def test_a_quiet_script_is_stalled_only_where_that_is_asked_for(
    quiet_s: float, stopped: bool, work: Work, waiting: bool | None
) -> None:
    budgets = Budgets(settings=Timeouts(quiet_s=quiet_s, confirm_s=0.5))
    beat = Snapshot(generation=3, phase=UNTOLD, since=10.0, state=Stage.TRAINING)
    found = look([Beating(slot=0, beat=beat, stopped=stopped, script=True)], 3, budgets, 16.0)
    assert found.work is work
    assert (found.stall.waiting if found.stall else None) is waiting


def test_how_long_a_script_was_quiet_teaches_nothing() -> None:
    usual = Usual(budgets=Budgets(settings=Timeouts()))
    for since in (1.0, 2.0, 3.0):
        beat = Snapshot(generation=3, phase=UNTOLD, since=since, state=Stage.TRAINING)
        usual = usual.learn([Beating(slot=0, beat=beat, script=True)], since + 0.1)
    assert not usual.budgets.took


SCRIPT = '''\
"""A script."""
from __future__ import annotations
import json, torch.nn as nn
from transformers import Trainer, TrainingArguments
import beside
from pathlib import Path

os = 1
import not_ahead
'''


def test_a_spare_imports_what_the_script_does_at_its_head_but_for_its_own_modules(tmp_path: Path) -> None:
    (tmp_path / "beside.py").touch()
    (tmp_path / "train.py").write_text(SCRIPT)
    found = imports(str(tmp_path / "train.py"))
    head = ("json", "torch.nn", "transformers:Trainer", "transformers:TrainingArguments", "pathlib:Path")
    assert found == (*head, "torch._dynamo", "elasticrl.hf.early"), "and what transformers imports at its first use"
    assert imports(str(tmp_path / "gone.py")) == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import beside, sys\nfrom os import path\n", ""),
        ("try:\n    import no_such_thing\nexcept ImportError:\n    pass\n", ""),
        ("def f():\n    import no_such_thing\n", ""),
        (
            "import no_such_thing, beside\nfrom nor_this.one import it\n",
            "needs the modules no_such_thing, nor_this, which are",
        ),
        ("from . import relative\n", ""),
        ("x = (\n", "line 1 is not Python that can be run ('(' was never closed)"),
    ],
)
def test_a_script_that_cannot_run_is_known_by_its_text(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "beside.py").touch()
    (tmp_path / "train.py").write_text(text)
    said = unfit(tmp_path / "train.py")
    assert (why in said) if why else said == ""


def test_a_script_has_torchruns_variables_and_none_that_change_what_it_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    one = common_env(Spec(job="j", node="n", program=("t.py",), log_dir="l", script=True, threads=4))
    many = common_env(Spec(job="j", node="n", program=("t.py",), log_dir="l", script=True, slots=2, env={"A": "b"}))
    assert "OMP_NUM_THREADS" not in one
    assert (many["OMP_NUM_THREADS"], many["TORCH_NCCL_ASYNC_ERROR_HANDLING"], many["A"]) == ("1", "1", "b")
    assert not {"CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC", "MKL_NUM_THREADS"} & one.keys()


def test_a_rank_has_what_torchrun_tells_it() -> None:
    place = Place(
        generation=7, born=7, rank=2, slot=1, slots=2, world=4, all_lanes=4, endpoint="10.0.0.1:29500",
        nodes=("n0", "n0", "n1", "n1"), rung=Rung.RESTART,
    )  # fmt: skip
    said = rank_env(replace(place, rank=3))
    assert {name: said[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")} == {
        "RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1", "ROLE_RANK": "3",
    }  # fmt: skip
    assert {name: said[name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")} == {
        "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "ROLE_WORLD_SIZE": "4",
    }  # fmt: skip
    assert (said["MASTER_ADDR"], said["MASTER_PORT"]) == ("10.0.0.1", "29500")
    assert (said["TORCHELASTIC_RESTART_COUNT"], said["ELASTICRL_GENERATION"]) == ("7", "7")
    first = rank_env(replace(place, rung=Rung.START))
    assert (first["TORCHELASTIC_RESTART_COUNT"], first["ELASTICRL_GENERATION"]) == ("0", "7"), "as torchrun begins"


ME = Member(node="n0", incarnation=1)


def plan_of(generation: int, rung: Rung = Rung.START) -> Plan:
    return Plan(generation=generation, phase=Phase.TRAIN, seats=(Seat(member=ME, born=generation),), rung=rung)


def logged(at: int, read: float) -> Milestone:
    return Milestone(unit="step", at=at, read=read)


def recovered(level: Level, steps: list[int], logs: Sequence[Milestone | None] = ()) -> tuple[float, int | None] | None:
    """Seconds and lost steps of a recovery, of a script that tells these steps after it was started again; its log tells these
    milestones, the first of them before that.
    """
    first, *later = logs or (None,)
    stages, means, plan = Stages(), MEANS[level], plan_of(1)
    stages, _ = stages.after(Seen(now=1.0, view=View(plan=plan)), plan, ME, means=means)
    told = 20 if means.tells else 0
    trains = Workers(now=2.0, work=Work.TRAINING, generation=1, step=told, milestone=first)
    stages, _ = stages.after(trains, plan, ME, means=means)
    left = Exit(generation=1, slot=0, step=told, cause="signal 9 (SIGKILL)", own=False, signal=9)
    failed = Workers(now=10.0, work=Work.FAILED, generation=1, step=told, exit=left, milestone=first)
    stages, _ = stages.after(failed, plan, ME, means=means)
    plan = plan_of(2, Rung.RESTART)
    stages, _ = stages.after(Seen(now=10.5, view=View(plan=plan)), plan, ME, means=means)
    for now, (step, milestone) in enumerate(zip_longest(steps, later[: len(steps)]), 11):
        event = Workers(now=float(now), work=Work.TRAINING, generation=2, step=step, milestone=milestone)
        stages, done = stages.after(event, plan, ME, means=means)
        if done is not None:
            return done.total_s, done.lost
    return None


def test_a_scripts_recovery_is_over_with_its_first_word_and_says_what_was_lost() -> None:
    assert recovered(Level.SUPERVISED, [0, 0]) == (1.0, None), "it never says a word: it is over when it runs"
    mine = [logged(20, 9.0), None, logged(20, 9.0), logged(16, 13.0)]
    assert recovered(Level.SUPERVISED, [0, 0, 0], mine) == (3.0, None), "its log told of steps, and does again"
    assert recovered(Level.TOLD, [0, 0, 0]) is None
    assert recovered(Level.TOLD, [0, 0, 16]) == (3.0, 5), "steps 16 to 20 are made again"
    assert recovered(Level.TOLD, [0, 21]) == recovered(Level.KEPT, [0, 21]) == (2.0, 0)


def test_a_script_that_dies_again_before_its_log_goes_on_has_had_two_faults() -> None:
    stages, means, plan = Stages(), MEANS[Level.SUPERVISED], plan_of(1)
    done = None

    def after(event: Event) -> None:
        nonlocal stages, done
        stages, done = stages.after(event, plan, ME, means=means)

    after(Seen(now=1.0, view=View(plan=plan)))
    after(Workers(now=2.0, work=Work.TRAINING, generation=1, milestone=logged(20, 2.0)))
    left = Exit(generation=1, slot=0, step=0, cause="signal 9 (SIGKILL)", own=False, signal=9)
    after(Workers(now=10.0, work=Work.FAILED, generation=1, exit=left))
    plan = plan_of(2, Rung.RESTART)
    after(Seen(now=10.5, view=View(plan=plan)))
    after(Workers(now=11.0, work=Work.TRAINING, generation=2))
    assert done is None, "its log has not gone on"
    after(Workers(now=500.0, work=Work.FAILED, generation=2, exit=replace(left, generation=2)))
    assert done is not None
    assert (done.generation, done.lost, stages.sign_at) == (2, None, 500.0)


def test_a_process_that_a_script_has_forked_says_nothing() -> None:
    """A loader's worker may import what calls beat()."""
    import elasticrl
    from elasticrl.contract.beats import Beat
    from elasticrl.contract.seat import OwnSeat

    before = OwnSeat._here
    try:
        seat = object.__new__(OwnSeat)
        seat.beat, seat.scripted = Beat(), True
        OwnSeat._here = seat
        elasticrl.beat(step=4)
        assert seat.beat.now.step == 4
        child = os.fork()
        if child == 0:
            elasticrl.beat(step=9)
            os._exit(seat.beat.now.step)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    finally:
        OwnSeat._here = before


def test_beats_need_no_torch() -> None:
    import subprocess

    code = "import elasticrl, sys; elasticrl.beat(step=1); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_script_or_module_runs_at_the_level_of_what_it_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import elasticrl.hf\nclass T(elasticrl.hf.Elastic, object): ...\n")
    (tmp_path / "broken.py").write_text("x = (")
    assert level_of(Script(program="train.py")) == level_of(Script(program="train", module=True)) == "exact"
    assert {level_of(Script(program=name)) for name in ("broken.py", "gone.py")} == {"supervised"}


def test_a_script_that_joins_at_another_level_is_told_so_at_once(tmp_path: Path) -> None:
    from elasticrl.runtime import join

    (tmp_path / "job.yaml").write_text(
        "job: {name: j, level: supervised, program: train.py}\nstore: {embedded: true}\n"
    )
    with pytest.raises(
        Misuse, match=r"job.level is supervised. Set job.level: exact, or start it with elasticrl run --level"
    ):
        join(tmp_path / "job.yaml")
