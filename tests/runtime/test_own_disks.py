"""`checkpoint.shared: false` under real gangs: each node saves to its own disk, and when all memory is lost the disks together
bring the job back, bit for bit; what they cannot bring is said.
"""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from gang_kit import Nodes, digests, undisturbed_digests, writer, writers

from elasticrl.contract.beats import Stage
from elasticrl.contract.model import LOADING
from elasticrl.runtime.checkpoint.place import place
from elasticrl.runtime.checkpoint.shelf import listing, verify
from elasticrl.runtime.data.audit import audit

STEPS = 60
TRIO = ("n0", "n1", "n2")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The digests of a gang of one with a disk that all see, to which nothing happens."""
    return undisturbed_digests(tmp_path_factory.mktemp("alone"), STEPS)


def gang(folder: Path, *, wait: str = "60s", step_ms: float = 500.0, every: int = 10, **more: object) -> Nodes:
    conf = {"checkpoint": {"shared": False, "wait": wait, "keep_last": 2}, "membership": {"grow": "always"}}
    return Nodes(folder, steps=STEPS, every=every, step_ms=step_ms, conf=conf, **more)


def until_committed(nodes: Nodes, step: int) -> int:
    nodes.until(lambda: nodes.commit() >= step, f"a commit of step {step}", 60.0)
    return nodes.resume


def power_loss(nodes: Nodes, *, disks: tuple[str, ...] = ()) -> None:
    """All memory is gone; of these nodes the disks too. Those who go on make haste."""
    for node in list(nodes.workers):
        nodes.lose(node)
    for node in disks:
        shutil.rmtree(nodes.run_dir / node)
    nodes.args[nodes.args.index("--step-ms") + 1] = "0"


def names(nodes: Nodes, node: str) -> list[str]:
    """What is published on a node's disk."""
    return place(nodes.run_dir / node).names()


def newest(nodes: Nodes) -> str:
    """The name of the newest commit."""
    return nodes.committed.manifest if nodes.committed else ""


def said(nodes: Nodes, node: str, words: str) -> None:
    nodes.until(lambda: words in nodes.workers[node].text, f"{node} to say: {words}", 60.0)


@pytest.mark.parametrize(
    ("strategy", "after"),
    [
        pytest.param("replicated", TRIO, marks=pytest.mark.slow),
        ("replicated", ("n3", "n2", "n0", "n1")),  # other ranks, another world, and one whose disk is empty
        pytest.param("fsdp", ("n1", "n3", "n2", "n0"), marks=pytest.mark.slow),
    ],
)
def test_the_disks_of_all_bring_back_a_job_that_lost_all_memory(tmp_path, undisturbed, strategy, after):
    with gang(tmp_path, strategy=strategy) as nodes:
        nodes.plan(*TRIO)
        committed = until_committed(nodes, 10)
        nodes.until_sealed(committed + 3)
        committed = nodes.commit()
        power_loss(nodes)
        nodes.rung = 4
        nodes.plan(*after)
        said(nodes, after[0], f"from step {committed}.0")
        nodes.until_done()
        assert undisturbed.items() == digests(nodes.run_dir).items()
        proof = audit(nodes.run_dir)
        assert proof.ok, proof.sentence
        assert proof.steps == STEPS
        for node in after:
            shelf = place(nodes.run_dir / node)
            newest = listing(shelf)[0]
            assert (newest.version.step, newest.committed) == (STEPS, True)
            assert not verify(shelf, newest.name)
            assert len(shelf.names()) <= 3, "each disk is pruned"
            assert not list((tmp_path / "vault" / node).glob("*fetch-disk*")), "what was brought gave its memory back"
        alone = audit(nodes.run_dir / after[0])
        assert not alone.ok
        assert alone.absent == tuple(sorted(set(after) - {after[0]}))
        assert "put the directories of all nodes side by side" in alone.sentence


def test_a_commit_is_told_when_every_node_has_published_and_not_before(tmp_path):
    with gang(tmp_path) as nodes:
        nodes.plan(*TRIO)
        nodes.until(lambda: len(list(writers(nodes, "n1"))) == 1, "a writer on n1", 60.0)
        stopped = writer(nodes, "n1")
        os.kill(stopped, signal.SIGSTOP)
        try:
            nodes.until(lambda: bool(names(nodes, "n0") and names(nodes, "n2")), "n0 and n2 to publish", 60.0)
            first = names(nodes, "n0")[0]
            nodes.until_new(3)
            assert nodes.commit() == 0
            assert not names(nodes, "n1")
        finally:
            os.kill(stopped, signal.SIGKILL)
        step = until_committed(nodes, 10)
        assert newest(nodes) != first, "n1 never published that"
        assert all(newest(nodes) in names(nodes, node) for node in TRIO)
        assert step > int(first.split("-")[1])


@pytest.mark.slow
def test_what_a_dead_workers_writer_published_is_told_by_the_next_generation(tmp_path):
    with gang(tmp_path, every=20) as nodes:
        nodes.plan(*TRIO)
        nodes.until(lambda: len(list(writers(nodes, "n1"))) == 1, "a writer on n1", 60.0)
        orphan = writer(nodes, "n1")
        os.kill(orphan, signal.SIGSTOP)
        nodes.until(lambda: bool(names(nodes, "n0") and names(nodes, "n2")), "n0 and n2 to publish", 60.0)
        nodes.kill_worker("n1")
        os.kill(orphan, signal.SIGCONT)
        nodes.until(lambda: bool(names(nodes, "n1")), "the writer to finish by itself", 60.0)
        nodes.plan(*TRIO)
        until_committed(nodes, 20)
        assert newest(nodes) == "step-00000020-g1"


