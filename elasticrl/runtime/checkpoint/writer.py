"""The background writer of one worker: what it does with the requests of its `Saver`."""

import errno
import json
import os
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elasticrl.base.parsed import parsed
from elasticrl.runtime.checkpoint.manifest import Conditions
from elasticrl.runtime.checkpoint.place import Place, place
from elasticrl.runtime.checkpoint.save import finish, refuse, withdraw, write_shard
from elasticrl.runtime.checkpoint.shelf import Fresh, clear, mark_all, overtaken, prune
from elasticrl.runtime.vault import faults
from elasticrl.runtime.vault.errors import DataError, StateError
from elasticrl.runtime.vault.layout import Torn
from elasticrl.runtime.vault.slots import adopt

MESSAGE = 1 << 18  # bytes of one message at most
GRACE_S = 5.0  # for shards of a gang that has broken up, once a later one saves


@dataclass(frozen=True, slots=True)
class Request:
    """What our worker asks for, and the files that came with it."""

    body: dict[str, Any]
    fds: list[int]


class Inbox:
    """Requests in the order in which they were asked, however long the first of them takes.

    They are read ahead: a worker that has gone, or saves for a later generation, is not to be hidden by what it has asked for
    before, which nobody answers while a save waits.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.ahead: deque[Request] = deque()
        self.gone_since: float | None = None  # our worker
        self._sock = sock

    def next(self) -> Request | None:
        """The next one, when it comes; None when the worker has gone and all is done that it had asked for."""
        while not self.ahead and self.gone_since is None:
            self._read()
        return self.ahead.popleft() if self.ahead else None

    def look(self) -> None:
        """What has come meanwhile?"""
        self._sock.setblocking(False)  # socket.recv_fds takes flags, and forgets them
        with suppress(BlockingIOError):
            while self.gone_since is None:
                self._read()
        self._sock.setblocking(True)

    def _read(self) -> None:
        with suppress(ConnectionResetError):  # said once, if the worker has gone without having read our last answer
            data, fds, _, _ = socket.recv_fds(self._sock, MESSAGE, 4)
            if data:
                self.ahead.append(Request(parsed(data), fds))
            else:
                self.gone_since = time.monotonic()


class Hope:
    """Why the other shards of a save will not come: their writing failed; their gang broke up before all had begun, and a later
    one is saving; or our worker has gone, and nobody is left to ask.

    Those who had begun finish even if their workers die, so they are given some time: at least `orphan_s`, and longer where
    our own shard took long. The time is one for all that our worker had asked for: what the others had begun of a later save
    they have written meanwhile. A writer that waited on would keep its shard's memory from the machine.
    """

    def __init__(self, inbox: Inbox, asked: Mapping[str, Any], orphan_s: float) -> None:
        self.own_s = 0.0  # what writing our shard took
        self._inbox, self._asked, self._orphan_s = inbox, asked, orphan_s
        self._later_since: float | None = None

    def __call__(self) -> str:
        """The sentence; empty as long as there is hope."""
        self._inbox.look()
        now, ahead = time.monotonic(), [request.body for request in self._inbox.ahead]
        failed = {int(body["shard"]) for body in ahead if body["op"] == "lost" and self._of_this(body)}
        if failed:
            return f"the writing of {', '.join(map(str, sorted(failed)))} failed"
        later = max((int(body["generation"]) for body in ahead if body["op"] == "save"), default=0)
        if later > self._asked["generation"]:
            self._later_since = self._later_since or now
            if now - self._later_since > GRACE_S:
                return f"generation {later} saves already, and this one's gang broke up"
        if self._inbox.gone_since is not None:
            patience = self._orphan_s + 3 * self.own_s
            if now - self._inbox.gone_since > patience:
                return f"our worker has gone, and they did not come within {patience:.0f} s"
        return ""

    def _of_this(self, body: Mapping[str, Any]) -> bool:
        return all(body[key] == self._asked[key] for key in ("step", "update", "generation"))


def save(request: dict[str, Any], fd: int, flush: Sequence[int], hope: Hope) -> dict[str, Any]:
    """Write one shard, and the manifest if this is the gang's finisher; what became of it.

    The files in `flush` are on their disk before the shard is told of: a published checkpoint has all workers' ledgers.
    """
    began = time.monotonic()
    answer: dict[str, Any] = {key: request[key] for key in ("step", "update", "generation")}
    pinned = adopt(Path(request["path"]), fd)
    if isinstance(pinned, Torn):
        for file in (fd, *flush):
            os.close(file)
        return {**answer, "ok": False, "why": f"the snapshot is {pinned.reason}"}
    with pinned:
        stamp = pinned.sealed.stamp
        where, written, own = _place(request), False, request["own"]
        try:
            _flush(flush)
            if request["finish"]:
                clear(where, overtaken(where, stamp.version, stamp.generation))
            write_shard(where, pinned)
            written = True
            answer["ok"] = True
            hope.own_s = time.monotonic() - began
            if request["finish"]:
                manifest = finish(
                    where, version=stamp.version, generation=stamp.generation, world=stamp.world,
                    facts=Conditions(**request["facts"]), parent=request["parent"], lineage=stamp.lineage,
                    timeout_s=request["timeout_s"], own=own["shards"] if own else None,
                    nodes=own["nodes"] if own else (), hopeless=hope, chain=request["chain"],
                )  # fmt: skip
                answer |= {"manifest": manifest.name, "node": stamp.node}
        except (StateError, OSError) as error:
            answer |= {"ok": False, "why": str(error)}
            withdraw(where, stamp)
            if not written:
                refuse(where, stamp)
            if request["finish"] and _full(error):  # nobody else clears away what earlier generations left
                with suppress(StateError, OSError):
                    clear(where, overtaken(where, stamp.version, stamp.generation, earlier=True))
    return answer


def _place(request: Mapping[str, Any]) -> Place:
    return place(request["where"], answer_s=request["answer_s"])


def _full(error: BaseException) -> bool:
    """It is for want of room."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in {errno.ENOSPC, errno.EDQUOT}


