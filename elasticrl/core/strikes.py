"""How often the same thing may fail: a failure is remembered in the plan, and a crash loop stops the job."""

from collections.abc import Callable
from dataclasses import replace

from elasticrl.core.model import Outcome, Phase, Plan, Strike
from elasticrl.core.policy import Act
from elasticrl.core.scene import Move, Scene
from elasticrl.core.verdict import Confidence


def strike_of(before: Strike | None, cause: str, step: int) -> Strike:
    """The same failure at the same step again, or a first one.

    Found by seed 1188: a worker that failed of something else in between must not make a crash loop look new.
    """
    if before and (before.cause, before.step) == (cause, step):
        return replace(before, count=before.count + 1)
    if before and before.count > 1 and step <= before.step:
        return before
    return Strike(cause=cause, step=step, count=1)


def strike_or(scene: Scene, strike: Strike | None, go_on: Callable[[], Plan]) -> Move:
    """Go on, or stop the job: the same failure has come too often."""
    limit = scene.settings.recovery.no_progress_limit
    if strike is None or strike.count < limit:
        return Move(plan=go_on())
    why = f"crash loop: {strike.cause}, {strike.count} times at step {strike.step} without progress"
    seats = scene.plan.seats if scene.plan else ()
    return Move(plan=scene.write(Phase.STOP, seats, why, strike=strike, exit_code=Outcome.CRASH_LOOP.value))


def hopeless(scene: Scene) -> Move | None:
    """The job stops: what is proven broke it, and the operator has said that going on would only burn the cluster."""
    finding = scene.lead.finding
    if finding is None or finding.answer.act is not Act.STOP or finding.verdict.confidence is not Confidence.HIGH:
        return None
    seats = scene.plan.seats if scene.plan else ()
    plan = scene.write(Phase.STOP, seats, finding.answer.reason, exit_code=Outcome.CRASH_LOOP.value)
    return Move(plan=plan, verdict=finding.verdict)
