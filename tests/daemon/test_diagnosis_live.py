"""Faults of a job that runs: each ends with training that goes on, and an incident that names the class and the culprit.

One job serves all tests, in order: three nodes, each a real daemon, agent, vault and worker under `runtime.join`.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.live.local import Job
from elasticrl.contract.verdict import Fault
from elasticrl.diagnose import incident
from elasticrl.diagnose.incident import Incident

PROGRAM = Path(__file__).parents[1] / "runtime" / "run_job.py"
NODES = ("n0", "n1", "n2")
CONF = {
    "job": {"program": str(PROGRAM), "seed": 7},
    "timeouts": {"floor": "2s", "slack": 10, "confirm": "500ms"},
    "checkpoint": {"every": 100_000},
    "policy": {"desync": "restart"},
    "membership": {"report": "1s"},
}
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def whole() -> Iterator[Job]:
    with Job(etcd=1, conf=CONF, name="diagnosed", script_args=("--step-ms", "50", "--faults", "{folder}/fault")) as job:
        job.start(*NODES)
        job.until_steps(3, within_s=120.0, count=5)
        yield job
        job.check()


@pytest.fixture
def job(whole: Job) -> Iterator[Job]:
    whole.until_steps(3, within_s=60.0, count=20)
    whole.until(lambda: all(whole.ask(node, "crew")["spares"] for node in NODES), 60.0, "a spare on every node")
    yield whole
    whole.until_steps(3, within_s=60.0)
    whole.check()


def incidents(job: Job, node: str) -> list[Incident]:
    """What this node's daemon has written down so far."""
    return incident.found([incident.folder_of(job.folder / "state", job.name, node)])[0]


def rank(job: Job, node: str) -> int:
    """Of its worker now: nodes may have come in any order."""
    return int(job.ask(node, "logs")[0]["rank"])


def strike(job: Job, node: str, do: str) -> None:
    """This node's rank does something wrong in its next step."""
    fault = job.fault(step=0, rank=rank(job, node), do=do, at="lane")
    job.until(lambda: not fault.exists(), 20.0, "the fault strikes")


def told(job: Job, before: dict[str, int]) -> list[Incident]:
    """The incident that each node has written since, once all three have; the leader's, who knows most, first."""
    job.until(lambda: all(len(incidents(job, n)) > before[n] for n in NODES), 60.0, "every node writes its incident")
    leader = job.leader()
    return [incidents(job, node)[before[node]] for node in sorted(NODES, key=lambda node: node != leader)]


def written(job: Job) -> dict[str, int]:
    return {node: len(incidents(job, node)) for node in NODES}


def test_a_killed_worker_is_a_dead_rank_and_knowing_it_has_delayed_nothing(job: Job) -> None:
    before, at, killed = written(job), time.monotonic(), rank(job, "n1")
    os.kill(job.worker("n1"), signal.SIGKILL)
    job.until_steps(3, after=at + 0.02, within_s=30.0)
    for each in told(job, before):
        assert (each.verdict.fault, each.verdict.ranks, each.verdict.nodes) == (Fault.DEAD_RANK, (killed,), ("n1",))
        assert "signal 9" in each.verdict.cause
        assert each.ended
        assert each.seconds is not None
    adopted = [line for line in job.events("n0", "plan.adopted") if "found" in line["causes"]]
    assert adopted[-1]["nodes"] == ["n1"]
    said = [line for line in job.events("n2", "verdict.found") if line["fault"] == "dead_rank"]
    assert (said[-1]["ranks"], said[-1]["nodes"]) == ([killed], ["n1"])


