"""What an empty store beside a job's committed checkpoints means, and what is written into it by who adopts them.

The one idea: to begin such a job as if it were new would put its old generations' numbers on other plans, and forget what was
committed. So nobody does that unasked; who asks gets the newest good checkpoint as the commit, under a plan that has ended, of
a generation above all that can have been: the job goes on as one that was stopped.
"""

from elasticrl.base.value import dataclass
from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.model import Commit, Outcome, Phase, Plan

AHEAD = 100  # generations that the lost store may have known of and no checkpoint tells of


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A committed checkpoint of the job, and the newest generation of all that lie beside it.

    Example: Kept(place="/mnt/runs/ppo", name="step-00001280-g14", step=1280, generation=14, newest=15)
    """

    place: str
    name: str
    step: int
    generation: int
    newest: int


def began(since: int, revision: int) -> int:
    """When an adopted life began, by the numbers of a store at this revision; 0, not told, if that store's data is lost.

    Found live: daemons were killed, the store lost its data, and they went on with lives that had begun at a higher number. A
    stop passed for one that was asked before them, and nothing came of it.

    >>> began(12, 480), began(1145, 30)
    (12, 0)
    """
    return since if since <= revision else 0


def refusal(kept: Kept) -> str:
    """Why the job is not begun, for whoever has not asked to adopt."""
    return (
        f"the store knows nothing of this job, but {kept.place} holds its checkpoints, committed up to {kept.name}: etcd "
        "has lost its data, or this is another etcd. Bring the right one back; or go on from the newest good checkpoint "
        "with --adopt (elasticrl run --adopt, or elasticrl daemon --adopt on one node); or give a new job another job.name"
    )


def adopted(kept: Kept, written: float) -> tuple[Plan, Commit]:
    """What the store is told, at this time of the wall clock."""
    plan = Plan(
        generation=kept.newest + AHEAD, phase=Phase.STOP, resume=kept.step, exit_code=Outcome.STOPPED.value,
        causes=(Cause(why=Why.ADOPTED, said=kept.name),),
    )  # fmt: skip
    return plan, Commit(step=kept.step, generation=kept.generation, manifest=kept.name, written=written)
