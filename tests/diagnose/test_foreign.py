"""A job of another launcher hangs and is looked at from outside: the culprit is named in time, and nothing is disturbed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chaos.patience import patience
from elasticrl.contract.evidence import Evidence, Kind, Sign
from elasticrl.contract.verdict import Fault, Known
from elasticrl.core.judge.judge import judge
from elasticrl.diagnose import foreign
from elasticrl.diagnose.foreign import Job, NoJob, Seen, concerns, job, settled
from elasticrl.diagnose.stacks import Frame, Stack

WORLD = 3
SCRIPT = Path(__file__).with_name("foreign_job.py")
WITHIN_S = 10.0


BIN = Path(sys.executable).parent
#: How each launcher starts the job, and the library that its program then forms its group with.
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD), str(SCRIPT)],
    "accelerate": [
        str(BIN / "accelerate"), "launch", "--multi_gpu", "--num_processes", str(WORLD), "--num_machines", "1",
        "--mixed_precision", "no", "--dynamo_backend", "no", "--num_cpu_threads_per_process", "1", "--main_process_port", "0",
        str(SCRIPT),
    ],
}  # fmt: skip


class Torchrun:
    """A job of three ranks under a stock launcher."""

    def __init__(self, folder: Path, launcher: str) -> None:
        self.folder = folder
        self.name = launcher
        self.launcher: subprocess.Popen[bytes] | None = None

    def start(self, late: int | None = None) -> None:
        """Until all ranks make steps, or until they are started, one of them `late`."""
        self.end()
        for file in self.folder.iterdir():
            file.unlink()
        if late is not None:
            self.order(late, "late")
        with (self.folder / "log").open("wb") as log:
            self.launcher = subprocess.Popen(
                [*LAUNCHERS[self.name], str(self.folder), self.name], stdout=log, stderr=log, start_new_session=True
            )
        if late is None:
            self.going()

    def going(self) -> None:
        """Until all ranks make steps."""
        self.until(lambda: all(self.step(rank) > 2 for rank in range(WORLD)))

    def step(self, rank: int) -> int:
        """Which one it makes; -1 before the first."""
        try:
            return int((self.folder / f"step-{rank}").read_text() or -1)
        except OSError:
            return -1

    def until(self, true: Callable[[], bool], within_s: float = 60.0) -> None:
        """Wait for it."""
        deadline = time.monotonic() + patience(within_s)
        while not true():
            assert time.monotonic() < deadline, (self.folder / "log").read_text()[-2000:]
            time.sleep(0.05)

    def still(self) -> None:
        """Until nobody makes a step any more."""

        def stands() -> bool:
            before = [self.step(rank) for rank in range(WORLD)]
            time.sleep(1.0)
            return before == [self.step(rank) for rank in range(WORLD)]

        self.until(stands)

    def order(self, rank: int, word: str) -> None:
        """Hang."""
        (self.folder / f"order-{rank}").write_text(word)

    def release(self) -> None:
        """Go on."""
        for file in self.folder.glob("order-*"):
            file.unlink()
        before = max(self.step(rank) for rank in range(WORLD))
        self.until(lambda: all(self.step(rank) > before + 2 for rank in range(WORLD)))

    def pid(self) -> int:
        """The launcher's."""
        assert self.launcher is not None
        return self.launcher.pid

    def rank(self, rank: int) -> int:
        """A rank's process."""
        return job(foreign.processes(), pids=[self.pid()]).ranks[rank]

    def end(self) -> None:
        """All of it."""
        if self.launcher is not None:
            here = foreign.processes()
            ranks = {one.pid for one in here if one.env.get("RANK") and one.parent == self.launcher.pid}
            for pid in [self.launcher.pid, *ranks]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.launcher.wait()
            self.launcher = None


@pytest.fixture(scope="module", params=["torchrun", pytest.param("accelerate", marks=pytest.mark.slow)])
def torchrun(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Torchrun]:
    run = Torchrun(tmp_path_factory.mktemp("foreign"), request.param)
    run.start()
    yield run
    run.end()


def asked(pid: int) -> dict[str, object]:
    """As an operator asks, and in time."""
    began = time.monotonic()
    done = subprocess.run(
        [Path(sys.executable).with_name("elasticrl"), "diagnose", "--pid", str(pid), "--json"], capture_output=True
    )
    assert time.monotonic() - began < patience(WITHIN_S)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


@pytest.mark.parametrize("how", ["data", "save", "evaluate", "lock", "fetch", "child", "queue"])
def test_who_is_elsewhere_while_the_others_wait_is_named(torchrun: Torchrun, how: str) -> None:
    torchrun.order(1, how)
    torchrun.still()
    told = asked(torchrun.pid())
    torchrun.release()  # nothing was broken by asking
    assert told["verdict"]["class"] == Fault.HOST_HANG, told
    assert told["verdict"]["culprit"]["ranks"] == [1], told


def test_who_was_stopped_is_named(torchrun: Torchrun) -> None:
    os.kill(torchrun.rank(2), signal.SIGSTOP)
    torchrun.still()
    told = asked(torchrun.rank(0))
    told_of_all = asked(torchrun.pid())
    os.kill(torchrun.rank(2), signal.SIGCONT)
    torchrun.release()
    assert told["ranks"].keys() == {"0"}  # what was named, and what it has started
    assert told_of_all["verdict"]["class"] == Fault.HOST_HANG
    assert told_of_all["verdict"]["culprit"]["ranks"] == [2]


def test_who_waits_in_another_operation_is_named(torchrun: Torchrun) -> None:
    torchrun.order(0, "other")
    torchrun.still()
    told = asked(torchrun.pid())
    torchrun.start()  # no collective of that group can be whole again
    assert told["verdict"]["class"] == Fault.DESYNC, told
    assert told["verdict"]["culprit"]["ranks"] == [0]


