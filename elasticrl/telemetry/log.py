"""structlog, set up once for a process: JSON lines for journald and files, colours on a terminal.

The one idea: a log line is an event with fields, and its name and level come from `telemetry.events`. An undeclared name, or a
field that was not declared, is a bug, and is logged as one, so that no line exists which the documentation does not know.
"""

import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, TextIO

import structlog

from elasticrl.telemetry.events import BY_NAME

BOUND = frozenset({"event", "level", "at", "job", "node", "member", "exception", "exc_info", "stack_info"})


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


def set_up(
    stream: TextIO | None = None, *, pretty: bool | None = None, bound: Mapping[str, object] | None = None
) -> Any:
    """Configure logging for this process and return its logger. `pretty` None: on a terminal."""
    stream = stream or sys.stderr
    pretty = stream.isatty() if pretty is None else pretty
    shared: list[Any] = [
        declared,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
        structlog.processors.format_exc_info,
    ]
    last: Any = (
        structlog.dev.ConsoleRenderer(timestamp_key="at") if pretty else structlog.processors.JSONRenderer(default=str)
    )
    structlog.configure(
        processors=[*shared, last],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.DEBUG if os.environ.get("ELASTICRL_DEBUG") else logging.INFO
        ),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    return structlog.get_logger().bind(**(bound or {}))
