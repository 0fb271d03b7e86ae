"""What outlives a daemon on its node: who it is, its lease, and the lock that keeps a second daemon out.

The one idea: one small file in the runtime directory, written before it matters. A new daemon that finds the workers of the old
one still running goes on as the same member under the same lease; one that does not is a new member. So `systemctl restart`
and kill -9 of the daemon cost no step, and a restarted daemon never keeps a place its workers have lost.
"""

import json
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Final

from elasticrl.base.address import CONTROL, overlong
from elasticrl.base.owned import foreign, made_closed, opened, taken_by, write_private
from elasticrl.base.parsed import parsed
from elasticrl.base.started import Started
from elasticrl.base.value import dataclass
from elasticrl.contract.model import Member
from elasticrl.daemon.refusal import FULL, Refusal

LOCK: Final = "daemon.lock"  # held by a node's daemon, in its runtime directory and in that of its state
MOMENT_S: Final = 0.5  # for which somebody who only looks may hold a lock


class Taken(Refusal):
    """Another daemon runs for this job and node here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One life of this node.

    Example: Life(node="n03", incarnation=2, lease=7587, agent_pid=4711, agent_started=182233)
    """

    node: str
    incarnation: int
    lease: int = 0  # 0: none
    agent_pid: int = 0
    agent_started: int = 0  # in clock ticks since boot, so that a reused pid is not mistaken for the agent
    beat: str = ""  # where it listens for beats
    boot: str = ""  # which boot of this machine it was led in
    since: int = 0  # the store's revision when it began
    parted: bool = False  # its daemon ended in order; else it is there, or has died

    @property
    def agent(self) -> Started:
        """Its agent; one that has ended if it had none."""
        return Started(pid=self.agent_pid, born=self.agent_started)

    @property
    def member(self) -> Member:
        """As the plan calls it."""
        return Member(node=self.node, incarnation=self.incarnation)


class Home:
    """The runtime directory of one node of one job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if why := overlong(self.control):
            raise Refusal(f"{why}: shorten node.run_dir, job.name or node.name")
        for each in (folder.parents[1], folder.parent, folder):
            each.mkdir(parents=True, exist_ok=True, mode=0o750)
        if why := foreign(folder):
            raise Refusal(
                f"{why}: whoever can change what is in it could have this node run other programs. Remove it if nobody "
                "needs it, or set node.run_dir to a folder of your own"
            )
        self._locks: list[IO[str]] = []

    @property
    def control(self) -> Path:
        """Where operators' commands find the daemon."""
        return self.folder / CONTROL

    def lock(self, state: Path) -> None:
        """Be the only daemon of this job and node here, or raise `Taken`. Each session may have sockets in a place of its own;
        `state` is the same for all of them.
        """
        try:
            self._locks.append(self._held(self.folder))
        except OSError as error:
            if error.errno in FULL:
                raise
            raise Refusal(
                f"{self.folder / LOCK} cannot be locked ({error.strerror}): node.run_dir wants a disk of this machine"
            ) from None
        with suppress(OSError):  # who writes there says why it cannot be
            made_closed(state)
            self._locks.append(self._held(state))

    def _held(self, folder: Path) -> IO[str]:
        held = opened(folder / LOCK)
        try:
            pid, until = taken_by(held), time.monotonic() + MOMENT_S
            while pid and time.monotonic() < until:  # who only looks whether a daemon runs takes it for less than that
                time.sleep(MOMENT_S / 10)
                pid = taken_by(held)
            if pid:
                here = f"a daemon for this job and node runs here already (pid {pid}, {folder})"
                raise Taken(f"{here}; stop it, or give this one another node.name")
        except BaseException:
            held.close()
            raise
        return held

    def load(self) -> Life | None:
        """The life that was written last, or None."""
        try:
            plain = parsed((self.folder / "life.json").read_text(encoding="utf-8"))
            return Life(**plain)
        except (OSError, ValueError, TypeError):
            return None

    def save(self, life: Life) -> None:
        """Write it so that a kill at any moment leaves the old or the new one."""
        write_private(self.folder / "life.json", json.dumps(asdict(life)), sync=True)


BOOT = Path("/proc/sys/kernel/random/boot_id")


def this_boot() -> str:
    """Another one for each boot; "" where the kernel does not tell."""
    try:
        return BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def end_of(before: Life | None, boot: str, *, adopted: bool) -> str:
    """How the daemon ended that ran here before, or all of that life, in a word of `words.ENDS`; "": in order, or not known.

    >>> dead = Life(node="n3", incarnation=1, boot="a")
    >>> end_of(dead, "a", adopted=True), end_of(dead, "a", adopted=False), end_of(dead, "b", adopted=False)
    ('died', 'killed', 'rebooted')
    >>> ended = Life(node="n3", incarnation=1, parted=True)
    >>> end_of(ended, "a", adopted=True), end_of(ended, "b", adopted=False), end_of(None, "a", adopted=False)
    ('handed', '', '')
    """
    if before is None or not (before.boot or before.parted):
        return ""
    if adopted:
        return "handed" if before.parted else "died"
    return "" if before.parted else "killed" if before.boot == boot else "rebooted"


def next_life(node: str, before: Life | None, known: int) -> Life:
    """A life that nobody has heard of. `known` is the highest incarnation of this node that the store remembers."""
    highest = max(known, before.incarnation if before and before.node == node else 0)
    return Life(node=node, incarnation=highest + 1)
