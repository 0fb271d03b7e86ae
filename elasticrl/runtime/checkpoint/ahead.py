"""A writer that is there before it is wanted: forked by a worker that gets warm, with all it needs imported.

The one idea: a Python that imports torch takes seconds of a processor from the training beside it, and the first save waits for
that. A fork of a process that has no threads yet takes some milliseconds, and shares its memory.
"""

import json
import os
import signal
import socket
import subprocess
import time
import traceback
from dataclasses import dataclass

from elasticrl.base.parent import stops
from elasticrl.base.parsed import parsed
from elasticrl.base.title import title
from elasticrl.runtime.checkpoint.writer import MESSAGE, serve


@dataclass(slots=True)
class Forked:
    """A child of ours, as subprocess.Popen shows one."""

    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        """How it ended: its exit code, or a signal's number below zero; None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody waits for all children here
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Until it has ended, or subprocess.TimeoutExpired."""
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("writer", timeout)
            time.sleep(0.005)  # as subprocess waits for a child with a deadline
        return code


_waiting: tuple[socket.socket, Forked] | None = None


def fork() -> None:
    """In a process that has no other thread: have a writer ready. It waits for `take`, and ends with this process."""
    global _waiting  # noqa: PLW0603 - one for each process, as it has one Saver
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        try:
            _wait(theirs.detach())
        except BaseException:  # noqa: BLE001 - nothing of the worker's may run in its fork
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    theirs.close()
    _waiting = ours, Forked(pid)


def take(orphan_s: float) -> tuple[socket.socket, Forked] | None:
    """The writer that waits, if there is one: it is the caller's from now on, and speaks where the caller does."""
    global _waiting
    taken, _waiting = _waiting, None
    if taken is None or taken[1].poll() is not None:
        return None
    sock, process = taken
    try:
        socket.send_fds(sock, [json.dumps({"orphan_s": orphan_s}).encode()], [1, 2])
    except OSError:  # it has just died
        sock.close()
        return None
    sock.setblocking(False)
    return sock, process


def _wait(fd: int) -> None:
    """The writer's life."""
    os.setsid()  # a signal to the worker's group is not meant for a half-written checkpoint
    os.closerange(3, fd)
    os.closerange(fd + 1, os.sysconf("SC_OPEN_MAX"))
    title("save")
    for stop in stops():
        signal.signal(stop, signal.SIG_DFL)
    with socket.socket(fileno=os.dup(fd)) as sock:
        data, files, _, _ = socket.recv_fds(sock, MESSAGE, 2)
    if not data:  # nobody ever wanted it
        return
    for number, file in enumerate(files, start=1):
        os.dup2(file, number)
        os.close(file)
    serve(fd, parsed(data)["orphan_s"])
