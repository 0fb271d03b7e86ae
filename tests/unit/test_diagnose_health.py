"""Looks at a machine: the texts of real machines in a folder, and this machine as it is."""

# ruff: noqa: E501 -- a line of /proc is as long as it is

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from elasticrl.contract.evidence import Sign
from elasticrl.contract.verdict import Fault
from elasticrl.core.judge.judge import judge
from elasticrl.diagnose import fabric, health, kernel_log, nvidia, proc
from elasticrl.diagnose.fabric import RdmaPort
from elasticrl.diagnose.health import Check, Counters, Level

#: A node of a cluster: 2 TiB, cgroup v2 in a unit, one NIC that works and one HCA. Texts as the kernel writes them.
NODE = {
    "proc/meminfo": "MemTotal:       2113481328 kB\nMemFree:         9112340 kB\nMemAvailable:   1893012044 kB\nHugePages_Total:       0\n",
    "proc/pressure/memory": "some avg10=0.00 avg60=0.12 avg300=0.02 total=91\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=13\n",
    "proc/pressure/io": "some avg10=61.20 avg60=40.01 avg300=9.10 total=9\nfull avg10=58.03 avg60=39.88 avg300=8.70 total=8\n",
    "proc/self/cgroup": "0::/system.slice/elasticrl-agent.service\n",
    "sys/fs/cgroup/system.slice/elasticrl-agent.service/memory.max": "1099511627776\n",
    "sys/fs/cgroup/system.slice/elasticrl-agent.service/memory.current": "1080000000000\n",
    "sys/fs/cgroup/system.slice/elasticrl-agent.service/memory.events":
        "low 0\nhigh 0\nmax 8812\noom 3\noom_kill 2\noom_group_kill 0\n",
    "proc/loadavg": "23.11 19.40 17.02 25/4120 81234\n",
    "proc/sys/fs/file-nr": "12304\t0\t9223372036854775807\n",
    "proc/self/mountinfo":
        "22 27 0:21 / /proc rw,relatime - proc proc rw\n27 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw\n"
        "91 27 0:52 / /data rw,relatime shared:9 - nfs4 filer:/vol0 rw,vers=4.2,hard,proto=tcp\n"
        "92 27 0:53 / /data/old\\040runs ro,relatime - xfs /dev/sdb1 ro\n93 27 8:17 / /scratch rw - xfs /dev/sdc1 ro\n",
    "proc/stat": "cpu  1000 0 500 8000 100 0 10 390 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\nintr 5 6\n",
    "proc/net/snmp": "Ip: Forwarding DefaultTTL\nIp: 1 64\nTcp: RtoAlgorithm MaxConn OutSegs RetransSegs\nTcp: 1 -1 50000 2000\n",
    "sys/class/net/eth0/operstate": "up\n",
    "sys/class/net/eth0/statistics/rx_errors": "7\n",
    "sys/class/net/eth0/statistics/rx_packets": "1000\n",
    "sys/class/net/eth0/carrier_changes": "3\n",
    "sys/class/net/lo/operstate": "unknown\n",
    "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
    "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
    "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
    "sys/class/infiniband/mlx5_0/ports/1/counters/link_downed": "0\n",
    "sys/class/infiniband/mlx5_0/ports/1/counters/symbol_error": "12\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "[always] madvise never\n",
    "sys/kernel/mm/transparent_hugepage/defrag": "[always] defer defer+madvise madvise never\n",
}  # fmt: skip


@pytest.fixture
def node(tmp_path: Path) -> Path:
    for name, text in NODE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def by_name(checks: object) -> dict[str, Check]:
    return {check.name: check for check in checks}  # type: ignore[attr-defined]


def test_cables_of_containers_are_not_looked_at_and_a_bond_s_are(node: Path) -> None:
    nics = node / "sys/class/net"
    for name in ("veth7f", "docker0/bridge", "eth1/device", "bond0/bonding", "eth2.7"):
        (nics / name).mkdir(parents=True)
    for port, above in (("veth7f", "docker0"), ("eth1", "bond0")):
        (nics / port / "master").symlink_to(nics / above)
    assert sorted(health.counters(1.0, node).nics) == ["bond0", "eth0", "eth1", "eth2.7"]


def test_a_stall_of_the_disk_is_seen_in_psi_and_a_kernel_without_psi_is_said(node: Path) -> None:
    found = by_name(health.pressures(node))
    assert found["pressure.io"].level is Level.WARN
    assert found["pressure.io"].value == "58.0 % of the last 10 s"
    assert found["pressure.memory"].level is Level.OK
    assert found["pressure.cpu"].level is Level.SKIP


