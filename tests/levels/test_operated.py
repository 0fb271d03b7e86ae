"""What operators ask of a job that is a script: a node is drained, the job is paused and goes on."""

import pytest

from tests.levels.scripts import NODES, Running

pytestmark = pytest.mark.timeout(420)
FINISHED = 0


def test_a_node_is_drained_and_a_job_is_paused_and_goes_on() -> None:
    with Running("ddp.py", "--steps", "100000", "--last", "{folder}/last") as run:
        run.job.start(*NODES)
        run.trains(3)
        run.job.ask("n2", "drain")
        assert run.job.daemons["n2"].wait(60.0) == FINISHED
        run.job.end("n2")
        run.trains(2)
        assert run.causes()[-1] == (["left"], ["n2"])
        assert run.job.ask("n0", "status")["faults"] == 0, "a drain is no fault"
        run.job.ask("n0", "pause")
        run.until(lambda: run.job.ask("n0", "status")["state"] == "PAUSED", "the pause")
        run.until(lambda: not run.job.ask("n0", "logs") and not run.job.ask("n1", "logs"), "the end of all workers")
        at = run.lines()[-1].at
        run.job.ask("n0", "resume")
        run.trains(2, after=at)
        last = max(line.step for line in run.lines()) + 20
        (run.job.folder / "last").write_text(str(last))
        assert run.ends() == [FINISHED, FINISHED]
        assert {line.step for line in run.lines()} == set(range(1, last + 1))
        run.job.check()
