"""PCIe and RDMA: trees of sysfs as real machines have them, some of them set up badly."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from elasticrl.contract.verdict import Fault
from elasticrl.core.judge.judge import judge
from elasticrl.diagnose import fabric, health
from elasticrl.diagnose.health import Check, Level

ROOT_PORT, SWITCH_UP, SWITCH_DOWN, SWITCH_DOWN_2 = "0000:15:01.0", "0000:16:00.0", "0000:17:00.0", "0000:17:01.0"
GPU, NIC = "0000:18:00.0", "0000:19:00.0"
#: A GPU and a NIC behind one switch.
SWITCH = f"pci0000:15/{ROOT_PORT}/{SWITCH_UP}"
PLACES = {
    ROOT_PORT: f"pci0000:15/{ROOT_PORT}", SWITCH_UP: SWITCH,
    SWITCH_DOWN: f"{SWITCH}/{SWITCH_DOWN}", GPU: f"{SWITCH}/{SWITCH_DOWN}/{GPU}",
    SWITCH_DOWN_2: f"{SWITCH}/{SWITCH_DOWN_2}", NIC: f"{SWITCH}/{SWITCH_DOWN_2}/{NIC}",
}  # fmt: skip
LOCAL, MAPPED = "fe80:0000:0000:0000:0e42:a1ff:fe00:0001", "0000:0000:0000:0000:0000:ffff:0a00:0001"
TABLE = {0: (LOCAL, "IB/RoCE v1"), 1: (LOCAL, "RoCE v2"), 2: (MAPPED, "IB/RoCE v1"), 3: (MAPPED, "RoCE v2")}
FULL = {"current_link_width": "16\n", "max_link_width": "16\n", "current_link_speed": "32.0 GT/s PCIe\n",
        "max_link_speed": "32.0 GT/s PCIe\n"}  # fmt: skip


def config(control: int | None) -> bytes:
    """4 KiB of a bridge: AER first, then ACS, as a PEX switch has them. None: without ACS."""
    space = bytearray(4096)
    space[0:4] = bytes.fromhex("00103480")
    space[0x100:0x104] = (0x0001 | 2 << 16 | 0x148 << 20).to_bytes(4, "little")  # AER, next at 0x148
    if control is not None:
        space[0x148:0x14C] = (fabric.ACS | 1 << 16).to_bytes(4, "little")
        space[0x14C:0x14E] = (0x1F).to_bytes(2, "little")  # what it could do
        space[0x14E:0x150] = control.to_bytes(2, "little")
    return bytes(space)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A sound machine."""
    for address, place in PLACES.items():
        here = tmp_path / "sys/devices" / place
        here.mkdir(parents=True)
        kind = {GPU: "0x030200", NIC: "0x020700"}.get(address, "0x060400")
        vendor = {GPU: "0x10de", NIC: "0x15b3"}.get(address, "0x1000")
        for name, text in {"class": kind + "\n", "vendor": vendor + "\n", **FULL}.items():
            (here / name).write_text(text)
        (here / "config").write_bytes(config({ROOT_PORT: 0x1D, SWITCH_DOWN: 0x00, SWITCH_DOWN_2: 0x00}.get(address)))
        (tmp_path / fabric.PCI).mkdir(parents=True, exist_ok=True)
        (tmp_path / fabric.PCI / address).symlink_to(here)
    (tmp_path / "sys/devices" / PLACES[GPU] / "driver").mkdir()
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    roce(port, TABLE)
    (tmp_path / "sys/class/infiniband/mlx5_0/device").symlink_to(tmp_path / "sys/devices" / PLACES[NIC])
    return tmp_path


def roce(port: Path, table: Mapping[int, tuple[str, str]], layer: str = "Ethernet") -> None:
    """A port with this table; further places are empty, and have no type that could be read."""
    for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (port / folder).mkdir(parents=True, exist_ok=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "link_layer").write_text(f"{layer}\n")
    for index in range(16):
        gid, kind = table.get(index, (fabric.NO_GID, ""))
        (port / f"gids/{index}").write_text(f"{gid}\n")
        if kind:
            (port / f"gid_attrs/types/{index}").write_text(f"{kind}\n")
            (port / f"gid_attrs/ndevs/{index}").write_text("eth2\n")


def at(tree: Path, address: str) -> Path:
    return tree / "sys/devices" / PLACES[address]


