"""How this machine is: memory, disks, load, network, limits, kernel log, GPUs. Each look gives a few `Check`s.

The one idea: every look is a reader of a few files below `root`, and a pure reading of their texts; so a test is a folder
with the texts of a real machine. What is not there (a container without sysfs, a machine without GPUs) is said as `skip` and
never guessed. Counters mean nothing by themselves: those are read twice (`Counters`), and only what they gained counts.
"""

import errno
import os
import resource
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from elasticrl.base.value import dataclass
from elasticrl.contract.evidence import HEALTH, Evidence, Kind, Sign
from elasticrl.diagnose.logs import Parser
from elasticrl.diagnose.proc import chosen, cpu_times, flat, meminfo, mount_of, pressure, snmp

ROOT: Final = Path("/")
GIB: Final = 1 << 30


class Level(StrEnum):
    """How a check came out. `skip`: this machine does not have it, or does not let us look."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


OK, WARN, FAIL, SKIP = Level.OK, Level.WARN, Level.FAIL, Level.SKIP


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at.

    Example: Check(name="memory.available", level=Level.OK, value="20.1 of 23.5 GiB", why="...", remedy="")
    """

    name: str
    level: Level
    value: str  # what was found
    why: str = ""  # why it matters
    remedy: str = ""  # only where something should be done
    sign: Sign | None = None  # what it speaks for, should something be wrong right now
    kind: Kind | None = None
    unseen: bool = False  # it cannot be looked at

    def plain(self) -> dict[str, str]:
        """For JSON."""
        return {name: str(value) for name, value in asdict(self).items() if name not in {"sign", "kind", "unseen"}}


def evidence(checks: Iterable[Check], *, node: str | None = None) -> tuple[Evidence, ...]:
    """What the bad checks speak for, if a gang has stalled."""
    return tuple(
        Evidence(
            kind=check.kind or Kind.NODE,
            sign=check.sign,
            node=node,
            detail=f"{check.name}: {check.value}",
            check=check.name,
            source=HEALTH,
        )
        for check in checks
        if check.sign is not None and check.level is FAIL
    )


