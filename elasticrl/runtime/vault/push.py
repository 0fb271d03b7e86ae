"""Keeping one buddy up to date: what this node's workers sealed goes there, the newest first, again and again until it arrives.

The one idea: a queue would only hold what nobody wants any more. For each worker there is one pending version, the newest;
a newer one replaces it.
"""

import asyncio
import socket
from contextlib import suppress
from pathlib import Path

from elasticrl.base.address import split
from elasticrl.runtime.vault.channel import Channel, greet
from elasticrl.runtime.vault.errors import VaultError
from elasticrl.runtime.vault.layout import Stamp, Torn
from elasticrl.runtime.vault.slots import pin
from elasticrl.runtime.vault.transfer import offer, send_blocks
from elasticrl.runtime.vault.version import Version

RETRY_S = (0.05, 2.0)  # the first wait after a failure, and the longest

Mark = tuple[int, Version]
"""Generation and version: what is written later is greater, also when a new generation starts from an older version."""


class Caller:
    """Opens authenticated connections to other vaults, from the interface that was chosen for it."""

    def __init__(self, *, job: str, node: str, key: bytes, source: str, deadline_s: float) -> None:
        self.job = job
        self.node = node
        self.key = key
        self.source = source
        self.deadline_s = deadline_s

    async def call(self, address: str) -> Channel:
        """A channel to the vault at `host:port`; OSError, TimeoutError or VaultError if there is none."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self.deadline_s):
            info = (await loop.getaddrinfo(*split(address), type=socket.SOCK_STREAM))[0]
            sock = socket.socket(info[0], socket.SOCK_STREAM)
            try:
                sock.setblocking(False)
                if self.source:
                    sock.bind((self.source, 0))
                await loop.sock_connect(sock, info[4])
                return await greet(sock, key=self.key, job=self.job, node=self.node, deadline_s=self.deadline_s)
            except BaseException:
                sock.close()
                raise


class Buddy:
    """One node that keeps our copies."""

    def __init__(self, node: str, address: str, caller: Caller, window_bytes: int, moved: asyncio.Condition) -> None:
        self.node = node
        self.address = address
        self.failing = ""  # the sentence of the last failure, until something arrives
        self.sent_bytes = 0
        self._caller = caller
        self._window_bytes = window_bytes
        self._moved = moved  # notified when a copy has arrived or failed
        self._pending: dict[str, Path] = {}
        self._done: dict[str, Mark] = {}
        self._wake = asyncio.Event()
        self._channel: Channel | None = None
        self._moved_bytes = 0  # over channels that are closed
        self._task = asyncio.create_task(self._run(), name=f"buddy-{node}")

    def push(self, writer: str, path: Path) -> None:
        """This file is the newest of `writer`."""
        self._pending[writer] = path
        self._wake.set()

    @property
    def moved_bytes(self) -> int:
        """What was sent so far, of copies that are whole there and of others: does it still come nearer?"""
        return self._moved_bytes + (self._channel.moved_bytes if self._channel else 0)

    def has(self, writer: str, mark: Mark) -> bool:
        """Whether that version, or a later one, has arrived."""
        return writer in self._done and self._done[writer] >= mark

    async def stop(self) -> None:
        """Send nothing more."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._hang_up()

    async def _run(self) -> None:
        pause = RETRY_S[0]
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._pending:
                writer, path = next(iter(self._pending.items()))
                try:
                    await self._send(writer, path)
                except Exception as error:  # noqa: BLE001 - whatever somebody there answers, we go on bringing copies
                    self._hang_up()
                    what = f"{error}" or type(error).__name__
                    self.failing = f"copies to {self.node} ({self.address}) fail: {what}"
                    await self._tell()
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, RETRY_S[1])
                    continue
                pause = RETRY_S[0]
                self.failing = ""
                if self._pending.get(writer) is path:
                    del self._pending[writer]
                await self._tell()

    async def _send(self, writer: str, path: Path) -> None:
        shard = pin(path)
        if isinstance(shard, Torn):
            # Its worker already writes the next version there; that one will be announced when it is sealed.
            if self._pending.get(writer) is path:
                del self._pending[writer]
            return
        with shard:
            if self._channel is None:
                self._channel = await self._caller.call(self.address)
            channel, sealed = self._channel, shard.sealed
            await offer(channel, {"op": "put"}, sealed)
            answer, _ = await channel.receive()
            if not answer.get("ok"):
                raise VaultError(str(answer.get("why", "refused")))
            if not answer.get("have"):
                await send_blocks(channel, shard, range(sealed.shape.blocks), self._window_bytes)
                last, _ = await channel.receive()
                if not last.get("ok"):
                    raise VaultError(str(last.get("why", "not sealed")))
                self.sent_bytes += sealed.shape.data_bytes
            self._done[writer] = mark(sealed.stamp)

    async def _tell(self) -> None:
        async with self._moved:
            self._moved.notify_all()

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._moved_bytes += self._channel.moved_bytes
            self._channel.close()
            self._channel = None


def mark(stamp: Stamp) -> Mark:
    """When it was made, among what its worker made."""
    return stamp.generation, stamp.version
