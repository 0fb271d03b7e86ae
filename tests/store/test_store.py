"""What `elasticrl.store.protocol` promises, on every store."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from store_kit import Backend, delete, watching

from chaos.patience import patience
from elasticrl.store import (
    Absent,
    Delete,
    Get,
    LeaseGone,
    Put,
    StoreRefused,
    StoreSettings,
    StoreUnavailable,
    Unchanged,
    open_store,
)


async def test_a_key_is_read_as_it_was_written(backend: Backend) -> None:
    async with backend.open() as store:
        assert await store.get("plan") is None
        first = await store.put("plan", b'{"v": 1}')
        second = await store.put("plan", b"\x00\xff")
        entry = await store.get("plan")
        assert entry is not None
        assert (entry.key, entry.value, entry.create_revision, entry.mod_revision) == (
            "plan",
            b"\x00\xff",
            first,
            second,
        )
        assert second == first + 1


async def test_a_scope_with_a_slash_is_all_under_it_and_one_without_is_one_key(backend: Backend) -> None:
    async with backend.open() as store:
        for key in ("members/n1", "members/n10", "members", "memberships/x"):
            await store.put(key, key.encode())
        assert [entry.key for entry in (await store.scan("members/")).entries] == ["members/n1", "members/n10"]
        assert [entry.key for entry in (await store.scan("members/n1")).entries] == ["members/n1"]
        assert [entry.key for entry in (await store.scan("")).entries] == sorted(
            ["members/n1", "members/n10", "members", "memberships/x"]
        )
        assert (await store.scan("nothing/")).entries == ()
        assert await delete(store, "members/n1") == 1
        assert await delete(store, "members/") == 1
        assert await delete(store, "members/") == 0
        assert [entry.key for entry in (await store.scan("")).entries] == ["members", "memberships/x"]


async def test_a_listing_says_the_revision_that_a_watch_goes_on_from(backend: Backend) -> None:
    async with backend.open() as store:
        revision = await store.put("a", b"1")
        assert (await store.scan("")).revision >= revision
        async with watching(store, "a") as watcher:
            later = await store.put("a", b"2")
            assert await watcher.until(1) == [("a", b"2", later)]


async def test_a_transaction_applies_all_or_nothing(backend: Backend) -> None:
    async with backend.open() as store:
        revision = await store.put("plan", b"1")
        won = await store.txn(
            [Unchanged(key="plan", revision=revision), Absent(key="commit"), Unchanged(key="leader", revision=0)],
            [Put(key="plan", value=b"2"), Put(key="commit", value=b"7"), Get(scope="plan"), Delete(scope="nothing/")],
        )
        assert won.ok
        assert won.revision == revision + 1
        assert won.responses[2].entries[0].value == b"2"
        assert won.responses[3].deleted == 0
        lost = await store.txn(
            [Unchanged(key="plan", revision=revision), Unchanged(key="commit", revision=won.revision)],
            [Put(key="plan", value=b"3"), Put(key="other", value=b"")],
        )
        now = await store.txn([], [Get(scope="plan"), Get(scope="other")])
        assert not lost.ok
        assert (lost.revision, lost.responses) == (won.revision, ())  # nothing was written
        assert [[entry.value for entry in response.entries] for response in now.responses] == [[b"2"], []]


@pytest.mark.parametrize(
    ("compare", "holds"),
    [
        (Absent(key="nothing"), True),
        (Absent(key="there"), False),
        (Unchanged(key="nothing", revision=0), True),
        (Unchanged(key="there", revision=0), False),
    ],
    ids=str,
)
async def test_a_comparison_means_what_it_says(backend: Backend, compare: Absent, holds: bool) -> None:
    async with backend.open() as store:
        await store.put("there", b"yes")
        assert (await store.txn([compare], [])).ok is holds


async def test_of_many_that_compare_and_swap_one_wins(backend: Backend) -> None:
    async with backend.open() as store:
        swaps = [store.txn([Absent(key="leader")], [Put(key="leader", value=b"%d" % n)]) for n in range(20)]
        won = [n for n, result in enumerate(await asyncio.gather(*swaps)) if result.ok]
        assert len(won) == 1
        leader = await store.get("leader")
        assert leader is not None
        assert leader.value == b"%d" % won[0]


async def test_what_cannot_be_done_is_refused_with_a_sentence_and_leaves_no_trace(backend: Backend) -> None:
    async with backend.open() as store:
        before = (await store.scan("")).revision
        with pytest.raises(StoreRefused, match=r"(?i)operations"):
            await store.txn([], [Put(key=f"k{n}", value=b"") for n in range(129)])
        with pytest.raises(StoreRefused, match=r"(?i)(key is written twice|duplicate key)"):
            await store.txn([], [Put(key="same", value=b"1"), Put(key="same", value=b"2")])
        with pytest.raises(StoreRefused, match=r"(?i)larger|too large"):
            await store.put("big", b"x" * 1700 * 1024)
        with pytest.raises(LeaseGone, match="take a new one"):
            await store.put("a", b"", lease=4711)
        with pytest.raises(LeaseGone):
            await store.txn([], [Put(key="a", value=b"", lease=4711)])
        listing = await store.scan("")
        assert (listing.entries, listing.revision) == ((), before)


async def test_a_key_goes_when_its_lease_is_revoked_and_the_watch_says_so(backend: Backend) -> None:
    async with backend.open() as store, watching(store, "members/") as watcher:
        lease = await store.grant(10)
        await store.put("members/n1", b"1", lease.id)
        await store.put("members/n2", b"2", lease.id)
        entry = await store.get("members/n1")
        assert entry is not None
        assert entry.lease == lease.id
        await store.put("members/n2", b"2")  # without the lease: it stays
        await store.revoke(lease.id)
        await store.revoke(lease.id)  # gone already: fine
        assert await store.get("members/n1") is None
        seen = await watcher.until(4)
        assert [(key, value) for key, value, _ in seen[3:]] == [("members/n1", None)]
        assert [entry.key for entry in (await store.scan("members/")).entries] == ["members/n2"]


async def test_a_lease_lives_on_while_it_is_renewed_and_no_shorter_than_its_time_after_the_last(
    backend: Backend,
) -> None:
    async with backend.open() as store, watching(store, "alive") as watcher:
        lease = await store.grant(1)
        assert 1 <= lease.ttl_s <= 3  # the store may lengthen it
        await store.put("alive", b"", lease.id)
        before = time.monotonic()
        last = await store.keepalive(lease.id)
        assert last.held
        assert before <= last.sent <= time.monotonic()
        await watcher.until(2)
        took = time.monotonic() - last.sent
        assert last.ttl_s <= took < last.ttl_s + 2.0
        gone = await store.keepalive(lease.id)
        assert not gone.held
        assert gone.ttl_s == 0


async def test_a_watch_sees_every_change_of_its_scopes_and_no_other(backend: Backend) -> None:
    async with backend.open() as store:
        start = (await store.scan("")).revision + 1
        async with watching(store, "plan", "members/", start=start) as watcher:
            one = await store.put("plan", b"1")
            await store.put("planet", b"")
            two = await store.put("members/n1", b"2")
            await store.put("other", b"")
            three = await delete(store, "members/") and (await store.scan("")).revision
            seen = await watcher.until(3)
        assert sorted(seen, key=lambda event: event[2]) == [
            ("plan", b"1", one),
            ("members/n1", b"2", two),
            ("members/n1", None, three),
        ]


async def test_a_watch_from_the_past_sees_it_first_and_in_order(backend: Backend) -> None:
    async with backend.open() as store:
        start = await store.put("n", b"0")
        revisions = [start] + [await store.put("n", b"%d" % n) for n in range(1, 50)]
        async with watching(store, "n", start=start) as watcher:
            revisions.append(await store.put("n", b"50"))
            seen = await watcher.until(51)
        assert seen == [("n", b"%d" % n, revision) for n, revision in enumerate(revisions)]


async def test_a_transaction_is_seen_whole_however_much_is_sent_at_once(backend: Backend) -> None:
    async with backend.open() as store:
        start = (await store.scan("")).revision + 1
        for _ in range(5):
            await store.txn([], [Put(key=f"members/n{n}", value=b"x" * 10_000) for n in range(100)])
        # From the past, five megabytes come in pieces that etcd cuts without regard to transactions.
        async with watching(store, "members/", start=start) as watcher:
            await watcher.until(500)
        for batch in watcher.batches:
            revisions = [event.revision for event in batch.events]
            assert all(revisions.count(revision) == 100 for revision in set(revisions))


async def test_a_watch_whose_past_was_compacted_says_so_and_ends(backend: Backend) -> None:
    async with backend.open() as store:
        start = await store.put("n", b"0")
        for n in range(10):
            await store.put("n", b"%d" % n)
        await store.compact(start + 5)
        async with watching(store, "n", start=start) as watcher:
            assert "compacted" in await watcher.until_relist()
            assert watcher.seen == []
        listing = await store.scan("n")
        async with watching(store, "n", start=listing.revision + 1) as watcher:
            await store.put("n", b"more")
            await watcher.until(1)


async def test_a_listing_larger_than_one_answer_may_be_is_read_whole_and_at_one_revision(backend: Backend) -> None:
    async with backend.open() as store:
        for n in range(6):
            await store.put(f"big/{n}", bytes([n]) * 1024 * 1024)
        for n in range(0, 600, 100):
            await store.txn([], [Put(key=f"many/{n + k:03}", value=b"") for k in range(100)])
        revision = (await store.scan("nothing")).revision
        big, many = await store.scan("big/"), await store.scan("many/")
        assert [(entry.key, entry.value[0], len(entry.value)) for entry in big.entries] == [
            (f"big/{n}", n, 1024 * 1024) for n in range(6)
        ]
        assert [entry.key for entry in many.entries] == [f"many/{n:03}" for n in range(600)]
        assert big.revision == many.revision == revision
        assert await delete(store, "") == 606


async def test_two_jobs_in_one_store_never_meet(backend: Backend) -> None:
    async with backend.open("ppo/") as ours, backend.open("ppo2/") as theirs, backend.open("ppo/") as again:
        async with watching(ours, "") as watcher:
            revision = await theirs.put("plan", b"theirs")
            mine = await ours.put("plan", b"ours")
            assert [entry.value for entry in (await ours.scan("")).entries] == [b"ours"]
            assert [entry.value for entry in (await theirs.scan("")).entries] == [b"theirs"]
            assert (await ours.txn([Unchanged(key="plan", revision=revision)], [])).ok is False
            assert await delete(ours, "") == 1
            assert await again.get("plan") is None
            assert (await theirs.get("plan")) is not None
            seen = await watcher.until(2)
        assert seen == [("plan", b"ours", mine), ("plan", None, mine + 1)]


async def test_status_tells_how_every_endpoint_is(backend: Backend) -> None:
    async with backend.open() as store:
        revision = await store.put("a", b"")
        status = await store.status()
        assert status.ok
        (endpoint,) = status.endpoints
        assert endpoint.leader
        assert endpoint.version
        assert endpoint.revision >= revision
        assert endpoint.problem is None
        if endpoint.version in {"3.5.0", "3.5.1", "3.5.2"}:
            assert "can corrupt data" in status.warnings[0]


class Wordless(grpc.GenericRpcHandler):
    """A proxy that ends every stream in order, and hands nothing on."""

    def service(self, _: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.stream_stream_rpc_method_handler(lambda *_: iter(()))


@pytest.mark.parametrize("kind", ["grpc", "etcd3"])
async def test_a_renewal_that_is_not_answered_has_an_end(kind: str) -> None:
    # With the package etcd3 its thread's StopIteration reached nobody: no lease was renewed any more.
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((Wordless(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        settings = StoreSettings(
            client=kind, endpoints=(f"http://127.0.0.1:{port}",), timeout_s=0.5, try_timeout_s=0.2, pause_s=0.1
        )
        async with open_store(settings) as store, asyncio.timeout(patience(5.0)):
            with pytest.raises(StoreUnavailable):
                await store.keepalive(7)
    finally:
        server.stop(0).wait()


async def test_a_closed_store_ends_its_watches_and_takes_no_calls(backend: Backend) -> None:
    store = backend.open()
    async with watching(store, "a") as watcher:
        await store.put("a", b"")
        await watcher.until(1)
        await store.close()
        with pytest.raises(StoreUnavailable, match="closed"):
            await watcher._task
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.put("a", b"")
    assert time.monotonic() - began < patience(0.5)
