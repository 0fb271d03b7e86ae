"""What comes from those who know the job's key, or whom we ask, gone wrong: vaults, beats, engines, probes, rewards."""

import asyncio
import gc
import io
import json
import math
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, redirect_stdout, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from fuzz_kit import HOSTILE, altered, changed, fuzzed, numbers, text_of, values, words
from hypothesis import given
from hypothesis import strategies as st

from elasticrl.agent.datagram import BEAT, HELLO, PING, PONG, TIMED, Said, seal, unseal
from elasticrl.contract.model import Member, Phase, Plan, Seat
from elasticrl.contract.settings import Membership
from elasticrl.daemon.neighbours import Neighbours
from elasticrl.diagnose import probe
from elasticrl.ppo.rewards import Answer, Endpoint, RewardError
from elasticrl.ppo.rollout import process
from elasticrl.ppo.rollout.engine import Request, Sampling
from elasticrl.ppo.rollout.service import Service
from elasticrl.ppo.rollout.weights import Tag
from elasticrl.ppo.rollout.wire import PROTOCOL, SOCKET, Frame, Lost, Refused, Remote, Talk
from elasticrl.runtime.vault import layout
from elasticrl.runtime.vault.channel import Channel, greet
from elasticrl.runtime.vault.layout import Stamp, Table
from elasticrl.runtime.vault.piece import whole
from elasticrl.runtime.vault.server import Options, Server
from elasticrl.runtime.vault.version import Cut, Version

KEY = b"k" * 32
WITHIN_S = 60.0  # for what takes a moment
ROOM = 64 << 20  # of what a lie about lengths may make us take: this machine has other tests


@pytest.fixture(autouse=True)
def only_its_own() -> Iterator[None]:
    """Collecting looks at what a test has made, not at all that is there."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


# ---- vaults

STAMP = Stamp(
    job="j", node="n01", writer="w", version=Version(4), generation=1, shard=0, world=1, lineage=(Cut(1, Version(0)),)
)
TABLE = Table((whole("model.w", "uint8", (100,)),))
DATA = bytes(range(TABLE.starts[-1]))
TEXT = layout.header(STAMP, TABLE, {"step": 4})
IDENTITY, _, _ = (json.loads(line) for line in TEXT.split(b"\n"))
GET = {"op": "get", "step": 4, "update": 0, "generation": 1, "shard": 0, "world": 1, "blocks": None}
Said3 = tuple[Any, bytes, int]  # a frame, or its bytes; what follows it; how much more is promised than that


def put(text: bytes, *, size: Any = None, data: bytes = DATA, sums: bytes | None = None) -> list[Said3]:
    """What leaves a shard with that header."""
    told = len(DATA) if size is None else size
    blocks = min(-(-told // layout.BLOCK), 64) if isinstance(told, int) else 1
    good = layout.checksum(memoryview(data)) * max(blocks, 0)
    return [
        ({"op": "put", "data_bytes": told}, text, 0), ({"ok": True}, good if sums is None else sums, 0),
        ({"block": 0}, data, 0),
    ]  # fmt: skip


def _sized(identity: Any, table: Any, values_: Any) -> list[Said3]:
    """A put whose sizes agree with its table, whatever that says."""
    text = b"\n".join(map(text_of, (identity, table, values_)))
    with suppress(Exception):  # it is the reader that is tested
        size = layout.parse_header(text)[1].starts[-1]
        return put(text, size=size if size < ROOM else len(DATA))
    return put(text)


rows = st.lists(
    st.one_of(altered({"row": json.loads(TABLE.text)[0]}).map(lambda made: made.get("row")), values), max_size=3
)
puts = st.one_of(
    st.builds(_sized, altered(IDENTITY), st.just(json.loads(TABLE.text)), values),
    st.builds(_sized, st.just(IDENTITY), rows, values),
    changed(st.just(TEXT)).map(put),
    st.builds(put, st.just(TEXT), sums=st.binary(max_size=9)),
    st.builds(put, st.just(TEXT), size=numbers, data=st.binary(max_size=120)),
)
gets = altered(GET).map(lambda asked: [({"op": "get", **asked}, b"", 0)])
lies = st.tuples(
    st.one_of(
        altered(GET), altered({"op": "put", "data_bytes": len(DATA)}), altered({"block": 0}), st.dictionaries(words, values),
        st.sampled_from(HOSTILE), values.map(text_of),
    ),
    st.binary(max_size=40),
    st.sampled_from([0, 0, 1, -1, 1 << 20, 1 << 25, 1 << 62]),
)  # fmt: skip


async def tell(channel: Channel, said: Iterable[Said3]) -> None:
    """Frames that are signed as they should be, and whatever else is wrong with them."""
    for frame, raw, more in said:
        if isinstance(frame, bytes):
            assert channel._signer is not None
            head = len(frame).to_bytes(4, "big") + channel._signer.sign(frame) + frame
        else:
            head = channel._frame(frame, len(raw) + more)
        await channel._put(head + raw)


async def member(port: int, node: str = "n01") -> Channel:
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    return await greet(sock, key=KEY, job="j", node=node, deadline_s=WITHIN_S)


async def hung_up(channel: Channel) -> None:
    """Say no more, and wait until the other side has had enough."""
    with suppress(OSError, TimeoutError):
        channel.sock.shutdown(socket.SHUT_WR)
        while await asyncio.wait_for(asyncio.get_running_loop().sock_recv(channel.sock, 1 << 16), WITHIN_S):
            pass
    channel.close()


@fuzzed
@given(st.lists(st.one_of(puts, gets, st.lists(lies, min_size=1, max_size=3)), min_size=1, max_size=4), st.booleans())
def test_a_member_that_has_gone_wrong_ends_its_own_conversation_alone(told: list[list[Said3]], before: bool) -> None:
    """And the next one's shard is kept, and given back as it was."""
    wrong: list[Mapping[str, Any]] = []

    async def script() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "vault"
            server = Server(
                Options(job="j", node="n00", directory=place, listen="127.0.0.1:0", key=KEY, deadline_s=0.5)
            )
            await server.start()
            running = asyncio.ensure_future(server.run())
            for said in [put(TEXT), *told] if before else told:
                channel = await member(server.port)
                with suppress(OSError, TimeoutError):  # it has hung up in the middle
                    await tell(channel, said)
                await hung_up(channel)
            await given_back(server.port)
            assert not running.done(), running
            server.stop()
            await asyncio.wait_for(running, WITHIN_S)

    asyncio.run(script())
    gc.collect()
    assert wrong == []


