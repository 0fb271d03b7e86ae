"""Rules for the job as a whole: it is over, it shall end, it is finished, it shall wait."""

from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.model import OUTSIDE, Intent, Outcome, Phase, Rung, Seat, Work
from elasticrl.core.lead.lost_seats import stranding
from elasticrl.core.lead.scene import Move, Scene
from elasticrl.core.lead.shards import forgone


def over(scene: Scene) -> Move | None:
    """A stopped job stays stopped; but one whose gang broke as it was to end forms it once more, to save."""
    if scene.plan and scene.plan.phase is Phase.STOP:
        return _forms_without(scene) or Move()
    return None


def _forms_without(scene: Scene) -> Move | None:
    """A node had lost its power, or all its ways, a moment before the stop, and nobody had noticed yet: the others wait for it
    in a collective, and would be ended without a save. They form once more without it, and the stop is asked for again.

    A stop is final once any of them has ended: then a save may be whole that nobody has committed yet, and one that has left in
    order is as silent as one that died. So all must be at work as far as is known, and none may wait for disks. It ends: each
    time the gang is smaller, and after `recovery.drain` its workers are ended as they are.
    """
    plan = scene.plan
    if plan is None or plan.exit_code != Outcome.STOPPED.value or not scene.behind:
        return None
    if any(0 < scene.view.plan_revision <= r.since and r.member not in plan.seat_of for r in scene.records.values()):
        return None  # somebody wants the job again, and who began for that would obey the new stop
    gone = [fate.cause for fate in scene.fates if fate.cause]
    if not gone or any(cause.why is not Why.SILENT for cause in gone):
        return None
    if not all(record and record.work in ENDING and record.phase != OUTSIDE for record in scene.ranked):
        return None
    if len(scene.kept) < scene.settings.membership.min_nodes or forgone(scene, scene.kept):
        return None  # nothing can be saved by so few, or nothing that is not on the disk already
    stopped = Cause(why=Why.STOPPED, nodes=(stopped_by(scene) or "",))
    return Move(plan=scene.train(scene.kept, *gone, stopped, rung=Rung.REFORM, strike=plan.strike, saves=True))


ENDING = (Work.TRAINING, Work.STALLED, Work.PARKED)  # what workers do that were asked to end, and have not


def stopped_by(scene: Scene) -> str | None:
    """Who asked for the stop that stands in the plan; None: there is none."""
    if scene.plan is None or scene.plan.phase is not Phase.STOP:
        return None
    return next((name for cause in scene.plan.causes if cause.why is Why.STOPPED for name in cause.nodes), "")


def who(scene: Scene) -> str:
    """Who wants what is wanted of the job."""
    return scene.view.intent_by or "an operator"


def asked_to_stop(scene: Scene) -> Move | None:
    """An operator wants the job to end. (What was asked before all of those began who are here was asked of an earlier run.)"""
    if scene.view.intent is not Intent.STOP or scene.stop_answered:
        return None
    until = scene.lead.since + scene.settings.membership.lease_ttl_s  # by then the dead have no record
    if scene.older(scene.since) and scene.now < until:
        return Move(
            wake_at=until, why="a stop was requested before this leader began; waiting to see which nodes are still up"
        )
    if first := _ends_to_save(scene) or _forms_to_save(scene):
        return first
    if _mends_to_save(scene):
        return None  # what follows are the rules for who is lost
    # All of the gang save, those too that leave, or of whom nothing is heard just now: without them no save is whole.
    seats, causes = scene.plan.seats if scene.plan else (), [_stopped(scene)]
    if scene.behind and _broken(scene):
        causes.append(Cause(why=Why.UNSAVED, step=scene.view.committed, count=scene.newest))
    return Move(plan=scene.write(Phase.STOP, seats, *causes, exit_code=Outcome.STOPPED.value))


def _stopped(scene: Scene) -> Cause:
    return Cause(why=Why.STOPPED, nodes=(who(scene),))


def _broken(scene: Scene) -> bool:
    """Can the gang not save as it is, as it has lost somebody, or been left by somebody? Who leaves saves first."""
    lost = any(fate.fresh or (fate.seat is None and not fate.leaving) for fate in scene.fates)
    return lost or bool(scene.doing[Work.PARKED]) or (scene.plan is not None and scene.plan.phase is not Phase.TRAIN)


def _ends_to_save(scene: Scene) -> Move | None:
    """A held gang that ends with a save, as nodes leave that it cannot spare, does so first. Found by putting a stop at every
    moment of such a drain: its first rank had no seat any more, so nobody committed what was saved.

    Found by a second fault in such a drain: where all workers had ended without a save, the stop waited for one all the same.
    """
    plan, due = scene.plan, scene.lead.formation.planned_at + 2 * scene.settings.recovery.drain_s
    if plan is None or plan.phase is not Phase.HOLD or not plan.saves or scene.now >= due:
        return None
    ended = all(r.work in (Work.NONE, Work.FAILED) for r in filter(None, map(scene.record_of, plan.seats)))
    if ended and not (scene.behind and _commit_comes(scene, plan.seats[0])):
        return None
    return Move(wake_at=due, why=f"{_stopped(scene)}; saving before the workers end")


