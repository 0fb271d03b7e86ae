"""The background writer as a real process: it outlives its worker, dies alone, and never makes training wait."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from state_jobs import FACTS, Job, same
from vault_nodes import until

from chaos.patience import patience
from elasticrl.runtime.checkpoint.load import open_checkpoint
from elasticrl.runtime.checkpoint.place import place
from elasticrl.runtime.checkpoint.saver import Retention, Saver
from elasticrl.runtime.checkpoint.shelf import listing, mark_committed, verify
from elasticrl.runtime.checkpoint.writer import Hope, Inbox, save
from elasticrl.runtime.data.ledger import Ledger
from elasticrl.runtime.vault.client import Ticket, Vault
from elasticrl.runtime.vault.errors import CheckpointError
from elasticrl.runtime.vault.version import Version


@pytest.fixture
def vault(tmp_path: Path) -> Iterator[Vault]:
    made = Vault(tmp_path / "vault", job="job", node="n0")
    yield made
    made.close()


def snapshot(vault: Vault, job: Job, step: int, *, shard: int = 0, world: int = 1, generation: int = 1) -> Ticket:
    ticket = vault.snapshot(
        job.parts.capture(shard, world), version=Version(step), generation=generation, shard=shard, world=world
    )
    ticket.wait_sealed(10)
    return ticket


def test_a_save_is_written_in_the_background_from_the_version_it_was_asked_for(vault: Vault, tmp_path: Path):
    job = Job(seed=1).train(2)
    before = job.state()
    saver = Saver(str(tmp_path / "ck"), facts=FACTS)
    ticket = snapshot(vault, job, 10)
    began = time.thread_time()  # waiting for a busy core is nobody's fault
    saver.save(ticket, finish=True)
    assert time.thread_time() - began < 0.02
    for step in range(11, 20):  # training goes on; the writer is still importing torch
        snapshot(vault, job.train(1), step)
    (outcome,) = saver.wait(60)
    assert outcome.ok, outcome.why
    assert outcome.manifest == "step-00000010-g1"
    other = Job(seed=2)
    other.parts.restore(open_checkpoint(place(tmp_path / "ck"), outcome.manifest))
    assert same(other.state(), before)
    # One writer, several saves; retention after a commit, also in the background.
    for step in (20, 30, 40):
        saver.save(snapshot(vault, job, step), finish=True, parent=outcome.manifest)
        (done,) = saver.wait(30)
        assert done.manifest is not None
        mark_committed(place(tmp_path / "ck"), done.manifest)
    saver.prune(Retention(keep_last=1), generation=1, commit=done.manifest)
    until(lambda: [e.version.step for e in listing(place(tmp_path / "ck"))] == [40], "old checkpoints are removed", 20)
    saver.close()


def test_two_workers_write_one_checkpoint_and_one_of_them_publishes_it(tmp_path: Path):
    job = Job(seed=1).train(2)
    vaults = [Vault(tmp_path / f"n{rank}", job="job", node=f"n{rank}") for rank in range(2)]
    savers = [Saver(str(tmp_path / "ck"), facts=FACTS) for _ in range(2)]
    for rank in (1, 0):
        job.parts.part("rollout").__init__(rank, 2)  # type: ignore[misc]
        ticket = snapshot(vaults[rank], job, 10, shard=rank, world=2)
        savers[rank].save(ticket, finish=rank == 0)
    (outcome,) = savers[0].wait(60)
    assert outcome.manifest == "step-00000010-g1", outcome.why
    assert savers[1].wait(30)[0].manifest is None
    assert verify(place(tmp_path / "ck"), outcome.manifest) == ()
    for one in (*savers, *vaults):
        one.close()


def test_a_save_whose_gang_broke_up_gives_way_to_a_later_ones(vault: Vault, tmp_path: Path):
    job = Job(seed=1).train(1)
    saver = Saver(str(tmp_path / "ck"), facts=FACTS)
    saver.save(snapshot(vault, job, 10, world=2), finish=True)  # the other of the two never saves: it died
    assert saver.poll() == ()
    saver.save(snapshot(vault, job, 20, generation=2), finish=True)
    first, second = sorted(saver.wait(60), key=lambda outcome: outcome.generation)
    assert not first.ok
    assert "generation 2 saves already" in first.why
    assert second.manifest == "step-00000020-g2", second.why
    saver.close()


def test_a_writer_that_is_killed_is_an_outcome_and_the_next_save_gets_a_new_one(vault: Vault, tmp_path: Path):
    job = Job(seed=1).train(1)
    saver = Saver(str(tmp_path / "ck"), facts=FACTS)
    saver.save(snapshot(vault, job, 10), finish=True)
    os.kill(saver.pid, signal.SIGKILL)
    (outcome,) = saver.wait(60)
    assert not outcome.ok
    assert "died (signal 9); older checkpoints are untouched" in outcome.why
    assert listing(place(tmp_path / "ck")) == ()
    saver.save(snapshot(vault, job, 11), finish=True)
    assert saver.wait(60)[0].ok
    saver.close()


def test_writers_that_are_killed_and_replaced_before_anybody_asks_hide_no_outcome(vault: Vault, tmp_path: Path):
    job = Job(seed=1).train(1)
    saver = Saver(str(tmp_path / "ck"), facts=FACTS)
    for step in (10, 11, 12):  # more than may be under way at once
        saver.save(snapshot(vault, job, step), finish=True)
        kill(saver.pid)
    saver.save(snapshot(vault, job, 13), finish=True)
    outcomes = saver.wait(60)
    assert [(outcome.version.step, outcome.ok) for outcome in outcomes] == [
        (10, False), (11, False), (12, False), (13, True),
    ]  # fmt: skip
    assert all("died (signal 9)" in outcome.why for outcome in outcomes[:3])
    assert saver.busy_s == 0
    assert saver.poll() == ()
    saver.close()


def test_a_writer_that_refuses_a_torn_snapshot_keeps_no_file_open(tmp_path: Path):
    (tmp_path / "torn").write_bytes(bytes(9000))
    files = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in ("torn", "ledger")]
    asked = {"op": "save", "step": 3, "update": 0, "generation": 1, "path": str(tmp_path / "torn")}
    with socket.socket() as unused:
        answer = save(asked, files[0], files[1:], Hope(Inbox(unused), asked, 1.0))
    assert not answer["ok"]
    assert "the snapshot is " in answer["why"]
    for file in files:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)


def test_only_a_save_of_a_later_generation_says_that_a_gang_broke_up(monkeypatch: pytest.MonkeyPatch):
    """A gang that grows is told of commits, and prunes, under the next one's number."""
    monkeypatch.setattr("elasticrl.runtime.checkpoint.writer.GRACE_S", 0.0)
    asked = {"op": "save", "step": 3, "update": 0, "generation": 1}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        hope = Hope(Inbox(theirs), asked, 60.0)
        for op in ("committed", "prune"):
            ours.send(json.dumps({"op": op, "generation": 2}).encode())
        assert [hope(), hope()] == ["", ""]
        ours.send(json.dumps({**asked, "generation": 2}).encode())
        assert [hope(), hope()][1].startswith("generation 2 saves already")


