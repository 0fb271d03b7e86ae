"""What the leader does: look at everybody's record and keep the plan right.

The idea: a table of rules, asked in order; the first that has something to say writes the next plan or says that the present
one stays. Each rule looks at one `Scene`, in which the facts are already sorted out: who keeps a seat, who has lost it and why,
who could take one. The rules lie by what they are about: `intents` (the job as a whole), `probing`, `lost_seats`, `stalls`,
`growth`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf

from elasticrl.contract.events import Action, Confine, Inspect, Propose
from elasticrl.contract.model import Intent, Phase, Record, Work
from elasticrl.contract.verdict import Fault
from elasticrl.core.lead.fallback import measured
from elasticrl.core.lead.findings import brief, investigate
from elasticrl.core.lead.growth import ease, form, grow, moved
from elasticrl.core.lead.intents import asked_to_pause, asked_to_stop, finished, over, stopped_by
from elasticrl.core.lead.lost_seats import late, losses
from elasticrl.core.lead.probing import probing, recheck, remembered, results_of, unsure
from elasticrl.core.lead.quarantines import guard
from elasticrl.core.lead.scene import BACK_TTLS, Move, Scene
from elasticrl.core.lead.stalls import silence, silent, stuck
from elasticrl.core.node import dossier
from elasticrl.core.node.follow import plan_of, workers_of
from elasticrl.core.node.invariants import check_plan
from elasticrl.core.node.setback import behind, outrun
from elasticrl.core.node.state import Failures, Lead, State, Wish

HOUR_S = 3600.0
FORMED = (Work.TRAINING, Work.STALLED, Work.DONE)  # who says one of these has been through the gang's first collective
PASSED = 16  # gangs of which it is known what they have outlived
Rule = Callable[[Scene], Move | None]
RULES: tuple[Rule, ...] = (
    over,
    asked_to_stop,
    finished,
    asked_to_pause,
    probing,
    losses,
    unsure,
    moved,
    late,
    stuck,
    silent,
    form,
    grow,
    ease,
    recheck,
)


def lead(state: State, now: float) -> tuple[State, Wish]:
    """The leader's wishes, and its timers after this moment."""
    assert state.lead is not None
    if state.view.records is None or state.view.quarantines is None:
        return state, Wish(reason="leading; waiting to see all records")
    if behind(state):
        return state, Wish()  # until the store knows of this job again, nothing is decided by what it shows
    if (waits := outrun(state, now)) is not None:
        return state, waits
    own = (state.made, state.formed, state.card.since)
    scene = Scene(state.settings, state.view, plan_of(state), state.lead, state.me, now, *own)
    memory = remember(scene, deaf=deaf(state, now))
    memory = investigate(scene, memory, state.evidence, workers_of(state))
    scene = scene.recalling(memory)
    move = next((move for rule in RULES if (move := rule(scene)) is not None), Move())
    release, wake_at = guard(scene)
    actions: list[Action] = [
        Confine(quarantine=quarantine, if_leader=state.view.leader_revision) for quarantine in (*move.confine, *release)
    ]
    if move.plan is not None:
        view = state.view
        plan = replace(move.plan, verdict=brief(move.verdict)) if move.verdict else move.plan
        check_plan(view, plan)
        actions.append(
            Propose(
                plan=plan,
                if_plan=view.plan_revision,
                if_commit=view.commit_revision,
                if_leader=view.leader_revision,
                answers=view.intent_revision if scene.stop_answered else 0,
                stops=stopped_by(scene) if plan.phase is Phase.TRAIN else None,
            )
        )
    if move.inspect:
        actions.append(Inspect(generation=state.view.generation, if_leader=state.view.leader_revision))
    written = dict.fromkeys((quarantine.member.node for quarantine in move.confine if quarantine.held), now)
    memory = replace(memory, confining={**memory.confining, **written}) if written else memory
    graced = scene.grace_until if scene.grace else inf
    waits_s = BACK_TTLS * scene.settings.membership.lease_ttl_s
    graced = min((graced, *(memory.absent[member] + waits_s for member in scene.unregistered)))
    stops = scene.stop_due if scene.now < scene.stop_due else inf
    return state.but(lead=memory), Wish(tuple(actions), min(wake_at, move.wake_at, graced, stops), move.why)


def _born(scene: Scene, record: Record) -> int:
    """Of which generation the worker was that has failed: one that fails between two plans is told of under both."""
    seat = scene.plan and scene.plan.seat_of.get(record.member)
    return seat.born if seat else record.generation


def deaf(state: State, now: float) -> bool:
    """Is an answer of the store overdue? Then the members' silence says nothing about them."""
    return now > state.leased + state.settings.membership.keepalive_s + state.settings.retry_s


def _begun(lead: Lead, generation: int, now: float) -> Mapping[int, float]:
    """When each gang was planned: what was known before that does not count against it. (A new leader saw no begin.)"""
    passed = {gang: at for gang, at in lead.passed.items() if gang > generation - PASSED}
    return {**passed, generation: now} if lead.generation else passed


def _eased(scene: Scene) -> frozenset[str]:
    """Whose nodes were given up for being slow: the newest plan says of whom it was."""
    verdict = scene.plan.verdict if scene.plan else None
    return scene.lead.eased.union(verdict.nodes if verdict and verdict.fault is Fault.STRAGGLER else ())


def _failed_at(scene: Scene, *, anew: bool) -> float | None:
    """Since when a worker of the present gang has ended, as this leader has seen it."""
    before = None if anew else scene.lead.failed_at
    if not scene.doing[Work.FAILED]:
        return None
    return scene.now if before is None else before


