"""This node's vault, as its daemon knows it: a process that holds the workers' state, and lives without daemon and workers.

The one idea: the daemon only visits. It looks whether a vault answers, starts one where none does, tells it each plan's ring,
and goes away again; what the vault holds is between it and the workers. So a daemon's death costs no copy, and a vault's
death costs the time to start one, which finds its files again.
"""

import asyncio
import json
import os
import shutil
import socket
import struct
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

from elasticrl.base.address import CONTROL, join, overlong
from elasticrl.base.inherited import inherited
from elasticrl.base.owned import unsafe, write_private
from elasticrl.base.parsed import parsed
from elasticrl.base.pauses import pause
from elasticrl.base.started import NOBODY, Started, last_line, start
from elasticrl.base.ticks import until_next
from elasticrl.base.value import dataclass
from elasticrl.contract.model import Plan
from elasticrl.contract.ring import Ring
from elasticrl.daemon.refusal import Refusal
from elasticrl.daemon.secret import vault_key

PROTOCOL: Final = 1  # as elasticrl.runtime.vault.channel, which the daemon does not import
LINE: Final = 64 << 20  # of an answer
LOOK_S: Final = 0.02  # between looks whether a vault that was started answers
ALIVE_S: Final = 2.0  # between signs of life that are asked for
STOPPED_S: Final = 0.6  # between looks whether it is stopped; twice in a row is no chance
PAUSE_S: Final = 0.1  # before the first new start; each further one doubles it
PAUSE_MAX_S: Final = 10.0
STEADY_S: Final = 30.0  # a vault that has lived for so long was started well


class Silent(RuntimeError):
    """The vault did not answer, or went away; the sentence says which."""


class Stuck(Silent):
    """It runs, and does not answer."""


class Refused(RuntimeError):
    """The vault answered, and said why it will not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How one node's vault is started.

    Example: Options(job="ppo-7b", node="n03", folder=Path("/dev/shm/elasticrl/ppo-7b/n03"),
        home=Path("/run/elasticrl/ppo-7b/n03"), host="10.0.0.3", deadline_s=20.0)
    """

    job: str
    node: str
    folder: Path  # its files, on a tmpfs
    home: Path  # the node's runtime directory: its key, and the port it had
    host: str
    port: int = 0
    window_bytes: int = 16 << 20  # of a copy, on their way at once
    deadline_s: float = 20.0  # for an answer, and for a transfer without progress
    log: Path = Path("/dev/null")
    led: tuple[int, ...] = ()  # the processes with the last of which it ends; none: it outlives them (decision 25)

    @property
    def socket(self) -> Path:
        """Where it answers."""
        return self.folder / CONTROL


def ring_of(plan: Plan | None, copies: int) -> Ring | None:
    """A plan's ring; None while nobody is seated, as then the last one holds."""
    if plan is None or not plan.seats:
        return None
    return Ring(
        generation=plan.generation,
        nodes=tuple(seat.member.node for seat in plan.seats),
        addresses=tuple((seat.member.node, seat.vault) for seat in plan.seats if seat.vault),
        copies=copies,
    )


def folder_of(base: str, job: str, node: str) -> Path:
    """One vault's directory; `Refusal` if the socket in it would have too long a path."""
    folder = Path(base) / job / node
    if why := overlong(folder / CONTROL):
        raise Refusal(f"{why}: shorten vault.dir, job.name or node.name")
    return folder


class Talk:
    """A connection to a vault: a question a line, an answer a line, each with a deadline. One that breaks stays broken."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, deadline_s: float) -> None:
        self._writer = writer
        self._deadline_s = deadline_s
        self._lines: asyncio.Queue[bytes] = asyncio.Queue()  # b"": the vault has hung up
        self._turn = asyncio.Lock()
        self._reading = asyncio.create_task(self._read(reader), name="vault answers")
        self.gone = asyncio.Event()

    @classmethod
    async def open(cls, path: Path, deadline_s: float) -> Self:
        """To the vault that listens there, or OSError."""
        async with asyncio.timeout(deadline_s):
            return cls(*await asyncio.open_unix_connection(path, limit=LINE), deadline_s)

    @property
    def pid(self) -> int:
        """Whose socket it is, as the kernel knows."""
        sock: socket.socket = self._writer.get_extra_info("socket")
        return int(
            struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[0]
        )

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                self._lines.put_nowait(line)
        except (OSError, ValueError):
            pass  # as good as gone
        finally:
            self.gone.set()
            self._lines.put_nowait(b"")

    async def ask(self, op: str, **fields: object) -> Mapping[str, Any]:
        """The answer, `Refused` with its sentence, or `Silent`."""
        async with self._turn:
            try:
                async with asyncio.timeout(self._deadline_s):
                    self._writer.write(json.dumps({"v": PROTOCOL, "op": op, **fields}).encode() + b"\n")
                    await self._writer.drain()
                    line = await self._lines.get()
                    answer = parsed(line) if line else None
            except TimeoutError:
                self.gone.set()
                raise Stuck(f"it did not answer {op!r} within {self._deadline_s:g} s") from None
            except (OSError, ValueError) as error:
                self.gone.set()
                raise Silent(f"{op!r}: {error}") from None
        if not isinstance(answer, dict):
            raise Silent(f"it closed its socket at {op!r}")
        if not answer.get("ok"):
            raise Refused(str(answer.get("why", "it does not say why")))
        return answer

    async def close(self) -> None:
        """Hang up."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._writer.close()


