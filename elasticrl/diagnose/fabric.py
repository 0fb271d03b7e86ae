"""What lies between the GPUs of a machine, and between them and the network: PCIe links, access control, RDMA ports, GIDs.

The one idea: all of it stands in sysfs, under a `root` that tests make up. Where a reader may not look (configuration space
beyond its first 64 bytes is root's) that is said and never guessed: `skip`. Nothing here is broken hardware, but for a device
that has gone from the bus: these are settings and cables which make a job slow, or its RDMA fail, without a word.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from elasticrl.contract.evidence import Kind, Sign
from elasticrl.diagnose.environment import hcas, number
from elasticrl.diagnose.health import FAIL, OK, ROOT, SKIP, WARN, Check, entries

PCI: Final = "sys/bus/pci/devices"
GPU_CLASSES: Final = ("0x0300", "0x0302", "0x0380", "0x1200")  # VGA, 3D, display, accelerator
GPU_VENDORS: Final = {"0x10de": "NVIDIA", "0x1002": "AMD"}
BRIDGE: Final = "0x0604"
LONG: Final = 256  # bytes of configuration space, after which the extended capabilities begin
ACS: Final = 0x000D
REDIRECTS: Final = {0x04: "request redirect", 0x08: "completion redirect"}
NO_GID: Final = "0000:0000:0000:0000:0000:0000:0000:0000"
V2: Final = "RoCE v2"


# PCIe.


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU or a NIC, and where it is plugged in.

    Example: Device(name="GPU 0000:1b:00.0", address="0000:1b:00.0", place=Path("/sys/devices/pci0000:15/.../0000:1b:00.0"),
        gpu=True)
    """

    name: str
    address: str
    place: Path  # resolved: the bridges above it are its parents
    gpu: bool

    @property
    def above(self) -> tuple[Path, ...]:
        """The bridges between it and the processor, the nearest first."""
        return tuple(parent for parent in self.place.parents if _attribute(parent, "class").startswith(BRIDGE))


def devices(root: Path = ROOT) -> tuple[Device, ...]:
    """GPUs, and the NICs that are up or do RDMA: those that a job's data may go through."""
    found = []
    for place in entries(root / PCI):
        vendor = GPU_VENDORS.get(_attribute(place, "vendor"), "")
        if vendor and _attribute(place, "class").startswith(GPU_CLASSES) and (place / "driver").exists():
            found.append(Device(name=f"{vendor} GPU", address=place.name, place=place.resolve(), gpu=True))
    for kind in ("infiniband", "net"):
        for one in entries(root / "sys/class" / kind):
            place = (one / "device").resolve()
            idle = kind == "net" and _attribute(one, "operstate") != "up"
            if idle or not (place / "vendor").exists() or any(device.place == place for device in found):
                continue
            found.append(Device(name=one.name, address=place.name, place=place, gpu=False))
    return tuple(found)


def gone(root: Path = ROOT) -> Iterator[Check]:
    """GPUs that have fallen off the bus: the kernel remembers them, and they answer no more."""
    for device in devices(root):
        if device.gpu and _config(device.place)[:4] == b"\xff\xff\xff\xff":
            yield Check(
                name=f"gpu.{device.address}", level=FAIL, value=f"{device.name}: gone from the bus, it reads as all ones",
                why="The driver cannot reach it any more, and what uses it hangs or fails.", sign=Sign.GPU_BROKEN,
                remedy="See the kernel log for its Xid or amdgpu's lines; reboot the node, reseat the card.",
                kind=Kind.CUDA_ERROR,
            )  # fmt: skip


def links(root: Path = ROOT) -> Iterator[Check]:
    """Does each GPU and NIC have all lanes, at the speed, that it and its slot can?"""
    for device in devices(root):
        yield from _link(device)


def _link(device: Device) -> Iterator[Check]:
    width, most = _lanes(device.place, "current"), _lanes(device.place, "max")
    speed, best = _speed(device.place, "current"), _speed(device.place, "max")
    if not width or not most:
        return  # virtual functions and virtual machines say 0, 63 or 255
    slot = device.above[0] if device.above else None
    slot_most = (_lanes(slot, "max") if slot else 0) or most
    narrow, slow = width < most, bool(speed and best and speed < best)
    said = f"x{width} of x{most}" + (f" at {speed:g} of {best:g} GT/s" if speed and best else "")
    # A GPU that has nothing to do lowers its link's speed, never its width.
    idles = device.gpu and slow and not narrow
    why_slot = f"; the slot has x{slot_most}" if narrow and slot_most < most else ""
    bad = narrow or (slow and not device.gpu)
    yield Check(
        name=f"pcie.{device.address}", level=WARN if bad else OK,
        value=f"{device.name}: {said}{why_slot}{' (lowered while it has nothing to do)' * idles}",
        why="Copies to the host, and between GPUs without NVLink, take that much longer; one such node slows all.",
        remedy="" if not bad else "Move it to a slot with more lanes." if why_slot else "Reseat the card or its riser; see the "
        "kernel log for AER lines; replace it if it trains down again.",
    )  # fmt: skip


