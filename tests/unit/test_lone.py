"""Without a daemon: whose memory lies in a vault, and that one process at a time has it."""

import os
from pathlib import Path

import pytest

from elasticrl.runtime.lone import claim, mark
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.vault.errors import DataError
from elasticrl.runtime.vault.slots import clean, files


def test_runs_of_one_name_in_other_folders_have_other_vaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    found = set()
    for folder in ("a", "b", "a"):
        monkeypatch.chdir(tmp_path / folder)
        found.add(mark(Path("run/train")))
    assert len(found) == 2


def test_one_process_at_a_time_has_a_run(tmp_path: Path) -> None:
    vault, run = tmp_path / "vault/train/n0", tmp_path / "run"
    held = claim(vault, run)
    with pytest.raises(Misuse, match=rf"another process makes this run \({run}, pid {os.getpid()}\): end it first"):
        claim(vault, run)
    held.close()
    claim(vault, run).close()


def test_a_forked_child_keeps_no_run_from_who_begins_it_again(tmp_path: Path) -> None:
    vault, run = tmp_path / "vault/train/n0", tmp_path / "run"
    held = claim(vault, run)
    (ours, theirs), (hears, tells) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:  # a loader's worker, which lives on for a while
        os.close(theirs)
        os.write(tells, b"!")
        os.read(ours, 1)
        os._exit(0)
    try:
        os.read(hears, 1)
        held.close()
        claim(vault, run).close()
    finally:
        os.close(theirs)
        os.waitpid(child, 0)
        for end in (ours, hears, tells):
            os.close(end)


def test_what_lies_there_of_another_run_goes_and_what_is_of_this_one_stays(tmp_path: Path) -> None:
    vault, run = tmp_path / "vault/train/n0", tmp_path / "run"
    claim(vault, run).close()
    shard = vault / "n0+w0+0.shard"
    shard.write_bytes(b"x" * 4096)
    claim(vault, run).close()
    assert [path for path, _ in files(vault)] == [shard], "it was killed, and goes on"
    for file in run.iterdir():
        file.unlink()
    run.rmdir()  # to begin anew
    claim(vault, run).close()
    assert list(files(vault)) == []
    clean(vault)
    assert not vault.exists()


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=rf"cannot be begun in {tmp_path}/file/run .*checkpoint.dir"):
        claim(tmp_path / "vault/train/n0", tmp_path / "file/run")
