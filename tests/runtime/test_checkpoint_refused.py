"""A shard whose writing failed: those who wait for it hear of that, and the next checkpoint is written as ever."""

import textwrap
from pathlib import Path

import pytest
import torch
from state_jobs import FACTS, Job
from vault_nodes import in_own_mounts, until

from elasticrl.runtime.checkpoint.saver import Saver
from elasticrl.runtime.vault.client import Ticket, Vault
from elasticrl.runtime.vault.version import Version


def test_a_shard_that_met_a_full_disk_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    torch.set_num_threads(1)
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


def test_what_the_others_wrote_of_a_failed_save_goes_when_the_next_one_begins(tmp_path: Path):
    torch.set_num_threads(1)
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
