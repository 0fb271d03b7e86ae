"""What every node does: keep its lease, say the truth about itself, and make its workers match the plan.

The idea: each rule compares what should be with what is and wishes for the difference. Nothing is remembered about what was
asked before; a wish that came true no longer arises.
"""

from dataclasses import replace
from math import inf
from typing import Any

from elasticrl.contract.events import Action, KeepAlive, Leave, LookAt, Probe, Publish, Try, Workers, WriteCommit
from elasticrl.contract.evidence import Sign
from elasticrl.contract.model import (
    LOADING,
    MEETING,
    OUTSIDE,
    Exit,
    Member,
    Outcome,
    Phase,
    Plan,
    Record,
    Rung,
    Seat,
    Stall,
    Work,
    saying,
)
from elasticrl.contract.orders import Halt, Kill, Launch, Park, Reform, place_of
from elasticrl.contract.verdict import Fault
from elasticrl.core.judge.policy import Act
from elasticrl.core.node import dossier
from elasticrl.core.node.invariants import check_commit
from elasticrl.core.node.state import NOTHING, State, Wish
from elasticrl.core.node.suspect import lives, probe_turns, watched

NO_WORKERS = Workers(now=-inf)
LOADS_S = 1.0  # a program that loads for less is no news
NOBODY = (
    "The script's log shows no progress, and no rank stands out: it may save, evaluate or hang. "
    "elasticrl diagnose shows where each rank is."
)
MILD = "The job was left alone (timeouts.progress: tell)."
PROBLEM = 200  # characters of why a node gets no worker ready, or keeps no log
REPORTS_PER_S = (
    200  # that all nodes together may cost the store: each is a write, and read by the leader and its deputies
)
# A renewal is decided on so much early, and sent at the next multiple of that by the wall clock: those of thousands of members
# come in bunches then, which costs the store less.
TOGETHER_S = 0.1
# No set: an enum's hash is a call, and this is asked several times at each event.
ALIVE = (Work.JOINING, Work.TRAINING, Work.PARKED, Work.STALLED, Work.DONE)


def workers_of(state: State) -> Workers:
    """What the agent last said; nothing runs before it has said anything."""
    return state.workers or NO_WORKERS


def alive(workers: Workers) -> bool:
    """Are there seated worker processes that can go on?"""
    return workers.work in ALIVE


def answers(workers: Workers, plan: Plan) -> bool:
    """Have this node's workers, living or dead, been told of this plan? (Ended ones bear its number without having been in.)"""
    return workers.work is not Work.NONE and workers.generation >= plan.generation


def trains_on(state: State) -> bool:
    """Do this node's workers still train in the gang to which the plan only adds? Its vault keeps that one's ring meanwhile: a
    shard lies where it is looked for when that gang loses somebody.
    """
    plan = plan_of(state)
    if plan is None or not plan.grows:
        return False
    seat, workers = plan.seat(state.me), workers_of(state)
    if seat is None or seat.born == plan.generation or not alive(workers):
        return False
    return workers.generation < plan.generation or (workers.work is Work.JOINING and workers.phase != MEETING)


def plan_of(state: State) -> Plan | None:
    """The plan to follow. A STOP that was there before this life began is history: somebody wants the job again.

    A daemon that adopts running workers has not just begun: it stops with them. Found by the scenario
    daemon-restarts-as-the-job-stops: it began the job anew, alone, when all others had left.
    """
    plan = state.view.plan
    if plan is not None and plan.phase is Phase.STOP and state.met == plan.generation and not state.joined:
        return None
    return plan


def seat_of(state: State) -> Seat | None:
    """This member's seat in the plan, if it has one."""
    plan = plan_of(state)
    return plan.seat(state.me) if plan else None


def lease_held(state: State, now: float) -> bool:
    """Is the lease certainly still ours? Counted from when the keepalive was sent, so the store cannot be ahead of us."""
    return now < state.leased + state.settings.membership.lease_ttl_s


def report_every(state: State) -> float:
    """Seconds between two refreshes of the step in a node's record; the more nodes share the store, the more."""
    plan, least_s = plan_of(state), state.settings.membership.report_s
    share_s = len(plan.seats) / REPORTS_PER_S if plan else 0.0
    return max(least_s, share_s)


