"""What trainer and engine say to each other: frames on a socket, each a line of JSON and raw bytes, with lengths before.

The idea: both ends are one file, and nothing that arrives is ever run. Who waits for an answer waits in short turns, so that it
can be told to give up, and never beyond a deadline. On one node the socket is the engine's own file; between nodes it is TCP,
and both ends prove first that they know the job's key, as vaults do: from then on every frame is signed, raw bytes and all.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from elasticrl.base.address import split
from elasticrl.base.parsed import parsed
from elasticrl.runtime.vault.channel import MAC_BYTES, Signer, keep_alive, proof, transcript_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROTOCOL: Final = 7
SOCKET: Final = "engine.sock"
LIMIT: Final = 1 << 30  # bytes of one frame
STRANGERS: Final = 4096  # the same, of one who has not proved anything yet
TURN_S: Final = 0.02  # of waiting, before it is looked whether to go on
_HEAD = struct.Struct(">IQ")  # bytes of JSON, raw bytes


class Lost(RuntimeError):
    """The engine is gone, silent, or makes no sense; the sentence says which."""


class Refused(RuntimeError):
    """The engine answered, and said why it will not. `kind` is stale, torn, key or other."""

    def __init__(self, why: str, kind: str = "other") -> None:
        super().__init__(why)
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One message. Example: Frame(says={"op": "sample", "id": "0:17", "ended": True}, raw=b"...")"""

    says: dict[str, Any]
    raw: bytes = b""

    def pack(self, signer: Signer | None = None) -> bytes:
        """As it travels."""
        text = json.dumps(self.says, separators=(",", ":")).encode()
        head = _HEAD.pack(len(text), len(self.raw))
        mac = signer.sign(head, text, self.raw) if signer else b""
        return head + mac + text + self.raw


@dataclass(slots=True)
class Inbox:
    """Puts bytes as they come together to frames. With a `signer` only those that the other end has signed."""

    buffer: bytearray = field(default_factory=bytearray)
    signer: Signer | None = None
    limit: int = LIMIT

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are whole now. ValueError: this is not our protocol."""
        self.buffer += data
        while len(self.buffer) >= _HEAD.size:
            text, raw = _HEAD.unpack_from(self.buffer)
            if text + raw > self.limit:
                raise ValueError(f"a frame of {text + raw} bytes was announced (the limit is {self.limit})")
            start = _HEAD.size + (MAC_BYTES if self.signer else 0)
            end = start + text + raw
            if len(self.buffer) < end:
                return
            whole = bytes(self.buffer[:end])
            del self.buffer[:end]
            if self.signer and not self.signer.good(whole[_HEAD.size : start], whole[: _HEAD.size], whole[start:]):
                raise ValueError("a frame is not signed with this session's key")
            says = parsed(whole[start : start + text])
            if not isinstance(says, dict):
                raise TypeError("a frame's text is not an object")
            yield Frame(says=says, raw=whole[start + text :])

    def trust(self, signer: Signer) -> None:
        """The other end has proved that it is one of us."""
        self.signer, self.limit = signer, LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """An engine on another node, and who asks.

    Example: Remote(address="10.0.0.7:41327", job="ppo-7b", node="n00", key=b"...")
    """

    address: str
    job: str
    node: str
    key: bytes

    def __str__(self) -> str:
        return self.address


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """The answering end's part of the proof. `nonce` is one visitor's.

    Example: Door(job="ppo-7b", node="r00", key=b"...", nonce="5f0c")
    """

    job: str
    node: str
    key: bytes
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))

    def challenge(self) -> dict[str, Any]:
        """What a visitor is told first."""
        return {"v": PROTOCOL, "job": self.job, "node": self.node, "nonce": self.nonce}

    def answer(self, says: dict[str, Any]) -> tuple[Signer, str] | None:
        """To what a visitor said to that: the session's signatures and our own proof; None if it does not know the key."""
        transcript = transcript_of(self.job, str(says.get("node")), self.node, self.nonce, str(says.get("nonce")))
        if not hmac.compare_digest(str(says.get("mac")), proof(self.key, b"client", transcript)):
            return None
        return Signer(self.key, b"s", transcript), proof(self.key, b"server", transcript)


