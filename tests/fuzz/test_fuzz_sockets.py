"""What comes over sockets and through the store: control, vault, engine, beats, page, values at every key."""

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fuzz_kit import HOSTILE, altered, changed, fuzzed, text_of, values
from hypothesis import given
from hypothesis import strategies as st

from elasticrl.agent.datagram import BEAT, TIMED, Said, seal
from elasticrl.cli import render
from elasticrl.contract import wire
from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.model import Commit, Member, Phase, Plan, Quarantine, Record, Rollout, Seat, View
from elasticrl.contract.settings import Membership
from elasticrl.daemon import control, stored
from elasticrl.daemon.neighbours import Neighbours
from elasticrl.daemon.web import Page, Request, guard, parse, piece
from elasticrl.ppo.rollout.wire import Inbox
from elasticrl.runtime.vault.server import Options, Server
from elasticrl.shell import keys
from elasticrl.shell.sight import Sight
from elasticrl.status.past import read as read_past
from elasticrl.status.picture import Picture, picture
from elasticrl.store import Put
from elasticrl.store.memory import MemoryServer, MemoryStore

ME = Member(node="n00", incarnation=1)
WITHIN_S = 60.0  # for what takes a moment
lines = st.lists(st.one_of(values.map(text_of), st.sampled_from(HOSTILE), st.binary(max_size=40)), max_size=5)
IDLE = Picture(
    job="j", state="TRAINING", generation=1, step=1, committed=1, nodes=1, known=1, needs=1, reason="<b>", here="", rows=(),
    advice=(),
)  # fmt: skip
BEATS = [
    seal(
        b"s" * 32,
        Said(kind=kind, member=Member(node="n01", incarnation=1), number=7, session=1, address="127.0.0.1:9"),
        ME.node,
    )
    for kind in (BEAT, TIMED)
]
GET = b"GET /?token=x HTTP/1.1\r\nHost: localhost\r\nCookie: elasticrl=x\r\n\r\n"
EVENTS = b"GET /events HTTP/1.1\r\nHost: localhost\r\nCookie: elasticrl=x\r\n\r\n"
FRAME = b"\x00\x00\x00\x02" + bytes(8) + b"{}"
questions = st.one_of(
    altered({"v": 1, "verb": "status", "node": "n00", "force": False}).map(text_of),
    st.dictionaries(st.sampled_from(["v", "verb", "node", "follow", "force"]), values).map(text_of),
    st.sampled_from(HOSTILE),
    changed(st.just(b'{"v":1,"verb":"events","node":"n00"}')),
)


@fuzzed
@given(st.lists(questions, max_size=5))
def test_the_control_socket_answers_or_hangs_up_and_never_says_bug(asked: list[bytes]) -> None:
    bugs: list[str] = []

    async def answer(verb: str, question: Mapping[str, Any], _: control.Asker) -> Any:
        return {"verb": verb, "node": (question.get("node") or "n00").upper()}

    async def events(question: Mapping[str, Any]) -> AsyncIterator[Any]:
        yield (question.get("node") or "all").upper()

    async def script() -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "c.sock"
            server = control.Control(path, answer, {"events": events}, failed=bugs.append)
            await server.open()
            for data in (*asked, b'{"v":1,"verb":"ping"}'):
                reader, writer = await asyncio.open_unix_connection(str(path), limit=1 << 24)
                with suppress(ConnectionError):
                    writer.write(data + b"\n")
                    writer.write_eof()
                    said = await asyncio.wait_for(reader.read(), WITHIN_S)
                    assert all("ok" in json.loads(line) for line in said.splitlines())
                writer.close()
            assert b'"PING"' not in said
            assert json.loads(said)["value"]["verb"] == "ping"
            await server.close()

    asyncio.run(script())
    assert bugs == []