def acs(root: Path = ROOT) -> Iterator[Check]:
    """Does a switch send what one GPU, or a NIC, writes to another up to the processor and back?"""
    found = devices(root)
    cards = [device for device in found if device.gpu]
    why = "GPUs then copy to each other, and NICs to GPUs, through the root complex: slower, and NCCL may hang over it."
    if not cards:
        yield Check(name="pcie.acs", level=SKIP, value="no GPU", why=why)
        return
    theirs = {bridge for card in cards for bridge in card.above}
    near = (device for device in found if theirs.intersection(device.above))  # a NIC elsewhere is no GPU's way
    bridges = sorted({bridge for device in near for bridge in device.above}, key=lambda bridge: bridge.name)
    if not bridges:
        yield Check(
            name="pcie.acs", level=SKIP, value="no PCIe bridge above the GPUs is visible (a virtual machine)", why=why
        )
        return
    read = {bridge: control(_config(bridge)) for bridge in bridges}
    if all(len(_config(bridge)) <= LONG for bridge in bridges):
        said = f"not readable: the control registers of {len(bridges)} bridges need root"
        yield Check(name="pcie.acs", level=SKIP, value=said, why=why, remedy="To know it: sudo elasticrl doctor.")
        return
    redirecting = {bridge: bits for bridge, bits in read.items() if bits and _redirects(bits)}
    # A root port has nothing to redirect past: what comes to it is at the root complex already.
    inside = {bridge: bits for bridge, bits in redirecting.items() if any(up in read for up in bridge.parents)}
    bad = ", ".join(f"{bridge.name} ({_redirects(bits)})" for bridge, bits in list(inside.items())[:4])
    more = f" and {len(inside) - 4} more" if len(inside) > 4 else ""
    roots = len(redirecting) - len(inside)
    well = f"no redirect in the switches ({len(bridges)} bridges)"
    well += f"; in {roots} root ports, where it does no harm" * bool(roots)
    yield Check(
        name="pcie.acs", level=WARN if inside else OK, value=f"ACS redirects at {bad}{more}" if inside else well, why=why,
        remedy="Switch ACS off in the BIOS, or for each of them: setpci -s ADDRESS ECAP_ACS+0x6.w=0000 (it comes back at a "
        "reboot). In a virtual machine it must stay: use ATS." if inside else "",
    )  # fmt: skip


def control(config: bytes) -> int | None:
    """The ACS control register in a device's configuration space; None if it has none, or that part was not given.

    >>> control(bytes(256) + bytes.fromhex("0d000100 1f001d00")) == 0x1d
    True
    """
    at, seen = LONG, set[int]()
    while at >= LONG and at + 8 <= len(config) and at not in seen:
        seen.add(at)
        head = int.from_bytes(config[at : at + 4], "little")
        if head & 0xFFFF == ACS:
            return int.from_bytes(config[at + 6 : at + 8], "little")
        at = head >> 20
    return None


def _redirects(bits: int) -> str:
    return ", ".join(words for bit, words in REDIRECTS.items() if bits & bit)


# RDMA.


@dataclass(frozen=True, slots=True, kw_only=True)
class Gid:
    """An address of an RDMA port.

    Example: Gid(index=3, gid="0000:0000:0000:0000:0000:ffff:0a00:0001", type="RoCE v2", interface="eth2")
    """

    index: int
    gid: str
    type: str
    interface: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """A port of an RDMA device.

    Example: RdmaPort(name="mlx5_0:1", state="ACTIVE", ethernet=True, rate="400 Gb/sec (4X NDR)", gids=(...))
    """

    name: str
    state: str  # in the kernel's word; "" if it does not say
    ethernet: bool  # RoCE
    rate: str = ""
    gids: tuple[Gid, ...] = ()  # but for the empty places of the table

    @property
    def active(self) -> bool:
        """Whether NCCL could use it."""
        return self.state == "ACTIVE"

    @property
    def kind(self) -> str:
        """As people say it."""
        return "RoCE" if self.ethernet else "InfiniBand"


