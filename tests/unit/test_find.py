"""Where a foreground run keeps its sockets and its agents' orders: nobody else may write there."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from elasticrl.base.owned import write_private
from elasticrl.cli.find import RUN_LOCK, NotFound, NotOurs, daemon, made_private, private_run_dir
from elasticrl.cli.operate import put


def test_a_folder_that_others_can_enter_or_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    made = made_private(tmp_path / "own" / "elasticrl")
    assert made_private(made) == made
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    link = tmp_path / "link"
    link.symlink_to(made)
    for folder in (open_to_all, link):
        with pytest.raises(NotOurs, match="set XDG_RUNTIME_DIR"):
            made_private(folder)


def test_a_folder_that_is_closed_to_us_is_not_said_to_have_no_daemon() -> None:
    if os.geteuid():
        pytest.skip("only root can be somebody else for a moment")
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own are closed to others above it
    assert folder.group()  # what that imports may lie where only root can read
    try:
        folder.chmod(0o750)
        os.chown(folder, 0, 54321)
        os.seteuid(65534)
        with pytest.raises(NotFound, match="is closed to this user: it is open to the group 54321"):
            daemon(folder)
        os.seteuid(0)
        with pytest.raises(NotFound, match="no daemon here"):
            daemon(folder)
    finally:
        os.seteuid(0)
        folder.rmdir()


def test_what_a_killed_job_left_does_not_stand_beside_the_one_that_runs(tmp_path: Path) -> None:
    with ExitStack() as stack:
        for job in ("alive", "dead", "other"):
            (tmp_path / job / "n0").mkdir(parents=True)
            listening = stack.enter_context(socket.socket(socket.AF_UNIX))
            listening.bind(str(tmp_path / job / "n0" / "control.sock"))
            if job != "dead":
                listening.listen()
        with pytest.raises(NotFound, match=r"several jobs run here \(alive, other\)"):
            daemon(tmp_path)
        listening.close()
        assert daemon(tmp_path) == tmp_path / "alive" / "n0" / "control.sock"


def test_sockets_that_a_job_left_are_no_daemon(tmp_path: Path) -> None:
    for node in ("n0", "n2"):
        (tmp_path / "dead" / node).mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(tmp_path / "dead" / node / "control.sock"))
    with pytest.raises(
        NotFound, match=r"no daemon of dead answers here \(what is left are sockets of n0, n2\).*elasticrl report"
    ):
        daemon(tmp_path)


LISTENS = """
import json, socket, sys
with socket.socket(socket.AF_UNIX) as listening:
    listening.bind(sys.argv[1])
    listening.listen()
    print("listens", flush=True)
    while True:
        client, _ = listening.accept()
        with client:
            if client.recv(4096):
                client.sendall(json.dumps({"v": 1, "ok": True, "value": sys.argv[2]}).encode() + b"\\n")
