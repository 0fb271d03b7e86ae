"""A machine with a real systemd as PID 1, on a machine whose own PID 1 is something else. Needs root and systemd-nspawn.

The one idea: the container's root is an overlay over this machine's own, so every program that is here is there, and what is
written there is gone with it. It has its own process, mount, network (loopback only), IPC and host-name namespaces and its own
place in each cgroup hierarchy, so it cannot touch this machine's services.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from chaos.patience import patience

BOOT_S = 60.0
MASKED = ("postgresql.service", "apt-daily.timer", "apt-daily-upgrade.timer", "man-db.timer")

# A private mount namespace, so that the tmpfs over nspawn's own directory and the overlay vanish with the machine.
SCRIPT = """
set -e
for h in /sys/fs/cgroup/systemd /sys/fs/cgroup/unified /sys/fs/cgroup; do
  [ -w $h/cgroup.procs ] && { mkdir -p $h/$NAME && echo $$ > $h/$NAME/cgroup.procs; } 2>/dev/null || true
done
mount --make-rprivate /
mkdir -p /run/systemd/nspawn
mount -t tmpfs tmpfs /run/systemd/nspawn
mount -t overlay overlay -o lowerdir=/,upperdir=$BASE/up,workdir=$BASE/work $BASE/root
exec systemd-nspawn -q -D $BASE/root --machine=$NAME --hostname=$NAME --private-network --boot --register=no --keep-unit \
  --console=pipe $BINDS </dev/null
"""


def missing() -> str:
    """Why no such machine can be made here; empty if it can."""
    if os.geteuid() != 0:
        return "it needs root"
    if shutil.which("systemd-nspawn") is None:
        return "it needs systemd-nspawn (Debian: systemd-container)"
    return ""


class Machine:
    """One machine. Use it as a context; nothing of it is left."""

    def __init__(
        self,
        name: str = "elrlnode",
        *,
        files: Mapping[str, str] | None = None,
        prepare: Callable[[Path], None] = lambda _: None,
        binds: Sequence[Path] = (),
    ) -> None:
        self.name = name
        self.base = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        self.upper = self.base / "up"  # what is written here before the boot is there after it
        self._files = files or {}
        self._prepare = (
            prepare  # puts more below `upper` before the boot; afterwards only the machine itself may write there
        )
        self._binds = binds
        self._outer: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        subprocess.run(
            ["mount", "-t", "tmpfs", "tmpfs", self.base], check=True
        )  # an overlay on an overlay may not work
        for folder in ("up", "work", "root"):
            (self.base / folder).mkdir()
        units = self.upper / "etc/systemd/system"
        units.mkdir(parents=True)
        for unit in MASKED:
            (units / unit).symlink_to("/dev/null")
        (self.upper / "etc/machine-id").write_text(os.urandom(16).hex() + "\n", encoding="ascii")
        for path, text in self._files.items():
            target = self.upper / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        self._prepare(self.upper)
        self.boot()
        return self

    def boot(self) -> None:
        """Start it, for the first time or again: what was written in it is still there, but for its /run and /tmp."""
        env = {
            **os.environ,
            "NAME": self.name,
            "BASE": str(self.base),
            "BINDS": " ".join(f"--bind-ro={path}" for path in self._binds),
        }
        with (self.base / "boot.log").open("wb") as log:
            self._outer = subprocess.Popen(
                ["unshare", "-m", "bash", "-c", SCRIPT], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        try:
            self._await_boot()
        except BaseException:
            self.__exit__()
            raise

    def power_off(self) -> None:
        """All of it ends at once."""
        outer, self._outer = self._outer, None
        if outer is not None and outer.poll() is None:
            with suppress(ProcessLookupError, AssertionError):
                os.kill(self.init(outer), signal.SIGKILL)  # everything in it dies with its PID 1
            try:
                outer.wait(15.0)
            except subprocess.TimeoutExpired:
                outer.kill()
                outer.wait()

    def __exit__(self, *exc: object) -> None:
        self.power_off()
        subprocess.run(["umount", "-l", self.base], check=False)
        self.base.rmdir()
        for hierarchy in ("systemd", "unified", ""):
            group = Path("/sys/fs/cgroup") / hierarchy / self.name
            for folder in sorted(group.rglob("*/"), reverse=True) if group.is_dir() else []:
                with suppress(OSError):
                    folder.rmdir()
            with suppress(OSError):
                group.rmdir()

    def init(self, outer: "subprocess.Popen[bytes] | None" = None) -> int:
        """The pid, out here, of the machine's PID 1."""
        outer = outer or self._outer
        assert outer is not None
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text(encoding="ascii").split()
        assert children, "the machine has no PID 1 yet"
        return int(children[0])

    def _await_boot(self) -> None:
        deadline = time.monotonic() + BOOT_S
        state = ""
        while time.monotonic() < deadline:
            assert self._outer is not None
            if self._outer.poll() is not None:
                raise AssertionError(
                    f"the machine did not boot: {(self.base / 'boot.log').read_text(errors='replace')[-2000:]}"
                )
            with suppress(AssertionError):
                state = self.run("systemctl", "is-system-running", check=False).stdout.strip()
                if state in {"running", "degraded"}:
                    return
            time.sleep(0.1)
        raise AssertionError(f"the machine did not finish booting within {BOOT_S} s (state {state!r})")

    def run(self, *command: str, check: bool = True, timeout_s: float = 120.0) -> "subprocess.CompletedProcess[str]":
        """Run a command in the machine."""
        done = subprocess.run(
            ["nsenter", "-t", str(self.init()), "-a", *command], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=timeout_s,
        )  # fmt: skip
        if check and done.returncode:
            raise AssertionError(
                f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.journal()}"
            )
        return done

    def journal(self, unit: str = "elasticrl*") -> str:
        """The last lines of a unit's journal."""
        shown = subprocess.run(
            ["nsenter", "-t", str(self.init()), "-a", "journalctl", "--no-pager", "-o", "cat", "-n", "80", "-u", unit],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30.0,
        )  # fmt: skip
        return shown.stdout

    def until(self, command: Sequence[str], within_s: float, *, wanted: str = "") -> str:
        """Run a command until it succeeds, and prints `wanted` if that is given."""
        deadline = time.monotonic() + patience(within_s)
        while True:
            done = self.run(*command, check=False)
            if done.returncode == 0 and wanted in done.stdout:
                return done.stdout
            if time.monotonic() > deadline:
                what = f"{' '.join(command)} did not give {wanted!r} within {within_s} s"
                raise AssertionError(f"{what}:\n{done.stdout}\n{done.stderr}\n{self.journal()}")
            time.sleep(0.1)

    def show(self, unit: str, what: str) -> str:
        """One property of a unit."""
        return self.run("systemctl", "show", "-P", what, unit).stdout.strip()
