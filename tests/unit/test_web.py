"""The status page: what it shows, to whom, and that there is nothing else to be had there."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from elasticrl.config import dumps, load
from elasticrl.config.cluster import Web
from elasticrl.daemon import web
from elasticrl.daemon.spec import for_workers
from elasticrl.daemon.web import Page, Reply, Request, guard, page, parse, piece
from elasticrl.status.picture import Picture, Row

PICTURE = Picture(
    job="ppo-7b", state="TRAINING", generation=14, step=1284, committed=1280, nodes=2, known=3, needs=2,
    reason="n03/1 died (lease); <b>2</b> nodes train", here="training",
    rows=(
        Row(node="n00", member="n00/1", state="training", leader=True, rank=0, step=1284),
        Row(node="n01", member="n01/1", state="training", rank=1, slots=2, step=1284),
        Row(node="n03", member="n03/1", state="quarantined", note="<script>alert(1)</script>"),
    ),
    advice=("n03 is out of the plan. See why: elasticrl events n03.",),
)  # fmt: skip


class Told:
    """A job whose picture changes when it is told to."""

    def __init__(self) -> None:
        self.picture = PICTURE
        self.looks = 0

    async def look(self) -> Picture:
        self.looks += 1
        return self.picture


@asynccontextmanager
async def served(told: Told, token: str | None = None, every_s: float = 0.02) -> AsyncIterator[int]:
    shown = Page(told.look, address="127.0.0.1", port=0, token=token, every_s=every_s)
    port = await shown.open()
    try:
        yield port
    finally:
        await shown.close()


async def ask(port: int, head: str) -> tuple[int, str, str]:
    """Code, heads and body of one request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.replace("\n", "\r\n").encode() + b"\r\n\r\n")
    data = (await asyncio.wait_for(reader.read(), 30)).decode()
    writer.close()
    heads, _, body = data.partition("\r\n\r\n")
    return int(heads.split(" ")[1]), heads, body


def test_the_page_says_what_status_says_and_escapes_it() -> None:
    made = page(PICTURE, "nonce")
    for text in (
        "ppo-7b",
        "TRAINING",
        "generation 14",
        "1,284",
        "committed 1,280",
        "2 of 3 nodes, needs 2",
        "quarantined",
        "1-2",
    ):
        assert text in made
    assert "elasticrl events n03" in made
    assert "<script>alert" not in made
    assert "&lt;b&gt;2&lt;/b&gt;" in made
    assert made.count("<script") == 1


def test_only_looking_is_possible() -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        refused = guard(Request(method=method, path="/drain", host="localhost"), None, local=True)
        assert refused is not None
        assert refused.code == 405


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("127.0.0.1:8470", None),
        ("localhost", None),
        ("[::1]:8470", None),
        ("evil.example", 403),
        ("", 403),
        ("127.0.0.1.evil.example", 403),
    ],
)
def test_on_loopback_only_loopbacks_names_are_answered(host: str, code: int | None) -> None:
    request = parse(f"GET / HTTP/1.1\r\nHost: {host}".encode())
    assert isinstance(request, Request)
    refused = guard(request, None, local=True)
    assert (refused.code if refused else None) == code


def test_a_token_of_base64_is_itself_in_an_address() -> None:
    request = parse(b"GET /?token=a+b/c== HTTP/1.1\r\nHost: node-3")
    assert isinstance(request, Request)
    assert guard(request, "a+b/c==", local=False) is None


@pytest.mark.parametrize(
    ("heads", "query", "allowed"),
    [
        ({}, {}, False),
        ({"authorization": "Bearer geheim"}, {}, True),
        ({"authorization": "Basic geheim"}, {}, False),
        ({"authorization": "Bearer geheim2"}, {}, False),
        ({"authorization": "Bearer géheim"}, {}, False),
        ({"cookie": "a=b; elasticrl=geheim"}, {}, True),
        ({"cookie": "elasticrl=falsch; nonsense"}, {}, False),
        ({}, {"token": ["geheim"]}, True),
        ({}, {"token": [""]}, False),
    ],
)
def test_a_token_is_asked_for_wherever_it_is_set(
    heads: dict[str, str], query: dict[str, list[str]], *, allowed: bool
) -> None:
    request = Request(method="GET", path="/", heads=heads, query=query, host="node-3.cluster")
    refused = guard(request, "geheim", local=False)
    assert (refused is None) == allowed
    if refused is not None:
        assert refused.code == 401
        assert "geheim" not in refused.text


@pytest.mark.parametrize(
    "data", [b"", b"GET /", b"\xff\xfe", b"GET / HTTP/2", b"GET / HTTP/1.1 x", b"GET http://[ HTTP/1.1"]
)
def test_what_is_no_request_is_refused(data: bytes) -> None:
    found = parse(data)
    assert isinstance(found, Reply)
    assert found.code == 400


