"""What the leader does: look at everybody's record and keep the plan right.

The idea: a table of rules, asked in order; the first that has something to say writes the next plan or says that the present
one stays. Each rule looks at one `Scene`, in which the facts are already sorted out: who keeps a seat, who has lost it and why,
who could take one. The rules lie by what they are about: `intents` (the job as a whole), `probing`, `lost_seats`, `stalls`,
`growth`.
"""

from collections.abc import Callable
from dataclasses import replace
from math import inf

from elasticrl.contract.events import Action, Confine, Inspect, Propose
from elasticrl.contract.model import Phase, View
from elasticrl.core.lead.findings import brief, investigate
from elasticrl.core.lead.growth import ease, form, grow, moved
from elasticrl.core.lead.intents import asked_to_pause, asked_to_stop, finished, over, stopped_by
from elasticrl.core.lead.lost_seats import late, losses
from elasticrl.core.lead.memory import remember
from elasticrl.core.lead.probing import probing, recheck, unsure
from elasticrl.core.lead.quarantines import guard
from elasticrl.core.lead.scene import BACK_TTLS, Move, Scene
from elasticrl.core.lead.stalls import silent, stuck
from elasticrl.core.node.follow import plan_of, record_of, workers_of
from elasticrl.core.node.invariants import check_plan
from elasticrl.core.node.setback import behind, outrun
from elasticrl.core.node.state import State, Wish

Rule = Callable[[Scene], Move | None]
WITH_A_PLAN = 100  # quarantines: etcd takes 128 operations in a transaction
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
        return state, Wish(reason="leading; reading the records of all nodes")
    if behind(state):
        return state, Wish()  # until the store knows of this job again, nothing is decided by what it shows
    if (waits := outrun(state, now)) is not None:
        return state, waits
    own = (state.made, state.formed, state.card.since, deaf(state, now))
    scene = Scene(state.settings, with_own(state, now), plan_of(state), state.lead, state.me, now, *own)
    memory = remember(scene)
    memory = investigate(scene, memory, state.evidence, workers_of(state))
    scene = scene.recalling(memory)
    move = next((move for rule in RULES if (move := rule(scene)) is not None), Move())
    release, wake_at = guard(scene)
    # A quarantine is refused with its plan: who does not know the newest plan may not know either whom it keeps out. Found by
    # simulation: such a leader put away three nodes more than may be.
    with_plan = move.confine[:WITH_A_PLAN] if move.plan else ()
    actions: list[Action] = [
        Confine(quarantine=quarantine, if_leader=state.view.leader_revision)
        for quarantine in (*move.confine[len(with_plan) :], *release)
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
                confine=with_plan,
            )
        )
    if move.inspect:
        actions.append(Inspect(generation=state.view.generation, if_leader=state.view.leader_revision))
    written = dict.fromkeys((quarantine.member.node for quarantine in move.confine if quarantine.held), now)
    if written:
        custody = memory.custody
        memory = replace(memory, custody=replace(custody, confining={**custody.confining, **written}))
    graced = scene.grace_until if scene.grace else inf
    waits_s = BACK_TTLS * scene.settings.membership.lease_ttl_s
    graced = min((graced, *(memory.presence.absent[member] + waits_s for member in scene.unregistered)))
    stops = scene.stop_due if scene.now < scene.stop_due else inf
    return state.but(lead=memory), Wish(tuple(actions), min(wake_at, move.wake_at, graced, stops), move.why)


def with_own(state: State, now: float) -> View:
    """What the store shows, and what this node says of itself where that has not come back yet: its lease stands, as it leads.

    Found on a real systemd, and by the scenario alone-and-its-lease-ends-as-its-daemon-is-back: a leader took itself for lost,
    and its workers began afresh.
    """
    view = state.view
    if view.own is not None:
        return view
    assert view.records is not None  # `lead` has looked
    return replace(view, records={**view.records, state.me.node: record_of(state, now)})


def deaf(state: State, now: float) -> bool:
    """Is an answer of the store overdue? Then the members' silence says nothing about them."""
    return now > state.leased + state.settings.membership.keepalive_s + state.settings.retry_s
