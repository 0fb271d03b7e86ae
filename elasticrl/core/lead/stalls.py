"""The rules for members that wait while nobody has been found to blame: look, then act on what was proven, else probe. Where
only a script's log has fallen silent, nothing is done but to look.
"""

from dataclasses import replace

from elasticrl.contract.cause import Cause, Why, found
from elasticrl.contract.evidence import Kind, Sign
from elasticrl.contract.model import Phase, Rung, Work
from elasticrl.contract.verdict import Confidence, Fault
from elasticrl.core.judge.policy import Act
from elasticrl.core.lead.findings import known
from elasticrl.core.lead.scene import Move, Scene
from elasticrl.core.lead.strikes import hopeless, strike_of, strike_or
from elasticrl.core.node.dossier import WAYS
from elasticrl.core.node.state import Finding

WORD_S = 1.0  # every node times its ways twice in that
LOOKS_S = 45.0  # between looks at a gang whose log is silent: what was found is forgotten after a minute


def stuck(scene: Scene) -> Move | None:
    """Members wait in a collective, or have left a broken one, and nobody has been found to blame."""
    plan = scene.plan
    if plan is None or plan.phase is not Phase.TRAIN or scene.lead.stalls.since is None:
        return None
    if scene.now < (until := scene.patient_until):
        return Move(wake_at=until, why="the worker that others waited for is back; waiting for them to go on")
    due = max(scene.lead.stalls.since, until) + scene.settings.timeouts.confirm_s
    # Who has only left a broken group was not stalled: there the loss that broke it is found by itself.
    ask = bool(scene.doing[Work.STALLED]) and scene.view.look_revision <= scene.lead.stalls.asked
    if scene.now < due:
        return Move(wake_at=due, why="workers are stalled; waiting to learn which one is at fault", inspect=ask)
    if scene.now < due + WORD_S and _moved_on(scene):
        return Move(wake_at=due + WORD_S, why="some workers have gone on; waiting for the others", inspect=ask)
    patience = due + scene.settings.timeouts.dump_s
    if scene.now < patience and not said(scene) and (why := _looked_at(scene)):
        return Move(wake_at=patience, why=why, inspect=ask)
    if stop := hopeless(scene):
        return stop
    finding = scene.lead.dossier.finding
    if finding is not None and scene.now < due + WORD_S and _half_told(finding):
        return Move(
            wake_at=due + WORD_S, why="a network path is slow; waiting for the other nodes' results", inspect=ask
        )
    if finding is not None and (move := _known(scene, finding)):
        return move
    verdict = finding.verdict if finding else None
    causes = (Cause(why=Why.STALLED), *known(verdict))
    return Move(plan=scene.write(Phase.PROBE, scene.kept, *causes, strike=plan.strike), verdict=verdict)


def silence(scene: Scene) -> tuple[float, int] | None:
    """When the gang is next to be looked at because a script's log is silent, brought up to this moment."""
    before = None if scene.new_plan else scene.lead.stalls.silent
    if not any(record.stall and record.stall.silent for record in scene.doing[Work.TRAINING]):
        return None
    return before if before and scene.now < before[0] + LOOKS_S else (scene.now, scene.view.look_revision)


def silent(scene: Scene) -> Move | None:
    """A script's log tells of no progress: all are asked where their workers are, so that one can be named. None is ended."""
    plan, since = scene.plan, scene.lead.stalls.silent
    if plan is None or plan.phase is not Phase.TRAIN or since is None or scene.view.look_revision > since[1]:
        return None
    return Move(inspect=True, why="the script's log shows no progress; inspecting all workers")


def _moved_on(scene: Scene) -> bool:
    """Is somebody past what others say they wait in? Then it was slow, and their word of it is on its way."""
    steps = [record.step for record in scene.doing[Work.TRAINING]]
    return any(record.step < max(steps, default=0) for record in scene.doing[Work.STALLED])


def _half_told(finding: Finding) -> bool:
    """Has one end of a way that takes long said so? A probe over it is slow itself; the other end, or a third, is about to say
    which of the two is at fault.
    """
    late = any(fact.source == WAYS and fact.sign is Sign.DELAYED for fact in finding.of)
    return late and finding.verdict.fault is Fault.NETWORK and finding.verdict.confidence is Confidence.MEDIUM


def said(scene: Scene) -> bool:
    """Has a rank said what is wrong with it, so that no stack would add to it: a setting with which no gang can form?"""
    finding = scene.lead.dossier.finding
    verdict = finding.verdict if finding else None
    return verdict is not None and verdict.fault in {Fault.CONFIG, Fault.VERSION_MISMATCH} and bool(verdict.nodes)


def _looked_at(scene: Scene) -> str:
    """What is awaited before the scene of the stall is cleared: a look at each stalled node, or the end of its culprit."""
    plan = scene.plan
    assert plan is not None
    if not scene.doing[Work.STALLED]:
        return ""
    seen = (*scene.doing[Work.STALLED], *scene.doing[Work.TRAINING])
    # Any request since the stall began will do: a busy store is asked again, with a newer number, before the first is seen.
    if any(record.looked <= scene.lead.stalls.asked for record in seen):
        return "workers are stalled; inspecting all of them"
    blamed = {
        fact.node
        for fact in scene.lead.dossier.facts
        if fact.generation == plan.generation
        and fact.kind is Kind.BEAT
        and fact.sign in {Sign.STOPPED, Sign.HOST_STUCK}
    }
    still = [record for record in scene.doing[Work.TRAINING] if record.member.node in blamed]
    return f"the worker at fault runs on {still[0].member}; waiting for it to end" if still else ""


def _known(scene: Scene, finding: Finding) -> Move | None:
    """The scene has proven what it was: no probe is needed. Ranks that parted ways form their gang anew, where they may; a
    rank that is elsewhere gets a fresh process.
    """
    plan, verdict = scene.plan, finding.verdict
    assert plan is not None
    if verdict.confidence is not Confidence.HIGH:
        return None
    again = Cause(why=Why.FOUND, fault=verdict.fault, said=f"{verdict.fault.value}: {finding.answer.act.value}")
    strike, cause = strike_of(plan.strike, again, scene.newest), found(verdict)
    if verdict.fault is Fault.DESYNC:
        rung = Rung.REFORM if strike.count == 1 else Rung.RESTART
        move = strike_or(scene, strike, lambda: scene.train(scene.kept, cause, rung=rung, strike=strike))
        return replace(move, verdict=verdict)
    if verdict.fault is not Fault.HOST_HANG or not verdict.ranks or finding.answer.act is Act.REPORT:
        return None
    born = scene.view.generation + 1
    sick = {
        seat.member
        for seat in plan.seats
        if {plan.first_rank(seat.member) + slot for slot in range(seat.slots)} & set(verdict.ranks)
    }
    warm = all(record.warm for seat in plan.seats if seat.member in sick and (record := scene.record_of(seat)))
    if not warm or len(sick) == len(plan.seats):
        return None
    seats = tuple(replace(seat, born=born) if seat.member in sick else seat for seat in scene.kept)
    move = strike_or(scene, strike, lambda: scene.train(seats, cause, rung=Rung.REPLACE, strike=strike))
    return replace(move, verdict=verdict)
