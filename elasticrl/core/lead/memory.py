"""What the leader remembers, brought up to a moment: one small function for each of the groups of `Lead`.

The one idea: each takes the scene, in which the memory before this moment lies, and returns the group's next value.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import inf

from elasticrl.contract.model import Intent, Member, Phase, Record, Work
from elasticrl.contract.verdict import Fault
from elasticrl.core.lead.fallback import measured
from elasticrl.core.lead.probing import remembered, results_of
from elasticrl.core.lead.scene import Scene
from elasticrl.core.lead.stalls import silence
from elasticrl.core.node import dossier
from elasticrl.core.node.state import Custody, Dossier, Ends, Failures, Formation, Lead, Paces, Presence, Probes, Stalls

HOUR_S = 3600.0
FORMED = (Work.TRAINING, Work.STALLED, Work.DONE)  # who says one of these has been through the gang's first collective
PASSED = 16  # gangs of which it is known what they have outlived


def remember(scene: Scene) -> Lead:
    """The leader's memory after this moment.

    A leader that is deaf begins to wait anew. Found by simulation: after an outage a gang that had trained all along was put
    out for not having joined in time, because its records had not come through.
    """
    stalls = _stalls(scene)
    return Lead(
        since=scene.lead.since,
        formation=_formation(scene),
        presence=_presence(scene),
        stalls=stalls,
        ends=_ends(scene),
        custody=_custody(scene),
        dossier=_dossier(scene, stalled=stalls.since is not None),
        paces=Paces(eased=_eased(scene)) if scene.new_plan else scene.lead.paces,
        probes=_probes(scene),
        rows=scene.rows,
    )


def _since(holds: bool, before: float | None, now: float) -> float | None:
    """Since when it has held."""
    if not holds:
        return None
    return now if before is None else before


def _formation(scene: Scene) -> Formation:
    last, now, new_plan, generation = scene.lead.formation, scene.now, scene.new_plan, scene.view.generation
    parted = not (new_plan or scene.still_trains or scene.on_their_way)
    there = None if new_plan or scene.on_their_way else scene.newest if last.there is None else last.there
    formed = last.formed if last.generation else generation - 1  # of those before, a new leader thinks well
    return Formation(
        generation=generation,
        planned_at=now if scene.anew else last.planned_at,
        loaded_at=now if scene.loading else -inf if new_plan else last.loaded_at,
        restored_at=now if scene.restoring else -inf if new_plan else last.restored_at,
        grown=generation if scene.grown else last.grown,
        parted_at=-inf if not parted else now if last.parted_at == -inf else last.parted_at,
        there=there,
        gang=generation if scene.plan and scene.plan.phase is Phase.TRAIN else last.gang,
        formed=generation if any(scene.doing[work] for work in FORMED) else formed,
    )


def _presence(scene: Scene) -> Presence:
    last, now = scene.lead.presence, scene.now
    ready = frozenset(record.member for record in scene.candidates)
    seats = scene.plan.seats if scene.plan and scene.missing else ()
    absent = [seat.member for seat in seats if seat.member.node not in scene.records]
    return Presence(
        lapsed=scene.lapsed,
        emptied=scene.emptied,
        ready=ready,
        ready_at=now if ready - last.ready else last.ready_at,
        absent={member: now if scene.deaf else last.absent.get(member, now) for member in absent},
    )


def _stalls(scene: Scene) -> Stalls:
    last = scene.lead.stalls
    waiting = scene.doing[Work.STALLED] or scene.doing[Work.PARKED] or scene.stalled_before_it_grew
    stalled = bool(waiting or scene.broken_before_it_grew) and not scene.excused
    begins = stalled and (last.since is None or scene.anew)
    return Stalls(
        since=scene.now if begins else last.since if stalled else None,
        asked=scene.view.look_revision if begins else last.asked,
        excused=scene.excused,
        # A look may be seconds after the last one, and what has come to an end since has just ended, as far as is known.
        excused_at=-inf if scene.new_plan else scene.now if scene.excused or last.excused else last.excused_at,
        silent=silence(scene),
    )


def _ends(scene: Scene) -> Ends:
    last = scene.lead.ends
    return Ends(
        failed_at=_since(bool(scene.doing[Work.FAILED]), None if scene.anew else last.failed_at, scene.now),
        done_at=_since(scene.at_work(Work.DONE), None if scene.new_plan else last.done_at, scene.now),
        stop_at=min(last.stop_at, scene.now) if scene.view.intent is Intent.STOP else inf,
    )


def _custody(scene: Scene) -> Custody:
    last, now, held = scene.lead.custody, scene.now, scene.held
    lease_s = scene.settings.membership.lease_ttl_s
    put_out = tuple(at for at in last.put_out if now < at + HOUR_S)
    # With a place in a plan that came meanwhile, one was not put out: ours was refused, and its quarantines with it.
    refused = scene.plan.place if scene.new_plan and scene.plan else {}
    confining = {
        node: at
        for node, at in last.confining.items()
        if node not in held and node not in refused and now < at + lease_s
    }
    return Custody(
        doubted=_doubted(scene),
        failures=_failures(scene),
        confining=confining,
        confined={node: last.confined.get(node, now) for node in held},
        put_out=(*put_out, *(now for node in held if node not in last.confined)),
        let_back={
            node: at
            for node in {**last.confined, **last.let_back}
            if node not in held and now < (at := last.let_back.get(node, now)) + 2 * dossier.KEPT_S
        },
        well={m: last.well.get(m, now) for m in scene.unforgiven if m in last.well or scene.proves_well(m)},
    )


def _doubted(scene: Scene) -> Mapping[Member, float]:
    now, long_s = scene.now, 10 * scene.settings.membership.lease_ttl_s
    doubted = {member: at for member, at in scene.lead.custody.doubted.items() if now < at + long_s}
    guilty = (scene.records[node].member for node in scene.conviction.guilty if node in scene.records)
    return doubted | dict.fromkeys(guilty, now)


def _failures(scene: Scene) -> Mapping[str, Failures]:
    """How often each node's worker has failed since the job got past the step of its first failure."""
    known = {} if scene.lasted else scene.lead.custody.failures
    trains = {record.member.node: record.step for record in scene.doing[Work.TRAINING]} if known else {}
    failures = {node: failed for node, failed in known.items() if trains.get(node, -1) <= failed.step}
    for record in scene.doing[Work.FAILED]:
        node, left, last = record.member.node, record.exit, failures.get(record.member.node)
        if left is None or left.generation != record.generation or not scene.blames_its_node(record):
            continue
        # Who is to join has made no step itself: the gang's own, which grows meanwhile, is no progress of its.
        if last is None or (left.step > last.step and record.member not in scene.on_their_way):
            failures[node] = Failures(generation=left.generation, step=left.step, count=1)
        elif last.generation < _born(scene, record):
            failures[node] = replace(last, generation=left.generation, count=last.count + 1)
    return failures


