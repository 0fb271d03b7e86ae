"""AMD's GPUs: answers of amd-smi as ROCm 6 and 7 give them, said by a program of that name."""

import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chaos.patience import patience
from elasticrl.contract.verdict import Fault
from elasticrl.core.judge.judge import judge
from elasticrl.diagnose import amd, health
from elasticrl.diagnose.health import Check, Level

#: `amd-smi metric --json` of an MI300X under ROCm 7, without the parts that nothing here reads (clocks, fans, voltages).
MI300X: dict[str, Any] = {
    "gpu": 0,
    "usage": {"gfx_activity": {"value": 97, "unit": "%"}, "umc_activity": {"value": 41, "unit": "%"}, "mm_activity": "N/A"},
    "power": {"socket_power": {"value": 702, "unit": "W"}, "gfx_voltage": "N/A", "throttle_status": "N/A",
              "power_management": "ENABLED"},
    "temperature": {"edge": "N/A", "hotspot": {"value": 71, "unit": "C"}, "mem": {"value": 58, "unit": "C"}},
    "pcie": {"width": 16, "speed": {"value": 32, "unit": "GT/s"}, "bandwidth": {"value": 81, "unit": "Mb/s"},
             "replay_count": 0, "l0_to_recovery_count": 3, "nak_sent_count": 0, "nak_received_count": 0},
    "ecc": {"total_correctable_count": 4, "total_uncorrectable_count": 0, "total_deferred_count": 0,
            "cache_correctable_count": 0, "cache_uncorrectable_count": 0},
    "ecc_blocks": {"UMC": {"correctable_count": 4, "uncorrectable_count": 0, "deferred_count": 0}},
    "mem_usage": {"total_vram": {"value": 196592, "unit": "MB"}, "used_vram": {"value": 181302, "unit": "MB"},
                  "free_vram": {"value": 15290, "unit": "MB"}},
    "throttle": {"accumulation_counter": 88121004, "prochot_accumulated": 0, "ppt_accumulated": 9100211,
                 "prochot_violation_status": "NOT ACTIVE", "ppt_violation_status": "ACTIVE",
                 "socket_thermal_violation_status": "NOT ACTIVE", "vr_thermal_violation_status": "NOT ACTIVE",
                 "hbm_thermal_violation_status": "NOT ACTIVE", "ppt_violation_activity": {"value": 38, "unit": "%"}},
}  # fmt: skip
PAGES = {"gpu": 0, "retired": "No bad pages found.", "pending": "No bad pages found.", "un_res": "No bad pages found."}
WORKER = {"process_info": {"name": "python3", "pid": 71023, "mem_usage": {"value": 189003210752, "unit": "B"},
                           "cu_occupancy": {"value": 304, "unit": "%"}}}  # fmt: skip
NOBODY = {"process_info": "No running processes detected"}