def record_of(state: State, now: float) -> Record:
    """The truth about this member, as it should stand in the store."""
    workers, plan = workers_of(state), plan_of(state)
    seat = plan.seat(state.me) if plan else None
    work, generation, left = workers.work, workers.generation, workers.exit
    here = plan.generation if plan else 0
    if seat and plan and plan.phase is Phase.TRAIN and _lacks_workers(state, plan, seat, workers):
        # The plan counts on workers that are gone. Say so under its generation, or its leader would wait in vain.
        work, generation = Work.FAILED, here
        left = (
            replace(left, generation=here)
            if left
            else Exit(
                generation=here, slot=None, step=workers.step, cause="its workers are gone", own=False, sign=Sign.KILLED
            )
        )
    own = state.view.own
    told = workers if own is None or now >= state.reported + report_every(state) else own
    # That a worker waits outside of the gang, or has come back, is told at once: who waits for it must not pass for stalled.
    # So is that a gang that is to grow has parted, or is there, and that a program loads, once that takes a while: who waits is
    # decided by that.
    turned = own is not None and own.phase != workers.phase and marks(state, plan, {own.phase, workers.phase}, now)
    card, probed = state.card, state.probed if state.probed and state.probed.generation == here else None
    mine: dict[str, object] = {
        "member": card.member,
        "slots": card.slots,
        "beat": card.beat,
        "probe": card.probe,
        "taken_at": card.taken_at,
        "taken": card.taken,
        "since": card.since,
        "bits": workers.bits or card.bits,
        "problem": workers.problem[:PROBLEM],
        "unlogged": workers.unlogged[:PROBLEM],
        "work": work,
        "generation": generation,
        "born": workers.born if alive(workers) else 0,
        "exit": left,
        "stall": _stall(workers, told),
        "step": told.step,
        "pace": told.pace,
        "lap": told.lap,
        "milestone": told.milestone,
        "phase": workers.phase if turned else told.phase,
        # Of these nobody but this node decides; but a stop waits for the commit of a held gang's last save.
        "saved": workers.saved
        if plan and plan.phase is Phase.HOLD and plan.saves and _uncommitted(state, plan, workers)
        else 0,
        "manifest": "",
        "restore_s": 0.0,
        "suspects": _accused(state, plan) if state.suspects else (),
        "unreachable": probed.unreachable if probed else None,
        "answered": here if probed else 0,
        "probing": probed.more if probed else False,
        "probed": probed.results if probed else (),
        "evidence": dossier.told(state.evidence, here if plan and plan.phase is Phase.TRAIN else 0)
        if state.evidence
        else (),
        "looked": state.looked,
        "advice": _advice(state) if state.lead else (),
        "needs": state.settings.membership.min_nodes,
        "tested": state.trial.found if state.trial else 0,
        "reached": state.trial.reached if state.trial else (),
        "leaving": bool(state.leaving),
    }
    # A newer beat alone is worth no write; when something else is written, it and the step go along.
    if own is not None and own.says(mine, workers):
        return own
    return saying(mine | _newest(workers), workers)


def marks(state: State, plan: Plan | None, phases: set[str], now: float) -> bool:
    """Is one of these a phase that others are told of at once?"""
    loads = LOADING in phases and now >= state.adopted + LOADS_S
    return OUTSIDE in phases or (MEETING in phases and plan is not None and plan.grows) or loads


def _accused(state: State, plan: Plan | None) -> tuple[str, ...]:
    """Neighbours whose beats this node does not hear, each with its life."""
    near = watched(plan, state.me, state.settings.membership.neighbours)
    accused = lives(plan, state.suspects.intersection(near))
    return tuple(str(Member(node=node, incarnation=life)) for node, life in sorted(accused.items()))


def _stall(workers: Workers, told: Workers | Record) -> Stall | None:
    """What others are to know of a stall. One that may last for hours is told anew no more often than steps are."""
    now, before = workers.stall, told.stall
    if now is None or not now.waiting:
        return None
    same = before is not None and now.silent and before.silent and now.slot == before.slot
    return before if same else now


