"""The agent's end of the socket: one daemon at a time; the newest connection is the one that counts."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Self

from elasticrl.base.owned import bound
from elasticrl.contract import wire

log = logging.getLogger(__name__)
BACKLOG_BYTES = 4 * wire.LIMIT  # a daemon that reads nothing for so long is cut off; it can come back


class Server:
    """Hands on the daemon's orders, and sends it reports: the whole picture first."""

    def __init__(
        self,
        path: Path,
        take: Callable[[wire.Command], None],
        picture: Callable[[], wire.Report],
        gone: Callable[[], None],
    ) -> None:
        self._path = path
        self._take = take
        self._picture = picture
        self._gone = gone  # told when the daemon is
        self._daemon: asyncio.StreamWriter | None = None
        self._server: asyncio.Server | None = None

    @property
    def connected(self) -> bool:
        """Is there a daemon?"""
        return self._daemon is not None

    async def __aenter__(self) -> Self:
        ours = bound(self._path, 0o600)  # the agent's lock says that nobody else listens there
        self._server = await asyncio.start_unix_server(self._serve, sock=ours, limit=wire.LIMIT)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._daemon is not None:
            self.send(self._picture())
            self._daemon.close()
        if self._server is not None:
            self._server.close()
        self._path.unlink(missing_ok=True)

    def send(self, report: wire.Report) -> None:
        """To the daemon, if there is one."""
        daemon = self._daemon
        if daemon is None or daemon.is_closing():
            return
        if daemon.transport.get_write_buffer_size() > BACKLOG_BYTES:
            daemon.close()
            return
        daemon.write(wire.encode(report))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        before, self._daemon = self._daemon, writer
        if before is not None:
            before.close()
        self.send(self._picture())
        try:
            while line := await reader.readline():
                order = wire.decode(line)
                if self._daemon is writer and not isinstance(order, wire.Report):
                    self._take(order)
        except ConnectionError as error:  # it died; another one will come
            log.info("the daemon's connection ends: %s", error)
        except asyncio.CancelledError:
            pass  # the agent ends; asyncio would log a trace
        except ValueError as error:  # Garbled is one; so is a line over the limit
            log.warning("the daemon's connection is ended: %s", error)
        finally:
            if self._daemon is writer:
                self._daemon = None
                self._gone()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
