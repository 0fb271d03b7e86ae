"""Scripts that know nothing of elasticrl survive what befalls them, under real daemons, and end with exit code 0."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.levels.rides import ride
from tests.levels.scripts import NODES, Running

pytestmark = pytest.mark.timeout(600)
CRASH_LOOP = 70


@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_a_script_survives_the_loss_of_a_worker_a_node_and_a_stopped_worker(tmp_path: Path, name: str) -> None:
    # The other trainers: tests/hf/test_hf_trainers.py.
    found = ride(name, tmp_path)
    assert [cost.fault for cost in found] == ["worker", "stopped", "node", "node is back"]


def test_a_script_that_fails_for_good_ends_the_job_with_a_verdict() -> None:
    # Once a world of three has trained, one of two raises, again and again. Before that two may train: a node may come late.
    conf = {"recovery": {"no_progress_limit": 2}, "health": {"node_strikes": 9}}
    with Running("ddp.py", "--steps", "2000", "--only-world", "3", conf=conf) as run:
        run.job.start(*NODES)
        run.trains(3)
        run.kill_node("n2")
        assert run.ends() == [CRASH_LOOP, CRASH_LOOP]
        assert "crash_loop" in run.causes()[-1][0]
        assert any(end["own"] for name in ("n0", "n1") for end in run.job.events(name, "worker.exited"))
        run.job.check()


@pytest.mark.slow
def test_a_script_that_blames_a_peer_for_good_ends_the_job_and_no_node_is_kept_out() -> None:
    conf = {"recovery": {"no_progress_limit": 2}, "health": {"node_strikes": 2}}
    with Running("ddp.py", "--steps", "2000", "--only-world", "3", "--refused", conf=conf) as run:
        run.job.start(*NODES)
        run.trains(3)
        run.kill_node("n2")
        assert run.ends() == [CRASH_LOOP, CRASH_LOOP]
        causes = {cause for name in ("n0", "n1") for kinds, _ in run.causes(name) for cause in kinds}
        assert "crash_loop" in causes
        assert causes.isdisjoint({"quarantined", "failed_again"})
        assert {end["own"] for name in ("n0", "n1") for end in run.job.events(name, "worker.exited")} == {False}
        run.job.check()


def test_a_driver_whose_own_processes_train_is_started_again_when_one_of_them_dies() -> None:
    with Running("driver.py", "--steps", "200", conf={"membership": {"min_nodes": 1, "max_nodes": 1}}) as run:
        run.job.start("n0")
        run.trains(1)
        run.until(lambda: run.job.ask("n0", "status")["milestone"].startswith("step "), "its step, by its log")
        driver = run.lines()[-1].pid
        children = Path(f"/proc/{driver}/task/{driver}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        assert run.ends() == [0]
        assert [line.step for line in run.lines()] == [*range(1, 201)]
        assert len({line.pid for line in run.lines()}) == 2, "one driver, and one more"
        (failed,) = run.job.events("n0", "worker.exited")
        assert failed["own"], failed
        assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
        run.job.check()


def test_a_script_that_stands_still_is_found_from_outside_and_the_rank_is_named() -> None:
    conf = {"timeouts": {"quiet": "5s"}}
    with Running("ddp.py", "--steps", "100000", "--hang", "{folder}/hang", conf=conf) as run:
        run.job.start("n0", "n1")
        run.trains(2)
        run.warm()
        run.until(lambda: run.job.ask("n0", "status")["milestone"].endswith(" of 100,000"), "its step, by its log")
        hang = run.job.folder / "hang"
        hang.touch()
        at = run.until(lambda: not hang.exists() and time.monotonic(), "the hang")
        run.trains(2, after=at + 1.0)
        named = [line for line in run.job.events("n0", "verdict.found") if line["fault"] == "host_hang"]
        assert [line["ranks"] for line in named] == [[1]], named
        run.job.check()


@pytest.mark.slow  # a minute of silence
def test_a_script_whose_log_falls_silent_is_named_and_left_alone_and_told_no_more_when_it_goes_on() -> None:
    # Rank 1 computes all the while, so that nothing else could tell.
    with Running("ddp.py", "--steps", "100000", "--spin", "{folder}/spin") as run:
        run.job.start("n0", "n1")
        run.trains(2)
        run.until(lambda: len(run.lines()) > 400, "a rhythm")
        spin = run.job.folder / "spin"
        spin.touch()
        named = run.until(
            lambda: [text for text in run.job.ask("n0", "status")["advice"] if "rank 1 " in text],
            "a name",
            within_s=150.0,
        )
        assert "The job was left alone (timeouts.progress: tell)." in named[0]
        (row,) = [row for row in run.job.ask("n0", "status")["rows"] if row["rank"] == 0]
        assert run.job.events("n0", "worker.stalled")[-1]["silent"]
        assert (row["state"], run.job.ask("n0", "status")["state"]) == ("training", "TRAINING")
        spin.unlink()
        run.until(lambda: "rank 1 " not in str(run.job.ask("n0", "status")["advice"]), "it goes on", within_s=30.0)
        assert len(run.causes()) == 1, "nothing was started again"
        run.job.check()


def test_a_job_of_a_fixed_size_waits_for_a_node_and_never_shrinks() -> None:
    conf = {"membership": {"min_nodes": 1, "fixed": True}}
    with Running("ddp.py", "--steps", "500", "--only-world", "3", conf=conf) as run:
        run.job.start(*NODES)
        run.trains(3)
        run.kill_node("n2")
        run.until(lambda: run.job.ask("n0", "status")["state"] == "HOLDING", "a hold")
        at = run.lines()[-1].at
        run.job.start("n2")
        run.trains(3, after=at)
        assert run.ends() == [0, 0, 0]
        assert {line.world for line in run.lines()} == {3}
        run.job.check()