async def given_back(port: int) -> None:
    """A shard that is newer than all the others."""
    stamp = replace(STAMP, writer="last", version=Version(1 << 50), generation=1 << 50)
    channel = await member(port)
    await tell(channel, put(layout.header(stamp, TABLE, {})))
    answer, _ = await channel.receive()
    if not answer.get("have"):
        for _ in range(2):
            answer, _ = await channel.receive()
    assert answer["ok"], answer
    answer, size = await channel.ask({**GET, "step": 1 << 50, "generation": 1 << 50})
    await channel.read(size)
    _, size = await channel.receive()
    assert await channel.read(size) == layout.checksum(memoryview(DATA))
    _, size = await channel.receive()
    assert await channel.read(size) == DATA
    channel.close()


# ---- beats

ME, OTHER = Member(node="n00", incarnation=1), Member(node="n01", incarnation=1)
RING = Plan(
    generation=1, phase=Phase.TRAIN,
    seats=(Seat(member=ME, born=1, beat="127.0.0.1:9"), Seat(member=OTHER, born=1, beat="127.0.0.1:9", echo="127.0.0.1:9")),
)  # fmt: skip
whole_numbers = st.one_of(st.integers(0, 9), st.integers(0, 2**64 - 1), st.sampled_from([2**62, 2**63, 2**64 - 1]))
where = st.one_of(
    st.sampled_from(["127.0.0.1:9", "", "x", ":", "[::1]:9", "127.0.0.1:99999", "127.0.0.1:-1", "x:" + "9" * 5000, "\x00:1"]),
    st.text(max_size=20),
)  # fmt: skip
names = st.one_of(st.just("n01"), st.just("n00"), st.text(max_size=300))
sayings = st.builds(
    Said,
    kind=st.one_of(st.sampled_from([BEAT, PING, PONG, TIMED, HELLO]), st.integers(0, 255)),
    member=st.builds(Member, node=names, incarnation=st.one_of(st.just(1), whole_numbers)),
    number=whole_numbers,
    session=whole_numbers,
    to=st.one_of(st.just(7), st.just(7), whole_numbers),
    asked=whole_numbers,
    lain_s=st.floats(0, 5000),
    address=where,
)