REQUESTS = [
    {"v": 1, "op": "status"}, {"v": 1, "op": "ring", "generation": 1, "members": [["n00", "127.0.0.1:1"]], "copies": 1},
    {"v": 1, "op": "sealed", "writer": "w0", "generation": 1, "step": 1, "update": 0}, {"v": 1, "op": "leave"},
    {"v": 1, "op": "copied", "writer": "w0", "step": 1, "update": 0, "generation": 1, "timeout_s": 0.01},
    {"v": 1, "op": "fetch", "at": "n1", "step": 7, "update": 0, "generation": 1, "shard": 0, "world": 3, "by": "w"},
    {"v": 1, "op": "release", "by": "w0", "file": "x"},
]  # fmt: skip
anyone = st.sampled_from(REQUESTS)
requests = st.one_of(anyone.flatmap(altered).map(text_of), changed(anyone.map(text_of)))


@fuzzed
@given(
    st.lists(requests, max_size=4),
    st.lists(st.one_of(st.binary(max_size=200), st.sampled_from(HOSTILE), requests), max_size=3),
)
def test_a_vault_lives_on_whatever_it_is_told(told: list[bytes], strangers: list[bytes]) -> None:
    async def script() -> None:
        with tempfile.TemporaryDirectory() as folder:
            place, key = Path(folder) / "own" / "vaults", b"k" * 32
            server = Server(
                Options(job="j", node="n00", directory=place, listen="127.0.0.1:0", key=key, deadline_s=0.2)
            )
            await server.start()
            running = asyncio.ensure_future(server.run())
            for data in strangers:
                _, writer = await asyncio.open_connection("127.0.0.1", server.port)
                with suppress(ConnectionError):
                    writer.write(len(data).to_bytes(4, "big") + bytes(32) + data)
                    await writer.drain()
                writer.close()
            for data in (*told, b'{"v":1,"op":"status"}'):
                reader, writer = await asyncio.open_unix_connection(str(server.socket_path), limit=1 << 24)
                with suppress(ConnectionError):
                    writer.write(data + b"\n")
                    writer.write_eof()
                    said = await asyncio.wait_for(reader.read(), WITHIN_S)
                writer.close()
            assert json.loads(said)["ok"], said
            assert not running.done(), running
            server.stop()
            await asyncio.wait_for(running, WITHIN_S)

    asyncio.run(script())


@fuzzed
@given(
    st.lists(
        st.one_of(
            changed(st.just(b"\x00\x00\x00\x02" + bytes(8) + b"{}")), st.binary(max_size=60), st.sampled_from(HOSTILE)
        )
    )
)
def test_an_engine_s_frames_are_read_or_refused(pieces: list[bytes]) -> None:
    inbox = Inbox(limit=4096)
    with suppress(ValueError, TypeError):
        for piece in pieces:
            list(inbox.feed(piece))
    assert len(inbox.buffer) < 1 << 20


@fuzzed
@given(st.one_of(changed(st.just(b'{"v":4,"is":"Gang","generation":1}')), lines.map(b"".join)))
def test_a_line_between_agent_and_daemon_is_a_message_or_garbled(line: bytes) -> None:
    with suppress(wire.Garbled):
        wire.decode(line)


@fuzzed
@given(st.lists(changed(st.sampled_from(BEATS)), max_size=8))
def test_no_datagram_harms_who_hears_it(datagrams: list[bytes]) -> None:
    posted: list[object] = []
    heard = Neighbours(ME, b"s" * 32, Membership(), post=posted.append, refused=lambda *_: None)
    for data in datagrams:
        heard.datagram_received(data, ("127.0.0.1", 9))


async def _look() -> Picture:
    return IDLE