def by_name(checks: object) -> dict[str, Check]:
    return {check.name: check for check in checks}  # type: ignore[attr-defined]


def test_a_sound_machine_has_no_complaint(tree: Path) -> None:
    checks = [*fabric.gone(tree), *fabric.links(tree), *fabric.acs(tree), *fabric.gids({}, tree)]
    assert {check.name: check.level for check in checks} == dict.fromkeys(
        (f"pcie.{GPU}", f"pcie.{NIC}", "pcie.acs", "network.gid.mlx5_0:1"), Level.OK
    )
    found = by_name(checks)
    assert found[f"pcie.{GPU}"].value == "NVIDIA GPU: x16 of x16 at 32 of 32 GT/s"
    assert "1 root ports, where it does no harm" in found["pcie.acs"].value
    assert fabric.active(tree) == {"mlx5_0:1"}


@pytest.mark.parametrize("port", [SWITCH_DOWN, SWITCH_DOWN_2])
def test_a_switch_that_sends_what_gpus_copy_up_to_the_processor_is_a_warning(tree: Path, port: str) -> None:
    (at(tree, port) / "config").write_bytes(config(0x1D))  # what Linux sets with an IOMMU: SV, RR, CR, UF
    (check,) = fabric.acs(tree)
    assert (check.level, check.value) == (
        Level.WARN,
        f"ACS redirects at {port} (request redirect, completion redirect)",
    )
    assert "setpci" in check.remedy
    (at(tree, port) / "config").write_bytes(config(0x01))
    assert next(fabric.acs(tree)).level is Level.OK, "source validation alone redirects nothing"


def test_a_switch_above_no_gpu_may_redirect_what_it_likes(tree: Path) -> None:
    other = tree / "sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0/0000:82:00.0/0000:83:00.0"
    other.mkdir(parents=True)
    for place, kind in ((other, "0x020000"), *((above, "0x060400") for above in list(other.parents)[:3])):
        for name, text in {"class": kind, "vendor": "0x8086", **FULL}.items():
            (place / name).write_text(text)
        (place / "config").write_bytes(config(0x1D))
    (tree / "sys/class/net/eth0").mkdir(parents=True)
    (tree / "sys/class/net/eth0/operstate").write_text("up\n")
    (tree / "sys/class/net/eth0/device").symlink_to(other)
    assert f"pcie.{other.name}" in by_name(fabric.links(tree))
    assert [check.level for check in fabric.acs(tree)] == [Level.OK]


def test_who_may_not_read_the_registers_is_told_so_and_a_machine_without_gpus_is_not_looked_at(tree: Path) -> None:
    for address in PLACES:
        path = at(tree, address) / "config"
        path.write_bytes(path.read_bytes()[:64])
    (check,) = fabric.acs(tree)
    assert (check.level, "not readable" in check.value) == (Level.SKIP, True)
    (tree / fabric.PCI / GPU).unlink()
    assert [check.value for check in fabric.acs(tree)] == ["no GPU"]


@pytest.mark.parametrize("head", ["0d000000", "0d00f0ff", "ff" * 8, ""])
def test_a_chain_of_capabilities_that_makes_no_sense_ends(head: str) -> None:
    space = bytearray(4096)
    space[0x100 : 0x100 + len(bytes.fromhex(head))] = bytes.fromhex(head)
    assert fabric.control(bytes(space)) in {0, 0xFFFF, None}
    ring = bytearray(config(None))
    ring[0x148:0x14C] = (0x0003 | 0x100 << 20).to_bytes(4, "little")
    assert fabric.control(bytes(ring)) is None


@pytest.mark.parametrize(
    ("address", "changed", "level", "said"),
    [
        (GPU, {"current_link_width": "8\n"}, Level.WARN, "x8 of x16"),
        (GPU, {"current_link_speed": "2.5 GT/s PCIe\n"}, Level.OK, "lowered while it has nothing to do"),
        (NIC, {"current_link_speed": "8.0 GT/s PCIe\n"}, Level.WARN, "mlx5_0: x16 of x16 at 8 of 32 GT/s"),
        (NIC, {"current_link_width": "0\n", "max_link_width": "255\n"}, None, ""),  # a virtual function
        (NIC, {"current_link_speed": "Unknown\n"}, Level.OK, "x16 of x16"),
    ],
)
def test_links_that_trained_down_are_found(
    tree: Path, address: str, changed: dict[str, str], level: Level | None, said: str
) -> None:
    for name, text in changed.items():
        (at(tree, address) / name).write_text(text)
    check = by_name(fabric.links(tree)).get(f"pcie.{address}")
    assert (check and check.level) == level
    assert said in (check.value if check else "")
    assert not check or bool(check.remedy) == (level is Level.WARN)