def test_who_never_came_to_the_group_is_named(torchrun: Torchrun) -> None:
    torchrun.start(late=1)
    torchrun.until(lambda: len(job(foreign.processes(), pids=[torchrun.pid()]).ranks) == WORLD)
    time.sleep(patience(6.0))  # until torch is imported, and two of them wait
    told = asked(torchrun.pid())
    torchrun.order(1, "")
    torchrun.going()
    assert told["verdict"]["class"] == Fault.HOST_HANG, told
    assert told["verdict"]["culprit"]["ranks"] == [1]


def test_who_failed_and_does_not_end_is_named(torchrun: Torchrun) -> None:
    torchrun.order(1, "fail")
    torchrun.still()
    told = asked(torchrun.pid())
    torchrun.start()
    assert told["verdict"]["class"] == Fault.HOST_HANG, told
    assert told["verdict"]["culprit"]["ranks"] == [1]


def test_a_job_that_goes_on_is_not_called_broken(torchrun: Torchrun) -> None:
    told = asked(torchrun.pid())
    assert told["verdict"]["class"] == Fault.UNKNOWN or told["verdict"]["confidence"] == "low", told
    assert told["verdict"]["culprit"]["ranks"] == []
    assert told["world"] == WORLD


def env(rank: int, *, local: int | None = None, count: int = 2, port: str = "29500", **more: str) -> dict[str, str]:
    told = {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": port, **more}
    return told if local is None else {**told, "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(count)}


LAUNCHER = Seen(pid=10, parent=1, env={})
RANKS = [Seen(pid=12, parent=10, env=env(2, local=0)), Seen(pid=13, parent=10, env=env(3, local=1))]
LOADER = Seen(pid=14, parent=13, env=env(3, local=1))
OTHER = Seen(pid=20, parent=1, env=env(0, port="29501"))


def test_ranks_are_found_below_their_launcher_and_not_their_children() -> None:
    assert job([LOADER, *RANKS, LAUNCHER, OTHER], pids=[10]) == Job(
        name="10.0.0.1:29500", ranks={2: 12, 3: 13}, world=4
    )


def test_who_belongs_on_this_machine_and_is_not_there_is_told() -> None:
    assert job([LAUNCHER, RANKS[1]], pids=[10]).gone == (2,)


def test_ranks_of_two_jobs_are_refused_with_their_addresses() -> None:
    with pytest.raises(NoJob, match=r"2 jobs: 10\.0\.0\.1:29500 \(process 12\); 10\.0\.0\.1:29501 \(process 20\)"):
        job([*RANKS, OTHER], pids=[12, 20])


def test_slurm_s_tasks_are_ranks_where_nobody_says_otherwise() -> None:
    tasks = [
        Seen(pid=30 + n, parent=1, env={"SLURM_JOB_ID": "7", "SLURM_PROCID": str(n), "SLURM_NTASKS": "8"})
        for n in range(2)
    ]
    assert job([*tasks, OTHER], slurm="7") == Job(name="ranks by SLURM_PROCID", ranks={0: 30, 1: 31}, world=8)


def test_processes_that_say_no_rank_are_numbered_as_they_were_named() -> None:
    assert job([Seen(pid=5, parent=1, env={}), Seen(pid=6, parent=1, env={})], pids=[6, 5]).ranks == {0: 6, 1: 5}


def stack(name: str, line: int = 1) -> Stack:
    file = "/env/torch/distributed/distributed_c10d.py" if name == "all_reduce" else "/job/train.py"
    return Stack(pid=1, frames=(Frame(file=file, line=line, name=name),), state="S")


def test_who_is_busy_while_others_stand_and_wait_is_looked_at_and_who_goes_on_is_not() -> None:
    waits, busy = [stack("all_reduce")] * 3, [stack("evaluate", n) for n in range(3)]
    walks = [stack("all_reduce"), stack("forward"), stack("all_reduce")]
    assert settled([dict(enumerate(row)) for row in zip(waits, busy, strict=True)]).keys() == {0, 1}
    assert settled([dict(enumerate(row)) for row in zip(walks, busy, strict=True)]) == {}
    assert settled([dict(enumerate(row)) for row in zip(waits, walks, strict=True)]).keys() == {0}


def test_whom_the_kernel_killed_was_another_s_where_all_ranks_live() -> None:
    killed = Evidence(kind=Kind.OOM_KILLER, sign=Sign.OOM_KILLED)
    broken = Evidence(kind=Kind.XID, sign=Sign.GPU_BROKEN)
    assert concerns([killed, broken], ()) == (broken,)
    assert concerns([killed, broken], {2}) == (killed, broken)


def test_who_has_ended_is_named_where_the_others_wait() -> None:
    waits = tuple(Evidence(kind=Kind.STACK, sign=Sign.WAITED, rank=rank, op="all_reduce") for rank in (0, 2))
    gone = Evidence(kind=Kind.EXIT, sign=Sign.GONE, rank=1, detail="its process is gone", source="processes")
    verdict = judge((*waits, gone), Known(world=3, heard=frozenset({0, 2})))
    assert (verdict.fault, verdict.ranks) == (Fault.DEAD_RANK, (1,))


@pytest.mark.parametrize("how", [{"pids": [99]}, {"slurm": "99"}])
def test_where_nothing_is_found_it_says_what_to_do(how: dict[str, object]) -> None:
    with pytest.raises(NoJob, match=r"on this machine\. Look where its ranks run"):
        job([LAUNCHER, *RANKS], **how)  # type: ignore[arg-type]