def told_now(state: State, now: float) -> Record:
    """The same with the newest step, which the store is told now and then."""
    workers = workers_of(state)
    return replace(record_of(state, now), **_newest(workers))


def _newest(workers: Workers) -> dict[str, Any]:
    """What changes all the time."""
    return {
        "step": workers.step, "phase": workers.phase, "beat_at": workers.beat_at, "milestone": workers.milestone,
    }  # fmt: skip


def _advice(state: State) -> tuple[str, ...]:
    """What the leader would tell an operator: a finding that it does nothing about, or may do nothing about; who is slow."""
    lead = state.lead
    if lead is None:
        return ()
    finding = lead.dossier.finding
    said = []
    if finding is not None and finding.verdict.fault is not Fault.UNKNOWN:
        if finding.capped:
            said.append(f"{finding.verdict.said}. {finding.capped}. {finding.verdict.remedy}")
        elif finding.answer.act is Act.REPORT or lead.stalls.silent:
            mild = f" {MILD}" if lead.stalls.silent else ""
            said.append(f"{finding.verdict.said}. {finding.verdict.remedy}{mild}")
    elif lead.stalls.silent and state.looked > lead.stalls.silent[1]:
        said.append(NOBODY)
    said += [lead.probes.measured] if lead.probes.measured else []
    return (*said, *(f"{fact.node}: rank {fact.rank} is slow: {fact.detail}" for fact in lead.paces.slow))[:4]


def _lacks_workers(state: State, plan: Plan, seat: Seat, workers: Workers) -> bool:
    """Has this node nothing with which to fill its seat, and no right to begin anew?

    Where the plan asks for fresh workers they may still be warming up. But
    those that had joined this generation cannot do so twice: their gang is broken (an agent died after its launch,
    nobody was told, and the gang waited out its rung).

    Found by simulation: a program raised as a plan was on its way that only added a node. A fresh worker took its seat at once,
    nobody counted the failure, and a crash loop went on beyond its limit.
    """
    if alive(workers) or answers(workers, plan):
        return False
    left = workers.exit
    uncounted = left is not None and left.own and left.generation >= seat.born
    return state.joined >= plan.generation or (seat.born < plan.generation and (uncounted or not workers.warm))


def belong(state: State, now: float) -> Wish:
    """Hold the lease, and keep the record true."""
    actions: list[Action] = []
    keepalive_s = state.settings.membership.keepalive_s
    keepalive_at = state.leased + keepalive_s - min(TOGETHER_S, keepalive_s / 4)
    if now >= keepalive_at:
        actions.append(KeepAlive())
    report_at = inf
    # Found by the scenario drained-and-its-daemon-restarts-beside-a-store-that-lags: a record from before the store was read
    # took back that this node leaves, as an earlier daemon of this life had been asked to.
    if lease_held(state, now) and state.view.revision > 0:
        record = record_of(state, now)
        if record is not state.view.own:
            actions.append(Publish(record=record))
        elif (record.step, record.phase) != (workers_of(state).step, workers_of(state).phase):
            # Found by simulation: waking for what has not changed is spinning.
            report_at = state.reported + report_every(state)
    silent = state.leased > -inf and not lease_held(state, now)
    trains = workers_of(state).work in (Work.TRAINING, Work.DONE)
    goes_on = "training goes on; changes wait for etcd" if trains else "nothing can be planned until etcd answers"
    reason = f"the store is silent: {goes_on}" if silent else ""
    return Wish(tuple(actions), min(keepalive_at if now < keepalive_at else inf, report_at), reason)


def follow(state: State, now: float) -> Wish:
    """Make this node's workers match the plan."""
    plan, workers = plan_of(state), workers_of(state)
    seat = plan.seat(state.me) if plan else None
    kill, look_at = _end_culprit(state, workers, now)
    wish = _follow(state, plan, seat, workers, kill, now)
    return wish if look_at >= wish.wake_at else replace(wish, wake_at=look_at)


