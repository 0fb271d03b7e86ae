"""Machines made ill on purpose: a full disk, a read-only one, a cgroup whose process the kernel kills for memory."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.patience import patience
from elasticrl.contract.evidence import Sign
from elasticrl.contract.verdict import Fault
from elasticrl.core.judge.judge import judge
from elasticrl.diagnose import doctor, health, proc
from elasticrl.diagnose.health import Check, Level


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True)
    if done.returncode != 0:
        pytest.skip("this machine lets nobody mount")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def by_name(checks: object) -> dict[str, Check]:
    return {check.name: check for check in checks}  # type: ignore[attr-defined]


def test_a_full_disk_is_found_and_is_the_disks_fault(small: Path) -> None:
    assert by_name(health.disk(small, "disk", need=1 << 20))["disk.space"].level is Level.OK
    with (small / "fill").open("wb") as stream, contextlib.suppress(OSError):
        while True:
            stream.write(bytes(1 << 16))
            stream.flush()
    found = by_name(health.disk(small, "disk", need=1 << 20))
    assert (found["disk.space"].level, found["disk.write"].level) == (Level.FAIL, Level.FAIL)
    assert found["disk.write"].sign is Sign.DISK_FULL
    verdict = judge(health.evidence(found.values(), node="n02"))
    assert (verdict.fault, verdict.nodes) == (Fault.DISK, ("n02",))
    assert doctor._speed(small).level is Level.FAIL
    assert [path.name for path in small.iterdir()] == ["fill"]


def test_a_disk_that_turned_read_only_is_found_before_anything_is_written(small: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    found = by_name(health.disk(small, "disk", need=1))
    assert list(found) == ["disk.writable"]
    assert (found["disk.writable"].level, found["disk.writable"].sign) == (Level.FAIL, Sign.DISK_BROKEN)
    assert doctor._promises(small).level is Level.FAIL


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory cgroup of 64 MiB, of either version."""
    for top, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        place = top / f"elasticrl-test-{os.getpid()}"
        try:
            place.mkdir()
        except OSError:
            continue
        try:
            (place / limit).write_text(str(64 << 20))
            yield place
            return
        except OSError:
            continue
        finally:
            deadline = time.monotonic() + patience(5.0)
            while place.exists() and time.monotonic() < deadline:
                with contextlib.suppress(OSError):  # its last process is on its way out
                    place.rmdir()
                time.sleep(0.02)
    pytest.skip("no memory cgroup can be made here")


def test_a_group_that_has_read_much_is_not_taken_for_a_full_one(group: Path, tmp_path: Path) -> None:
    reader = (
        "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); file = open(sys.argv[2], 'wb')\n"
        "for _ in range(256): file.write(bytes(1 << 20))\n"
        "file.flush(); os.fsync(file.fileno())\n"
        "from elasticrl.diagnose import health\n"
        "files = health.cgroup_files(); limit, used = (int(file.read_text()) for file in files[:2])\n"
        "check, = (check for check in health.memory() if check.name == 'memory.cgroup')\n"
        "print(used / limit, check.level.value, check.value)"
    )
    command = [sys.executable, "-c", reader, str(group / "cgroup.procs"), str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60.0)
    assert done.returncode == 0, done.stderr
    share, level, told = done.stdout.split(maxsplit=2)
    if float(share) < 0.9:
        pytest.skip(f"this machine's kernel keeps no files in a group ({told})")
    assert level == health.OK.value, told


def test_a_process_that_the_kernel_killed_for_memory_is_known_from_its_group(group: Path) -> None:
    """As an unprivileged daemon sees it: its agent's group, and no kernel log."""
    eater = (
        "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "print('in', flush=True); sys.stdin.readline(); held = bytearray(512 << 20)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", eater, str(group / "cgroup.procs")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"in\n"
        files = health.cgroup_files(pid=str(process.pid))
        assert files is not None
        assert files[1].parent == group
        assert proc.flat(files[2].read_text()).get("oom_kill", 0) == 0
        process.stdin.write(b"\n")
        process.stdin.close()
        process.wait(timeout=30.0)
        if process.returncode != -9:
            pytest.skip("this machine does not enforce memory limits")
        assert proc.flat(files[2].read_text())["oom_kill"] >= 1
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