@fuzzed
@given(st.lists(changed(st.sampled_from([GET, EVENTS])), min_size=1, max_size=6), st.sampled_from([None, "x"]))
def test_the_page_answers_every_request(several: list[bytes], token: str | None) -> None:
    """Streams of events stay open while the next ones come; the page goes on, and ends."""
    for data in several:
        request = parse(data)
        if isinstance(request, Request):
            guard(request, token, local=True)

    writers: list[asyncio.StreamWriter] = []

    async def said_to(port: int, data: bytes) -> bytes:
        whole = b"\r\n\r\n" in data or b"events" not in data  # of half a request for a stream more may come
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        with suppress(ConnectionError, *(() if whole else (TimeoutError,))):
            writer.write(data)
            if b"events" not in data:
                writer.write_eof()
            return await asyncio.wait_for(reader.read(1 << 20), WITHIN_S if whole else 0.05)
        return b""

    async def script() -> None:
        shown = Page(_look, address="127.0.0.1", port=0, token=token, every_s=0.01)
        port = await shown.open()
        for data in several:
            said = await said_to(port, data)
            assert said == b"" or said.startswith(b"HTTP/1.1 ")
            if b"text/event-stream" not in said:
                writers[-1].close()
        assert (await said_to(port, GET)).startswith(b"HTTP/1.1 200" if token is None else b"HTTP/1.1 303")
        await asyncio.wait_for(shown.close(), WITHIN_S)
        for writer in writers:
            writer.close()
        await asyncio.sleep(0)

    asyncio.run(script())


PLAN = Plan(generation=3, phase=Phase.TRAIN, seats=(Seat(member=ME, born=1),))
GOOD: dict[str, object] = {
    keys.PLAN: PLAN, keys.COMMIT: Commit(step=6, generation=2), keys.LEADER: ME,
    keys.member_key("n00"): Record(member=ME, step=7), keys.drain_key("n00"): ME,
    keys.quarantine_key("n01"): Quarantine(member=Member(node="n01", incarnation=1), cause=Cause(why=Why.UNREACHED, said="x")),
    keys.rollout_key("r0"): Rollout(member=Member(node="r0", incarnation=1)),
}  # fmt: skip
good = st.sampled_from(sorted(GOOD)).flatmap(
    lambda key: st.tuples(
        st.just(key),
        st.one_of(altered(json.loads(keys.dump(GOOD[key]))).map(text_of), changed(st.just(keys.dump(GOOD[key])))),
    )
)
other = st.tuples(
    st.sampled_from([keys.INTENT, keys.LOOK, keys.WHERE, keys.PAST, keys.SECRET, "members/ü", "quarantine/n02", *GOOD]),
    st.one_of(st.dictionaries(st.sampled_from(["v", "value"]), values).map(text_of), st.sampled_from(HOSTILE)),
)


@fuzzed
@given(st.lists(st.one_of(good, other), max_size=8))
def test_no_value_in_the_store_ends_the_watch_or_what_reads_it(written: list[tuple[str, bytes]]) -> None:
    async def script() -> None:
        store, views = MemoryStore(MemoryServer()), list[View]()
        sight = Sight(store, ME, changed=views.append, complain=lambda _: None)
        for half in (written[::2], written[1::2]):
            for key, value in half:
                await store.txn((), [Put(key=key, value=value)])
            watch = asyncio.ensure_future(sight.watch(everyone=True))
            for number in (7, 9):
                last = Record(member=Member(node="last", incarnation=1), step=number)
                await store.txn((), [Put(key="members/last", value=keys.dump(last))])
            async with asyncio.timeout(WITHIN_S):
                while "last" not in ((sight.view.records if views else None) or {}):
                    assert not watch.done(), watch.exception()
                    await asyncio.sleep(0)
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        records, quarantines = await stored.read_all(store)
        rollouts = stored.readable(Rollout, await store.scan(keys.ROLLOUTS), keys.ROLLOUTS)
        made = picture(
            "j", sight.view, records, quarantines, rollouts, past=await read_past(store), needs=1, here="", now=time.time()
        )  # fmt: skip
        assert piece(made)
        assert render.status(asdict(made), colour=False).replace("\n", "").isprintable()
        await stored.record_at(store, "members/n00")
        for ask in (stored.highest_incarnation(store, "n00"), stored.how_it_ended(store), stored.the_secret(store)):
            with suppress(keys.Unreadable):
                await ask

    asyncio.run(script())