Machine = Callable[..., dict[str, Check]]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with the driver, and an amd-smi that says this."""
    (tmp_path / "sys/module/amdgpu").mkdir(parents=True)
    (tmp_path / "sys/module/amdgpu/initstate").write_text("live\n")

    def looked_at(metric: object, pages: object = None, processes: object = None, **more: Any) -> dict[str, Check]:
        answers = {"metric": metric, "bad-pages": [PAGES] if pages is None else pages,
                   "process": [{"gpu": 0, "process_list": [WORKER]}] if processes is None else processes}  # fmt: skip
        for question, answer in answers.items():
            (tmp_path / question).write_text(answer if isinstance(answer, str) else json.dumps(answer, indent=4))
        program = tmp_path / "amd-smi"
        program.write_text(f'#!/bin/sh\n[ "$2" = --json ] || exit 2\ncat "{tmp_path}/$1"\n')
        program.chmod(0o755)
        checks, why = amd.gpus(tmp_path, str(program), **more)
        assert bool(checks) != bool(why), (checks, why)
        return {check.name: check for check in checks}

    return looked_at


def card(**sections: Any) -> dict[str, Any]:
    changed = copy.deepcopy(MI300X)
    for name, value in sections.items():
        changed[name] = {**changed[name], **value} if isinstance(value, dict) else value
    return changed


@pytest.mark.parametrize("rocm", [6, 7])
def test_a_card_that_is_well_has_the_checks_that_nvmls_have_and_no_complaint(machine: Machine, rocm: int) -> None:
    found = machine([MI300X] if rocm == 6 else {"gpu_data": [MI300X]})
    assert {name: check.level for name, check in found.items()} == dict.fromkeys(
        ("gpu.0.ecc", "gpu.0.pages", "gpu.0.clocks", "gpu.0.memory"), Level.OK
    )
    assert found["gpu.0.memory"].value == "177.1 GiB of 192.0 GiB used by 1 processes"
    assert found["gpu.0.clocks"].value == "not throttled", "that its power is at the limit is how a busy card runs"


def test_an_uncorrected_error_is_a_broken_gpu_and_its_node_is_named(machine: Machine) -> None:
    found = machine({"gpu_data": [card(ecc={"total_uncorrectable_count": 2})]})
    assert (found["gpu.0.ecc"].level, found["gpu.0.ecc"].value) == (Level.FAIL, "2 uncorrected errors")
    verdict = judge(health.evidence(found.values(), node="n05"))
    assert (verdict.fault, verdict.nodes) == (Fault.GPU_FAULT, ("n05",))


def test_what_holds_the_clocks_down_is_said_by_new_cards_and_that_they_are_by_old_ones(machine: Machine) -> None:
    hot = machine([card(throttle={"hbm_thermal_violation_status": "ACTIVE", "prochot_violation_status": "ACTIVE"})])
    assert (hot["gpu.0.clocks"].level, hot["gpu.0.clocks"].value) == (Level.WARN, "processor hot, memory too hot")
    old = card(power={"throttle_status": "THROTTLED"})
    del old["throttle"]  # MI210, ROCm 6.2
    assert (machine([old])["gpu.0.clocks"].level, machine([old])["gpu.0.clocks"].value) == (Level.WARN, "throttled")


@pytest.mark.parametrize(
    ("pages", "level", "said"),
    [
        (
            {"retired": {"page_address": "0x7f3a1000", "page_size": "0x1000", "status": "RESERVED"}},
            Level.OK,
            "1 retired",
        ),
        ({"pending": [{"status": "PENDING"}, {"status": "PENDING"}]}, Level.WARN, "0 retired, 2 pending"),
        ({"un_res": {"status": "UNRESERVABLE"}}, Level.FAIL, "0 retired, 1 that cannot be retired"),
    ],
)
def test_bad_pages_are_counted(machine: Machine, pages: dict[str, Any], level: Level, said: str) -> None:
    check = machine([MI300X], [{**PAGES, **pages}])["gpu.0.pages"]
    assert (check.level, check.value) == (level, said)
    assert bool(health.evidence([check])) == (level is Level.FAIL)


def test_memory_that_nobody_holds_is_a_leftover_and_an_idle_card_is_none(machine: Machine) -> None:
    idle = [{"gpu": 0, "process_list": [NOBODY]}]
    assert machine([MI300X], processes=idle)["gpu.0.memory"].level is Level.WARN
    empty = card(mem_usage={"used_vram": {"value": 283, "unit": "MB"}})
    assert machine([empty], processes=idle)["gpu.0.memory"].level is Level.OK
    unknown = machine([MI300X], processes={"error": "Permission Denied", "code": -10})["gpu.0.memory"]
    assert (unknown.level, "processes" in unknown.value) == (Level.OK, False), "who may not ask knows nothing"


def test_what_a_card_does_not_say_gives_no_check_and_each_card_its_own(machine: Machine) -> None:
    silent = {
        "gpu": 1,
        "ecc": "N/A",
        "power": "N/A",
        "mem_usage": {"total_vram": "N/A", "used_vram": "N/A"},
        "throttle": "N/A",
    }
    nothing = {"gpu": 1, "retired": "N/A", "pending": "N/A", "un_res": "N/A"}
    found = machine({"gpu_data": [MI300X, silent]}, [PAGES, nothing])
    assert {name.split(".")[1] for name in found} == {"0"}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"error": "Device is not found on the system.", "code": -3}, "Device is not found"),
        ("ERROR: Driver not loaded (amdgpu not found in modules)\n", "Driver not loaded"),
        ("", "said nothing"),
    ],
)
def test_a_program_that_cannot_tell_is_a_warning_and_no_verdict(machine: Machine, answer: object, said: str) -> None:
    (check,) = machine(answer).values()
    assert (check.level, said in check.value, health.evidence([check])) == (Level.WARN, True, ())
    assert check.remedy


def test_a_program_that_hangs_is_ended(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    program = tmp_path / "amd-smi"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    begin = time.monotonic()
    (check,), _ = amd.gpus(tmp_path, str(program), within_s=0.3)
    assert (check.level, "no answer" in check.value) == (Level.WARN, True)
    assert time.monotonic() - begin < patience(10)


#: Holds whoever writes its number into a file: as one that waits in a dead driver, it does not end when it is killed.
HOLDER = """
import ctypes, os, sys, time
print("ready", flush=True)
while not (os.path.exists(sys.argv[1]) and (pid := open(sys.argv[1]).read().strip())):
    time.sleep(0.01)
seize, stop_at_exit = 0x4206, 0x40
said = ctypes.CDLL(None).ptrace(seize, int(pid), 0, stop_at_exit)
print("held" if said == 0 else "free", flush=True)
time.sleep(30)
"""


def test_a_program_that_does_not_end_though_it_is_killed_is_left_alone_and_no_second_one_is_started(
    tmp_path: Path,
) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    program, started = tmp_path / "amd-smi", tmp_path / "started"
    program.write_text(f'#!/bin/sh\necho $$ >> "{started}"\nexec sleep 60\n')
    program.chmod(0o755)
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(started)], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n"
            begin = time.monotonic()
            (check,), _ = amd.gpus(tmp_path, str(program), within_s=1.0)
            assert time.monotonic() - begin < patience(10)
            if holder.stdout.readline() != "held\n":
                pytest.skip("this machine lets no process hold another one")
            assert (check.level, "no answer within 1 s" in check.value) == (Level.WARN, True)
            (check,), _ = amd.gpus(tmp_path, str(program), within_s=1.0)
            (pid,) = started.read_text().split()
            assert (check.level, f"process {pid}" in check.value) == (Level.WARN, True)
        finally:
            holder.kill()
    program.write_text("#!/bin/sh\necho '[]'\n")
    deadline = time.monotonic() + patience(10)
    while amd.gpus(tmp_path, str(program)) != ((), "amd-smi tells of no GPU"):
        assert time.monotonic() < deadline, "it has ended, and the next one is not asked"
        time.sleep(0.01)  # until the kernel has let go of it


def test_where_no_amd_gpu_is_nothing_is_said_and_a_driver_without_the_program_is(tmp_path: Path) -> None:
    assert amd.gpus(tmp_path) == ((), "no AMD driver")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    (check,), _ = amd.gpus(tmp_path, str(tmp_path / "no-such-program"))
    assert check.level is Level.WARN
    assert "amd-smi" in check.remedy