def test_a_save_that_met_a_full_disk_clears_away_what_an_earlier_generation_left(vault: Vault, tmp_path: Path):
    job, left = Job(seed=1).train(1), tmp_path / "ck/.saving-step-00000005-g0"
    for fault, stays in (("checkpoint.tensor@2:readonly", True), ("checkpoint.tensor@2:full", False)):
        left.mkdir(parents=True, exist_ok=True)
        saver = Saver(str(tmp_path / "ck"), facts=FACTS, env={"ELASTICRL_FAULT": fault})
        saver.save(snapshot(vault, job, 10), finish=True)
        (outcome,) = saver.wait(60)
        assert not outcome.ok
        assert left.exists() == stays
        saver.close()


def test_what_a_writer_said_before_it_was_killed_is_heard(vault: Vault, tmp_path: Path):
    job = Job(seed=1).train(1)
    saver = Saver(str(tmp_path / "ck"), facts=FACTS)
    saver.save(snapshot(vault, job, 10), finish=True)
    assert select.select([saver._sock], [], [], 60)[0], "the writer has answered"
    os.kill(saver.pid, signal.SIGSTOP)
    saver.committed("step-00000010-g1", Retention(), generation=1)  # it dies with requests unread
    kill(saver.pid)
    saver.save(snapshot(vault, job, 11), finish=True)
    first, second = saver.wait(60)
    assert first.manifest == "step-00000010-g1", first.why
    assert second.manifest == "step-00000011-g1", second.why
    saver.close()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    until(lambda: _state(pid) == "Z", "the writer is dead", 10)