class Wire:
    """A transport that only counts; what cannot be sent is refused as by asyncio's."""

    def __init__(self) -> None:
        self.sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.sent: list[bytes] = []

    def sendto(self, data: bytes, addr: tuple[str, int]) -> None:
        assert isinstance(addr[1], int)
        self.sent.append(data)

    def close(self) -> None:
        self.sock.close()

    def get_extra_info(self, name: str) -> Any:
        assert name == "socket"
        return self.sock


@fuzzed
@given(st.lists(st.tuples(sayings, st.binary(max_size=4)), max_size=8))
def test_no_beat_that_a_member_signed_harms_who_hears_it(several: list[tuple[Said, bytes]]) -> None:
    """Whatever it says, and whatever stands behind it: what is asked next is answered."""
    refused: list[str] = []
    heard = Neighbours(ME, KEY, Membership(), post=lambda _: None, refused=lambda _, why, __: refused.append(why))
    with closing(Wire()) as wire:
        heard._transport, heard._session, heard.address = wire, 7, "127.0.0.1:7"
        heard.follow(RING)
        for said, more in several:
            body = seal(KEY, said, ME.node)[:-16] + more
            heard.datagram_received(body + _mac(body), ("127.0.0.1", 9))
            heard.judge(time.monotonic())
        stranger = Said(
            kind=PING, member=Member(node="n09", incarnation=1), number=1, session=3, to=0, address="127.0.0.1:9"
        )
        heard.datagram_received(seal(KEY, stranger, ME.node), ("127.0.0.1", 9))
        answer = unseal(KEY, wire.sent[-1], "n09")
        assert isinstance(answer, Said)
        assert answer.kind == HELLO
        asked = replace(stranger, to=answer.session, number=2**64 - 1, member=Member(node="n09", incarnation=2**64 - 1))
        heard.datagram_received(seal(KEY, asked, ME.node), ("127.0.0.1", 9))
        answer = unseal(KEY, wire.sent[-1], "n09")
        assert isinstance(answer, Said)
        assert answer.kind == TIMED
        assert all(isinstance(name, str) for name in heard.latency)


def _mac(body: bytes) -> bytes:
    from elasticrl.agent import datagram

    return datagram._mac(KEY, body, ME.node)


# ---- engines

TAG = Tag(life="a", version=3)
SAMPLING = Sampling(prompt_tokens=7, max_tokens=6, rows=16, eos=(11,), pad=10)
GENERATE: dict[str, Any] = {
    "tag": asdict(TAG), "ids": ["a", "b"], "seeds": [1, 2], "lengths": [2, 1], "widths": [0, 4],
    "blocks": ["", "x"], "draws": [None, {"tokens": 1, "temperature": 0.0}],
}  # fmt: skip
ASKS: list[tuple[dict[str, Any], bytes]] = [
    ({"op": "generate", **GENERATE}, struct.pack("<3i", 3, 1, 4)), ({"op": "hello"}, b""), ({"op": "probe"}, b""),
    ({"op": "check"}, b""),
    ({"op": "load", "tag": asdict(TAG)}, b""),
    ({"op": "judge", "id": 1, "role": "ref", "shape": [1, 2]}, bytes(8)),
    ({"op": "put", "page": {"tag": {"life": "a", "version": 4}, "buckets": [{"bytes": 4, "crc": 0}]}}, b""),
    ({"op": "piece"}, bytes(4)), ({"op": "whole"}, b""),
    ({"op": "cast", "page": {"tag": {"life": "a", "version": 4}, "buckets": []}, "within_s": 0.1}, b""),
]  # fmt: skip
asks = st.sampled_from(ASKS).flatmap(
    lambda each: st.tuples(
        st.one_of(st.just(each[0]), altered({"v": PROTOCOL, **each[0]}), st.dictionaries(words, values)),
        st.one_of(st.just(each[1]), st.binary(max_size=40)),
    )
)
noise = st.one_of(
    st.sampled_from(HOSTILE), changed(st.just(b"\x00\x00\x00\x02" + bytes(8) + b"{}")), st.binary(max_size=60)
)