def _follow(
    state: State, plan: Plan | None, seat: Seat | None, workers: Workers, kill: tuple[Action, ...], now: float
) -> Wish:
    if plan is None:
        # There is nothing to leave, as far as the store says; where workers know better, somebody has this long to say so too.
        due = state.leaving_since + state.settings.recovery.drain_s if alive(workers) else -inf
        if state.leaving and state.view.revision and now >= due:
            return Wish((Leave(code=0, reason=state.leaving),), reason=state.leaving)
        return Wish(kill, due if state.leaving and now < due else inf, reason="waiting for a first plan")
    if alive(workers) and workers.generation > plan.generation:
        # A daemon that began just now, beside workers that train on. Somebody knows their plan, and writes it again.
        newer = f"generation {workers.generation}, of which the store knows nothing (it shows {plan.generation})"
        return Wish(kill, reason=f"the workers here follow {newer}; waiting for its plan")
    if plan.phase is Phase.STOP:
        return _stop(state, plan, now)
    if seat is None:
        return _unseated(state, plan, workers)
    match plan.phase:
        case Phase.TRAIN:
            look = _look(state, plan, workers)
            return Wish(
                kill + look + _train(state, plan, seat, workers) + _commit(state, plan, workers), reason=plan.reason
            )
        case Phase.PROBE:
            return Wish(kill + _hold(state, plan, workers) + _probe(state, plan), reason=plan.reason)
        case Phase.HOLD if plan.saves:
            return _save(state, plan, workers, now)
        case Phase.HOLD:
            leave = _leave_held(state, now)
            held = kill + _hold(state, plan, workers) + _commit(state, plan, workers)
            return Wish(held + leave, reason=plan.reason)


def tries(state: State, now: float) -> Wish:
    """Whether the cut ways to this node carry again: it tests that itself, while others train, as long as it has no seat, or
    an other end has none. Found by the scenario
    the-cut-end-trains-and-the-other-waits: it trained alone, and a spare waited for a test that nobody made.

    Each pause is an eighth of the time since the first test: so the way waits no more than that much longer than it was cut.
    """
    barred = state.view.barred
    if barred is None or not barred.cuts:
        return NOTHING
    plan, trial, settings = plan_of(state), state.trial, state.settings
    if plan is None:
        return NOTHING
    ends = sorted(barred.peers & plan.place.keys(), key=plan.place.__getitem__)
    seated = seat_of(state) is not None
    if plan.phase is not Phase.HOLD and (plan.phase is not Phase.TRAIN or (seated and plan.seat_at.keys() >= {*ends})):
        return Wish()
    if seated and plan.phase is Phase.TRAIN:  # of whom it trains with it knows already
        ends = [node for node in ends if node not in plan.seat_at]
    targets = {node: plan.ring[plan.place[node]].beat for node in ends}
    known = trial if trial and trial.found == barred.found and trial.asked >= targets.keys() else None
    out = sorted(targets.keys() - (known.reached if known else ()))
    reason = f"no seat until a test of the connection to {', '.join(out[:3])} passes" if out and not seated else ""
    if not targets:
        return Wish()
    if known:
        pause_s = min(max(settings.timeouts.confirm_s, (known.at - known.since) / 8), settings.health.quarantine_s)
        if now < known.at + pause_s:
            return Wish(wake_at=known.at + pause_s, reason=reason)
    doors = {node: vault for node in ends if (vault := plan.ring[plan.place[node]].vault)}
    return Wish((Try(found=barred.found, targets=targets, doors=doors),), reason=reason)


def _end_culprit(state: State, workers: Workers, now: float) -> tuple[tuple[Action, ...], float]:
    """A worker that stands still outside a collective, or that the kernel reports as stopped, is ended by its own node.

    Where it stands dies with it, so it is looked at first, if it can answer, for no longer than that may take.
    """
    stall = workers.stall
    if stall is None or not alive(workers) or (stall.waiting and not stall.stopped):
        return (), inf
    if now < (due := state.patient_until(stall)):
        return (), due
    since = workers.now if state.stalled_at is None else state.stalled_at
    due = since + state.settings.timeouts.dump_s
    if not stall.stopped and state.looked_at < since and now < due:
        return (), due
    return (Kill(slot=stall.slot, cause=str(stall), sign=stall.sign),), inf