class Talk:
    """The trainer's end. `check` is called in each turn of waiting, and may raise what ends it."""

    def __init__(self, where: Path | Remote, *, within_s: float, check: Callable[[], None] = lambda: None) -> None:
        self.within_s, self.check = within_s, check
        to = str(where) if isinstance(where, Path) else split(where.address)
        family = socket.AF_UNIX if isinstance(to, str) else socket.AF_INET6 if ":" in to[0] else socket.AF_INET
        self._sock = socket.socket(family, socket.SOCK_STREAM)
        self._inbox, self._frames = Inbox(), list[Frame]()
        self.heard = time.monotonic()  # when the other end last said anything
        self.quiet_since: float | None = None  # while it is to say something
        try:
            self._sock.settimeout(within_s)
            self._sock.connect(to)
        except OSError as error:
            self._sock.close()
            raise Lost(f"nobody answers at {where} ({error})") from None
        self._sock.settimeout(TURN_S)
        if isinstance(where, Remote):
            try:
                self._greet(where)
            except BaseException:
                self._sock.close()
                raise

    def _greet(self, where: Remote) -> None:
        """Each end proves to the other that it knows the job's key."""
        keep_alive(self._sock)
        self._inbox.limit = STRANGERS
        told = self.receive().says
        if (told.get("v"), told.get("job")) != (PROTOCOL, where.job):
            raise Refused(
                f"the engine at {where} speaks version {told.get('v')} for job {told.get('job')!r}, not {PROTOCOL} for "
                f"{where.job!r}: two jobs on one host need two of rollout.port", "key"
            )  # fmt: skip
        nonce = secrets.token_hex(16)
        transcript = transcript_of(where.job, where.node, str(told.get("node")), str(told.get("nonce")), nonce)
        self.send("prove", node=where.node, nonce=nonce, mac=proof(where.key, b"client", transcript))
        answer = self.receive().says
        if not hmac.compare_digest(str(answer.get("mac")), proof(where.key, b"server", transcript)):
            raise Refused(f"the engine at {where} does not know the job's key", "key")
        self._inbox.trust(Signer(where.key, b"c", transcript))

    def send(self, op: str, raw: bytes = b"", **says: Any) -> None:
        """One question."""
        data = memoryview(Frame(says={"v": PROTOCOL, "op": op, **says}, raw=raw).pack(self._inbox.signer))
        deadline = time.monotonic() + self.within_s
        while data:
            self._turn(deadline, f"took no more of {op!r}")
            try:
                data = data[self._sock.send(data) :]
            except TimeoutError:
                continue
            except OSError as error:
                raise Lost(f"it hung up at {op!r} ({error})") from None

    def receive(self, within_s: float | None = None, *, busy: Callable[[], bool] | None = None) -> Frame:
        """What it says next; Refused if that is no. Where `busy` tells whether the other end has a reason to be silent, any
        other silence ends as everywhere.
        """
        within_s = self.within_s if within_s is None else within_s
        silent_s = within_s if busy is None else self.within_s
        self.quiet_since = since = time.monotonic()
        deadline = since + within_s
        try:
            while not self._frames:
                if busy is not None and busy():
                    since = time.monotonic()
                self._turn(min(deadline, since + silent_s), f"said nothing for {silent_s:g} s")
                self._read()
        finally:
            self.quiet_since = None
        frame = self._frames.pop(0)
        if frame.says.get("op") == "no":
            raise Refused(str(frame.says.get("why")), str(frame.says.get("kind")))
        return frame

    def _read(self) -> None:
        """What has come, or nothing."""
        try:
            data = self._sock.recv(1 << 20)
            if not data:
                raise Lost("it hung up")
            self.heard = time.monotonic()
            self._frames += self._inbox.feed(data)
        except TimeoutError:
            pass
        except (OSError, ValueError, TypeError) as error:
            raise Lost(f"what it said was cut short or is no frame ({error})") from None

    def quiet_for(self, seconds: float) -> bool:
        """Is it to say something, and has said nothing for so long?"""
        return self.quiet_since is not None and time.monotonic() - self.quiet_since > seconds

    def ask(
        self, op: str, *, within_s: float | None = None, busy: Callable[[], bool] | None = None, **says: Any
    ) -> dict[str, Any]:
        """The answer to one question, which signs of life are not."""
        self.send(op, **says)
        within_s = self.within_s if within_s is None else within_s
        deadline = time.monotonic() + within_s
        while (answer := self.receive(within_s, busy=busy).says).get("op") == "alive":
            self._turn(deadline, f"did not answer {op!r} within {within_s:g} s")
        return answer

    def wait(self, for_s: float) -> None:
        """Nothing is expected. Lost as soon as the other end is gone."""
        self.check()
        self._sock.settimeout(for_s)
        try:
            if not self._sock.recv(1, socket.MSG_PEEK):
                raise Lost("it hung up")
            time.sleep(for_s)  # it has said something, which who asks next will read
        except TimeoutError:
            pass
        except OSError as error:
            raise Lost(f"it hung up ({error})") from None
        finally:
            self._sock.settimeout(TURN_S)

    @property
    def host(self) -> str:
        """This end's address."""
        return str(self._sock.getsockname()[0])

    def close(self) -> None:
        """Hang up: whatever was still to be generated for us is dropped."""
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _turn(self, deadline: float, what: str) -> None:
        self.check()
        if time.monotonic() > deadline:
            raise Lost(f"it {what}")