def _text(root: Path, path: str) -> str | None:
    try:
        return (root / path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _number(root: Path, path: str) -> int | None:
    text = (_text(root, path) or "").strip()
    return int(text) if text.isdigit() else None


def gib(size: float) -> str:
    """As people say it."""
    return f"{size / GIB:.1f} GiB"


#: resource -> (which share, the warning's limit in percent, why)
PRESSURE: Final = {
    "memory": ("full", 10.0, "While all tasks wait for memory nothing is computed; the OOM killer comes next."),
    "io": ("full", 40.0, "Saves and data loading wait for the disk."),
    "cpu": ("some", 60.0, "Workers wait for a core: one slow rank slows all of them."),
}


def pressures(root: Path = ROOT) -> Iterator[Check]:
    """PSI: how much of the last 10 seconds was spent waiting."""
    for name, (share, limit, why) in PRESSURE.items():
        text = _text(root, f"proc/pressure/{name}")
        if text is None or share not in (found := pressure(text)):
            yield Check(name=f"pressure.{name}", level=SKIP, value="the kernel has no PSI (boot with psi=1)", why=why)
            continue
        bad = found[share] > limit
        yield Check(
            name=f"pressure.{name}", level=WARN if bad else OK, value=f"{found[share]:.1f} % of the last 10 s", why=why,
            remedy=f"See who uses it: sort processes by {name}, keep other jobs off this node." if bad else "",
        )  # fmt: skip


def memory(root: Path = ROOT) -> Iterator[Check]:
    """What the machine and our cgroup have left."""
    why = "A worker that finds none is killed by the kernel, and the vault's copies need room too."
    text = _text(root, "proc/meminfo")
    if text is None or "MemTotal" not in (found := meminfo(text)):
        yield Check(name="memory.available", level=SKIP, value="/proc/meminfo cannot be read", why=why)
    else:
        free, total = found.get("MemAvailable", found.get("MemFree", 0)), found["MemTotal"]
        level = FAIL if free < 0.03 * total else WARN if free < 0.10 * total else OK
        yield Check(
            name="memory.available", level=level, value=f"{gib(free)} of {gib(total)}", why=why, kind=Kind.OOM,
            remedy="" if level is OK else "Fewer dataloader workers, smaller batches, or a node with more memory.",
            sign=Sign.HOST_MEMORY,
        )  # fmt: skip
    yield from _cgroup(root)


def cgroup_files(root: Path = ROOT, pid: str = "self") -> tuple[Path, Path, Path] | None:
    """A process's memory limit, use and events: of cgroup v2, else v1. An empty limit file means none."""
    rows = [line.split(":", 2) for line in (_text(root, f"proc/{pid}/cgroup") or "").splitlines()]
    for controllers, place in ((row[1], row[2].lstrip("/")) for row in rows if len(row) == 3):
        if "memory" in controllers.split(","):
            here = root / "sys/fs/cgroup/memory" / place
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control")
        elif not controllers:
            here = root / "sys/fs/cgroup" / place
            names = ("memory.max", "memory.current", "memory.events")
        else:
            continue
        # In a container the path is the host's, and what we see is mounted at the top.
        for folder in (here, here.parents[len(Path(place).parts) - 1] if place else here):
            if (folder / names[1]).exists():
                return folder / names[0], folder / names[1], folder / names[2]
    return None


def _cgroup(root: Path) -> Iterator[Check]:
    why = "The kernel kills a process of the group when the limit is met, however much the machine has left."
    files = cgroup_files(root)
    if files is None:
        yield Check(name="memory.cgroup", level=SKIP, value="no memory cgroup that we can see", why=why)
        return
    limit, used, events = (_text(root, str(file.relative_to(root))) or "" for file in files)
    kills = flat(events).get("oom_kill", 0)
    most = int(limit) if limit.strip().isdigit() and int(limit) < 1 << 60 else None
    kept = _cached(flat(_text(root, str((files[1].parent / "memory.stat").relative_to(root))) or ""))
    share = max(0, int(used) - kept) / most if most and used.strip().isdigit() else 0.0
    level = FAIL if share > 0.97 else WARN if share > 0.9 else OK
    yield Check(
        name="memory.cgroup", level=level, why=why, sign=Sign.HOST_MEMORY, kind=Kind.OOM,
        value=f"{share:.0%} of {gib(most)}" if most else "no limit",
        remedy="" if level is OK else "Raise the limit (MemoryMax=, --memory), or use less; files in tmpfs count too.",
    )  # fmt: skip
    if kills:
        yield Check(
            name="memory.oom_kills", level=WARN, value=f"{kills} since the group was made", why=why,
            remedy="Raise the limit; see the kernel log for whom it was.",
        )  # fmt: skip


def _cached(stat: Mapping[str, int]) -> int:
    """Pages of files on disks, which count as used and which the kernel drops before it kills for want of memory. Those of
    tmpfs are not among them. In version 1 only the totals have those of groups below.
    """
    return sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in ("active_file", "inactive_file"))


NETWORKED: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "ceph", "lustre", "gpfs", "fuse.gcsfuse"}
)
IN_MEMORY: Final = frozenset({"tmpfs", "ramfs"})


def disk(path: Path, name: str, *, need: int = GIB, root: Path = ROOT, write: bool = True) -> Iterator[Check]:
    """Space, inodes, read-only, and how long a small write takes to be safe. `need`: bytes that must fit."""
    why = "A save that cannot be written loses the steps since the last one, at the next reload."
    place = path if path.is_absolute() else Path.cwd() / path
    try:
        there = _nearest(place)  # a stale mount raises here already
        stat = os.statvfs(there)
        mount = mount_of(_text(root, "proc/self/mountinfo") or "", str(there.resolve()))
    except OSError as error:
        closed = error.errno in {errno.EACCES, errno.EPERM}
        yield Check(
            name=f"{name}.space", level=FAIL, value=f"{path}: {error.strerror}", why=why, kind=Kind.DISK,
            sign=None if closed else Sign.DISK_BROKEN, remedy="Let the job's user into it." if closed else STALE,
        )  # fmt: skip
        return
    where = f"{path} ({mount.kind})" if mount else str(path)
    if (mount and "ro" in mount.options) or stat.f_flag & os.ST_RDONLY:
        yield Check(
            name=f"{name}.writable", level=FAIL, value=f"{where} is mounted read-only", why=why, kind=Kind.DISK,
            remedy="The kernel remounts a file system it no longer trusts: see its log, check the disk.",
            sign=Sign.DISK_BROKEN,
        )  # fmt: skip
        return
    free = stat.f_bavail * stat.f_frsize
    inodes = stat.f_favail / stat.f_files if stat.f_files else 1.0
    level = FAIL if free < need or inodes < 0.001 else WARN if free < 2 * need or inodes < 0.02 else OK
    yield Check(
        name=f"{name}.space", level=level, value=f"{gib(free)} free on {where}, {inodes:.0%} of inodes",
        why=f"{why} It needs {gib(need)}.", kind=Kind.DISK,
        sign=Sign.DISK_FULL if free < NOTHING or inodes == 0 else None,  # little space is a warning, not yet a culprit
        remedy="" if level is OK else "Free space, keep fewer checkpoints (checkpoint.keep_last), or move them.",
    )  # fmt: skip
    if write:
        yield _latency(there, name, where, why)


