"""The daemon's end of the agent's socket, and how a daemon starts an agent. No torch here.

The one idea: the link is always being made. Reports come when there is a connection, orders are lost when there is none, and
the core decides lost orders again.
"""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from elasticrl.agent import spec as specs
from elasticrl.base.owned import write_private
from elasticrl.base.pauses import pause
from elasticrl.base.started import Started, start
from elasticrl.contract import wire

RETRY_S = 0.05  # a unix socket costs nothing to try
MOST_RETRY_S = 5.0  # where one answers, and no report comes


class Link:
    """Keeps the connection to one agent; run it beside the daemon's loop."""

    def __init__(
        self, path: Path, reported: Callable[[wire.Report], None], lost: Callable[[str], None] = lambda _: None
    ) -> None:
        self._path = path
        self._reported = reported
        self._lost = lost
        self._writer: asyncio.StreamWriter | None = None
        self._heard = False  # a report, since it was connected
        self.tried = asyncio.Event()  # whether there is an agent

    @property
    def connected(self) -> bool:
        """Is the agent there?"""
        return self._writer is not None

    def send(self, order: wire.Command) -> bool:
        """Tell the agent; False if it is not there (the next report shows what it does)."""
        if self._writer is None or self._writer.is_closing():
            return False
        self._writer.write(wire.encode(order))
        return True

    async def run(self) -> None:
        """Until cancelled: connect, read reports, connect again."""
        rest_s = 0.0
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._path, limit=wire.LIMIT)
            except OSError:
                self.tried.set()
                await asyncio.sleep(RETRY_S)
                continue
            self._writer, why, self._heard = writer, "its socket closed", False
            self.tried.set()
            try:
                await self._read(reader)
            except (ConnectionError, ValueError) as error:
                why = f"its connection broke: {error}"
            finally:
                self._writer = None
                writer.close()
            self._lost(why)
            # An agent of another version is not understood however often it is asked.
            before_s = 0.0 if self._heard else rest_s
            rest_s = pause(before_s, 0.0, first_s=RETRY_S, most_s=MOST_RETRY_S, steady_s=0.0)
            await asyncio.sleep(rest_s)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            message = wire.decode(line)
            if isinstance(message, wire.Report):
                self._heard = True
                self._reported(message)


def agent_command(spec: specs.Spec, runtime: Path) -> list[str]:
    """How an agent is started, once what it is told has been written down here."""
    runtime.mkdir(parents=True, exist_ok=True, mode=0o700)
    told = runtime / "agent.json"
    write_private(told, specs.dump(spec))
    # What lies in the folder where a script is run must not stand in for a module of ours, as under torchrun.
    safe = ["-P"] if spec.script else []
    return [sys.executable, *safe, "-m", "elasticrl.agent", "--runtime-dir", str(runtime), "--spec", str(told)]


def start_agent(spec: specs.Spec, runtime: Path) -> Started:
    """Start an agent that outlives its starter. Its own words go to `agent.log` in its log folder."""
    command = agent_command(spec, runtime)
    folder = Path(spec.log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return start(command, folder / "agent.log", env=specs.environment(spec))
