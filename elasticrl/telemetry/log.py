"""structlog, set up once for a process: JSON lines for journald and files, colours on a terminal.

The one idea: a log line is an event with fields, and its name and level come from `telemetry.events`. An undeclared name, or a
field that was not declared, is a bug, and is logged as one, so that no line exists which the documentation does not know.
"""

import logging
import sys
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from io import FileIO
from threading import RLock
from typing import Any, TextIO, cast

from elasticrl.telemetry.events import BY_NAME, NAMES

# structlog brings rich and pygments along where they are installed, 40 ms of each daemon's start, to draw exceptions that ours
# never are: `format_exc_info` has made them text by then.
_hide = "rich" not in sys.modules
if _hide:
    sys.modules["rich"] = cast(Any, None)
import structlog  # noqa: E402 - see above

if _hide:
    del sys.modules["rich"]

BOUND = frozenset({*NAMES, "event", "level", "at", "exception", "exc_info", "stack_info"})


def declared(_: object, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Give the line its declared level; turn an undeclared one into a bug."""
    event = str(line.get("event"))
    known = BY_NAME.get(event)
    strange = sorted(set(line) - BOUND - set(known.fields)) if known else []
    if known is None or strange:
        line["problem"] = (
            f"event {event!r} is not declared" if known is None else f"{event}: undeclared fields {strange}"
        )
        line["event"], line["level"] = "bug", "error"
    else:
        line["level"] = known.level
    return line


Processor = Callable[[object, str, MutableMapping[str, Any]], MutableMapping[str, Any]]
LEVELS = ("info", "warning", "error")


def at_least(level: Callable[[], str]) -> Processor:
    """Drop lines below a level, which is asked for at each. A line's is the declared one, whichever method was called."""

    def keep(_: object, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if LEVELS.index(line["level"]) < LEVELS.index(level()):
            raise structlog.DropEvent
        return line

    return keep


def named(names: Callable[[], Mapping[str, object]]) -> Processor:
    """Say in every line of this process whose it is, a library's and this module's own among them. Asked for at each."""

    def name(_: object, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        return {**names(), **line}

    return name


def shown(_: object, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """On a terminal without what would steer it: a worker's own words may have anything in them."""
    return {name: _plain(value) if isinstance(value, str) else value for name, value in line.items()}


def _plain(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() or c in "\t\n" else "?" for c in text)


class Lines:
    """structlog's last link: lines to a stream that may take nothing for a while. Then they are dropped, and nobody dies of it.

    Where there is a file behind the stream they go past its buffer: in there a line that does not fit would stay, and come
    later, in pieces.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = RLock()  # what is said of lines is a line
        self._dropped = 0
        self._torn = False  # the last line is written in part
        self._file: FileIO | None = None
        with suppress(OSError):  # it is only in memory
            stream.flush()
            self._file = FileIO(stream.fileno(), "w", closefd=False)

    def msg(self, text: str) -> None:
        """Write a line, or drop it."""
        with self._lock:
            try:
                self._put(text + "\n")
            except OSError as error:
                self._dropped += 1
                if self._dropped == 1:  # for those who read the newest lines in memory: this one is dropped as well
                    structlog.get_logger().info("log.lost", error=str(error))
            else:
                dropped, self._dropped = self._dropped, 0
                if dropped:
                    structlog.get_logger().info("log.back", dropped=dropped)

    debug = info = warning = error = critical = exception = log = msg

    def _put(self, line: str) -> None:
        if self._file is None:
            self._stream.write(line)
            self._stream.flush()
            return
        text = f"\n{line}" if self._torn else line
        data = memoryview(text.encode(self._stream.encoding or "utf-8", "backslashreplace"))
        while data:
            written = self._file.write(data)
            if not written:
                raise BlockingIOError("it would have to be waited for")
            data = data[written:]
            self._torn = bool(data)


def set_up(
    stream: TextIO | None = None,
    *,
    pretty: bool | None = None,
    level: Callable[[], str] = lambda: "info",
    tap: Processor | None = None,
    names: Callable[[], Mapping[str, object]] = dict,
) -> Any:
    """Configure logging for this process and return its logger. `pretty` None: on a terminal. `tap` sees every line. `names`:
    whose lines these are (`events.NAMES`), as far as it is known by then.
    """
    stream = stream or sys.stderr
    pretty = stream.isatty() if pretty is None else pretty
    lines = Lines(stream)
    structlog.configure(
        processors=[
            declared,
            at_least(level),
            named(names),
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
            structlog.processors.format_exc_info,
            *([tap] if tap else []),
            *([shown] if pretty else []),
            structlog.dev.ConsoleRenderer(timestamp_key="at")
            if pretty
            else structlog.processors.JSONRenderer(default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=lambda *_: lines,
        cache_logger_on_first_use=False,
    )
    return structlog.get_logger()
