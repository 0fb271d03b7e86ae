"""A node of the lab: processes with a network, host name, process table, mounts, IPC and /dev/shm of their own.

The one idea: a box is one process, its PID 1, and everything else of it dies with that: the kernel takes away namespaces,
interfaces and memory when the last process is gone. PID 1 dies with the driver, so a killed driver leaves no process either.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from chaos.live import clock
from chaos.live.errors import BoxError
from chaos.live.proc import alive, all_pids, command_line, inner_pid
from elasticrl.base.process import started_at

BOOT_S = 20.0
CONTROLLERS = ("memory", "cpu", "freezer", "blkio")
CGROUPS = Path("/sys/fs/cgroup")

# PID 1 reaps whoever is orphaned: bash waits for all its children while it sleeps. /sys shows the network of who has mounted
# it: with the host's, each node would see its peers' cables flap.
INIT = """
echo "$1" > /proc/sys/kernel/hostname
mount -t tmpfs -o mode=755 tmpfs /run && mount -t tmpfs -o mode=1777 tmpfs /dev/shm || exit 1
mkdir /run/sys && mount -t sysfs sysfs /run/sys || exit 1
for place in class/net devices/virtual/net; do mount --bind /run/sys/$place /sys/$place || exit 1; done
touch /run/booted
while :; do sleep 3600 & wait $!; done
"""
# Joins the box's cgroups before it enters: who is moved later has children that stay behind.
ENTER = """
for group in $1; do echo $$ > "$group/cgroup.procs"; done
exec nsenter -t "$2" -a -- "${@:3}"
"""


def missing() -> str:
    """Why there can be no boxes here; empty if there can."""
    if os.geteuid() != 0:
        return "it needs root"
    absent = [tool for tool in ("ip", "nft", "tc", "unshare", "nsenter", "setpriv") if shutil.which(tool) is None]
    if absent:
        return f"it needs {', '.join(absent)} (Debian: iproute2, nftables, util-linux)"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "--pid", "--ipc", "--fork", "true"], capture_output=True, text=True
    )
    return f"this kernel gives no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


def lacking() -> dict[str, str]:
    """What boxes here go without, in words, by what a fault needs (`strikes.NEEDS`). A lab runs all the same.

    Example: {"memory": "no memory cgroup of version 1", "tun": "no /dev/net/tun"}
    """
    found = {name: f"no {name} cgroup of version 1" for name in CONTROLLERS if not controlled(name)}
    if shutil.which("mkfs.ext4") is None or shutil.which("losetup") is None:
        found["loop"] = "no mkfs.ext4 or losetup (Debian: e2fsprogs, util-linux)"
    elif host("losetup", "--find", check=False).returncode:
        found["loop"] = "no loop device"
    if why := clock.lacking():
        found["clock"] = why
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        found["tun"] = f"no /dev/net/tun ({error.strerror})"
    return found


def controlled(controller: str) -> bool:
    """Can cgroups of version 1 be made for this?"""
    return os.access(CGROUPS / controller / "cgroup.procs", os.W_OK)


class Box:
    """One node. `wire` is the host's end of its cable.

    Example: Box("n0", address="10.78.0.10", wire="elx0n0", bridge="elx0", log=folder / "n0.log")
    """

    def __init__(self, name: str, *, address: str, wire: str, bridge: str, log: Path) -> None:
        self.name, self.address, self.wire, self.bridge, self.log = name, address, wire, bridge, log
        self.pid = 0  # of its PID 1, as the host counts
        self.groups: dict[str, Path] = {}
        self._outer: subprocess.Popen[bytes] | None = None
        self._started: list[subprocess.Popen[bytes]] = []  # in it, as they stand outside

    @property
    def on(self) -> bool:
        """Is it powered?"""
        return bool(self.pid) and alive(self.pid)

    def boot(self) -> None:
        """Power on: a kernel's work done by ours."""
        namespaces = ("--net", "--uts", "--mount", "--pid", "--ipc", "--fork", "--kill-child=SIGKILL", "--mount-proc")
        with self.log.open("ab") as out:
            self._outer = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, "bash", "-c", INIT, "init", self.name],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + BOOT_S
        while not (self.pid and Path(f"/proc/{self.pid}/root/run/booted").exists()):
            if time.monotonic() > deadline or self._outer.poll() is not None:
                raise BoxError(f"{self.name} did not boot within {BOOT_S:.0f} s: {self.log.read_text()[-500:]}")
            children = (
                Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text(encoding="ascii").split()
            )
            self.pid = int(children[0]) if children else 0
            time.sleep(0.01)
        number = int(self.address.rpartition(".")[2])
        subnet = int(self.address.split(".")[2])
        host("ip", "link", "add", self.wire, "type", "veth", "peer", "name", "eth0", "netns", str(self.pid))
        host("ip", "link", "set", self.wire, "master", self.bridge, "up")
        net = ("nsenter", "-t", str(self.pid), "-n", "ip")
        host(*net, "link", "set", "eth0", "address", f"02:78:00:00:{subnet:02x}:{number:02x}", "up")
        host(*net, "address", "add", f"{self.address}/24", "dev", "eth0")
        host(*net, "link", "set", "lo", "up")
        for controller in CONTROLLERS:
            if controlled(controller):
                self.groups[controller] = CGROUPS / controller / self.wire
                self.groups[controller].mkdir(exist_ok=True)

    def start(
        self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start something in it. The process that is returned stands outside and ends with it."""
        groups = " ".join(map(str, self.groups.values()))
        return self._launch(["bash", "-c", ENTER, "enter", groups, str(self.pid), *command], log, env or {})

    def _launch(self, command: Sequence[str], log: Path, env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        with log.open("ab") as out:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd="/",
                env={**os.environ, **env},
            )  # fmt: skip
        self._started = [*(other for other in self._started if other.poll() is None), process]
        return process

    def _reap(self) -> None:
        """Those that stand outside end with what they stand for."""
        for process in self._started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(BOOT_S)
        self._started = []

    def run(self, *command: str, check: bool = True, within_s: float = 60.0) -> "subprocess.CompletedProcess[str]":
        """Run something in it to its end."""
        return host("nsenter", "-t", str(self.pid), "-a", "--", *command, check=check, within_s=within_s)

    def path(self, inner: str) -> Path:
        """One of its files, as the host reaches it."""
        return Path(f"/proc/{self.pid}/root{inner}")

    def inner(self, path: str) -> str:
        """Where its own processes find one of its files."""
        return path

    def pids(self) -> list[int]:
        """All its processes but PID 1 and the sleep below it, by the host's count, in the order of their birth."""
        mine = _namespace(self.pid)
        found = [pid for pid in all_pids() if pid != self.pid and mine and _namespace(pid) == mine]
        mine_alone = (pid for pid in found if alive(pid) and command_line(pid) != "sleep 3600")
        return sorted(mine_alone, key=lambda pid: (started_at(pid), pid))

    def host_pid(self, inner: int) -> int:
        """The host's number of one of its processes; 0 if it is gone."""
        return next((pid for pid in self.pids() if inner_pid(pid) == inner), 0)

    def kill(self) -> None:
        """Everything in it is gone at once, memory and all. With the wire down before, nobody hears of it."""
        outer, self._outer = self._outer, None
        if outer is not None:
            if self.pid:
                self.unfreeze()
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            try:
                outer.wait(BOOT_S)
            except subprocess.TimeoutExpired:
                outer.kill()
                outer.wait()
        self._reap()
        self.pid = 0
        host("ip", "link", "delete", self.wire, check=False)

    def remove(self) -> None:
        """For good."""
        self.kill()
        for group in self.groups.values():
            remove_group(group)

    # ---- what cgroups can do

    def freeze(self) -> None:
        """All of it stands still; its kernel goes on acknowledging what arrives."""
        (self.groups["freezer"] / "freezer.state").write_text("FROZEN")

    def unfreeze(self) -> None:
        """It goes on."""
        with suppress(KeyError, OSError):
            (self.groups["freezer"] / "freezer.state").write_text("THAWED")

    @property
    def frozen(self) -> bool:
        """Does it stand still? What is begun in it then does not run either, and nothing of it dies."""
        return "freezer" in self.groups and (self.groups["freezer"] / "freezer.state").read_text().strip() == "FROZEN"

    def share(self, cores: float | None) -> None:
        """So much of one core for all of it; None: no limit."""
        quota = -1 if cores is None else max(1000, int(100_000 * cores))
        (self.groups["cpu"] / "cpu.cfs_quota_us").write_text(str(quota))

    def disk_rate(self, device: str, bytes_s: float | None) -> None:
        """What of it waits for a disk (`major:minor`) to have written, waits for so many bytes a second; None: no limit."""
        (self.groups["blkio"] / "blkio.throttle.write_bps_device").write_text(f"{device} {int(bytes_s or 0)}")

    @property
    def throttled(self) -> int:
        """How often it was denied a core."""
        lines = (self.groups["cpu"] / "cpu.stat").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("nr_throttled")))


def remove_group(group: Path) -> None:
    """A cgroup and those below it, once they are empty."""
    deadline = time.monotonic() + 5.0
    with suppress(OSError):  # of a driver that was killed while a box was frozen: nothing that is frozen dies
        if (group / "freezer.state").exists():
            (group / "freezer.state").write_text("THAWED")
        for member in (group / "cgroup.procs").read_text(encoding="ascii").split():
            os.kill(int(member), signal.SIGKILL)  # such as an nsenter that was stopped with its child
    while group.exists() and time.monotonic() < deadline:
        for folder in sorted(group.rglob("*/"), reverse=True):
            with suppress(OSError):
                folder.rmdir()
        with suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.05)


def host(*command: str, check: bool = True, within_s: float = 60.0) -> "subprocess.CompletedProcess[str]":
    """Run a command on the host."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=within_s)
    if check and done.returncode:
        raise BoxError(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr.strip()}")
    return done


def _namespace(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""
