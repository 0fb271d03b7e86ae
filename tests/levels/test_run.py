"""`elasticrl run -- train.py`: a script from a shell, without a configuration, and what is said of one that cannot run."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.live.proc import all_pids, command_line
from chaos.patience import patience
from elasticrl.daemon.client import ask

pytestmark = pytest.mark.timeout(240)
SCRIPT = Path(__file__).parent / "ddp.py"
REFUSED, INTERRUPTED, CRASH_LOOP = 2, 130, 70


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lv-") as folder:  # short: sockets live below it
        yield Path(folder)


def environ(folder: Path) -> dict[str, str]:
    return {**os.environ, "XDG_RUNTIME_DIR": f"{folder}/x", "XDG_STATE_HOME": f"{folder}/state"}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "elasticrl.cli.main", "run", *words]


def until(run: subprocess.Popen[bytes], claim: Callable[[], Any], what: str, said: Path) -> None:
    deadline = time.monotonic() + 120.0
    while not claim():
        assert run.poll() is None, said.read_text()
        assert time.monotonic() < deadline, f"{what}: {said.read_text()}"
        time.sleep(0.05)


def test_a_script_survives_a_kill_and_ends_with_ctrl_c_and_leaves_no_process(folder: Path) -> None:
    (folder / "x").mkdir()
    (folder / "saves").mkdir()
    history, said = folder / "history", folder / "said"
    history.touch()
    words = [
        "--nodes",
        "2",
        "--",
        str(SCRIPT),
        "--steps",
        "9999",
        "--save",
        f"{folder}/saves",
        "--history",
        str(history),
    ]

    def steps() -> int:
        return len(history.read_text().splitlines())

    with said.open("wb") as output:
        run = subprocess.Popen(
            command(*words), stdout=output, stderr=output, env=environ(folder), cwd=folder, start_new_session=True
        )
    try:
        until(run, lambda: steps() > 40, "steps", said)
        (socket,) = (folder / "x" / "elasticrl").glob("ddp-*/n1/control.sock")
        until(run, lambda: ask(socket, "crew", deadline_s=10.0)["spares"], "a spare process", said)
        os.kill(ask(socket, "logs", deadline_s=10.0)[0]["pid"], signal.SIGKILL)
        made = steps()
        until(run, lambda: steps() > made + 40, "steps after the kill", said)
        picture = ask(socket, "status", deadline_s=10.0)
        assert picture["level"] == "supervised"
        assert picture["last"]["verdict"]["fault"] == "dead_rank"
        run.send_signal(signal.SIGINT)
        assert run.wait(patience(60.0)) == INTERRUPTED, said.read_text()
    finally:
        run.kill()
        run.wait()
    text = said.read_text()
    assert "Traceback" not in text
    assert "# level supervised: after a fault all workers start again" in text
    deadline = time.monotonic() + 10.0
    while (left := [line for pid in all_pids() if str(folder) in (line := command_line(pid))]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert left == []
    # Once more, until it is done: from its own checkpoint, as a module and in torchrun's words, and with its output here.
    newest = max(int(line.split()[-1]) for line in history.read_text().splitlines())
    (folder / "pkg").mkdir()
    (folder / "pkg" / "train.py").write_text(SCRIPT.read_text())
    (folder / "pkg" / "__init__.py").touch()
    options = ["--nnodes=1:2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "-m", "pkg.train"]
    args = [str(newest + 20) if word == "9999" else word for word in words[words.index(str(SCRIPT)) + 1 :]]
    again = subprocess.run(
        command(*options, *args),
        env=environ(folder),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert "the script has ended with exit code 0 on all ranks" in again.stdout
    assert f"step {newest + 20}/{newest + 20} loss " in again.stdout
    assert "--rdzv-backend: left out, as elasticrl run brings an etcd and a rendezvous of its own." in again.stderr
    assert max(int(line.split()[-1]) for line in history.read_text().splitlines()) == newest + 20


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("gone.py", None, "gone.py is not here"),
        ("broken.py", "def (", "broken.py, line 1 is not Python that can be run (invalid syntax)"),
        (
            "lacks.py",
            "import torch\nimport not_there_at_all",
            "lacks.py needs the module not_there_at_all, which is not here",
        ),
        ("words.txt", "hello", "words.txt is not a Python file"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(folder: Path, name: str, text: str | None, why: str) -> None:
    (folder / "x").mkdir()
    if text is not None:
        (folder / name).write_text(text)
    words = command("--", f"{folder}/{name}")
    done = subprocess.run(words, env=environ(folder), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == REFUSED
    assert why in done.stderr
    conf = next((folder / "state" / "elasticrl").glob("*/job.yaml"))
    check = [sys.executable, "-m", "elasticrl.cli.main", "config", "check", str(conf)]
    said = subprocess.run(check, capture_output=True, text=True, timeout=60, check=False).stdout
    assert why in said


def test_a_script_that_ends_at_once_is_not_started_again(folder: Path) -> None:
    (folder / "x").mkdir()
    words = command("--", str(SCRIPT), "--no-such-option")
    done = subprocess.run(words, env=environ(folder), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == CRASH_LOOP
    assert "after its first start, so it is not started again: n0/1: exit code 2: ddp.py: error: " in done.stdout
    assert "ddp.py: error: the following arguments are required" in done.stdout
    assert "Fix the script, or its arguments, and start it again." in done.stdout
