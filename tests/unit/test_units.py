"""What systemd gives our units is looked at as well as what the shell has; systemctl is a script here, as there may be none."""

from pathlib import Path

import pytest

from elasticrl.config import Tree
from elasticrl.config.cluster import Agent, Job
from elasticrl.diagnose import doctor, units
from elasticrl.diagnose.health import Level

SHOWN = """Id=elasticrl.service
LoadState=loaded
Environment=ELASTICRL_AGENT=systemd "NOTE=two words"
EnvironmentFiles={file} (ignore_errors=yes)

Id=elasticrl-agent.service
LoadState=loaded
Environment=NCCL_MAX_RINGS=4
EnvironmentFiles={file} (ignore_errors=yes)
EnvironmentFiles={folder}/must (ignore_errors=no)

Id=elasticrl@toy.service
LoadState=not-found
Environment=
"""


def systemctl(folder: Path, monkeypatch: pytest.MonkeyPatch, says: str) -> None:
    """A program of that name that says this."""
    (folder / "said").write_text(says)
    program = folder / "systemctl"
    program.write_text(f'#!/bin/sh\n[ "$1" = show ] && exec cat {folder}/said\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_what_the_units_environment_has_is_linted_and_the_units_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "environment").write_text('# for both\nNCCL_DEBGU="INFO"\nTWO=1 \\\n2\n')
    systemctl(tmp_path, monkeypatch, SHOWN.format(file=tmp_path / "environment", folder=tmp_path))
    daemon, agent = units.units()
    assert daemon.environment == {"ELASTICRL_AGENT": "systemd", "NOTE": "two words", "NCCL_DEBGU": "INFO", "TWO": "1 2"}
    assert (daemon.unread, list(agent.unread)) == ({}, [f"{tmp_path}/must"])
    tree = Tree(job=Job(name="j"), agent=Agent(env={"NCCL_MAX_NRINGS": "4"}))
    found = {check.name: check for check in doctor.in_units(tree, None)}
    assert sorted(found) == ["units.NCCL_DEBGU", "units.NCCL_MAX_RINGS", "units.file"]
    assert found["units.NCCL_DEBGU"].value.startswith(
        "in elasticrl.service and elasticrl-agent.service: NCCL_DEBGU=INFO"
    )
    assert found["units.NCCL_MAX_RINGS"].value.startswith("in elasticrl-agent.service: NCCL_MAX_RINGS=4")
    assert "must cannot be read (No such file" in found["units.file"].value
    assert all(check.remedy for check in found.values())


def test_units_in_order_are_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    systemctl(tmp_path, monkeypatch, "Id=elasticrl.service\nLoadState=loaded\nEnvironment=NCCL_DEBUG=WARN\n")
    (check,) = doctor.in_units(None, None)
    assert (check.name, check.level) == ("units", Level.OK)
    assert check.value.endswith("in elasticrl.service")


@pytest.mark.parametrize("says", ["", "System has not been booted with systemd as init system (PID 1). Can't operate."])
def test_where_systemd_is_not_there_is_nothing_to_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    if says:
        systemctl(tmp_path, monkeypatch, says)
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    assert list(doctor.in_units(None, None)) == []


def test_another_nccl_in_a_units_path_is_named_with_the_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libnccl.so.2").touch()
    systemctl(
        tmp_path, monkeypatch, f"Id=elasticrl-agent.service\nLoadState=loaded\nEnvironment=LD_LIBRARY_PATH={tmp_path}\n"
    )
    checks = {check.name: check for check in doctor.in_units(None, None)}
    assert checks["units.versions.nccl"].value.startswith("elasticrl-agent.service: beside torch's own NCCL")