"""


def test_a_daemon_that_is_stopped_is_not_waited_for_where_another_shows_the_same_job(tmp_path: Path) -> None:
    # Found from outside: `status` waited for 15 s, and then failed, though others were there to be asked.
    with ExitStack() as stack:
        listening = []
        for node in ("n0", "n1"):
            (tmp_path / "j" / node).mkdir(parents=True)
            command = [sys.executable, "-c", LISTENS, str(tmp_path / "j" / node / "control.sock"), node]
            listening.append(stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE)))
            stack.callback(listening[-1].kill)
            assert listening[-1].stdout.readline() == b"listens\n"
        assert put(tmp_path, None, "status") == "n0"
        listening[0].send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, listening[0].pid, os.WSTOPPED | os.WNOWAIT)
        assert daemon(tmp_path) == tmp_path / "j" / "n1" / "control.sock"
        assert put(tmp_path, None, "status") == "n1"
        with pytest.raises(
            NotFound, match=rf"n0 is stopped \(process {listening[0].pid}, .*kill -CONT {listening[0].pid}"
        ):
            daemon(tmp_path, node="n0")
        with socket.socket(socket.AF_UNIX) as deaf:  # it runs, and does not answer
            (tmp_path / "j" / "n0" / "control.sock").unlink()
            deaf.bind(str(tmp_path / "j" / "n0" / "control.sock"))
            deaf.listen()
            assert daemon(tmp_path).parent.name == "n0"
            assert put(tmp_path, None, "status") == "n1"


def test_how_a_run_has_ended_is_told_where_nobody_is_left_to_ask(tmp_path: Path) -> None:
    def note(job: str, *, at: float, left: str = "/home/me/run", **more: str) -> None:
        how = {"state": "STOPPED", "reason": "stopped by an operator", **more}
        said = {"job": job, "step": 4596, "committed": 4590, "at": time.time() - at, "left": left, **how}
        (tmp_path / job).mkdir()
        (tmp_path / job / "ended.json").write_text(json.dumps(said))

    note("mine", at=730.0)
    note("done", at=9000.0, left="/var", state="FINISHED", reason="all 4596 steps are made")
    note("torn", at=9999.0)
    (tmp_path / "torn" / "ended.json").write_text("{")
    why = "stopped by an operator; the same command goes on from there"
    told = f"job mine ended 12 m ago at step 4,596 (committed 4,590): {why}"
    with pytest.raises(NotFound) as said:
        daemon(tmp_path, "mine")
    assert str(said.value) == f"{told}. More: elasticrl report /home/me/run --job mine, elasticrl incidents"
    with pytest.raises(NotFound) as said:
        daemon(tmp_path)
    assert "start it (systemctl start elasticrl" in str(said.value), "this machine's job may be another, which is away"
    assert str(said.value).startswith(f"{told}. More: elasticrl report /home/me/run --job mine, ")
    with pytest.raises(NotFound, match=r"all 4596 steps are made\. More: elasticrl report RUN") as said:
        daemon(tmp_path, "done")
    assert said.value.note["state"] == "FINISHED"
    for folder, told in (("/home/me/s 2", " --state-dir '/home/me/s 2'"), (str(Path("run/state").absolute()), "")):
        note(f"apart{len(told)}", at=1.0, state_dir=folder)
        with pytest.raises(NotFound) as said:
            daemon(tmp_path, f"apart{len(told)}")
        assert str(said.value).endswith(f", elasticrl incidents{told}")
    with pytest.raises(NotFound, match="no daemon of the job torn here"):
        daemon(tmp_path, "torn")


def test_a_runtime_directory_of_somebody_else_is_an_error_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `su alice`, which leaves XDG_RUNTIME_DIR as it was."""
    if os.geteuid():
        pytest.skip("only root can be somebody else for a moment")
    above = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(above / "run"))
    try:
        os.seteuid(65534)
        with pytest.raises(NotFound, match="no daemon here"):
            daemon()
        with pytest.raises(NotOurs, match=r"cannot be made \(Permission denied\)\. Set XDG_RUNTIME_DIR"):
            made_private(private_run_dir())
    finally:
        os.seteuid(0)
        above.rmdir()


def test_what_is_written_for_nobody_else_follows_no_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".agent.json.new").symlink_to(victim)
    write_private(tmp_path / "agent.json", "{}")
    assert victim.read_text() == "precious"
    assert not (tmp_path / "agent.json").is_symlink()
    assert (tmp_path / "agent.json").stat().st_mode & 0o777 == 0o600


def test_a_run_that_has_just_begun_is_not_to_be_started_again(tmp_path: Path) -> None:
    # Found by a reader: in the second after the command "no daemon of the job mine here; start it" stood there.
    (tmp_path / "mine").mkdir()
    with (tmp_path / "mine" / RUN_LOCK).open("ab") as lock:
        for job in ("mine", None):
            with pytest.raises(NotFound, match=r"no daemon .*start it"):
                daemon(tmp_path, job)
        fcntl.flock(lock, fcntl.LOCK_EX)
        for job in ("mine", None):
            with pytest.raises(NotFound, match="`elasticrl run` of mine has just begun, or is ending: ask again"):
                daemon(tmp_path, job)
        with pytest.raises(NotFound, match="no daemon of the job other here"):
            daemon(tmp_path, "other")
        note = {
            "job": "mine",
            "state": "FINISHED",
            "step": 4,
            "committed": 4,
            "reason": "so",
            "at": 1.0,
            "left": "/a/b/c",
        }
        (tmp_path / "mine" / "ended.json").write_text(json.dumps(note))
        with pytest.raises(NotFound, match="has just begun"):
            daemon(tmp_path, "mine")
