"""The worker's side of its seat: how a training program learns which rank it has, and that this has changed.

The one idea: the agent never kills a living worker to tell it something. A watcher thread reads orders from a socket and
keeps only the newest; the training thread looks when it likes (`poll`), waits when it has nothing else to do (`wait`), and
may ask to be called from the watcher's thread when an order comes (`on_order`), to break a wait in a collective.

    seat = OwnSeat.here()
    while (place := seat.wait()) is not None:      # None: time to end
        join(place.endpoint, place.prefix, place.rank, place.world)
        while seat.poll() is None:
            train_one_step()
            seat.beat.sealed(step)
        leave()

No torch here: a program may hold a seat before it has imported anything. Without an agent there is no seat, and
`OwnSeat.here()` says so.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import sys
import threading
import traceback
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, TextIO

from elasticrl.base.title import title
from elasticrl.contract.beats import Beat, Stage
from elasticrl.contract.model import UNTOLD, Commit, Rung
from elasticrl.contract.orders import Halt, Park, Place

if TYPE_CHECKING:
    from collections.abc import Callable

    from _typeshed import ReadableBuffer


class NoSeat(RuntimeError):
    """This process was not started by an agent."""


hidden: set[str] = (
    set()
)  # variables that a rank no longer brings into the environment: a library takes them for its own
Order = Place | Park | Halt
ORDERS: Final = {kind.__name__: kind for kind in (Place, Park, Halt)}


def write(order: Order | Commit) -> bytes:
    """An order, or the newest commit, as a line on the worker's socket."""
    plain = {field.name: getattr(order, field.name) for field in fields(order)}
    return json.dumps({"is": type(order).__name__, **plain}, separators=(",", ":")).encode() + b"\n"


def read(plain: dict[str, Any]) -> Order:
    """The order again; fields that an agent of another version has are passed over."""
    kind = ORDERS[plain["is"]]
    names = {field.name for field in fields(kind)}
    plain = {key: tuple(value) if isinstance(value, list) else value for key, value in plain.items() if key in names}
    if "rung" in plain:
        plain["rung"] = Rung(plain["rung"])
    order: Order = kind(**plain)
    return order


