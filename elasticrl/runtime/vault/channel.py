"""A conversation between two vault servers: authenticated frames over one TCP connection, and bulk data between them.

The one idea: whoever can answer a challenge with the job's key is one of us. Both sides prove it (HMAC-SHA256 over both nonces
and names), and every frame after that carries a MAC under a key of that session with its number and direction, so frames can't
be made up, repeated or sent back. Bulk data travels beside them in blocks with checksums: that finds accidents, but nobody who
changes packets on their way, and is no encryption. Use a network that you would also send gradients over.
"""

import asyncio
import hashlib
import hmac
import json
import secrets
import socket
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from elasticrl.base.parsed import parsed
from elasticrl.base.strangers import HELLO_S
from elasticrl.runtime.vault.errors import VaultError

PROTOCOL = 1
STILL = "still"  # of a line that says: the answer is on its way
CAME = "came"  # of such a line: bytes that have come from elsewhere
MIN_KEY = 16
MAX_FRAME = 32 << 20
MAX_HELLO = 4096  # before the other side has proved anything
MAC_BYTES = 16
ALIVE_S = (60, 10, 3)  # silence before the first question whether the other machine is there, between two, and how many


class PeerError(VaultError):
    """The other side said something that doesn't belong to the conversation, or refused."""


def load_key(path: Path) -> bytes | None:
    """The job's key from a file that only we can read, where neither `ps` nor a child's environment shows it."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise VaultError(f"The key file {path} can be read by others (mode {mode:o}). Do: chmod 600 {path}")
    key = path.read_bytes().strip()
    if key and len(key) < MIN_KEY:
        raise VaultError(
            f"The vault's key has {len(key)} bytes and needs {MIN_KEY} or more. Make one with: openssl rand -hex 32"
        )
    return key or None


def resolved(where: str) -> str:
    """The address of a host, or an address as it is."""
    try:
        return str(socket.getaddrinfo(where, None, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror as error:
        raise VaultError(f"{where!r} is neither a host nor an address ({error.strerror}).") from error


def keep_alive(sock: socket.socket) -> None:
    """A machine that loses power says no goodbye, and whoever only waits for it would wait for ever. Nothing is held back."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in zip((socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT), ALIVE_S, strict=True):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


class Signer:
    """One end's signatures in a session: over what is said, who says it, and how many frames he has said before.

    `side` is b"c" for the caller, b"s" for who answers.
    """

    def __init__(self, key: bytes, side: bytes, transcript: bytes) -> None:
        self._key = hmac.digest(key, b"session|" + transcript, "sha256")
        self._side, self._other = side, b"s" if side == b"c" else b"c"
        self._sent = self._received = 0

    def sign(self, *parts: bytes | memoryview) -> bytes:
        """Of the next frame that is sent."""
        self._sent += 1
        return self._mac(self._side, self._sent - 1, parts)

    def good(self, mac: bytes, *parts: bytes | memoryview) -> bool:
        """Whether that is the other's signature of the frame that comes next."""
        self._received += 1
        return hmac.compare_digest(mac, self._mac(self._other, self._received - 1, parts))

    def _mac(self, side: bytes, number: int, parts: Iterable[bytes | memoryview]) -> bytes:
        made = hmac.new(self._key, side + number.to_bytes(8, "big"), "sha256")
        for part in parts:
            made.update(part)
        return made.digest()[:MAC_BYTES]


PIECE = 1 << 20  # of a file: so often it is known how far it has gone