def _train(state: State, plan: Plan, seat: Seat, workers: Workers) -> tuple[Action, ...]:
    if answers(workers, plan) or _lacks_workers(state, plan, seat, workers):
        return ()
    if alive(workers) and workers.born == seat.born:
        return (Reform(place=place_of(plan, state.me)),)
    if workers.warm:
        # A script's gang that is whole can save before it starts again; one that has broken cannot.
        whole = not state.settings.means.in_place and plan.rung is Rung.START
        leave_s = state.settings.recovery.drain_s if whole else 0.0
        return (Launch(place=place_of(plan, state.me), leave_s=leave_s),)
    if alive(workers):
        reason = "this generation starts from fresh processes"
        return (Halt(generation=plan.generation, save=False, within_s=0.0, reason=reason),)
    return ()


def _look(state: State, plan: Plan, workers: Workers) -> tuple[Action, ...]:
    """Others have stalled, and their leader asks everybody where his workers are."""
    view = state.view
    if view.look != plan.generation or view.look_revision <= state.looked or workers.generation != plan.generation:
        return ()
    return (LookAt(generation=plan.generation, request=view.look_revision),)


def _hold(state: State, plan: Plan, workers: Workers) -> tuple[Action, ...]:
    """Out of the gang, state in hand. Whoever cannot go on in another one ends, with the time for a save of its own."""
    if not alive(workers) or workers.generation >= plan.generation:
        return ()
    if state.settings.means.in_place:
        return (Park(generation=plan.generation, endpoint=plan.endpoint, reason=plan.reason),)
    in_order = plan.phase is Phase.HOLD and not plan.rung
    return (_end(state, plan.generation, plan.reason, in_order=in_order),)


def _end(state: State, generation: int, reason: str, *, in_order: bool) -> Halt:
    """End a script's workers: with time for a last save where nothing is broken, else as soon as it can save on SIGTERM."""
    recovery = state.settings.recovery
    return Halt(
        generation=generation, save=True, within_s=recovery.drain_s if in_order else recovery.grace_s, reason=reason
    )


def _probe(state: State, plan: Plan) -> tuple[Action, ...]:
    if state.probed and state.probed.generation == plan.generation:
        return ()
    me = state.me.node
    links = probe_turns(plan, me)
    others = sorted({name for pair in links for name in pair if name in plan.place} - {me}, key=plan.place.__getitem__)
    targets = {node: plan.ring[plan.place[node]].beat for node in others}
    known = {node: probe for node in (*targets, me) if (probe := plan.ring[plan.place[node]].probe)}
    own = tuple(pair for pair in links if set(pair) <= known.keys())
    return (Probe(generation=plan.generation, targets=targets, nodes=known if own else {}, pairs=own),)


def _commit(state: State, plan: Plan, workers: Workers) -> tuple[Action, ...]:
    """Only rank 0's node commits, and only what its gang saved under the plan that it still sees."""
    view = state.view
    if view.lost:
        return ()  # until the store knows again which gang is the newest
    if not _uncommitted(state, plan, workers):
        return ()
    commit = WriteCommit(
        step=workers.saved,
        generation=plan.generation,
        manifest=workers.manifest,
        if_plan=view.plan_revision,
        if_commit=view.commit_revision,
    )
    check_commit(view, commit)
    return (commit,)


def _uncommitted(state: State, plan: Plan, workers: Workers) -> bool:
    """Has rank 0's node, which is this one, a save of this gang that is not committed?"""
    here = workers.generation == plan.generation and bool(plan.seats) and plan.seats[0].member == state.me
    return here and workers.saved > state.view.committed


def _unseated(state: State, plan: Plan, workers: Workers) -> Wish:
    if state.leaving and not state.settings.means.in_place and alive(workers):
        return Wish((_end(state, plan.generation, state.leaving, in_order=True),), reason=state.leaving)
    if state.leaving:
        return Wish((Leave(code=0, reason=state.leaving),), reason=state.leaving)
    if plan.phase is Phase.PROBE and state.me.node in plan.place:
        return Wish(_probe(state, plan), reason=plan.reason)
    if alive(workers):
        halt = Halt(generation=plan.generation, save=False, within_s=0.0, reason="the plan goes on without this node")
        return Wish((halt,), reason="out of the plan")
    return Wish(reason="ready, waiting for a seat" if workers.warm else "warming up")


