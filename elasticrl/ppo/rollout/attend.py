"""Sees to it that an engine answers: adopts the one that is here, starts one where none is, ends one that does not work.

The idea: what is true of an engine lies in its home, not in anybody's memory. A lock that it holds for its whole life says that
there is one, its page says what it is, a generation says that it works. So it makes no difference which worker started it, or
whether that one still lives; two workers that look at once find the same engine.

A thread does this, so that an engine that dies while nobody needs it is back before somebody does.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Final

from elasticrl.base.pauses import pause
from elasticrl.base.started import NOBODY, last_words, start
from elasticrl.contract.model import REFUSED
from elasticrl.ppo.rollout.engine import EngineFailed
from elasticrl.ppo.rollout.service import ENGINE_LOCK, LOADS, SPEC, Service
from elasticrl.ppo.rollout.wire import PROTOCOL, SOCKET, Lost, Refused, Talk
from elasticrl.runtime.vault.errors import VaultError
from elasticrl.runtime.vault.slots import prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from elasticrl.config import Tree

LOG: Final = "engine.log"
START_LOCK: Final = "start.lock"  # held by whoever looks whether to start one
LOOK_S: Final = 0.05
PAUSE_S: Final = 0.5  # after a start that came to nothing, then twice that,
REST_S: Final = 5.0  # and at most
TAIL: Final = 2000  # bytes of an engine's last words

# Of the worker's environment: an engine is no rank of its gang, and no child of its daemon.
KEPT_OUT: Final = (
    "ELASTICRL_", "NOTIFY_", "WATCHDOG_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long, and how often.

    Example: Limits(start_s=300.0, sync_s=30.0, health_every_s=10.0, health_s=5.0, starts=3)
    """

    start_s: float
    sync_s: float
    health_every_s: float
    health_s: float
    starts: int

    @classmethod
    def of(cls, tree: Tree) -> Limits:
        """As the configuration has it."""
        rollout = tree.rollout
        return cls(
            start_s=rollout.start_timeout_s,
            sync_s=rollout.sync_timeout_s,
            health_every_s=rollout.health_every_s,
            health_s=rollout.health_timeout_s,
            starts=rollout.starts,
        )


