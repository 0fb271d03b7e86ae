"""One worker process, held by torch's own process context, and what the agent keeps beside it: pidfd, socket, beats, logs.

Each process is a context of its own (torch's contexts are all or nothing: one failure ends all), started warm by torch's
fork server context. Everything that touches a context runs in one thread: multiprocessing reads a child's status once, and two
readers would lose it.
"""

import contextlib
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import select
import signal
import socket
from pathlib import Path

from torch.distributed.elastic.multiprocessing import MultiprocessContext, ProcessFailure, start_processes

from elasticrl.agent import warm, worker
from elasticrl.agent.logs import Logs, TorchLogs
from elasticrl.agent.spec import Spec, common_env
from elasticrl.base.parsed import parsed
from elasticrl.base.process import life, started_at
from elasticrl.base.value import dataclass
from elasticrl.contract import seat
from elasticrl.contract.beats import Page, Snapshot
from elasticrl.contract.evidence import Sign
from elasticrl.contract.model import Commit
from elasticrl.contract.orders import Place
from elasticrl.diagnose import witness

log = logging.getLogger(__name__)

STATUS_S = 5.0  # how long the fork server may take to say how a dead child ended: it may be importing
LINE = 1 << 16  # letters of a line that has no end yet
UNKNOWN = 255  # what multiprocessing says when it has died without having said it


@dataclass(slots=True, kw_only=True, eq=False)
class Process:
    """A worker process: warm, then seated, then ended."""

    number: int
    pid: int
    pidfd: int
    started: int
    context: MultiprocessContext
    channel: socket.socket
    page: Page
    error_file: Path
    log: Path
    first_log: Path  # from before it had a rank
    witness: Path  # where its answers about its stack and recorder lie
    parent: int  # the fork server that knows how it ends
    warm: bool = False
    loaded: bool = False  # its program has come as far as it can without a rank
    listens: bool = False  # its program asks whether it is time to leave
    bits: str = ""  # fingerprint of what decides the bits it computes, if it was asked to find out
    versions: str = ""  # what it runs, likewise
    said: bytes = b""  # the beginning of its next line
    slot: int | None = None  # None: it has no rank
    rank: int | None = None
    next_log: tuple[int, Path] | None = None  # where it writes once it has taken its rank in that generation
    killed: str = ""  # why we ended it
    sign: Sign | None = None  # what that says of it
    finished: bool = False  # ended with exit code 0
    dying: bool = False  # a signal ended it, and the kernel still frees its memory

    def assign(self, place: Place) -> None:
        """Give it a rank, for the first time or anew. Raises OSError if it takes no orders."""
        trains_on, log = place.grows and self.rank is not None, Path(place.log)
        self.slot, self.rank = place.slot, place.rank
        self.log, self.next_log = (self.log, (place.generation, log)) if trains_on else (log, None)
        self.tell(place)

    def tell(self, order: seat.Order) -> None:
        """Send an order. Raises OSError if it takes none."""
        self._send(seat.write(order))

    def inform(self, committed: Commit) -> None:
        """Tell it of a commit. One that does not read hears of the next."""
        with contextlib.suppress(OSError):
            self._send(seat.write(committed))

    def reopen(self) -> None:
        """Its log was renamed."""
        with contextlib.suppress(OSError):
            self._send(json.dumps({"is": "Log", "path": str(self.log)}).encode() + b"\n")

    def _send(self, line: bytes) -> None:
        sent = self.channel.send(line, socket.MSG_NOSIGNAL)
        if sent < len(line):
            raise BlockingIOError("the process does not read its orders")

    def hear(self) -> bool:
        """Read what it says (that it is warm, or that its beat is worth a look at once); False if it has said its last."""
        try:
            said = self.channel.recv(4096)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        *lines, self.said = (self.said + said).split(b"\n")
        self.said = self.said[-LINE:]
        for line in lines:
            with contextlib.suppress(ValueError):  # a program's own words, which it has put in our way
                plain = parsed(line)
                if isinstance(plain, dict) and plain.get("is") == "Listens":
                    self.listens = True
                if isinstance(plain, dict) and plain.get("is") == "Loaded":
                    self.loaded = True
                if isinstance(plain, dict) and plain.get("is") == "Ready":
                    self.warm, self.bits, self.versions = (
                        True,
                        str(plain.get("bits", "")),
                        str(plain.get("versions", "")),
                    )
        return bool(said)

    def beat(self) -> Snapshot:
        """What it says of itself now."""
        return self.page.read() or Snapshot()

    def writes_elsewhere(self, beat: Snapshot) -> bool:
        """Whether it has gone over to the log of its new place, by what it says of itself."""
        if not self.next_log or beat.generation < self.next_log[0]:
            return False
        self.log, self.next_log = self.next_log[1], None
        return True

    def term(self, why: str) -> bool:
        """Ask it to end, as a scheduler would; False if it cannot hear that."""
        self.killed = self.killed or why
        alive = life(self.pid)
        if alive is None or alive.stopped:
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGTERM)
            return True
        return False

    def end(self, why: str, sign: Sign | None = None) -> None:
        """Kill it and its children, at once, stopped or not."""
        if not self.killed:
            self.killed, self.sign = why, sign
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGCONT)
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        self.sweep()

    def sweep(self) -> None:
        """Kill what it has left running."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def orphaned(self) -> bool:
        """Has its fork server ended? Then it ends too, and nobody can say how."""
        return life(self.parent) is None

    @property
    def ended(self) -> bool:
        """Has the kernel seen its end?"""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def collect(self) -> tuple[int | None, ProcessFailure | None]:
        """How it ended: its exit code (None if nobody can say), and torch's account of a failure."""
        child = self.context._pc.processes[0] if self.context._pc else None  # noqa: SLF001 - torch shows its sentinel nowhere
        if child is None or not multiprocessing.connection.wait([child.sentinel], STATUS_S):
            return None, None
        self.sweep()
        if self.orphaned():
            return None, None
        try:
            result = self.context.wait(0)
        except Exception as error:  # noqa: BLE001 - torch reads what the process wrote as it failed, on a disk that may be full
            log.info("process %d left no account of its end that can be read: %s", self.pid, error)
            return child.exitcode, None
        failure = result.failures[0] if result and result.failures else None
        code = failure.exitcode if failure else child.exitcode
        if code == UNKNOWN and self.orphaned():  # just now: the kernel was ending both
            return None, None
        return code, failure

    def close(self) -> None:
        """Forget it."""
        self.channel.close()
        os.close(self.pidfd)
        self.page.close()
        self.error_file.unlink(missing_ok=True)
        for left in witness.files(self.witness, self.pid):
            left.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            if self.first_log.stat().st_size == 0:
                self.first_log.unlink()


