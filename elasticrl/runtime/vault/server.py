"""The vault server: one process per node that keeps its workers' state for the gang. It imports no tensor library.

The one idea: the files are the truth, the server only knows about them. It may be killed and started again at any time: it
reads the headers, drops what is not whole, reads the ring it was told of last, and goes on copying. Workers write and read
the files themselves; through the control socket go only a few words about each.
"""

import asyncio
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from elasticrl.base.address import CONTROL, overlong, split
from elasticrl.base.owned import write_private
from elasticrl.base.parent import Led
from elasticrl.base.parsed import parsed
from elasticrl.base.strangers import HELLO_S, put_out
from elasticrl.contract.ring import NOBODY, Ring, buddies
from elasticrl.runtime.vault.channel import CAME, PROTOCOL, STILL, Channel, resolved, welcome
from elasticrl.runtime.vault.errors import VaultError
from elasticrl.runtime.vault.holdings import Holding
from elasticrl.runtime.vault.push import Buddy, Caller
from elasticrl.runtime.vault.slots import FETCHED, PART, RING, clean, parse_name, prepare, sweep, word
from elasticrl.runtime.vault.stock import Stock
from elasticrl.runtime.vault.transfer import Offer, offer, promised, send_blocks
from elasticrl.runtime.vault.version import Version

