"""The whole thing: daemons, agents, vaults, and a real trainer under `runtime.join`; killed, and the same bits at the end."""

import json
import os
import re
import shutil
import signal
import socket
import time
from itertools import pairwise
from pathlib import Path

import pytest

from chaos.live.local import Job
from chaos.live.proc import command_line
from elasticrl.cli.find import left_behind
from elasticrl.runtime.audit import drawn
from elasticrl.runtime.lanes import Deal
from tests.daemon.runtime_kit import NODES, PROGRAM, ends_as_if_undisturbed
from tests.loading import loaded_ahead


def stages_are_told(job: Job) -> None:
    """Each node that lived through a recovery has cut it into stages, and putting the state back took a part of it."""
    told = [line for node in NODES for line in job.events(node) if line["event"] == "recovery.done"]
    assert {line["node"] for line in told} >= {"n0", "n1"}
    for line in told:
        assert set(line["stages"]) == {"detect", "decide", "reform", "restore", "first_step"}
        assert min(line["stages"].values()) >= 0.0
        assert abs(sum(line["stages"].values()) - line["total_s"]) < 0.01
        assert 0.0 < line["stages"]["restore"] < line["total_s"]


def told_as(job: Job, node: str) -> str:
    """What `status` says of a node."""
    return next((row["state"] for row in job.ask("n0", "status")["rows"] if row["node"] == node), "nowhere")


def test_a_trainer_is_killed_with_its_worker_its_node_and_its_leader_and_ends_with_the_same_bits(tmp_path: Path):
    conf = {
        "job": {"program": str(PROGRAM), "seed": 7},
        "checkpoint": {"every": 40},
        "lanes": {"digest": "full"},
    }
    with Job(etcd=1, conf=conf, script_args=("--step-ms", "60")) as job:
        job.start(*NODES)
        job.until_steps(3, within_s=90.0, count=3)
        at = time.monotonic()
        os.kill(job.worker("n1"), signal.SIGKILL)
        job.until_steps(3, after=at + 0.05, within_s=30.0)
        at = time.monotonic()
        job.kill_node("n2")
        job.until_steps(2, after=at, within_s=30.0)
        job.until(lambda: told_as(job, "n2") == "lost", 5.0, "its lease is not over")
        job.until(
            lambda: "n2 is gone" in job.ask("n0", "status")["advice"][0],
            30.0,
            "its lease is over, and status still has it",
        )
        seen = job.ask("n0", "status")
        assert (seen["nodes"], seen["known"]) == (2, 3)
        assert not seen["last"]["steps"], "none was lost, or nobody knows"
        assert told_as(job, "n2") == "gone"
        assert "has to wait" in seen["advice"][0]
        job.start("n2")
        job.until_steps(3, within_s=60.0)
        job.until(lambda: told_as(job, "n2") == "training", 10.0, "it is back")
        assert [row["taken"] for row in job.ask("n0", "status")["rows"]] == ["", "", "killed"]
        at = time.monotonic()
        leader = job.leader()
        job.kill_daemon(leader)
        job.start(leader)
        job.until(lambda: not left_behind(job.control(leader)), 60.0, "the restarted daemon answers")
        job.until_steps(3, within_s=30.0, count=5)
        job.ask(leader, "stop")
        ends_as_if_undisturbed(job, tmp_path)
        stages_are_told(job)


def test_two_workers_on_each_node_lose_one_and_a_whole_node_and_end_with_the_same_bits(tmp_path: Path):
    conf = {
        "job": {"program": str(PROGRAM), "seed": 7},
        "node": {"workers": 2},
        "checkpoint": {"every": 40},
        "lanes": {"digest": "full"},
    }
    with Job(etcd=1, conf=conf, script_args=("--step-ms", "60")) as job:
        job.start("n0", "n1")
        job.until_steps(4, within_s=90.0, count=3)
        before = {line.rank: line.pid for line in job.sealed()}
        logs = "".join(log.read_text() for log in job.folder.rglob("rank_*.log"))
        assert set(re.findall(r"at first rank (\d of \d)", logs)) == {f"{rank} of 4" for rank in range(4)}
        at = time.monotonic()
        os.kill(before[2], signal.SIGKILL)
        job.until_steps(4, after=at + 0.05, within_s=30.0)
        after = {line.rank: line.pid for line in job.sealed()[-4:]}
        assert before[2] not in after.values()
        assert {before[0], before[1]} <= set(after.values()), "the other node's workers are the same processes"
        at = time.monotonic()
        job.kill_node("n1")
        job.start("n1")
        job.until_steps(4, after=at, within_s=60.0)
        newest = max(line.step for line in job.sealed() if line.at < at)
        assert min(line.step for line in job.sealed() if line.at > at) >= newest, "no sealed step is lost"
        job.ask("n0", "stop")
        ends_as_if_undisturbed(job, tmp_path)


