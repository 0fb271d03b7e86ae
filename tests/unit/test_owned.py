"""Folders that somebody else made first: nothing in them is believed, nothing is written into them."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from elasticrl.agent.owned import strange, unsafe, write_private
from elasticrl.cli import find
from elasticrl.cli.serve import vaults_of
from elasticrl.daemon.life import Home
from elasticrl.daemon.refusal import Refusal
from elasticrl.daemon.vault import dismiss
from elasticrl.ppo.rollout.attend import Attendant, Limits
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
