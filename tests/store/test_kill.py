"""What a store survives: etcd killed, frozen, cut off, compacted behind our back, wiped. Both clients, real servers."""

import asyncio
import contextlib
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from store_kit import Wire, delete, until, watching

from chaos.etcd import LocalCluster
from chaos.patience import patience
from elasticrl.store import (
    Absent,
    Put,
    Store,
    StoreAmbiguous,
    StoreError,
    StoreSettings,
    StoreUnavailable,
    Unchanged,
    open_store,
)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    cluster = LocalCluster(tmp_path_factory.mktemp("three"), members=3)
    asyncio.run(cluster.__aenter__())
    yield cluster
    asyncio.run(cluster.__aexit__())


def connect(client: str, *endpoints: str, **settings: object) -> Store:
    plain = {"client": client, "endpoints": endpoints, "namespace": "/elasticrl/kill/"}
    return open_store(StoreSettings(**{**plain, **settings}))  # type: ignore[arg-type]


async def write_for_ever(store: Store, key: str) -> None:
    """As a daemon does: what cannot be written now is written later."""
    number = 0
    while True:
        number += 1
        try:
            await store.put(key, b"%d" % number)
        except StoreUnavailable:
            pass
        await asyncio.sleep(0.005)


async def history(store: Store, key: str, start: int, revision: int) -> list[tuple[str, bytes | None, int]]:
    """What really happened, by a fresh watch."""
    async with watching(store, key, start=start) as watcher:
        await watcher._wait(lambda: watcher.seen and watcher.seen[-1][2] >= revision, 10)
        return upto(revision, watcher.seen)


def upto(revision: int, seen: list[tuple[str, bytes | None, int]]) -> list[tuple[str, bytes | None, int]]:
    return [event for event in seen if event[2] <= revision]


async def test_a_watch_outlives_kill_9_of_etcd_with_nothing_lost_and_nothing_twice(client: str, tmp_path: Path) -> None:
    async with LocalCluster(tmp_path, members=1) as etcd, connect(client, *etcd.endpoints) as store:
        start = await store.put("n", b"0")
        async with watching(store, "n", "other/", start=start) as watcher:
            writer = asyncio.create_task(write_for_ever(store, "n"))
            await watcher.until(20)
            etcd.kill(0)
            await etcd.revive(0)
            before = len(watcher.seen)
            began = time.monotonic()
            await watcher.until(before + 20)
            assert time.monotonic() - began < patience(4.0)
            writer.cancel()
            last = (await store.get("n")).mod_revision
            await watcher._wait(lambda: watcher.seen[-1][2] >= last, 10)
            assert upto(last, watcher.seen) == await history(store, "n", start, last)
            assert watcher.relist is None


async def test_an_etcd_that_is_killed_under_load_forgets_one_transaction_at_most(client: str, tmp_path: Path) -> None:
    """3.5.0 to 3.5.2 may, where their index was written and what belongs to it was not: it is whole, and who wrote it, or has
    seen it, notices and writes it again.
    """
    async with LocalCluster(tmp_path, members=1) as etcd, connect(client, *etcd.endpoints) as store:
        for turn in range(4):
            answered: list[int] = []

            async def writes(begun: int, answered: list[int]) -> None:
                for number in range(begun, begun + 100_000):
                    ops = (Put(key=f"a/{number % 7}", value=b"%d" % number), Put(key="n", value=b"%d" % number))
                    with contextlib.suppress(StoreError):
                        await store.txn((), ops)
                        answered.append(number)

            async def enough(answered: list[int]) -> bool:
                return len(answered) > 40

            load = [asyncio.create_task(writes(1 + 100_000 * turn, answered))]
            load += [asyncio.create_task(write_for_ever(store, f"noise/{i}")) for i in range(6)]
            await until(partial(enough, answered))
            etcd.kill(0)
            told = answered[-1]
            for task in load:
                task.cancel()
            await asyncio.gather(*load, return_exceptions=True)
            await etcd.revive(0)
            entry = await store.get("n")
            newest = int(entry.value) if entry else 0
            found = {int(entry.value) for entry in (await store.scan("a/")).entries}
            assert newest >= told - 1
            assert len(found ^ set(range(newest - 6, newest + 1))) <= 2, "one key may be as it was a transaction before"


