"""How often the same thing may fail: a failure is remembered in the plan, and a crash loop stops the job."""

from collections.abc import Callable
from dataclasses import replace

from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.model import Outcome, Phase, Plan, Strike
from elasticrl.contract.verdict import Verdict
from elasticrl.core.judge.policy import Act, Answer
from elasticrl.core.lead.scene import Move, Scene


def strike_of(before: Strike | None, cause: Cause, step: int, *, own: bool = False, unblamed: bool = False) -> Strike:
    """The same failure at the same step again, or a first one. The program's `own` failures all count until the job has got
    beyond the step of the first: one bug may show as this today and as that tomorrow, with other figures on each rank.

    So do `unblamed` ones, where all workers that ended say that a peer had gone, and none had, as far as is known. The two are
    not added up at the limit (`worst`): a death that was told of too late looks like one of these.

    Found by simulation: a worker that failed of something else in between must not make a crash loop look new.
    """
    if before is None or step > before.step:
        return Strike(cause=cause, step=step, count=1, unblamed=int(unblamed))
    same = alike(before.cause, cause)
    if own or unblamed or (same and step == before.step):
        return replace(
            before,
            count=before.count + 1,
            mixed=before.mixed or not same,
            unblamed=before.unblamed + int(unblamed),
        )
    return before if before.count > 1 else Strike(cause=cause, step=step, count=1)


def worst(strike: Strike) -> int:
    """How often the program failed, or ended for a peer that nobody knows to have gone, whichever is more.

    >>> worst(Strike(cause=Cause(why=Why.FAILED), step=7, count=3, unblamed=2))
    2
    """
    return max(strike.count - strike.unblamed, strike.unblamed)


def explained(before: Strike | None) -> Strike | None:
    """What is left of it once somebody is known to have gone: of what looked like nobody's doing that one may be the cause."""
    if before is None or not before.unblamed:
        return before
    count = before.count - before.unblamed
    return replace(before, count=count, unblamed=0) if count else None


def alike(one: Cause, other: Cause) -> bool:
    """The same, whatever figures its words have, and whichever rung's time was up?

    Found by the scenario nccl-breaks-and-nobody-may-use-gloo: each rung that did not help looked like a first failure.

    >>> alike(Cause(why=Why.UNFORMED, setting="recovery.restart"), Cause(why=Why.UNFORMED, setting="recovery.reload"))
    True
    >>> alike(Cause(why=Why.FAILED, raised="ValueError"), Cause(why=Why.FAILED, raised="KeyError"))
    False
    """
    return (one.why, one.fault, one.raised) == (other.why, other.fault, other.raised)


def strike_or(scene: Scene, strike: Strike | None, go_on: Callable[[], Plan]) -> Move:
    """Go on, or stop the job: the same failure has come too often."""
    limit = scene.settings.recovery.no_progress_limit
    if strike is None or worst(strike) < limit:
        return Move(plan=go_on())
    mixed = ", among others" if strike.mixed else ""
    loop = Cause(
        why=Why.CRASH_LOOP,
        fault=strike.cause.fault,
        count=worst(strike),
        step=strike.step,
        said=f"{strike.cause}{mixed}",
    )
    seats = scene.plan.seats if scene.plan else ()
    return Move(plan=scene.write(Phase.STOP, seats, loop, strike=strike, exit_code=Outcome.CRASH_LOOP.value))


def hopeless(scene: Scene) -> Move | None:
    """As `hopeless_by`, of what is known of the present gang."""
    finding = scene.lead.dossier.finding
    return None if finding is None else hopeless_by(scene, finding.verdict, finding.answer)


def hopeless_by(scene: Scene, verdict: Verdict, answer: Answer) -> Move | None:
    """The job stops: what is proven broke it, and the operator has said that going on would only burn the cluster."""
    if answer.act is not Act.STOP:
        return None
    seats = scene.plan.seats if scene.plan else ()
    ends = Cause(why=Why.POLICY, fault=verdict.fault, said=answer.reason)
    plan = scene.write(Phase.STOP, seats, ends, exit_code=Outcome.CRASH_LOOP.value)
    return Move(plan=plan, verdict=verdict)
