"""Teams under real daemons: nodes of several workers, killed one by one and node by node."""

import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from gang_kit import Nodes

from chaos.live.local import Job
from tests.daemon.runtime_kit import PROGRAM, ends_as_if_undisturbed

SPOKEN = Path(__file__).with_name("spoken_job.py")


def one_team(how: str, program: Path, _job: Job, folder: Path, steps: int) -> Path:
    """The same job on one team that nothing happens to; where it left its chronicle."""
    conf = {"model": {how: 2}, "node": {"workers": 2}}
    with Nodes(folder, steps=steps, copies=1, conf=conf, program=program.stem, args=ARGS[program]) as nodes:
        nodes.plan("n0", "n1")
        nodes.until_done(within_s=120.0)
        return nodes.run_dir


ARGS = {PROGRAM: (), SPOKEN: ("--kind", "qwen3_moe")}


@pytest.mark.parametrize(
    ("how", "program", "strategy", "kills", "nodes", "workers", "seed"),
    [
        ("tp", PROGRAM, "replicated", 3, 2, 2, 3),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                ("tp", PROGRAM, "replicated", 12, 2, 4, 12),
                ("tp", PROGRAM, "replicated", 13, 3, 2, 13),
                ("tp", PROGRAM, "fsdp", 10, 2, 4, 21),
                ("tp", PROGRAM, "fsdp", 10, 3, 2, 22),
                ("tp", PROGRAM, "fsdp", 10, 3, 2, 23),
                ("tp", SPOKEN, "replicated", 10, 2, 2, 10),
                ("tp", SPOKEN, "fsdp", 10, 3, 2, 24),
                ("cp", SPOKEN, "replicated", 11, 2, 2, 11),
            )
        ),
    ],
)
def test_teams_lose_workers_and_a_whole_node_and_end_with_the_bits_of_one_team(
    tmp_path: Path, how: str, program: Path, strategy: str, kills: int, nodes: int, workers: int, seed: int
):
    conf = {
        "job": {"program": str(program), "seed": 7},
        "node": {"workers": workers},
        "model": {how: 2, "strategy": strategy},
        "checkpoint": {"every": 40},
        "lanes": {"digest": "full"},
    }
    chance, names, world = random.Random(seed), [f"n{i}" for i in range(nodes)], nodes * workers
    with Job(etcd=1, conf=conf, script_args=("--step-ms", "60", *ARGS[program])) as job:
        job.start(*names)
        job.until_steps(world, within_s=90.0, count=2)
        for _ in range(kills):
            victim = chance.randrange(world)
            pids = {line.rank: line.pid for line in job.sealed()[-2 * world :]}
            at = time.monotonic()
            os.kill(pids[victim], signal.SIGKILL)
            job.until_steps(world, after=at + 0.05, within_s=60.0)
            after = {line.rank: line.pid for line in job.sealed() if line.at > at + 0.05 and line.world == world}
            assert after.keys() == pids.keys()
            assert pids[victim] not in after.values()
            assert pids[(victim + workers) % world] in after.values(), "another node's workers are the same processes"
        at = time.monotonic()
        job.kill_node("n1")
        job.start("n1")
        job.until_steps(world, after=at, within_s=90.0)
        newest = max(line.step for line in job.sealed() if line.at < at)
        assert min(line.step for line in job.sealed() if line.at > at) >= newest, "no sealed step is lost"
        job.ask("n0", "stop")
        ends_as_if_undisturbed(job, tmp_path, partial(one_team, how, program))