def start(spec: Spec, number: int, runtime: Path, logs: Logs, *, tells_bits: bool = False) -> Process:
    """Start a process that gets warm and waits for a rank. Blocks until it runs. `tells_bits`: it finds its fingerprint out."""
    page = Page(runtime / "beats" / f"process_{number}", create=True)
    error_file = runtime / "errors" / f"process_{number}.json"
    log = logs.warm(number)
    place = witness.folder_of(runtime)
    job = worker.Job(
        program=spec.program, args=spec.args,
        page=str(page.path), log=str(log), witness=str(place), ahead=spec.ahead, joins=not spec.script, unset=spec.unset,
        later=(*spec.later, *spec.imports), load_ahead=spec.load_ahead,
        fingerprint=spec.fingerprint if tells_bits else "",
    )  # fmt: skip
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    try:
        with theirs:
            context = start_processes(
                name="worker",
                entrypoint=worker.main,
                args={0: (theirs, job)},
                envs={0: common_env(spec)},
                logs_specs=TorchLogs(error_file),
                start_method="forkserver",
            )
        assert isinstance(context, MultiprocessContext)
        pid = context.pids()[0]
        pidfd = os.pidfd_open(pid)
    except BaseException:
        ours.close()
        page.close()
        raise
    return Process(
        number=number, pid=pid, pidfd=pidfd, started=started_at(pid), context=context, channel=ours,
        page=page, error_file=error_file, log=log, first_log=log, witness=place,
        # Not asked of the kernel: of a process whose server has just died it would name who has adopted it.
        parent=warm.server(),
    )  # fmt: skip
