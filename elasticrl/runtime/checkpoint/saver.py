"""The background writer as a worker sees it: hand it a vault file, hear later what became of it.

The one idea: what travels to the writer is an open, pinned file descriptor. From that moment on the version can't be written
over, whoever dies; the training thread has spent a tenth of a millisecond and will never wait for a disk.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from elasticrl.base.parsed import parsed
from elasticrl.runtime.checkpoint import ahead
from elasticrl.runtime.checkpoint.manifest import Conditions
from elasticrl.runtime.checkpoint.place import ANSWER_S
from elasticrl.runtime.checkpoint.writer import MESSAGE
from elasticrl.runtime.vault.client import Ticket
from elasticrl.runtime.vault.errors import CheckpointError
from elasticrl.runtime.vault.layout import Torn
from elasticrl.runtime.vault.slots import hold
from elasticrl.runtime.vault.version import Version

MOST = 2  # saves that may be under way at once
Process = subprocess.Popen[bytes] | ahead.Forked
_left: list[Process] = []  # writers that outlive their savers: who forgets a process is complained to by Python


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one request. `manifest` is set on the worker whose writer published: it is ready for its commit."""

    version: Version
    generation: int
    ok: bool
    manifest: str | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """Where each node has a disk of its own: the shards that this one publishes, and on whose disk each shard is.

    Example: Own(shards=(2, 3), nodes=("n00", "n00", "n01", "n01"))
    """

    shards: tuple[int, ...]
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What is kept after a commit."""

    keep_last: int = 3
    keep_every: int = 0
    keep_best: bool = False


class Saver:
    """One worker's background writer: a process that is started once, and that ends when its worker does.

    A save that is under way when the worker is killed is finished: its data is in the vault's file, not in the worker.
    """

    def __init__(
        self,
        where: str,
        *,
        facts: Conditions,
        timeout_s: float = 600.0,
        orphan_s: float = 30.0,
        answer_s: float = ANSWER_S,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.where = where
        self.facts = facts
        self.timeout_s = timeout_s
        self._answer_s = answer_s  # for the store at a URL, with each request: the writer has no configuration
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        self._pending: dict[tuple[Version, int], float] = {}
        self._untold: list[Outcome] = []
        self._orphan_s = (
            orphan_s  # others' shards are waited for so long without a worker, or a few times our own shard
        )
        self._sock, self._process = _start(self._env, orphan_s)

    @property
    def pid(self) -> int:
        """The writer's process."""
        return self._process.pid

    @property
    def busy_s(self) -> float:
        """For how long the oldest save has been under way; 0 if none is. A dead disk shows here, and nowhere in training."""
        return time.monotonic() - min(self._pending.values()) if self._pending else 0.0

    def save(
        self,
        ticket: Ticket,
        *,
        finish: bool,
        own: Own | None = None,
        parent: str | None = None,
        flush: Sequence[int] = (),
        chain: str = "",
    ) -> None:
        """Write this sealed snapshot. `finish` on one worker of the gang: it waits for the others' shards and publishes. With
        `own` on one of each node, which waits for that node's.
        `flush`: files (the ledger) that the writer has on their disk first; flushing is not for the training thread either.
        `chain`: the link of the digests there, for the manifest.

        CheckpointError if it can't be begun, for example because MOST saves are under way already.
        """
        stamp = ticket.stamp
        self._drain()
        if len(self._pending) >= MOST:
            raise CheckpointError(
                f"Step {stamp.version} is not saved: {len(self._pending)} saves to {self.where} are still under way, the "
                f"oldest for {self.busy_s:.0f} s. The disk is slower than checkpoint.every asks for, or it hangs."
            )
        if ticket.path is None:
            raise CheckpointError(f"Step {stamp.version} is not saved: its snapshot is not sealed.")
        held = hold(ticket.path, ticket.seal)
        if isinstance(held, Torn):
            raise CheckpointError(f"Step {stamp.version} is not saved: {ticket.path.name} is {held.reason}.")
        try:
            self._send(
                {
                    "op": "save",
                    "step": stamp.version.step,
                    "update": stamp.version.update,
                    "generation": stamp.generation,
                    "where": self.where,
                    "path": str(ticket.path),
                    "facts": asdict(self.facts),
                    "finish": finish,
                    "own": asdict(own) if own is not None else None,
                    "parent": parent,
                    "chain": chain,
                    "timeout_s": self.timeout_s,
                },
                [held, *flush],
            )
        finally:
            os.close(held)
        self._pending[stamp.version, stamp.generation] = time.monotonic()

    def lost(self, version: Version, *, generation: int, shard: int) -> None:
        """Others say that this shard will not come. A save of ours that waits for it ends."""
        if (version, generation) in self._pending:
            self._send(
                {
                    "op": "lost",
                    "step": version.step,
                    "update": version.update,
                    "generation": generation,
                    "shard": shard,
                }
            )

    def committed(self, manifest: str, retention: Retention, *, generation: int) -> None:
        """The store names this checkpoint: mark it, and remove old ones, in the background."""
        self._send({"op": "committed", "where": self.where, "manifest": manifest, "generation": generation})
        self.prune(retention, generation=generation, commit=manifest)

    def prune(self, retention: Retention, *, generation: int, commit: str | None) -> None:
        """Remove old checkpoints, in the background. After a commit."""
        self._send(
            {
                "op": "prune",
                "where": self.where,
                "keep_last": retention.keep_last,
                "keep_every": retention.keep_every,
                "keep_best": retention.keep_best,
                "generation": generation,
                "commit": commit,
            }
        )

    def poll(self) -> tuple[Outcome, ...]:
        """What has ended since the last call. A writer that died is an outcome too, for each of its saves, and is replaced."""
        self._drain()
        found, self._untold = self._untold, []
        return tuple(found)

    def _drain(self) -> None:
        code = self._process.poll()  # asked first: what it said before it died is then there to be read
        while (message := self._receive()) is not None:
            outcome = Outcome(
                version=Version(message["step"], message["update"]),
                generation=message["generation"],
                ok=message["ok"],
                manifest=message.get("manifest"),
                why=message.get("why", ""),
            )
            self._pending.pop((outcome.version, outcome.generation), None)
            self._untold.append(outcome)
        if code is not None and self._pending:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._untold.extend(
                Outcome(
                    version=version,
                    generation=generation,
                    ok=False,
                    why=f"the checkpoint writer of step {version} died ({how}); older checkpoints are untouched",
                )
                for version, generation in self._pending
            )
            self._pending.clear()

    def wait(self, timeout_s: float) -> tuple[Outcome, ...]:
        """Until nothing is under way: for the end of a job. CheckpointError if that takes longer."""
        limit = time.monotonic() + timeout_s
        found: list[Outcome] = []
        while True:
            found.extend(self.poll())
            if not self._pending:
                return tuple(found)
            if time.monotonic() > limit:
                raise CheckpointError(f"Saves to {self.where} are still under way after {timeout_s:g} s.")
            time.sleep(0.01)

    def _send(self, message: Mapping[str, object], fds: list[int] | None = None) -> None:
        if self._process.poll() is not None:
            self._drain()  # the new one knows nothing of its saves: they would be under way for ever
            self._sock.close()
            self._sock, self._process = _start(self._env, self._orphan_s)
        try:
            socket.send_fds(self._sock, [json.dumps({**message, "answer_s": self._answer_s}).encode()], fds or [])
        except (BlockingIOError, BrokenPipeError, ConnectionResetError) as error:
            raise CheckpointError(f"The checkpoint writer does not take requests: {error.strerror}.") from error

    def _receive(self) -> dict[str, Any] | None:
        for _ in range(2):  # that the writer died with requests unread is said once, before what it had answered
            with suppress(ConnectionResetError):
                try:
                    data = self._sock.recv(MESSAGE)
                except BlockingIOError:
                    return None
                return dict(parsed(data)) if data else None
        return None

    def close(self, timeout_s: float = 5.0) -> None:
        """Tell the writer to end after what it is doing; it is left to itself after `timeout_s`."""
        self._sock.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _left.append(self._process)


def _start(env: Mapping[str, str], orphan_s: float) -> tuple[socket.socket, Process]:
    """The one that waits already, or a new one."""
    if (waiting := ahead.take(orphan_s)) is not None:
        return waiting
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with theirs:
        process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "elasticrl.runtime.checkpoint",
                "--writer",
                str(theirs.fileno()),
                "--orphan-s",
                str(orphan_s),
            ],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=dict(env),
            start_new_session=True,  # a signal to the worker's group is not meant for a half-written checkpoint
        )
    return ours, process
