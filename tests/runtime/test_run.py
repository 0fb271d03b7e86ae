"""`runtime.join` as a script sees it: the same bits alone, in any gang and through any faults; every sample exactly once."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from gang_kit import Nodes, digests, undisturbed_digests, writer, writers
from vault_nodes import holdings

from elasticrl.agent.exits import Traces, judge
from elasticrl.base import raised
from elasticrl.config import dumps
from elasticrl.contract.beats import Stage
from elasticrl.contract.model import OUTSIDE
from elasticrl.runtime.checkpoint.place import place
from elasticrl.runtime.checkpoint.shelf import listing, verify
from elasticrl.runtime.chronicle import compare, read
from elasticrl.runtime.data.audit import audit
from elasticrl.runtime.vault.errors import Outlived

STEPS = 60
FEW = 20
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "supervised.py"


def proof(run_dir: Path, steps: int) -> None:
    """Every sample of so many steps was used exactly once."""
    found = audit(run_dir)
    assert found.ok, found.sentence
    assert found.steps == steps, found.sentence


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The digests of a gang of one that nothing happens to."""
    return undisturbed_digests(tmp_path_factory.mktemp("alone"), STEPS)


SMALL = "4KiB"  # the model has some buckets then, as larger ones have
OFTEN = [
    ("replicated", 3),
    ("fsdp", 1),
    ("fsdp", 4),
]  # compared with replicated on one; test_exact has the same without vaults
SELDOM = [("replicated", 2), ("replicated", 4), ("fsdp", 2), ("fsdp", 3)]


@pytest.mark.parametrize(
    ("strategy", "world"), [*OFTEN, *(pytest.param(*one, marks=pytest.mark.slow) for one in SELDOM)]
)
def test_any_number_of_workers_makes_the_same_bits(tmp_path: Path, undisturbed, strategy: str, world: int):
    with Nodes(tmp_path, steps=FEW, strategy=strategy, copies=min(1, world - 1)) as nodes:
        nodes.plan(*(f"n{i}" for i in range(world)))
        nodes.until_done()
        assert digests(nodes.run_dir) == {step: undisturbed[step] for step in range(FEW + 1)}
        proof(nodes.run_dir, FEW)


@pytest.mark.parametrize(("strategy", "seed"), [("replicated", 1), ("replicated", 2), ("fsdp", 3)])
def test_kills_joins_and_leaves_cost_no_bit_and_no_sample(tmp_path: Path, undisturbed, strategy: str, seed: int):
    chance = random.Random(seed)
    deck = ["worker"] * 3 + ["twice", "lose", "lose", "join", "join", "join", "leave", "leave"]
    chance.shuffle(deck)
    conf = {"lanes": {"bucket_bytes": SMALL}}
    with Nodes(tmp_path, steps=STEPS, strategy=strategy, step_ms=30.0, conf=conf) as nodes:
        present = ["n0", "n1", "n2"]
        nodes.plan(*present)
        while deck:
            nodes.until_new(
                chance.choice([1, 2])
            )  # copies are whole again: what one copy protects from is one loss at a time
            do = next(card for card in deck if len(present) > 2 or card not in ("lose", "leave"))
            node = chance.choice(present)
            deck.remove(do)
            if do in ("worker", "twice"):
                nodes.kill_worker(node)
            elif do == "join":
                fresh = next(n for n in ("n0", "n1", "n2", "n3", "n4") if n not in present)
                present.insert(chance.randrange(len(present) + 1), fresh)
            else:
                present.remove(node)
            if do == "lose":
                nodes.lose(node)
            nodes.plan(*present)
            if do == "twice":  # another one dies while the first death is being recovered from
                nodes.kill_worker(chance.choice([n for n in present if n != node]))
                nodes.plan(*present)
        nodes.until_done()
        assert digests(nodes.run_dir) == undisturbed
        proof(nodes.run_dir, STEPS)


