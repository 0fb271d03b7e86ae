"""The units, by a real systemd: start, restart, kill -9, a hung daemon, stop."""

import base64
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from chaos.live.local import SCRIPT
from chaos.live.machine import Machine, missing
from chaos.patience import patience
from elasticrl.store.embedded import find_binary

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "systemd"
pytestmark = pytest.mark.timeout(240)

CONF = {
    "job": {
        "name": "unit",
        "program": str(SCRIPT),
        "args": ["--save", "/var/lib/elasticrl/saves", "--history", "/var/lib/elasticrl/history"],
    },
    "node": {"name": "solo", "device": "cpu", "interface": "lo"},
    "store": {"embedded": True},
    "membership": {"min_nodes": 1, "max_nodes": 1, "settle": "100ms", "lease_ttl": "5s", "keepalive": "1500ms"},
    "lanes": {"count": 4},
    "checkpoint": {"dir": "/var/lib/elasticrl/checkpoints"},
    "telemetry": {"format": "json"},
}


#: In the agent's environment; the second is a variable that never existed, and does nothing.
NOTED = 'Environment="NOTE=two words" NCCL_MAX_RINGS=4\n'


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    assert not missing(), f"this test must run where it can be run: {missing()} (make test installs it)"
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    # A machine has a /tmp of its own, and so has each unit in it: a checkout below ours must be shown to both.
    binds = [place for place in {ROOT, Path(sys.prefix)} if place.is_relative_to("/tmp")]
    for place in binds:
        place.chmod(place.stat().st_mode | 0o055)
    tmp = f"PrivateTmp={'no' if binds else 'yes'}\nReadWritePaths=/tmp\n"
    machine = Machine(
        binds=binds,
        prepare=lambda upper: subprocess.run(
            ["make", "-s", "install-systemd", f"DESTDIR={upper}"], cwd=ROOT, check=True
        ),
        files={
            "/etc/elasticrl/elasticrl.yaml": yaml.safe_dump(CONF),
            "/etc/elasticrl/environment": f"PATH={path}\nPYTHONPATH={ROOT}\nPYTHONDONTWRITEBYTECODE=1\n",
            "/etc/systemd/system/elasticrl-agent.service.d/test.conf": f"[Service]\n{tmp}{NOTED}",
            # A short watchdog, so that the test of a hung daemon is short too; and less time to stop than a drain takes: the
            # daemon asks for more.
            "/etc/systemd/system/elasticrl.service.d/test.conf": f"[Service]\nWatchdogSec=3\nTimeoutStopSec=1500ms\n{tmp}",
        },
    )
    with machine:
        for path in (ROOT, *(Path(p) for p in (sys.base_prefix, sys.prefix))):
            for parent in (path, *path.parents):  # the unprivileged user must reach the interpreter and the checkout
                machine.run("chmod", "o+rx", str(parent), check=False)
        machine.run("systemctl", "daemon-reload")
        machine.run("systemd-sysusers")
        machine.run("systemd-tmpfiles", "--create")
        ours = [f"/etc/elasticrl{name}" for name in ("", "/elasticrl.yaml")]
        machine.run("chown", "root:elasticrl", *ours)
        machine.run("chmod", "g+rX,o-rwx", *ours)
        machine.run("systemctl", "start", "elasticrl", timeout_s=90.0)
        machine.until(["test", "-s", "/var/lib/elasticrl/history"], 90.0)
        yield machine


def steps(machine: Machine) -> list[tuple[int, int]]:
    """Pid and step of each line the worker has written."""
    text = machine.run("cat", "/var/lib/elasticrl/history").stdout
    return [(int(pid), int(step)) for pid, step in re.findall(r" (\d+) step (\d+) ", text)]


def configure(machine: Machine, conf: dict[str, object]) -> None:
    text = base64.b64encode(yaml.safe_dump(conf).encode()).decode()
    machine.run("sh", "-c", f"echo {text} | base64 -d > /etc/elasticrl/elasticrl.yaml")


def goes_on(machine: Machine, count: int = 5, within_s: float = 30.0) -> None:
    before = len(steps(machine))
    deadline = time.monotonic() + patience(within_s)
    while len(steps(machine)) < before + count:
        assert time.monotonic() < deadline, machine.journal()
        time.sleep(0.1)


def test_start_means_ready_and_status_says_training(machine: Machine) -> None:
    assert machine.show("elasticrl", "ActiveState") == "active"
    assert machine.show("elasticrl-agent", "ActiveState") == "active"
    assert machine.run("ps", "-o", "user=", "-p", machine.show("elasticrl", "MainPID")).stdout.strip() == "elasticrl"
    goes_on(machine)
    elasticrl = str(Path(sys.executable).with_name("elasticrl"))
    shown = json.loads(machine.run("runuser", "-u", "elasticrl", "--", elasticrl, "status", "--json").stdout)
    assert (shown["state"], shown["nodes"], shown["rows"][0]["leader"]) == ("TRAINING", 1, True)
    assert "solo" in machine.run(elasticrl, "status").stdout