def test_a_group_near_its_limit_fails_however_much_the_machine_has(node: Path) -> None:
    found = by_name(health.memory(node))
    assert found["memory.available"].level is Level.OK
    assert (found["memory.cgroup"].level, found["memory.cgroup"].value) == (Level.FAIL, "98% of 1024.0 GiB")
    assert found["memory.oom_kills"].value.startswith("2 since")
    assert judge(health.evidence(found.values(), node="n01")).fault is Fault.OOM_HOST


@pytest.mark.parametrize(
    ("kept", "level", "value"),
    [
        ("active_file 300000000000\ninactive_file 200000000000\nshmem 400000000000\n", Level.OK, "53% of 1024.0 GiB"),
        ("active_file 0\nshmem 1000000000000\n", Level.FAIL, "98% of 1024.0 GiB"),
        ("inactive_file 9\ntotal_active_file 40000000000\ntotal_inactive_file 9\n", Level.WARN, "95% of 1024.0 GiB"),
    ],
    ids=["files of disks", "files in memory", "of groups below"],
)
def test_files_that_the_kernel_can_drop_are_not_what_a_group_is_full_of(
    node: Path, kept: str, level: Level, value: str
) -> None:
    """Found by reading: after a save a failing program on a node that was well was called one without memory."""
    (node / "sys/fs/cgroup/system.slice/elasticrl-agent.service/memory.stat").write_text(kept)
    found = by_name(health.memory(node))["memory.cgroup"]
    assert (found.level, found.value) == (level, value)


def test_version_1_and_a_container_that_sees_only_itself_are_read_too(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "9:cpu:/x\n4:memory:/docker/0123\n0::/\n",
             "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
             "sys/fs/cgroup/memory/memory.usage_in_bytes": "123456\n",
             "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n"}  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = by_name(health.memory(tmp_path))
    assert (found["memory.cgroup"].level, found["memory.cgroup"].value) == (Level.OK, "no limit")
    assert found["memory.available"].level is Level.SKIP
    assert "memory.oom_kills" not in found


@pytest.mark.parametrize(
    ("path", "point", "kind"),
    [("/data/ckpt", "/data", "nfs4"), ("/data/old runs/1", "/data/old runs", "xfs"), ("/database", "/", "ext4"),
     ("/", "/", "ext4")],
)  # fmt: skip
def test_a_path_is_on_the_mount_that_is_nearest_above_it(path: str, point: str, kind: str) -> None:
    mount = proc.mount_of(NODE["proc/self/mountinfo"], path)
    assert mount is not None
    assert (mount.point, mount.kind) == (point, kind)


def test_a_file_system_that_the_kernel_made_read_only_is_found_in_either_options() -> None:
    for path in ("/data/old runs/x", "/scratch/x"):
        mount = proc.mount_of(NODE["proc/self/mountinfo"], path)
        assert mount is not None
        assert "ro" in mount.options


def test_a_disk_without_room_for_a_checkpoint_fails_and_one_with_room_does_not(tmp_path: Path) -> None:
    full = by_name(health.disk(tmp_path, "disk", need=1 << 60))
    assert (full["disk.space"].level, full["disk.space"].sign) == (Level.FAIL, None)
    assert health.evidence(full.values()) == (), "little space is no reason yet for what happened"
    good = by_name(health.disk(tmp_path / "not" / "yet", "disk", need=1))
    assert good["disk.space"].level is Level.OK
    assert good["disk.write"].level in {Level.OK, Level.WARN}
    assert list(tmp_path.iterdir()) == [], "the look leaves nothing behind"


