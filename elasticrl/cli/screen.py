"""A calm full screen for `status --watch` and `top`: nothing flickers, nothing scrolls, and what was there before comes back.

The one idea: a picture is text; the screen writes over the old one line by line in the terminal's other buffer, and waits for a
key or for the next look. Where output is no terminal, a picture is printed when it differs from the last one.
"""

import os
import re
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final

from elasticrl.cli import terminal

ENTER: Final = "\033[?1049h\033[?25l"  # the other buffer, no cursor
LEAVE: Final = "\033[?25h\033[?1049l"
COLOUR: Final = re.compile(r"\033\[[0-9;]*m")
TURN_S: Final = 0.05
ENDS: Final = frozenset("qQ\x04")
CTRL_C: Final = "\x03"  # as a key: of a terminal that makes no signal of it


class Silent(Exception):
    """There is no picture now; the sentence says why. The last one stays."""


def watch(look: Callable[[], str], *, every_s: float, meanwhile: Callable[[], None] | None = None) -> bool:
    """Show what `look` returns, again and again, until q or Ctrl-C; returns whether it was Ctrl-C. `meanwhile`, if given, is
    called many times between two.
    """
    show = shown if sys.stdout.isatty() and sys.stdin.isatty() else plainly
    try:
        show(look, every_s=every_s, meanwhile=meanwhile)
    except KeyboardInterrupt:
        return True
    return False


def shown(look: Callable[[], str], *, every_s: float, meanwhile: Callable[[], None] | None = None) -> None:
    """On a terminal, until q."""
    text, since = "", ""
    with full() as draw:
        while True:
            try:
                text, note = look(), ""
            except Silent as reason:
                since = since or clock()
                note = f"{reason}; this is the picture of {since}" if text else str(reason)
            else:
                since = clock()
            draw(f"{text}\n\n\033[2m{note or since}   every {every_s:g} s; q ends\033[0m")
            for turn in turns(every_s, meanwhile):
                if (key := pressed(turn)) in ENDS:
                    return
                if key == CTRL_C:
                    raise KeyboardInterrupt


def plainly(look: Callable[[], str], *, every_s: float, meanwhile: Callable[[], None] | None = None) -> None:
    """Where there is no terminal: a picture when it has changed, for ever."""
    before = ""
    while True:
        try:
            text = look()
        except Silent as reason:
            text = str(reason)
        if text != before:
            print(text, end="\n\n", flush=True)
            before = text
        for turn in turns(every_s, meanwhile):
            time.sleep(turn)


def turns(every_s: float, meanwhile: Callable[[], None] | None) -> Iterator[float]:
    """How long to wait, again and again until the time is over, with `meanwhile` done before each."""
    end = time.monotonic() + every_s
    while (left := end - time.monotonic()) > 0:
        if meanwhile is not None:
            meanwhile()
        yield left if meanwhile is None else min(left, TURN_S)


@contextmanager
def full() -> Iterator[Callable[[str], None]]:
    """The terminal's other buffer, without a cursor and without echo; yields what draws."""
    handle = sys.stdin.fileno()
    before = termios.tcgetattr(handle)
    try:
        tty.setcbreak(handle)
        write(ENTER)
        yield lambda text: write(frame(text, shutil.get_terminal_size()))
    finally:
        write(LEAVE)
        termios.tcsetattr(handle, termios.TCSADRAIN, before)


def frame(text: str, size: os.terminal_size) -> str:
    r"""What to write so that the screen shows this text and nothing else.

    >>> frame("ab\ncd", os.terminal_size((80, 24)))
    '\x1b[Hab\x1b[K\r\ncd\x1b[K\x1b[J'
    """
    lines = text.split("\n")
    if len(lines) > size.lines:
        lines = [*lines[: size.lines - 2], f"... {len(lines) - size.lines + 1} lines more", lines[-1]]
    safe = (clip(terminal.STEERS.sub("?", line), size.columns) for line in lines)
    return "\033[H" + "\r\n".join(f"{line}\033[K" for line in safe) + "\033[J"


def clip(line: str, width: int) -> str:
    r"""A line's first so many columns; colours take none.

    >>> clip("\x1b[1mabcdef\x1b[0m", 4)
    '\x1b[1mabc…\x1b[0m'
    """
    shown, out, i = 0, "", 0
    plain = _length(line)
    while i < len(line):
        if colour := COLOUR.match(line, i):
            out, i = out + colour[0], colour.end()
            continue
        if shown == width - 1 and plain > width:
            return out + "…\033[0m"
        out, shown, i = out + line[i], shown + 1, i + 1
    return out


def _length(line: str) -> int:
    return len(COLOUR.sub("", line))


def pressed(within_s: float) -> str:
    """A key, if one is pressed in time; empty otherwise."""
    ready, _, _ = select.select([sys.stdin], [], [], within_s)
    return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if ready else ""


def write(text: str) -> None:
    """At once."""
    out = terminal.unfiltered()
    out.write(text)
    out.flush()


def clock() -> str:
    """Now, UTC."""
    return datetime.now(UTC).strftime("%H:%M:%S UTC")