LINE = 64 << 20  # of the control socket: the ring of a large gang is one line
PAUSE_S = 0.1  # before the next caller is listened for, where one could not be
GLANCES = 3  # pauses for who looks at what may go just then: it would stay until the next generation
STILL_S = 1.0  # between words to who waits for what takes long
SMALL = 1  # a shard of no more blocks is fetched whole, whatever was asked of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How one server is set up.

    Example: Options(job="ppo", node="n03", directory=Path("/dev/shm/elasticrl-ppo-0/n03"), listen="10.0.0.3:7462", key=...)
    """

    job: str
    node: str
    directory: Path
    listen: str = ""  # host:port on the interface for copies; port 0 takes a free one; empty: no copies
    key: bytes | None = None
    window_bytes: int = 16 << 20  # of a copy, sent and not acknowledged yet, at most; one block in any case
    deadline_s: float = 5.0  # without any progress; a transfer may take as long as it moves
    callers: int = 128  # members' connections at once
    led: tuple[int, ...] = ()  # the processes that see to this one, until a daemon names others: their end is ours


class Server:
    """See the module's text. `start` opens it, `run` serves until `stop` is called.

    Long because it serves workers, other vaults and strangers, each with a limit of its own.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self._led: Led | None = None  # once it has started
        self.port = 0
        self._ring = NOBODY
        self._ours: frozenset[str] = frozenset()  # the addresses of its nodes
        self._stock = Stock(options.directory, options.node, options.deadline_s)
        self._buddies: dict[str, Buddy] = {}
        self._moved = asyncio.Condition()
        self._stopped = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: dict[asyncio.Task[None], str] = {}  # who have not proved anything yet, and from where
        self._members = 0  # who have
        self._caller: Caller | None = None
        self._lock_fd = -1
        self._listener: socket.socket | None = None
        self._control: asyncio.AbstractServer | None = None
        self._end = False
        self._leaving: asyncio.TimerHandle | None = None  # when we end, for our node has left
        self._complaint = ""  # why the last conversation with another vault ended badly
        self._born = time.monotonic()
        self._fetching: dict[asyncio.Task[object], Channel] = {}

    # -- life

    @property
    def socket_path(self) -> Path:
        """Where workers and the daemon talk to it."""
        return self.options.directory / CONTROL

    async def start(self) -> tuple[str, ...]:
        """Take the directory over; the torn files that were dropped are returned."""
        options = self.options
        prepare(options.directory)
        if why := overlong(self.socket_path):
            raise VaultError(f"{why}: shorten vault.dir.")
        self._lock_fd = os.open(options.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock_fd)
            raise VaultError(
                f"Another vault server already serves {options.directory}. Two jobs or nodes on one host need two vault.dir."
            ) from None
        self._led = Led(asyncio.get_running_loop(), self.stop)
        self._led.by(options.led)
        dropped = sweep(options.directory)
        self._stock.scan()
        if options.listen:
            self._listen()
        self.socket_path.unlink(missing_ok=True)
        self._control = await asyncio.start_unix_server(self._serve_control, str(self.socket_path), limit=LINE)
        self.socket_path.chmod(0o600)
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            saved = parsed((options.directory / RING).read_text())
            await self._follow(_ring(saved), remember=False)
        return dropped

    def _listen(self) -> None:
        options = self.options
        if not options.key:
            raise VaultError(
                "The vault is to listen for copies but has no key. Give it one with --key-file FILE "
                "(openssl rand -hex 32 > FILE; chmod 600); a daemon does so by itself."
            )
        where, port = split(options.listen)
        host = resolved(where)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            listener.close()
            raise VaultError(
                f"The vault cannot listen on {options.listen} ({error.strerror}). Check node.interface, node.address "
                "and vault.port."
            ) from error
        listener.listen(64)
        listener.setblocking(False)
        self._listener = listener
        self.port = listener.getsockname()[1]
        source = "" if ip_address(host).is_unspecified else host
        self._caller = Caller(
            job=options.job, node=options.node, key=options.key, source=source, deadline_s=options.deadline_s
        )
        self._spawn(self._accept(listener))

    async def run(self) -> None:
        """Serve until stopped. The files stay, unless the job was ended."""
        await self._stopped.wait()
        for buddy in self._buddies.values():
            await buddy.stop()
        if self._led is not None:
            self._led.by(())
        if self._control is not None:
            self._control.close()
        if self._listener is not None:
            self._listener.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._stock.close()
        if self._end:
            clean(self.options.directory)
        self.socket_path.unlink(missing_ok=True)
        os.close(self._lock_fd)

    def stop(self) -> None:
        """Make `run` return."""
        self._stopped.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- the control socket

    async def _serve_control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one caller of the control socket, line by line, until it goes."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        operations: Mapping[str, Callable[[Mapping[str, Any]], Coroutine[Any, Any, dict[str, Any]]]] = {
            "status": self._status, "lead": self._lead, "ring": self._set_ring, "sealed": self._sealed,
            "copied": self._copied, "fetch": self._fetch, "release": self._release, "leave": self._leave,
            "end": self._end_job,
        }  # fmt: skip
        try:
            while line := await reader.readline():
                try:
                    request = parsed(line)
                    if request.get("v") != PROTOCOL:
                        raise VaultError(f"this vault speaks version {PROTOCOL}, not {request.get('v')!r}")
                    operation = operations.get(request.get("op"))
                    if operation is None:
                        raise VaultError(f"{request.get('op')!r} is not one of {', '.join(sorted(operations))}")
                    work = operation(request)
                    told = request.get(STILL, False)
                    answer = {"ok": True, **await (self._still(work, writer) if told else work)}
                except (VaultError, OSError, TimeoutError) as error:
                    answer = {"ok": False, "why": str(error) or type(error).__name__}
                except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                    answer = {"ok": False, "why": f"the request is not understood: {error!r}"}
                writer.write(json.dumps({"v": PROTOCOL, **answer}).encode() + b"\n")
                async with asyncio.timeout(self.options.deadline_s):
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass  # the caller has gone, or we have; either way nobody waits for an answer
        finally:
            writer.close()

    async def _still(self, work: Coroutine[Any, Any, dict[str, Any]], writer: asyncio.StreamWriter) -> dict[str, Any]:
        """What it comes to; the caller hears now and then that it is under way, and how much has come. It ends where that
        cannot be told any more.
        """
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=STILL_S))[0]:
                channel = self._fetching.get(task)
                came = channel.came_bytes if channel else 0
                writer.write(json.dumps({"v": PROTOCOL, STILL: True, CAME: came}).encode() + b"\n")
                async with asyncio.timeout(self.options.deadline_s):
                    await writer.drain()
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _status(self, _: Mapping[str, Any]) -> dict[str, Any]:
        holdings = [holding for _, holding in self._stock.scan()]
        return {
            "job": self.options.job,
            "node": self.options.node,
            "port": self.port,
            "pid": os.getpid(),
            "leaving": self._leaving is not None,
            "up_s": round(time.monotonic() - self._born, 3),
            "holdings": len(holdings),
            "nbytes": sum(holding.nbytes for holding in holdings),
            "generation": self._ring.generation,
            "complaint": self._complaint,
            "buddies": [
                {"node": b.node, "address": b.address, "failing": b.failing, "sent_bytes": b.sent_bytes}
                for b in self._buddies.values()
            ],
        }

    async def _set_ring(self, request: Mapping[str, Any]) -> dict[str, Any]:
        ring = _ring(request)
        unknown = [n for n in buddies(ring.nodes, self.options.node, ring.copies) if n not in dict(ring.addresses)]
        if unknown or (ring.copies and len(set(ring.nodes)) > 1 and self._caller is None):
            why = (
                f"has no address of {', '.join(unknown)}" if unknown else "was started without an address to listen on"
            )
            raise VaultError(f"The vault of {self.options.node} is to keep {ring.copies} copies elsewhere and {why}.")
        if ring.generation < self._ring.generation:
            raise VaultError(f"ring of generation {ring.generation} is older than that of {self._ring.generation}")
        await self._follow(ring, remember=True)
        return {"buddies": list(self._buddies)}

    async def _follow(self, ring: Ring, *, remember: bool) -> None:
        """Copy to the buddies of this ring, and what is newest here at once."""
        self._ring = ring
        self._ours = frozenset(split(address)[0] for _, address in ring.addresses)
        if remember:
            try:
                write_private(self.options.directory / RING, json.dumps(_ring_json(ring)))
            except OSError as error:  # it is followed all the same: what copies need first is a ring
                self._complaint = f"the ring of generation {ring.generation} is not on the disk: {error}"
        addresses = dict(ring.addresses)
        wanted = {
            node: addresses[node]
            for node in buddies(ring.nodes, self.options.node, ring.copies)
            if node in addresses and self._caller is not None
        }
        for node in [n for n, b in self._buddies.items() if wanted.get(n) != b.address]:
            await self._buddies.pop(node).stop()
        for node, address in wanted.items():
            if node not in self._buddies:
                assert self._caller is not None
                self._buddies[node] = Buddy(node, address, self._caller, self.options.window_bytes, self._moved)
        newest: dict[str, tuple[Path, Holding]] = {}
        for path, holding in self._stock.scan():
            name = parse_name(path.name)
            if name is None or name.origin != self.options.node or name.writer.startswith(FETCHED):
                continue
            held = newest.get(holding.writer)
            if held is None or (holding.generation, holding.version) > (held[1].generation, held[1].version):
                newest[holding.writer] = (path, holding)
        for writer, (path, _) in newest.items():
            for buddy in self._buddies.values():
                buddy.push(writer, path)  # one that has had it may have lost it since: it says so, for little
        async with self._moved:  # whoever waits for copies may wait for other buddies now
            self._moved.notify_all()

    def _push(self, writer: str, path: Path, holding: Holding) -> None:
        for buddy in self._buddies.values():
            if not buddy.has(writer, (holding.generation, holding.version)):
                buddy.push(writer, path)

    async def _sealed(self, request: Mapping[str, Any]) -> dict[str, Any]:
        name = parse_name(str(request["file"]))
        if name is None or name.origin != self.options.node:
            raise VaultError(f"{request['file']!r} is not a file of a worker of {self.options.node}")
        path = self.options.directory / str(request["file"])
        held = dict(self._stock.scan()).get(path)
        if held is None:
            raise VaultError(f"{path.name} is not sealed")
        if not name.writer.startswith(FETCHED):  # from a disk, for this restore: nobody needs a copy
            self._push(name.writer, path, held)
        return {"buddies": list(self._buddies)}

    async def _copied(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Wait until every buddy has a version of one worker; or why some do not, and how much was sent to those."""
        writer = str(request["writer"])
        at = (int(request["generation"]), Version(int(request["step"]), int(request["update"])))
        timeout_s = float(request["timeout_s"])

        def there() -> bool:
            return all(buddy.has(writer, at) for buddy in self._buddies.values())

        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._moved:
                await self._moved.wait_for(there)
        late = [
            b for b in self._buddies.values() if not b.has(writer, at)
        ]  # none, if the last came in that very moment
        if late:
            why = "; ".join(b.failing or f"{b.node} has not sealed it yet" for b in late)
            return {"late": why, "moved": sum(b.moved_bytes for b in late)}
        return {"copies": len(self._buddies)}

    async def _fetch(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Bring a shard, or only some blocks of it, into a file here."""
        if self._caller is None:
            raise VaultError("this vault does not listen, so it cannot call others")
        node = str(request["at"])
        address = dict(self._ring.addresses).get(node)
        if address is None:
            raise VaultError(f"node {node} is not in the ring of generation {self._ring.generation}")
        wanted = {k: int(request[k]) for k in ("step", "update", "generation", "shard", "world")}
        blocks = request.get("blocks")
        by = word(str(request["by"]))  # workers of one node may fetch different blocks of one shard at the same time
        channel = await self._caller.call(address)
        task = asyncio.current_task()
        assert task is not None
        self._fetching[task] = channel
        channel.came_bytes = 0  # that somebody greets is nothing of what was asked for
        try:
            answer, size = await channel.ask({"op": "get", **wanted, "blocks": blocks})
            offered = await promised(channel, answer, size)
            chosen = _given(blocks, offered.shape.blocks)
            if blocks is None:
                path = await self._stock.take(channel, offered, f"{FETCHED}{by}-{offered.stamp.writer}", chosen)
            else:
                path = await self._stock.take_part(channel, offered, f"{PART}{by}-{offered.stamp.writer}", chosen)
        finally:
            del self._fetching[task]
            channel.close()
        nbytes = sum(stop - start for start, stop in map(offered.shape.block, chosen))
        return {"file": path.name, "nbytes": nbytes, "blocks": chosen}

    async def _release(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Remove the files of writers that have nothing as new as this version: it is whole everywhere without them.

        What was fetched goes too, however new, unless somebody reads it now: it was for a restore, and those are over.
        """
        floor = Version(int(request["step"]), int(request["update"]))
        removed, glanced = self._stock.drop_before(floor, fetched=True)
        for _ in range(GLANCES):
            if not glanced:
                break
            await asyncio.sleep(PAUSE_S)
            more, glanced = self._stock.drop_before(
                floor, fetched=False
            )  # one that was fetched since is for another restore
            removed += more
        self._stock.scan()
        return {"removed": removed}

    async def _lead(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Who sees to this vault from now on. It ends with the last of them, so that a foreground run leaves none behind; where
        nobody is named, with nobody.
        """
        assert self._led is not None
        self._led.by(map(int, request["by"]))
        return {}

    async def _leave(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """This node has left the job: stay for those who may still fetch from here, then end. Without a time: it is back."""
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
        if request["within_s"] is not None:
            await self._lead({"by": []})
            self._leaving = asyncio.get_running_loop().call_later(float(request["within_s"]), self._end_now)
        return {}

    async def _end_job(self, _: Mapping[str, Any]) -> dict[str, Any]:
        asyncio.get_running_loop().call_later(0.05, self._end_now)  # after the answer has gone out
        return {}

    def _end_now(self) -> None:
        self._end = True
        self.stop()

    # -- other vaults

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, where = await loop.sock_accept(listener)
            except OSError as error:  # no descriptor is free, or the caller has gone again: the next one shall be heard
                self._complaint = f"a caller could not be heard: {error}"
                await asyncio.sleep(PAUSE_S)
                continue
            late = put_out(self._strangers, where[0], self._ours)
            if late is not None:
                del self._strangers[late]
                late.cancel()
            task = self._spawn(self._serve_peer(sock))
            self._strangers[task] = where[0]
            task.add_done_callback(partial(self._hung_up, sock))
            await asyncio.sleep(0)  # a crowd at the door is no reason to leave those inside waiting

    def _hung_up(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._strangers.pop(task, None)
        sock.close()

    async def _serve_peer(self, sock: socket.socket) -> None:
        options = self.options
        assert options.key is not None
        # A caller that goes away or breaks the rules ends its own conversation and nothing else.
        try:
            async with asyncio.timeout(HELLO_S):
                channel = await welcome(
                    sock, key=options.key, job=options.job, node=options.node, deadline_s=options.deadline_s
                )
            task = asyncio.current_task()
            assert task is not None
            self._strangers.pop(task, None)
            if self._members >= options.callers:
                await channel.refuse(f"{options.node} hears {self._members} members already")
                return
            self._members += 1
            task.add_done_callback(self._member_gone)
            while True:
                await _readable(sock)  # a buddy is silent for as long as a step takes: that is no failure
                frame, size = await channel.receive()
                try:
                    await self._answer(channel, frame, size)
                except VaultError as error:
                    await channel.refuse(str(error))
                    raise
        except ConnectionResetError:
            pass  # that is how a conversation ends
        except (OSError, TimeoutError, VaultError, ValueError, KeyError, TypeError, OverflowError) as error:
            self._complaint = f"{error}" or type(error).__name__

    def _member_gone(self, _: asyncio.Task[None]) -> None:
        self._members -= 1

    async def _answer(self, channel: Channel, frame: Mapping[str, Any], size: int) -> None:
        match frame.get("op"):
            case "put":
                await self._keep(channel, await promised(channel, frame, size))
            case "get":
                await self._give(channel, frame)
            case other:
                raise VaultError(f"{other!r} is not something a vault does")

    async def _keep(self, channel: Channel, offered: Offer) -> None:
        """Take a copy for another node."""
        stamp = offered.stamp
        if stamp.node != channel.peer or stamp.job != self.options.job:
            raise VaultError(f"{channel.peer} may not leave a shard of {stamp.node} of job {stamp.job} here")
        if self._stock.has(offered):
            await channel.send({"ok": True, "have": True})
            return
        await self._stock.take(channel, offered, stamp.writer, range(offered.shape.blocks), announce=True)
        await channel.send({"ok": True, "sealed": True})

    async def _give(self, channel: Channel, frame: Mapping[str, Any]) -> None:
        """Send a shard, or some blocks of it, to whoever asks."""
        version = Version(int(frame["step"]), int(frame["update"]))
        generation, number, world = (int(frame[name]) for name in ("generation", "shard", "world"))
        shard = self._stock.find(version, generation=generation, shard=number, world=world)
        if shard is None:
            raise VaultError(
                f"{self.options.node} does not hold shard {number} of {world} of step {version}, generation {generation}"
            )
        with shard:
            sealed = shard.sealed
            await offer(channel, {"ok": True}, sealed)
            blocks = _given(frame.get("blocks"), sealed.shape.blocks)
            await send_blocks(channel, shard, blocks, self.options.window_bytes)


async def _readable(sock: socket.socket) -> None:
    """Wait for as long as it takes until something can be read; the caller's end of file counts."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def readable() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(sock, readable)
    try:
        await ready
    finally:
        loop.remove_reader(sock)


def _given(asked: object, count: int) -> tuple[int, ...]:
    """The blocks that answer a request, in order: all for None, and all of a small shard, which saves asking twice."""
    if asked is None:
        return tuple(range(count))
    if not isinstance(asked, list) or not all(isinstance(b, int) and 0 <= b < count for b in asked):
        raise VaultError(f"blocks {asked!r} are not among the {count} that the shard has")
    return tuple(range(count)) if count <= SMALL else tuple(sorted(set(asked)))


def _ring(data: Mapping[str, Any]) -> Ring:
    addresses = {str(node): str(address) for node, address in data["addresses"].items()}
    return Ring(
        generation=int(data["generation"]),
        nodes=tuple(map(str, data["nodes"])),
        addresses=tuple(sorted(addresses.items())),
        copies=int(data["copies"]),
    )


def _ring_json(ring: Ring) -> dict[str, object]:
    return {
        "generation": ring.generation,
        "nodes": list(ring.nodes),
        "addresses": dict(ring.addresses),
        "copies": ring.copies,
    }