def test_a_disk_that_refuses_a_write_is_full_or_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, sign in ((errno.ENOSPC, Sign.DISK_FULL), (errno.EIO, Sign.DISK_BROKEN)):

        def refuse(_handle: int, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", refuse)
        found = by_name(health.disk(tmp_path, "disk", need=1))
        assert (found["disk.write"].level, found["disk.write"].sign) == (Level.FAIL, sign)
        assert list(tmp_path.iterdir()) == []


def test_counters_speak_by_what_they_gained(node: Path) -> None:
    before = health.counters(10.0, node)
    assert before.nics == {"eth0": {"rx_errors": 7, "rx_packets": 1000, "carrier_changes": 3}}
    assert before.hcas == {"mlx5_0:1": {"symbol_error": 12, "link_downed": 0}}
    calm = by_name(health.gained(before, replace(before, at=11.0)))
    assert {check.level for check in calm.values()} == {Level.OK}
    after = Counters(
        at=12.0, cpu={**before.cpu, "user": 1100, "steal": 490}, tcp={"Tcp.OutSegs": 51000, "Tcp.RetransSegs": 2300},
        nics={"eth0": {"rx_errors": 7, "rx_packets": 90_000, "carrier_changes": 5}},
        hcas={"mlx5_0:1": {"symbol_error": 900, "link_downed": 0}},
    )  # fmt: skip
    found = by_name(health.gained(before, after))
    assert found["cpu.steal"].value == "50.0% over 2.0 s"
    assert found["cpu.steal"].level is Level.WARN
    assert health.starving(found.values()) == {"cpu.steal": "50.0% over 2.0 s"}
    waiting = by_name(
        health.gained(before, replace(before, at=11.0, cpu={**before.cpu, "iowait": before.cpu["iowait"] + 100}))
    )
    assert set(health.starving(waiting.values())) == {"cpu.iowait"}
    assert found["tcp.retransmits"].level is Level.WARN
    assert (found["nic.eth0"].level, found["nic.eth0"].sign) == (Level.FAIL, Sign.LINK)
    assert "link changed 2 times" in found["nic.eth0"].value
    assert found["hca.mlx5_0:1"].level is Level.WARN


def test_roces_own_counters_tell_loss_from_congestion_and_both_from_what_is_usual(node: Path) -> None:
    port = node / "sys/class/infiniband/mlx5_0/ports/1"
    texts = {"counters/port_rcv_packets": 4_000_000, "counters/port_xmit_packets": 4_000_000, "hw_counters/out_of_sequence": 88,
             "hw_counters/local_ack_timeout_err": 2, "hw_counters/np_cnp_sent": 190_000, "hw_counters/lifespan": 10}  # fmt: skip
    for name, value in texts.items():
        (port / name).parent.mkdir(exist_ok=True)
        (port / name).write_text(f"{value}\n")
    before = health.counters(10.0, node)
    known = before.hcas["mlx5_0:1"]
    assert {"out_of_sequence", "local_ack_timeout_err", "np_cnp_sent"} <= set(known)
    assert "lifespan" not in known, "how often the driver reads them is no counter"

    def after(**gained: int) -> Check:
        hcas = {"mlx5_0:1": {name: value + gained.get(name, 0) for name, value in known.items()}}
        return by_name(health.gained(before, replace(before, at=11.0, hcas=hcas)))["hca.mlx5_0:1"]

    many = {"port_rcv_packets": 1_000_000}
    assert after(**many, out_of_sequence=60, np_cnp_sent=900).level is Level.OK, "a network in use"
    lossy = after(**many, out_of_sequence=90, local_ack_timeout_err=30)
    assert (lossy.level, "30 local_ack_timeout_err, 90 out_of_sequence" in lossy.value) == (Level.WARN, True)
    assert "PFC" in lossy.remedy
    crowded = after(**many, np_cnp_sent=20_000)
    assert (crowded.level, "20000 np_cnp_sent" in crowded.value) == (Level.WARN, True)


def test_ports_huge_pages_and_load_are_read(node: Path) -> None:
    assert fabric.ports(node) == (
        RdmaPort(name="mlx5_0:1", state="ACTIVE", ethernet=False, rate="400 Gb/sec (4X NDR)"),
    )
    assert health.interfaces(node) == {"eth0": "up", "lo": "unknown"}
    limits = by_name(health.limits(node))
    assert limits["memory.thp"].level is Level.WARN
    assert limits["files.open"].level is Level.OK
    assert next(health.load(node, cpus=128)).level is Level.OK
    assert next(health.load(node, cpus=2)).level is Level.WARN


def test_the_kernels_log_tells_a_broken_gpu_from_noise() -> None:
    records = (
        "6,1,1000000,-;Linux version 6.18\n SUBSYSTEM=cpu\n"
        "3,339,512200417,-;NVRM: Xid (PCI:0000:44:00): 79, pid=1, GPU has fallen off the bus\n"
    )
    check, facts = health.kernel(kernel_log.dmesg(records), "kmsg")
    assert check.level is Level.FAIL
    assert [fact.sign for fact in facts] == [Sign.GPU_BROKEN]
    assert judge(facts).fault is Fault.GPU_FAULT
    assert health.kernel(kernel_log.dmesg("6,1,1,-;eth0: link is up\n"), "kmsg")[0].level is Level.OK
    assert health.kernel("", "the kernel log cannot be read")[0].level is Level.SKIP


def test_a_clock_half_a_minute_off_is_a_warning() -> None:
    assert health.offset_s(100.0, 130.1, 100.2) == pytest.approx(30.0)
    assert health.clock(30.0, "n02").level is Level.WARN
    assert health.clock(-0.004).level is Level.OK
    assert health.clock(None).level is Level.SKIP


class FakeNvml:
    """A card as the library shows it: two uncorrected errors, too hot, 60 GiB held by nobody."""

    NVMLError = type("NVMLError", (Exception,), {})

    def nvmlDeviceGetTotalEccErrors(self, *_):  # noqa: N802
        return 2

    def nvmlDeviceGetRemappedRows(self, _):  # noqa: N802
        return (1, 2, 1, 0)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _):  # noqa: N802
        return 0x40

    def nvmlDeviceGetMemoryInfo(self, _):  # noqa: N802
        return type("Memory", (), {"used": 60 << 30, "total": 80 << 30})

    def nvmlDeviceGetComputeRunningProcesses(self, _):  # noqa: N802
        return []