def test_a_node_whose_program_loads_for_long_is_let_in_when_it_is_there(tmp_path: Path):
    load_s = 5.0

    class Slowly(Job):
        """The node that joins has the large model."""

        def overrides(self, node: str) -> list[str]:
            return [*super().overrides(node), *[f"agent.env.LOAD_S='{load_s}'"] * (node == "n2")]

    conf = {"job": {"program": str(PROGRAM), "seed": 7}, "checkpoint": {"every": 40}, "lanes": {"digest": "full"}}
    with Slowly(etcd=1, conf=conf, script_args=("--step-ms", "60")) as job:
        job.start("n0", "n1")
        job.until_steps(2, within_s=90.0, count=3)
        job.start("n2")
        job.until(lambda: job.ask("n0", "status")["state"] == "GROWING", 60.0, "the plan that adds n2")
        at = time.monotonic()
        rows = {row["node"]: row["state"] for row in job.ask("n0", "status")["rows"]}
        assert (rows["n0"], rows["n1"]) == ("training", "training")
        job.until_steps(2, after=at, within_s=load_s - 1.0, count=5)
        (newest,) = (link for link in job.folder.rglob("latest") if link.parent.name == "n0")
        assert newest.readlink() == Path("attempt_1"), "it writes there"
        assert job.ask_vault("n0", "status")["generation"] == 1, (
            "its shards lie where the gang that trains looks for them"
        )
        job.until_steps(3, after=at, within_s=60.0, count=3)
        assert job.ask_vault("n0", "status")["generation"] == 2
        assert newest.readlink() == Path("attempt_2")
        made = sorted(line.at for line in job.sealed() if line.node == "n0" and line.at > at)
        assert max(after - before for before, after in pairwise(made)) < load_s / 2, "nobody waited for it"
        told = [(e["generation"], e["work"]) for e in job.events("n0", "workers.changed")]
        assert told[-2:] == [(2, "joining"), (2, "training")]
        steps = [e["step"] for e in job.events("n0", "workers.changed") if e["generation"] == 2]
        assert steps[1] - steps[0] <= 1, "the log says that it joins when it does"
        job.ask("n0", "stop")
        ends_as_if_undisturbed(job, tmp_path)


def test_a_program_that_loads_for_long_is_loaded_ahead_so_a_dead_worker_costs_no_load(tmp_path: Path):
    load_s = 8.0
    conf = {
        "job": {"program": str(PROGRAM), "seed": 7},
        "agent": {"load_ahead": True, "env": {"LOAD_S": str(load_s)}},
        "checkpoint": {"every": 40},
        "lanes": {"digest": "full"},
    }
    with Job(etcd=1, conf=conf, script_args=("--step-ms", "60")) as job:
        job.start("n0", "n1")
        job.until_steps(2, within_s=90.0, count=3)
        dead = job.worker("n1")
        job.until(lambda: loaded_ahead(job.folder / "log", "n1"), 60.0, "a spare that has loaded")
        at = time.monotonic()
        os.kill(dead, signal.SIGKILL)
        job.until_steps(2, after=at + 0.05, within_s=load_s - 1.0)
        assert job.worker("n1") != dead
        job.ask("n0", "stop")
        ends_as_if_undisturbed(job, tmp_path)


@pytest.mark.slow
def test_a_step_that_is_rarely_long_is_not_ended_as_a_hang_for_ever(tmp_path: Path):
    # Found by reading: an evaluation of 8 s every 500 steps of 50 ms was killed at its step for ever.
    conf = {
        "job": {"program": str(PROGRAM), "seed": 7},
        "timeouts": {"floor": "1s", "confirm": "500ms"},
        "lanes": {"digest": "full"},
    }
    with Job(etcd=1, conf=conf, script_args=("--step-ms", "60", "--long", "100", "9")) as job:
        job.start("n0", "n1")
        job.until(lambda: max((line.step for line in job.sealed()), default=0) > 110, 120.0, "that step is made")
        ends = [end["cause"] for node in NODES[:2] for end in job.events(node, "worker.exited")]
        assert 1 <= len(ends) <= 3, f"what is killed teaches: {ends}"
        job.ask("n0", "stop")
        ends_as_if_undisturbed(job, tmp_path)