class Vault:
    """One node's vault. Run `run` beside the daemon's loop."""

    def __init__(
        self,
        options: Options,
        *,
        log: Any,
        changed: Callable[[], None] = lambda: None,
        ours: asyncio.Event | None = None,
    ) -> None:
        """`ours`: set once it is known that a vault which runs here is this daemon's to see to, and not another one's."""
        self.address = (
            ""  # where other nodes reach it; "" until it has been up once. It keeps its port when it is started again
        )
        self.process = NOBODY  # the one that answers, or did last
        self.log = log
        self.away = ""  # why it has never been up
        self.changed = changed  # told when `address` or `away` does
        self._options = options
        self._ours = ours
        self._state = ""
        self._ring: Ring | None = None
        self._begun = NOBODY  # the one that this daemon has started last
        self._keyed = asyncio.Event()
        self._stirred = asyncio.Event()  # there is something to tell it
        self._rekeyed = False  # it runs with another key than the store's

    # ---- what the daemon says

    def know(self, secret: bytes) -> None:
        """The store has been reached: the key is this. One that lay here from before may be of a store that is no more."""
        key, file = vault_key(secret), self._key_file
        if not file.exists() or file.read_text(encoding="ascii", errors="replace") != key:
            self._rekeyed = file.exists()
            write_private(file, key)
        self._keyed.set()
        self._stirred.set()

    def follow(self, ring: Ring | None) -> None:
        """Another plan."""
        if ring is not None and ring != self._ring:
            self._ring = ring
            self._stirred.set()

    # ---- its life

    async def run(self) -> None:
        """Until cancelled: see to it that a vault answers, and that it knows its ring."""
        if self._key_file.exists():
            self._keyed.set()  # the store may be away just now; what lies here is what the workers' vaults were started with
        pause_s = 0.0
        while True:
            begun = time.monotonic()
            try:
                talk = await self._reach()
                try:
                    await first(self._attend(talk), self._until_stopped())
                finally:
                    await talk.close()
            except (Silent, Refused, OSError) as error:
                why = str(error) or type(error).__name__
                self._note("away", why)
                if not self.address and why != self.away:
                    self.away = why
                    self.changed()
                if isinstance(error, Stuck):
                    await self._kill()  # it holds the directory's lock: no other could start
            lived_s = time.monotonic() - begun
            pause_s = pause(pause_s, lived_s, first_s=PAUSE_S, most_s=PAUSE_MAX_S, steady_s=STEADY_S)
            await asyncio.sleep(pause_s)

    async def _reach(self) -> Talk:
        """Talk to the vault that runs, or start one."""
        options, adopted = self._options, True
        if why := unsafe(options.folder):
            raise Refused(f"{why}. Set vault.dir to another place")
        try:
            talk = await Talk.open(options.socket, options.deadline_s)
        except OSError:
            adopted = False
            await self._keyed.wait()
            talk = await self._start()
        self.process = Started.of(talk.pid)  # before it says a word: it may be stuck
        try:
            status = await talk.ask("status")
            if (status["job"], status["node"]) != (options.job, options.node):
                raise Refused(f"{options.socket} is the vault of {status['node']} of job {status['job']}")
            if adopted and self._ours is not None:
                await (
                    self._ours.wait()
                )  # it ends with the last of those who see to it: a daemon that goes again is none
            if status.get("leaving"):
                await talk.ask("leave", within_s=None)
            if options.led:
                await talk.ask("lead", by=options.led)
            write_private(self._port_file, str(status["port"]))
        except BaseException:
            await talk.close()
            raise
        address = join(options.host, status["port"]) if status["port"] else ""
        self._note("up", "adopted" if adopted else "started")
        if address != self.address:
            self.address = address
            self.changed()
        return talk

    async def _start(self) -> Talk:
        """A process of its own session, so that it outlives us."""
        options = self._options
        options.log.parent.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + options.deadline_s
        # Others have its address from the plan, so it comes back at the port it had; if that is taken now, at another.
        for port in dict.fromkeys((options.port or self._last_port(), options.port)):
            self._begun = self._spawn(port)
            while self._begun.alive:
                with suppress(OSError):
                    return await Talk.open(options.socket, options.deadline_s)
                if time.monotonic() > deadline:
                    await self._begun.kill(options.deadline_s)
                    raise Silent(f"a new one did not answer within {options.deadline_s:g} s")
                await asyncio.sleep(LOOK_S)
        raise Silent(f"a new one ended with exit code {self._begun.code}: {last_line(options.log)}")

    def _spawn(self, port: int) -> Started:
        options = self._options
        command = [
            sys.executable, "-P", "-m", "elasticrl.runtime.vault", "--job", options.job, "--node", options.node,
            "--dir", str(options.folder), "--listen", join(options.host, port), "--key-file", str(self._key_file),
            "--window-bytes", str(options.window_bytes), "--deadline-s", f"{options.deadline_s:g}",
        ]  # fmt: skip
        if options.led:
            command += ["--led-by", *map(str, options.led)]
        return start(command, options.log, env=inherited(os.environ))

    async def _attend(self, talk: Talk) -> None:
        """Tell it what is new, and look that it lives, until it does not."""
        told: Ring | None = None
        while True:
            self._stirred.clear()
            if self._rekeyed:
                self._rekeyed = False
                await self._kill()
                raise Silent("its key is not that of the job's store any more: it starts again with the new one")
            if self._ring is not None and self._ring is not told:
                told = self._ring
                await self._tell(talk, told)
            stirred = asyncio.create_task(self._stirred.wait())
            gone = asyncio.create_task(talk.gone.wait())
            try:
                done, _ = await asyncio.wait({stirred, gone}, timeout=ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                stirred.cancel()
                gone.cancel()
            if gone in done:
                raise Silent(f"process {self.process.pid} is gone")
            if not done:
                await talk.ask("status")
                if (
                    not self._options.socket.exists()
                ):  # who cleared the folder took it; it is bound once, and workers ask there
                    raise Stuck(f"{self._options.socket} is gone: nobody reaches it any more")

    async def _until_stopped(self) -> None:
        """Until somebody has stopped it (SIGSTOP, a debugger). Its files outlive it, so a new one is soon there: sooner than a
        gang loses its patience.
        """
        still = 0
        while still < 2:
            await asyncio.sleep(until_next(STOPPED_S if self._ring else ALIVE_S, time.time()))
            still = still + 1 if self.process.stopped else 0
        raise Stuck("it is stopped, the kernel says")

    async def _tell(self, talk: Talk, ring: Ring) -> None:
        try:
            await talk.ask(
                "ring", generation=ring.generation, nodes=ring.nodes, addresses=dict(ring.addresses), copies=ring.copies
            )
        except Refused as refused:
            self.log.info("vault.refused", generation=ring.generation, reason=str(refused))

    # ---- its end

    async def leave(self, within_s: float) -> None:
        """This node leaves, the job goes on: the vault stays so long for those who may fetch from it, then ends by itself. One
        that was just started, and has not answered yet, has nothing to give.
        """
        await self._kill_unheard()
        with suppress(Silent, Refused, OSError):
            await once(self._options.socket, self._options.deadline_s, "leave", within_s=within_s)

    async def end(self) -> None:
        """The job is over, and what the vault holds with it. One that was just started would make its folder after that."""
        await self._kill_unheard()
        await dismiss(self._options.folder, within_s=self._options.deadline_s)
        await self._kill()
        self._key_file.unlink(missing_ok=True)

    @property
    def started(self) -> bool:
        """Is the one that answers a child of this daemon's?"""
        return self._begun.pid == self.process.pid != 0

    async def _kill(self) -> None:
        await self._kill_unheard()
        await self.process.kill(self._options.deadline_s)

    async def _kill_unheard(self) -> None:
        """One that was just started, and has not answered yet."""
        if not self.started:
            await self._begun.kill(self._options.deadline_s)

    # ---- small things

    @property
    def _key_file(self) -> Path:
        return self._options.home / "vault.key"

    @property
    def _port_file(self) -> Path:
        return self._options.home / "vault.port"

    def _last_port(self) -> int:
        try:
            return int(self._port_file.read_text(encoding="ascii"))
        except (OSError, ValueError):
            return 0

    def _note(self, state: str, reason: str) -> None:
        """Once for each change."""
        if state != self._state:
            self._state = state
            self.log.info("vault.changed", state=state, reason=reason, pid=self.process.pid)


async def first(*ways: Coroutine[Any, Any, None]) -> None:
    """Until one of them ends, as that one ends; the others are given up."""
    tasks = [asyncio.create_task(way) for way in ways]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def once(where: Path, deadline_s: float, op: str, **fields: object) -> Mapping[str, Any]:
    """One question, with a connection of its own."""
    talk = await Talk.open(where, deadline_s)
    try:
        return await talk.ask(op, **fields)
    finally:
        await talk.close()


async def dismiss(folder: Path, *, within_s: float) -> None:
    """End the vault that is served from there, if one is, and remove what it holds: nobody will read that memory again. Of a
    folder in whose place somebody else could have put another one nothing is believed, and nothing removed.
    """
    if unsafe(folder):
        return
    with suppress(Silent, Refused, OSError):
        status = await once(folder / CONTROL, within_s, "status")
        process = Started.of(int(status["pid"]))
        await once(folder / CONTROL, within_s, "end")
        await process.gone(within_s)
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()  # the job's, if this was its last node here
