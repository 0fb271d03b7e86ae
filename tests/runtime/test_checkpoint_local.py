"""Checkpoints on the nodes' own disks: all memory is lost, no disk has the whole, and the state comes back bit for bit."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from state_jobs import FACTS, Job, pinned, same, snapshots
from typer.testing import CliRunner
from vault_nodes import cluster, ring

from elasticrl.cli import state
from elasticrl.cli.kept import checkpoints
from elasticrl.config import Tree
from elasticrl.runtime.checkpoint.load import open_checkpoint
from elasticrl.runtime.checkpoint.local import Choice, Held, Published, assemble, bring, choose, held
from elasticrl.runtime.checkpoint.manifest import COMMITTED, Conditions, Manifest
from elasticrl.runtime.checkpoint.place import Place, place
from elasticrl.runtime.checkpoint.save import finish, write_shard
from elasticrl.runtime.checkpoint.shelf import mark_committed, prune, verify
from elasticrl.runtime.vault.client import Vault
from elasticrl.runtime.vault.errors import CheckpointCorrupt, CheckpointRefused, StateError, VaultError
from elasticrl.runtime.vault.holdings import Whole
from elasticrl.runtime.vault.version import Cut, Version, mark

NODES = ("n0", "n1", "n2")


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
            nodes=NODES,
        )
        mark_committed(where, manifest.name)


def offered(root: Path, *, but: Iterable[str] = ()) -> Choice:
    """What the gang chooses from all nodes' words, as they travel."""
    said = [each for node in NODES for each in held(disk(root, node), node)[0] if node not in but]
    lineages = {mark(each.manifest.lineage): each.manifest.lineage for each in said}
    return choose([Held.from_json(each.to_json(), lineages) for each in said], here="n0")


def test_after_a_power_loss_the_state_comes_from_all_disks_through_the_vaults(tmp_path: Path):
    job = Job(seed=1).train(2)
    save(tmp_path, job, 5)
    before = job.train(2).state()
    save(tmp_path, job, 7)
    choice = offered(tmp_path)
    whole = choice.whole
    assert whole is not None
    assert (whole.version, choice.short) == (Version(7), ())
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


def test_a_shard_that_is_bad_on_one_disk_is_named_and_never_brought(tmp_path: Path):
    job = Job(seed=1).train(2)
    save(tmp_path, job, 5)
    save(tmp_path, job.train(1), 7)
    data = tmp_path / "disks" / "n1" / "step-00000007-g2" / "data-0001.distcp"
    raw = bytearray(data.read_bytes())
    raw[3000] ^= 1
    data.write_bytes(raw)
    whole = offered(tmp_path).whole
    assert whole is not None
    assert whole.version == Version(7)
    vault = tmp_path / "vault"
    with pytest.raises(
        CheckpointCorrupt, match=r"n1: step 7.0 of generation 2 is not good: .*data-0001.distcp \(shard 1"
    ):
        bring(disk(tmp_path, "n1"), whole, vault, job="job", node="n1")
    assert not list(vault.glob("*.shard"))
    choice = offered(tmp_path, but=["n1"])
    assert choice.whole is None
    assert choice.short[0].said.endswith(
        "step 7 of generation 2 has 2 of its 3 parts on the disks that are here (missing: 1 on the disk of n1)"
    )


def test_a_node_that_did_not_come_to_save_makes_all_step_back(tmp_path: Path):
    job = Job(seed=1).train(2)
    save(tmp_path, job, 5)
    save(tmp_path, job.train(1), 7, lost=("n2",))
    choice = offered(tmp_path)
    assert choice.step == 5
    assert "has 2 of its 3 parts" in choice.short[0].said
    assert "on the disk of n2" in choice.short[0].said


def test_a_commit_that_one_node_has_written_down_is_one_for_all(tmp_path: Path):
    """The others lost their power between the transaction and their own record of it."""
    save(tmp_path, Job(seed=1).train(2), 5)
    for node in ("n0", "n2"):
        (tmp_path / "disks" / node / "step-00000005-g2" / COMMITTED).unlink()
    assert offered(tmp_path).step == 5
    (tmp_path / "disks" / "n1" / "step-00000005-g2" / COMMITTED).unlink()
    assert offered(tmp_path).whole is None


def test_a_disk_that_is_gone_is_said_and_nothing_is_made_up(tmp_path: Path):
    save(tmp_path, Job(seed=1).train(1), 5, lost=("n1",))
    assert offered(tmp_path).whole is None
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
    with pytest.raises(StateError, match=r"has 1 of its 3 parts; the others are on the disks of n1, n2\."):
        open_checkpoint(disk(tmp_path, "n0"), "step-00000005-g2")


def test_each_disk_is_pruned_by_itself(tmp_path: Path):
    job = Job(seed=1).train(1)
    for step in (3, 5, 7):
        save(tmp_path, job, step)
    for node in NODES:
        assert prune(disk(tmp_path, node), keep_last=2) == ("step-00000003-g2",)
    assert offered(tmp_path).step == 7


