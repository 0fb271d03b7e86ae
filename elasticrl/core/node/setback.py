"""A store that has lost what it knew, under a job that goes on: etcd's data are gone, or were set back to an earlier day.

The one idea: every node has seen the plan that it follows, so what the store forgets the nodes still know. They go on by that,
and one of them writes it again, under a generation above all that anybody can have seen. So whoever knows an older plan, and
whoever began beside the empty store, follows it as any new plan.
"""

from collections.abc import Mapping
from dataclasses import replace

from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.events import Restore
from elasticrl.contract.model import Phase, Plan, Record, Rung, Seat, View
from elasticrl.core.node.adopt import AHEAD
from elasticrl.core.node.follow import ALIVE, plan_of, record_of, workers_of
from elasticrl.core.node.state import State, Wish


def better(known: View, view: View) -> View:
    """What the store shows now, but for what this node knows better. (The revisions are the store's: they fence writes.)"""
    plan, commit = known.plan, known.commit
    if plan is not None and view.plan is not plan:
        # One of the same number may be by who began beside the empty store.
        other = known.lost or view.epoch > known.epoch
        if view.generation < plan.generation or (other and view.generation == plan.generation and view.plan != plan):
            view = replace(view, plan=plan, lost=True)
    if commit is not None and view.committed < commit.step:
        view = replace(view, commit=commit, lost=True)
    # Of a plan that was written again the news may come before that of what was wanted, which was written with it.
    again = view.plan is not None and view.plan.again
    if (view.lost or again) and view.intent_generation < known.intent_generation:
        if not _asked_since(known, view):
            view = replace(view, intent=known.intent, intent_by=known.intent_by)
        # What was asked since is as new as what was known: else a second loss would forget it.
        view = replace(view, intent_generation=known.intent_generation)
    return view


def _asked_since(known: View, view: View) -> bool:
    """Has an operator asked for something since the store lost what it knew? One that is empty holds nothing else; of one that
    was set back that shows only once this node has seen it before.
    """
    newer = view.epoch == known.epoch and view.intent_revision > known.intent_revision
    return newer or (view.plan_revision == 0 and view.intent_revision > 0)


def behind(state: State) -> bool:
    """Does the store know less of this job than this node? (Who waits for an ended job to begin again knows nothing of it.)"""
    return state.view.lost and plan_of(state) is not None


def outrun(state: State, now: float) -> Wish | None:
    """What a leader does where workers were told of a newer plan than the store shows: nothing, as somebody is about to write
    that again; where nobody knows it any more, it writes the store's again, above both. None: they were not.

    Found with no deputies, by a leader that started in the moment of a setback. Where the store shows no plan at all, the
    seats of those whose workers run are what is left of it: the only node of a job wrote a first plan once more. So did a
    newcomer that led, over the gang that trained beside it: found by reading.
    """
    if state.lead is None:
        return None
    plan, newest = plan_of(state), _newest_told(state, now)
    if newest <= state.view.generation:
        return None
    membership = state.settings.membership
    due = state.lead.since + max(2 * membership.lease_ttl_s, membership.rejoin_s)
    return Wish((_written_again(state, plan or _left(state, newest, now)),)) if now >= due else Wish(wake_at=due)


def _newest_told(state: State, now: float) -> int:
    """The newest generation that workers were told of: this node's own, also if they have ended; where it knows no plan, those
    of all that live.

    Found by reading: a hold had ended the only node's workers as the store was set back. It used the hold's number again.
    """
    if plan_of(state) is not None:
        return workers_of(state).generation
    return max((r.generation for r in _records(state, now).values() if r.work in ALIVE), default=0)


def _records(state: State, now: float) -> Mapping[str, Record]:
    """What all say of themselves; of this node what is so now, as its own record may not be there yet, or be stale."""
    return {**(state.view.records or {}), state.me.node: record_of(state, now)}


def _left(state: State, newest: int, now: float) -> Plan:
    """What running workers tell of a plan that nobody knows: they are to wait for the next one, and to go on in it."""
    told = [r for _, r in sorted(_records(state, now).items()) if r.work in ALIVE and r.generation == newest]
    seats = tuple(
        Seat(member=r.member, born=r.born, slots=r.slots, beat=r.beat, echo=r.echo, vault=r.vault, probe=r.probe)
        for r in told
    )
    bits = next((r.bits for r in told if r.bits), "")
    return Plan(
        generation=newest,
        phase=Phase.HOLD,
        seats=seats,
        lanes=state.settings.lanes,
        team=state.settings.team,
        bits=bits,
    )


def heal(state: State, now: float, after_s: float) -> Wish:
    """Write again what the store has lost, this long after that was seen: others may come first."""
    plan = plan_of(state)
    if state.lost_since is None or plan is None:
        return Wish()
    due = state.lost_since + after_s
    if now < due:
        return Wish(wake_at=due)
    reason = "the store has lost what it knew of this job: writing it again"
    return Wish((_written_again(state, plan),), reason=reason)


def _written_again(state: State, plan: Plan) -> Restore:
    view = state.view
    return Restore(
        plan=_again(state, plan),
        commit=view.commit,
        intent=view.intent,
        intent_generation=view.intent_generation,
        if_plan=view.plan_revision,
        if_commit=view.commit_revision,
        if_intent=view.intent_revision,
    )


def _again(state: State, plan: Plan) -> Plan:
    """The plan that was lost, for the same members, as the next one of all. Who trains forms anew, in place.

    A script cannot, and starts again: as for growth, with time for a save, where it may meet at a new place. (At one that was
    used it would read what the gang before has left there, but for that a restart has another prefix.) Found by playing: told
    to go on in place it did not, for as long as a reform may take, and was then probed and started afresh without a save.

    A store that loses its data again may have known of one that was written again: found by two losses within 0.3 s.
    """
    view = state.view
    why = Why.STORE_LOST if view.plan_revision == 0 else Why.STORE_SET_BACK
    lost = Cause(why=why, nodes=(state.me.node,))
    generation = max(plan.generation, workers_of(state).generation) + AHEAD * max(1, view.epoch)
    trains, seats, rung, endpoint = plan.phase is Phase.TRAIN, plan.seats, plan.rung, plan.endpoint
    if trains and not state.settings.means.in_place:
        # (The agent of who has no seat is told nothing, and would offer the same place once more.)
        offer = workers_of(state).endpoint if state.me in plan.seat_of else ""
        rung, endpoint = Rung.START if offer else Rung.RESTART, offer or endpoint
        seats = tuple(replace(seat, born=generation) for seat in seats)
    elif trains and rung is not Rung.RELOAD:
        rung = Rung.REFORM
    return replace(
        plan,
        generation=generation,
        seats=seats,
        rung=rung,
        endpoint=endpoint,
        resume=view.committed,
        causes=(lost,) if trains else (*plan.causes, lost),
        verdict=None,
        again=True,
        gang=() if state.made == plan.generation else plan.gang,
    )
