"""The newest log lines, kept in memory for `elasticrl events`; journald or the log file has them all."""

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator, Mapping, MutableMapping
from datetime import UTC, datetime
from typing import Any

KEPT = 2000
RUNS = frozenset(
    {"checkpoint.committed"}
)  # of several in a row the newest is kept: they pushed out what had befallen the job


class History:
    """A ring of log lines with readers that follow it. It is a structlog processor: lines pass through unchanged."""

    def __init__(self) -> None:
        self._lines: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._readers: set[asyncio.Queue[dict[str, Any]]] = set()
        self.lost = ""  # why lines get no further than here; empty: they do

    def __call__(self, _: object, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Keep a line, and hand it to those who follow."""
        kept = dict(line)
        if line.get("event") in {"log.lost", "log.back"}:
            self.lost = f"its daemon's log takes no lines ({line['error']})" if "error" in line else ""
        if self._lines and line.get("event") in RUNS and self._lines[-1].get("event") == line["event"]:
            self._lines.pop()
        self._lines.append(kept)
        for reader in self._readers:
            if not reader.full():  # one that does not read loses lines, not the daemon its memory
                reader.put_nowait(kept)
        return line

    def since(self, then: datetime) -> list[dict[str, Any]]:
        """The lines from then on, the oldest first."""
        mark = then.astimezone(UTC).isoformat().removesuffix("+00:00")
        return [line for line in self._lines if str(line.get("at", "")) >= mark]

    async def read(self, question: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The lines there are, about `node` if one is named; then, with `follow`, those that come."""
        node = question.get("node")
        for line in list(self._lines):
            if about(line, node):
                yield line
        if not question.get("follow"):
            return
        reader: asyncio.Queue[dict[str, Any]] = asyncio.Queue(maxsize=KEPT)
        self._readers.add(reader)
        try:
            while True:
                line = await reader.get()
                if about(line, node):
                    yield line
        finally:
            self._readers.discard(reader)


def about(line: Mapping[str, Any], node: str | None) -> bool:
    """Does this line speak of that node?

    >>> [about({"reason": said}, "n1") for said in ("n1/2 died", "it is n1.", "n10 died", "n1.b died", "on n1", "on-n1")]
    [True, True, False, False, True, False]
    """
    if node is None:
        return True
    alone = re.compile(rf"(?<![\w.-]){re.escape(node)}(?![\w-]|\.\w)")  # not n10, nor another host's full name
    return any(alone.search(str(value)) for value in line.values())
