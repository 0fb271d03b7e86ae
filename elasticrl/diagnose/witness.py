"""What a worker says when it is asked, whatever its training thread is stuck in: its stack, and its flight recorder.

The one idea: neither answer needs the training thread. The stack is written by faulthandler's handler in C, straight from
the signal, whoever holds the GIL. The recorder is read by a thread that sleeps in a pipe until somebody asks. Both answers
are files in a folder of the node's own, so the asker needs nothing from a worker but its pid, and a worker that cannot run
costs the asker a deadline and nothing else.

    witness.stand(folder)                 # in the worker, at its start
    stacks.collect(folder, {3: pid}, ...)  # in whoever asks, and recorder.collect the same way
"""

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
from dataclasses import field
from pathlib import Path
from typing import Final

from elasticrl.base.value import dataclass

#: A real-time signal: SIGUSR1 and SIGUSR2 belong to schedulers and to programs. Askers look whether it is caught (see
#: `listens`), since its default is to end the process.
SIGNAL: Final = signal.SIGRTMIN + 6
TOKEN: Final = 64  # bytes of a question at most


def environment(recorder: int) -> dict[str, str]:
    """What a worker's environment needs for its recorder (`comm.recorder` entries; 0: none). Before torch is imported.

    0 is said too: a torch that is told nothing (2.13) remembers 2,000.
    """
    return {"TORCH_FR_BUFFER_SIZE": str(recorder)}


def folder_of(runtime: Path) -> Path:
    """Where the witnesses of a node's workers stand, below its runtime directory."""
    return runtime / "witness"


def stack_file(folder: Path, pid: int) -> Path:
    """Where a worker's stacks go, one after the other."""
    return folder / f"{pid}.stack"


def ask_file(folder: Path, pid: int) -> Path:
    """The pipe that a worker's witness reads questions from."""
    return folder / f"{pid}.ask"


def recorder_file(folder: Path, pid: int) -> Path:
    """Where a worker's recorder is written when it was asked for."""
    return folder / f"{pid}.recorder.json"


@dataclass(slots=True)
class Witness:
    """A worker's witness. It ends with the process; `close` is for tests and for processes that live on."""

    folder: Path
    pid: int = field(default_factory=os.getpid)
    _stack: int = -1
    _ask: int = -1

    def stand(self) -> None:
        """Be ready to answer."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A file left by an earlier process of the same number would be taken for ours.
        for path in files(self.folder, self.pid):
            path.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._stack = os.open(stack_file(self.folder, self.pid), flags, 0o600)
        # The interrupted thread alone: to walk the frames of others, which go on running, ends the process now and then.
        faulthandler.register(SIGNAL, self._stack, all_threads=False, chain=False)
        os.mkfifo(ask_file(self.folder, self.pid), 0o600)
        # For reading and writing: then it has no end when an asker closes it.
        self._ask = os.open(ask_file(self.folder, self.pid), os.O_RDWR | os.O_CLOEXEC)
        threading.Thread(target=self._answer, name="elasticrl-witness", daemon=True).start()

    def close(self) -> None:
        """Stop answering, and leave no file."""
        faulthandler.unregister(SIGNAL)
        with contextlib.suppress(OSError):
            os.write(self._ask, b"\n")  # the thread ends at an empty question
        os.close(self._stack)
        for path in files(self.folder, self.pid):
            path.unlink(missing_ok=True)

    def _answer(self) -> None:
        left, newest = b"", ""
        while True:
            left += os.read(self._ask, 4096)
            *questions, left = left.split(b"\n")
            for question in questions:
                token = question[:TOKEN].decode(errors="replace")
                if not token:
                    os.close(self._ask)
                    return
                # Who asked first may be heard last. Found live: his answer replaced the newer one, which was then awaited
                # for `timeouts.dump`. What is written now answers both.
                newest = max(newest, token)
                with contextlib.suppress(OSError):  # a full disk costs an answer, not the thread
                    self._write(newest)
            left = left[-TOKEN:]

    def _write(self, token: str) -> None:
        """Whole or not at all: the asker may look at any time."""
        answer = b'{"token":%b,"dump":%b}' % (json.dumps(token).encode(), recorded())
        path = recorder_file(self.folder, self.pid)
        fresh = path.with_suffix(".new")
        fresh.write_bytes(answer)
        fresh.replace(path)


def recorded() -> bytes:
    """This process's flight recorder as JSON; `null` where there is none. torch is not imported for this."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return b"null"
    try:
        return bytes(dump())
    except (RuntimeError, ValueError):  # a recorder that is switched off, or a group that is being destroyed
        return b"null"


def files(folder: Path, pid: int) -> tuple[Path, ...]:
    """All that a worker's witness may have left in the folder."""
    written = recorder_file(folder, pid)
    return stack_file(folder, pid), ask_file(folder, pid), written, written.with_suffix(".new")


def stand(folder: Path) -> Witness:
    """Call this at a worker's start, after any fork: from then on it answers questions."""
    witness = Witness(folder)
    witness.stand()
    return witness


def signal_main(pid: int) -> None:
    """Interrupt a process's main thread. `kill` would let the kernel choose a thread, and a busy main thread may not be it."""
    import ctypes

    if ctypes.CDLL(None, use_errno=True).tgkill(pid, pid, SIGNAL) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def listens(pid: int, number: int = SIGNAL) -> bool:
    """Whether a process would catch that signal, ours if none is named, instead of dying of it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)