class Echoes:
    """A program that answers each request with one token."""

    versions: Mapping[str, str] = {}
    vocabulary = 16

    def __init__(self) -> None:
        self.keys: list[str] = []

    def load(self, home: Path, tag: Tag) -> None:
        """Nothing."""

    def add(self, key: str, request: Request, *, tokens: int | None = None) -> None:  # noqa: ARG002
        assert all(0 <= token < self.vocabulary for token in request.prompt)
        self.keys.append(key)

    def drop(self, keys: Iterable[str]) -> None:
        gone = set(keys)
        self.keys = [key for key in self.keys if key not in gone]

    def step(self, alive: Any) -> Iterable[process.Said]:  # noqa: ARG002
        keys, self.keys = self.keys, []
        return [process.Said(key=key, tokens=(1,), logprobs=(-0.5,), ended=True) for key in keys]


@contextmanager
def an_engine() -> Iterator[process.Server]:
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "key"
        key.touch(mode=0o600)
        key.write_bytes(KEY)
        service = Service(
            program="torch", model="m", sampling=SAMPLING, dtype="float32", attention="sdpa", device="cpu", threads=1,
            idle_s=600.0, gpu_memory_utilization=0.05, kv_cache_bytes=1 << 20, tensor_parallel=1, max_num_seqs=4,
            chunked_prefill=True, prefix_caching=True, batch_invariant=False, listen="127.0.0.1:0", job="j", node="r0",
            key_file=str(key),
        )  # fmt: skip
        server = process.Server(Echoes(), service, Path(folder))
        server.tag = TAG
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        deadline = time.monotonic() + WITHIN_S
        while not server._port:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        yield server
        with suppress(Lost, Refused):
            talk = Talk(Path(folder) / SOCKET, within_s=WITHIN_S)
            talk.send("end")
            talk.receive()
            talk.close()
        thread.join(WITHIN_S)
        assert not thread.is_alive()
        for visitor in server._all:  # a process ends with them
            visitor.sock.close()
        server._selector.close()


@fuzzed
@given(st.lists(st.lists(asks, max_size=3), max_size=3), st.lists(noise, max_size=3), st.booleans())
def test_an_engine_serves_on_whatever_a_trainer_asks(
    told: list[list[tuple[dict[str, Any], bytes]]], strangers: list[bytes], away: bool
) -> None:
    said = io.StringIO()
    with redirect_stdout(said), an_engine() as server:
        remote = Remote(address=f"127.0.0.1:{server._port}", job="j", node="n00", key=KEY)
        for data in strangers:
            with closing(socket.create_connection(("127.0.0.1", server._port), WITHIN_S)) as sock, suppress(OSError):
                sock.sendall(data)
        for asked in told:
            talk = Talk(remote if away else server.home / SOCKET, within_s=WITHIN_S)
            for says, raw in asked:
                with suppress(OSError):
                    talk._sock.sendall(Frame(says={"v": PROTOCOL, **says}, raw=raw).pack(talk._inbox.signer))
            talk.close()
        talk = Talk(remote, within_s=WITHIN_S)
        assert server.tag is not None
        talk.send("generate", struct.pack("<3i", 3, 1, 4), **{**GENERATE, "tag": asdict(server.tag)})
        answers = {talk.receive().says["id"] for _ in range(2)}
        assert answers == {"a", "b"}
        talk.close()
    assert "bug" not in said.getvalue(), said.getvalue()


# ---- probes of the network

TASK = probe.Task(me="n00", token="g14", nodes={"n00": "127.0.0.1:0", "n01": "127.0.0.1:9"})
PINGED = probe.HEAD.pack(probe.MAGIC, probe.PING, probe.digest("g14"), probe.digest("n01"), 1, 2.0, 0)
PONGED = probe.HEAD.pack(probe.MAGIC, probe.PONG, probe.digest("g14"), probe.digest("n01"), 1, math.nan, 9)
KEYED = probe.digest("g14") + b"K" + struct.pack("!H", 1) + b"k" + struct.pack("!i", 2) + b"vv"
COUNTED = probe.digest("g14") + b"B" + bytes(50)