async def test_a_frozen_etcd_does_not_freeze_its_callers(client: str, tmp_path: Path) -> None:
    async with LocalCluster(tmp_path, members=1) as etcd, connect(client, *etcd.endpoints, timeout_s=1.0) as store:
        start = await store.put("n", b"0")
        lease = await store.grant(5)
        async with watching(store, "n", start=start) as watcher:
            await watcher.until(1)
            await etcd.freeze(0)
            began = time.monotonic()
            calls = [
                store.get("n"),
                store.scan(""),
                store.put("n", b"1"),
                store.grant(5),
                store.keepalive(lease.id),
                store.revoke(lease.id),
                store.txn([Absent(key="y")], [Put(key="y", value=b"")]),
            ]
            ends = await asyncio.gather(*calls, return_exceptions=True)
            took = time.monotonic() - began
            assert [type(end) for end in ends] == [StoreUnavailable] * 6 + [StoreAmbiguous]
            assert took < patience(1.5)
            assert "DEADLINE_EXCEEDED" in str(ends[0])
            assert "check that etcd runs" in str(ends[0])
            status = await store.status()
            assert not status.ok
            etcd.thaw(0)
            last = await store.put("n", b"2")
            await watcher._wait(lambda: watcher.seen[-1][2] >= last, 10)
            # The put that was given up may come true after the later one: see `Store.put`.
            assert upto(last, watcher.seen) == await history(store, "n", start, last)


async def test_a_silent_wire_is_noticed_by_pings_and_a_long_outage_ends_soon_after_the_server_is_back(
    tmp_path: Path,
) -> None:
    """With gRPC's own settings the one takes a minute and the other up to two, and a quiet watch makes no calls that fail."""

    async def noticed(client: str, endpoint: str) -> float:
        async with (
            Wire(endpoint) as wire,
            connect(client, endpoint) as other,
            connect(client, wire.endpoint, ping_s=5.0, ping_timeout_s=1.5) as store,
            watching(store, client) as watcher,
        ):
            await other.put(client, b"1")
            await watcher.until(1)
            await asyncio.sleep(0.5)  # gRPC measures the line after each answer, and would notice the silence by that
            wire.mute = True
            await other.put(client, b"2")

            async def given_up() -> bool:
                return wire.connections > 1

            took = await until(given_up)
            wire.cut()
            await watcher.until(2)
            assert [value for _, value, _ in watcher.seen] == [b"1", b"2"]
            return took

    async def back(client: str, endpoint: str) -> float:
        key = f"{client}-back"
        async with Wire(endpoint) as wire, connect(client, wire.endpoint) as store, watching(store, key) as watcher:
            writer = asyncio.create_task(write_for_ever(store, key))
            await watcher.until(1)
            await wire.close()
            await asyncio.sleep(7.2)
            before, began = len(watcher.seen), time.monotonic()
            await wire.open()
            await watcher.until(before + 1)
            writer.cancel()
            return time.monotonic() - began

    async with LocalCluster(tmp_path, members=1) as etcd:
        clients, (endpoint,) = ("grpc", "etcd3"), etcd.endpoints
        notice_s, back_s = await asyncio.gather(
            asyncio.gather(*(noticed(client, endpoint) for client in clients)),
            asyncio.gather(*(back(client, endpoint) for client in clients)),
        )
    print(f"{clients}: silence noticed after {notice_s} s, back after {back_s} s")
    assert max(notice_s) < 10.0
    assert max(back_s) < 3.0


async def test_a_transaction_whose_answer_was_lost_is_ambiguous_and_was_applied_once(
    client: str, etcd: LocalCluster
) -> None:
    async with Wire(etcd.endpoints[0]) as wire, connect(client, wire.endpoint) as store:
        await delete(store, "")
        before = await store.put("count", b"1")
        wire.mute_answers = True
        attempt = asyncio.ensure_future(
            store.txn([Unchanged(key="count", revision=before)], [Put(key="count", value=b"2")])
        )
        await asyncio.wait_for(wire.lost.wait(), 5)
        wire.cut()
        with pytest.raises(StoreAmbiguous, match="read again"):
            await attempt
        entry = await store.get("count")
        assert (entry.value, entry.mod_revision) == (b"2", before + 1)
        assert (await store.scan("")).revision == before + 1  # not a second time


