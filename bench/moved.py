"""Which bytes a machine moves, and how fast it could: loopback's and the disks' counters, and the bandwidth of each way. And
what processors a job's processes have had.

The one idea: the kernel counts, and nobody under test is asked. A thread reads the counters every few milliseconds, so what was
moved between any two moments can be told afterwards.
"""

import mmap
import os
import socket
import threading
import time
import uuid
from bisect import bisect_left
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

LOOK_S = 0.01
SECTOR = 512
MARK = "BENCH_JOB"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Used(NamedTuple):
    """What processes have had so far. Example: Used(busy_s=8.1, faults=650_000)"""

    busy_s: float  # of processors
    faults: int  # pages of memory that the kernel had to find for them


class Processes:
    """The processes that come to be in its context, with what they start in turn, whoever adopts them: each inherits a mark."""

    def __init__(self) -> None:
        self._mark = f"{MARK}={uuid.uuid4().hex}"

    def __enter__(self) -> Self:
        os.environ[MARK] = self._mark.partition("=")[2]
        return self

    def __exit__(self, *exc: object) -> None:
        os.environ.pop(MARK, None)

    def used(self) -> dict[int, Used]:
        """By process. Of one that has ended nothing is known any more."""
        found: dict[int, Used] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, IndexError):
                if self._mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    words = (folder / "stat").read_text().rpartition(")")[2].split()
                    found[int(folder.name)] = Used((int(words[11]) + int(words[12])) * TICK_S, int(words[7]))
        return found

    def since(self, before: dict[int, Used]) -> Used:
        """What they have had since then."""
        each = [(now, before.get(pid, Used(0.0, 0))) for pid, now in self.used().items()]
        return Used(
            sum(now.busy_s - was.busy_s for now, was in each), sum(now.faults - was.faults for now, was in each)
        )


class Counters:
    """Bytes over loopback and to disks, by moment. Use it as a context."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, int, int]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            self._rows.append((time.monotonic(), loopback(), disks()))

    def between(self, start: float, stop: float) -> dict[str, int]:
        """What was moved from one moment to another."""
        times = [at for at, _, _ in self._rows]
        first, last = (min(bisect_left(times, at), len(times) - 1) for at in (start, stop))
        (_, lo, disk), (_, lo_after, disk_after) = self._rows[first], self._rows[last]
        return {"loopback": lo_after - lo, "disk": disk_after - disk}


def loopback() -> int:
    """Bytes that went over loopback so far."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[9])


def disks() -> int:
    """Bytes that were written to disks, and read from them, so far."""
    rows = [line.split() for line in Path("/proc/diskstats").read_text().splitlines()]
    return SECTOR * sum(int(row[5]) + int(row[9]) for row in rows if not row[2].startswith(("loop", "ram", "dm-")))


def memory_bandwidth(nbytes: int = 256 << 20) -> float:
    """Bytes a second that one thread copies, into memory that it has had before."""
    source, target = bytearray(nbytes), bytearray(nbytes)
    took = []
    for _ in range(3):
        begun = time.perf_counter()
        target[:] = source
        took.append(time.perf_counter() - begun)
    return nbytes / min(took)


def new_memory_bandwidth(nbytes: int = 256 << 20) -> float:
    """The same into memory that it has not had: the kernel finds and clears each page first."""
    source = bytearray(nbytes)
    took = []
    for _ in range(3):
        with mmap.mmap(-1, nbytes) as target:
            begun = time.perf_counter()
            target[:] = source
            took.append(time.perf_counter() - begun)
    return nbytes / min(took)


def loopback_bandwidth(nbytes: int = 512 << 20) -> float:
    """Bytes a second that one connection carries between two threads, in blocks of 4 MiB."""
    block = bytearray(4 << 20)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()

        def send() -> None:
            for _ in range(nbytes // len(block)):
                sender.sendall(block)

        thread = threading.Thread(target=send, daemon=True)
        begun, room, left = time.perf_counter(), memoryview(bytearray(len(block))), nbytes
        thread.start()
        with receiver:
            while left:
                left -= receiver.recv_into(room)
        took = time.perf_counter() - begun
        thread.join()
    return nbytes / took