def _commit_comes(scene: Scene, first: Seat) -> bool:
    """May a save of the held gang be whole that is not committed? Rank 0's node says so; if it is silent nobody knows."""
    record = scene.record_of(first)
    return record is None or (record.member == first.member and record.saved > scene.view.committed)


def _mends_to_save(scene: Scene) -> bool:
    """A gang that broke as it was to stop is mended first, so that it can save, while enough are there and its time is not up.

    Who is silent but has a record may come back. Found by a kill of a daemon, for a second, at every moment of a stop.
    """
    plan = scene.plan
    if plan is None or scene.now >= scene.stop_due or not _broken(scene):
        return False
    made = scene.settings.means.commits and (scene.behind or bool(scene.doing[Work.TRAINING]))
    here = [node for node, record in scene.records.items() if not record.leaving and node not in scene.held]
    return made and len(here) >= scene.settings.membership.min_nodes


def _forms_to_save(scene: Scene) -> Move | None:
    """Only a gang can save: one that is paused or probed forms once more, one that is forming may do so, in its time.

    The simulator had believed that parked workers save. Live, a job that was paused and then stopped went on from its last
    commit when it was started again.
    """
    plan = scene.plan
    if plan is None or scene.trained or scene.still_trains or (plan.phase is Phase.HOLD and plan.saves):
        return None  # (one that is to grow trains on, and can save as it is)
    enough = max(len(plan.seats), scene.settings.membership.min_nodes)
    if len(scene.kept) < enough or any(fate.fresh for fate in scene.fates):
        return None  # what would be waited for is not there
    if not scene.behind:
        return None
    if plan.phase is not Phase.TRAIN:
        again = scene.train(scene.kept, _stopped(scene), rung=Rung.REFORM, strike=plan.strike, saves=True)
        return Move(plan=again)
    if scene.left_behind:  # it has broken up before it had grown
        causes = (_stopped(scene), Cause(why=Why.WITHOUT_LOADING))
        return Move(plan=scene.train(scene.staying, *causes, rung=Rung.REFORM, strike=plan.strike, saves=True))
    if scene.now >= scene.deadline or scene.doing[Work.PARKED]:
        return None
    return Move(wake_at=scene.deadline, why=f"{_stopped(scene)}; forming once more, to save")


def finished(scene: Scene) -> Move | None:
    """All steps are made, and the last is on disk."""
    plan = scene.plan
    if not scene.doing[Work.DONE]:
        return None
    # (Those whom the plan only adds make no step any more.)
    awaited = {seat.member for seat in plan.seats if not plan.grows or seat.born < plan.generation} if plan else set()
    if plan is None or not awaited or not awaited <= {record.member for record in scene.doing[Work.DONE]}:
        return None
    if scene.view.committed < scene.settings.steps:
        drain_s = scene.settings.recovery.drain_s
        due = drain_s + (scene.now if scene.lead.ends.done_at is None else scene.lead.ends.done_at)
        if scene.now < due:
            return Move(wake_at=due, why="all steps are made; the last checkpoint is being committed")
        who, step = plan.seats[0].member, scene.settings.steps
        why = f"all steps are made, but step {step} was not committed within {drain_s:g} s: rank 0's log ({who}) says more"
        return Move(why=f"{why}; elasticrl stop ends the job from step {scene.view.committed}")
    made = Cause(why=Why.FINISHED, step=scene.view.committed)
    if not scene.settings.means.commits:
        made = Cause(why=Why.SCRIPT_ENDED)
    return Move(plan=scene.write(Phase.STOP, plan.seats, made, exit_code=Outcome.FINISHED.value))


def asked_to_pause(scene: Scene) -> Move | None:
    """An operator wants the job to wait."""
    if scene.view.intent is not Intent.PAUSE:
        return None
    if leaving := _leave_while_paused(scene):
        return leaving
    paused = Cause(why=Why.PAUSED, nodes=(who(scene),))
    if scene.plan is None or scene.plan.phase is Phase.HOLD:
        return Move(why=str(paused))
    if scene.plan.phase is Phase.TRAIN and stranding(scene):
        return None  # what follows is the rule for who leaves: it holds as well, and saves first
    return Move(plan=scene.write(Phase.HOLD, scene.kept, paused, strike=scene.plan.strike))


def _leave_while_paused(scene: Scene) -> Move | None:
    """Nodes that cannot be spared leave a paused job, as all do when its service is stopped everywhere."""
    plan = scene.plan
    if plan is None or plan.phase is not Phase.HOLD or plan.saves or not scene.behind:
        return None
    if (unspared := stranding(scene)) is None:
        return None
    return Move(plan=scene.train(plan.seats, unspared, rung=Rung.REFORM, strike=plan.strike, saves=True))