@fuzzed
@given(
    st.lists(changed(st.sampled_from([PINGED, PONGED])), max_size=6),
    st.lists(changed(st.sampled_from([KEYED, COUNTED])), max_size=6),
)
def test_a_probe_answers_on_whatever_comes_to_its_port(datagrams: list[bytes], several: list[bytes]) -> None:
    died: list[Any] = []
    with pytest.MonkeyPatch.context() as patched, closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as n01:
        patched.setattr(threading, "excepthook", died.append)
        n01.bind(("127.0.0.1", 0))
        n01.settimeout(WITHIN_S)
        task = replace(TASK, nodes={"n00": "127.0.0.1:0", "n01": f"127.0.0.1:{n01.getsockname()[1]}"})
        post = probe.Post(task, socket.AF_INET, ("127.0.0.1", 0))
        port = probe.Port(task, socket.AF_INET, ("127.0.0.1", 0))
        try:
            at = post.socket.getsockname()
            for data in datagrams:
                with suppress(OSError):  # too long for one
                    n01.sendto(data, at)
            for data in several:
                with (
                    closing(socket.create_connection(port.listener.getsockname(), WITHIN_S)) as sock,
                    suppress(OSError),
                ):
                    sock.sendall(data)
            n01.sendto(
                probe.HEAD.pack(probe.MAGIC, probe.PING, probe.digest("g14"), probe.digest("n01"), 77, 2.0, 0), at
            )
            while True:
                answer = probe.HEAD.unpack_from(n01.recv(1 << 16))
                if answer[1] == probe.PONG and answer[4] == 77:
                    break
            with closing(socket.create_connection(port.listener.getsockname(), WITHIN_S)) as sock:
                sock.sendall(KEYED)
                assert probe.receive(sock, 6) == struct.pack("!i", 2) + b"vv"
            assert sum(map(len, port.keys.values())) < 1 << 20
        finally:
            for sock in (post.socket, port.listener):
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                sock.close()
    assert died == []


# ---- rewards

ANSWER = Answer(id="0/1", prompt="p", response="r", pieces=("r",), tokens=(1, 2), ended=True, record={})
REPLY = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 17\r\n\r\n{"scores": [1.0]}'
CHUNKED = b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n11\r\n{"scores": [1.0]}\r\n0\r\n\r\n'
MOVED = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/x\r\nContent-Length: 0\r\n\r\n"
WRONG = b"HTTP/1.1 401 No\r\nWWW-Authenticate: Basic realm=x\r\nContent-Length: 2\r\n\r\nno"
LED = [b"http://[", b"//[::1", b"http://\xff", b"file:///etc/passwd", b"http://x:99999999/", b"http:// x", b""]


def replied(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


replies = st.one_of(
    changed(st.sampled_from([REPLY, CHUNKED, MOVED, WRONG])),
    st.one_of(altered({"scores": [1.0]}), st.dictionaries(st.just("scores"), values), values).map(text_of).map(replied),
    st.sampled_from(LED).map(lambda to: MOVED.replace(b"http://127.0.0.1:1/x", to)),
    st.sampled_from(HOSTILE),
)


@contextmanager
def an_endpoint(reply: bytes) -> Iterator[str]:
    """Answers everybody with these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    with sock, suppress(OSError):
                        sock.settimeout(WITHIN_S)
                        sock.recv(1 << 16)
                        sock.sendall(reply)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/score"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(WITHIN_S)


@fuzzed
@given(replies)
def test_what_a_reward_endpoint_replies_is_a_score_or_an_error_of_the_reward(reply: bytes) -> None:
    with an_endpoint(reply) as url:
        endpoint = Endpoint(url=url, timeout_s=5.0, retries=0, deadline_s=0.2)
        with suppress(RewardError):
            (score,) = endpoint.score([ANSWER])
            assert all(map(math.isfinite, score if isinstance(score, list) else [score]))
