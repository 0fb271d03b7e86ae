"""No log is worth a worker: what becomes of output where its folder takes nothing new."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elasticrl.agent.logs import Logs


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
        "from elasticrl.agent.seat import open_log\n"
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
        "from elasticrl.agent.seat import open_log\n"
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
