"""A gang that grows trains on until the newcomers are there, and loses nothing; nobody connects to who is not there yet."""

import re
import time
from pathlib import Path

import pytest
from gang_kit import Nodes, digests, undisturbed_digests

from elasticrl.contract.beats import Stage
from elasticrl.contract.model import LOADING, MEETING
from elasticrl.runtime.checkpoint.place import place
from elasticrl.runtime.checkpoint.shelf import listing
from elasticrl.runtime.data.audit import audit

STEPS = 150
LOAD_S = 2.0  # many steps
STEP_MS = 30.0
LONG = 5  # the step that takes long


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    return undisturbed_digests(tmp_path_factory.mktemp("alone"), STEPS)


def start(nodes: Nodes, generation: int) -> tuple[int, int]:
    """The version that a generation went on from, as rank 0 says."""
    said = re.search(rf"generation {generation}: rank 0 .*, from step (\d+)\.(\d+) ", nodes.workers["n0"].text)
    assert said is not None, nodes.workers["n0"].text[-2000:]
    return int(said[1]), int(said[2])


def finished(nodes: Nodes, undisturbed: dict[int, str]) -> None:
    """With the same bits, and every sample used once."""
    nodes.until_done()
    made = digests(nodes.run_dir)  # of each state that was kept
    assert made.items() <= undisturbed.items()
    assert STEPS in made
    found = audit(nodes.run_dir)
    assert found.ok, found.sentence


@pytest.mark.parametrize(
    ("strategy", "every"), [("replicated", 1), pytest.param("fsdp", 1, marks=pytest.mark.slow), ("replicated", 7)]
)
def test_it_trains_on_until_the_newcomer_has_loaded_and_gives_no_step_up(
    tmp_path: Path, undisturbed, strategy: str, every: int
):
    conf = {"vault": {"every": every}}
    with Nodes(tmp_path, steps=STEPS, strategy=strategy, step_ms=STEP_MS, conf=conf) as nodes:
        nodes.plan("n0", "n1")
        nodes.until_new(every)
        nodes.env = {"LOAD_S": str(LOAD_S)}
        nodes.plan("n0", "n1", "n2", grows=True)
        before = nodes.workers["n0"].beat.step
        nodes.until(lambda: nodes.workers["n0"].beat.step >= before + max(5, every), "some more steps", 20)
        assert (nodes.workers["n0"].beat.generation, nodes.workers["n2"].beat.phase) == (1, LOADING)
        nodes.parted()
        nodes.until_new(1)
        step, update = start(nodes, 2)
        assert step >= before + 5
        made = nodes.workers["n0"].text.partition("generation 2:")[0].count("update 0\n")
        assert (made, update) == (step, 0), "as many as were begun"
        finished(nodes, undisturbed)


def test_it_parts_inside_of_a_step_where_a_state_is_kept(tmp_path: Path):
    args = ("--updates", "3", "--counted", "--long", str(LONG), "2.0")
    with Nodes(tmp_path, steps=LONG + 3, args=args, conf={"vault": {"inside": 1.0}}) as nodes:
        nodes.plan("n0", "n1")
        nodes.until_sealed(LONG - 1)
        nodes.plan("n0", "n1", "n2", grows=True)
        nodes.parted()
        nodes.until_new(1)
        step, update = start(nodes, 2)
        assert step == LONG
        assert update > 0, "the updates that were made are not made again"
        nodes.until_done()
        again = digests(nodes.run_dir)
    with Nodes(tmp_path / "alone", steps=LONG + 3, copies=0, args=args[:3]) as nodes:
        nodes.plan("n0")
        nodes.until_done()
        assert digests(nodes.run_dir) == again


def test_a_job_that_is_done_before_it_has_grown_is_done(tmp_path: Path):
    with Nodes(tmp_path, steps=20, step_ms=STEP_MS) as nodes:
        nodes.plan("n0", "n1")
        nodes.until_new(2)
        nodes.env = {"LOAD_S": "60"}
        nodes.plan("n0", "n1", "n2", grows=True)
        old = [nodes.workers[node] for node in ("n0", "n1")]
        nodes.until(lambda: all(worker.beat.state is Stage.DONE for worker in old), "the end of the job", 30)
        time.sleep(0.5)  # in which they must not go to where the next gang is to meet
        assert [worker.beat.state for worker in old] == [Stage.DONE] * 2


