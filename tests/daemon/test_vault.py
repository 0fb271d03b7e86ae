"""A vault beside each daemon: real daemons, agents, workers and vaults; what a worker is given with its seat."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.live.local import Job
from chaos.live.proc import command_line
from elasticrl.base.process import started_at
from elasticrl.config import dumps, load
from elasticrl.runtime.bits import Bits

NODES = ("n0", "n1", "n2")
PASSWORD = "ELASTICRL__STORE__PASSWORD"
#: A shard that no vault has.
NOWHERE = {"step": 0, "update": 0, "generation": 0, "shard": 0, "world": 1, "blocks": None, "by": "w0"}
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    os.environ[PASSWORD] = "geheim"  # this etcd asks for none, but no worker may see it
    try:
        with Job(
            name="vaults",
            conf={
                "store": {"username": "u"},
                "vault": {"copies": 1, "linger": "3s", "timeout": "5s"},
                "agent": {"preload": ["colorsys"]},
            },
        ) as job:
            job.start(*NODES)
            job.until_steps(3, within_s=90.0, count=3)
            job.until(lambda: all(job.ask(node, "crew")["spares"] for node in NODES), 30.0, "a spare on every node")
            yield job
            job.check()
    finally:
        del os.environ[PASSWORD]


@pytest.fixture(autouse=True)
def trains(job: Job) -> Iterator[None]:
    job.until_steps(len([node for node in NODES if job.daemons[node].poll() is None]), within_s=60.0)
    yield
    job.check()


def generation(job: Job) -> int:
    return int(job.ask("n0", "status")["generation"])


def ring(job: Job, node: str) -> tuple[int, list[str]]:
    """Of which generation a node's vault knows the ring, and who keeps its copies."""
    status = job.ask_vault(node, "status")
    return status["generation"], [buddy["node"] for buddy in status["buddies"]]


def folder(job: Job, node: str) -> Path:
    return job.folder / "vault" / job.name / node


def test_each_node_has_a_vault_that_copies_to_the_next_rank(job: Job) -> None:
    ranks = {line.rank: line.node for line in job.sealed()[-3:]}
    now = generation(job)
    for rank, node in ranks.items():
        job.until(lambda node=node: ring(job, node)[0] == now, 5.0, f"the vault of {node} knows the plan")
        assert ring(job, node)[1] == [ranks[(rank + 1) % 3]]
        status = job.ask_vault(node, "status")
        assert (status["job"], status["node"]) == (job.name, node)
        assert job.records()[node].vault.endswith(f":{status['port']}")
        answer = job.ask_vault(node, "fetch", at=ranks[(rank + 1) % 3], **NOWHERE)
        assert "does not hold shard 0 of 1" in answer["why"], "the vaults have one key, so they talk to each other"
        assert folder(job, node).stat().st_mode & 0o777 == 0o700
        assert (job.home(node) / "vault.key").stat().st_mode & 0o777 == 0o600


def test_a_worker_is_given_its_configuration_and_its_vault_and_no_secret(job: Job) -> None:
    environ = dict(
        line.split("=", 1) for line in Path(f"/proc/{job.worker('n1')}/environ").read_text().split("\0") if "=" in line
    )
    runtime = job.home("n1")
    config = runtime / "config.yaml"
    assert not [name for name in environ if name.startswith("ELASTICRL__")]
    assert "geheim" not in config.read_text()
    assert config.stat().st_mode & 0o777 == 0o600
    assert dumps(load(config, environ={})) == dumps(
        load(job.folder / "job.yaml", [*job.overrides("n1"), "store.username=null"], environ={})
    )
    assert environ["ELASTICRL_VAULT"] == str(folder(job, "n1"))
    imported = json.loads((runtime / "agent.json").read_text())["preload"]
    own = ["elasticrl.runtime.run", "elasticrl.runtime.checkpoint.ahead"]
    assert imported[-3:] == [*own, "colorsys"], "what a spare has imported already"


def test_each_member_says_what_decides_its_bits(job: Job) -> None:
    said = {node: record.bits for node, record in job.records().items()}
    assert set(said) == set(NODES)
    assert len(set(said.values())) == 1
    assert Bits.parse(said["n0"]).threads == 1