def rank_env(place: Place) -> dict[str, str]:
    """Variables as torchrun sets them for a rank, for programs that look at them."""
    nodes = list(dict.fromkeys(place.nodes))
    group_rank = nodes.index(place.nodes[place.rank]) if place.rank < len(place.nodes) else 0
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.slot),
        "GROUP_RANK": str(group_rank),
        "ROLE_RANK": str(place.rank),
        "ROLE_NAME": "train",
        "WORLD_SIZE": str(place.world),
        "LOCAL_WORLD_SIZE": str(place.slots),
        "GROUP_WORLD_SIZE": str(len(nodes)),
        "ROLE_WORLD_SIZE": str(place.world),
        "MASTER_ADDR": place.host,
        "MASTER_PORT": str(place.port) if place.endpoint else "",
        # 0 at a start that answers no fault, as torchrun has it; else a number that rises.
        "TORCHELASTIC_RESTART_COUNT": str(place.generation if place.rung is not Rung.START else 0),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": os.environ.get("ELASTICRL_JOB", ""),
        "ELASTICRL_RUN": place.run,
        "ELASTICRL_GENERATION": str(place.generation),
        # The store at MASTER_ADDR is the agent's: rank 0 must not open a second one there, and need not leave last.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def lone_env() -> dict[str, str]:
    """What differs in a world of one: its store is its own. Found with Ray: such a process may be a driver whose own processes
    form a group. They have its variables, so each of them would wait for somebody else's store.
    """
    with socket.socket() as free:
        free.bind(("", 0))
        return {"MASTER_PORT": str(free.getsockname()[1]), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def take_place(place: Place) -> None:
    """From here on this process is the one of that rank: its log, its variables, its name in `ps`."""
    open_log(place.log)
    found = rank_env(place) | (lone_env() if place.world == 1 else {})
    os.environ.update({name: value for name, value in found.items() if name not in hidden})
    title(f"r{place.rank}")


class OwnSeat:
    """This process's seat. One per process."""

    _here: ClassVar[OwnSeat | None] = None

    def __init__(self, channel: socket.socket, beat: Beat) -> None:
        self.beat = beat
        self.scripted = False  # its program has not asked for it, and may report steps
        self._early = ""  # its program runs and has no rank yet: "joins", or "script" for one that does not ask for it
        self._claiming = threading.RLock()
        self._listens = False
        self.committed: Commit | None = None  # the newest commit that we were told of; read it when you like
        beat.changed = lambda: self._say("Look")
        self._channel = channel
        self._changed = threading.Condition()
        self._order: Order | None = None  # newest
        self._number = 0  # of the newest
        self._taken = 0  # newest that wait() has returned
        self._told: Callable[[Order], None] | None = None
        OwnSeat._here = self
        threading.Thread(target=self._watch, name="elasticrl-seat", daemon=True).start()

    @classmethod
    def here(cls) -> OwnSeat:
        """The seat of this process, or NoSeat."""
        if cls._here is None:
            raise NoSeat(
                "this process holds no seat: it was not started by an elasticrl agent (start it with `elasticrl run`)"
            )
        return cls._here

    def wait(self, *, done: bool = False) -> Place | None:
        """Blocks, parked, until there is a rank that was not taken yet; None when it is time to end (see `halt`). `done`: all
        steps are made, so a rank in a gang that only grows is left alone.

        Call it out of any process group: by calling it you say that your state is in hand and nobody waits for you.
        """
        if self._early == "joins":
            self._waits_early()
            self._early = ""
        with self._changed:
            if not self._ready(done) and self.beat.now.state not in {Stage.WARM, Stage.DONE}:
                self.beat.parked(self._order.generation if self._order else 0)
            while not self._ready(done):
                if isinstance(self._order, Park):
                    self.beat.parked(self._order.generation)
                self._changed.wait()
            order = self._order
            self._taken = self._number
        if not isinstance(order, Place):
            return None
        take_place(order)
        self.beat.joining(order.generation, order.born, order.resume)
        return order

    def expect(self, within_s: float | None = None) -> Order | None:
        """Blocks until there is any order, and leaves it untaken; None if there is none in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._order is not None, within_s)
            return self._order

    def begin_early(self, *, script: bool) -> None:
        """The program runs from here on, and has no rank yet."""
        self._early = "script" if script else "joins"

    def claim(self) -> None:
        """For a program that began without a rank, and cannot go on without one: blocks until it has one."""
        if not self._early or self.beat.now.pid != os.getpid():  # a loader's own process has none, and never will
            return
        with self._claiming:
            if not self._early:
                return
            self._waits_early()
            with self._changed:
                while not isinstance(self._order, Place | Halt):
                    if isinstance(self._order, Park):
                        self.beat.parked(self._order.generation)
                    self._changed.wait()
                order = self._order
            if isinstance(order, Halt):
                raise SystemExit(0)
            if self._early == "script":
                self.begin()
            else:
                take_place(order)
            self._early = ""

    def _waits_early(self) -> None:
        """The program has come as far as it can without a rank."""
        self._say("Loaded")
        if self._order is None:
            print("elasticrl: loaded ahead; this process waits for a rank", flush=True)

    def ready(self, bits: str = "", versions: str = "") -> None:
        """Tells the agent that this process is warm; and, if it was asked to find out, what decides the bits it computes, and
        what it runs.
        """
        self._say("Ready", bits=bits, versions=versions)

    def begin(self) -> None:
        """Take the rank for a program that does not ask for it: it trains from its first line."""
        place = self.wait()
        assert place is not None
        self.scripted = True
        self.beat.training()
        self.beat.phase(UNTOLD)

    def listens(self) -> None:
        """Tells the agent that this process asks whether it is time to leave, so it need not be sent SIGTERM at once."""
        if not self._listens:
            self._listens = True
            self._say("Listens")

    def poll(self) -> Order | None:
        """The newest order if it was not taken yet: a Place or a Park asks you to leave and wait(); a Halt, to end."""
        return None if self._number == self._taken else self._order

    @property
    def halt(self) -> Halt | None:
        """How to end, if it is time to."""
        return self._order if isinstance(self._order, Halt) else None

    def on_order(self, told: Callable[[Order], None] | None) -> None:
        """Call this from the watcher's thread at each order, and at once for one that is there already."""
        with self._changed:
            self._told = told
            waiting = self.poll()
        if told is not None and waiting is not None:
            told(waiting)

    def _say(self, word: str, **more: str) -> None:
        with contextlib.suppress(OSError):  # an agent that is gone has no use for it
            self._channel.sendall(json.dumps({"is": word, **more}).encode() + b"\n")

    def _ready(self, done: bool) -> bool:
        left = isinstance(self._order, Park) or (done and isinstance(self._order, Place) and self._order.grows)
        return self._number != self._taken and not left

    def _watch(self) -> None:
        for line in self._channel.makefile("rb"):
            try:
                self._hear(json.loads(line))
            except Exception:  # noqa: BLE001 - a program's own, in what it has put in our way: without us it would be deaf
                traceback.print_exc()
        # The agent is gone. The kernel ends its workers; should it not have been able to, nobody would ever tell us anything.
        os._exit(1)

    def _hear(self, plain: dict[str, Any]) -> None:
        if plain.get("is") == "Log":
            open_log(plain["path"])
            return
        if plain.get("is") == "Commit":
            del plain["is"]
            self.committed = Commit(**plain)
            return
        order = read(plain)
        if self._early and isinstance(order, Place):
            open_log(order.log)  # where the agent looks for its words from now on
        with self._changed:
            self._order = order
            self._number += 1
            told = self._told
            self._changed.notify_all()
        if told is not None:
            told(order)


def open_log(path: str) -> None:
    """From now on, what this process writes goes to the end of this file: straight, so that a kill loses nothing.

    Where there can be no such file, it goes on where it went before: no log is worth a worker. What a program has put in place
    of its streams is its own, and stays.
    """
    if not path:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the disk that it goes to is full, or it is a program's own
            stream.flush()
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.write(2, f"{path} cannot be opened: {error.strerror}\n".encode())
        return
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    if _begun_with(sys.stdout, 1):
        sys.stdout = Lossy.text(1, sys.stdout)
    if _begun_with(sys.stderr, 2):
        sys.stderr = Lossy.text(2, sys.stderr)


def _begun_with(stream: TextIO, fd: int) -> bool:
    """Whether it is the one that Python made for this descriptor."""
    inner = getattr(stream, "buffer", None)
    raw = getattr(inner, "raw", inner)  # with PYTHONUNBUFFERED there is nothing in between
    return isinstance(stream, io.TextIOWrapper) and isinstance(raw, io.FileIO) and raw.fileno() == fd


class Lossy(io.RawIOBase):
    """Output of which is lost what the disk does not take: a `print` to a full one must not end a training step."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def writable(self) -> bool:
        """Yes."""
        return True

    def fileno(self) -> int:
        """Where it goes."""
        return self._fd

    def write(self, data: ReadableBuffer, /) -> int:
        """All of it, or what the disk takes."""
        with contextlib.suppress(OSError):
            return os.write(self._fd, data)
        return memoryview(data).nbytes

    @classmethod
    def text(cls, fd: int, like: TextIO) -> TextIO:
        """A stream in the place of this one."""
        straight = getattr(like, "write_through", False)
        raw = io.BufferedWriter(cls(fd))
        return io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=True, write_through=straight)