def test_parts_that_lie_side_by_side_make_one_checkpoint(tmp_path: Path):
    job = Job(seed=1).train(2)
    save(tmp_path, job, 5)
    disks = {node: disk(tmp_path, node) for node in NODES}
    with pytest.raises(CheckpointRefused, match=r"missing: 2 on the disk of n2"):
        assemble({node: where for node, where in disks.items() if node != "n2"}, place(tmp_path / "some"))
    there = place(tmp_path / "there")
    made = assemble(disks, there)
    assert not verify(there, made.name)
    other = Job(seed=2)
    with open_checkpoint(there, made.name) as source:
        other.parts.restore(source)
    assert same(other.state(), job.state())


def test_the_verbs_say_that_a_nodes_directory_is_a_part_and_make_a_whole_of_all(tmp_path: Path):
    app = typer.Typer()
    app.callback()(lambda: None)
    state.register(app)

    def elasticrl(*words: object, ok: int = 0) -> str:
        done = CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "200"})
        assert done.exit_code == ok, done.output
        return done.output

    save(tmp_path, Job(seed=1).train(1), 5)
    disks, mine = tmp_path / "disks", tmp_path / "mine"
    (mine / "job").mkdir(parents=True)
    (disks / "n1").rename(mine / "job" / "n1")  # what n1 sees: its own, below the job's
    said = elasticrl("checkpoint", "list", mine)
    assert "committed, 1 of 3 parts" in said
    assert "of step-00000005-g2 this disk's part is good; a run resumes from" in elasticrl("checkpoint", "verify", mine)
    assert "has 1 of its 3 parts" in elasticrl("checkpoint", "export", mine, tmp_path / "model", ok=1)
    assert "missing: 1 on the disk of n1" in elasticrl("checkpoint", "assemble", disks, tmp_path / "all", ok=1)
    (mine / "job" / "n1").rename(disks / "n1")
    assert "step-00000005-g2: 3 parts of 3 nodes" in elasticrl("checkpoint", "assemble", disks, tmp_path / "all")
    assert "0 of 1 bad; a run would resume from step-00000005-g2" in elasticrl("checkpoint", "verify", tmp_path / "all")
    assert "several jobs or nodes have checkpoints" in elasticrl("checkpoint", "list", disks, ok=2)


def test_an_empty_store_is_told_of_what_this_nodes_disk_has(tmp_path: Path):
    save(tmp_path, Job(seed=1).train(1), 5)
    there = {"dir": str(tmp_path), "shared": False}
    (tmp_path / FACTS.job).mkdir()
    tree = Tree.model_validate({"job": {"name": FACTS.job}, "node": {"name": "n1"}, "checkpoint": there})
    look = checkpoints(tree)
    assert look(True) is None, "its disk is empty"
    (tmp_path / "disks" / "n1").rename(tmp_path / FACTS.job / "n1")
    kept = look(True)
    assert kept is not None
    assert (kept.name, kept.step, kept.place) == ("step-00000005-g2", 5, str(tmp_path / FACTS.job / "n1"))


def test_a_step_is_whole_on_the_disks_when_all_nodes_have_told_it():
    here, there = Published([0, 2]), Published([0, 2])  # two nodes of two workers: ranks 0 and 2 speak
    for step in (10, 20):
        here.add(step)
    there.add(20)  # 10 failed there
    votes = []
    for _ in range(3):
        said = [here.say(), 0.0, there.say(), 0.0]
        votes.append((here.hear(said), there.hear(said)))
    assert votes == [(None, None), (20, 20), (None, None)]


def test_a_node_that_is_always_one_save_ahead_does_not_hide_what_both_have():
    fast, slow = Published([0, 1]), Published([0, 1])
    found = []
    for step in range(10, 60, 10):
        fast.add(step)
        if step > 10:
            slow.add(step - 10)
        found.append(fast.hear([fast.say(), slow.say()]))
    assert found == [None, 10, 20, 30, 40]


def part(
    node: str, shard: int, step: int, *, generation: int = 3, start: int = 0, world: int = 2, **more: bool
) -> Held:
    """What a node has of a step's checkpoint, in a generation that began at `start`."""
    lineage = (Cut(1, Version(0)), *([Cut(generation, Version(start))] if generation > 1 else []))
    manifest = Manifest(
        version=Version(step), generation=generation, world=world, parent=None, facts=Conditions(), contents={}, files=(),
        lineage=lineage, own=(shard,), nodes=("n0", "n1")[:world],
    )  # fmt: skip
    return Held(node=node, manifest=manifest, committed=more.get("committed", True))


def test_what_lies_on_a_history_that_was_left_is_not_chosen():
    old = [part("n0", 0, 30, generation=1), part("n1", 1, 30, generation=1)]
    new = [part("n0", 0, 25, start=20), part("n1", 1, 25, start=20)]
    assert choose([*old, *new], here="n0").step == 25
    assert choose(old, here="n0").step == 30


def test_nothing_that_was_only_saved_is_chosen_unless_it_is_asked_for():
    saved = [replace(part(f"n{i}", i, 30), committed=False) for i in range(2)]
    older = [part("n0", 0, 20), part("n1", 1, 20)]
    assert choose([*saved, *older], here="n0").step == 20
    assert choose([*saved, *older], here="n0", uncommitted=True).step == 30
