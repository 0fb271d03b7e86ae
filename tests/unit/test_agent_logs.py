"""No log is worth a worker: what becomes of output where its folder takes nothing new."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elasticrl.agent.logs import ATTEMPTS, WARM, Logs
from elasticrl.base.trim import trim


def logs_in(folder: Path, keep: int = 5) -> Logs:
    return Logs(folder, limit_bytes=10, keep=keep)


def test_a_rank_keeps_its_file_while_there_can_be_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logs = logs_in(tmp_path)
    one = logs.ranked(1, 0, logs.warm(1))
    assert one == tmp_path / "attempt_1" / "rank_0.log"
    (tmp_path / "attempt_2").write_text("no folder can be made here")
    (tmp_path / "attempt_3").write_text("nor here")
    assert logs.ranked(2, 0, one) == logs.ranked(3, 0, one) == one
    assert f"{tmp_path} takes nothing new (File exists)" in logs.problem
    assert len(caplog.records) == 1
    assert logs.ranked(4, 0, one) == tmp_path / "attempt_4" / "rank_0.log"
    assert not logs.problem


def test_a_log_that_cannot_be_moved_away_grows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logs = logs_in(tmp_path, keep=1)
    log, aside = tmp_path / "rank_0.log", tmp_path / "rank_0.log.1"
    log.write_text("more than it may be")
    aside.mkdir()
    for _ in range(3):
        assert not logs.rotate(log)
    assert log.exists()
    assert "takes nothing new" in logs.problem
    assert len(caplog.records) == 1
    aside.rmdir()
    assert logs.rotate(log)
    assert (aside.read_text(), logs.problem) == ("more than it may be", "")


def test_a_line_that_a_full_disk_does_not_take_is_lost_and_the_worker_is_not(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from elasticrl.contract.seat import open_log\n"
        "open_log('/dev/full'); print('lost', flush=True); print('lost too', file=sys.stderr, flush=True)\n"
        f"open_log({str(tmp_path / 'one.log')!r}); print('kept'); print('é', file=sys.stderr)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ, timeout=60)
    assert sorted((tmp_path / "one.log").read_text().split()) == ["kept", "é"]


def test_a_worker_whose_log_cannot_be_opened_writes_on_into_the_one_that_it_has(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder, none = tmp_path / "file" / "attempt_2", tmp_path / "there"
    none.mkdir()
    program = (
        "from elasticrl.contract.seat import open_log\n"
        f"open_log({str(tmp_path / 'one.log')!r}); print('a')\n"
        f"open_log({str(folder / 'rank_0.log')!r}); print('b')\n"
        f"open_log({str(none)!r}); print('c')\n"
        f"open_log({str(tmp_path / 'two.log')!r}); print('d')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ, timeout=60)
    one = (tmp_path / "one.log").read_text().splitlines()
    assert [line for line in one if len(line) == 1] == ["a", "b", "c"]
    assert sum("cannot be opened: " in line for line in one) == 2
    assert (tmp_path / "two.log").read_text() == "d\n"


def test_of_many_attempts_and_of_processes_that_never_got_a_rank_the_newest_are_kept(tmp_path: Path) -> None:
    # Found by reading: nothing ever removed a folder of a generation, nor what a spare said that crashes as it starts.
    logs = Logs(tmp_path, limit_bytes=1000, keep=2)
    present = tmp_path / "none"
    for generation in range(1, ATTEMPTS + 31):
        present = logs.ranked(generation, 0, present)
        logs.show(generation)
        present.write_text("a word")
    attempts = sorted(int(path.name.partition("_")[2]) for path in tmp_path.glob("attempt_*"))
    assert attempts == list(range(31, ATTEMPTS + 31))
    assert (tmp_path / "latest").resolve().name == f"attempt_{ATTEMPTS + 30}"
    logs.ranked(2, 0, present).write_text("begun anew in another store")  # as numbers, the older ones are the later
    logs.ranked(3, 0, present)
    assert (tmp_path / "attempt_2" / "rank_0.log").exists()
    begun = time.time() - 1000
    for number in range(WARM + 30):
        file = logs.warm(number)
        file.write_text("Traceback")
        os.utime(file, (begun + number, begun + number))
    left = {int(path.stem.rpartition("_")[2]) for path in (tmp_path / "warm").iterdir()}
    assert left == set(range(29, WARM + 30)), "and the one that is begun"


def test_a_log_that_others_write_begins_anew_when_it_is_too_long(tmp_path: Path) -> None:
    file = tmp_path / "agent.log"
    with file.open("ab", buffering=0) as writer:
        writer.write(b"old\n" * 100)
        assert not trim(file, 400)
        assert trim(file, 399)
        writer.write(b"new\n")
    assert file.read_bytes() == b"new\n"
    assert (tmp_path / "agent.log.1").read_bytes() == b"old\n" * 100
    assert not trim(tmp_path / "none", 1)
