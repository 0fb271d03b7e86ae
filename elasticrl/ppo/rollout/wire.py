"""What trainer and engine say to each other: frames on a unix socket, each a line of JSON and raw bytes, with lengths before.

The idea: both ends are one file, and nothing that arrives is ever run. Who waits for an answer waits in short turns, so that it
can be told to give up, and never beyond a deadline.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PROTOCOL: Final = 1
SOCKET: Final = "engine.sock"
LIMIT: Final = 1 << 30  # bytes of one frame
TURN_S: Final = 0.02  # of waiting, before it is looked whether to go on
_HEAD = struct.Struct(">IQ")  # bytes of JSON, raw bytes


class Lost(RuntimeError):
    """The engine is gone, silent, or makes no sense; the sentence says which."""


class Refused(RuntimeError):
    """The engine answered, and said why it will not. `kind` is stale, torn or other."""

    def __init__(self, why: str, kind: str = "other") -> None:
        super().__init__(why)
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One message. Example: Frame(says={"op": "sample", "id": "0:17", "ended": True}, raw=b"...")"""

    says: dict[str, Any]
    raw: bytes = b""

    def pack(self) -> bytes:
        """As it travels."""
        text = json.dumps(self.says, separators=(",", ":")).encode()
        return _HEAD.pack(len(text), len(self.raw)) + text + self.raw


@dataclass(slots=True)
class Inbox:
    """Puts bytes as they come together to frames."""

    buffer: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are whole now. ValueError: this is not our protocol."""
        self.buffer += data
        while len(self.buffer) >= _HEAD.size:
            text, raw = _HEAD.unpack_from(self.buffer)
            if text + raw > LIMIT:
                raise ValueError(f"a frame of {text + raw} bytes was announced (the limit is {LIMIT})")
            end = _HEAD.size + text + raw
            if len(self.buffer) < end:
                return
            says = json.loads(self.buffer[_HEAD.size : _HEAD.size + text])
            if not isinstance(says, dict):
                raise TypeError("a frame's text is not an object")
            yield Frame(says=says, raw=bytes(self.buffer[_HEAD.size + text : end]))
            del self.buffer[:end]


class Talk:
    """The trainer's end. `check` is called in each turn of waiting, and may raise what ends it."""

    def __init__(self, path: Path, *, within_s: float, check: Callable[[], None] = lambda: None) -> None:
        self.within_s, self.check = within_s, check
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._inbox, self._frames = Inbox(), list[Frame]()
        try:
            self._sock.settimeout(within_s)
            self._sock.connect(str(path))
        except OSError as error:
            self._sock.close()
            raise Lost(f"nobody answers at {path} ({error})") from None
        self._sock.settimeout(TURN_S)

    def send(self, op: str, raw: bytes = b"", **says: Any) -> None:
        """One question."""
        data = memoryview(Frame(says={"v": PROTOCOL, "op": op, **says}, raw=raw).pack())
        deadline = time.monotonic() + self.within_s
        while data:
            self._turn(deadline, f"took no more of {op!r}")
            try:
                data = data[self._sock.send(data) :]
            except TimeoutError:
                continue
            except OSError as error:
                raise Lost(f"it hung up at {op!r} ({error})") from None

    def receive(self, within_s: float | None = None) -> Frame:
        """What it says next; Refused if that is no."""
        within_s = self.within_s if within_s is None else within_s
        deadline = time.monotonic() + within_s
        while not self._frames:
            self._turn(deadline, f"said nothing for {within_s:g} s")
            try:
                data = self._sock.recv(1 << 20)
                if not data:
                    raise Lost("it hung up")
                self._frames += self._inbox.feed(data)
            except TimeoutError:
                continue
            except (OSError, ValueError, TypeError) as error:
                raise Lost(f"what it said was cut short or is no frame ({error})") from None
        frame = self._frames.pop(0)
        if frame.says.get("op") == "no":
            raise Refused(str(frame.says.get("why")), str(frame.says.get("kind")))
        return frame

    def ask(self, op: str, *, within_s: float | None = None, **says: Any) -> dict[str, Any]:
        """The answer to one question."""
        self.send(op, **says)
        return self.receive(within_s).says

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