def went_on_from(nodes: Nodes, node: str) -> int:
    """The step, once this node's worker has said it in the present generation."""
    said = re.compile(rf"generation {nodes.generation}: rank .* from step (\d+)\.0 ")
    nodes.until(lambda: said.search(nodes.workers[node].text) is not None, "the next gang", 60.0)
    found = said.search(nodes.workers[node].text)
    assert found
    return int(found[1])


def keepers(nodes: Nodes, step: int) -> Counter[int]:
    """With how many nodes each part of this step lies, as the present gang has cut it."""
    held = holdings([nodes.vaults[node] for node in nodes.plan_now])
    return Counter(each.shard for each in held if (each.version.step, each.generation) == (step, nodes.generation))


@pytest.mark.parametrize("strategy", ["replicated", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_what_a_dead_node_had_is_kept_twice_again_before_the_next_step_is_made(
    tmp_path: Path, undisturbed, strategy: str
):
    # Found live: it lay with one node alone until then, for minutes where a step takes minutes.
    with Nodes(tmp_path, steps=4, step_ms=1500.0, strategy=strategy) as nodes:
        nodes.plan("n0", "n1", "n2", "n3")
        nodes.until_sealed(1)
        nodes.lose("n1")
        nodes.plan("n0", "n2", "n3")
        kept = went_on_from(nodes, "n3")
        assert kept >= 1
        nodes.until(lambda: keepers(nodes, kept) == {0: 2, 1: 2, 2: 2}, "each part with two nodes", 10.0)
        assert nodes.sealed() == kept, "this machine is too slow for what is to be seen here"
        nodes.lose("n2")  # it alone had what n1 had kept
        nodes.plan("n0", "n3")
        assert went_on_from(nodes, "n3") == kept
        nodes.until_done()
        assert digests(nodes.run_dir) == {step: undisturbed[step] for step in range(5)}
        proof(nodes.run_dir, 4)


def test_where_steps_are_short_the_next_one_is_not_delayed_by_copies_of_the_last(tmp_path: Path, undisturbed):
    with Nodes(tmp_path, steps=12, step_ms=300.0) as nodes:
        nodes.plan("n0", "n1", "n2")
        nodes.until_sealed(3)
        nodes.lose("n1")
        nodes.plan("n0", "n2")
        kept = went_on_from(nodes, "n2")
        nodes.until(lambda: nodes.sealed() > kept or keepers(nodes, kept), "the next step", 10.0)
        assert not keepers(nodes, kept), "what was sealed before is kept anew"
        nodes.until(lambda: keepers(nodes, nodes.sealed()) == {0: 2, 1: 2}, "each part with two nodes", 10.0)
        nodes.until_done()
        assert digests(nodes.run_dir) == {step: undisturbed[step] for step in range(13)}


def test_a_job_that_loses_all_memory_goes_on_from_its_newest_commit(tmp_path: Path, undisturbed):
    with Nodes(tmp_path, steps=2 * STEPS, every=10, step_ms=80.0) as nodes:
        nodes.plan("n0", "n1", "n2")
        nodes.until(lambda: nodes.commit() > 0, "a commit, whose writer has to start first", 60.0)
        committed = nodes.resume
        nodes.until_sealed(committed + 3)
        for node in ("n0", "n1", "n2"):
            nodes.lose(node)
        nodes.args[nodes.args.index("--step-ms") + 1] = "0"
        nodes.rung = 4
        nodes.plan("n3", "n4")
        nodes.until(lambda: f"from step {committed}.0" in nodes.workers["n3"].text, "word of where it goes on", 60.0)
        nodes.until_done()
        assert undisturbed.items() <= digests(nodes.run_dir).items()
        proof(nodes.run_dir, 2 * STEPS)


def test_a_file_server_that_does_not_answer_yet_is_waited_for(tmp_path: Path, undisturbed):
    """As after a loss of power, which nodes are through with sooner."""
    with Nodes(tmp_path, steps=STEPS, every=10, step_ms=40.0, program="stale_job") as nodes:
        nodes.plan("n0", "n1")
        nodes.until(lambda: nodes.commit() > 0, "a commit, whose writer has to start first", 60.0)
        committed = nodes.resume
        for node in ("n0", "n1"):
            nodes.lose(node)
        nodes.args[nodes.args.index("--step-ms") + 1] = "0"
        (tmp_path / "stale").touch()
        nodes.rung = 4
        nodes.plan("n2", "n3")
        nodes.until(lambda: "It is waited for up to 600 s" in nodes.workers["n2"].text, "word of it", 60.0)
        time.sleep(2.0)
        assert nodes.workers["n2"].process.exitcode is None
        (tmp_path / "stale").unlink()
        nodes.until(lambda: f"from step {committed}.0" in nodes.workers["n2"].text, "word of where it goes on", 60.0)
        nodes.until_done()
        assert undisturbed.items() <= digests(nodes.run_dir).items()
        proof(nodes.run_dir, STEPS)


@pytest.mark.parametrize("fails", ["n0", "n1"], ids=["who gives its parameters", "who gets them"])
def test_a_restore_that_fails_while_parameters_are_on_their_way_holds_nobody(tmp_path: Path, undisturbed, fails: str):
    with Nodes(tmp_path, steps=FEW, step_ms=30.0, program="cut_job") as nodes:
        nodes.plan("n0", "n1")
        nodes.until_sealed(3)
        nodes.kill_worker("n1")
        (tmp_path / f"cut-{fails}").touch()
        nodes.plan("n0", "n1")

        def parted() -> bool:
            return all(nodes.workers[node].beat.state is Stage.PARKED for node in nodes.plan_now)

        nodes.until(parted, "both have left: whoever fails closes its connections", 15.0)
        assert not (tmp_path / f"cut-{fails}").exists()
        nodes.plan("n0", "n1")
        nodes.until_done()
        assert digests(nodes.run_dir) == {step: undisturbed[step] for step in range(FEW + 1)}
        proof(nodes.run_dir, FEW)


def test_who_cannot_go_back_to_the_beginning_is_nobody_s_fault_and_fresh_processes_begin_anew(
    tmp_path: Path, undisturbed
):
    with Nodes(tmp_path, steps=STEPS, every=1000, copies=0, step_ms=20.0) as nodes:
        nodes.plan("n0", "n1")
        nodes.until_sealed(3)
        nodes.lose("n1")  # and with it the only copy of its part, before anything was saved
        survivor = nodes.workers["n0"]
        nodes.plan("n0", "n2")
        survivor.process.join(30)
        said = re.search(r"Outlived: what was made until step \d+ is lost with those who had it", survivor.text)
        assert said, survivor.text
        assert judge(
            Traces(code=survivor.process.exitcode, message=said.group(), raised=raised.name_of(Outlived()))
        ) == (
            f"exit code 1: {said.group()}",
            False,
            None,
        )
        nodes.kill_worker("n0")
        nodes.plan("n0", "n2")
        nodes.until_done()
        assert digests(nodes.run_dir).items() >= undisturbed.items()
        proof(nodes.run_dir, STEPS)


def test_a_drained_worker_ends_after_a_whole_step_that_is_on_the_disk(tmp_path: Path, undisturbed):
    with Nodes(tmp_path, steps=STEPS, copies=0, step_ms=20.0) as nodes:
        nodes.plan("n0", "n1", "n2")
        nodes.until_new(5)
        drained = nodes.workers["n2"].process
        nodes.drain("n2")
        drained.join(20)
        assert drained.exitcode == 0, nodes.workers["n2"].text
        nodes.plan_now = ("n0", "n1")
        nodes.until(lambda: nodes.commit() > 0, "the commit of the last step together", 10.0)
        nodes.lose("n2")  # without copies nobody else has its shard: the disk has
        nodes.plan("n0", "n1")
        nodes.until(lambda: f"from step {nodes.resume}.0" in nodes.workers["n0"].text, "training from the disk", 30.0)
        nodes.until_done()
        assert digests(nodes.run_dir) == undisturbed
        proof(nodes.run_dir, STEPS)


def test_a_rank_whose_memory_corrupts_is_named_and_ends(tmp_path: Path, undisturbed):
    with Nodes(tmp_path, steps=STEPS, step_ms=10.0) as nodes:
        nodes.plan("n0", "n1", "n2")
        nodes.until_new(3)
        nodes.fault(step=6, rank=1, do="corrupt", at="after")
        bad = nodes.workers["n1"]
        bad.process.join(30)
        assert "The parameters that rank 1 computes with are not those of the others" in bad.text
        assert "divergence at step" in nodes.workers["n0"].text
        nodes.kill_worker("n1")
        nodes.plan("n0", "n1", "n2")
        nodes.until_done()
        assert digests(nodes.run_dir) == undisturbed


def test_a_step_that_is_said_to_be_sealed_is_said_with_its_own_digest(tmp_path: Path, undisturbed):
    history = tmp_path / "history"
    with Nodes(tmp_path, steps=STEPS, step_ms=10.0, args=("--history", str(history))) as nodes:
        nodes.plan("n0", "n1", "n2")
        nodes.until_new(3)
        for _ in range(3):  # then the first step after what was restored is broken too, before anybody has voted on it
            nodes.fault(step=0, rank=2, do="kill", at="update")
            nodes.workers["n2"].process.join(60)
            nodes.kill_worker("n2")
            nodes.fault(step=0, rank=2, do="kill", at="update")
            nodes.plan("n0", "n1", "n2")
        nodes.workers["n2"].process.join(60)
        nodes.kill_worker("n2")
        nodes.plan("n0", "n1", "n2")
        nodes.until_done()
        assert digests(nodes.run_dir) == undisturbed
    said = [line.split() for line in history.read_text().splitlines()]
    assert len(said) >= STEPS
    assert not [words for words in said if words[-1] not in ("-", undisturbed[int(words[4])])]


def test_torchs_own_optimizer_and_scheduler_go_on_where_they_were(tmp_path: Path):
    def run(folder: Path, *present: str, kill: bool) -> dict[int, str]:
        copies = min(1, len(present) - 1)
        with Nodes(folder, steps=30, step_ms=10.0 if kill else 0.0, copies=copies, args=("--torch",)) as nodes:
            nodes.plan(*present)
            if kill:
                for node in ("n1", "n0"):
                    nodes.until_new(6)
                    nodes.kill_worker(node)
                    nodes.plan(*present)
            nodes.until_done()
            return digests(nodes.run_dir)

    assert run(tmp_path / "killed", "n0", "n1", "n2", kill=True) == run(tmp_path / "alone", "n0", kill=False)


def test_no_update_is_made_before_copies_are_where_they_can_be(tmp_path: Path, undisturbed):
    """A vault that was never told of its neighbours has nobody to wait for, and says at once that it is done."""
    with Nodes(tmp_path, steps=STEPS) as nodes:
        nodes.plan("n0", "n1", "n2", tell=False)
        nodes.until(
            lambda: all(worker.beat.state is Stage.TRAINING for worker in nodes.workers.values()), "training", 60.0
        )
        time.sleep(0.5)  # time enough for fifty steps
        assert nodes.sealed() == 0
        nodes.tell()
        nodes.until_done()
        assert digests(nodes.run_dir) == undisturbed


def test_whoever_lives_through_a_fault_before_anything_was_kept_begins_anew(tmp_path: Path, undisturbed):
    with Nodes(tmp_path, steps=STEPS) as nodes:
        nodes.plan("n0", "n1", "n2", tell=False)  # so the first state has no copies
        nodes.until(
            lambda: all(worker.beat.state is Stage.TRAINING for worker in nodes.workers.values()), "training", 60.0
        )
        nodes.lose("n1")
        nodes.plan("n0", "n2")
        assert "from step" in nodes.workers["n0"].text, "it was not there when the fault came"
        nodes.until_done()
        assert digests(nodes.run_dir) == undisturbed
        proof(nodes.run_dir, STEPS)


def test_whoever_took_up_the_beginning_from_others_begins_anew_from_there_too(tmp_path: Path):
    def at_update(*nodes: str) -> bool:
        return all("update 0" in gang.workers[node].text.split("elasticrl: generation")[-1] for node in nodes)

    with Nodes(tmp_path / "alone", steps=FEW, copies=0, args=("--noise",)) as nodes:
        nodes.plan("n0")
        nodes.until_done()
        alone = digests(nodes.run_dir)
    with Nodes(tmp_path / "gang", steps=FEW, args=("--noise",)) as gang:
        gang.plan("n0", "n1", "n2", tell=False)  # so the first state has no copies, and no update is made
        gang.until(lambda: at_update("n0", "n1", "n2"), "the first update", 60.0)
        gang.fault(step=0, rank=0, do="hang", at="update")
        gang.kill_worker("n1")
        gang.plan("n0", "n1", "n2")
        gang.until(lambda: at_update("n1", "n2"), "the first update of who takes it up", 60.0)
        assert "from step 0.0 " in gang.workers["n1"].text
        gang.lose("n0")
        gang.lose("n2")
        gang.plan("n1", "n3")
        gang.until_done()
        assert digests(gang.run_dir) == alone


@pytest.mark.parametrize("url", [False, True])
def test_a_last_save_that_was_due_anyway_is_made_once_and_is_good(tmp_path: Path, *, url: bool):
    where = f"file://{tmp_path}/there" if url else f"{tmp_path}/there"
    conf = {"checkpoint": {"dir": where, "every": STEPS // 2, "keep_last": 5}}
    with Nodes(tmp_path, steps=STEPS, step_ms=5.0, conf=conf) as nodes:
        nodes.plan("n0", "n1", "n2")
        nodes.until_done()
        shelf = place(f"{where}/job")
        (newest, *_) = listing(shelf)
        assert newest.name == f"step-{STEPS:08d}-g1"
        assert not verify(shelf, newest.name)


def test_a_last_save_takes_as_long_as_the_disk_does_and_is_no_hang(tmp_path: Path):
    # Found by reading: one that took longer than timeouts.phase.save was killed, and so was each further one.
    with Nodes(tmp_path, steps=4, copies=0) as nodes:
        nodes.plan("n0", "n1")
        slow, other = (nodes.workers[node] for node in ("n0", "n1"))
        nodes.until(lambda: any(writers(nodes, "n0")), "its writer", 30.0)
        os.kill(disk := writer(nodes, "n0"), signal.SIGSTOP)
        try:
            nodes.until(lambda: slow.beat.phase == OUTSIDE, "that it says so", 30.0)
            since = slow.beat.since
            nodes.until(
                lambda: (other.beat.phase, other.beat.waiting) == ("save", True), "the other to wait for it", 30.0
            )
            nodes.until(lambda: slow.beat.since > since + 0.3, "that it says so again", 10.0)
        finally:
            os.kill(disk, signal.SIGCONT)  # or it outlives the test
        nodes.until_done()
        assert nodes.resume == 4


def test_snapshots_now_and_then_lose_steps_to_a_fault_but_no_bits(tmp_path: Path, undisturbed):
    with Nodes(tmp_path, steps=STEPS, step_ms=10.0, conf={"vault": {"every": 4}}) as nodes:
        nodes.plan("n0", "n1", "n2")
        nodes.until_sealed(8)
        nodes.kill_worker("n1")
        nodes.plan("n0", "n1", "n2")
        nodes.until_done()
        found = digests(nodes.run_dir)
        assert sorted(found) == list(range(0, STEPS + 1, 4))
        assert found.items() <= undisturbed.items()
        proof(nodes.run_dir, STEPS)


@pytest.mark.parametrize("counted", [False, True])
def test_a_step_of_several_updates_that_is_cut_short_between_them_costs_no_bit(tmp_path: Path, *, counted: bool):
    def run(folder: Path, *present: str, kill: bool) -> dict[int, str]:
        args = ("--updates", "3", *(["--counted"] if counted else []))
        conf = {"vault": {"inside": 1}}
        with Nodes(folder, steps=12, copies=len(present) - 1, lanes=4, conf=conf, args=args) as nodes:
            if kill:
                nodes.fault(step=5, rank=1, do="kill", at="third")  # by then all had the state after the first
            nodes.plan(*present)
            if kill:
                nodes.workers["n1"].process.join(60)
                nodes.kill_worker("n1")
                nodes.plan(*present)
            nodes.until_done()
            inside = re.search(r"from step 5\.[12] ", nodes.workers["n0"].text)
            assert (inside is not None) == (kill and counted), nodes.workers["n0"].text
            proof(nodes.run_dir, 12)
            return digests(nodes.run_dir)

    assert run(tmp_path / "killed", "n0", "n1", kill=True) == run(tmp_path / "alone", "n0", kill=False)


def test_a_sharded_model_is_gone_before_the_next_generation_builds_its_own(tmp_path: Path):
    with Nodes(tmp_path, steps=STEPS, strategy="fsdp", step_ms=10.0) as nodes:
        nodes.plan("n0", "n1")
        nodes.until_new(2)
        nodes.kill_worker("n1")
        nodes.plan("n0", "n1")
        nodes.until_new(1)
        built = re.findall(r"built beside (\d) (\w+)", nodes.workers["n0"].text)
        assert built == [("0", "whole"), ("0", "outlined")], "what is filled is not read once more"


def test_a_held_gang_keeps_its_state_and_goes_on(tmp_path: Path, undisturbed):
    with Nodes(tmp_path, steps=STEPS, step_ms=10.0) as nodes:
        nodes.plan("n0", "n1")
        nodes.until_new(3)
        nodes.park()
        nodes.until(lambda: all(nodes.workers[n].beat.state is Stage.PARKED for n in ("n0", "n1")), "parked", 10.0)
        nodes.plan("n1", "n0")
        nodes.until_done()
        assert digests(nodes.run_dir) == undisturbed


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("model", "The ranks built different models"),
        ("data", r"The ranks have different data \(rank 0 has .*; rank 1 has"),
        ("buffer", r"The ranks built different buffers \(model of rank 0, 1; here [0-9a-f]+\)"),
        ("lone", r"The ranks built different buffers \(model of rank 0, 1; here [0-9a-f]+\)"),
    ],
)
def test_ranks_that_do_not_begin_alike_are_told_so(tmp_path: Path, what: str, said: str):
    with Nodes(tmp_path, steps=STEPS, args=("--unlike", what)) as nodes:
        nodes.plan("n0", "n1")
        worker = nodes.workers["n0"]
        worker.process.join(30)
        assert re.search(said, worker.text)


def test_a_script_runs_alone_without_any_daemon_and_goes_on_where_it_was(tmp_path: Path):
    def run(folder: Path, steps: int) -> None:
        folder.mkdir(exist_ok=True)
        command = [sys.executable, str(EXAMPLE), "--steps", str(steps)]
        subprocess.run(command, cwd=folder, check=True, timeout=120, stdout=subprocess.DEVNULL)

    run(tmp_path / "twice", 12)
    run(tmp_path / "twice", 20)
    run(tmp_path / "once", 20)
    assert digests(tmp_path / "twice/run/supervised") == digests(tmp_path / "once/run/supervised")
    proof(tmp_path / "twice/run/supervised", 20)


def test_what_differs_from_who_made_the_state_in_memory_is_said(tmp_path: Path):
    with Nodes(tmp_path, steps=STEPS, copies=0, step_ms=10.0) as nodes:
        nodes.plan("n0")
        nodes.until_new(2)
        nodes.kill_worker("n0")
        lanes = nodes.tree.lanes.model_copy(update={"threads": 2})
        (nodes.folder / "config.json").write_text(dumps(nodes.tree.model_copy(update={"lanes": lanes})))
        nodes.plan("n0")
        nodes.until(lambda: "threads was 1 and is 2" in nodes.workers["n0"].text, "it is said", 30.0)


def test_alone_a_run_that_was_killed_goes_on_from_memory(tmp_path: Path):
    command = [sys.executable, "-u", str(EXAMPLE), "--step-ms", "20", "--steps"]
    with subprocess.Popen([*command, "100000"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        next(line for line in first.stdout if line.startswith("step 20"))
        first.kill()
    done = subprocess.run([*command, "40"], cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0
    found = re.search(r"from step (\d+)", done.stdout)
    assert found is not None
    assert int(found[1]) >= 20
    proof(tmp_path / "run/supervised", 40)


def test_the_example_of_ppo_under_fsdp_makes_the_same_bits_through_a_kill(tmp_path: Path, monkeypatch):
    """Its models are built anew after each fault, its rollouts and its evaluation are passes outside of lanes."""
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))

    def made(folder: Path, world: int, *, kill: bool) -> dict[int, str]:
        nodes_of = tuple(f"n{i}" for i in range(world))
        steps, strategy = 41, "fsdp"
        with Nodes(folder, steps=steps, strategy=strategy, copies=world - 1, program="fsdp_ppo", lanes=5) as nodes:
            nodes.plan(*nodes_of)
            if kill:
                nodes.until_new(3)
                nodes.kill_worker("n1")
                nodes.plan(*nodes_of)
            nodes.until_done()
            text = "".join(worker.text for worker in nodes.workers.values())
            learned = [float(found) for found in re.findall(r"step 40 right ([0-9.]+)", text)]
            assert learned[0] > 0.8, text[-2000:]
            found = audit(nodes.run_dir)
            assert found.ok, found.sentence
            assert found.steps == steps
            return digests(nodes.run_dir)

    assert made(tmp_path / "killed", 2, kill=True) == made(tmp_path / "alone", 1, kill=False)


def test_where_two_runs_part_it_is_said_how_what_computed_them_differs(tmp_path: Path):
    def run(folder: Path, seed: int, threads: int) -> Path:  # so small a model would not part for its threads alone
        conf = {"job": {"seed": seed}, "lanes": {"threads": threads}}
        with Nodes(folder, steps=3, copies=0, conf=conf) as nodes:
            nodes.plan("n0")
            nodes.until_done()
        return nodes.run_dir

    found = compare(read(run(tmp_path / "one", 7, 1)), read(run(tmp_path / "two", 8, 2)))
    assert found.parted == 1
    assert found.sentence.endswith("; the second computes other bits: torch threads 2 instead of 1")


def test_a_fault_after_a_rotten_commit_was_stepped_over_goes_on_from_memory(tmp_path: Path) -> None:
    with Nodes(tmp_path / "gang", steps=400, every=20, step_ms=60) as nodes:
        nodes.plan("n0", "n1", "n2")
        nodes.until(lambda: nodes.commit() > 0, "a commit, whose writer has to start first", 60.0)
        older = nodes.resume
        nodes.until(lambda: nodes.commit() > older, "another, so that there is one to step back to", 60.0)
        newest = nodes.committed
        assert newest is not None
        shard = max((nodes.run_dir / newest.manifest).rglob("*.distcp"), key=lambda file: file.stat().st_size)
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
        for node in ("n0", "n1", "n2"):
            nodes.lose(node)

        nodes.plan("n0", "n1", "n2")
        nodes.until(lambda: nodes.sealed() >= 0, "training", 60.0)
        assert nodes.sealed() < newest.step, "the rotten checkpoint was believed"
        nodes.until_new(2)
        made = nodes.sealed()
        assert made < newest.step - 2, "too late to tell"
        nodes.kill_worker("n1")
        nodes.plan("n0", "n1", "n2")
        nodes.until(lambda: nodes.sealed() >= 0, "training", 60.0)
        begun = re.findall(r"generation 3: .* from step (\d+)\.", nodes.workers["n0"].text)
        assert int(begun[0]) >= made, nodes.workers["n0"].text[-1500:]
