import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chaos.patience import patience
from elasticrl.base.process import life
from elasticrl.contract.beats import FIRST, HALF, NEARER_S, RESTORES_S, Beat, Page, Snapshot, Stage, pack, unpack
from elasticrl.contract.model import OUTSIDE


def test_a_reader_sees_what_the_worker_wrote_last(tmp_path: Path) -> None:
    page, beat = Page(tmp_path / "page", create=True), Beat(tmp_path / "page")
    beat.joining(generation=14, born=12, resume=1260)
    beat.phase("rollout")
    beat.collective(88412, "allreduce", 4096)
    beat.saved(1260, "step-00001260")
    seen = page.read()
    assert seen is not None
    assert (seen.generation, seen.born, seen.step, seen.phase, seen.pid) == (14, 12, 1260, "rollout", os.getpid())
    assert (seen.collective, seen.op, seen.bytes, seen.waiting) == (88412, "allreduce", 4096, True)
    assert (seen.saved, seen.manifest, seen.state) == (1260, "step-00001260", Stage.JOINING)
    beat.arrived()
    beat.sealed(1261, 904)
    seen = page.read()
    assert seen is not None
    assert (seen.step, seen.waiting, seen.state, seen.bytes) == (1261, False, Stage.TRAINING, 5000)


FULL = """
import subprocess, sys
from pathlib import Path
from elasticrl.contract.beats import Page

disk = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], check=True)
(disk / "other").write_bytes(b"x" * (60 << 10))
try:
    for number in range(64):
        Page(disk / f"{number}.page", create=True)
except OSError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_page_for_which_there_is_no_memory_is_an_error_with_a_name_and_ends_nobody(tmp_path: Path) -> None:
    command = ["unshare", "-m", sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert re.match(r"\[Errno 28\] No space left on device: '.*\.page'", done.stdout)


def test_who_puts_its_state_back_waits_for_others_until_it_is_there_whatever_comes_through_meanwhile(
    tmp_path: Path,
) -> None:
    # Found by reading: who hashed a large checkpoint after the first collective of its generation was killed as one that hangs.
    page, beat = Page(tmp_path / "page", create=True), Beat(tmp_path / "page")

    def waits() -> bool:
        seen = page.read()
        assert seen is not None
        return seen.waiting

    beat.joining(generation=2, born=1, resume=7)
    with beat.waiting():
        beat.collective(1, "allgather")
        beat.arrived()
        assert waits()
        beat.phase("disks")
        beat.phase("reform")
        with beat.waiting():
            pass
        assert waits()
    beat.training()
    assert not waits()
    with beat.waiting():
        beat.still(OUTSIDE)  # that is waited for alone: others would wait for this one
        assert not waits()
    beat.phase("update")
    assert not waits()


def test_state_that_is_put_back_comes_nearer_with_each_part_until_the_worker_trains() -> None:
    beat = Beat()
    beat.joining(2, 2, 0)
    beat.nearer()
    beat.restoring()
    beat.nearer()
    assert beat.now.nearer == 0.0, "it may be over in a moment"
    time.sleep(1.1 * RESTORES_S)
    beat.nearer()
    first = beat.now
    assert first.nearer == first.since > 0.0, "the phase's budget counts from here"
    beat.nearer()
    assert beat.now is first, "what was told just now is not told again"
    time.sleep(1.1 * NEARER_S)
    beat.nearer()
    assert beat.now.nearer > first.nearer
    beat.training()
    beat.nearer()
    assert beat.now.nearer == 0.0


def test_who_is_through_with_a_wait_outside_is_at_work_again_whatever_follows(tmp_path: Path) -> None:
    # Found by reading: what followed had the budget of the wait, and hid that others were silent.
    page, beat = Page(tmp_path / "page", create=True), Beat(tmp_path / "page")

    def seen() -> tuple[str, bool]:
        now = page.read()
        assert now is not None
        return now.phase, now.waiting

    beat.phase("sync")
    with beat.alone():
        begun = beat.now.since
        assert seen() == ("sync", False)
    assert beat.now.since == begun, "it said nothing of a wait"
    with beat.alone():
        for _ in range(2):
            beat.still(OUTSIDE)
            assert seen() == (OUTSIDE, False)
        said = beat.now.since
    assert seen() == ("sync", False)
    assert said <= beat.now.since <= time.monotonic()
    assert "sync" in dict(beat.now.spent)
    assert OUTSIDE not in dict(beat.now.spent), "that is nobody's work"
    beat.still(OUTSIDE)
    beat.collective(7, "allgather")
    assert seen() == ("sync", True)
    beat.arrived()
    beat.still(OUTSIDE)
    with beat.waiting():
        assert seen() == ("sync", True)
    beat.still(OUTSIDE)
    beat.sealed(3)
    assert seen() == ("sync", False)
    beat.still(OUTSIDE)
    with beat.within("evaluate"):
        assert seen() == ("evaluate", False)
    assert seen() == ("sync", False)
    with beat.alone():
        beat.still(OUTSIDE)
        beat.parked(2)
    assert seen() == ("parked", False)


def test_what_was_waited_for_others_is_told_apart_until_the_next_phase(tmp_path: Path) -> None:
    beat, page = Beat(tmp_path / "beat"), Page(tmp_path / "beat")
    beat.phase("update")
    told = []
    for _ in range(2):
        beat.collective(1, "allreduce")
        time.sleep(0.02)
        with beat.waiting():
            beat.collective(2, "allgather")
            beat.arrived()
            time.sleep(0.02)
        time.sleep(0.02)  # its own work
        told.append(page.read())
    first, second = told
    assert first is not None
    assert second is not None
    assert not second.waiting
    assert 0.04 <= first.waited_s < second.waited_s - 0.03
    assert second.waited_s < time.monotonic() - second.since - 0.03
    beat.phase("sync")
    now = page.read()
    assert now is not None
    assert now.waited_s == 0.0


def test_a_page_that_says_nothing_new_is_the_same_beat(tmp_path: Path) -> None:
    page, beat = Page(tmp_path / "page", create=True), Beat(tmp_path / "page")
    for step in range(3):
        beat.sealed(step)
        seen = page.read()
        assert seen is not None
        assert seen.step == step
        assert page.read() is seen


def test_nothing_is_read_before_the_first_beat(tmp_path: Path) -> None:
    assert Page(tmp_path / "page", create=True).read() is None


def test_whoever_only_reads_makes_no_page_of_a_worker_that_has_gone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Page(tmp_path / "page")
    assert list(tmp_path.iterdir()) == []


def test_a_worker_killed_in_the_middle_of_a_write_leaves_its_last_whole_beat(tmp_path: Path) -> None:
    page, beat = Page(tmp_path / "page", create=True), Beat(tmp_path / "page")
    beat.sealed(7)
    newest = max((FIRST, FIRST + HALF), key=lambda at: (unpack(page._memory[at : at + HALF]) or (0,))[0])
    torn = FIRST + HALF if newest == FIRST else FIRST  # the half that the next beat goes to
    half_written = pack(99, Snapshot(step=8))[:40]
    page._memory[torn : torn + len(half_written)] = half_written
    seen = page.read()
    assert seen is not None
    assert seen.step == 7


def test_a_reader_never_sees_a_torn_beat_of_a_running_writer(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from elasticrl.contract.beats import Beat\n"
        "b = Beat(Path(sys.argv[1]))\n"
        "for n in range(10**9): b.collective(n, f'op{n}')\n"
    )
    page = Page(tmp_path / "page", create=True)
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "page")]) as writer:
        deadline = time.monotonic() + patience(20)
        seen = 0
        while seen < 2000 and time.monotonic() < deadline:
            beat = page.read()
            if beat is not None and beat.op:
                assert beat.op == f"op{beat.collective}"
                seen += 1
        writer.kill()
    assert seen == 2000


def test_a_long_name_is_cut_at_a_whole_character(tmp_path: Path) -> None:
    page, beat = Page(tmp_path / "page", create=True), Beat(tmp_path / "page")
    beat.phase("ü" * 40)
    seen = page.read()
    assert seen is not None
    assert seen.phase == "ü" * 16


def test_a_change_of_state_is_announced_and_a_step_is_not(tmp_path: Path) -> None:
    beat = Beat(tmp_path / "page")
    told: list[Stage] = []
    beat.changed = lambda: told.append(beat.now.state)
    beat.joining(1, 1, 0)
    beat.training()
    for step in range(1, 10):
        beat.phase("update")
        beat.sealed(step)
    beat.parked(2)
    assert told == [Stage.JOINING, Stage.TRAINING, Stage.PARKED]


def test_a_reform_keeps_the_newer_step_in_memory_and_a_fresh_process_starts_from_the_commit() -> None:
    survivor = Beat()
    survivor.joining(1, 1, 0)
    survivor.sealed(17)
    survivor.joining(2, 1, resume=10)
    assert survivor.now.step == 17
    fresh = Beat()
    fresh.joining(2, 2, resume=10)
    assert fresh.now.step == 10


def test_the_kernel_says_whether_a_process_is_stopped_and_when_it_started() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        first = life(process.pid)
        assert first is not None
        assert not first.stopped
        os.kill(process.pid, 19)
        deadline = time.monotonic() + patience(5)
        while not (now := life(process.pid)) or not now.stopped:
            assert time.monotonic() < deadline
        assert now.started == first.started
        process.kill()
    assert life(process.pid) is None


@pytest.mark.parametrize("name", ["", "rollout", "é" * 16])
def test_a_copy_says_what_went_in(name: str) -> None:
    beat = Snapshot(phase=name, step=3, state=Stage.DONE, since=1.5, restore_s=0.25)
    assert unpack(pack(5, beat)) == (5, beat)


def test_what_each_phase_of_a_step_of_ppo_has_taken_is_told(tmp_path: Path) -> None:
    phases = (
        "rollout",
        "reward",
        "logprobs",
        "ref",
        "values",
        "advantage",
        "update",
        "sync",
        "save",
        "baseline",
        "evaluate",
    )
    beat, page = Beat(tmp_path / "beat"), Page(tmp_path / "beat")
    beat.joining(1, 1, 0)
    beat.training()
    for phase in phases:
        beat.phase(phase)
    beat.sealed(1)
    seen = page.read()
    assert seen is not None
    assert set(dict(seen.spent)) == set(phases)