async def pages() -> None:
    told = Told()
    async with served(told) as port:
        code, heads, body = await ask(port, "GET / HTTP/1.1\nHost: localhost")
        assert (code, "TRAINING" in body) == (200, True)
        assert "default-src 'none'" in heads
        assert "Cache-Control: no-store" in heads
        nonce = heads.split("script-src 'nonce-")[1].split("'")[0]
        assert body.count(f'nonce="{nonce}"') == 2
        code, _, body = await ask(port, "GET /status.json HTTP/1.1\nHost: localhost")
        assert json.loads(body)["rows"][2]["state"] == "quarantined"
        code, _, body = await ask(port, "HEAD / HTTP/1.1\nHost: localhost")
        assert (code, body) == (200, "")
        assert (await ask(port, "GET /../etc/passwd HTTP/1.1\nHost: localhost"))[0] == 404
        assert (await ask(port, "POST / HTTP/1.1\nHost: localhost"))[0] == 405
        for host in ("[", "[::1", "[evil]:80", "//["):
            assert (await ask(port, f"GET / HTTP/1.1\nHost: {host}"))[0] in {400, 403}
        assert (await ask(port, "GET / HTTP/1.1\nHost: rebound.example"))[0] == 403
        assert (await ask(port, "GET / HTTP/1.1\nX: " + "x" * 40_000))[0] == 431
        assert (await ask(port, "nonsense"))[0] == 400


async def streams() -> None:
    told = Told()
    async with served(told) as port:
        readers = []
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            readers.append((reader, writer))
        for reader, _ in readers:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
            assert b"text/event-stream" in head
            assert json.loads((await asyncio.wait_for(reader.readuntil(b"\n\n"), 30))[6:]) == piece(PICTURE)
        before = told.looks
        told.picture = replace(PICTURE, state="RECOVERING", step=1285)
        for reader, _ in readers:
            said = json.loads((await asyncio.wait_for(reader.readuntil(b"\n\n"), 30))[6:])
            assert "RECOVERING" in said
        assert told.looks - before <= 60, "one look serves all viewers"
        for _, writer in readers:
            writer.close()


async def tokens() -> None:
    async with served(Told(), token="geheim") as port:
        assert (await ask(port, "GET / HTTP/1.1\nHost: node-3"))[0] == 401
        assert (await ask(port, "GET /events HTTP/1.1\nHost: node-3"))[0] == 401
        code, heads, body = await ask(port, "GET /?token=geheim HTTP/1.1\nHost: node-3")
        assert (code, body) == (303, "")
        assert "Location: /\r\n" in heads + "\r\n", "the token leaves the address"
        assert "HttpOnly; SameSite=Strict" in heads
        assert (await ask(port, "GET / HTTP/1.1\nHost: node-3\nCookie: elasticrl=geheim"))[0] == 200


LOOK = "GET / HTTP/1.1\nHost: localhost"
STREAM = b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def crowds() -> None:
    """Found from outside: whoever said nothing, or held streams, took all places."""
    async with served(Told()) as port:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * web.VIEWERS)]
        assert (await ask(port, LOOK))[0] == 200
        for _, writer in idle:
            writer.close()


async def hoarders() -> None:
    async with served(Told()) as port:
        held = []
        for _ in range(web.STREAMS):
            held.append(await asyncio.open_connection("127.0.0.1", port))
            held[-1][1].write(STREAM)
            assert (await held[-1][0].readline()).startswith(b"HTTP/1.1 200 ")
        code, _, body = await ask(port, STREAM.decode().strip().replace("\r", ""))
        assert (code, "lead to this machine already" in body) == (503, True)
        assert (await ask(port, LOOK))[0] == 200, "the page itself is for everybody"
        elsewhere = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
        elsewhere[1].write(STREAM)
        assert (await elsewhere[0].readline()).startswith(b"HTTP/1.1 503 "), "one user has all addresses of a machine"
        for _, writer in [*held, elsewhere]:
            writer.close()


@pytest.mark.parametrize("story", [pages, streams, tokens, crowds, hoarders])
def test_over_a_real_socket(story: object) -> None:
    asyncio.run(story())  # type: ignore[operator] # each is a coroutine function


def test_a_port_that_is_taken_costs_the_page_alone() -> None:
    told, said = Told(), []

    class Log:
        def info(self, event: str, **fields: object) -> None:
            said.append((event, fields["state"]))

    async def twice() -> None:
        async with served(told) as port, AsyncExitStack() as stack:
            await web.serve(stack, Web(port=port), told.look, Log())
            assert said == [("web.changed", "away")]
            await web.serve(stack, Web(), told.look, Log())
            assert len(said) == 1, "off by default, and silent about it"

    asyncio.run(twice())


def test_a_token_in_a_file_is_the_one_that_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("geheim\n")
    file.chmod(0o600)

    async def one() -> None:
        async with served(Told()) as free:
            pass
        opened: list[str] = []

        class Log:
            def info(self, event: str, **fields: object) -> None:
                opened.append(f"{event} {fields['state']}")

        async with AsyncExitStack() as stack:
            await web.serve(stack, Web(port=free, token_file=str(file)), Told().look, Log())
            assert opened == ["web.changed open"]
            assert (await ask(free, "GET / HTTP/1.1\nHost: localhost"))[0] == 401
            assert (await ask(free, "GET / HTTP/1.1\nHost: x\nAuthorization: Bearer geheim"))[0] == 200

    asyncio.run(one())


def test_workers_never_get_the_token_and_their_file_is_accepted(tmp_path: Path) -> None:
    environ = {"ELASTICRL__WEB__TOKEN": "geheim"}
    own = ("job.name=toy", "job.program=x.py", "store.embedded=true", "web.port=8470", "web.address=0.0.0.0")
    config = tmp_path / "c.yaml"
    config.write_text("{}\n")
    told = dumps(for_workers(load(config, own, environ)))
    file = tmp_path / "workers.yaml"
    file.write_text(told)
    assert "geheim" not in told
    assert load(file, (), {}).job.name == "toy"
