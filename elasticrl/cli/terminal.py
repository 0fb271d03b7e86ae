"""What reaches a terminal: text, tabs, colours, and the few codes by which we empty a line. Nothing that steers it otherwise.

The one idea: a worker, a node or a file may put any bytes into what we show, so the streams themselves are filtered, once, for
all verbs. Texts of others lose their colours too where they are shown (`words.plain`): here that is only the last line.
"""

import re
import sys
from collections.abc import Iterable
from typing import Any, Final, TextIO, cast

#: An escape that begins no colour and empties no line; and whatever else is a command: C0, C1, what turns the writing around.
STEERS: Final = re.compile(
    r"\x1b(?!\[[0-9;]{0,16}[mK])|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


class Filtered:
    """A stream that a terminal may be behind."""

    def __init__(self, stream: TextIO) -> None:
        self.unfiltered = stream

    def write(self, text: str) -> int:
        """Without what steers a terminal."""
        return self.unfiltered.write(STEERS.sub("?", text))

    def writelines(self, lines: Iterable[str]) -> None:
        """The same."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


def guard() -> None:
    """From now on all that this process prints is filtered."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Filtered):
            setattr(sys, name, cast(TextIO, Filtered(stream)))


def unfiltered() -> TextIO:
    """The output as it was: for who draws a screen of texts that are plain already."""
    out: TextIO = getattr(sys.stdout, "unfiltered", sys.stdout)
    return out