class Attendant:
    """One worker's. `say` gets a sentence for the log."""

    def __init__(
        self, home: Path, service: Service, limits: Limits, *, python: str | None, say: Callable[[str], None]
    ) -> None:
        self.home, self.service, self.limits = home, service, limits
        self.python, self._say = python or sys.executable, say
        self._begun = NOBODY  # the engine that this worker has started, until its end was seen
        self._up = threading.Event()
        self._stirred = threading.Event()
        self._closing = threading.Event()
        self._busy = 0  # conversations of this worker that show by themselves whether it lives
        self._failed = ""  # why none can be had
        self._suspect = ""
        prepare(home)
        self._thread = threading.Thread(target=self._run, name="rollout engine", daemon=True)
        self._thread.start()

    def say(self, sentence: str) -> None:
        """For the log. A disk that takes no more of it does not end who looks after the engine."""
        with suppress(OSError):
            self._say(sentence)

    # ---- what the trainer calls

    @contextmanager
    def talk(self, check: Callable[[], None]) -> Iterator[Talk]:
        """With an engine that works, as soon as there is one. EngineFailed if none can be had."""
        within_s = self.limits.starts * (self.limits.start_s + self.limits.health_s)
        deadline = time.monotonic() + within_s
        while not self._up.wait(LOOK_S):
            check()
            self.raise_if_failed()
            if time.monotonic() > deadline:
                raise EngineFailed(f"there was no rollout engine for {within_s:g} s; see {self.home / LOG}")
        self._busy += 1
        try:
            with Talk(self.home / SOCKET, within_s=self.limits.health_s, check=check) as talk:
                yield talk
        finally:
            self._busy -= 1

    def raise_if_failed(self) -> None:
        """EngineFailed, if it is known that none can be had."""
        if self._failed:
            raise EngineFailed(self._failed)

    @property
    def up(self) -> bool:
        """Whether one works, as far as is known."""
        return self._up.is_set()

    def lost(self, why: str) -> None:
        """It did not do what it should: look after it."""
        self._suspect = why
        self._up.clear()
        self._stirred.set()

    def end(self) -> None:
        """Nobody needs it any more."""
        begun = self._begun
        self._closing.set()
        try:
            with Talk(self.home / SOCKET, within_s=self.limits.health_s) as talk:
                talk.ask("end")
        except Lost:
            from elasticrl.ppo.rollout import weights

            self._kill()  # it still starts, or does not hear
            weights.forget(self.home)  # as one that ends by itself does
        except Refused:
            pass
        deadline = time.monotonic() + self.limits.health_s
        while begun.alive and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        self.close()
        with suppress(Lost, OSError, VaultError):
            self._clear()

    def close(self) -> None:
        """This worker ends; the engine stays."""
        self._closing.set()
        self._stirred.set()
        self._thread.join(self.limits.health_s)

    def _clear(self) -> None:
        """Of a home that nobody needs nothing is left in memory. Who comes meanwhile has another one."""
        deadline = time.monotonic() + self.limits.health_s
        with self._alone(deadline, to_the_end=True):
            while self._there():  # it was told to end, and is about to
                if time.monotonic() > deadline:
                    return
                time.sleep(LOOK_S)
            gone = self.home.with_name(f".{self.home.name}.{os.getpid()}")
            self.home.rename(gone)  # at once: nothing of a next one may go with it
            shutil.rmtree(gone, ignore_errors=True)

    # ---- the thread

    def _run(self) -> None:
        failures, pause_s = 0, 0.0
        while not self._closing.is_set():
            try:
                self._ensure()
                failures, pause_s = 0, 0.0
                self._up.set()
                self._watch()
            except Refused as refused:
                self._failed = str(refused)
                return
            except (Lost, OSError, VaultError) as error:
                failures += 1
                self.say(f"rollout engine: start {failures} of {self.limits.starts} came to nothing: {error}")
                if failures >= self.limits.starts:
                    self._failed = f"the rollout engine does not start: {error}"
                    return
                pause_s = pause(pause_s, 0.0, first_s=PAUSE_S, most_s=REST_S, steady_s=0.0)
                self._closing.wait(pause_s)
            finally:
                self._up.clear()

    def _watch(self) -> None:
        """Until it is known not to work."""
        while not self._closing.is_set():
            stirred = self._stirred.wait(self.limits.health_every_s)
            self._stirred.clear()
            if self._closing.is_set() or (self._busy and not stirred):
                continue
            try:
                with Talk(self.home / SOCKET, within_s=self.limits.health_s) as talk:
                    self._prove(talk)
                self._suspect = ""
                self._up.set()
            except (Lost, Refused) as error:
                if self.loads():  # for another worker of this node, perhaps
                    self._stirred.set()
                    self._closing.wait(LOOK_S)
                    continue
                self.say(f"rollout engine: {self._suspect or error}; another is started")
                self._suspect = ""
                return

    def _ensure(self) -> None:
        """One that works. Lost: this start came to nothing. Refused: another would not help."""
        deadline = time.monotonic() + self.limits.start_s
        with self._alone(deadline):
            started = False
            while time.monotonic() < deadline and not self._closing.is_set():
                if self._begun is not NOBODY and not self._begun.alive:
                    self._over(self._begun.code, expected=not started)
                    self._begun = NOBODY
                hello = self._hello()
                if hello is not None:
                    self.say(
                        f"rollout engine: process {hello['pid']} ({hello['versions']}), {'started' if started else 'adopted'}"
                    )
                    return
                if self._begun is NOBODY and not self._there():  # one of ours that has let its lock go is still ending
                    started = self._spawn() or started
                self._closing.wait(LOOK_S)
            if self._closing.is_set():
                raise Lost("this worker ends")
            self._kill()
            raise Lost(f"it did not answer within {self.limits.start_s:g} s: {self._last_words()}")

    def _hello(self) -> dict[str, Any] | None:
        """What it says of itself, if it is one that works and that we want; another is ended. None: nobody answers."""
        try:
            talk = Talk(self.home / SOCKET, within_s=self.limits.health_s)
        except Lost:
            return None
        loads = self.loads()
        with talk:
            try:
                hello = talk.ask("hello")
                if (hello.get("v"), hello.get("service")) != (PROTOCOL, self.service.digest):
                    self.say(f"rollout engine: process {hello.get('pid')} is of another configuration; it is ended")
                    talk.ask("end")
                    return None
                self._prove(talk)
            except (Lost, Refused) as error:
                if loads or self.loads():  # perhaps it is through just now: it is asked again
                    return None
                self.say(f"rollout engine: {error}; it is killed")
                self._kill()
                return None
        return hello

    def _prove(self, talk: Talk) -> None:
        """A real generation, however short."""
        deadline = time.monotonic() + self.limits.health_s
        talk.send("check")
        while talk.receive().says["op"] != "sample":
            if time.monotonic() > deadline:  # alive, and busy with somebody else's
                return

    def _spawn(self) -> bool:
        """In a session of its own, so that it outlives us; the lock that says so is its own from the first instant. False: that
        is somebody's at this moment, if only of one who looks whether it is.
        """
        page = self.home / f"{SPEC}.new"
        page.write_text(self.service.dumps(), encoding="utf-8")
        page.rename(self.home / SPEC)
        env = {name: value for name, value in os.environ.items() if not name.startswith(KEPT_OUT)}
        with (self.home / ENGINE_LOCK).open("ab") as lock:
            if not _locked(lock):
                return False
            with suppress(FileNotFoundError):
                (self.home / LOG).rename(self.home / f"{LOG}.before")
            (self.home / LOADS).unlink(missing_ok=True)
            os.ftruncate(lock.fileno(), 0)  # or it would name the last one, whose number may be somebody else's by now
            given = ["--home", str(self.home), "--lock", str(lock.fileno())]
            command = [self.python, "-P", "-m", "elasticrl.ppo.rollout.process", *given]
            self._begun = start(command, self.home / LOG, env=env, cwd=self.home, keep=(lock.fileno(),))
        return True

    def _there(self) -> bool:
        """Whether a process is the engine here, answering or not."""
        with (
            suppress(FileNotFoundError),
            (self.home / ENGINE_LOCK).open("ab") as lock,
        ):  # else its home has been cleared away
            return not _locked(lock)
        return False

    def loads(self) -> bool:
        """Whether it takes weights, for which it may be silent longer than else."""
        try:
            since = float((self.home / LOADS).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return False
        return 0.0 <= time.monotonic() - since < self.limits.sync_s and self._there()

    def _kill(self) -> None:
        """It and its children, whoever started it."""
        deadline = time.monotonic() + self.limits.health_s
        while self._there() and time.monotonic() < deadline:
            with suppress(OSError, ValueError):
                os.killpg(int((self.home / ENGINE_LOCK).read_text(encoding="ascii")), signal.SIGKILL)
            time.sleep(LOOK_S)

    def _over(self, code: int | None, *, expected: bool) -> None:
        if code == REFUSED:
            raise Refused(self._last_words().splitlines()[-1])
        if not expected:
            raise Lost(f"it ended with exit code {code}: {self._last_words()}")

    def _last_words(self) -> str:
        return last_words(self.home / LOG, TAIL) or "it said nothing"

    @contextmanager
    def _alone(self, deadline: float, *, to_the_end: bool = False) -> Iterator[None]:
        """No other worker of this node starts one, or clears away, at the same time. Lost if one does so until the deadline, or
        until this worker ends.
        """
        while True:
            prepare(self.home)
            try:
                lock = (self.home / START_LOCK).open("ab")
            except FileNotFoundError:  # cleared away just now
                continue
            with lock:
                while not _locked(lock):
                    time.sleep(LOOK_S)
                    if time.monotonic() > deadline or (self._closing.is_set() and not to_the_end):
                        raise Lost("another worker has been starting one all the time")
                if _named(lock, self.home / START_LOCK):  # else who had it before us has cleared the home away
                    yield
                    return


def _locked(lock: IO[bytes]) -> bool:
    """Is it ours from now on?"""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _named(file: IO[bytes], path: Path) -> bool:
    """Is an open file still the one of that name?"""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
