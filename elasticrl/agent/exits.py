"""How a process ended, judged: whose doing it was, and what else there is to know about it.

The idea: one pure function (`judge`) over facts that others have gathered. What the program did itself (an exception, a bad
signal) counts towards a crash loop; what was done to it (a kill, the kernel short of memory, a peer that went away) does not.
"""

import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from elasticrl.base import raised
from elasticrl.base.value import dataclass
from elasticrl.contract.evidence import Sign
from elasticrl.contract.model import JOIN
from elasticrl.diagnose import health, proc
from elasticrl.diagnose.kernel_log import Ring, killed_pid

# Signals that a program brings upon itself. All others come from somebody else.
BAD: Final = {
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSYS,
    signal.SIGTRAP,
}

# Exceptions that say that somebody else went away, by their full names. A rank that dies of one is a victim.
VICTIMS: Final = {
    "elasticrl.runtime.interrupt.Broken",
    "elasticrl.runtime.interrupt.GangError",
    "elasticrl.runtime.interrupt.Interrupted",
    "elasticrl.runtime.vault.errors.Outlived",
}
# Python's and torch's, of which a script's own error file may say the short name alone.
KNOWN: Final = {
    "BrokenPipeError",
    "ConnectionAbortedError",
    "ConnectionResetError",
    "DistNetworkError",
    "DistStoreError",
}

# The same in words, where torch, gloo or NCCL wrote them: they raise a RuntimeError. A server of the program's own that
# refuses a connection is no peer's end, and nobody but the program can do something about it.
VICTIM: Final = re.compile(
    r"(\b(pair|buffer|unbound_buffer|socket|context)\.cc:\d+\]|c10d|TCPStore|ProcessGroup[A-Z]|\bDist[A-Z]\w*Error\b)"
    r".*([Cc]onnection (closed by peer|reset by peer|refused|was reset)|[Bb]roken pipe|Timed out waiting \d+ms for (recv|send))"
    r"|ncclRemoteError|NCCL.*remote process exited|NCCL communicator was aborted"
)

NAME: Final = re.compile(r"([A-Za-z_]\w*(\.[A-Za-z_]\w*)*)(:|$)")  # with which torch begins a message
LINE_CHARACTERS: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """What is known when a process has ended."""

    code: int | None  # negative: a signal; None: nobody could say
    message: str = ""  # "ValueError: bad prompt", from torch's error file
    raised: str = ""  # the exception's name, from there
    killed: str = ""  # why we killed it ourselves
    sign: Sign | None = None  # what that says of it
    memory: str = ""  # what the kernel says about running out of memory
    unjoined: bool = False  # it had a rank to take, and never asked for it

    @property
    def signal(self) -> int:
        """That ended it, if it was not ours; 0: none."""
        return -self.code if self.code is not None and self.code < 0 and not self.killed else 0


def judge(facts: Traces) -> tuple[str, bool, Sign | None]:
    """The cause in a sentence, whether it was the program's own doing, and what is known of it beside that.

    >>> judge(Traces(code=1, message="ValueError: bad prompt"))
    ('exit code 1: ValueError: bad prompt', True, None)
    >>> judge(Traces(code=-9))
    ('signal 9 (SIGKILL)', False, None)
    """
    if facts.killed:
        return facts.killed, False, facts.sign or Sign.KILLED
    if facts.memory:
        return f"out of memory: {facts.memory}", False, Sign.OOM_KILLED
    if facts.code is None:
        return "it ended, and nobody could say how", False, Sign.GONE
    named = facts.raised in VICTIMS or raised.short(facts.raised) in KNOWN
    victim = named or VICTIM.search(facts.message) is not None
    if facts.code < 0:
        said = f": {facts.message}" if facts.message else ""
        own = -facts.code in BAD and not victim
        return f"signal {-facts.code} ({signal_name(-facts.code)}){said}", own, None
    if facts.message:
        return f"exit code {facts.code}: {facts.message}", not victim, None
    if facts.unjoined:
        return f"its program ended with exit code 0, and had never called {JOIN}", True, Sign.UNJOINED
    return f"exit code {facts.code}" if facts.code else "it exited too early, with exit code 0", True, None


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def exception_of(data: Any) -> str:
    """The message out of what torch's `@record` wrote; its first line only, as causes are compared."""
    message = data.get("message", "") if isinstance(data, dict) else ""
    if isinstance(message, dict):
        message = message.get("message", "")
    return "" if message == "<NONE>" else str(message).split("\n", 1)[0][:LINE_CHARACTERS]


def raised_of(data: Any) -> str:
    """The name of the exception, as the worker told it; "" if no exception was told of.

    Where a script wrote the file by torch's `@record`, that is the type's short name, which the message begins with.
    """
    message = data.get("message") if isinstance(data, dict) else None
    if not isinstance(message, dict):
        return ""
    more = message.get("extraInfo")
    told = more.get(raised.KEY) if isinstance(more, dict) else None
    if isinstance(told, str):
        return told[: raised.LONGEST]
    begins = NAME.match(str(message.get("message", "")))
    return begins[1][: raised.LONGEST] if begins else ""


def core_of(code: int | None) -> str:
    """Where the kernel puts core dumps, if this end may have left one."""
    if code is None or -code not in BAD:
        return ""
    try:
        return Path("/proc/sys/kernel/core_pattern").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


RECENT_S: Final = 5.0  # a kill that the count has had for longer was another process's


class Memory:
    """What the kernel tells about processes it killed for want of memory: its log where it names them as we do, else a
    count.
    """

    def __init__(self, root: Path = health.ROOT) -> None:
        files = health.cgroup_files(root)
        self._counter = files[2] if files else None  # of our cgroup
        self._killed = self._counted = self._count()  # as it was a while ago, and when it was looked at last
        self._looked_at = time.monotonic()
        self._log: Ring | None = None
        with suppress(OSError):  # an unprivileged user may not; the counter remains
            self._log = Ring(root, news=True)
        self._said: dict[int, str] = {}

    def evidence(self, pid: int, code: int | None) -> str:
        """What speaks for the kernel having ended this process for want of memory; "" if nothing does."""
        if code != -signal.SIGKILL:
            return ""
        self._read_log()
        if pid in self._said:
            return self._said[pid]
        killed = self._count()
        if killed > self._killed:
            self._killed = self._counted = killed
            return f"the kernel killed a process of this node's cgroup for want of memory ({self._counter})"
        return ""

    def look(self, now: float) -> None:
        """To be called now and then: what was killed a while ago is no explanation of what ends later."""
        if now - self._looked_at > RECENT_S:
            self._killed, self._counted, self._looked_at = self._counted, self._count(), now

    def _count(self) -> int:
        try:
            text = self._counter.read_text(encoding="utf-8") if self._counter else ""
        except OSError:
            return 0
        return proc.flat(text).get("oom_kill", 0)

    def _read_log(self) -> None:
        for record in self._log.records() if self._log else ():
            if found := killed_in(record):
                self._said[found[0]] = found[1]


def killed_in(record: str) -> tuple[int, str] | None:
    """The process that a record of the kernel's log says was killed for want of memory, and the record's words.

    >>> killed_in("6,1,2,-;Out of memory: Killed process 7 (python) anon-rss:9kB")
    (7, 'Out of memory: Killed process 7 (python) anon-rss:9kB')
    """
    words = record.partition(";")[2].split("\n", 1)[0].strip()
    pid = killed_pid(words)
    return None if pid is None else (pid, words)
