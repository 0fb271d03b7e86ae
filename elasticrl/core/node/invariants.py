"""What must hold of every plan that is proposed and every commit that is asked for; these asserts stay on.

The one idea: the rules of `lead` each see to their own concern; here is written once what none of them may break. A plan that
fails here is not written: its leader stops deciding and says `bug`, while training goes on under the present plan.
"""

from math import isfinite

from elasticrl.contract.events import WriteCommit
from elasticrl.contract.model import Phase, Plan, View


def check_plan(view: View, plan: Plan) -> None:
    """The next plan is one, remembers the newest commit, and is fit to be followed."""
    number = plan.generation
    assert number == view.generation + 1, f"generation {number} cannot follow {view.generation}"
    assert plan.resume == view.committed, f"generation {number} resumes {plan.resume}, committed is {view.committed}"
    assert plan.causes, f"generation {number} has no cause"
    nodes = [seat.member.node for seat in plan.ring]
    assert len(set(nodes)) == len(nodes), f"generation {number} names a node twice: {sorted(nodes)}"
    most = plan.lanes * plan.team
    assert plan.world <= most, (
        f"generation {number} has {plan.world} ranks, and {plan.lanes} lanes have room for {most}"
    )
    assert all(seat.born <= number for seat in plan.seats), f"generation {number} has workers from the future"
    assert plan.seats or plan.phase is not Phase.TRAIN, f"generation {number} trains nobody"
    assert (plan.exit_code is None) == (plan.phase is not Phase.STOP), (
        f"generation {number}: an exit code belongs to a stop"
    )
    if view.plan is not None:
        places = {seat.member: place for place, seat in enumerate(view.plan.seats)}
        kept = [places[seat.member] for seat in plan.seats if seat.member in places]
        assert kept == sorted(kept), f"generation {number} reorders the survivors"


def check_commit(view: View, commit: WriteCommit) -> None:
    """Commits only rise, under the newest generation that is known."""
    assert commit.step > view.committed, f"step {commit.step} cannot follow commit {view.committed}"
    assert commit.generation == view.generation, f"generation {commit.generation} commits under {view.generation}"


def check_wake(now: float, wake_at: float) -> None:
    """To be woken in the past is to spin."""
    assert wake_at > now or not isfinite(wake_at), (
        f"asked to be woken at {wake_at}, which was {now - wake_at:.3f} s ago"
    )
