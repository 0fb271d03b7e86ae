"""`step(state, event) -> Decision`: the whole of elasticrl's judgement, as one pure function.

An event is absorbed into the state; then the parts of the core say what they wish, in the same order always: if I lead, is the
plan still right; do my workers match the plan; do I belong (lease, record); should I stand for leader; what must be written
again. A wish that was already acted on, and whose effect may still be on its way, is not acted on again before `retry_s`.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from math import inf

from elasticrl.contract.cause import culprits
from elasticrl.contract.events import (
    Action,
    Ask,
    Asked,
    Campaign,
    Cleared,
    Configured,
    Confine,
    Event,
    Found,
    KeepAlive,
    Leased,
    LookAt,
    Probed,
    Propose,
    Publish,
    Say,
    Seen,
    Suspected,
    Tick,
    Tried,
    Watch,
    Workers,
)
from elasticrl.contract.evidence import Evidence, Kind, Sign, of_exit, of_stall
from elasticrl.contract.model import Plan, Stall, Verb, View, Work
from elasticrl.contract.orders import Kill
from elasticrl.contract.verdict import Fault, Verdict
from elasticrl.core.judge.policy import Act
from elasticrl.core.lead.lead import lead
from elasticrl.core.node import dossier
from elasticrl.core.node.calm import calm
from elasticrl.core.node.follow import alive, belong, follow, lease_held, seat_of, tries
from elasticrl.core.node.invariants import check_wake
from elasticrl.core.node.setback import better, heal
from elasticrl.core.node.state import NOTHING, Decision, Lead, State, Trial, Wish
from elasticrl.core.node.suspect import conviction, lives, watched


def step(state: State, event: Event) -> Decision:
    """What to do, now that this has happened."""
    return calm(state, event) or whole(state, event)


def whole(state: State, event: Event) -> Decision:
    """Likewise, by a look at everything."""
    now = event.now
    before = state
    state, asks = absorb(state, event)
    state = attend(state, now)
    state, leading = lead(state, now) if state.lead else (state, NOTHING)
    following = follow(state, now)
    wishes = (belong(state, now), following, tries(state, now), stand(state, now), restore(state, now), leading)
    until = min([wish.wake_at for wish in wishes[1:]]) if lease_held(state, now) else -inf
    state, actions, wake_at = settle(state, wishes, now, until)
    check_wake(now, wake_at)
    return Decision(state=state, actions=(*asks, *actions, *notes(before, state)), wake_at=wake_at)


def absorb(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:  # noqa: C901, PLR0912 - a table of events
    """The state with this event's facts in it. Only an operator's question is passed on at once: its shell waits for it."""
    match event:
        case Seen(view=view):
            if (view.epoch, view.revision) < (state.view.epoch, state.view.revision):
                return state, ()  # from a store member that lags
            if view.epoch > state.view.epoch:  # what bears a revision of before means nothing any more
                state = state.but(looked=0, lead=None, card=replace(state.card, since=0))
            view = better(state.view, view)
            lost_since = event.now if state.lost_since is None else state.lost_since
            met = view.generation if state.met is None else state.met
            adopted = event.now if view.generation != state.view.generation else state.adopted
            own = (
                view.own.generation if view.own and view.own.born else 0
            )  # what an earlier daemon of this life has said
            joined = max(state.joined, own)
            suspects = _still_neighbours(state, view)
            state = state.but(
                view=view,
                met=met,
                adopted=adopted,
                joined=joined,
                suspects=suspects,
                lost_since=lost_since if view.lost else None,
            )
            return (_leaving(state, "drained by an operator", event.now) if view.drain == state.me else state), ()
        case Leased(sent=sent, held=held):
            if held:
                return state.but(leased=max(sent, state.leased)), ()
            # Another one is asked for at once: that the last request was a moment ago says nothing of the next.
            sent_before = {about: what for about, what in state.sent.items() if about != KeepAlive.__name__}
            return state.but(leased=-inf, sent=sent_before), ()
        case Workers():
            joined = max(state.joined, event.generation) if alive(event) else state.joined
            moved_at = event.now if _moved(state.workers, event) else state.moved_at
            made = event.generation if _made(state.workers, event) else state.made
            formed = event.generation if event.work in (Work.TRAINING, Work.STALLED) else state.formed
            state = state.but(workers=event, joined=joined, moved_at=moved_at, made=made, formed=formed)
            return _noticed(state, event), ()
        case Found(evidence=facts, scene=scene):
            state = state.but(evidence=dossier.file(state.evidence, facts, event.now))
            if scene is None:
                return state, ()
            return _looked(state.but(looked=max(state.looked, scene), looked_at=event.now), facts, event.now), ()
        case Suspected(node=node):
            return state.but(suspects=state.suspects | {node}), ()
        case Cleared(node=node):
            return state.but(suspects=state.suspects - {node}), ()
        case Probed():
            return state.but(probed=event), ()
        case Tried(found=found, reached=reached, unreachable=out):
            last = state.trial if state.trial and state.trial.found == found else None
            asked = frozenset((*reached, *out))
            since = last.since if last else event.now
            return state.but(trial=Trial(found=found, since=since, at=event.now, asked=asked, reached=reached)), ()
        case Asked(verb=Verb.DRAIN, node=node) if node in (None, state.me.node):
            return _leaving(state, "drained by an operator", event.now), ()
        case Asked(verb=verb, node=node):
            return state, (Ask(verb=verb, node=node),)
        case Configured(settings=settings):
            return state.but(settings=settings), ()
        case Tick():
            return state, ()
        case _:
            raise AssertionError(f"the core knows no event {event!r}")


def _made(before: Workers | None, now: Workers) -> bool:
    """Have the workers sealed a step since they were heard of last, in the same gang? (What it went on from is none of its.)"""
    return (
        before is not None
        and before.generation == now.generation
        and before.work in (Work.TRAINING, Work.STALLED)
        and now.step > before.step
    )


def _moved(before: Workers | None, now: Workers) -> bool:
    """Has a worker got through the collective that it stood in, without getting through its phase?"""
    was, stall = before.stall if before else None, now.stall
    if was is None or stall is None:  # told of another gang it is the same stall: it is on its way out of a wait
        return False
    return was.slot == stall.slot and was.waiting and not stall.waiting and not stall.stopped


def _noticed(state: State, workers: Workers) -> State:
    """What workers say of themselves is evidence too: how one ended, and that one makes no progress."""
    stall = workers.stall
    since = None if stall is None else workers.now if state.stalled_at is None else state.stalled_at
    if not (stall or workers.exit or state.evidence) and since == state.stalled_at:
        return state  # as mostly
    state = state.but(stalled_at=since)
    return state.but(evidence=dossier.file(state.evidence, _said_by(state, workers, workers.now), workers.now))


def _looked(state: State, facts: dossier.Filed, now: float) -> State:
    """A look at a worker that seems to stand still outside of collectives: it does, or was on its way from one to the next."""
    workers, stall = state.workers, state.workers.stall if state.workers else None
    if workers is None or stall is None or stall.waiting or stall.stopped:
        return state
    rank = _rank(state, workers.generation, stall.slot)
    if any(f.kind is Kind.STACK and f.sign is Sign.WAITED and f.rank == rank for f in facts):
        return state.but(moved_at=now)
    return state.but(evidence=dossier.file(state.evidence, _said_by(state, workers, now), now))


def _said_by(state: State, workers: Workers, now: float) -> tuple[Evidence, ...]:
    me, left, stall = state.me, workers.exit, workers.stall
    found = []
    if left is not None:
        found.append(of_exit(left, rank=_rank(state, left.generation, left.slot), node=me.node))
    if stall is not None and stall.waiting and not state.settings.means.joins:
        return tuple(found)  # whether a script waits, or is waited for, its stack says
    # A worker that is told of a new gang may still be seen waiting in the old one.
    if stall is not None and not _unsure(state, stall, now) and not (workers.work is Work.JOINING and stall.waiting):
        rank = _rank(state, workers.generation, stall.slot)
        found.append(of_stall(stall, rank=rank, node=me.node, generation=workers.generation))
    return tuple(found)


def _unsure(state: State, stall: Stall, now: float) -> bool:
    """Whether it may only be on its way from one collective to the next: nobody has looked yet, or it was seen to move."""
    unseen = state.stalled_at is not None and state.looked_at < state.stalled_at
    return not (stall.waiting or stall.stopped) and (unseen or now < state.patient_until(stall))


def _rank(state: State, generation: int, slot: int | None) -> int | None:
    """Of this node's worker in that generation, as far as its plan is still known."""
    plan = state.view.plan
    if plan is None or plan.generation != generation or state.me not in plan.seat_of:
        return None
    return plan.rank_of(state.me, slot)