def test_a_slot_that_is_too_narrow_is_told_from_a_card_that_trained_down(tree: Path) -> None:
    (at(tree, GPU) / "current_link_width").write_text("8\n")
    (at(tree, SWITCH_DOWN) / "max_link_width").write_text("8\n")
    check = by_name(fabric.links(tree))[f"pcie.{GPU}"]
    assert "the slot has x8" in check.value
    assert check.remedy == "Move it to a slot with more lanes."


def test_a_gpu_that_reads_as_all_ones_has_gone_from_the_bus(tree: Path) -> None:
    (at(tree, GPU) / "config").write_bytes(b"\xff" * 64)
    (check,) = fabric.gone(tree)
    verdict = judge(health.evidence([check], node="n03"))
    assert (verdict.fault, verdict.nodes) == (Fault.GPU_FAULT, ("n03",))


@pytest.mark.parametrize(
    ("env", "level", "said"),
    [
        ({}, Level.OK, "RoCE v2 at index 1 (eth2), 3 (eth2)"),
        ({"NCCL_IB_GID_INDEX": "3"}, Level.OK, "RoCE v2 at index"),
        ({"NCCL_IB_GID_INDEX": "-1"}, Level.OK, "RoCE v2 at index"),
        ({"NCCL_IB_GID_INDEX": "2"}, Level.WARN, "NCCL_IB_GID_INDEX=2 is IB/RoCE v1, not RoCE v2"),
        ({"NCCL_IB_GID_INDEX": "5"}, Level.WARN, "NCCL_IB_GID_INDEX=5 is an empty place of its table"),
        ({"NCCL_IB_GID_INDEX": "010"}, Level.WARN, "NCCL_IB_GID_INDEX=8 is an empty place of its table"),
        ({"NCCL_IB_GID_INDEX": "²"}, Level.OK, "RoCE v2 at index"),
        ({"NCCL_IB_GID_INDEX": "99"}, Level.WARN, "NCCL_IB_GID_INDEX=99 is an empty place of its table"),
    ],
)
def test_the_gid_that_the_environment_names_has_to_be_a_routable_one(
    tree: Path, env: dict[str, str], level: Level, said: str
) -> None:
    (check,) = fabric.gids(env, tree)
    assert (check.level, said in check.value, bool(check.remedy)) == (level, True, level is Level.WARN), check


def test_a_roce_port_without_an_address_is_found_though_nobody_names_an_index(tree: Path) -> None:
    port = tree / "sys/class/infiniband/mlx5_1/ports/1"
    roce(port, {0: ("fe80:0000:0000:0000:0e42:a1ff:fe00:0002", "IB/RoCE v1")})
    (tree / "sys/class/infiniband/mlx5_1/device").symlink_to(at(tree, NIC))
    assert by_name(fabric.gids({}, tree))["network.gid.mlx5_1:1"].value == "no GID of RoCE v2"
    assert "network.gid.mlx5_1:1" not in by_name(fabric.gids({"NCCL_IB_HCA": "=mlx5_0"}, tree)), "nobody uses it"
    (port / "state").write_text("1: DOWN\n")
    assert "network.gid.mlx5_1:1" not in by_name(fabric.gids({}, tree))
    assert fabric.active(tree) == {"mlx5_0:1"}


def test_an_index_on_infiniband_is_a_warning_and_infiniband_needs_no_roce(tree: Path) -> None:
    roce(
        tree / "sys/class/infiniband/mlx5_0/ports/1",
        {0: ("fe80:0000:0000:0000:0002:c903:0000:0001", "IB/RoCE v1")},
        "InfiniBand",
    )
    assert list(fabric.gids({}, tree)) == []
    (check,) = fabric.gids({"NCCL_IB_GID_INDEX": "3"}, tree)
    assert check.level is Level.WARN


def test_where_nothing_is_nothing_is_said(tmp_path: Path) -> None:
    assert [*fabric.gone(tmp_path), *fabric.links(tmp_path), *fabric.gids({"NCCL_IB_GID_INDEX": "3"}, tmp_path)] == []
    assert [check.level for check in fabric.acs(tmp_path)] == [Level.SKIP]