def ports(root: Path = ROOT) -> tuple[RdmaPort, ...]:
    """All RDMA ports."""
    return tuple(
        RdmaPort(
            name=f"{device.name}:{port.name}", state=_attribute(port, "state").rpartition(": ")[2],
            ethernet=_attribute(port, "link_layer") == "Ethernet", rate=_attribute(port, "rate"), gids=tuple(_gids(port)),
        )
        for device in entries(root / "sys/class/infiniband")
        for port in entries(device / "ports")
    )  # fmt: skip


def active(root: Path = ROOT) -> frozenset[str]:
    """RDMA ports that NCCL could use: `mlx5_0:1`."""
    return frozenset(port.name for port in ports(root) if port.active)


def _gids(port: Path) -> Iterator[Gid]:
    for place in sorted(entries(port / "gids"), key=lambda path: (len(path.name), path.name)):
        gid = _attribute(place.parent, place.name)
        if place.name.isdigit() and gid and gid != NO_GID:
            # An empty place has no type: reading it fails.
            kind, owner = (_attribute(port / "gid_attrs" / what, place.name) for what in ("types", "ndevs"))
            yield Gid(index=int(place.name), gid=gid, type=kind, interface=owner)


def gids(env: Mapping[str, str], root: Path = ROOT) -> Iterator[Check]:
    """Does each RoCE port have a routable address, and does NCCL_IB_GID_INDEX name one?"""
    index = number(env.get("NCCL_IB_GID_INDEX", ""))
    index = None if index is None or index < 0 else index  # -1, the default: NCCL chooses
    chosen = [port for port in ports(root) if port.active and meant(port.name, env.get("NCCL_IB_HCA", ""))]
    for port in chosen:
        if port.ethernet:
            yield _gid(port, index)
    infiniband = [port.name for port in chosen if not port.ethernet]
    if index and infiniband:
        yield Check(
            name="network.gid.infiniband", level=WARN,
            value=f"NCCL_IB_GID_INDEX={index}, and {', '.join(infiniband)} are no RoCE ports",
            why="It is for RoCE; on InfiniBand only the first GID is sure to be there.", remedy="Remove it.",
        )  # fmt: skip


def _gid(port: RdmaPort, index: int | None) -> Check:
    routable = [gid for gid in port.gids if gid.type == V2]
    named = next((gid for gid in port.gids if gid.index == index), None)
    usable = ", ".join(f"{gid.index} ({gid.interface or gid.gid})" for gid in routable[:4]) or "none"
    problem = remedy = ""
    if not routable:
        problem = "no GID of RoCE v2" if port.gids else "no GID at all"
        remedy = "Give the port's interface an IP address and bring it up; RoCE v1 is not routed."
    elif index is not None and named is None:
        problem = f"NCCL_IB_GID_INDEX={index} is an empty place of its table"
    elif index is not None and named is not None and named.type != V2:
        problem = f"NCCL_IB_GID_INDEX={index} is {named.type or 'of no type'}, not RoCE v2"
    if problem and not remedy:
        remedy = f"Remove NCCL_IB_GID_INDEX (NCCL chooses since 2.21), or name one of RoCE v2: {usable}."
    return Check(
        name=f"network.gid.{port.name}", level=WARN if problem else OK, value=problem or f"RoCE v2 at index {usable}",
        why="With a wrong GID queue pairs cannot be connected (ibv_modify_qp: Invalid argument, or it times out).",
        remedy=remedy,
    )  # fmt: skip


def meant(port: str, hca: str) -> bool:
    """Whether NCCL_IB_HCA leaves a port in.

    >>> meant("mlx5_10:1", "mlx5_1"), meant("mlx5_10:1", "=mlx5_1"), meant("mlx5_10:1", "^=mlx5_10:1"), meant("mlx5_0:1", "")
    (True, False, False, True)
    """
    exclude, exact, listed = hcas(hca)
    if not listed:
        return True
    device, _, number = port.partition(":")
    fits = any(
        (device == name if exact else device.startswith(name)) and (not which or which == number)
        for name, _, which in (part.partition(":") for part in listed)
    )
    return fits != exclude


# Reading.


def _attribute(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _config(device: Path) -> bytes:
    try:
        return (device / "config").read_bytes()
    except OSError:
        return b""


def _lanes(device: Path, which: str) -> int:
    text = _attribute(device, f"{which}_link_width")
    return int(text) if text.isdigit() and 0 < int(text) <= 32 else 0


def _speed(device: Path, which: str) -> float:
    """GT/s, from "16.0 GT/s PCIe"; 0 if it is not known."""
    try:
        return float(_attribute(device, f"{which}_link_speed").split(" ")[0])
    except ValueError:
        return 0.0