def _still_neighbours(state: State, view: View) -> frozenset[str]:
    """Suspicion ends with the neighbourhood, and with the life that it was of, as it does in the detector.

    Found by simulation: a node that left the ring while it was suspected came back to it suspected, and was put out for ever.
    """
    before = state.view.plan
    if not state.suspects or view.plan is before:
        return state.suspects
    near = state.suspects.intersection(watched(view.plan, state.me, state.settings.membership.neighbours))
    was, now = lives(before, near), lives(view.plan, near)
    return frozenset(node for node in near if was.get(node) == now[node])


def _leaving(state: State, reason: str, now: float) -> State:
    return state if state.leaving else state.but(leaving=reason, leaving_since=now)


def attend(state: State, now: float) -> State:
    """Notice whether this node leads, and since when nobody does."""
    leads = state.view.leader == state.me and lease_held(state, now)
    if leads != (state.lead is not None):
        state = state.but(lead=Lead(since=now) if leads else None)
    vacant = state.view.leader is None or leader_convicted(state) or leader_reborn(state)
    if vacant != (state.vacant_since is not None):
        state = state.but(vacant_since=now if vacant else None)
    return state


def leader_convicted(state: State) -> bool:
    """Do its neighbours agree that the leader is gone? Only those who watch all records can say."""
    view, leader = state.view, state.view.leader
    if leader is None or view.records is None or leader == state.me:
        return False
    return leader.node in conviction(view, state.settings.membership.neighbours).guilty


