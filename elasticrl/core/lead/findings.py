"""What the leader finds out: everybody's facts filed, judged, and answered as the operator has said.

The one idea: facts come with the records; the verdict on the present gang is judged anew when they change, whether or not any
rule will ask for it.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import compress
from operator import is_not

from elasticrl.contract.cause import Cause, found, gone
from elasticrl.contract.events import Workers
from elasticrl.contract.evidence import Evidence, bounded, of_exit
from elasticrl.contract.model import Phase, Record, Seat, Work
from elasticrl.contract.verdict import Confidence, Fault, Known, Verdict
from elasticrl.core.judge import straggler
from elasticrl.core.judge.judge import judge
from elasticrl.core.judge.policy import Act, Answer, Scope, answer
from elasticrl.core.lead.fallback import too_slow
from elasticrl.core.lead.scene import Scene
from elasticrl.core.node import dossier
from elasticrl.core.node.rows import Fate, step_of
from elasticrl.core.node.state import Dossier, Finding, Lead, Paces


def investigate(scene: Scene, lead: Lead, own: dossier.Filed, workers: Workers) -> Lead:
    """File what is new, judge it, and know what would be done about it. `own`: this node's evidence; `workers`: its own."""
    records, known, paces = scene.records, _gone_on(scene, lead.dossier, workers), lead.paces
    fresh: list[Evidence] = [*own, *_derived(scene)]
    if news := records is not known.read:
        changed = compress(records.values(), map(is_not, records.values(), map(known.read.get, records)))
        fresh += [fact for record in changed for fact in record.evidence]
    if fresh or known.facts:
        known = replace(known, facts=known.with_(fresh, scene.now))
        known = replace(known, finding=_judged(scene, replace(lead, dossier=known)))
    if news:
        paces, known = _paced(scene, paces, known.read), replace(known, read=records)
    return replace(lead, dossier=known, paces=paces)


def _gone_on(scene: Scene, known: Dossier, workers: Workers) -> Dossier:
    """Notes when all ranks got past the step that they were at two looks ago: what a log said before that is no cause any more.
    (Records may be two looks old.) One rank that has made the step says so for all; of this node's own it is known at once.

    Found live: records tell the step every few seconds, and for so long a hang was blamed on a disk that had been full before.
    """
    plan, training = scene.plan, scene.doing[Work.TRAINING]
    if plan is None or plan.phase is not Phase.TRAIN or len(training) < len(plan.seats) or not training:
        return known
    ours = [workers.step] if workers.generation == plan.generation and workers.work is Work.TRAINING else []
    newest = max((*map(step_of, training), *ours))
    if known.marks and newest <= known.marks[-1][1] + 1:
        return known
    passed = {**known.passed, plan.generation: known.marks[0][0]} if len(known.marks) > 1 else known.passed
    return replace(known, marks=(*known.marks[-1:], (scene.now, newest)), passed=passed)


def _derived(scene: Scene) -> tuple[Evidence, ...]:
    """What the records amount to beside what they say: who failed, and who is not there any more."""
    plan = scene.plan
    if plan is None or plan.phase is not Phase.TRAIN:
        return ()
    found = []
    for place in scene.amiss:
        fate, seat = scene.fates[place], plan.seats[place]
        record = scene.record_of(seat)
        node, generation = seat.member.node, plan.generation
        if _went(scene, seat):
            found.append(_gone(fate, seat, generation))
        elif record and record.work is Work.FAILED and record.exit is not None and record.exit.generation == generation:
            found.append(of_exit(record.exit, rank=plan.rank_of(seat.member, record.exit.slot), node=node))
    return (*found, *_left(scene))


def departed(scene: Scene) -> tuple[Evidence, ...]:
    """Those who have gone from a gang that is being probed."""
    plan = scene.plan
    if plan is None:
        return ()
    fates = zip(scene.fates, plan.seats, strict=True)
    lost = [(fate, seat) for fate, seat in fates if fate.seat is None and not fate.leaving]
    return tuple(_gone(fate, seat, plan.generation) for fate, seat in lost if _went(scene, seat))


def _went(scene: Scene, seat: Seat) -> bool:
    """Is this life not there any more, as far as others can tell?"""
    record = scene.record_of(seat)
    return seat.member.node in scene.conviction.guilty or record is None or record.member != seat.member