class Channel:
    """One end of an authenticated connection. Every operation has a deadline."""

    def __init__(self, sock: socket.socket, *, deadline_s: float) -> None:
        sock.setblocking(False)
        keep_alive(sock)
        self.sock = sock
        self.deadline_s = deadline_s
        self.peer = ""
        self.moved_bytes = 0  # of files, sent
        self.came_bytes = 0
        self._signer: Signer | None = None

    async def send(self, frame: Mapping[str, object], raw: bytes | memoryview = b"") -> None:
        """One frame, and the raw bytes that it announces."""
        await self._put(self._frame(frame, len(raw)))
        if raw:
            await self._put(raw)

    async def send_file(self, frame: Mapping[str, object], file: IO[bytes], offset: int, count: int) -> None:
        """As `send`, with the raw bytes straight from a file's pages: they are copied once, by the receiver."""
        await self._put(self._frame(frame, count))
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self.deadline_s):
            try:
                for start in range(offset, offset + count, PIECE):
                    self.moved_bytes += await loop.sock_sendfile(
                        self.sock, file, start, min(PIECE, offset + count - start), fallback=False
                    )
            except asyncio.SendfileNotAvailableError as error:
                # So asyncio calls whatever is met before the first byte, and that is a connection that has just ended.
                raise ConnectionResetError(f"{self.peer or 'the peer'} takes no data: {error}") from error

    def _frame(self, frame: Mapping[str, object], raw: int) -> bytes:
        body = json.dumps({**frame, "raw": raw}, separators=(",", ":")).encode()
        mac = self._signer.sign(body) if self._signer else bytes(MAC_BYTES)
        return len(body).to_bytes(4, "big") + mac + body

    async def refuse(self, why: str) -> None:
        """Say why not, and read on until the other side has heard it: closing at once would lose the sentence with a reset."""
        await self.send({"ok": False, "why": why})
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self.deadline_s):
            while await loop.sock_recv(self.sock, 1 << 20):
                pass

    async def receive(self) -> tuple[dict[str, Any], int]:
        """The next frame, and how many raw bytes follow it."""
        size = int.from_bytes(await self.read(4), "big")
        limit = MAX_FRAME if self._signer else MAX_HELLO
        if size > limit:
            raise PeerError(f"{self.peer or 'a caller'} announced a frame of {size} bytes (the limit is {limit}).")
        mac = await self.read(MAC_BYTES)
        body = await self.read(size)
        if not (self._signer.good(mac, body) if self._signer else mac == bytes(MAC_BYTES)):
            raise PeerError(f"a frame from {self.peer or 'a peer'} is not signed with this session's key.")
        try:
            frame = parsed(body)
        except ValueError:
            frame = None
        if not isinstance(frame, dict) or not isinstance(frame.get("raw"), int) or not 0 <= frame["raw"] <= MAX_FRAME:
            raise PeerError(f"{self.peer or 'a peer'} sent a frame that is not understood.")
        return frame, frame.pop("raw")

    async def ask(self, frame: Mapping[str, object], raw: bytes = b"") -> tuple[dict[str, Any], int]:
        """Send, and take the answer; PeerError with the other side's own sentence if it refuses."""
        await self.send(frame, raw)
        answer, size = await self.receive()
        if not answer.get("ok"):
            raise PeerError(f"{self.peer}: {answer.get('why', 'refused')}")
        return answer, size

    async def read(self, size: int) -> bytes:
        """Exactly that many raw bytes."""
        buffer = bytearray(size)
        await self.read_into(memoryview(buffer))
        return bytes(buffer)

    async def read_into(self, view: memoryview) -> None:
        """Raw bytes until `view` is full."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self.deadline_s):
            while view:
                got = await loop.sock_recv_into(self.sock, view)
                if not got:
                    raise ConnectionResetError(f"{self.peer or 'the peer'} closed the connection")
                view = view[got:]
                self.came_bytes += got

    async def _put(self, data: bytes | memoryview) -> None:
        async with asyncio.timeout(self.deadline_s):
            await asyncio.get_running_loop().sock_sendall(self.sock, data)

    def agree(self, key: bytes, side: bytes, transcript: bytes) -> None:
        """From here on frames are signed."""
        self._signer = Signer(key, side, transcript)

    def close(self) -> None:
        """End the conversation."""
        self.sock.close()


async def greet(sock: socket.socket, *, key: bytes, job: str, node: str, deadline_s: float) -> Channel:
    """The calling side's handshake."""
    channel = Channel(sock, deadline_s=deadline_s)
    hello, _ = await channel.receive()
    if hello.get("v") != PROTOCOL or hello.get("job") != job:
        raise PeerError(
            f"the vault that answers speaks version {hello.get('v')} for job {hello.get('job')!r}; "
            f"this one speaks {PROTOCOL} for {job!r}. Check vault.port: two jobs on one host need two ports."
        )
    channel.peer = str(hello["node"])
    nonce = secrets.token_hex(16)
    transcript = transcript_of(job, node, channel.peer, str(hello["nonce"]), nonce)
    await channel.send({"v": PROTOCOL, "node": node, "nonce": nonce, "mac": proof(key, b"client", transcript)})
    answer, _ = await channel.receive()
    if not answer.get("ok"):
        raise PeerError(f"{channel.peer}: {answer.get('why', 'refused')}")
    if not hmac.compare_digest(str(answer.get("mac")), proof(key, b"server", transcript)):
        raise PeerError(f"{channel.peer} does not know the job's key.")
    channel.agree(key, b"c", transcript)
    return channel


async def welcome(sock: socket.socket, *, key: bytes, job: str, node: str, deadline_s: float) -> Channel:
    """The answering side's handshake."""
    channel = Channel(sock, deadline_s=min(HELLO_S, deadline_s))
    nonce = secrets.token_hex(16)
    await channel.send({"v": PROTOCOL, "job": job, "node": node, "nonce": nonce})
    reply, _ = await channel.receive()
    transcript = transcript_of(job, str(reply.get("node")), node, nonce, str(reply.get("nonce")))
    if not hmac.compare_digest(str(reply.get("mac")), proof(key, b"client", transcript)):
        await channel.send({"ok": False, "why": "the caller does not know the job's key"})
        raise PeerError(f"a caller that says it is {reply.get('node')!r} does not know the job's key.")
    await channel.send({"ok": True, "mac": proof(key, b"server", transcript)})
    channel.peer = str(reply["node"])
    channel.agree(key, b"s", transcript)
    channel.deadline_s = deadline_s
    return channel


def transcript_of(job: str, client: str, server: str, server_nonce: str, client_nonce: str) -> bytes:
    """What both sides have said before they trust each other."""
    return json.dumps([PROTOCOL, job, client, server, server_nonce, client_nonce]).encode()


def proof(key: bytes, side: bytes, transcript: bytes) -> str:
    """That this side (b"client", b"server") knows the key."""
    return hmac.new(key, side + b"|" + transcript, hashlib.sha256).hexdigest()
