"""The status page: what `elasticrl status` says, in a browser, brought up to date by server-sent events. Read-only.

The one idea: the daemon renders, the browser shows. Each event is the finished piece of HTML, so there is one rendering,
nothing that a viewer's machine has to reckon, and the same page without a script. There is no verb here: whoever can look can
do no more.

    GET /              the page
    GET /events        the piece of HTML, whenever it changes (text/event-stream)
    GET /status.json   the same picture as values
"""

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, field
from html import escape
from importlib.resources import files
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from elasticrl.base.address import loops
from elasticrl.base.strangers import put_out
from elasticrl.base.value import dataclass
from elasticrl.base.words import ago, notes, past, span
from elasticrl.config import reveal
from elasticrl.config.cluster import Web
from elasticrl.status.picture import Picture

HEAD_LIMIT: Final = 16 * 1024  # bytes of a request
HEAD_S: Final = 5.0  # for it to arrive
SEND_S: Final = 10.0  # for a viewer to take what is sent
ALIVE_S: Final = 15.0  # between signs of life on a stream where nothing changes
VIEWERS: Final = 64  # who are answered at once
STREAMS: Final = 16  # of them who are kept up to date, from one address
COOKIE: Final = "elasticrl"
LOCAL: Final = frozenset({"localhost", "127.0.0.1", "::1"})
REASONS: Final = {
    200: "OK", 303: "See Other", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found",
    405: "Method Not Allowed", 408: "Request Timeout", 431: "Request Header Fields Too Large", 503: "Service Unavailable",
}  # fmt: skip
GOOD: Final = frozenset({"TRAINING", "GROWING", "FINISHED", "training", "done"})
BAD: Final = frozenset({"CRASH LOOP", "quarantined", "gone", "lost", "failed", "stalled"})
STYLE: Final = (files(__package__) / "web.css").read_text(encoding="utf-8")
SCRIPT: Final = (files(__package__) / "web.js").read_text(encoding="utf-8")

Look = Callable[[], Awaitable[Picture]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a viewer asks. Example: Request(method="GET", path="/", heads={"host": "127.0.0.1:8470"}, host="127.0.0.1")"""

    method: str
    path: str
    query: Mapping[str, list[str]] = field(default_factory=dict)
    heads: Mapping[str, str] = field(default_factory=dict)
    host: str = ""  # its name, without the port

    @property
    def tokens(self) -> list[str]:
        """All that it offers as the token: a bearer's, a cookie, the query's."""
        kind, _, bearer = self.heads.get("authorization", "").partition(" ")
        cookies = dict(
            part.strip().partition("=")[::2] for part in self.heads.get("cookie", "").split(";") if "=" in part
        )
        found = [
            bearer.strip() if kind.lower() == "bearer" else "",
            cookies.get(COOKIE, ""),
            *self.query.get("token", []),
        ]
        return [token for token in found if token]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What is answered at once. Example: Reply(code=404, text="there is no such page")"""

    code: int
    text: str = ""
    kind: str = "text/plain; charset=utf-8"
    heads: Mapping[str, str] = field(default_factory=dict)


def parse(data: bytes) -> Request | Reply:
    """A request's head, or why it is none."""
    try:
        first, *rest = data.decode("ascii").split("\r\n")
        method, target, version = first.split(" ")
        split = urlsplit(target)
        heads = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in rest if line)
        }
        query = parse_qs(split.query.replace("+", "%2B"), max_num_fields=20)  # a token of base64 may have one
        host = urlsplit(f"//{heads.get('host', '')}").hostname or ""
    except ValueError:
        return Reply(code=400, text="this is no HTTP request")
    if not version.startswith("HTTP/1."):
        return Reply(code=400, text="this page is served by HTTP/1")
    return Request(method=method, path=split.path, query=query, heads=heads, host=host)


def guard(request: Request, token: str | None, *, local: bool) -> Reply | None:
    """Why this may not be answered; None if it may. Pure.

    Without a token the page is on loopback, where any web page in this machine's browser could ask for it under a name of its
    own (DNS rebinding): so the name must be loopback's.
    """
    if request.method not in {"GET", "HEAD"}:
        return Reply(code=405, text="this page can only be looked at", heads={"Allow": "GET, HEAD"})
    if token is None:
        return (
            None if request.host in LOCAL or not local else Reply(code=403, text="ask for it as 127.0.0.1 or localhost")
        )
    if any(hmac.compare_digest(offered.encode(), token.encode()) for offered in request.tokens):
        return None
    said = "this page wants the token of the daemon's configuration (web.token_file): /?token=..., or a bearer's"
    return Reply(code=401, text=said, heads={"WWW-Authenticate": "Bearer"})


