"""What only the memory store can do: a clock moved by hand, an outage, a lost answer. Its like with etcd is shown by the
suite in tests/store."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from chaos.patience import patience
from elasticrl.store import Absent, Batch, Put, StoreAmbiguous, StoreUnavailable
from elasticrl.store.memory import MemoryServer, MemoryStore


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(clock: Clock) -> MemoryServer:
    return MemoryServer(clock=clock)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(patience(5)):
            await test()

    asyncio.run(bounded())


async def collect(store: MemoryStore, into: list[Batch], start: int = 2) -> None:
    async for batch in store.watch([""], start):
        into.append(batch)  # noqa: PERF401 - they are looked at while more come


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_lease_ends_when_the_clock_says_so(server: MemoryServer, clock: Clock) -> None:
    async def test() -> None:
        store, seen = MemoryStore(server), []
        watch = asyncio.create_task(collect(store, seen))
        lease = await store.grant(10)
        assert lease.sent == 100.0
        await store.put("a", b"", lease.id)
        clock.now += 9.9
        assert (await store.keepalive(lease.id)).sent == clock.now
        clock.now += 9.9
        server.wake()
        await settle()
        assert len(seen) == 1
        clock.now += 0.2
        server.wake()
        await settle()
        assert [event.entry for event in seen[-1].events] == [None]
        assert not (await store.keepalive(lease.id)).held
        watch.cancel()

    run(test)


def test_while_it_is_down_calls_fail_watches_wait_and_no_lease_ends(server: MemoryServer, clock: Clock) -> None:
    async def test() -> None:
        store, seen = MemoryStore(server), []
        watch = asyncio.create_task(collect(store, seen))
        lease = await store.grant(10)
        await store.put("a", b"1", lease.id)
        server.down = True
        with pytest.raises(StoreUnavailable):
            await store.put("a", b"2")
        assert not (await store.status()).ok
        clock.now += 60
        server.wake()
        server.down = False
        assert (await store.get("a")) is not None  # its time began anew, as after a failover of etcd
        clock.now += 10.1
        assert (await store.get("a")) is None
        await settle()
        assert [event.entry and event.entry.value for batch in seen for event in batch.events] == [b"1", None]
        watch.cancel()

    run(test)


@pytest.mark.parametrize(("lose", "applied"), [("answer", True), ("request", False)])
def test_a_transaction_can_be_lost_on_either_way(server: MemoryServer, lose: str, applied: bool) -> None:
    async def test() -> None:
        store = MemoryStore(server)
        server.lose = lose  # type: ignore[assignment]
        with pytest.raises(StoreAmbiguous):
            await store.txn([Absent(key="a")], [Put(key="a", value=b"")])
        assert ((await store.get("a")) is not None) is applied
        assert (await store.txn([Absent(key="a")], [Put(key="a", value=b"")])).ok is not applied

    run(test)
