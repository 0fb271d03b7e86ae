"""Folders that somebody else made first: nothing in them is believed, nothing is written into them."""

import asyncio
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from elasticrl.base.owned import appended, foreign, made_closed, strange, unsafe, write_private
from elasticrl.cli import find
from elasticrl.cli.serve import settled, vaults_of
from elasticrl.config import Tree
from elasticrl.config.cluster import Job, Telemetry
from elasticrl.config.cluster import Node as NodeSection
from elasticrl.daemon.folders import not_ours
from elasticrl.daemon.life import Home
from elasticrl.daemon.refusal import Refusal
from elasticrl.daemon.vault import dismiss
from elasticrl.ppo.rollout.attend import Attendant, Limits
from elasticrl.runtime.checkpoint.place import Local
from elasticrl.runtime.chronicle import Chronicle
from elasticrl.runtime.data.ledger import Ledger
from elasticrl.runtime.vault.errors import VaultError
from elasticrl.runtime.vault.slots import prepare

OTHER = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


def theirs(folder: Path) -> None:
    folder.mkdir(parents=True)
    os.chown(folder, OTHER, OTHER)


def open_to_all(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)


def linked(folder: Path) -> None:
    """A link of theirs to a folder of ours: they can let it lead elsewhere later."""
    own = folder.with_name("own")
    own.mkdir(parents=True)
    folder.symlink_to(own)
    os.lchown(folder, OTHER, OTHER)


def group_s(folder: Path) -> None:
    folder.mkdir(parents=True)
    os.chown(folder, 0, OTHER)
    folder.chmod(0o770)


WAYS = [theirs, open_to_all, linked, group_s]


@pytest.mark.parametrize("make", WAYS)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_runtime_directory_that_others_can_change_is_refused(
    tmp_path: Path, make: Callable[[Path], None], depth: int
) -> None:
    # Found by reading: under /tmp a local user could say what the daemon's agent runs.
    home = tmp_path / "run" / "job" / "n0"
    make([home, *home.parents][depth])
    with pytest.raises(Refusal, match=r"could have this node run other programs.*node\.run_dir"):
        Home(home)


@pytest.mark.parametrize("make", WAYS)
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("key", ["node.state_dir", "telemetry.log_dir"])
def test_folders_for_state_and_logs_that_others_can_change_are_refused(
    tmp_path: Path, make: Callable[[Path], None], depth: int, key: str
) -> None:
    # Found from outside: a forged etcd.json had root adopt an etcd of theirs, tell it the job's secret and end a process.
    folder = tmp_path / key / "job" / "n0"
    make([folder, *folder.parents][depth])
    bases = {name: str(tmp_path / name) for name in ("node.state_dir", "telemetry.log_dir")}
    tree = Tree(
        job=Job(name="job"),
        node=NodeSection(state_dir=bases["node.state_dir"]),
        telemetry=Telemetry(log_dir=bases["telemetry.log_dir"]),
    )
    why = not_ours(tree, "n0")
    assert "could have this job believe what is not so" in why
    assert f"set {key} to" in why
    assert not_ours(tree, "n1") == ("" if depth == 0 else why)


def test_a_run_with_folders_of_somebody_else_is_refused_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs(tmp_path / "state")
    folders = [f"node.state_dir={tmp_path}/state", f"telemetry.log_dir={tmp_path}/log", f"vault.dir={tmp_path}/memory"]
    config = Path(__file__).parents[2] / "configs/one-machine.yaml"
    with pytest.raises(typer.Exit):
        settled(config, folders, 1)
    assert "set node.state_dir to a folder of your own" in capsys.readouterr().err


def test_of_the_folders_of_a_job_only_the_base_may_be_crowded(tmp_path: Path) -> None:
    for depth, refused in ((2, False), (1, True), (0, True)):
        folder = tmp_path / str(depth) / "base" / "job" / "n0"
        folder.mkdir(parents=True)
        [folder, *folder.parents][depth].chmod(0o1777)
        assert bool(foreign(folder)) is refused


def test_no_log_is_written_to_where_a_link_leads(tmp_path: Path) -> None:
    # Found from outside: a link in a log folder made root append to a file that is closed to others.
    closed = tmp_path / "closed"
    closed.touch(0o600)
    (tmp_path / "agent.log").symlink_to(closed)
    with pytest.raises(OSError, match="symbolic links"):
        appended(tmp_path / "agent.log")
    assert closed.read_text() == ""
    with appended(tmp_path / "other.log") as log:
        log.write(b"line")
    assert (tmp_path / "other.log").read_text() == "line"