def piece(seen: Picture) -> str:
    """The picture as HTML."""
    since = f", {ago(seen.committed_s)} ago" if seen.committed_s is not None else ""
    told = f"step {seen.step:,} (committed {seen.committed:,}{since})"
    far = f"{seen.milestone}, by its log" if seen.milestone else told
    word, needs = escape(seen.state), f", needs {seen.needs}" if seen.needs else ""
    teams = any(row.teams for row in seen.rows)  # a column that few need
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td{cls}>{escape(text)}</td>"
            for text, cls in (
                (row.member, ""),
                (span(row.rank, row.slots), ""),
                *([(span(row.team, row.teams), "")] if teams else []),
                (row.state, f' class="{tone(row.state)}"'),
                (row.milestone or (f"{row.step:,}" if row.rank is not None else "-"), ""),
                (row.phase or "-", ""),
                ("; ".join(filter(None, ("leader" if row.leader else "", *notes(asdict(row), ages=False)))), ""),
            )
        )
        + "</tr>"
        for row in seen.rows
    )
    advice = "".join(f"<p>{escape(text)}</p>" for text in seen.advice)
    here = seen.here if seen.here != seen.reason else ""
    return (
        f'<h1>{escape(seen.job)}</h1><p class="state {tone(seen.state)}">{word}</p>'
        f"<p>generation {seen.generation}, {escape(far)}, "
        f"{seen.nodes} of {seen.known} nodes{needs}</p><p class=soft>{escape(seen.reason)}</p>"
        + (f"<p class=soft>{escape(said)}</p>" if (said := past(asdict(seen), ages=False)) else "")
        + (f"<div class=card>{advice}</div>" if advice else "")
        + f"<div class='card scroll'><table><tr><th>node<th>rank{'<th>team' if teams else ''}"
        + "<th>state<th>step<th>phase<th>note</tr>"
        + f"{rows}</table></div>"
        + (f"<p class=soft>{escape(seen.node)} (this node): {escape(here)}</p>" if here else "")
    )


def tone(state: str) -> str:
    """Its colour's class."""
    return "good" if state in GOOD else "bad" if state in BAD else "mid" if state.isupper() else ""


