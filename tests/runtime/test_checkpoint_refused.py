"""A shard whose writing failed: those who wait for it hear of that, and the next checkpoint is written as ever."""

import textwrap
from pathlib import Path

import pytest
from state_jobs import FACTS, Job
from vault_nodes import in_own_mounts, until

from elasticrl.runtime.checkpoint.saver import Saver
from elasticrl.runtime.vault.client import Ticket, Vault
from elasticrl.runtime.vault.errors import CheckpointError
from elasticrl.runtime.vault.version import Version


def test_a_shard_that_met_a_full_disk_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    job = Job(seed=1).train(2)
    vaults = [Vault(tmp_path / f"n{rank}", job="job", node=f"n{rank}") for rank in range(2)]
    well = Saver(str(tmp_path / "ck"), facts=FACTS)
    monkeypatch.setenv("ELASTICRL_FAULT", "checkpoint.tensor@1:full")  # for the writer of rank 1, once
    savers = [well, Saver(str(tmp_path / "ck"), facts=FACTS)]
    monkeypatch.delenv("ELASTICRL_FAULT")

    def snapshot(rank: int, step: int) -> Ticket:
        job.parts.part("rollout").__init__(rank, 2)  # type: ignore[misc]
        ticket = vaults[rank].snapshot(
            job.parts.capture(rank, 2), version=Version(step), generation=1, shard=rank, world=2
        )
        ticket.wait_sealed(10)
        return ticket

    savers[1].save(snapshot(1, 10), finish=False)
    savers[0].save(snapshot(0, 10), finish=True)
    (failed,) = savers[1].wait(60)
    assert not failed.ok, failed
    (outcome,) = savers[0].wait(60)  # checkpoint.timeout is half an hour
    assert not outcome.ok
    assert "the writing of 1 failed" in outcome.why
    staging = tmp_path / "ck" / ".saving-step-00000010-g1"
    assert [path.name for path in staging.iterdir()] == ["data-0001.refused"], "what failed keeps no room"
    for rank in (1, 0):
        savers[rank].save(snapshot(rank, 20), finish=rank == 0)
    (outcome,) = savers[0].wait(60)
    assert outcome.manifest == "step-00000020-g1", outcome.why
    for saver in savers:
        saver.close(60.0)
    for vault in vaults:
        vault.close()


def test_a_shard_of_which_its_disk_cannot_even_say_that_it_fails_is_not_waited_for(tmp_path: Path):
    """Found live: one node's disk had turned read-only, and nothing was saved until `checkpoint.timeout`."""
    vault = Vault(tmp_path / "n0", job="job", node="n0")
    job = Job(seed=1).train(2)
    saver = Saver(str(tmp_path / "ck"), facts=FACTS)

    def save(step: int) -> None:
        job.parts.part("rollout").__init__(0, 2)  # type: ignore[misc]
        ticket = vault.snapshot(job.parts.capture(0, 2), version=Version(step), generation=1, shard=0, world=2)
        ticket.wait_sealed(10)
        saver.save(ticket, finish=True)

    save(10)
    save(20)  # waits behind it
    saver.lost(Version(20), generation=1, shard=1)
    saver.lost(Version(30), generation=1, shard=1)  # nobody waits for that
    with pytest.raises(CheckpointError, match="still under way"):
        saver.wait(3)
    saver.lost(Version(10), generation=1, shard=1)
    found = saver.wait(60)
    assert [(outcome.version.step, outcome.ok) for outcome in found] == [(10, False), (20, False)]
    assert all("(missing: 1; the writing of 1 failed)" in outcome.why for outcome in found)
    saver.close(60.0)
    vault.close()