def _stop(state: State, plan: Plan, now: float) -> Wish:
    """End the workers, let rank 0's last save be committed, and leave with the plan's exit code."""
    workers = workers_of(state)
    drain_s = state.settings.recovery.drain_s
    commit = _commit(state, plan, workers) if plan.seats else ()
    late = now >= state.adopted + 2 * drain_s  # the store has had its time for the last commit
    if alive(workers) and not late:
        loads = workers.work is Work.JOINING and workers.phase == LOADING  # and has nothing to save
        save = state.me in plan.seat_of and plan.exit_code != Outcome.CRASH_LOOP.value and not loads
        halt = Halt(generation=plan.generation, save=save, within_s=drain_s if save else 0.0, reason=plan.reason)
        return Wish((halt, *commit), state.adopted + 2 * drain_s, plan.reason)
    if commit and not late:
        return Wish(commit, state.adopted + 2 * drain_s, plan.reason)
    if _breaks(state, plan, workers) and now < state.adopted + drain_s:
        return Wish(wake_at=state.adopted + drain_s, reason=f"{plan.reason}; {UNHEARD}")
    reason = plan.reason
    if commit:
        reason += f"; step {workers.saved} is saved, but the store has not taken its commit within {2 * drain_s:g} s"
    elif unsaved(state, now):
        reason += (
            f"; its workers did not end with a save within {drain_s:g} s, so step {workers.step} is in memory alone: under the "
            "units the vaults keep it for vault.linger, and a job that is begun again before that goes on from it"
        )
    return Wish((Leave(code=plan.exit_code or 0, reason=reason),), reason=reason)


UNHEARD = "a neighbour stopped responding before its last save; waiting to see if the others form once more"


def _breaks(state: State, plan: Plan, workers: Workers) -> bool:
    """May this node's gang form once more, to save? One of it is silent beside this node, and what it made is not
    on disk. (A spare that is silent has left, as all of them do at a stop.)
    """
    if (
        state.suspects.isdisjoint(plan.seated)
        or state.me not in plan.seat_of
        or plan.exit_code != Outcome.STOPPED.value
    ):
        return False
    if workers.generation != plan.generation:
        return False  # they had ended before: nobody forms a gang of them
    return state.settings.means.commits and workers.step > state.view.committed


def unsaved(state: State, now: float) -> bool:
    """Has this node left a gang that was to end, and whose time was up before it had saved what it made?

    Found by reading: a job that was stopped because it hung lost all steps since its last save, with its vaults.
    """
    plan = state.view.plan
    if plan is None or plan.phase is not Phase.STOP or state.me not in plan.seat_of:
        return False
    if not state.settings.means.commits:
        return False  # what a script has made, it has saved itself
    return now >= state.adopted + state.settings.recovery.drain_s and workers_of(state).step > state.view.committed


def _save(state: State, plan: Plan, workers: Workers, now: float) -> Wish:
    """Nodes leave that the gang cannot spare: it ends with a last save, they go, and the others wait for more nodes.

    Found on three nodes that were stopped at one stroke, and on one that is stopped: parked workers save nothing.
    """
    drain_s = state.settings.recovery.drain_s
    due = state.adopted + 2 * drain_s  # a last step and save, and then the commit
    commit = _commit(state, plan, workers)
    if alive(workers) and now < due:
        halt = Halt(generation=plan.generation, save=True, within_s=drain_s, reason=plan.reason)
        return Wish((halt, *commit), due, plan.reason)
    if commit and now < due:
        return Wish(commit, due, plan.reason)
    leave = _leave_held(state, now)
    return Wish(leave, inf if leave or not state.leaving else state.leaving_since + drain_s, plan.reason)


def _leave_held(state: State, now: float) -> tuple[Action, ...]:
    """A leaving node that the held plan could not spare goes once its state is on disk, or its time is up."""
    if not state.leaving:
        return ()
    safe = state.view.committed >= workers_of(state).step
    if not state.settings.means.commits:
        safe = not alive(workers_of(state))
    late = now >= state.leaving_since + state.settings.recovery.drain_s
    return (Leave(code=0, reason=state.leaving),) if safe or late else ()
