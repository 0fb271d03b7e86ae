"""What comes most often and changes nothing: an own record that comes back from the store, a step more, a lease renewed.

The one idea: `whole` looks at everything; of these few events it is known what it would find. So `calm` answers what `whole`
would, to the bit, or None. A test asks both at each event of whole runs.
"""

from collections.abc import Hashable, Mapping
from dataclasses import fields
from math import inf
from operator import attrgetter
from typing import Final

from elasticrl.contract.events import Action, Event, KeepAlive, Leased, Publish, Seen, Tick, Workers
from elasticrl.contract.model import LOADING, Phase, View, Work
from elasticrl.core.node.follow import TOGETHER_S, alive, lease_held, marks, plan_of, report_every
from elasticrl.core.node.state import Decision, State

# What may differ where nothing has changed. The revisions come first: they are compared fast, and mostly tell.
_names = sorted((field.name for field in fields(View)), key=lambda name: not name.endswith("revision"))
_shown: Final = attrgetter(*(name for name in _names if name not in ("own", "revision", "commit", "commit_revision")))
_LATER: Final = (
    "now",
    "step",
    "phase",
    "beat_at",
    "pace",
    "lap",
    "milestone",
)  # of these the store is told now and then
_told: Final = attrgetter(*(field.name for field in fields(Workers) if field.name not in _LATER))

RENEW: Final = KeepAlive()


def calm(state: State, event: Event) -> Decision | None:
    """The decision at an event that changes nothing of what this node wants, but the wish that it fulfils; None: look."""
    now, own, workers = event.now, state.view.own, state.workers
    if own is None or workers is None or not now < state.calm_until or not now < state.reported + report_every(state):
        return None
    if state.leaving or state.evidence or state.lead or state.vacant_since is not None or state.lost_since is not None:
        return None
    plan = state.view.plan
    if workers.stall or state.view.lost or (plan is not None and (plan.phase is Phase.STOP or plan.saves)):
        return None
    match event:
        case Seen(view=view):
            after = _came_true(state, view)
        case Workers():
            after = _further(state, event)
        case Leased():
            after = _renewed(state, event)
        case Tick() if Publish.__name__ not in state.sent:
            after = state
        case _:
            return None
    if after is None or not lease_held(after, now):
        return None
    own, workers = after.view.own or own, after.workers or workers
    report_at = inf
    if (own.step, own.phase) != (workers.step, workers.phase):
        phases = {own.phase, workers.phase}
        if len(phases) > 1 and (LOADING in phases or marks(after, plan_of(after), phases, now)):
            return None  # of these others are told at once, or once it takes a while
        report_at = state.reported + report_every(state)
    return _waiting(after, now, min(state.calm_until, report_at))


def _waiting(state: State, now: float, wake_at: float) -> Decision | None:
    """Nothing to do now but to renew the lease in time, unless something that was asked for has not shown."""
    keepalive_s = state.settings.membership.keepalive_s
    keepalive_at = state.leased + keepalive_s - min(TOGETHER_S, keepalive_s / 4)
    sent = state.sent
    actions: tuple[Action, ...] = ()
    if now < keepalive_at:
        wake_at = min(wake_at, keepalive_at)
        if KeepAlive.__name__ in sent:
            sent = _without(sent, KeepAlive.__name__)
            state = state.but(sent=sent)
    elif KeepAlive.__name__ not in sent:
        state = state.but(sent={**sent, KeepAlive.__name__: (RENEW, now)})
        actions, wake_at = (RENEW,), min(wake_at, now + state.settings.retry_s)
    for _, at in sent.values():
        again_at = at + state.settings.retry_s
        if now >= again_at:
            return None
        wake_at = min(wake_at, again_at)
    return Decision(state=state, actions=actions, wake_at=wake_at)


def _came_true(state: State, view: View) -> State | None:
    """The store shows this node's own record as it was written last, and what else is new is a commit at most."""
    last, own, before = state.sent.get(Publish.__name__), view.own, state.view
    if own is None or view.revision < before.revision or view.records is not None or view.committed < before.committed:
        return None
    if (own.born and own.generation > state.joined) or view.drain == state.me or state.met is None:
        return None
    if view.commit_revision != before.commit_revision and (state.workers is None or state.workers.saved):
        return None
    if _shown(view) != _shown(before) or own != (
        last[0].record if last and isinstance(last[0], Publish) else before.own
    ):
        return None
    return state.but(view=view, sent=_without(state.sent, Publish.__name__) if last else state.sent)


def _further(state: State, event: Workers) -> State | None:
    """The workers are where they were, or some steps further, which the store is told now and then."""
    before = state.workers
    if before is None or Publish.__name__ in state.sent or event.exit is not None or state.stalled_at is not None:
        return None
    if not alive(event) or _told(event) != _told(before):
        return None
    made = event.generation if event.work is Work.TRAINING and event.step > before.step else state.made
    return state.but(workers=event, made=made)


def _renewed(state: State, event: Leased) -> State | None:
    """The store has renewed the lease."""
    if not event.held or Publish.__name__ in state.sent:
        return None
    return state.but(leased=max(event.sent, state.leased))


def _without(sent: Mapping[Hashable, tuple[Action, float]], about: str) -> Mapping[Hashable, tuple[Action, float]]:
    return {subject: what for subject, what in sent.items() if subject != about}