def test_what_the_units_have_in_their_environment_is_for_root_alone(machine: Machine) -> None:
    # Found from outside: etcd's password and the page's token could be read by the whole group.
    assert machine.run("stat", "-c", "%a %U:%G", "/etc/elasticrl/environment").stdout.strip() == "600 root:root"
    tried = machine.run("runuser", "-u", "elasticrl", "--", "cat", "/etc/elasticrl/environment", check=False)
    assert "Permission denied" in tried.stderr


def test_the_doctor_sees_what_systemd_gives_the_units(machine: Machine) -> None:
    script = (
        "import json\n"
        "from elasticrl.diagnose import doctor, units\n"
        "found = {unit.name: [dict(unit.environment), dict(unit.unread)] for unit in units.units()}\n"
        "print(json.dumps([found, [check.value for check in doctor.in_units(None, None)]]))\n"
    )
    said = machine.run("env", f"PYTHONPATH={ROOT}", sys.executable, "-c", script).stdout
    found, checks = json.loads(said)
    agent, unread = found["elasticrl-agent.service"]
    assert (agent["NOTE"], agent["PYTHONPATH"], unread) == ("two words", str(ROOT), {})
    assert found["elasticrl.service"][0]["ELASTICRL_AGENT"] == "systemd"
    assert [check.partition(":")[0] for check in checks] == ["in elasticrl-agent.service"], checks


@pytest.mark.parametrize("how", ["restart", "kill", "hang"])
def test_the_daemon_can_be_restarted_killed_or_hang_and_no_step_is_lost(machine: Machine, how: str) -> None:
    before, worker = machine.show("elasticrl", "MainPID"), {pid for pid, _ in steps(machine)[-1:]}
    command = {
        "restart": ("systemctl", "restart", "elasticrl"),
        "kill": ("kill", "-9", before),
        "hang": ("kill", "-STOP", before),
    }[how]
    machine.run(*command)
    deadline = time.monotonic() + patience(30.0)
    while machine.show("elasticrl", "MainPID") in (before, "0") or machine.show("elasticrl", "SubState") != "running":
        assert time.monotonic() < deadline, machine.journal()
        time.sleep(0.1)
    goes_on(machine, count=20)
    seen = steps(machine)
    assert {pid for pid, _ in seen} == worker, "the worker was not the same all along"
    assert [step for _, step in seen] == list(range(seen[0][1], seen[0][1] + len(seen))), (
        "a step is missing or was made twice"
    )


def test_stop_drains_saves_and_leaves_nothing(machine: Machine) -> None:
    begun = time.monotonic()
    machine.run("systemctl", "stop", "elasticrl", timeout_s=120.0)
    assert time.monotonic() - begun < patience(20.0), machine.journal()
    assert machine.show("elasticrl", "ActiveState") == "inactive"
    assert machine.show("elasticrl-agent", "ActiveState") == "inactive"
    assert machine.show("elasticrl", "Result") == "success"
    assert machine.show("elasticrl-agent", "Result") == "success"
    left = machine.run("ps", "-u", "elasticrl", "-o", "args=", check=False).stdout
    assert left == ""
    newest = machine.run("sh", "-c", "ls /var/lib/elasticrl/saves | sort | tail -n 1").stdout
    assert int(re.findall(r"\d+", newest)[0]) == steps(machine)[-1][1], "the last step that was made is on the disk"


def test_an_agent_whose_unit_is_stopped_as_at_a_shutdown_drains_and_tells_systemd_how_long_it_may_take(
    machine: Machine,
) -> None:
    machine.run("systemctl", "start", "elasticrl", timeout_s=90.0)
    goes_on(machine, within_s=60.0)
    machine.run("systemctl", "stop", "elasticrl-agent", timeout_s=120.0)
    assert machine.show("elasticrl-agent", "Result") == "success"
    assert "holding to save" in machine.show("elasticrl-agent", "StatusText"), "the daemon says how long it may take"
    machine.until(["systemctl", "show", "-P", "ActiveState", "elasticrl"], 30.0, wanted="inactive")
    newest = machine.run("sh", "-c", "ls /var/lib/elasticrl/saves | sort | tail -n 1").stdout
    assert int(re.findall(r"\d+", newest)[0]) == steps(machine)[-1][1], "the last step that was made is on the disk"


def test_a_boot_begins_no_job_that_was_stopped_and_an_operator_does(machine: Machine) -> None:
    elasticrl = str(Path(sys.executable).with_name("elasticrl"))
    machine.run("systemctl", "enable", "--now", "elasticrl", timeout_s=90.0)
    goes_on(machine, within_s=60.0)
    machine.run(elasticrl, "stop", "--yes")
    machine.until(["systemctl", "show", "-P", "ActiveState", "elasticrl"], 60.0, wanted="inactive")
    before = len(steps(machine))
    machine.power_off()
    machine.boot()
    machine.until(
        ["journalctl", "-b", "--no-pager", "-o", "cat", "-u", "elasticrl"], 60.0, wanted="which begins no job anew"
    )
    machine.until(["systemctl", "show", "-P", "ActiveState", "elasticrl"], 30.0, wanted="inactive")
    machine.until(["systemctl", "show", "-P", "ActiveState", "elasticrl-agent"], 60.0, wanted="inactive")
    assert machine.show("elasticrl", "ExecMainStatus") == "75"
    assert len(steps(machine)) == before
    machine.run("systemctl", "start", "elasticrl", timeout_s=90.0)
    goes_on(machine, within_s=60.0)