def test_a_save_outlives_its_worker(tmp_path: Path):
    """kill -9 of the worker right after it asked: the data is in the vault's file, and the writer has that file."""
    script = textwrap.dedent(
        f"""
        import os, signal, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from state_jobs import FACTS, Job
        from test_checkpoint_saver import Saver, Vault, snapshot
        root = Path({str(tmp_path)!r})
        vault = Vault(root / "vault", job="job", node="n0")
        saver = Saver(str(root / "ck"), facts=FACTS)
        saver.save(snapshot(vault, Job(seed=1).train(2), 10), finish=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    where = place(tmp_path / "ck")
    until(lambda: where.names() == ["step-00000010-g1"], "the writer publishes", 30)
    assert verify(where, "step-00000010-g1") == ()


def test_a_disk_that_refuses_is_an_outcome_with_a_sentence(vault: Vault, tmp_path: Path):
    job = Job(seed=1).train(1)
    (tmp_path / "ck").write_text("a file where the directory should be")
    saver = Saver(str(tmp_path / "ck"), facts=FACTS)
    saver.save(snapshot(vault, job, 10), finish=True)
    (outcome,) = saver.wait(60)
    assert not outcome.ok
    assert "Training goes on" in outcome.why
    (tmp_path / "ck").unlink()
    saver.save(snapshot(vault, job, 11), finish=True)
    (outcome,) = saver.wait(30)
    assert outcome.ok
    saver.close()


def test_a_disk_that_hangs_costs_nothing_but_the_checkpoints(vault: Vault, tmp_path: Path):
    """The writer stops at its first write, as it would on a dead server: saves are refused by name, snapshots go on."""
    job = Job(seed=1).train(1)
    saver = Saver(str(tmp_path / "ck"), facts=FACTS, env={"ELASTICRL_FAULT": "checkpoint.write:stop"})
    for step in (10, 11):
        saver.save(snapshot(vault, job, step), finish=True)
    with pytest.raises(CheckpointError, match=r"2 saves to .* are still under way, the oldest for \d+ s"):
        saver.save(snapshot(vault, job, 12), finish=True)
    for step in range(13, 20):
        snapshot(vault, job, step)
    assert saver.busy_s > 0
    with pytest.raises(CheckpointError, match="still under way after"):
        saver.wait(0.1)
    pid = saver.pid
    try:
        until(lambda: _state(pid) == "T", "the writer has come to its fault", 30)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert [outcome.ok for outcome in saver.wait(60)] == [True, True]
    saver.close()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_a_version_that_is_gone_from_the_vault_is_not_saved_under_its_name(vault: Vault, tmp_path: Path):
    job = Job(seed=1)
    saver = Saver(str(tmp_path / "ck"), facts=FACTS)
    old = snapshot(vault, job, 1)
    for step in range(2, 6):
        snapshot(vault, job, step)
    with pytest.raises(CheckpointError, match=r"Step 1\.0 is not saved: n0\+w0\+\d\.shard is another version by now"):
        saver.save(old, finish=True)
    saver.close()


def test_the_ledger_is_flushed_by_the_writer_and_a_disk_that_refuses_it_costs_the_save_alone(
    vault: Vault, tmp_path: Path
):
    ledger = Ledger(tmp_path, writer="w0")
    trace = tmp_path / "trace"
    job = Job(seed=1)
    saver = Saver(str(tmp_path / "ck"), facts=FACTS, env={"ELASTICRL_FAULT_TRACE": str(trace)})
    saver.save(snapshot(vault, job, 1), finish=True, flush=ledger.flushing(Version(1)))
    assert saver.wait(60)[0].ok
    points = [line.split("\t")[0] for line in trace.read_text().splitlines()]
    assert points.index("ledger.fsync") < points.index("checkpoint.begin"), "its disk has the ledger before the shard"
    saver.close()
    saver = Saver(str(tmp_path / "ck"), facts=FACTS, env={"ELASTICRL_FAULT": "ledger.fsync:full"})
    saver.save(snapshot(vault, job, 2), finish=True, flush=ledger.flushing(Version(1)))
    (outcome,) = saver.wait(60)
    assert not outcome.ok
    assert "The ledger cannot be flushed to its disk (No space left on device)" in outcome.why
    assert [entry.version.step for entry in listing(place(tmp_path / "ck"))] == [1]
    saver.close()
    ledger.close()


def test_a_writer_whose_whole_gang_is_gone_does_not_wait_on_with_its_shards_memory(vault: Vault, tmp_path: Path):
    saver = Saver(str(tmp_path / "ck"), facts=FACTS, timeout_s=600.0, orphan_s=1.0)
    saver.save(snapshot(vault, Job(seed=1).train(1), 10, world=2), finish=True)  # the other of the two never saves
    pid = saver.pid
    until((tmp_path / "ck" / ".saving-step-00000010-g1" / "data-0000.json").exists, "its own shard is staged", 60)
    assert saver.poll() == ()
    saver.close(60)
    assert not Path(f"/proc/{pid}").exists()
    assert listing(place(tmp_path / "ck")) == ()


def test_what_a_worker_asked_for_before_it_went_does_not_hide_that_it_has_gone(vault: Vault, tmp_path: Path):
    saver = Saver(str(tmp_path / "ck"), facts=FACTS, timeout_s=600.0, orphan_s=1.0)
    saver.save(snapshot(vault, Job(seed=1).train(1), 10, world=2), finish=True)  # the other of the two never saves
    saver.committed("step-00000005-g1", Retention(), generation=1)  # it waits behind the save
    pid = saver.pid
    until((tmp_path / "ck" / ".saving-step-00000010-g1" / "data-0000.json").exists, "its own shard is staged", 60)
    saver.close(30)
    assert not Path(f"/proc/{pid}").exists()


def test_a_writer_waits_once_for_all_that_a_gang_left_behind(vault: Vault, tmp_path: Path):
    saver = Saver(str(tmp_path / "ck"), facts=FACTS, timeout_s=600.0, orphan_s=6.0)
    job = Job(seed=1).train(1)
    saver.save(snapshot(vault, job, 10, world=2), finish=True)  # the other of the two never saves
    saver.save(snapshot(vault, job, 20, world=2), finish=True)
    until((tmp_path / "ck" / ".saving-step-00000010-g1" / "data-0000.json").exists, "its own shard is staged", 60)
    pid, left = saver.pid, time.monotonic()
    saver.close(60)
    assert not Path(f"/proc/{pid}").exists()
    assert 6.0 <= time.monotonic() - left < patience(11.0)


def test_a_commit_that_waits_behind_a_save_does_not_hide_that_a_later_gang_saves(vault: Vault, tmp_path: Path):
    job = Job(seed=1).train(1)
    saver = Saver(str(tmp_path / "ck"), facts=FACTS, timeout_s=600.0)
    saver.save(snapshot(vault, job, 10, world=2), finish=True)  # the other of the two never saves: it died
    saver.committed("step-00000005-g1", Retention(), generation=1)
    saver.save(snapshot(vault, job, 20, generation=2), finish=True)
    first, second = sorted(saver.wait(60), key=lambda outcome: outcome.generation)
    assert "generation 2 saves already" in first.why
    assert second.ok, second.why
    saver.close()
