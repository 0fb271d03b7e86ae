"""How a job ends: with its last checkpoint committed, on the disk as in the store; and what follows when the store is lost."""

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from chaos.live.local import Job
from chaos.patience import patience
from elasticrl.cli.find import left_behind
from elasticrl.contract.model import Outcome, Phase, Plan
from elasticrl.core.node.adopt import AHEAD
from elasticrl.daemon.client import Unanswered
from elasticrl.runtime.checkpoint.place import place
from elasticrl.runtime.checkpoint.shelf import listing
from elasticrl.shell import keys
from elasticrl.store import Delete, StoreSettings, open_store

PROGRAM = Path(__file__).parents[1] / "runtime" / "run_job.py"
STEPS = 8
STOPPED = Outcome.STOPPED.value


class Adopting(Job):
    """Its daemons are started with --adopt, once that is asked for."""

    adopt = False

    def overrides(self, node: str) -> list[str]:
        """What is this node's own."""
        return [*super().overrides(node), *(["--adopt"] if self.adopt else [])]

    def forget(self) -> None:
        """The store loses the job."""

        async def clear() -> None:
            settings = StoreSettings(endpoints=tuple(self.etcd.endpoints), namespace=keys.namespace(self.name))
            async with open_store(settings) as store:
                known = (keys.PLAN, keys.COMMIT, keys.LEADER, keys.INTENT, keys.MEMBERS, keys.SECRET)
                await store.txn((), [Delete(scope=scope) for scope in known])

        self.run(clear())

    def plan(self) -> Plan:
        """As the store has it."""

        async def look() -> Plan:
            settings = StoreSettings(endpoints=tuple(self.etcd.endpoints), namespace=keys.namespace(self.name))
            async with open_store(settings) as store:
                entry = await store.get(keys.PLAN)
            assert entry is not None
            return keys.load(Plan, entry.value, keys.PLAN)

        return self.run(look())

    def shelved(self) -> list[tuple[int, bool]]:
        """The steps of its checkpoints, the newest first, and whether each is committed."""
        found = listing(place(str(self.folder / "saves" / self.name)))
        return [(entry.version.step, entry.committed) for entry in found]

    def ends(self, within_s: float = 90.0) -> list[int | None]:
        """The exit codes of all daemons, which end by themselves."""
        daemons = list(self.daemons.values())
        self.until(lambda: all(daemon.poll() is not None for daemon in daemons), within_s, "the end of the job")
        return [daemon.returncode for daemon in daemons]


def job_of(steps: int = STEPS, **more: Mapping[str, object]) -> Adopting:
    """Two nodes, or as many as `more` says, make so many steps."""
    conf = {"job": {"program": str(PROGRAM), "seed": 7, "steps": steps}, "checkpoint": {"every": 10_000}, **more}
    return Adopting(etcd=1, conf=conf, script_args=("--step-ms", "20"))


def test_a_job_that_ends_by_itself_leaves_its_last_checkpoint_committed() -> None:
    with job_of() as job:
        job.start("n0", "n1")
        assert job.ends() == [0, 0]
        assert job.shelved() == [(STEPS, True)]


@pytest.mark.parametrize(
    ("nodes", "paused"), [(("n0",), True), (("n0", "n1", "n2"), False)], ids=["one, paused", "three"]
)
def test_nodes_that_are_all_drained_at_once_leave_soon_and_with_all_saved(nodes: tuple[str, ...], paused: bool) -> None:
    # Found where three were stopped at one stroke: those that could not be spared parked, which saves nothing, for a minute.
    few = {"membership": {"min_nodes": 1}, "vault": {"copies": 0}} if len(nodes) == 1 else {}
    with job_of(0, **few) as job:
        job.start(*nodes)
        job.until_steps(len(nodes), count=5, within_s=60.0)
        if paused:
            job.ask("n0", "pause")
            job.until(lambda: job.plan().phase is Phase.HOLD, 20.0, "the pause")
        begun = time.monotonic()
        for node in nodes:
            job.ask(node, "drain", force=True)
        assert job.ends() == [0] * len(nodes)
        assert time.monotonic() - begun < patience(20.0)
        sealed = max(line.step for line in job.sealed())
        (step, committed), *_ = job.shelved()
        assert committed
        assert step >= sealed > 0


