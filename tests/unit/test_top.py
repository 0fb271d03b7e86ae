"""`top` and the calm screen: what they show, and that a terminal is left as it was."""

import asyncio
import io
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chaos.patience import patience
from elasticrl.cli import operate, screen
from elasticrl.cli.main import build
from elasticrl.cli.pace import Pace
from elasticrl.cli.render import size
from elasticrl.cli.screen import clip, frame
from elasticrl.cli.top import Board, Look, Seen, read, row_of
from elasticrl.contract.beats import Beat
from elasticrl.daemon.control import Asker, Control
from elasticrl.status.picture import Picture, Row

PICTURE = Picture(
    job="toy", state="TRAINING", generation=3, step=41, committed=40, nodes=1, known=1, reason="first plan; 1 node trains",
    rows=(Row(node="n0", member="n0/1", state="training", leader=True, rank=0, step=41),),
)  # fmt: skip


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A node's runtime directory with one worker's beats: this process's."""
    folder = tmp_path / "toy" / "n0"
    (folder / "beats").mkdir(parents=True)
    beat = Beat(folder / "beats" / "process_7")
    beat.joining(3, 3, 40)
    beat.training()
    beat.sealed(41)
    beat.collective(5, "all_reduce", 4096)
    beat.phase("update")
    return folder