async def test_a_transaction_whose_request_was_lost_is_ambiguous_too(client: str, etcd: LocalCluster) -> None:
    async with Wire(etcd.endpoints[0]) as wire, connect(client, wire.endpoint) as store:
        await delete(store, "")
        before = await store.put("count", b"1")
        wire.mute = True
        began = time.monotonic()
        with pytest.raises(StoreAmbiguous, match="DEADLINE_EXCEEDED"):
            await store.txn([Unchanged(key="count", revision=before)], [Put(key="count", value=b"2")])
        assert time.monotonic() - began < patience(1.0)  # one try, and no second
        wire.cut()
        assert (await store.get("count")).mod_revision == before


async def test_a_transaction_that_was_certainly_not_sent_is_tried_again(client: str, etcd: LocalCluster) -> None:
    async with Wire(etcd.endpoints[0]) as wire, connect(client, wire.endpoint, timeout_s=2.5) as store:
        await delete(store, "")
        await wire.close()

        async def known() -> bool:
            (endpoint,) = (await store.status()).endpoints
            return "Connection refused" in (endpoint.problem or "")  # a channel that was reset may be written to yet

        await until(known)
        attempt = asyncio.ensure_future(store.txn([Absent(key="a")], [Put(key="a", value=b"")]))
        await asyncio.sleep(0.3)
        assert not attempt.done()
        await wire.open()
        assert (await attempt).ok


async def test_writes_and_leases_whose_answers_were_lost_are_repeated_without_harm(
    client: str, etcd: LocalCluster
) -> None:
    async with Wire(etcd.endpoints[0]) as wire, connect(client, wire.endpoint) as store:
        await delete(store, "")

        async def lose_the_first_answer(call: object) -> object:
            wire.mute_answers = True
            attempt = asyncio.ensure_future(call)  # type: ignore[arg-type]
            await asyncio.wait_for(wire.lost.wait(), 5)
            wire.cut()
            return await attempt

        revision = await lose_the_first_answer(store.put("a", b"1"))
        assert (await store.get("a")).mod_revision == revision
        lease = await lose_the_first_answer(store.grant(20))
        assert (await store.keepalive(lease.id)).held  # its id is ours, so the second grant found the first
        kept = await lose_the_first_answer(store.keepalive(lease.id))
        assert kept.held
        await lose_the_first_answer(store.revoke(lease.id))
        assert not (await store.keepalive(lease.id)).held


async def test_a_lease_is_counted_from_when_its_renewal_was_sent_not_from_when_the_answer_came(
    client: str, etcd: LocalCluster
) -> None:
    async with connect(client, *etcd.endpoints, try_timeout_s=5.0) as store:
        lease = await store.grant(20)
        await etcd.freeze(0)
        renewal = asyncio.ensure_future(store.keepalive(lease.id))
        await asyncio.sleep(0.3)
        thawed = time.monotonic()
        etcd.thaw(0)
        assert (await renewal).sent < thawed


async def test_a_watch_cut_off_while_history_is_compacted_says_so(client: str, etcd: LocalCluster) -> None:
    async with (
        Wire(etcd.endpoints[0]) as wire,
        connect(client, wire.endpoint) as store,
        connect(client, *etcd.endpoints) as other,
        watching(store, "n") as watcher,
    ):
        await other.put("n", b"0")
        await watcher.until(1)
        await wire.close()
        revisions = [await other.put("n", b"%d" % n) for n in range(10)]
        await other.compact(revisions[-1])
        await wire.open()
        assert "compacted" in await watcher.until_relist()
        assert [value for _, value, _ in watcher.seen] == [b"0"]


async def test_a_quiet_watch_is_not_lost_to_compaction_while_connected(client: str, etcd: LocalCluster) -> None:
    async with connect(client, *etcd.endpoints) as store, watching(store, "quiet") as watcher:
        await store.put("quiet", b"at first")
        await watcher.until(1)
        revisions = [await store.put("busy", b"%d" % n) for n in range(10)]
        await store.compact(revisions[-1])
        await store.put("quiet", b"still")
        assert [value for _, value, _ in await watcher.until(2)] == [b"at first", b"still"]


