"""The control socket: how `elasticrl status`, `drain` and the others speak to the daemon of their node.

One unix socket, one JSON line per question, one per answer (`events` goes on with one per event). The kernel says who asks:
root, the daemon's own user and members of its group may. Nothing is listened to over the network.

    -> {"v": 1, "verb": "drain", "node": "n03"}
    <- {"v": 1, "ok": true, "value": "n03 was asked to leave"}
"""

import asyncio
import grp
import os
import pwd
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from elasticrl.base.apart import apart
from elasticrl.base.owned import bound
from elasticrl.base.parsed import parsed
from elasticrl.base.value import dataclass
from elasticrl.daemon.client import VERSION, pack

MAX_LINE = 64 * 1024
NAMED_S = 0.5  # for a user's name
KNOWN_S = 60.0  # for which it is believed of somebody that he may ask, or may not


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """Who asks, by the kernel's word."""

    pid: int
    uid: int
    gid: int


class Refused(Exception):
    """The question cannot be answered; the message says why, and what to do."""


Answer = Callable[[str, Mapping[str, Any], Asker], Awaitable[Any]]
Stream = Callable[[Mapping[str, Any]], AsyncIterator[Any]]


class Control:
    """Serves the control socket."""

    def __init__(
        self,
        path: Path,
        answer: Answer,
        streams: Mapping[str, Stream],
        *,
        group: str = "",
        deadline_s: float = 10.0,
        failed: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._path = path
        self._answer = answer
        self._streams = streams
        self._group = group
        self._deadline_s = deadline_s
        self._failed = failed  # told `bug` while an exception that nobody foresaw is being handled
        self._server: asyncio.Server | None = None
        self._asked: dict[
            tuple[int, int], tuple[asyncio.Future[bool], float]
        ] = {}  # whether somebody may ask, and since when

    async def open(self) -> None:
        """Listen. A socket file that a dead daemon left is replaced: the daemon's lock says that nobody else is here."""
        self._server = await asyncio.start_unix_server(self._serve, sock=bound(self._path, 0o660), limit=MAX_LINE)
        if self._group:
            try:
                os.chown(self._path, -1, grp.getgrnam(self._group).gr_gid)
            except (KeyError, PermissionError):
                self._group = ""  # no such group, or not ours to give: then only root and this user may ask

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
        self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asker = asker_of(writer.get_extra_info("socket"))
            while line := await reader.readline():
                await self._one(line, asker, writer)
        except (ConnectionError, ValueError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass  # the asker has gone, or sent a line without an end; or we end
        finally:
            writer.close()

    async def _one(self, line: bytes, asker: Asker, writer: asyncio.StreamWriter) -> None:
        try:
            if not await self._may(asker):
                raise Refused(f"user {asker.uid} may not control this daemon; ask as root or a member of its group")
            question = parse(line)
            verb = question["verb"]
            if verb in self._streams:
                async for item in self._streams[verb](question):
                    writer.write(pack({"ok": True, "value": item}))
                    await writer.drain()
                return
            async with asyncio.timeout(self._deadline_s):
                value = await self._answer(verb, question, asker)
            writer.write(pack({"ok": True, "value": value}))
        except Refused as error:
            writer.write(pack({"ok": False, "error": str(error)}))
        except TimeoutError:
            writer.write(
                pack({"ok": False, "error": f"no answer within {self._deadline_s:.0f} s; is the store reachable?"})
            )
        except ConnectionError:
            raise  # the asker has gone
        except Exception as error:  # noqa: BLE001 - who asks gets a sentence, whatever happens
            self._failed("bug")
            said = f"the daemon could not answer, for a fault of its own ({type(error).__name__}: {error})"
            writer.write(pack({"ok": False, "error": f"{said}; its log has the rest: please report it"}))
        await writer.drain()

    async def _may(self, asker: Asker) -> bool:
        """Users and groups may come from a directory that is slow or down, and the daemon's loop must not wait for it."""
        if asker.uid in (0, os.geteuid()):
            return True
        if not self._group:
            return False
        who, now = (asker.uid, asker.gid), time.monotonic()
        asked, at = self._asked.get(who, (None, -KNOWN_S))
        if asked is None or (asked.done() and now >= at + KNOWN_S):
            asked = asyncio.ensure_future(apart(partial(belongs, asker, self._group)))
            self._asked[who] = asked, now
        done, _ = await asyncio.wait({asked}, timeout=self._deadline_s)
        if not done:  # it is asked once, however often somebody comes
            raise Refused(
                f"this machine does not say within {self._deadline_s:.0f} s who user {asker.uid} is (getent passwd "
                f"{asker.uid}); ask as root, or as the daemon's user"
            )
        return asked.result()


def belongs(asker: Asker, group: str) -> bool:
    """Whether who asks is of that group."""
    try:
        gid = grp.getgrnam(group).gr_gid
        name = pwd.getpwuid(asker.uid).pw_name
        return gid == asker.gid or gid in os.getgrouplist(name, asker.gid)
    except (KeyError, OSError):
        return False


async def name_of(uid: int) -> str:
    """A user's name, if this machine says it at once: users may come from a directory that is slow or down."""
    try:
        async with asyncio.timeout(NAMED_S):
            return await apart(lambda: pwd.getpwuid(uid).pw_name)
    except (KeyError, OSError, TimeoutError):
        return f"user {uid}"


def asker_of(sock: socket.socket) -> Asker:
    """The process at the other end, as the kernel knows it."""
    pid, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return Asker(pid=pid, uid=uid, gid=gid)


def parse(line: bytes) -> Mapping[str, Any]:
    """A question, or `Refused`."""
    try:
        question = parsed(line, finite=True)
    except ValueError:
        raise Refused("a question is one JSON object on one line") from None
    if not isinstance(question, dict) or not isinstance(question.get("verb"), str):
        raise Refused('a question is a JSON object with a "verb"')
    if not isinstance(question.get("node"), str | None):
        raise Refused('"node" is the name of one')
    if question.get("v") != VERSION:
        raise Refused(
            f"this daemon speaks version {VERSION}, the question is of version {question.get('v')!r}: update the older one"
        )
    return question