def _born(scene: Scene, record: Record) -> int:
    """Of which generation the worker was that has failed: one that fails between two plans is told of under both."""
    seat = scene.plan and scene.plan.seat_of.get(record.member)
    return seat.born if seat else record.generation


def _dossier(scene: Scene, *, stalled: bool) -> Dossier:
    last = scene.lead.dossier
    if not scene.new_plan:
        return replace(last, marks=()) if stalled else last
    facts = remembered(scene.lead, scene.now) if scene.lead.probes.results else last.facts
    return replace(last, facts=facts, passed=_begun(scene), marks=())


def _begun(scene: Scene) -> Mapping[int, float]:
    """When each gang was planned: what was known before that does not count against it. (A new leader saw no begin.)"""
    generation = scene.view.generation
    passed = {gang: at for gang, at in scene.lead.dossier.passed.items() if gang > generation - PASSED}
    return {**passed, generation: scene.now} if scene.lead.formation.generation else passed


def _eased(scene: Scene) -> frozenset[str]:
    """Whose nodes were given up for being slow: the newest plan says of whom it was."""
    verdict = scene.plan.verdict if scene.plan else None
    return scene.lead.paces.eased.union(verdict.nodes if verdict and verdict.fault is Fault.STRAGGLER else ())


def _probes(scene: Scene) -> Probes:
    plan, last, before = scene.plan, scene.lead.probes, scene.lead.formation
    probed = scene.new_plan and before.gang != before.generation
    earlier = (*last.earlier, *last.results) if plan and plan.pairs else ()
    # What is tested anew is as the new test says, also where an end of it has not got to that.
    again = {frozenset(pair) for pair in plan.pairs} if plan else set()
    earlier = tuple(r for r in earlier if frozenset((r.node, r.peer)) not in again) if scene.new_plan else last.earlier
    since = scene.now if probed else min(last.backend_since, scene.now)
    return Probes(
        results=results_of(scene) if plan and plan.phase is Phase.PROBE else (),
        earlier=earlier,
        measured="" if scene.new_plan else last.measured or measured(plan, scene),
        backend_since=since if plan and plan.backend else inf,
    )