def test_a_sick_gpu_is_told_by_what_the_card_reports_and_what_it_does_not_support_is_left_out() -> None:
    found = by_name(nvidia.gpu(FakeNvml(), 3, object()))
    assert {name: check.level for name, check in found.items()} == {
        "gpu.3.ecc": Level.FAIL, "gpu.3.rows": Level.WARN, "gpu.3.clocks": Level.WARN, "gpu.3.memory": Level.WARN,
    }  # fmt: skip
    assert judge(health.evidence(found.values(), node="n05")).nodes == ("n05",)

    class Linked(FakeNvml):
        def nvmlDeviceGetNvLinkState(self, _, link):  # noqa: N802
            if link >= 12:
                raise self.NVMLError  # an A100 has twelve
            return int(link not in self.down)

        down: tuple[int, ...] = (3,)

    assert "gpu.3.nvlink" not in found, "this one does not know the question"
    link = by_name(nvidia.gpu(Linked(), 3, object()))["gpu.3.nvlink"]
    assert (link.level, link.value) == (Level.WARN, "11 of 12 links active; inactive: 3")
    Linked.down = ()
    assert by_name(nvidia.gpu(Linked(), 3, object()))["gpu.3.nvlink"].level is Level.OK
    Linked.down = tuple(range(12))
    assert "gpu.3.nvlink" not in by_name(nvidia.gpu(Linked(), 3, object())), "a card without a bridge"

    class Plain(FakeNvml):
        def nvmlDeviceGetRemappedRows(self, _):  # noqa: N802
            raise self.NVMLError

    assert "gpu.3.rows" not in by_name(nvidia.gpu(Plain(), 3, object()))


def test_without_gpus_it_says_so_and_the_rest_works(tmp_path: Path) -> None:
    checks, reason = nvidia.gpus(tmp_path)
    assert checks == ()
    assert reason


def test_cards_are_counted_by_their_devices(tmp_path: Path) -> None:
    assert nvidia.cards(tmp_path) == 0
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia-caps", "null"):
        (tmp_path / "dev" / name).touch()
    assert nvidia.cards(tmp_path) == 3


def test_gpus_that_cannot_be_asked_are_a_warning_with_what_to_do(tmp_path: Path) -> None:
    if (health.ROOT / nvidia.NVIDIA).exists():
        pytest.skip("this machine has a GPU")
    driver = tmp_path / nvidia.NVIDIA
    driver.parent.mkdir(parents=True)
    driver.touch()
    (check,), _ = nvidia.gpus(tmp_path)
    assert (check.level, check.why) == (Level.WARN, nvidia.WHY_UNSEEN)
    assert "a driver, but" in check.value
    assert check.remedy


def test_this_machine_can_be_looked_at_and_nothing_crashes_where_nothing_is(tmp_path: Path) -> None:
    before = health.counters(0.0)
    found = by_name([*health.look(before, health.counters(1.0)), *health.disk(Path("/"), "disk", write=False)])
    assert {"memory.available", "disk.space", "shm.space", "cpu.load", "limits.files"} <= set(found)
    assert all(check.level is Level.SKIP or check.why for check in found.values())
    assert all(check.remedy for check in found.values() if check.level in {Level.WARN, Level.FAIL})
    bare = health.look(health.counters(0.0, tmp_path), health.counters(1.0, tmp_path), root=tmp_path)
    assert health.worst([check for check in bare if not check.name.startswith("shm")]) is not Level.FAIL


def test_a_disk_whose_server_is_gone_is_broken_and_one_that_is_closed_to_us_is_not(tmp_path: Path, monkeypatch) -> None:
    plain = Path.stat

    def stat(path: Path, **more: bool) -> os.stat_result:
        if path == tmp_path / "saves":
            raise OSError(number, os.strerror(number))
        return plain(path, **more)

    monkeypatch.setattr(Path, "stat", stat)
    for number, sign in ((errno.ESTALE, Sign.DISK_BROKEN), (errno.EACCES, None)):
        (check,) = health.disk(tmp_path / "saves/job", "checkpoint")
        assert (check.level, check.sign) == (Level.FAIL, sign)
        assert os.strerror(number) in check.value
        assert check.remedy
