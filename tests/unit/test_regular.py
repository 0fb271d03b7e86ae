"""A pipe, or a folder, that bears the name of a file of a run: who reads the run says so, and does not wait for ever."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elasticrl.base.regular import open_regular, open_regular_text, read_regular
from elasticrl.base.started import last_line
from elasticrl.diagnose import incident, logs
from elasticrl.diagnose.tail import Growing
from elasticrl.report.read import read
from elasticrl.runtime.checkpoint.place import place
from elasticrl.runtime.checkpoint.shelf import listing
from elasticrl.runtime.chronicle import read as read_digests
from elasticrl.runtime.data.audit import audit

PIPES = (
    "job/ledger/n00-a-1.jsonl", "job/digests/n00-a-1.jsonl", "job/step-00000010-g1/manifest.json",
    "job/step-00000020-g1/COMMITTED", "job/step-00000020-g1/shard-0.data", "logs/n00.log", "logs/steps.jsonl",
    "logs/attempt_1/rank_0.log", "incidents/a.json", "history.jsonl", "state/job/n00/incidents/b.json",
    "state/job/n00/trace/t.jsonl", "rank_1.log.gz",
)  # fmt: skip
VERBS = {
    "report --text": ".", "audit": "job", "verify": "job", "checkpoint list": "job", "checkpoint verify": "job",
    "diagnose --log": "logs/n00.log", "diagnose": "rank_1.log.gz", "replay": "state/job/n00/trace/t.jsonl",
    "incidents --state-dir": "state", "support-bundle": ".",
}  # fmt: skip
WITHIN_S = 60.0  # for a verb that would otherwise wait for ever


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run in which every file is a pipe."""
    for name in PIPES:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(path)
    return tmp_path


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in (tmp_path / "pipe", tmp_path / "link", tmp_path, Path("/dev/zero")):
        for read_it in (open_regular, open_regular_text, read_regular):
            with pytest.raises(OSError, match="not a regular file"):
                read_it(name)
    (tmp_path / "file").write_text("ü\n")
    (tmp_path / "there").symlink_to("file")
    assert read_regular(tmp_path / "there") == "ü\n".encode()
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="large"):
        read_regular(tmp_path / "sparse")


def test_no_reader_of_a_run_waits_for_a_pipe(run: Path) -> None:
    assert last_line(run / "logs/n00.log") == ""
    assert Growing(run / "logs/n00.log").gained() == b""
    assert len(incident.found([run / "incidents"])[1]) == 1
    assert logs.read([run]).files == ()
    assert len(logs.read([run / "logs/n00.log", run / "rank_1.log.gz"]).unread) == 2
    left = read(run)
    assert left.log.events == 0
    for read_it in (audit, read_digests):
        with pytest.raises(OSError, match="not a regular file"):
            read_it(run / "job")
    list(listing(place(str(run / "job"))))


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_waits_for_a_pipe(verb: str, run: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "elasticrl.cli.main", *verb.split(), str(run / VERBS[verb])], capture_output=True, text=True,
        timeout=WITHIN_S, check=False, cwd=run, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stdout + done.stderr
