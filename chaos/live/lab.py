"""The lab: boxes on a bridge, an etcd of three members in boxes of their own, a disk that all nodes see.

The one idea: everything that outlives a process carries the lab's name (elx0, elx1, ...), and the name is held by a lock that
dies with the driver. So whoever comes next knows which leftovers are nobody's, and clears them away before it starts; a lab
that runs beside it is left alone.
"""

import asyncio
import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from chaos.live.box import CGROUPS, CONTROLLERS, Box, host, lacking, remove_group
from chaos.live.errors import BoxError
from chaos.live.loop import LoopBox
from chaos.live.net import Net
from chaos.live.proc import command_line
from elasticrl.store import StoreSettings
from elasticrl.store.embedded import find_binary
from elasticrl.store.etcd import EtcdStore
from elasticrl.store.protocol import StoreError

PREFIX = "elx"
LOCKS = Path("/run/lock") if os.access("/run/lock", os.W_OK) else Path(tempfile.gettempdir())
LABS = 32
STORE_MB = 1024
ETCD_S = 60.0  # for the store to serve


@dataclass(slots=True)
class Member:
    """One member of the store."""

    box: Box
    command: list[str]
    outer: "subprocess.Popen[bytes] | None" = None
    down: bool = False  # on purpose

    def pid(self) -> int:
        """Of the etcd process; 0 if it does not run."""
        return next((pid for pid in self.box.pids() if "--initial-cluster" in command_line(pid)), 0)


class Lab:
    """Boxes n0, n1, ... and the store's e0, e1, e2. Use it as a context; it leaves nothing behind."""

    def __init__(self, nodes: int, *, members: int = 3, disk_mb: int = 2560, boxes: bool = True) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}-"))
        self._lock, number = take(self.folder)
        self.name = f"{PREFIX}{number}"
        self.subnet = f"10.78.{number}" if boxes else f"78.{number}"
        self.disk = self.folder / "disk"
        self.stores = self.folder / "etcd"  # the store's disk
        self.device = self.store_device = ""  # of the two disks, major:minor; empty where there are no devices for them
        self.disk_mb = disk_mb  # room enough that nobody calls it full before it is
        self.net = Net(self.name)
        self.real = boxes  # namespaces; else loopback
        self.lacks = lacking() if boxes else {}
        self.left: list[str] = []  # when it is down: what is still there of it
        self.keep = False  # the folder stays for somebody to look at
        self.boxes = {f"n{i}": self._box(f"n{i}", 10 + i) for i in range(nodes)}
        stores = {f"e{i}": self._box(f"e{i}", 200 + i) for i in range(members)}
        cluster = ",".join(f"{name}=http://{box.address}:2380" for name, box in stores.items())
        self.members = {name: Member(box, self._etcd(name, box, cluster)) for name, box in stores.items()}

    def _box(self, name: str, number: int) -> Box:
        if not self.real:
            return LoopBox(name, address=f"127.{self.subnet}.{number}", wire=self.name + name, folder=self.folder)
        address = f"{self.subnet}.{number}"
        return Box(name, address=address, wire=self.name + name, bridge=self.name, log=self.folder / f"{name}.box.log")

    def _etcd(self, name: str, box: Box, cluster: str) -> list[str]:
        client, peer = f"http://{box.address}:2379", f"http://{box.address}:2380"
        flags = {
            "--name": name, "--data-dir": str(self.stores / name), "--initial-cluster": cluster,
            "--listen-client-urls": client, "--advertise-client-urls": client,
            "--listen-peer-urls": peer, "--initial-advertise-peer-urls": peer,
            "--auto-compaction-mode": "revision", "--auto-compaction-retention": "10000",
            "--logger": "zap", "--log-level": "warn", "--log-outputs": "stderr",
        }  # fmt: skip
        return [find_binary(None), *(word for flag in flags.items() for word in flag)]

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where the store's members listen."""
        return tuple(f"http://{member.box.address}:2379" for member in self.members.values())

    def __enter__(self) -> Self:
        try:
            self._up()
        except BaseException:
            self.__exit__(BoxError)
            raise
        return self

    def _up(self) -> None:
        self.disk.mkdir()
        self.stores.mkdir()
        if self.real:
            # An address of its own: else it has that of some wire, and changes it with that node's power cut. The host is then
            # not reached until everybody asks for its address again, some seconds in which the eye sees nothing.
            mac = f"02:78:00:00:{int(self.subnet.split('.')[2]):02x}:01"
            host("ip", "link", "add", self.name, "address", mac, "type", "bridge", "forward_delay", "0")
            host("ip", "address", "add", f"{self.subnet}.1/24", "dev", self.name)
            host("ip", "link", "set", self.name, "up")
            self.net.up()
            self._make_disks()
        for box in (*self.boxes.values(), *(member.box for member in self.members.values())):
            box.boot()
        for name in self.members:
            self.start_member(name)
        if self.members:
            self.await_store()

    def _make_disks(self) -> None:
        """File systems of their own kind and size, on devices that can be slow; what lies on them lies in memory."""
        memory = self.folder / "memory"
        memory.mkdir()
        host("mount", "-t", "tmpfs", "-o", f"size={self.disk_mb + STORE_MB + 64}m", "tmpfs", str(memory))
        self.device = self._make_disk(memory / "disk", self.disk, self.disk_mb)
        self.store_device = self._make_disk(memory / "etcd", self.stores, STORE_MB)

    def _make_disk(self, image: Path, place: Path, size_mb: int) -> str:
        if "loop" in self.lacks:
            host("mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", str(place))
            return ""
        with image.open("wb") as file:
            file.truncate(size_mb << 20)
        host("mkfs.ext4", "-q", "-O", "^has_journal", "-m", "0", "-E", "lazy_itable_init=1", str(image))
        host("mount", "-o", "loop", str(image), str(place))
        status = place.stat()
        return f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"

    def start_member(self, name: str) -> None:
        """Start a member of the store, for the first time or on its data."""
        member = self.members[name]
        member.outer = member.box.start(member.command, self.folder / f"{name}.etcd.log")
        member.down = False

    def revive(self) -> list[str]:
        """Members that ended of themselves are started again, as systemd would; which."""
        ended = [
            n for n, m in self.members.items() if not m.down and m.outer is not None and m.outer.poll() is not None
        ]
        for name in ended:
            self.start_member(name)
        return ended

    def await_store(self) -> None:
        """Until it serves."""
        deadline = time.monotonic() + ETCD_S
        while True:
            try:
                asyncio.run(self._ask())
            except StoreError as error:
                if time.monotonic() > deadline:
                    raise BoxError(f"the store does not serve after {ETCD_S:.0f} s: {error}") from None
            else:
                return

    async def _ask(self) -> None:
        async with EtcdStore(StoreSettings(endpoints=self.endpoints, timeout_s=2.0)) as store:
            await store.get("serves")

    async def leading(self) -> str:
        """The name of the store's member that leads; empty if none does."""
        async with EtcdStore(StoreSettings(endpoints=self.endpoints, timeout_s=2.0)) as store:
            status = await store.status()
        leads = [endpoint.endpoint for endpoint in status.endpoints if endpoint.leader]
        return next((n for n, m in self.members.items() if leads and m.box.address in leads[0]), "")

    def __exit__(self, kind: object, *_: object) -> None:
        for box in (*self.boxes.values(), *(member.box for member in self.members.values())):
            with suppress(BoxError, OSError):
                box.remove()
        if self.real:
            clear(self.name)
            unmount(self.folder)
            self.left = [*leftovers(self.name), *mounted(self.folder)]  # before another lab may have the name
        if self.keep or kind is not None:
            self._lock.truncate(0)  # the folder is for somebody to look at, and not to be cleared away
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()