@pytest.mark.slow
def test_after_a_loss_of_power_nodes_with_own_disks_wait_for_the_last_one_and_end_with_the_same_bits(tmp_path: Path):
    conf = {
        "job": {"program": str(PROGRAM), "seed": 7},
        "node": {"workers": 2},
        "membership": {"grow": "always"},
        "checkpoint": {"every": 20, "shared": False},
        "lanes": {"digest": "full"},
    }
    with Job(etcd=1, conf=conf, script_args=("--step-ms", "60")) as job:
        job.start(*NODES)
        job.until_steps(6, within_s=90.0, count=3)
        job.until(lambda: bool(job.events("n0", "checkpoint.committed")), 60.0, "a commit")
        workers = {line.pid for line in job.sealed()}
        for node in NODES:
            job.kill_node(node)
        job.until(lambda: not any(map(command_line, workers)), 20.0, "the end of all workers")
        shutil.rmtree(job.folder / "vault")
        committed = max(line["step"] for line in job.events("n0", "checkpoint.committed"))
        job.start("n0", "n1")

        def waits() -> bool:
            if left_behind(job.control("n0")):
                return False
            rows = job.ask("n0", "status")["rows"]
            return [row["phase"] for row in rows if row["node"] in ("n0", "n1")] == ["disks", "disks"]

        job.until(waits, 90.0, "n0 and n1 to wait for the disk of n2")
        at = time.monotonic()
        job.start("n2")
        job.until_steps(6, after=at, within_s=60.0, count=3)
        assert min(line.step for line in job.sealed() if line.at > at) >= committed
        job.ask("n0", "stop")
        ends_as_if_undisturbed(job, tmp_path)


def test_a_node_whose_workers_end_before_they_are_ready_is_named_with_the_reason():
    conf = {"job": {"program": str(PROGRAM)}, "agent": {"preload": ["no_such_library"]}}
    with Job(etcd=1, conf=conf) as job:
        job.start("n0")

        def named() -> bool:
            if left_behind(job.control("n0")):
                return False
            said = job.ask("n0", "status")
            return (
                any("No module named 'no_such_library'" in row["note"] for row in said["rows"]) and said["advice"] != []
            )

        job.until(named, 60.0, "the status says why n0 gets no worker ready")
        assert "n0 cannot get ready: a process ended before it was warm: exit code 1:" in job.reasons()["n0"]


def test_a_metrics_port_that_is_taken_costs_the_metrics_alone():
    # Found by a daemon that started again: while it was away its port had been given to somebody else, and it died of that.
    with socket.create_server(("127.0.0.1", 0)) as taken, Job(etcd=1, conf={"job": {"program": str(PROGRAM)}}) as job:
        port = job.metrics_ports["n0"] = taken.getsockname()[1]
        job.start("n0", "n1")
        job.until_steps(2, within_s=90.0)
        (said,) = job.events("n0", "metrics.refused")
        assert said["reason"].startswith(f"127.0.0.1:{port}: Address already in use; "), said
        assert not job.events("n1", "metrics.refused")
        assert job.metrics("n1")


def test_a_node_that_computes_wrongly_is_named_and_kept_out_and_no_bit_of_it_is_in_the_job(tmp_path: Path):
    conf = {
        "job": {"program": str(PROGRAM), "seed": 7},
        "membership": {"min_nodes": 2},
        "audit": {"lanes": "1"},
        "lanes": {"digest": "full"},
    }
    lanes = {step: drawn(7, "model", step, 0, lanes=12, rate="1") for step in range(30, 60)}
    step = next(step for step, lane in lanes.items() if lane in Deal.contiguous(12, 3).carried[1])
    fault = tmp_path / "fault"
    fault.write_text(json.dumps({"step": step, "rank": 1, "do": "gradient", "lane": lanes[step], "ever": True}))
    with Job(etcd=1, conf=conf, script_args=("--step-ms", "60", "--faults", str(fault))) as job:
        job.start(*NODES)
        job.until_steps(3, within_s=90.0, count=3)
        (bad,) = {line.node for line in job.sealed() if line.rank == 1}
        job.until(lambda: told_as(job, bad) == "quarantined", 120.0, "the node that computes wrongly is kept out")
        job.until_steps(2, after=time.monotonic(), within_s=60.0, count=3)
        seen = job.ask("n0", "status")
        assert [row["node"] for row in seen["rows"] if row["state"] == "quarantined"] == [bad]
        verdicts = [line for line in job.events(bad) if line["event"] == "verdict.found"]
        assert [line["fault"] for line in verdicts] == ["divergence"]
        assert bad in str(verdicts[0])
        job.ask("n0", "stop")
        ends_as_if_undisturbed(job, tmp_path)