def leader_reborn(state: State) -> bool:
    """Is the leader an earlier life of a node that is back? Its lease may stand for long, but it is over.

    Found by the scenario restarted-before-its-lease: nobody led for the rest of the dead leader's lease.
    """
    leader = state.view.leader
    if leader is None or leader == state.me:
        return False
    record = (state.view.records or {}).get(leader.node)
    return leader.node == state.me.node or (record is not None and record.member.incarnation > leader.incarnation)


def deputies(state: State) -> tuple[str, ...]:
    """The first nodes in the plan that do not lead: they watch all records, so as to take over at once."""
    plan, leader, most = state.view.plan, state.view.leader, state.settings.membership.deputies
    if plan is None:
        return ()
    first = plan.seated[: most + 1]
    return tuple([node for node in first if leader is None or node != leader.node])[:most]


def stand(state: State, now: float) -> Wish:
    """Watch what the office needs, and run for it when it is vacant."""
    me, view = state.me.node, state.view
    first = view.plan.seated[: state.settings.membership.deputies + 1] if view.plan else ()
    everyone = state.lead is not None or (me in first and me in deputies(state))
    actions: list[Action] = []
    if everyone != (view.records is not None):
        actions.append(Watch(everyone=everyone))
    if state.vacant_since is None or view.own is None or not lease_held(state, now):
        return Wish(tuple(actions)) if actions else NOTHING
    office = deputies(state)
    if state.leaving and seat_of(state) is None:
        return Wish(tuple(actions))
    if view.leader is not None and me not in office and me != view.leader.node:
        return Wish(tuple(actions))
    due = state.vacant_since + patience(state, office)
    if state.leaving:  # who stays goes first; where all leave, one has to lead them out
        due += state.settings.membership.campaign_spread_s
    if now < due:
        return Wish(tuple(actions), due)
    return Wish((*actions, Campaign(over=view.leader_revision if view.leader else 0)))


def restore(state: State, now: float) -> Wish:
    """Write again what the store has lost: who stands next to the leader's office at once, others where none of those did."""
    if state.lost_since is None:
        return NOTHING
    office = deputies(state)
    near = state.lead is not None or state.me.node in office
    return heal(state, now, patience(state, office) + (0.0 if near else state.settings.membership.lease_ttl_s))


def patience(state: State, office: tuple[str, ...]) -> float:
    """How long to let others go first: deputies in their order, then everybody, spread by a hash of their names."""
    me = state.me.node
    if me in office:
        return 0.1 * office.index(me)
    digest = blake2b(f"{me}:{state.view.leader_revision}".encode(), digest_size=8).digest()
    share = int.from_bytes(digest) / 2**64
    return 0.1 * len(office) + share * state.settings.membership.campaign_spread_s