def remember(scene: Scene, *, deaf: bool) -> Lead:
    """The leader's timers, brought up to this moment.

    A leader that is deaf begins to wait anew. Found by simulation: after an outage a gang that had trained all along was put
    out for not having joined in time, because its records had not come through.
    """
    lead, now = scene.lead, scene.now
    ready = frozenset(record.member for record in scene.candidates)
    stalled = bool(scene.doing[Work.STALLED] or scene.doing[Work.PARKED] or scene.stalled_before_it_grew)
    stalled = stalled or scene.broken_before_it_grew
    stalled = stalled and not scene.excused
    doubted = {
        member: at for member, at in lead.doubted.items() if now < at + 10 * scene.settings.membership.lease_ttl_s
    }
    for node in scene.conviction.guilty:
        if node in scene.records:
            doubted[scene.records[node].member] = now
    trains = {record.member.node: record.step for record in scene.doing[Work.TRAINING]} if lead.failures else {}
    known = {} if scene.lasted else lead.failures
    failures = {node: failed for node, failed in known.items() if trains.get(node, -1) <= failed.step}
    for record in scene.doing[Work.FAILED]:
        node, left, last = record.member.node, record.exit, failures.get(record.member.node)
        if left is None or left.generation != record.generation:
            continue
        if not scene.blames_its_node(record):
            continue
        # Who is to join has made no step itself: the gang's own, which grows meanwhile, is no progress of its.
        if last is None or (left.step > last.step and record.member not in scene.on_their_way):
            failures[node] = Failures(generation=left.generation, step=left.step, count=1)
        elif last.generation < _born(scene, record):
            failures[node] = replace(last, generation=left.generation, count=last.count + 1)
    new_plan = scene.view.generation != lead.generation
    formed = lead.formed if lead.generation else scene.view.generation - 1  # of those before, a new leader thinks well
    results = results_of(scene) if scene.plan and scene.plan.phase is Phase.PROBE else ()
    begins = stalled and (lead.stalled_at is None or new_plan or deaf)
    parted = not (scene.still_trains or scene.on_their_way)
    put_out = tuple(at for at in lead.put_out if now < at + HOUR_S) if lead.put_out else ()
    return Lead(
        since=lead.since,
        generation=scene.view.generation,
        planned_at=now if new_plan or deaf else lead.planned_at,
        loaded_at=now if scene.loading else -inf if new_plan else lead.loaded_at,
        restored_at=now if scene.restoring else -inf if new_plan else lead.restored_at,
        grown=scene.view.generation if scene.grown else lead.grown,
        parted_at=-inf if new_plan or not parted else now if lead.parted_at == -inf else lead.parted_at,
        there=None if new_plan or scene.on_their_way else scene.newest if lead.there is None else lead.there,
        lapsed=scene.lapsed,
        ready=ready,
        ready_at=now if ready - lead.ready else lead.ready_at,
        stalled_at=None if not stalled else now if begins else lead.stalled_at,
        failed_at=_failed_at(scene, anew=new_plan or deaf),
        excused_at=now if scene.excused else -inf if new_plan else lead.excused_at,
        silent=silence(scene, new_plan=new_plan),
        done_at=None if not scene.at_work(Work.DONE) else now if lead.done_at is None or new_plan else lead.done_at,
        stop_at=min(lead.stop_at, now) if scene.view.intent is Intent.STOP else inf,
        asked=scene.view.look_revision if begins else lead.asked,
        doubted=doubted,
        absent={
            seat.member: now if deaf else lead.absent.get(seat.member, now)
            for seat in (scene.plan.seats if scene.plan and scene.missing else ())
            if seat.member.node not in scene.records
        },
        confined={node: lead.confined.get(node, now) for node in scene.held},
        confining={
            node: at
            for node, at in lead.confining.items()
            if node not in scene.held and now < at + scene.settings.membership.lease_ttl_s
        },
        well={m: lead.well.get(m, now) for m in scene.unforgiven if m in lead.well or scene.proves_well(m)},
        failures=failures,
        gang=scene.view.generation if scene.plan and scene.plan.phase is Phase.TRAIN else lead.gang,
        formed=scene.view.generation if any(scene.doing[work] for work in FORMED) else formed,
        facts=remembered(lead, now) if new_plan and lead.results else lead.facts,
        read=lead.read,
        rows=scene.rows,
        finding=lead.finding,
        passed=_begun(lead, scene.view.generation, now) if new_plan else lead.passed,
        marks=() if new_plan or stalled else lead.marks,
        let_back={
            node: at
            for node in {**lead.confined, **lead.let_back}
            if node not in scene.held and now < (at := lead.let_back.get(node, now)) + 2 * dossier.KEPT_S
        },
        results=results,
        earlier=lead.earlier if not new_plan else lead.results if scene.plan and scene.plan.pairs else (),
        put_out=(*put_out, *(now for node in scene.held if node not in lead.confined)),
        paces={} if new_plan else lead.paces,
        history=() if new_plan else lead.history,
        slow=() if new_plan else lead.slow,
        eased=_eased(scene) if new_plan else lead.eased,
        measured="" if new_plan else lead.measured or measured(scene.plan, scene),
        backend_since=inf
        if scene.plan is None or not scene.plan.backend
        else now
        if new_plan and lead.gang != lead.generation  # it has just been probed
        else min(lead.backend_since, now),
    )