def test_what_the_others_wrote_of_a_failed_save_goes_when_the_next_one_begins(tmp_path: Path):
    job = Job(seed=1).train(2)
    vaults = [Vault(tmp_path / f"n{rank}", job="job", node=f"n{rank}") for rank in range(2)]
    env = {"ELASTICRL_FAULT": "checkpoint.tensor@2:full"}  # for the one that publishes, once
    savers = [Saver(str(tmp_path / "ck"), facts=FACTS, env=env), Saver(str(tmp_path / "ck"), facts=FACTS)]

    def save(rank: int, step: int) -> None:
        job.parts.part("rollout").__init__(rank, 2)  # type: ignore[misc]
        ticket = vaults[rank].snapshot(
            job.parts.capture(rank, 2), version=Version(step), generation=1, shard=rank, world=2
        )
        ticket.wait_sealed(10)
        savers[rank].save(ticket, finish=rank == 0)

    for rank in (0, 1):
        save(rank, 10)
    assert [saver.wait(60)[0].ok for saver in savers] == [False, True]
    staging = tmp_path / "ck" / ".saving-step-00000010-g1"
    assert {path.name for path in staging.iterdir()} == {"data-0000.refused", "data-0001.distcp", "data-0001.json"}
    save(0, 20)
    until(lambda: not staging.exists(), "nobody will finish step 10", 30)
    save(1, 20)
    (outcome,) = savers[0].wait(60)
    assert outcome.manifest == "step-00000020-g1", outcome.why
    assert [path.name for path in (tmp_path / "ck").iterdir()] == ["step-00000020-g1"]
    for one in (*savers, *vaults):
        one.close()


def test_a_save_that_filled_the_disk_gives_it_back(tmp_path: Path):
    """In a mount namespace of its own, on a tmpfs that somebody else has filled but for a few pages."""
    script = textwrap.dedent(
        f"""
        import os, subprocess, sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from state_jobs import FACTS, Job
        from test_checkpoint_saver import Saver, Vault, snapshot
        root = Path({str(tmp_path)!r})
        disk = root / "disk"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(disk)], check=True)
        filler = disk / "filler"
        filler.write_bytes(b"x" * (512 - 12) * 1024)
        free = os.statvfs(disk).f_bfree
        assert free
        vault, job = Vault(root / "vault", job="job", node="n0"), Job(seed=1).train(2)
        saver = Saver(str(disk / "ck"), facts=FACTS)
        saver.save(snapshot(vault, job, 10), finish=True)
        (outcome,) = saver.wait(60)
        print(outcome.why)
        print(os.statvfs(disk).f_bfree - free)
        filler.unlink()
        saver.save(snapshot(vault, job, 20), finish=True)
        (outcome,) = saver.wait(60)
        print(outcome.manifest)
        saver.close()
        vault.close()
        """
    )
    why, less, manifest = in_own_mounts(script)
    assert "No space left on device" in why
    assert int(less) == 0
    assert manifest == "step-00000020-g1"


def test_a_ledger_is_begun_when_its_disk_takes_files_again(tmp_path: Path):
    """Found live: a worker that took a dead one's place where the disk had turned read-only died of it, and so the job."""
    script = textwrap.dedent(
        f"""
        import subprocess, time
        from pathlib import Path
        from elasticrl.runtime.data.cursor import SampleId
        from elasticrl.runtime.data.ledger import AGAIN_S, Ledger, decode
        from elasticrl.runtime.vault.errors import DataError
        from elasticrl.runtime.vault.version import Version
        disk = Path({str(tmp_path)!r}) / "disk"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "none", str(disk)], check=True)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        ledger = Ledger(disk, writer="n0-w0")
        print(ledger.files)
        for act in (lambda: ledger.begin(generation=2, lineage=(), segments=(), lanes=[0]),
                    lambda: ledger.record(Version(3), 0, [SampleId(0, 7)])):
            try:
                act()
            except DataError as error:
                print(error)
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        time.sleep(AGAIN_S)  # the pace of its attempts is what is tested, not a wait for something
        ledger.catch_up()
        print(len(ledger.files))
        ledger.close()
        (path,) = (disk / "ledger").iterdir()
        print(len([decode(line) for line in path.read_bytes().splitlines(keepends=True)]))
        """
    )
    files, begun, recorded, after, lines = in_own_mounts(script)
    assert files == "()"
    assert "Read-only file system" in begun
    assert "Read-only file system" in recorded
    assert (after, lines) == ("1", "2"), "the generation and the record"
