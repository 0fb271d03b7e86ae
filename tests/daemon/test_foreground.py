"""`elasticrl run`: some nodes and an etcd in the foreground, and nothing of them afterwards."""

import json
import os
import pwd
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from chaos.live.local import SCRIPT
from chaos.patience import patience

pytestmark = pytest.mark.timeout(150)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="elasticrl-run-") as folder:  # short: sockets live below it
        yield Path(folder)


def speaking_of(folder: Path) -> list[str]:
    """The command lines of all processes that name this folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line:
            found.append(line)
    return found


def kill_daemon(folder: Path, node: str) -> None:
    """As the kernel does for want of memory."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = entry.read_bytes().decode(errors="replace").split("\0")
            if str(folder / "job.yaml") in words and f"node.name={node}" in words:
                os.kill(int(entry.parent.name), signal.SIGKILL)
                return
    raise AssertionError(f"no daemon of {node} runs")


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)  # Ctrl-C; a hangup
def test_ctrl_c_ends_the_job_with_a_save_and_leaves_no_process_and_no_memory(
    folder: Path, number: signal.Signals
) -> None:
    conf = {
        "job": {
            "name": "fg",
            "program": str(SCRIPT),
            "args": ["--save", f"{folder}/saves", "--history", f"{folder}/history"],
        },
        "node": {"device": "cpu", "interface": "lo", "state_dir": f"{folder}/state"},
        "store": {"embedded": True},
        "membership": {"min_nodes": 2, "max_nodes": 2, "settle": "200ms"},
        "lanes": {"count": 4},
        "vault": {"dir": f"{folder}/vault", "copies": 1},
        "checkpoint": {"dir": f"{folder}/saves"},
        "telemetry": {"log_dir": f"{folder}/log"},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(conf))
    (folder / "history").touch()
    command = [sys.executable, "-m", "elasticrl.cli.main", "run", str(folder / "job.yaml"), "--nodes", "2"]
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    with (folder / "said").open("wb") as said:
        run = subprocess.Popen(
            command, stdout=said, stderr=said, env=environ, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # noqa: PLW1509 - the tests may run under nohup
        )  # fmt: skip
        try:
            deadline = time.monotonic() + patience(120.0)
            while len((folder / "history").read_text().splitlines()) < 40:
                assert run.poll() is None, (folder / "said").read_text()
                assert time.monotonic() < deadline, (folder / "said").read_text()
                time.sleep(0.1)
            assert len([line for line in speaking_of(folder) if "elasticrl.runtime.vault" in line]) == 2
            # Another session's sockets are elsewhere: it knew nothing of the first, adopted its etcd and ended that.
            for where, told in ((folder, ""), (folder / "cron", f" --run-dir {folder}/elasticrl")):
                where.mkdir(exist_ok=True)
                other = {**environ, "XDG_RUNTIME_DIR": str(where)}
                again = subprocess.run(command, env=other, capture_output=True, text=True, timeout=60, check=False)
                assert again.returncode == 2
                assert (
                    f"job fg runs on this machine already, by `elasticrl run` in another session (process {run.pid})"
                    in again.stderr
                )
                assert f"elasticrl status --job fg{told}; " in again.stderr
            elsewhere = [*command, f"node.state_dir={folder}/cron/state"]
            again = subprocess.run(elsewhere, env=other, capture_output=True, text=True, timeout=60, check=False)
            assert again.returncode == 2
            assert f"its vaults are in {folder}/vault/fg." in again.stderr
            made = len((folder / "history").read_text().splitlines())
            while len((folder / "history").read_text().splitlines()) < made + 10:
                assert run.poll() is None, "the second has ended the first"
                assert time.monotonic() < deadline, (folder / "said").read_text()
                time.sleep(0.1)
            os.kill(json.loads((folder / "state" / "fg" / "etcd" / "etcd.json").read_text())["pid"], signal.SIGKILL)
            while "\netcd is started again\n" not in (folder / "said").read_text():
                assert time.monotonic() < deadline, (folder / "said").read_text()
                time.sleep(0.1)
            assert "etcd ended (SIGKILL); it is started again in 0.5 s\n" in (folder / "said").read_text()
            kill_daemon(folder, "n1")  # is started again, and adopts what runs: no step is lost, nor is a plan written
            made = len((folder / "history").read_text().splitlines())
            while "the daemon of n1 ended (SIGKILL) and is started again" not in (folder / "said").read_text() or (
                len((folder / "history").read_text().splitlines()) < made + 100
            ):
                assert time.monotonic() < deadline, (folder / "said").read_text()
                time.sleep(0.1)
            run.send_signal(number)
            deadline = time.monotonic() + patience(60.0)
            while run.poll() is None:  # a further one broke the end: daemons, agents and etcd were left
                assert time.monotonic() < deadline, (folder / "said").read_text()
                time.sleep(0.05)
                run.send_signal(signal.SIGINT)
            assert run.returncode == 130
            assert "it is ending already, which may take 60 s" in (folder / "said").read_text()
            assert "Traceback" not in (folder / "said").read_text()
        finally:
            run.kill()
            run.wait()
    deadline = time.monotonic() + patience(
        5.0
    )  # an agent whose main thread has ended takes a moment to give its memory back
    while (left := speaking_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
    assert not (folder / "vault" / "fg").exists()
    assert "from another terminal: elasticrl status --watch --job fg\n" in (folder / "said").read_text()
    asks = [sys.executable, "-m", "elasticrl.cli.main", "status"]
    ended = subprocess.run(asks, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    by = f"{pwd.getpwuid(os.getuid()).pw_name} on n0"
    last = max(int(line.split()[4]) for line in (folder / "history").read_text().splitlines())
    assert (folder / "saves" / f"step-{last:08d}").exists()
    assert f"s ago at step {last:,} (committed {last:,}): stopped by {by}; the same command goes" in ended.stderr
    for kept in ("log", "state"):
        assert not (folder / kept / "fg").stat().st_mode & 0o007, "what may quote prompts is open to others"
    logs = "".join(log.read_text() for log in (folder / "log" / "fg").glob("*.daemon.log"))
    assert f"stopped by {by}" in logs
    assert "Traceback" not in logs
    assert '"bug"' not in logs
    runs = set()
    for node in ("n0", "n1"):
        text = (folder / "log" / "fg" / f"{node}.daemon.log").read_text()
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        assert {(line["job"], line["node"]) for line in lines} == {("fg", node)}
        started = [line["adopted"] for line in lines if line["event"] == "daemon.started"]
        assert started == ([False, True] if node == "n1" else [False])
        assert {line["member"] for line in lines if "member" in line} == {f"{node}/1"}
        assert {
            line["generation"] for line in lines if line["event"] == "plan.adopted" and line["phase"] == "train"
        } == {1}
        runs |= {line["run"] for line in lines if "run" in line}
    assert len(runs) == 1


@pytest.mark.slow  # a lease long
def test_a_run_that_is_killed_leaves_nothing_for_long(folder: Path) -> None:
    # Its daemons had a minute to drain, though the etcd by which others would hear of it was gone with the run.
    conf = {
        "job": {
            "name": "fg",
            "program": str(SCRIPT),
            "args": ["--save", f"{folder}/saves", "--history", f"{folder}/history"],
        },
        "node": {"device": "cpu", "interface": "lo", "state_dir": f"{folder}/state"},
        "store": {"embedded": True},
        "membership": {"min_nodes": 2, "max_nodes": 2, "settle": "200ms", "lease_ttl": "5s", "keepalive": "1500ms"},
        "lanes": {"count": 4},
        "vault": {"dir": f"{folder}/vault", "copies": 1},
        "checkpoint": {"dir": f"{folder}/saves"},
        "telemetry": {"log_dir": f"{folder}/log"},
        "recovery": {"drain": "300s"},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(conf))
    (folder / "history").touch()
    command = [sys.executable, "-m", "elasticrl.cli.main", "run", str(folder / "job.yaml"), "--nodes", "2"]
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    with (folder / "said").open("wb") as said:
        run = subprocess.Popen(command, stdout=said, stderr=said, env=environ, start_new_session=True)
        deadline = time.monotonic() + patience(90.0)
        while len((folder / "history").read_text().splitlines()) < 40:
            assert run.poll() is None, (folder / "said").read_text()
            assert time.monotonic() < deadline, (folder / "said").read_text()
            time.sleep(0.1)
        run.kill()
        run.wait()
    deadline = time.monotonic() + patience(100.0)
    while (left := speaking_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
    assert list((folder / "vault").rglob("*")) == []


STARTS_AND_DIES = """
import os, signal, sys
from pathlib import Path
from elasticrl.cli.serve import launch

print(launch(Path(sys.argv[1]), [], Path(sys.argv[2])).pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_that_is_killed_while_its_daemon_starts_leaves_none(folder: Path) -> None:
    # The daemon asks the kernel to end with its parent only when it has read its configuration: too late for this one.
    conf = {
        "job": {"name": "fg", "program": str(SCRIPT)},
        "node": {"device": "cpu", "interface": "lo", "state_dir": f"{folder}/state", "run_dir": f"{folder}/run"},
        "store": {"endpoints": ["http://127.0.0.1:1"]},
        "vault": {"dir": f"{folder}/vault"},
        "checkpoint": {"dir": f"{folder}/saves"},
        "telemetry": {"log_dir": f"{folder}/log"},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(conf))
    command = [sys.executable, "-c", STARTS_AND_DIES, str(folder / "job.yaml"), str(folder / "said")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert done.stdout.strip().isdecimal()
        deadline = time.monotonic() + patience(15.0)
        while (left := speaking_of(folder)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == [], (folder / "said").read_text()
        assert "Error" not in (folder / "said").read_text()
        assert not (folder / "run" / "fg").exists(), "it has not begun"
    finally:
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):  # it has ended meanwhile
                if str(folder) in entry.read_bytes().decode(errors="replace"):
                    os.kill(int(entry.parent.name), signal.SIGKILL)