def settle(state: State, wishes: Sequence[Wish], now: float, until: float) -> tuple[State, tuple[Action, ...], float]:
    """Act on wishes that are new, different from what was last sent, or whose effect has not shown for `retry_s`. Until then
    only the record and the lease can want anything.
    """
    retry_s = state.settings.retry_s
    wake_at = min(wish.wake_at for wish in wishes)
    sent: dict[Hashable, tuple[Action, float]] = {}
    actions: list[Action] = []
    for wish in wishes:
        for action in wish.actions:
            key = subject(action)
            last = state.sent.get(key)
            if last is not None and last[0] == action and now < last[1] + retry_s:
                sent[key] = last
            else:
                sent[key] = (action, now)
                actions.append(action)
            wake_at = min(wake_at, sent[key][1] + retry_s)
    reasons = [wish.reason for wish in wishes if wish.reason]
    reason = "; ".join(dict.fromkeys(reasons)) if len(reasons) > 1 else reasons[0] if reasons else ""
    if sent == state.sent and reason == state.reason:  # as mostly: nothing was sent, nothing came true
        return (state if until == state.calm_until else state.but(calm_until=until)), (), wake_at
    reported = now if any(isinstance(action, Publish) for action in actions) else state.reported
    return state.but(sent=sent, reported=reported, reason=reason, calm_until=until), tuple(actions), wake_at


def subject(action: Action) -> Hashable:
    """What an action is about: two of one subject replace each other."""
    match action:
        case Kill(slot=slot):
            return ("Kill", slot)
        case LookAt(request=request):
            return ("LookAt", request)
        case Confine(quarantine=quarantine):
            return ("Confine", quarantine.member.node)
        case _:
            return type(action).__name__


def notes(before: State, after: State) -> tuple[Action, ...]:
    """The log events of this step: a state is logged when it changes, with the very sentence that status shows."""
    said: list[Action] = []
    plan = after.view.plan
    if plan is not None and plan.generation != before.view.generation:
        said += adopted(plan)
    if (before.lead is None) != (after.lead is None):
        said.append(Say(event="leader.elected" if after.lead else "leader.resigned", fields={"member": str(after.me)}))
    said += reports(before.lead, after.lead, answered=_answered(after)) if after.lead else ()
    if after.reason != before.reason and after.reason:
        said.append(Say(event="node.state", fields={"reason": after.reason}))
    return tuple(said)


def adopted(plan: Plan) -> Iterator[Say]:
    """What is said of a plan that is seen first."""
    fields = {
        "generation": plan.generation, "phase": plan.phase.value, "members": len(plan.seats), "world": plan.world,
        "resume": plan.resume, "rung": plan.rung.name.lower(), "causes": plan.kinds,
        "nodes": culprits(plan.causes), "reason": plan.reason,
    }  # fmt: skip
    yield Say(event="plan.adopted", fields=fields)
    if plan.verdict is not None:
        yield found(plan.verdict)


def _answered(state: State) -> bool:
    """Is a plan on its way with which the verdict will be said?"""
    sent = state.sent.get(Propose.__name__)
    return sent is not None and isinstance(sent[0], Propose) and sent[0].plan.verdict is not None


def reports(before: Lead | None, after: Lead, *, answered: bool) -> tuple[Action, ...]:
    """What the leader has found out, and does nothing about but to say it, or may do nothing about, and which cap forbids it.
    (All else is said with the plan that it led to.)
    """
    said = []
    finding, last = after.dossier.finding, before.dossier.finding if before else None
    reported = finding is not None and (
        finding.answer.act is Act.REPORT or (bool(finding.capped or after.stalls.silent) and not answered)
    )
    if finding is not None and reported and finding.verdict.fault is not Fault.UNKNOWN:
        told = last is not None and (last.verdict.fault, last.verdict.said) == (
            finding.verdict.fault,
            finding.verdict.said,
        )
        said += [] if told else [found(finding.verdict)]
    if finding is not None and finding.capped and (last is None or last.capped != finding.capped):
        fields = {
            "generation": after.formation.generation,
            "fault": finding.verdict.fault.value,
            "nodes": finding.answer.nodes,
        }
        said.append(Say(event="policy.capped", fields={**fields, "reason": finding.capped}))
    cost, generation = after.probes.measured, after.formation.generation
    if cost and cost != (before.probes.measured if before else ""):
        said.append(Say(event="fallback.measured", fields={"generation": generation, "reason": cost}))
    known = {(fact.rank, fact.node) for fact in before.paces.slow} if before else set()
    said += [
        Say(event="straggler.found", fields={"rank": fact.rank, "node_slow": fact.node or "", "reason": fact.detail})
        for fact in after.paces.slow
        if (fact.rank, fact.node) not in known
    ]
    return tuple(said)


def found(verdict: Verdict) -> Say:
    """Who, what and why, as one log event."""
    fields = {
        "fault": verdict.fault.value, "ranks": verdict.ranks, "nodes": verdict.nodes, "cause": verdict.cause,
        "confidence": verdict.confidence.value, "remedy": verdict.remedy, "because": tuple(map(str, verdict.because[:6])),
    }  # fmt: skip
    return Say(event="verdict.found", fields=fields)
