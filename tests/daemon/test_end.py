"""How a job ends: with its last checkpoint committed, on the disk as in the store; and what follows when the store is lost."""

from pathlib import Path

import pytest

from chaos.live.local import Job
from elasticrl.cli.find import answers
from elasticrl.core.adopt import AHEAD
from elasticrl.core.model import Plan
from elasticrl.runtime.checkpoint.place import place
from elasticrl.runtime.checkpoint.shelf import listing
from elasticrl.shell import keys
from elasticrl.store import Delete, StoreSettings, open_store

PROGRAM = Path(__file__).parents[1] / "runtime" / "run_job.py"
STEPS = 8


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


def job_of(steps: int = STEPS) -> Adopting:
    """Two nodes make so many steps."""
    conf = {"job": {"program": str(PROGRAM), "seed": 7, "steps": steps}, "checkpoint": {"every": 100}}
    return Adopting(etcd=1, conf=conf, script_args=("--step-ms", "20"))


def test_a_job_that_ends_by_itself_leaves_its_last_checkpoint_committed() -> None:
    with job_of() as job:
        job.start("n0", "n1")
        assert job.ends() == [0, 0]
        assert job.shelved() == [(STEPS, True)]


@pytest.mark.slow
def test_a_store_that_has_lost_the_job_is_refused_and_then_adopted() -> None:
    with job_of() as job:
        job.start("n0", "n1")
        assert job.ends() == [0, 0]
        before = job.plan().generation
        job.forget()
        job.start("n0")
        assert job.ends()[0] == 78
        (refused,) = job.events("n0", "daemon.refused")
        assert "the store knows nothing of this job" in refused["reason"]
        assert "elasticrl daemon --adopt" in refused["reason"]
        assert not answers(job.home("n0") / "agent.sock")
        job.adopt = True
        job.start("n0", "n1")
        assert job.ends() == [0, 0]
        assert job.plan().generation > before + AHEAD
        assert job.shelved()[0] == (STEPS, True)
        job.check()
