"""What the store's tests share: stores of one kind, a watch in the background, a wire that can be cut."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

from chaos.etcd import LocalCluster
from chaos.patience import patience
from elasticrl.store import Batch, Delete, Store, StoreSettings, open_store
from elasticrl.store.memory import MemoryServer, MemoryStore


@dataclass(frozen=True)
class Backend:
    """Opens stores of one kind. Stores that a test opens share their data; tests do not."""

    kind: str
    namespace: str
    server: MemoryServer
    etcd: LocalCluster | None = None

    def open(self, inside: str = "", **settings: Any) -> Store:
        namespace = self.namespace + inside
        if self.etcd is None:
            return MemoryStore(self.server, namespace=namespace)
        return open_store(self.settings(namespace=namespace, **settings))

    def settings(self, **settings: Any) -> StoreSettings:
        assert self.etcd
        plain = {"client": self.kind, "endpoints": self.etcd.endpoints, "namespace": self.namespace}
        return StoreSettings(**{**plain, **settings})


async def delete(store: Store, scope: str) -> int:
    """Delete a scope; how many keys that were."""
    return (await store.txn([], [Delete(scope=scope)])).responses[0].deleted


class Watcher:
    """Collects what a watch sees, in the background."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self._more = asyncio.Event()
        self._task: asyncio.Task[None]

    @property
    def seen(self) -> list[tuple[str, bytes | None, int]]:
        return [
            (event.key, event.entry.value if event.entry else None, event.revision)
            for batch in self.batches
            for event in batch.events
        ]

    @property
    def relist(self) -> str | None:
        return self.batches[-1].relist if self.batches else None

    async def until(self, count: int, within_s: float = 10.0) -> list[tuple[str, bytes | None, int]]:
        """Wait for so many events."""
        await self._wait(lambda: len(self.seen) >= count, within_s)
        return self.seen

    async def until_relist(self, within_s: float = 10.0) -> str:
        await self._wait(lambda: self.relist is not None, within_s)
        assert self.relist
        await self._task  # it is the last batch
        return self.relist

    async def _wait(self, done: Any, within_s: float) -> None:
        try:
            async with asyncio.timeout(patience(within_s)):
                while not done():
                    if self._task.done():
                        await self._task
                        raise AssertionError(f"the watch has ended; it saw {self.batches}")
                    self._more.clear()
                    await asyncio.wait(
                        {self._task, asyncio.ensure_future(self._more.wait())}, return_when="FIRST_COMPLETED"
                    )
        except TimeoutError:
            raise AssertionError(f"not within {within_s} s; the watch saw {self.batches}") from None

    async def _run(self, store: Store, scopes: tuple[str, ...], from_revision: int) -> None:
        async with contextlib.aclosing(store.watch(scopes, from_revision)) as batches:
            async for batch in batches:
                self.batches.append(batch)
                self._more.set()


@asynccontextmanager
async def watching(store: Store, *scopes: str, start: int | None = None) -> AsyncIterator[Watcher]:
    """Watch scopes from a revision, or from now on."""
    watcher = Watcher()
    start = start or (await store.scan("")).revision + 1
    watcher._task = asyncio.create_task(watcher._run(store, scopes, start))
    try:
        yield watcher
    finally:
        if not watcher._task.done():
            watcher._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher._task


class Wire:
    """A TCP proxy before an etcd, to do to the connection what networks do. `async with Wire(endpoint) as wire: ...`"""

    def __init__(self, endpoint: str) -> None:
        self._host, _, port = endpoint.rpartition("://")[2].rpartition(":")
        self._port = int(port)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listen = 0
        self.connections = 0
        self.mute = False  # bytes of connections there are now and will be stay in the wire, both ways
        self.mute_answers = False  # what etcd says is lost
        self.lost = asyncio.Event()  # an answer has been lost

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self._listen}"

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def open(self) -> None:
        """Take connections (again)."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._listen)
        self._listen = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Refuse connections and cut those there are."""
        if self._server:
            self._server.close()
        self.cut()

    def cut(self) -> None:
        """Reset all connections; new ones work as if nothing had been."""
        self.mute = self.mute_answers = False
        self.lost.clear()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        ends = {writer}
        try:
            there, back = await asyncio.open_connection(self._host, self._port)
            ends.add(back)
            self._writers |= ends
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(reader, back, answers=False))
                both.create_task(self._pump(there, writer, answers=True))
        except* (OSError, EOFError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self._writers -= ends
            for end in ends:
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool) -> None:
        while data := await reader.read(65536):
            if self.mute or (answers and self.mute_answers):
                self.lost.set()
                continue  # what is left out cannot be mended: from now on only `cut` helps
            writer.write(data)
            await writer.drain()
        raise EOFError


async def until(true: Any, within_s: float = 10.0) -> float:
    """Wait for an awaitable condition, called again and again; return how long it took."""
    began = time.monotonic()
    while not await true():
        assert time.monotonic() - began < patience(within_s), f"not within {within_s} s"
        await asyncio.sleep(0.01)
    return time.monotonic() - began