@pytest.fixture(params=[None])
def daemon(home: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A control socket that answers as a daemon does. Its worker is of a team, if the parameter is that one's number."""
    worker = {"rank": 0, "team": request.param, "pid": os.getpid(), "log": "/dev/null"}

    async def answer(verb: str, _: Mapping[str, Any], __: Asker) -> Any:
        return asdict(PICTURE) if verb == "status" else [worker]

    loop = asyncio.new_event_loop()
    control = Control(home / "control.sock", answer, {})
    loop.run_until_complete(control.open())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield home
    asyncio.run_coroutine_threadsafe(control.close(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


def test_a_worker_is_shown_from_its_beats_and_the_kernels_counts(daemon: Path, tmp_path: Path) -> None:
    board = Board(tmp_path, None)
    board.rest(0.2)
    (row,) = board.rows()
    assert (row.node, row.rank, row.pid, row.state, row.step, row.phase) == (
        "n0",
        0,
        os.getpid(),
        "training",
        41,
        "update",
    )
    assert row.memory > 10_000_000
    assert row.shares == {"update": 1.0}
    assert "n0" in board.text()
    assert "team" not in board.text()
    assert daemon.name == "n0"


@pytest.mark.parametrize("daemon", [3], indirect=True)
def test_where_workers_share_a_model_a_worker_has_its_team(daemon: Path, tmp_path: Path) -> None:
    board = Board(tmp_path, None)
    board.rest(0.2)
    assert daemon.name == "n0"
    assert [(row.rank, row.team) for row in board.rows()] == [(0, 3)]
    head, row = board.text().splitlines()[2:4]
    assert head.split()[:4] == ["node", "rank", "team", "pid"]
    assert row.split()[:4] == ["n0", "0", "3", str(os.getpid())]


def test_a_process_that_has_gone_is_forgotten(home: Path, tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True)
    page = home / "beats" / "process_8"
    beat = Beat(page)
    beat.now = type(beat.now)(pid=child.pid, generation=3)
    beat.phase("rollout")
    board = Board(tmp_path, None)
    board.look(1.0)
    assert {seen.pid for seen in board.seen.values()} == {os.getpid(), child.pid}
    child.communicate("")
    board.look(2.0)
    assert {seen.pid for seen in board.seen.values()} == {os.getpid()}
    assert read(home / "beats" / "nothing") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else for a while")
def test_whose_beats_are_closed_to_us_is_said() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to others
        Path(folder).chmod(0o755)
        beats = Path(folder) / "toy" / "n0" / "beats"
        beats.mkdir(mode=0o700, parents=True)
        assert Board(Path(folder), None).text().startswith("no worker")
        os.seteuid(65534)
        try:
            text = Board(Path(folder), None).text()
        finally:
            os.seteuid(0)
    assert text == f"{beats} is its user's alone, root's: sudo -u root elasticrl top"


def test_rates_and_shares_are_of_what_was_seen(home: Path) -> None:
    beat = read(home / "beats" / "process_7")
    assert beat is not None
    seen = Seen(node="n0", pid=1, beat=beat)
    for i in range(11):
        update, waiting = i % 2 == 0, i % 5 == 0
        phase = "update" if update else "rollout"
        seen.looks.append(Look(at=i / 2, phase=phase, waiting=waiting, step=i, bytes=i * 1000, cpu_s=i / 4))
    row = row_of(seen, now=beat.since + 2.5)
    assert (row.step_s, row.cpu, row.bytes_s, row.phase_s) == (0.5, 0.5, 2000.0, 2.5)
    assert row.shares == pytest.approx({"update": 6 / 11, "rollout": 5 / 11})
    assert row.waits == pytest.approx(3 / 11)


def test_without_workers_it_says_where_to_look(tmp_path: Path) -> None:
    said = CliRunner().invoke(build(["top"]), ["top", "--run-dir", str(tmp_path), "--once", "--every", "0.2"])
    assert said.exit_code == 1
    assert "elasticrl status" in said.stderr


def test_a_frame_writes_over_the_last_one_and_never_scrolls() -> None:
    made = frame("\n".join(f"line {i}" for i in range(50)) + "\nlast", os.terminal_size((20, 10)))
    assert made.startswith("\033[H")
    assert made.count("\n") == 9
    assert "lines more" in made
    assert made.endswith("last\033[K\033[J")
    assert clip("x" * 30, 10) == "x" * 9 + "…\033[0m"
    assert clip("\033[31mred\033[0m", 10) == "\033[31mred\033[0m"


def test_a_pace_survives_a_job_that_begins_again() -> None:
    pace = Pace()
    assert [pace.after(float(now), step) for now, step in ((0, 10), (1, 12), (2, 3), (3, 4), (30, 4))] == [
        "", "2 steps a second", "", "1 step a second", "no step for 27 s",
    ]  # fmt: skip


def test_watching_leaves_the_terminal_as_it_was(daemon: Path, tmp_path: Path) -> None:
    """In a real terminal: the other buffer is entered, the picture shown, q ends it, and echo and cursor come back."""
    terminal, inside = pty.openpty()
    before = termios.tcgetattr(terminal)
    command = [sys.executable, "-m", "elasticrl.cli.main", "status", "--watch", "--run-dir", str(tmp_path)]
    watching = subprocess.Popen(command, stdin=inside, stdout=inside, env={**os.environ, "TERM": "xterm"})
    text, deadline, asked = "", time.monotonic() + 120, False
    while "\033[?1049l" not in text and time.monotonic() < deadline:
        if select.select([terminal], [], [], 1.0)[0]:
            text += os.read(terminal, 65536).decode(errors="replace")
        if "q ends" in text and not asked:
            assert not termios.tcgetattr(terminal)[3] & termios.ECHO
            os.write(terminal, b"q")
            asked = True
    assert watching.wait(60) == 0, "it is training"
    after = termios.tcgetattr(terminal)
    os.close(inside)
    os.close(terminal)
    assert "\033[?1049h" in text
    assert re.search(r"TRAINING.*generation 3", text)
    assert text.rstrip().endswith("\033[?25h\033[?1049l")
    assert after[3] == before[3]
    assert daemon.exists()


def test_why_a_store_cannot_be_watched_is_said_where_it_stays() -> None:
    terminal, inside = pty.openpty()
    command = [sys.executable, "-m", "elasticrl.cli.main", "status", "--watch", "--store", "127.0.0.1:1"]
    watching = subprocess.Popen(
        command, stdin=inside, stdout=inside, stderr=inside, env={**os.environ, "TERM": "xterm"}
    )
    text = ""
    while watching.poll() is None or select.select([terminal], [], [], 0.2)[0]:
        if select.select([terminal], [], [], 1.0)[0]:
            text += os.read(terminal, 65536).decode(errors="replace")
    os.close(inside)
    os.close(terminal)
    assert watching.returncode == 2
    assert "--job" in text.rpartition("\033[?1049l")[2], text


@pytest.mark.parametrize(("amount", "words"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * 2**40, "5.0 TiB")])
def test_sizes(amount: float, words: str) -> None:
    assert size(amount) == words


def test_where_there_is_no_keyboard_the_rates_are_measured_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    done: list[str] = []

    def look() -> str:
        if done.count("look") == 2:
            raise KeyboardInterrupt
        done.append("look")
        return "a picture"

    screen.watch(look, every_s=0.2, meanwhile=lambda: done.append("beat"))
    first, second = "".join(word[0] for word in done).split("l")[1:]
    assert min(len(first), len(second)) >= 2, "many times between two pictures"


def test_a_key_is_heard_between_two_pictures_that_are_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    # Found by reading: `top --every 30` heard no q for 30 s, and showed nothing before.
    ours, theirs = pty.openpty()
    beats: list[float] = []

    def beat() -> None:
        beats.append(time.monotonic())
        if len(beats) == 3:
            os.write(ours, b"q")

    begun = time.monotonic()
    with os.fdopen(theirs, "r+b", buffering=0) as terminal, io.TextIOWrapper(terminal) as text, os.fdopen(ours, "rb"):
        monkeypatch.setattr("sys.stdin", text)
        monkeypatch.setattr("sys.stdout", text)
        screen.watch(lambda: "a picture", every_s=30.0, meanwhile=beat)
        monkeypatch.undo()
    assert time.monotonic() - begun < patience(10)


def test_a_store_that_is_away_leaves_the_screen_as_it_is() -> None:
    with pytest.raises(screen.Silent):
        operate.quietly("127.0.0.1:1", "j")