def test_workers_hear_of_commits_and_one_that_comes_later_hears_of_the_newest(job: Job) -> None:
    def heard(rank: int) -> list[str]:
        log = Path(next(row for node in NODES for row in job.ask(node, "logs") if row["rank"] == rank)["log"])
        return [line for line in log.read_text().splitlines() if line.startswith("Commit(")]

    for rank in range(3):
        job.until(lambda rank=rank: len(heard(rank)) > 1, 20.0, f"rank {rank} hears of two commits")
    assert "manifest='step-" in heard(2)[-1]
    node = next(line.node for line in reversed(job.sealed()) if line.rank == 1)
    killed_at = time.monotonic()
    os.kill(job.worker(node), signal.SIGKILL)
    job.until_steps(3, after=killed_at + 0.2, within_s=20.0)
    job.until(lambda: bool(heard(1)), 5.0, "the fresh worker has heard")
    first_step = next(
        line.step for line in job.sealed() if line.at > killed_at and line.rank == 1 and line.node == node
    )
    step = int(heard(1)[0].partition("step=")[2].partition(",")[0])
    assert step <= first_step, "it was there with its seat, and not only with the next commit"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_vault_that_dies_or_hangs_is_started_again_at_its_address_and_training_does_not_notice(
    job: Job, number: signal.Signals
) -> None:
    before, old = generation(job), job.ask_vault("n1", "status")
    os.kill(old["pid"], number)
    try:
        job.until(
            lambda: started_at(old["pid"]) == 0, 5.0, "the old one is gone, before anybody has waited for an answer"
        )
        job.until(lambda: job.vault("n1") not in (0, old["pid"]), 15.0, "another one serves")
    finally:
        if number == signal.SIGSTOP and "elasticrl.runtime.vault" in command_line(old["pid"]):
            os.kill(old["pid"], signal.SIGKILL)
    job.until(lambda: ring(job, "n1")[0] == before, 5.0, "it knows the plan")
    assert job.ask_vault("n1", "status")["port"] == old["port"]
    job.until(lambda: job.events("n1", "vault.changed")[-1]["state"] == "up", 5.0, "the daemon has found it")
    assert [line["state"] for line in job.events("n1", "vault.changed")][-2:] == ["away", "up"]
    assert generation(job) == before


def test_a_daemon_that_restarts_adopts_its_vault(job: Job) -> None:
    vault = job.vault("n2")
    job.kill_daemon("n2")
    assert job.vault("n2") == vault
    before = len(job.events("n2", "daemon.started"))
    job.start("n2")
    job.until(lambda: len(job.events("n2", "daemon.started")) > before, 30.0, "the new daemon is up")
    job.until(lambda: job.events("n2", "vault.changed")[-1]["reason"] == "adopted", 5.0, "it has found the vault")
    assert job.vault("n2") == vault


def test_a_vault_is_started_with_the_key_that_lies_there_while_the_store_is_away(job: Job) -> None:
    old = job.vault("n2")
    job.kill_daemon("n2")
    job.etcd.kill(0)
    os.kill(old, signal.SIGKILL)
    job.until(lambda: started_at(old) == 0, 5.0, "the vault is gone")
    job.start("n2")
    job.until(lambda: job.vault("n2") not in (0, old), 20.0, "a vault serves, though the store is away")
    job.run(job.etcd.revive(0))
    job.until_steps(3, within_s=30.0, count=5)
    job.until(lambda: ring(job, "n2")[0] == generation(job), 20.0, "it knows the plan")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_vault_that_cannot_start_is_told_of(job: Job) -> None:
    # Found by reading: the node was `warming up` for ever, and nothing said why.
    folder(job, "n3").mkdir()
    os.chown(folder(job, "n3"), 65534, 65534)
    job.start("n3")

    def note() -> str:
        rows = {row["node"]: row for row in job.ask("n0", "status")["rows"]}
        return str(rows.get("n3", {}).get("note", ""))

    job.until(lambda: "its vault does not start: " in note(), 20.0, "why n3 does not get warm")
    assert "belongs to user 65534" in note()
    job.end("n3")


def test_a_drained_nodes_vault_stays_for_the_others_and_then_ends_by_itself(job: Job) -> None:
    vault = job.vault("n1")
    job.ask("n1", "drain")
    assert job.daemons["n1"].wait(30.0) == 0
    left_at = time.monotonic()
    assert job.ask_vault("n1", "status")["leaving"]
    job.until(lambda: started_at(vault) == 0, 15.0, "the vault has ended")
    assert time.monotonic() - left_at > 1.0
    assert not folder(job, "n1").exists()
    job.start("n1", foreground=True)  # for the next test
    job.until_steps(3, within_s=60.0)


def test_a_foreground_daemon_that_is_killed_leaves_no_process(job: Job) -> None:
    vault = job.vault("n1")
    job.kill_daemon("n1")
    job.until(lambda: started_at(vault) == 0, 5.0, "the vault has ended")
    job.until(lambda: not job.agent_lives("n1"), 30.0, "the agent has ended")


def test_the_end_of_the_job_ends_the_vaults_and_gives_their_memory_back(job: Job) -> None:
    vaults = [job.vault(node) for node in ("n0", "n2")]
    assert all(vaults)
    job.ask("n2", "stop")
    assert [job.daemons[node].wait(60.0) for node in ("n0", "n2")] == [75, 75]
    assert not any(started_at(vault) for vault in vaults)
    assert not folder(job, "n0").exists()
    assert not folder(job, "n2").exists()