@pytest.mark.slow
def test_a_node_that_is_gone_with_its_disk_costs_nothing_while_its_copies_live(tmp_path, undisturbed):
    with gang(tmp_path, every=20) as nodes:
        nodes.plan(*TRIO)
        committed = until_committed(nodes, 20)
        nodes.until_new(2)
        nodes.lose("n2")
        shutil.rmtree(nodes.run_dir / "n2")
        nodes.plan("n0", "n1")
        second = until_committed(nodes, committed + 1)
        assert second < committed + 20, "saved at once, as the commit lay on n2's disk too"
        power_loss(nodes)
        nodes.plan("n1", "n0")
        said(nodes, "n0", f"from step {second}.0")
        nodes.until_done()
        found = digests(nodes.run_dir)
        assert {step: undisturbed[step] for step in found} == found
        assert max(found) == STEPS


@pytest.mark.slow
def test_a_disk_that_never_comes_back_makes_all_go_back_to_an_older_step_and_say_so(tmp_path, undisturbed):
    with gang(tmp_path, wait="1s") as nodes:
        nodes.plan("n0", "n1")
        until_committed(nodes, 10)
        nodes.plan(*TRIO)
        nodes.until(lambda: bool(nodes.commit()) and newest(nodes).endswith("-g2"), "a commit of all three", 60.0)
        second = nodes.resume
        power_loss(nodes, disks=("n2",))
        entries = listing(place(nodes.run_dir / "n0"))
        first = max(entry.version.step for entry in entries if entry.committed and entry.generation == 1)
        nodes.plan("n0", "n1")
        said(nodes, "n0", f"step {second} of generation 2 has 2 of its 3 parts on the disks that are here")
        said(nodes, "n0", "on the disk of n2): waiting up to 1 s for nodes that may have it (checkpoint.wait)")
        said(nodes, "n1", f"step {second} was committed, but cannot be read: {first} is the newest that is good")
        nodes.until_done()
        assert digests(nodes.run_dir) == undisturbed


def test_nothing_begins_anew_where_a_part_of_every_checkpoint_is_lost_and_nobody_is_waited_for_in_vain(tmp_path):
    with gang(tmp_path, wait="10m") as nodes:
        nodes.plan(*TRIO)
        committed = until_committed(nodes, 10)
        power_loss(nodes, disks=("n2",))
        nodes.plan(*TRIO)
        for worker in [nodes.workers[node] for node in TRIO]:
            worker.process.join(60)
            assert worker.process.exitcode
            assert "CheckpointRefused: No checkpoint is whole on the disks of the 3 nodes that are here" in worker.text
            assert f"step {committed} of generation 1 has 2 of its 3 parts" in worker.text
            assert "Bring the missing nodes back with their disks" in worker.text


def test_a_disk_that_does_not_answer_at_first_is_no_empty_one(tmp_path):
    with gang(tmp_path) as nodes:
        nodes.plan("n0", "n1")
        committed = until_committed(nodes, 10)
        power_loss(nodes)
        nodes.env["ELASTICRL_FAULT"] = "checkpoint.list:full"  # in each worker the first look at its disk
        nodes.plan("n0", "n1")
        for node in ("n0", "n1"):
            said(nodes, node, f"from step {committed}.0")


@pytest.mark.slow
def test_who_comes_late_is_waited_for(tmp_path, undisturbed):
    with gang(tmp_path) as nodes:
        nodes.plan(*TRIO)
        committed = until_committed(nodes, 10)
        power_loss(nodes)
        nodes.plan("n1")
        said(nodes, "n1", "on the disk of n0 and n2): waiting up to 60 s")
        waits = nodes.workers["n1"]
        nodes.until(lambda: waits.beat.phase == "disks" and waits.beat.state is Stage.TRAINING, "n1 to wait", 10.0)
        nodes.plan(*TRIO)
        said(nodes, "n1", f"from step {committed}.0")
        nodes.until_done()
        assert digests(nodes.run_dir) == undisturbed


def test_who_comes_late_and_loads_for_long_ends_the_wait_when_it_is_there(tmp_path, undisturbed):
    # Found by reading: those who waited went to meet it at once, were taken for a gang that had broken up, and began anew.
    with gang(tmp_path, wait="4s") as nodes:  # which is over before it has loaded
        nodes.plan(*TRIO)
        committed = until_committed(nodes, 10)
        power_loss(nodes)
        nodes.rung = 4
        nodes.plan("n0", "n1")
        for node in ("n0", "n1"):
            nodes.until(lambda node=node: nodes.workers[node].beat.phase == "disks", f"{node} waits for disks", 60.0)
        nodes.env = {"LOAD_S": "6"}
        first = nodes.generation
        nodes.plan("n0", "n1", "n2", grows=True)
        nodes.until(lambda: nodes.workers["n2"].beat.phase == LOADING, "n2 loads", 60.0)
        time.sleep(4.5)  # of the six; the time to wait for disks is over by then
        assert nodes.workers["n2"].beat.phase == LOADING, "this machine is too slow for what is to be seen here"
        assert [nodes.workers[node].beat.phase for node in ("n0", "n1")] == ["disks", "disks"]
        assert [nodes.workers[node].beat.generation for node in ("n0", "n1")] == [first, first]
        nodes.parted(30.0)
        said(nodes, "n0", f"from step {committed}.0")
        nodes.until_done()
        assert undisturbed.items() == digests(nodes.run_dir).items()
