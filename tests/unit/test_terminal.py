"""What a worker, a node or a file says reaches a terminal as text, and cannot steer it."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from elasticrl.base.words import plain
from elasticrl.cli import render, terminal
from elasticrl.cli.lines import event_of, shown
from elasticrl.cli.screen import frame
from elasticrl.telemetry import log

STEERING = (
    "\x1b]0;owned\x07", "\x1b]52;c;cm0gLXJm\x07", "\x1b[2J\x1b[H", "\x1b[?1049h", "\x1bP+q\x1b\\", "\x9b31m", "\x1b[31m",
    "\x1b[8m", "\x08\x08", "\r", "\x1bc", "\u202e", "\x7f", "\x00", "\x1b]8;;http://x\x1b\\",
)  # fmt: skip
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def test_a_worker_s_line_is_text_with_its_tabs() -> None:
    for codes in STEERING:
        said = shown(f"loss{codes}\t0.5 ü 漢", "")
        assert said is not None
        assert said.replace("\t", "").isprintable()
        assert said.startswith("loss")
        assert said.endswith("\t0.5 ü 漢")


def test_an_event_s_every_field_is_text_and_our_colours_stay() -> None:
    for codes in STEERING:
        line = dict.fromkeys(
            ("at", "level", "node", "event", "reason", "remedy", "exception", "slot", codes), f"x{codes}y"
        )
        for colour in (True, False):
            said = render.event(line, colour=colour)
            assert COLOUR.sub("", said).replace("\n", "").isprintable()
            assert bool(COLOUR.search(said)) is colour


def test_an_event_is_shown_as_json_that_steers_nothing() -> None:
    line = '{"event": "x", "said": "\x9b2J\u202e"}'
    said = shown(line, "", as_json=True)
    assert said is not None
    assert said.isprintable()
    assert event_of(said) == event_of(line)
    assert shown('{"event":  "ü"}', "", as_json=True) == '{"event":  "ü"}', "as it was written, where it can be"


@given(st.text())
def test_no_text_is_more_than_text(text: str) -> None:
    said = plain(text, keep="\t")
    assert all(char.isprintable() or char in "\t\u00a0\u202f\u3000" for char in said)
    assert len(said) == len(text)


def test_the_streams_pass_colours_and_nothing_that_steers() -> None:
    out = io.StringIO()
    stream = terminal.Filtered(out)
    stream.write("\x1b[1mjob\x1b[0m\ttab\r\x1b[K\n")
    assert out.getvalue() == "\x1b[1mjob\x1b[0m\ttab\r\x1b[K\n"
    for codes in STEERING:
        stream.write(codes)
    left = COLOUR.sub("", out.getvalue().replace("\r\x1b[K", ""))
    assert "\x1b" not in left
    assert "\x07" not in left


def test_a_screen_draws_its_own_codes_and_no_others() -> None:
    drawn = frame("\x1b[32mwell\x1b[0m\x1b]0;owned\x07\n\x1b[?1049l", os.terminal_size((80, 24)))
    assert set(re.findall(r"\x1b(?!\[[0-9;]*m).{2}", drawn)) == {"\x1b[H", "\x1b[K", "\x1b[J"}
    assert "\x07" not in drawn


def test_a_daemon_s_terminal_shows_a_worker_s_words_as_text() -> None:
    line = log.shown(
        None, "", {"event": "worker.exited", "cause": "".join(STEERING), "exception": "a\n\tb\x1b[2J", "slot": 1}
    )
    assert line["exception"] == "a\n\tb?[2J"
    assert line["cause"].isprintable()


def test_diagnose_prints_a_log_s_lines_as_text(tmp_path: Path) -> None:
    for number, codes in enumerate(STEERING):
        (tmp_path / f"rank_{number}.log").write_bytes(
            f"ValueError: a{codes}b CUDA error: out of memory{codes}\n".encode()
        )
    done = subprocess.run(
        [sys.executable, "-m", "elasticrl.cli.main", "diagnose", "--log", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    said = done.stdout.decode()
    assert "VERDICT" in said
    assert said.replace("\n", "").isprintable(), done.stderr
