"""A shard whose writing failed: those who wait for it hear of that, and the next checkpoint is written as ever."""

from pathlib import Path

import pytest
import torch
from state_jobs import FACTS, Job

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
    for rank in (1, 0):
        savers[rank].save(snapshot(rank, 20), finish=rank == 0)
    (outcome,) = savers[0].wait(60)
    assert outcome.manifest == "step-00000020-g1", outcome.why
    for saver in savers:
        saver.close(60.0)
    for vault in vaults:
        vault.close()