def page(seen: Picture, nonce: str) -> str:
    """The whole page."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(seen.job)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f'<noscript><meta http-equiv="refresh" content="5"></noscript><style nonce="{nonce}">{STYLE}</style></head>'
        f"<body><main>{piece(seen)}</main><footer id=note></footer>"
        f'<script nonce="{nonce}">{SCRIPT}</script></body></html>'
    )


class Page:
    """Serves the page. One picture is made for all viewers, and none while nobody looks."""

    def __init__(self, look: Look, *, address: str, port: int, token: str | None, every_s: float) -> None:
        self._look = look
        self._address, self._port, self._token, self._every_s = address, port, token, every_s
        self._server: asyncio.Server | None = None
        self._asking: dict[
            asyncio.Task[Any], str
        ] = {}  # who have not said what they want, or may not have it; and from where
        self._viewers: set[asyncio.Task[Any]] = set()
        self._streams: list[str] = []  # where they lead to
        self._making = asyncio.Lock()
        self._seen: tuple[float, Picture] | None = None

    async def open(self) -> int:
        """Listen; returns the port. OSError if it is taken."""
        self._server = await asyncio.start_server(self._serve, self._address, self._port, limit=HEAD_LIMIT)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop, and let go of all viewers."""
        if self._server is not None:
            self._server.close()
        tasks = [*self._asking, *self._viewers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def picture(self) -> Picture:
        """Not older than `every_s`."""
        async with self._making:
            now = time.monotonic()
            if self._seen is None or now - self._seen[0] >= self._every_s:
                self._seen = (now, await self._look())
            return self._seen[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        address = str((writer.get_extra_info("peername") or ("",))[0])
        late = put_out(self._asking, address)
        if late is not None:
            del self._asking[late]
            late.cancel()
        self._asking[task] = address
        try:
            await self._one(reader, writer, task, address)
        except (ConnectionError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the viewer has gone, or takes nothing; or we end
        finally:
            writer.close()
            with suppress(OSError, TimeoutError, asyncio.CancelledError):  # what was said last has so long to be taken
                async with asyncio.timeout(SEND_S):
                    await writer.wait_closed()
            writer.transport.abort()
            self._asking.pop(task, None)
            self._viewers.discard(task)

    async def _one(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: asyncio.Task[Any], address: str
    ) -> None:
        try:
            async with asyncio.timeout(HEAD_S):
                data = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            await self._reply(writer, Reply(code=431, text=f"a request has at most {HEAD_LIMIT} bytes"))
            return
        except TimeoutError:
            await self._reply(writer, Reply(code=408, text=f"a request comes within {HEAD_S:g} s"))
            return
        request = parse(data[:-4])
        refused = request if isinstance(request, Reply) else guard(request, self._token, local=loops(self._address))
        if refused is not None:
            await self._reply(writer, refused)
            return
        assert isinstance(request, Request)
        if len(self._viewers) >= VIEWERS:
            await self._reply(writer, Reply(code=503, text=f"{VIEWERS} are looking already"))
            return
        del self._asking[task]
        self._viewers.add(task)
        if request.path == "/events" and request.method == "GET":
            # Of this machine's own addresses there are millions, and one user has them all.
            address = "this machine" if loops(address) else address
            if self._streams.count(address) >= STREAMS:
                await self._reply(writer, Reply(code=503, text=f"{STREAMS} streams lead to {address} already"))
                return
            self._streams.append(address)
            try:
                await self._stream(writer)
            finally:
                self._streams.remove(address)
            return
        await self._reply(writer, await self._answer(request), body=request.method == "GET")

    async def _answer(self, request: Request) -> Reply:
        if request.path == "/status.json":
            return Reply(code=200, text=json.dumps(asdict(await self.picture())), kind="application/json")
        if request.path != "/":
            return Reply(code=404, text="there are /, /events and /status.json")
        if self._token is not None and "token" in request.query:
            # The token leaves the address bar, and with it the history and what a proxy logs next.
            cookie = f"{COOKIE}={self._token}; HttpOnly; SameSite=Strict; Path=/"
            return Reply(code=303, heads={"Location": "/", "Set-Cookie": cookie})
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        text = page(await self.picture(), nonce)
        return Reply(code=200, text=text, kind="text/html; charset=utf-8", heads={"Content-Security-Policy": policy})

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        self._head(writer, 200, {"Content-Type": "text/event-stream"})
        async for text in self._changes():
            writer.write(f"data: {json.dumps(text)}\n\n".encode() if text else b": alive\n\n")
            async with asyncio.timeout(SEND_S):
                await writer.drain()

    async def _changes(self) -> AsyncIterator[str]:
        """The piece whenever it differs from the last one; empty as a sign of life."""
        shown, at = "", 0.0
        while True:
            made, now = piece(await self.picture()), time.monotonic()
            if made != shown or now - at >= ALIVE_S:
                yield made if made != shown else ""
                shown, at = made, now
            await asyncio.sleep(self._every_s)

    async def _reply(self, writer: asyncio.StreamWriter, reply: Reply, *, body: bool = True) -> None:
        data = reply.text.encode()
        self._head(writer, reply.code, {"Content-Type": reply.kind, "Content-Length": str(len(data)), **reply.heads})
        writer.write(data if body else b"")
        async with asyncio.timeout(SEND_S):
            await writer.drain()

    def _head(self, writer: asyncio.StreamWriter, code: int, heads: Mapping[str, str]) -> None:
        always = {
            "Connection": "close", "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }  # fmt: skip
        lines = [
            f"HTTP/1.1 {code} {REASONS[code]}",
            *(f"{name}: {value}" for name, value in (always | dict(heads)).items()),
        ]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())


async def serve(stack: AsyncExitStack, web: Web, look: Look, log: Any) -> None:
    """Serve the page until the stack unwinds, if the configuration asks for it. A port that is taken costs the page alone."""
    if not web.port:
        return
    shown = Page(look, address=web.address, port=web.port, token=reveal(web.token, web.token_file), every_s=web.every_s)
    try:
        port = await shown.open()
    except OSError as error:
        log.info("web.changed", state="away", reason=f"{web.address}:{web.port}: {error.strerror or error}")
        return
    stack.push_async_callback(shown.close)
    log.info("web.changed", state="open", reason=f"http://{web.address}:{port}/")