async def test_a_watch_notices_that_etcd_has_lost_its_data(client: str, tmp_path: Path) -> None:
    async with LocalCluster(tmp_path, members=1) as etcd, connect(client, *etcd.endpoints) as store:
        for n in range(10):
            last = await store.put("n", b"%d" % n)
        async with watching(store, "n", start=last) as watcher:
            await watcher.until(1)
            etcd.kill(0)
            shutil.rmtree(tmp_path / "m0" / "data")
            await etcd.revive(0)
            assert "set back" in await watcher.until_relist()
            assert (await store.scan("")).entries == ()


async def test_when_the_leader_of_three_is_killed_writes_go_on_and_none_is_lost_or_doubled(
    client: str, three: LocalCluster
) -> None:
    """A counter, raised by compare-and-swap: an ambiguous answer is settled by reading, as a daemon does."""
    leader = await three.leader()
    try:
        store = connect(client, *three.endpoints)
        async with store:
            await delete(store, "")
            at = await store.put("count", b"0")
            done, gaps, killed = 0, [], 0.0
            began = time.monotonic()
            async with watching(store, "count", start=at) as watcher:
                while done < 150 and time.monotonic() - began < 15:
                    if done == 50 and not killed:
                        three.kill(leader)
                        killed = time.monotonic()
                    wanted, tried = b"%d" % (done + 1), time.monotonic()
                    try:
                        result = await store.txn(
                            [Unchanged(key="count", revision=at)], [Put(key="count", value=wanted)]
                        )
                        assert result.ok
                        at = result.revision
                    except StoreError:
                        try:
                            entry = await store.get("count")
                        except StoreError:
                            continue
                        at = entry.mod_revision
                        if entry.value != wanted:
                            continue
                    done += 1
                    gaps.append((time.monotonic() - tried, time.monotonic() - killed))
                assert done == 150
                seen = await watcher.until(151)
            assert [int(value) for _, value, _ in seen] == list(range(151))
            print(f"{client}: next write {gaps[50][1]:.2f} s after the leader's death")
            assert gaps[50][1] < 5.0
    finally:
        await three.revive(leader)


async def test_calls_and_watches_leave_a_frozen_member_within_one_deadline(client: str, three: LocalCluster) -> None:
    leader = await three.leader()
    frozen = (leader + 1) % 3
    order = three.endpoints[frozen:] + three.endpoints[:frozen]
    async with connect(client, *order) as store, connect(client, three.endpoints[leader]) as other:
        store._at = 0  # where to begin is left to chance: begin at the one that will freeze
        start = await store.put("n", b"0")
        async with watching(store, "n", start=start) as watcher:
            await watcher.until(1)
            await three.freeze(frozen)
            try:
                began = time.monotonic()
                await store.put("mine", b"")
                wrote = time.monotonic() - began
                await other.put("n", b"1")
                await watcher.until(2)
                saw = time.monotonic() - began
            finally:
                three.thaw(frozen)
        print(f"{client}: frozen member left by a call after {wrote:.2f} s, by the watch after {saw:.2f} s")
        assert wrote < 1.5
        assert saw < 2.5


async def test_without_a_quorum_a_transaction_is_not_applied_and_reads_do_not_lie(
    client: str, three: LocalCluster
) -> None:
    leader = await three.leader()
    others = [index for index in range(3) if index != leader]
    async with connect(client, *three.endpoints, timeout_s=1.0) as store:
        before = await store.put("n", b"0")
        for index in others:
            await three.freeze(index)
        try:
            ends = await asyncio.gather(store.put("n", b"1"), store.get("n"), return_exceptions=True)
            assert [type(end) for end in ends] == [
                StoreUnavailable
            ] * 2  # what `get` would tell may have changed elsewhere
        finally:
            for index in others:
                three.thaw(index)
    async with connect(client, *three.endpoints, timeout_s=10.0) as store:
        entry = await store.get("n")
        assert entry.value in {b"0", b"1"}
        assert entry.mod_revision >= before