def take(folder: Path) -> tuple[IO[str], int]:
    """The lock of the first lab that nobody runs, and its number; what was left of any such lab is cleared away.

    `folder` is the new one's. It stands in the lock, for whoever clears up after it.
    """
    mine: tuple[IO[str], int] | None = None
    for number in range(LABS):
        held: IO[str] = (LOCKS / f"{PREFIX}{number}.lock").open("a+", encoding="utf-8")
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            held.close()
            continue
        if os.geteuid() == 0 and shutil.which("nft"):
            clear(f"{PREFIX}{number}")
            forsaken(held)
        if mine is None:
            mine = held, number
        else:
            held.close()
    if mine is None:
        raise BoxError(f"{LABS} labs run already; end some")
    held, _ = mine
    held.truncate(0)
    held.write(f"{os.getpid()}\n{folder}")
    held.flush()
    return mine


def forsaken(held: IO[str]) -> None:
    """The folder of whoever had this lock last, with what is mounted in it: he was killed, or nothing would be there."""
    held.seek(0)
    _, _, name = held.read().partition("\n")
    if name and Path(name).name.startswith(f"{PREFIX}-") and Path(name).is_dir():
        unmount(Path(name))
        shutil.rmtree(name, ignore_errors=True)
    held.truncate(0)


def unmount(folder: Path) -> None:
    """A lab's disks, and the memory that they lie in."""
    for place in (folder / "disk", folder / "etcd", folder / "memory"):
        host("umount", "-l", str(place), check=False)


def mounted(folder: Path) -> list[str]:
    """What is mounted below a folder: sentences."""
    places = [line.split()[1] for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    return [f"mount {place}" for place in places if Path(place).is_relative_to(folder)]


def clear(name: str) -> None:
    """Remove all that a lab of this name has left: wires, bridge, rules, cgroups, mounts."""
    if not leftovers(name):
        return
    for link in links(name):
        host("ip", "link", "delete", link, check=False)
    host("nft", "delete", "table", "bridge", name, check=False)
    for group in groups(name):
        remove_group(group)


def leftovers(name: str) -> list[str]:
    """What there is of a lab: sentences."""
    tables = host("nft", "list", "tables", "bridge", check=False).stdout.split()
    found = [f"link {link}" for link in links(name)]
    found += [f"nft table {name}"] if name in tables else []
    return found + [f"cgroup {group}" for group in groups(name)]


def links(name: str) -> list[str]:
    """The host's interfaces of a lab: its bridge, and the ends of its wires."""
    every = [path.name for path in Path("/sys/class/net").iterdir()]
    return sorted(link for link in every if link == name or link.startswith((f"{name}n", f"{name}e")))


def groups(name: str) -> list[Path]:
    """The cgroups of a lab."""
    found = [p for c in CONTROLLERS if (CGROUPS / c).is_dir() for p in (CGROUPS / c).glob(f"{name}[ne]*")]
    return [path for path in found if path.is_dir()]


__all__ = ["Lab", "Member"]
