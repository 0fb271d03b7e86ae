"""Talking to the vault server of this node, from a worker or the daemon: one line of JSON there, one line back.

The one idea: every question carries its own deadline, and a server that was restarted in between is simply called again.
"""

import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elasticrl.base.parsed import parsed
from elasticrl.runtime.vault.channel import CAME, PROTOCOL, STILL
from elasticrl.runtime.vault.errors import CopiesLate, VaultError
from elasticrl.runtime.vault.version import Version

GRACE_S = 1.0  # beyond a question's own deadline, for its answer to arrive
TURN_S = 0.05  # between looks whether an answer is still wanted


class Control:
    """A connection to the vault server's control socket; safe to use from several threads."""

    def __init__(self, path: Path, *, deadline_s: float = 5.0) -> None:
        self.path = path
        self.deadline_s = deadline_s
        self.nearer: Callable[[], None] = lambda: None  # called as the server says that more has come
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._rest = b""

    def ask(
        self, op: str, *, timeout_s: float | None = None, turn: Callable[[], None] = lambda: None, **fields: object
    ) -> dict[str, Any]:
        """The server's answer; VaultError with its sentence if it refuses, or with ours if it doesn't answer in time. A server
        that says that it is at it has as long again. `turn` is called meanwhile, and may raise.
        """
        patience_s = self.deadline_s if timeout_s is None else timeout_s + GRACE_S
        limit = time.monotonic() + patience_s
        if timeout_s is not None:
            fields["timeout_s"] = timeout_s
        line = json.dumps({"v": PROTOCOL, "op": op, **fields}).encode() + b"\n"
        with self._lock:
            fresh = self._sock is None
            try:
                answer = self._exchange(line, limit, patience_s, turn)
            except (OSError, ValueError) as error:
                self._hang_up()
                if fresh or time.monotonic() >= limit:
                    raise self._silent(op, error) from error
                try:
                    answer = self._exchange(line, limit, patience_s, turn)
                except (OSError, ValueError) as again:
                    self._hang_up()
                    raise self._silent(op, again) from again
            except BaseException:
                self._hang_up()  # the answer would pass for that to another question
                raise
        if not answer.get("ok"):
            raise VaultError(str(answer.get("why", "the vault refused")))
        return answer

    def _exchange(self, line: bytes, limit: float, patience_s: float, turn: Callable[[], None]) -> dict[str, Any]:
        if self._sock is None:
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._sock.settimeout(max(limit - time.monotonic(), 0.001))
            self._sock.connect(str(self.path))
            self._rest = b""
        self._sock.settimeout(max(limit - time.monotonic(), 0.001))
        self._sock.sendall(line)
        came = 0
        while True:
            while b"\n" not in self._rest:
                left_s = max(limit - time.monotonic(), 0.001)
                self._sock.settimeout(min(left_s, TURN_S))
                try:
                    more = self._sock.recv(1 << 16)
                except TimeoutError:
                    turn()
                    if left_s > TURN_S:
                        continue
                    raise
                if not more:
                    raise ConnectionResetError("the vault server closed the connection")
                self._rest += more
            reply, _, self._rest = self._rest.partition(b"\n")
            answer = parsed(reply)
            if not isinstance(answer, dict):
                raise ValueError(f"not an answer: {reply[:80]!r}")
            if not answer.get(STILL):
                return answer
            limit = time.monotonic() + patience_s
            if (more_came := int(answer.get(CAME, 0))) > came:
                came = more_came
                self.nearer()

    def _silent(self, op: str, error: Exception) -> VaultError:
        return VaultError(
            f"The vault server at {self.path} did not answer {op!r} ({error or type(error).__name__}). "
            "Snapshots go on in this node's memory; copies wait until it is back."
        )

    def _hang_up(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def close(self) -> None:
        """End the connection."""
        with self._lock:
            self._hang_up()

    # -- the questions

    def copied(self, writer: str, *, version: Version, generation: int, timeout_s: float) -> int:
        """Wait until all buddies have a version of a worker; how many there are. CopiesLate names those that have not."""
        answer = self.ask(
            "copied",
            timeout_s=timeout_s,
            writer=writer,
            step=version.step,
            update=version.update,
            generation=generation,
        )
        if answer.get("late"):
            why = f"step {version} of {writer} was not copied within {timeout_s:g} s: {answer['late']}"
            raise CopiesLate(why, moved_bytes=int(answer["moved"]))
        return int(answer["copies"])

    def release(self, version: Version) -> None:
        """`version` is whole everywhere: files of dead writers that have nothing as new may go, and what was fetched too."""
        self.ask("release", step=version.step, update=version.update)