def _nearest(place: Path) -> Path:
    """What there is of a path; OSError where something of it does not answer, or is closed to us."""
    for one in (place, *place.parents):
        try:
            one.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        return one
    return place


STALE: Final = "Mount it again; a stale handle, or silence, means that its server has gone."
NOTHING: Final = 1 << 24  # bytes free with which not even a small file of a save can be counted on
SLOW_WRITE_S: Final = 0.25  # for 4 KiB to be on the disk; a healthy disk takes 1 to 20 ms, a busy NFS 100


def _latency(folder: Path, name: str, where: str, why: str) -> Check:
    probe = folder / f".elasticrl-{os.getpid()}.probe"
    begin = time.monotonic()
    try:
        handle = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(handle, bytes(4096))
            os.fsync(handle)
        finally:
            os.close(handle)
            probe.unlink(missing_ok=True)
    except OSError as error:
        sign = Sign.DISK_FULL if error.errno in {28, 122} else Sign.DISK_BROKEN
        return Check(
            name=f"{name}.write", level=FAIL, value=f"{where}: {error.strerror}", why=why, kind=Kind.DISK, sign=sign,
            remedy="Give the job's user the right to write there, or free space.",
        )  # fmt: skip
    took_s = time.monotonic() - begin
    slow = took_s > SLOW_WRITE_S
    return Check(
        name=f"{name}.write", level=WARN if slow else OK, value=f"{took_s * 1000:.1f} ms for 4 KiB to be safe on {where}",
        why="Commits wait for it.", remedy="See what else writes there; move checkpoints to a faster disk." if slow else "",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What only grows, at one moment.

    Example: Counters(at=812.5, cpu={"user": 7, "steal": 0}, tcp={"Tcp.OutSegs": 9}, nics={"eth0": {"rx_errors": 0}})
    """

    at: float
    cpu: Mapping[str, int] = field(default_factory=dict)
    tcp: Mapping[str, int] = field(default_factory=dict)
    nics: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    hcas: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


NIC_ERRORS: Final = ("rx_errors", "tx_errors", "rx_dropped", "tx_dropped", "rx_crc_errors", "tx_carrier_errors")
HCA_ERRORS: Final = ("symbol_error", "link_downed", "link_error_recovery", "port_rcv_errors", "local_link_integrity_errors",
                     "port_xmit_discards", "excessive_buffer_overrun_errors")  # fmt: skip
#: RoCE's own (`hw_counters`): packets that were lost or came in another order, and were sent again.
ROCE_ERRORS: Final = ("out_of_sequence", "packet_seq_err", "implied_nak_seq_err", "local_ack_timeout_err",
                      "rnr_nak_retry_err", "roce_adp_retrans", "roce_slow_restart")  # fmt: skip
#: Packets marked, and senders asked to slow down: how RoCE works where ways meet. Much of it is a network that is too small.
ROCE_CONGESTION: Final = ("np_cnp_sent", "np_ecn_marked_roce_packets", "rp_cnp_handled")
CONGESTED: Final = 0.01  # of all packets
HCA_PACKETS: Final = ("port_rcv_packets", "port_xmit_packets")
HCA_COUNTERS: Final = {"counters": (*HCA_ERRORS, *HCA_PACKETS), "hw_counters": (*ROCE_ERRORS, *ROCE_CONGESTION)}


def _own_cable(nic: Path) -> bool:
    """Not a bridge, and no virtual port of one: they come and go with the machine's containers, which is no fault of a network.

    Found beside the lab: a worker that was killed on its host was told as a link that had changed.
    """
    virtual = not (nic / "device").exists()
    return nic.name != "lo" and not (virtual and ((nic / "master").exists() or (nic / "bridge").exists()))


def counters(now: float, root: Path = ROOT) -> Counters:
    """A look. Two of them make checks: `gained`."""
    nics = {
        nic.name: {
            name: value
            for name in (*NIC_ERRORS, "rx_packets", "tx_packets")
            if (value := _number(root, f"sys/class/net/{nic.name}/statistics/{name}")) is not None
        }
        | {"carrier_changes": _number(root, f"sys/class/net/{nic.name}/carrier_changes") or 0}
        for nic in entries(root / "sys/class/net")
        if _own_cable(nic)
    }
    hcas = {
        f"{hca.name}:{port.name}": {
            name: value
            for folder, names in HCA_COUNTERS.items()
            for name in names
            if (value := _number(port, f"{folder}/{name}")) is not None
        }
        for hca in entries(root / "sys/class/infiniband")
        for port in entries(hca / "ports")
    }
    return Counters(
        at=now, cpu=cpu_times(_text(root, "proc/stat") or ""), tcp=snmp(_text(root, "proc/net/snmp") or ""), nics=nics,
        hcas=hcas,
    )  # fmt: skip


def entries(folder: Path) -> list[Path]:
    """What is in a folder, sorted; nothing if it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


#: kind of processor time -> the warning's limit, why, remedy
TIMES: Final = {
    "steal": (0.05, "The hypervisor gave our time to others: this node will straggle.",
              "Move the virtual machine, or reserve its cores."),
    "iowait": (0.3, "Processes wait for the disk: saves, data loading, swapping.",
               "See who reads and writes (iostat -x, pidstat -d); keep other jobs off that disk."),
}  # fmt: skip


def gained(before: Counters, after: Counters) -> Iterator[Check]:
    """What happened between two looks."""
    seconds = max(after.at - before.at, 1e-6)
    ticks = {name: after.cpu[name] - before.cpu.get(name, 0) for name in after.cpu}
    total = sum(ticks.values())
    if total > 0:
        for name, (limit, why, remedy) in TIMES.items():
            share = ticks.get(name, 0) / total
            bad = share > limit
            yield Check(
                name=f"cpu.{name}", level=WARN if bad else OK, value=f"{share:.1%} over {seconds:.1f} s", why=why,
                remedy=remedy if bad else "",
            )  # fmt: skip
    sent = after.tcp.get("Tcp.OutSegs", 0) - before.tcp.get("Tcp.OutSegs", 0)
    again = after.tcp.get("Tcp.RetransSegs", 0) - before.tcp.get("Tcp.RetransSegs", 0)
    if after.tcp:
        share = again / sent if sent > 0 else 0.0
        bad = share > 0.01 and again > 20
        yield Check(
            name="tcp.retransmits", level=WARN if bad else OK, value=f"{again} of {sent} segments over {seconds:.1f} s",
            why="Lost segments cost 200 ms each: gloo and NCCL over sockets crawl.",
            remedy="Look at the error counters of NIC and switch; elasticrl's probe tells which link." if bad else "",
        )  # fmt: skip
    for what, news, olds in (("nic", after.nics, before.nics), ("hca", after.hcas, before.hcas)):
        for name, values in sorted(news.items()):
            yield _port(what, name, values, olds.get(name, {}), seconds)


def _port(what: str, name: str, values: Mapping[str, int], old: Mapping[str, int], seconds: float) -> Check:
    grown = {key: value - old.get(key, value) for key, value in values.items()}
    packets = sum(grown.get(key, 0) for key in ("rx_packets", "tx_packets", *HCA_PACKETS))
    flaps = grown.get("carrier_changes", 0) + grown.get("link_downed", 0)
    errors = {
        key: count for key, count in grown.items() if count > 0 and key in {*NIC_ERRORS, *HCA_ERRORS, *ROCE_ERRORS}
    }
    marks = {key: count for key, count in grown.items() if count > 0 and key in ROCE_CONGESTION}
    crowded = max(marks.values(), default=0) > max(10, CONGESTED * packets)
    bad = flaps > 0 or crowded or sum(errors.values()) > max(10, packets // 10_000)
    said = ", ".join(f"{count} {key}" for key, count in sorted({**errors, **marks}.items())) or "no errors"
    cure = "Reseat or change cable and transceiver; look at the switch's port."
    if (crowded or errors.keys() & set(ROCE_ERRORS)) and not flaps:
        cure = "RoCE wants PFC or ECN alike on each NIC and switch port of the way (mlnx_qos, dcb), and room at the switch."
    return Check(
        name=f"{what}.{name}", level=FAIL if flaps else WARN if bad else OK,
        value=f"{said}{f', link changed {flaps} times' if flaps else ''} over {seconds:.1f} s",
        why="A port that flaps or drops makes every rank wait.", sign=Sign.LINK, kind=Kind.KERNEL,
        remedy=cure if bad else "",
    )  # fmt: skip


def load(root: Path = ROOT, cpus: int | None = None) -> Iterator[Check]:
    """How many want to run."""
    text = (_text(root, "proc/loadavg") or "").split()
    cpus = cpus or os.cpu_count() or 1
    if text:
        busy = float(text[0]) > 2 * cpus
        yield Check(
            name="cpu.load", level=WARN if busy else OK, value=f"{text[0]} on {cpus} cores",
            why="Workers that share their cores with others are slow and uneven.",
            remedy="Keep other jobs off this node, or give workers fewer threads (lanes.threads)." if busy else "",
        )  # fmt: skip


def limits(root: Path = ROOT) -> Iterator[Check]:
    """What a process may have: descriptors, locked memory, processes, shared memory, huge pages."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = files != resource.RLIM_INFINITY and files < 4096
    yield Check(
        name="limits.files", level=WARN if few else OK, value=f"{_limit(files)} open files for a process",
        why="Every peer, dataloader worker and shard is a descriptor or two.",
        remedy="LimitNOFILE=1048576 in the unit, or ulimit -n 1048576." if few else "",
    )  # fmt: skip
    yield from _open_files(root)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    verbs = bool(entries(root / "sys/class/infiniband"))
    low = verbs and locked != resource.RLIM_INFINITY
    yield Check(
        name="limits.memlock", level=FAIL if low else OK,
        value=f"{_limit(locked)} bytes may be locked" + ("" if verbs else "; no RDMA device needs it"),
        why="RDMA registers memory by locking it; NCCL fails with 'Cannot allocate memory' when it may not.",
        remedy="LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited; --ulimit memlock=-1 for containers." if low else "",
    )  # fmt: skip
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    few = processes != resource.RLIM_INFINITY and processes < 4096
    yield Check(
        name="limits.processes", level=WARN if few else OK, value=f"{_limit(processes)} processes and threads",
        why="Each worker has some hundred threads with NCCL and dataloaders.",
        remedy="TasksMax=infinity in the unit, or ulimit -u." if few else "",
    )  # fmt: skip
    yield from _huge(root)


def _open_files(root: Path) -> Iterator[Check]:
    row = (_text(root, "proc/sys/fs/file-nr") or "").split()
    if len(row) == 3:
        share = int(row[0]) / max(int(row[2]), 1)
        yield Check(
            name="files.open", level=FAIL if share > 0.95 else WARN if share > 0.8 else OK, sign=Sign.RESOURCE_LIMIT,
            value=f"{row[0]} of {row[2]} on this machine", why="When all are used nothing can be opened by anybody.",
            remedy="Raise fs.file-max; see who leaks them (lsof)." if share > 0.8 else "", kind=Kind.LIMIT,
        )  # fmt: skip


def _huge(root: Path) -> Iterator[Check]:
    enabled = chosen(_text(root, "sys/kernel/mm/transparent_hugepage/enabled") or "")
    defrag = chosen(_text(root, "sys/kernel/mm/transparent_hugepage/defrag") or "")
    if not enabled:
        yield Check(name="memory.thp", level=SKIP, value="the kernel has no transparent huge pages")
        return
    stalls = enabled == "always" and defrag == "always"
    yield Check(
        name="memory.thp", level=WARN if stalls else OK, value=f"enabled={enabled} defrag={defrag or '-'}",
        why="With both `always` any page fault may stop to compact memory: pauses of a second on a full machine.",
        remedy="echo defer+madvise > /sys/kernel/mm/transparent_hugepage/defrag" if stalls else "",
    )  # fmt: skip


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


def shm(path: Path = Path("/dev/shm"), need: int = 2 * GIB) -> Iterator[Check]:  # noqa: S108 - the tmpfs is what is looked at
    """Shared memory: dataloaders, NCCL within a node, and the vault live there."""
    why = "Dataloader workers die of a bus error, and NCCL cannot start, when it is full. Containers give 64 MiB."
    try:
        stat = os.statvfs(path)
    except OSError as error:
        yield Check(
            name="shm.space", level=FAIL, value=f"{path}: {error.strerror}", why=why, remedy="Mount a tmpfs there."
        )
        return
    free, size = stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize
    level = FAIL if free < min(need, GIB) // 4 else WARN if free < need else OK
    yield Check(
        name="shm.space", level=level, value=f"{gib(free)} free of {gib(size)}", why=why, sign=Sign.SHM_FULL,
        remedy="" if level is OK else "--shm-size=16g or --ipc=host; else remove what dead jobs left there.",
        kind=Kind.LIMIT,
    )  # fmt: skip


def interfaces(root: Path = ROOT) -> dict[str, str]:
    """Network interfaces with their state: up, down, unknown (loopback)."""
    nics = (nic.name for nic in entries(root / "sys/class/net"))
    return {nic: (_text(root, f"sys/class/net/{nic}/operstate") or "unknown").strip() for nic in nics}


def offset_s(asked: float, theirs: float, answered: float) -> float:
    """How far another clock is ahead of ours, as NTP reckons: its answer was half-way between question and answer."""
    return theirs - (asked + answered) / 2


def clock(offset: float | None, of: str = "") -> Check:
    """How far another node's clock is from ours; see `offset_s`."""
    why = "Logs of several nodes are read side by side, and certificates have dates. Decisions do not depend on it."
    if offset is None:
        return Check(name="clock", level=SKIP, value="no other clock to compare with", why=why)
    level = WARN if abs(offset) > 0.5 else OK
    return Check(
        name="clock", level=level, value=f"{offset * 1000:+.0f} ms{f' at {of}' if of else ''}", why=why,
        remedy="Start chrony or systemd-timesyncd on both." if level is WARN else "",
    )  # fmt: skip


def kernel(text: str, source: str) -> tuple[Check, tuple[Evidence, ...]]:
    """What the kernel has said of GPUs, memory, disks and links, and a check that sums it up."""
    why = "The kernel knows of broken hardware before anybody else."
    if not text:
        return Check(name="kernel.log", level=SKIP, value=source, why=why), ()
    noise = {Sign.NOISE, Sign.TOLD}
    facts = tuple(fact for fact in Parser(source=f"kernel ({source})").read(text.encode()) if fact.sign not in noise)
    broken = [fact for fact in facts if fact.sign in {Sign.GPU_BROKEN, Sign.DISK_BROKEN}]
    newest = facts[-1].line.strip()[:160] if facts else ""
    return Check(
        name="kernel.log", level=FAIL if broken else WARN if facts else OK, why=why,
        value=f"{len(facts)} messages of trouble since boot, the newest: {newest}" if facts else "nothing of trouble",
        remedy="Take the node out and run the vendor's diagnostics." if broken else "Read it: dmesg -T." if facts else "",
    ), facts  # fmt: skip


def look(before: Counters, after: Counters, *, root: Path = ROOT) -> list[Check]:
    """What a daemon looks at each `health.sample`, beside kernel log, disks and GPUs: those may hang."""
    return [*pressures(root), *memory(root), *load(root), *limits(root), *shm(), *gained(before, after)]


def silent(path: Path, name: str) -> Check:
    """Of a disk that has been asked, and does not answer."""
    return Check(
        name=f"{name}.space", level=FAIL, value=f"{path} does not answer", why="A save there hangs as well.",
        kind=Kind.DISK, sign=Sign.DISK_BROKEN, remedy=STALE,
    )  # fmt: skip


#: What makes any process on a machine slow. It proves nothing about anybody; it belongs to the picture of a fault.
STARVING: Final = frozenset(
    {"cpu.load", *(f"cpu.{name}" for name in TIMES), *(f"pressure.{name}" for name in PRESSURE)}
)


def starving(checks: Iterable[Check]) -> Mapping[str, str]:
    """What this machine is short of, by check, with the figure."""
    return {check.name: check.value for check in checks if check.name in STARVING and check.level is WARN}


def worst(checks: Sequence[Check]) -> Level:
    """The verdict over all: fail, warn or ok."""
    levels = {check.level for check in checks}
    return FAIL if FAIL in levels else WARN if WARN in levels else OK
