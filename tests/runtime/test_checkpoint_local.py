"""Checkpoints on the nodes' own disks: all memory is lost, no disk has the whole, and the state comes back bit for bit."""

from pathlib import Path

import pytest
import torch
from state_jobs import FACTS, Job, pinned, same, snapshots
from vault_nodes import cluster, ring

from elasticrl.runtime.checkpoint.load import open_checkpoint
from elasticrl.runtime.checkpoint.local import bring, held
from elasticrl.runtime.checkpoint.place import Place, place
from elasticrl.runtime.checkpoint.save import finish, write_shard
from elasticrl.runtime.checkpoint.shelf import mark_committed, prune
from elasticrl.runtime.vault.client import Vault
from elasticrl.runtime.vault.errors import StateError, VaultError
from elasticrl.runtime.vault.holdings import Whole, newest_whole
from elasticrl.runtime.vault.version import Version

NODES = ("n0", "n1", "n2")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def disk(root: Path, node: str) -> Place:
    return place(root / "disks" / node)


def save(root: Path, job: Job, step: int, *, lost: tuple[str, ...] = ()) -> None:
    """Each node writes its own shard to its own disk and publishes it; some never get to it."""
    paths = snapshots(root / f"memory-{step}", job, len(NODES), step=step)
    for rank, (node, path) in enumerate(zip(NODES, paths, strict=True)):
        if node in lost:
            continue
        where = disk(root, node)
        with pinned(path) as shard:
            write_shard(where, shard)
            stamp = shard.sealed.stamp
        manifest = finish(
            where,
            version=stamp.version,
            generation=stamp.generation,
            world=len(NODES),
            facts=FACTS,
            lineage=stamp.lineage,
            timeout_s=1.0,
            own={rank},
        )
        mark_committed(where, manifest.name)


def offered(root: Path) -> tuple[Whole | None, list[str]]:
    """What the gang chooses from all nodes' words, and what was not good."""
    said = [held(disk(root, node), node) for node in NODES]
    chosen = newest_whole([holding for holdings, _ in said for holding in holdings], here="n0")
    return chosen, [sentence for _, sentences in said for sentence in sentences]


def test_after_a_power_loss_the_state_comes_from_all_disks_through_the_vaults(tmp_path: Path):
    job = Job(seed=1).train(2)
    save(tmp_path, job, 5)
    before = job.train(2).state()
    save(tmp_path, job, 7)
    whole, problems = offered(tmp_path)
    assert whole is not None
    assert (whole.version, problems) == (Version(7), [])
    assert whole.sources == (("n0",), ("n1",), ("n2",))
    with cluster(tmp_path / "vaults", 3) as nodes:
        ring(nodes, copies=0)
        for node in nodes:
            brought = bring(disk(tmp_path, node.name), whole, node.directory, job="job", node=node.name)
            assert brought == 1
        for rank, node in enumerate(nodes[:2]):  # a gang of two goes on, each part fetched from whoever has it
            vault = Vault(node.directory, job="job", node=node.name)
            other = Job(seed=50 + rank, rank=rank, world=2)
            with vault.gather(whole, choose=other.parts.needs, timeout_s=20) as source:
                other.parts.restore(source)
            assert same(other.state(), before)
            vault.close()


def test_a_shard_that_is_bad_on_one_disk_makes_all_step_back_and_is_named(tmp_path: Path):
    job = Job(seed=1).train(2)
    save(tmp_path, job, 5)
    save(tmp_path, job.train(1), 7)
    data = tmp_path / "disks" / "n1" / "step-00000007-g2" / "data-0001.distcp"
    raw = bytearray(data.read_bytes())
    raw[3000] ^= 1
    data.write_bytes(raw)
    whole, problems = offered(tmp_path)
    assert whole is not None
    assert whole.version == Version(5)
    assert whole.passed_over == ("step 7.0 of generation 2 has 2 of 3 shards (missing: 1)",)
    assert len(problems) == 1
    assert problems[0].startswith(
        "n1: step 7.0 of generation 2 is not good: step-00000007-g2: data-0001.distcp (shard 1"
    )


def test_a_node_that_did_not_come_to_save_makes_all_step_back(tmp_path: Path):
    job = Job(seed=1).train(2)
    save(tmp_path, job, 5)
    save(tmp_path, job.train(1), 7, lost=("n2",))
    whole, problems = offered(tmp_path)
    assert whole is not None
    assert (whole.version, problems) == (Version(5), [])
    assert "has 2 of 3 shards (missing: 2)" in whole.passed_over[0]


def test_a_disk_that_is_gone_is_said_and_nothing_is_made_up(tmp_path: Path):
    save(tmp_path, Job(seed=1).train(1), 5, lost=("n1",))
    whole, _ = offered(tmp_path)
    assert whole is None
    # And if somebody insists, the missing shard has a name.
    insisted = Whole(version=Version(5), generation=2, world=3, lineage=(), sources=(("n0",), ("n1",), ("n2",)))
    with cluster(tmp_path / "vaults", 3) as nodes:
        ring(nodes, copies=0)
        brought = [bring(disk(tmp_path, n.name), insisted, n.directory, job="job", node=n.name) for n in nodes]
        assert brought == [1, 0, 1]
        vault = Vault(nodes[0].directory, job="job", node="n0")
        with pytest.raises(VaultError, match=r"Shard 1 of 3 of step 5\.0 cannot be had"):
            vault.gather(insisted, timeout_s=10)
        vault.close()


def test_one_disk_alone_says_what_it_lacks(tmp_path: Path):
    save(tmp_path, Job(seed=1).train(1), 5)
    source = open_checkpoint(disk(tmp_path, "n0"), "step-00000005-g2")
    with pytest.raises(StateError, match=r"step-00000005-g2 cannot give model\.0\.weight"):
        Job(seed=2).parts.restore(source, allow={"parts"})


def test_each_disk_is_pruned_by_itself(tmp_path: Path):
    job = Job(seed=1).train(1)
    for step in (3, 5, 7):
        save(tmp_path, job, step)
    for node in NODES:
        assert prune(disk(tmp_path, node), keep_last=2) == ("step-00000003-g2",)
    whole, _ = offered(tmp_path)
    assert whole is not None
    assert whole.version == Version(7)