def _gone(fate: Fate, seat: Seat, generation: int) -> Evidence:
    return dossier.gone(seat.member.node, gone(fate.cause) if fate.cause else "", generation, None)


def _left(scene: Scene) -> tuple[Evidence, ...]:
    """Few have left a gang that the others were still forming: what kept it from forming is theirs, whatever others print."""
    plan, gone = scene.plan, scene.doing[Work.PARKED]
    if plan is None or scene.lead.formation.formed == plan.generation or len(gone) > len(scene.doing[Work.JOINING]):
        return ()
    return tuple(dossier.left(record.member.node, plan) for record in gone)


def _judged(scene: Scene, lead: Lead) -> Finding | None:
    """The verdict on the present gang, and the answer to it."""
    plan, facts, finding = scene.plan, lead.dossier.facts, lead.dossier.finding
    if plan is None:
        return None
    gang = lead.formation.gang or plan.generation - 1
    # Who was let back has paid for what was known of it then. Found by the scenario a-gpu-falls-off-the-bus.
    if lead.custody.let_back:
        facts = tuple(fact for fact in facts if fact.generation is not None or _new(fact, lead))
    seated = plan.seat_at.keys()
    chosen = dossier.concerning(facts, range(gang, plan.generation + 1), seated, lead.dossier.passed)
    if not dossier.speaks(chosen):
        return None
    if finding is not None and finding.of == chosen:
        verdict = finding.verdict  # what the caps let us do about it may have changed all the same
    else:
        verdict = judge(chosen, Known(world=plan.world, nodes=plan.node_of))
    return Finding(of=chosen, verdict=verdict, answer=answer_to(scene, lead, verdict, gloo=False))


def _new(fact: Evidence, lead: Lead) -> bool:
    over = lead.custody.let_back.get(fact.node) if fact.node is not None else None
    return over is None or (fact.when or 0.0) > over


def answer_to(scene: Scene, lead: Lead, verdict: Verdict, *, gloo: bool) -> Answer:
    """What the operator's words, and the caps on them, make of a verdict."""
    settings = scene.settings
    words = {fault: Act(settings.policy[fault]) for fault in Fault if fault in settings.policy}
    scope = Scope(
        known=len(scene.records),
        min_nodes=settings.membership.min_nodes,
        held=scene.kept_out,
        recent=len(lead.custody.put_out),
        share=settings.health.quarantine_share,
        gloo=gloo and settings.fallback == "gloo",
        slow=too_slow(scene) if gloo else "",
    )
    return answer(verdict, words, scope)


def brief(verdict: Verdict) -> Verdict:
    """As it goes into a plan, which every node reads."""
    return replace(verdict, because=tuple(bounded(fact, 120) for fact in verdict.because[:6]))


def known(verdict: Verdict | None) -> tuple[Cause, ...]:
    """What a verdict says, where that is more than a guess."""
    if verdict is None or verdict.fault is Fault.UNKNOWN or verdict.confidence is Confidence.LOW:
        return ()
    return (found(verdict),)


def _paced(scene: Scene, paces: Paces, read: Mapping[str, Record]) -> Paces:
    """One more row of how long everybody's phases took, once all have said it anew; and who is slow by the last of them."""
    plan, health = scene.plan, scene.settings.health
    if plan is None or plan.phase is not Phase.TRAIN or len(plan.seats) < 2:
        return paces
    fresh = {}
    for record in scene.doing[Work.TRAINING]:
        before = read.get(record.member.node) if record.pace else None
        if record.pace and (before is None or before.pace != record.pace):
            fresh[record.member.node] = record.pace
    if not fresh:
        return paces
    newest = {**paces.newest, **fresh}
    if len(newest) < len(plan.seats):
        return replace(paces, newest=newest)
    row: dict[int, dict[str, float]] = {}
    rank = 0
    for seat in plan.seats:
        for pace in newest.get(seat.member.node, ()):
            row.setdefault(rank + pace.slot, {})[pace.phase] = pace.seconds
        rank += seat.slots
    history = (*paces.history, row)[-4 * health.straggler_steps :]
    slow = straggler.slow(history, z=health.straggler_z, steps=health.straggler_steps)
    return replace(paces, newest={}, history=history, slow=straggler.evidence(slow, plan.node_of))