def test_a_daemon_that_is_refused_leaves_no_agent_of_its_configuration(machine: Machine) -> None:
    # Found by reading: systemd starts the agent's unit when the daemon's has failed to start, and nobody ended it; a daemon of
    # a mended configuration then waited for another agent, for ever.
    machine.run("systemctl", "stop", "elasticrl", timeout_s=120.0)
    amiss = {**CONF, "store": {**CONF["store"], "username": "u", "password_file": "/etc/elasticrl/password"}}
    machine.run("sh", "-c", "echo geheim > /etc/elasticrl/password; chmod 644 /etc/elasticrl/password")
    configure(machine, amiss)
    machine.run("systemctl", "start", "elasticrl", timeout_s=90.0, check=False)
    machine.until(["systemctl", "show", "-P", "ExecMainStatus", "elasticrl"], 60.0, wanted="78")
    assert "password" in machine.journal()
    time.sleep(3.0)  # one that is started only now is found, too
    assert machine.show("elasticrl-agent", "ActiveState") == "inactive"
    left = machine.run("ps", "-u", "elasticrl", "-o", "args=", check=False).stdout
    assert left == ""
    configure(machine, CONF)
    machine.run("systemctl", "reset-failed", "elasticrl")
    machine.run("systemctl", "start", "elasticrl", timeout_s=90.0)
    goes_on(machine, within_s=60.0)


def test_a_stop_ends_the_workers_too_while_the_daemon_waits_for_its_store(machine: Machine) -> None:
    # Found by reading: the signal ended a daemon that was not up yet where it stood, and its workers trained on without a unit.
    configure(machine, {**CONF, "store": {"endpoints": ["127.0.0.1:1"]}})
    before = machine.show("elasticrl", "MainPID")
    machine.run("kill", "-9", before)
    machine.until(["systemctl", "show", "-P", "StatusText", "elasticrl"], 30.0, wanted="waiting for the store")
    assert machine.show("elasticrl", "MainPID") != before
    goes_on(machine)
    machine.run("systemctl", "stop", "elasticrl", timeout_s=120.0)
    machine.until(["systemctl", "show", "-P", "ActiveState", "elasticrl-agent"], 30.0, wanted="inactive")
    left = machine.run("ps", "-u", "elasticrl", "-o", "args=", check=False).stdout
    assert "elasticrl.agent" not in left
    assert machine.show("elasticrl", "Result") == "success"
    made = len(steps(machine))
    time.sleep(1.0)  # in which one that lived would have made some
    assert len(steps(machine)) == made
    configure(machine, CONF)


@pytest.mark.parametrize(
    ("unit", "tenths"), [("elasticrl.service", 25), ("elasticrl-agent.service", 40), ("elasticrl-etcd.service", 20)]
)
def test_the_units_are_clean_and_confined(unit: str, tenths: int) -> None:
    verified = subprocess.run(["systemd-analyze", "verify", UNITS / unit], capture_output=True, text=True)
    said = [line for line in verified.stderr.splitlines() if "Command /usr/bin/etcd is not executable" not in line]
    assert said == []  # it exits with 0 even for an unknown key
    judged = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", f"--threshold={tenths}", UNITS / unit], capture_output=True
    )
    assert judged.returncode == 0, judged.stdout.decode()[-200:]


def test_a_confined_etcd_serves(machine: Machine) -> None:
    """Its unit, with an etcd that is here, a user that is here, and no certificates."""
    keep = "--data-dir /var/lib/elasticrl-etcd --listen-client-urls http://127.0.0.1:23790"
    start = f"{find_binary()} {keep} --advertise-client-urls http://127.0.0.1:23790 --listen-peer-urls http://127.0.0.1:23800"
    here = f"[Service]\nUser=elasticrl\nExecStart=\nExecStart={start}\n"
    text = base64.b64encode(here.encode()).decode()
    folder = "/etc/systemd/system/elasticrl-etcd.service.d"
    machine.run("sh", "-c", f"mkdir -p {folder}; echo {text} | base64 -d > {folder}/test.conf; systemctl daemon-reload")
    try:
        machine.run("systemctl", "start", "elasticrl-etcd", timeout_s=60.0)  # it says itself when it serves
        asked = "from urllib.request import urlopen; print(urlopen('http://127.0.0.1:23790/health', timeout=20).read())"
        assert '"health":"true"' in machine.run(sys.executable, "-c", asked).stdout
    finally:
        machine.run("systemctl", "stop", "elasticrl-etcd", check=False)