def _flush(files: Sequence[int]) -> None:
    try:
        for file in files:
            faults.reach("ledger.fsync")
            os.fsync(file)
    except OSError as error:
        raise DataError(
            f"The ledger cannot be flushed to its disk ({error.strerror}), so its step is not saved: free some space there."
        ) from error
    finally:
        for file in files:
            os.close(file)


def serve(fd: int, orphan_s: float) -> None:
    """Take requests until the worker has gone; what was asked for before that is done."""
    with suppress(OSError):
        os.nice(10)  # a checkpoint is never urgent
    torch.set_num_threads(1)
    with socket.socket(fileno=fd) as sock:
        inbox = Inbox(sock)
        published: Fresh | None = None
        while (asked := inbox.next()) is not None:
            request = asked.body
            if request["op"] == "save":
                answer = save(request, asked.fds[0], asked.fds[1:], Hope(inbox, request, orphan_s))
                if "manifest" in answer:
                    published = Fresh(answer["manifest"], answer["node"])
                with suppress(OSError):  # a worker that has died asks for no answer
                    sock.send(json.dumps(answer).encode())
            elif request["op"] == "lost":
                pass  # `Hope` saw it while its save waited
            elif request["op"] == "committed":
                with suppress(StateError, OSError):  # a disk that is ill is complained of at the next save
                    mark_all(_place(request), request["manifest"])
            else:
                with suppress(StateError, OSError):  # what stays is removed after the next commit
                    prune(
                        _place(request),
                        keep_last=request["keep_last"],
                        keep_every=request["keep_every"],
                        keep_best=request["keep_best"],
                        generation=request["generation"],
                        commit=request["commit"],
                        fresh=published,
                    )