def test_who_asks_is_told_where_all_are_and_nothing_is_disturbed(job: Job) -> None:
    workers = [job.worker(node) for node in NODES]
    command = [
        sys.executable,
        "-m",
        "elasticrl.cli.main",
        "diagnose",
        "--now",
        "--run-dir",
        str(job.home("n1").parents[1]),
    ]
    said = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stderr
    told = json.loads(said.stdout)
    assert told["said"].startswith("rank"), "one that is alone somewhere, or where all of them are"
    assert {fact["kind"] for fact in told["evidence"]} >= {"stack", "recorder"}
    assert {fact["rank"] for fact in told["evidence"] if fact["kind"] == "stack"} == {0, 1, 2}, "those of all nodes"
    assert told["before"]["class"] == "dead_rank"
    assert any("dead_rank" in text for text in job.ask("n1", "status")["advice"])
    job.until_steps(3, within_s=30.0)
    assert [job.worker(node) for node in NODES] == workers


def test_a_stopped_worker_is_a_host_that_hangs(job: Job) -> None:
    before, at, stopped = written(job), time.monotonic(), rank(job, "n2")
    os.kill(job.worker("n2"), signal.SIGSTOP)
    job.until_steps(3, after=at + 1.0, within_s=60.0)
    for each in told(job, before):
        assert (each.verdict.fault, each.verdict.ranks, each.verdict.nodes) == (Fault.HOST_HANG, (stopped,), ("n2",))
        assert "stopped" in each.verdict.cause


def test_a_training_thread_that_hangs_is_found_with_the_place_where_it_does(job: Job) -> None:
    before, at, hung = written(job), time.monotonic(), rank(job, "n1")
    strike(job, "n1", "hang")
    job.until_steps(3, after=at + 2.0, within_s=90.0)
    for each in told(job, before):
        assert (each.verdict.fault, each.verdict.ranks, each.verdict.nodes) == (Fault.HOST_HANG, (hung,), ("n1",))
        assert "misbehave (run_job.py:" in each.verdict.cause


def test_ranks_in_different_collectives_are_a_desync_and_the_odd_one_is_named(job: Job) -> None:
    before, at, astray = written(job), time.monotonic(), rank(job, "n2")
    strike(job, "n2", "stray")
    job.until_steps(3, after=at + 2.0, within_s=90.0)
    for each in told(job, before):
        assert (each.verdict.fault, each.verdict.ranks, each.verdict.nodes) == (Fault.DESYNC, (astray,), ("n2",))


def test_a_slow_rank_is_named_and_left_alone(job: Job) -> None:
    worker, slow = job.worker("n1"), rank(job, "n1")
    strike(job, "n1", "slow")
    said = lambda: [line for node in NODES for line in job.events(node, "straggler.found")]  # noqa: E731
    job.until(lambda: any(line["rank"] == slow for line in said()), 90.0, "the slow rank is named")
    assert {line["rank"] for line in said()} == {slow}
    leader = job.leader()
    job.until(lambda: any("is slow" in text for text in job.ask(leader, "status")["advice"]), 20.0, "status says it")
    assert job.worker("n1") == worker


@pytest.mark.slow
def test_where_the_operator_wants_it_a_spare_node_takes_the_place_of_a_slow_one() -> None:
    conf = {**CONF, "policy": {"straggler": "replace"}, "membership": {"report": "1s", "max_nodes": 2}}
    with Job(etcd=1, conf=conf, name="eased", script_args=("--step-ms", "50", "--faults", "{folder}/fault")) as job:
        job.start("n0", "n1")
        job.until_steps(2, within_s=120.0, count=5)
        job.start("n2")
        job.until(lambda: job.ask("n0", "crew")["spares"] and job.agent_runs("n2"), 60.0, "n2 is there")
        slow = "n1" if job.leader() == "n0" else "n0"
        strike(job, slow, "slow")

        def seated() -> set[str]:
            return {row["node"] for row in job.ask(job.leader(), "status")["rows"] if row["rank"] is not None}

        job.until(lambda: seated() == {"n0", "n1", "n2"} - {slow}, 90.0, "n2 takes the slow one's place")
        job.until_steps(2, after=time.monotonic(), within_s=30.0, count=3)
        adopted = [line["nodes"] for line in job.events(job.leader(), "plan.adopted") if "found" in line["causes"]]
        assert [slow] in adopted, adopted
        job.check()