def test_a_newcomer_that_dies_as_it_loads_is_not_waited_for(tmp_path: Path, undisturbed):
    with Nodes(tmp_path, steps=STEPS, step_ms=STEP_MS) as nodes:
        nodes.plan("n0", "n1")
        nodes.until_new(2)
        nodes.env = {"LOAD_S": "60"}
        nodes.plan("n0", "n1", "n2", grows=True)
        nodes.until(lambda: nodes.workers["n2"].beat.phase == LOADING, "n2 loads", 20)
        nodes.lose("n2")
        nodes.plan("n0", "n1")
        nodes.until_new(1)
        finished(nodes, undisturbed)


def test_who_replaces_another_is_waited_for_until_it_has_loaded(tmp_path: Path, undisturbed):
    # Found by reading: a gang connected to whom its plan named, for recovery.reform; a model takes longer than that to load.
    with Nodes(tmp_path, steps=STEPS, step_ms=STEP_MS, conf={"recovery": {"reform": "2s"}}) as nodes:
        nodes.plan("n0", "n1")
        nodes.until_new(2)
        nodes.kill_worker("n1")
        nodes.env, nodes.rung = {"LOAD_S": "4"}, 2
        nodes.plan("n0", "n1")
        nodes.until_new(1)
        assert "was not formed" not in nodes.workers["n0"].text
        finished(nodes, undisturbed)


def test_a_job_that_shall_end_before_it_has_grown_ends_with_a_save(tmp_path: Path):
    with Nodes(tmp_path, steps=STEPS, args=("--long", str(LONG), "6.0")) as nodes:
        nodes.plan("n0", "n1")
        nodes.until_sealed(LONG - 1)
        nodes.plan("n0", "n1", "n2", grows=True)
        nodes.until(lambda: nodes.workers["n2"].beat.phase == MEETING, "n2 has loaded", 20)
        nodes.drain("n0", "n1", "n2")
        for node in ("n2", "n0", "n1"):
            nodes.workers[node].process.join(20)
            assert nodes.workers[node].process.exitcode == 0, nodes.workers[node].text[-2000:]
        assert max(entry.version.step for entry in listing(place(nodes.run_dir))) == LONG + 1
        assert "without a last save" not in nodes.workers["n0"].text


def test_an_order_to_end_that_comes_after_the_vote_to_part_is_heeded(tmp_path: Path):
    # A step's body ends with the time that it sleeps, behind its last vote.
    with Nodes(tmp_path, steps=STEPS, step_ms=2000.0) as nodes:
        nodes.plan("n0", "n1")
        nodes.until_sealed(1)
        nodes.plan("n0", "n1", "n2", grows=True)
        nodes.until(lambda: nodes.workers["n2"].beat.phase == MEETING, "n2 is there", 20)
        votes = nodes.workers["n0"].text.count("update 0\n")
        nodes.until(lambda: nodes.workers["n0"].text.count("update 0\n") > votes, "the vote to part", 20)
        time.sleep(0.5)  # of the two seconds: the vote is over
        nodes.drain("n0", "n1", "n2")
        for node in ("n0", "n1", "n2"):
            nodes.workers[node].process.join(30)
            assert nodes.workers[node].process.exitcode == 0, nodes.workers[node].text[-2000:]
        assert "without a last save" not in nodes.workers["n0"].text
        assert max(entry.version.step for entry in listing(place(nodes.run_dir))) >= 2


def test_a_newcomer_waits_for_as_long_as_the_gang_s_step_takes_and_the_gang_for_as_long_as_it_loads(
    tmp_path: Path, undisturbed
):
    # Found by reading: both gave up after what `recovery` says, though the plan's leader waits on.
    short = dict.fromkeys(("start", "replace", "restart", "reload"), "1500ms")
    with Nodes(tmp_path, steps=STEPS, step_ms=STEP_MS, args=("--long", "40", "6.0"), conf={"recovery": short}) as nodes:
        nodes.plan("n0", "n1")
        nodes.until_new(2)
        nodes.env = {"LOAD_S": "3"}
        nodes.plan("n0", "n1", "n2", grows=True)
        nodes.until(lambda: nodes.workers["n2"].beat.phase == MEETING, "n2 has loaded", 20)
        nodes.parted()
        nodes.until_new(1)
        finished(nodes, undisturbed)
        assert "was not formed" not in nodes.workers["n2"].text