def test_a_job_that_is_stopped_while_it_is_paused_saves_what_it_has_made() -> None:
    with job_of(0) as job:
        job.start("n0", "n1")
        job.until_steps(2, count=5, within_s=60.0)
        job.ask("n0", "pause")
        job.until(lambda: job.plan().phase is Phase.HOLD, 20.0, "the pause")
        job.ask("n1", "stop")
        assert job.ends() == [STOPPED, STOPPED]
        sealed = max(line.step for line in job.sealed())
        (step, committed), *_ = job.shelved()
        assert committed
        assert step >= sealed > 0


def test_a_stop_counts_for_a_daemon_whose_life_began_beside_a_store_with_higher_numbers() -> None:
    """Found live: the store had lost its data. Its numbers began anew, so that a stop passed for one of before that life."""
    with job_of(0) as job:
        job.start("n0", "n1")
        job.until_steps(2, count=5, within_s=patience(60.0))
        for node in ("n0", "n1"):
            job.daemons[node].kill()
            job.daemons[node].wait(10.0)
            (path,) = job.folder.rglob(f"{node}/life.json")
            path.write_text(json.dumps(json.loads(path.read_text()) | {"since": 1_000_000}))
        job.start("n0", "n1")
        job.until(lambda: _adopted(job, "n0") and _adopted(job, "n1"), patience(60.0), "both go on with their lives")
        job.ask("n0", "stop")
        assert job.ends(patience(30.0)) == [STOPPED, STOPPED]


def _adopted(job: Job, node: str) -> bool:
    try:
        return bool(job.ask(node, "status")["generation"])
    except Unanswered:
        return False


def test_what_a_job_made_that_hung_when_it_was_stopped_is_in_memory_for_the_next() -> None:
    with job_of(0, recovery={"drain": "3s"}) as job:
        job.start("n0", "n1")
        job.until_steps(2, count=5, within_s=60.0)
        os.kill(job.worker("n1"), signal.SIGSTOP)
        job.ask("n0", "stop")
        assert job.ends(30.0) == [STOPPED, STOPPED]
        made = max(line.step for line in job.sealed())
        assert job.shelved() == []
        begun = time.monotonic()
        job.start("n0", "n1")
        job.until_steps(2, after=begun, count=2, within_s=60.0)
        first = min(line.step for line in job.sealed() if line.at > begun)
        assert first >= made, "it goes on from the newest that was whole, of which it tells"


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "without power"])
def test_who_begins_a_job_again_watches_for_nobody_of_the_life_before(stopped: bool) -> None:
    # Found by a newcomer: until the first plan daemons listened for those of the last one, at addresses where nobody was any
    # more, and the new gang began with accusations.
    with job_of(0) as job:
        job.start("n0", "n1")
        job.until_steps(2, count=5, within_s=60.0)
        if stopped:
            job.ask("n0", "stop")
            assert job.ends(30.0) == [STOPPED, STOPPED]
        else:
            job.kill_node("n0")
            job.kill_node("n1")
        said = len(job.events("n0"))
        job.start("n0")
        job.until(lambda: "plan.adopted" in names(job, said), 30.0, "that n0 sees the plan of the life before")
        time.sleep(2.0)  # which is more than silence is taken for chance
        begun = time.monotonic()
        job.start("n1")
        job.until_steps(2, after=begun, count=20, within_s=60.0)
        new = names(job, said)
        assert not [name for name in new if name.startswith("neighbour.")]
        if stopped:
            assert new.count("plan.adopted") == 2


def names(job: Job, after: int) -> list[str]:
    """What n0's daemon has said since."""
    return [line["event"] for line in job.events("n0")[after:]]


@pytest.mark.slow
def test_a_store_that_has_lost_the_job_is_refused_and_then_adopted() -> None:
    with job_of() as job:
        job.start("n0", "n1")
        assert job.ends() == [0, 0]
        before = job.plan().generation
        job.forget()
        job.start("n0")
        assert job.ends()[0] == 78
        assert len(job.events("n0", "daemon.refused")) == 1
        assert left_behind(job.home("n0") / "agent.sock")
        job.adopt = True
        job.start("n0", "n1")
        assert job.ends() == [0, 0]
        assert job.plan().generation > before + AHEAD
        assert job.shelved()[0] == (STEPS, True)
        job.check()