def test_one_s_own_and_a_group_of_one_s_own_are_no_others(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        Home(tmp_path / "run" / "job" / "n0")
        Home(tmp_path / "run" / "job" / "n0")
        (tmp_path / "shared").mkdir(0o770)
        Home(tmp_path / "shared" / "job" / "n0")
    finally:
        os.umask(before)
    sticky = tmp_path / "tmp"
    sticky.mkdir()
    sticky.chmod(0o1777)
    Home(sticky / "job" / "n0")
    assert [strange(tmp_path / "run" / name) for name in ("", "job", "job/n0")] == [""] * 3


def ledger(job: Path) -> None:
    Ledger(job, writer="n0").close()


def chronicle(job: Path) -> None:
    Chronicle(job, "n0").add(step=1, generation=1, digest="00")


def checkpoint(job: Path) -> None:
    Local(job).begin("step-00000001-g1")


@pytest.mark.parametrize("make", [made_closed, ledger, chronicle, checkpoint])
@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o750), (0o002, 0o770), (0o077, 0o700)])
def test_a_job_s_folder_is_made_closed_to_others_and_one_that_is_there_is_left(
    tmp_path: Path, make: Callable[[Path], None], mask: int, mode: int
) -> None:
    # Found by reading: prompts, answers and weights were open to every user of a machine where the umask is the usual one.
    before = os.umask(mask)
    try:
        make(tmp_path / "new" / "toy")
        (tmp_path / "there").mkdir()
        (tmp_path / "there").chmod(0o755)
        make(tmp_path / "there")
    finally:
        os.umask(before)
    for folder, found in (("new", mode), ("new/toy", mode), ("there", 0o755)):
        assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == found


def test_what_is_private_is_not_written_into_a_file_that_lay_there_before(tmp_path: Path) -> None:
    waiting = tmp_path / ".agent.json.new"
    waiting.touch(0o666)
    with waiting.open() as theirs:
        write_private(tmp_path / "agent.json", "geheim")
        assert theirs.read() == ""
    assert (tmp_path / "agent.json").read_text() == "geheim"
    assert (tmp_path / "agent.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("make", WAYS)
@pytest.mark.parametrize("depth", [0, 1])
def test_a_vault_below_a_folder_that_others_can_change_is_refused(
    tmp_path: Path, make: Callable[[Path], None], depth: int
) -> None:
    vault = tmp_path / "vault" / "job" / "n0"
    make(vault.parents[depth])
    with pytest.raises(VaultError, match=r"in the vault's place. Set vault\.dir to another place"):
        prepare(vault)


def test_a_socket_below_tmp_is_asked_only_where_the_folder_is_its_user_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "run_dirs", lambda _=None: (tmp_path / "mine", tmp_path / "run"))
    monkeypatch.setattr(find, "private_run_dir", lambda: tmp_path / "run")
    theirs(tmp_path / "run")
    socket = tmp_path / "run" / "job" / "n0" / "control.sock"
    socket.parent.mkdir(parents=True)
    socket.touch()
    assert find.sockets() == ()
    os.chown(tmp_path / "run", 0, 0)
    assert find.sockets() == (socket,)


def test_nothing_below_a_folder_of_others_is_removed_and_no_vault_there_is_believed(tmp_path: Path) -> None:
    """Found by reading: the vault refused, and then the run's end removed what their link led to."""
    victim = tmp_path / "home"
    (victim / "papers").mkdir(parents=True)
    (victim / "papers/one").touch()
    base = tmp_path / "memory"
    theirs(base)
    (base / "job").symlink_to(victim)
    os.lchown(base / "job", OTHER, OTHER)
    assert vaults_of(base / "job") == []
    asyncio.run(dismiss(base / "job/papers", within_s=0.2))
    assert (victim / "papers/one").exists()
    assert "belongs to user" in unsafe(base / "job/papers")
    ours = tmp_path / "own/job"
    ours.mkdir(parents=True)
    (ours / "n0").mkdir(mode=0o700)
    assert vaults_of(ours) == [ours / "n0"]
    assert unsafe(ours / "n0") == unsafe(ours / "n1") == ""
    asyncio.run(dismiss(ours / "n0", within_s=0.2))
    assert not ours.exists(), "it was the last"


def test_an_engine_s_folder_that_others_made_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "memory"
    theirs(base / "job")
    limits = Limits(start_s=1.0, sync_s=1.0, health_every_s=1.0, health_s=1.0, starts=1)
    with pytest.raises(VaultError, match="belongs to user"):
        Attendant(base / "job/n0.engine", None, limits, python=None, say=print)  # type: ignore[arg-type] # never asked
