"""What `elasticrl status` shows, as values: is it training, how far, who is in, what should I do.

The one idea: the picture is a pure function of what the store says, so the daemon, a machine without one (`--store`), the web
page and the tests all show the same. Words, not codes; the reason is the very sentence that the core decided by.
"""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from elasticrl.base.value import dataclass
from elasticrl.base.words import count, some
from elasticrl.contract import versions
from elasticrl.contract.cause import Why, goes_on, names, orderly
from elasticrl.contract.level import GIVES, MEANS, Level
from elasticrl.contract.model import (
    LOADING,
    MEETING,
    Intent,
    Member,
    Outcome,
    Phase,
    Plan,
    Quarantine,
    Record,
    Rollout,
    View,
    Work,
    meanwhile,
)
from elasticrl.contract.verdict import Fault, Verdict
from elasticrl.status.past import Broken, Missing, Past

PAUSED = "PAUSED"  # what an operator's hold is called
STATES = {Phase.TRAIN: "TRAINING", Phase.HOLD: "HOLDING", Phase.PROBE: "PROBING"}
UNSEEN = "The store does not answer, so the state of the other nodes is unknown. Look at etcd: elasticrl doctor --config FILE."
AWAY = "The store does not answer. What it said last of the other nodes is shown. Look at etcd: elasticrl doctor --config FILE."
STANDS = "WAITING FOR ETCD"  # the state of a job that needs another plan, and cannot have one
GENERATES = "rollout"  # a rollout node's state, when its engine is up
TAKEN_S = 600.0  # for so long a row says that a daemon was started again
WANTING = frozenset({"STARTING", "RECOVERING", "PROBING"})  # states that another plan, or a commit, would end
AWAY_STATES = frozenset({"gone", "lost", "drained"})  # of nodes that are not there; who is lost has still a lease
ENDS = {Outcome.FINISHED.value: "FINISHED", Outcome.CRASH_LOOP.value: "CRASH LOOP"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One node.

    Example: Row(node="n03", member="n03/2", rank=None, state="quarantined", note="2 neighbours cannot hear it")
    """

    node: str
    member: str
    state: str
    role: str = "train"  # or "rollout", as node.role has it
    leader: bool = False
    rank: int | None = None  # of its first slot
    slots: int = 1
    team: int | None = None  # of its first slot; None: workers share nothing, or it does not train
    teams: int = 0  # that it has
    step: int = 0
    milestone: str = ""  # how far it is by its log, in words, where it tells no steps; "": the log has not said
    milestone_s: float | None = None  # how long ago the log has said so
    phase: str = ""  # as its record says, which is refreshed now and then
    beat_s: float | None = None  # how old the oldest beat of its workers is at most; None: not known
    taken_s: float | None = None  # how long ago its daemon was started again; None: not of late
    taken: str = ""  # after what: a word of `words.ENDS`
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """The whole job at one moment."""

    job: str
    state: str
    generation: int = 0
    step: int = 0
    committed: int = 0
    committed_s: float | None = None  # how long ago; None: not known
    unsaved: int = 0  # steps since, which would not be saved if the job were stopped now: too few are there
    nodes: int = 0
    known: int = 0
    needs: int = 1  # 0: whoever looks does not know
    reason: str = ""
    causes: tuple[str, ...] = ()  # the kinds of what the reason tells
    orderly: bool = False  # the plan answers no fault: nodes left in order, or a gang goes on that held
    reason_s: float | None = None  # how long ago it was read here, of a plan that trains; None: not known
    node: str = ""  # whose daemon says so; empty: nobody's
    here: str = ""  # what it says of itself
    rows: tuple[Row, ...] = ()
    uptime_s: float | None = None  # since the job first had a leader, without the time for which it was stopped
    stopped_s: float = 0.0  # that time
    faults: int = 0  # since then
    mtbf_s: float | None = None  # mean time between them; None: there was none
    last: Broken | None = None
    last_s: float | None = None  # how long ago
    advice: tuple[str, ...] = ()
    exit_code: int | None = None
    level: str = ""  # job.level; "": not known here
    tells: bool = True  # steps are known
    milestone: str = ""  # how far the job is by the log of a rank, in words
    milestone_s: float | None = None  # how long ago the log has said so
    commits: bool = True  # and committed


def picture(
    job: str,
    view: View,
    records: Mapping[str, Record],
    quarantines: Mapping[str, Quarantine],
    rollouts: Mapping[str, Rollout] | None = None,
    *,
    past: Past | None = None,
    drains: Mapping[str, Member] | None = None,
    needs: int,
    engines: int = 0,
    node: str = "",
    here: str = "",
    now: float = 0.0,
    silent: bool = False,
    away: bool = False,
    planned_s: float | None = None,
) -> Picture:
    """The picture of what the store says. `now` is by the wall clock: others' may differ a little, which only ages show.

    `planned_s`: how long ago the plan came. `engines`: so many rollout nodes are expected. `drains`: who was asked to leave.
    `away`: the store says nothing, and this is what it said last; `silent`: so little that who has no record here may well
    have one.
    """
    plan = view.plan
    again = begins_again(plan, records)
    verdict = answer(plan, past)
    dead = verdict.nodes if verdict is not None and verdict.fault == Fault.DEAD_NODE else ()
    drains = not_back(drains or {}, [*records.values(), *quarantines.values(), *(past.missing if past else ())])
    rows = tuple(
        row(
            name,
            records.get(name),
            quarantines.get(name),
            view,
            now,
            dead=name in dead,
            silent=silent,
            left=drains.get(name),
        )
        for name in sorted(
            {*records, *(seat.member.node for seat in plan.seats if plan.phase is not Phase.STOP)} if plan else records
        )
    )
    present = {row.node for row in rows}
    missing = [each for each in (past.missing if past else ()) if each.member.node not in present]
    missing = [] if plan is not None and plan.phase is Phase.STOP else missing
    away_rows = [missing_row(each, quarantines, now) for each in missing]
    away_rows += [drained_row(each) for each in drained(plan, drains) if each.node not in present]
    rows = tuple(sorted((*rows, *away_rows), key=lambda row: row.node))
    generating = tuple(rollout_row(rollout) for _, rollout in sorted((rollouts or {}).items()))
    training = plan is not None and plan.phase is Phase.TRAIN
    seated = sum(row.rank is not None for row in rows)
    state = "FORMING" if again else state_of(plan, records, view.intent)
    reason = plan.reason if plan and not again else beginning(view)
    if away and plan is not None and state in WANTING:
        state, reason = STANDS, f"generation {plan.generation} does not train, and no new plan can be written: {reason}"
    if plan is not None and state != "TRAINING":
        reason, here = reason.replace(plan.reason, plan.promise), here.replace(plan.reason, plan.promise)
    past = answered(past, plan) if past else None
    until = view.commit.written if plan is not None and plan.phase is Phase.STOP and view.commit else now
    uptime_s = round(past.lasted_s(until), 1) if past and until else None
    return Picture(
        job=job,
        state=state,
        generation=view.generation,
        step=newest(view, records),
        committed=view.committed,
        committed_s=age(view.commit.written, now) if view.commit else None,
        unsaved=unsaved(view, records, needs),
        nodes=seated,
        known=len(rows),
        needs=needs,
        reason=reason,
        causes=plan.kinds if plan and not again else (),
        orderly=plan is not None and not again and (orderly(plan.kinds) or goes_on(plan.kinds)),
        reason_s=None if again else planned_s if planned_s is not None else of_its_fault(past, plan, now),
        node=node,
        here=here,
        rows=(*rows, *generating),
        uptime_s=uptime_s,
        stopped_s=round(past.stood_s(now), 1) if past else 0.0,
        faults=past.faults if past else 0,
        mtbf_s=round(uptime_s / past.faults, 1) if past and past.faults and uptime_s else None,
        last=past.last if past else None,
        last_s=age(past.last.at, now) if past and past.last else None,
        advice=(
            *(() if has_ended(plan, again=again) else [UNSEEN] if silent else [AWAY] if away else ()),
            *advice(rows, view, needs, drains, training=training, again=again),
            *gone([each.member.node for each in missing], seated, needs, training=training),
            *([] if missing else barely(past, drains, rows, needs, training=training)),
            *awaited(generating, engines, training=training),
            *found(verdict, view, records, quarantines, {each.member.node for each in missing}),
            *unlogged(records),
            *differing(records),
        ),
        exit_code=plan.exit_code if plan and not again else None,
        **by_its_log(rows),
    )


def by_its_log(rows: Sequence[Row]) -> dict[str, Any]:
    """How far a job is that tells no steps: what the log says that has said something last."""
    told = [row for row in rows if row.milestone_s is not None]
    newest = min(told, key=lambda row: (row.milestone_s or 0.0, row.rank or 0), default=None)
    return {"milestone": newest.milestone, "milestone_s": newest.milestone_s} if newest else {}


def on_level(made: Picture, level: Level) -> Picture:
    """The same, with the level that the job is on, and what the next one would give."""
    means = MEANS[level]
    more = (GIVES[level],) if GIVES[level] and made.exit_code is None else ()
    return replace(made, level=level.value, tells=means.tells, commits=means.commits, advice=(*made.advice, *more))


def has_ended(plan: Plan | None, *, again: bool) -> bool:
    """Has the job ended? Then neither its leader nor its store is missed."""
    return plan is not None and plan.phase is Phase.STOP and not again


def of_its_fault(past: Past | None, plan: Plan | None, now: float) -> float | None:
    """How long ago the fault was that the plan answers: who was not there when the plan came goes by that."""
    last = past.last if past else None
    return age(last.at, now) if last and plan and last.generation == plan.generation else None


def newest(view: View, records: Mapping[str, Record]) -> int:
    """The newest step: records are refreshed now and then."""
    return max((view.committed, *(record.step for record in records.values())))


def unsaved(view: View, records: Mapping[str, Record], needs: int) -> int:
    """Steps since the commit that a stop would not save: a gang that holds forms once more for that, if all are there that it
    has and needs.
    """
    plan = view.plan
    if plan is None or plan.phase is not Phase.HOLD or plan.saves:
        return 0
    there = {record.member for record in records.values() if not record.leaving}
    enough = max(len(plan.seats), needs)
    return 0 if len(there & plan.seat_of.keys()) >= enough else newest(view, records) - view.committed


def begins_again(plan: Plan | None, records: Mapping[str, Record]) -> bool:
    """Is the plan that of an earlier run, which has ended, and are nodes here for the next one? They have lives that it does
    not know.
    """
    if plan is None or plan.phase is not Phase.STOP:
        return False
    lives = {seat.member.node: seat.member.incarnation for seat in plan.ring}
    there = [record.member for record in records.values() if not record.leaving]
    return any(each.incarnation > lives.get(each.node, each.incarnation) for each in there) or bool(
        there and lives and not any(each.node in lives for each in there)
    )


def beginning(view: View) -> str:
    """Why there is no plan to go by."""
    if view.plan is not None:
        return f"begins again from step {view.committed:,} after: {view.plan.reason}"
    begins = f"begins again from step {view.committed:,}; " if view.committed else ""
    return f"{begins}no plan yet: waiting for nodes and a leader"


def found(
    verdict: Verdict | None,
    view: View,
    records: Mapping[str, Record],
    quarantines: Mapping[str, Quarantine],
    missing: AbstractSet[str],
) -> tuple[str, ...]:
    """What was found out: the remedy for what broke the present gang's forerunner, and what the leader says is not in order.

    A way to a node that has gone altogether may be whole: found by a new user, who killed one of two nodes and was sent to look
    at switches and cables.
    """
    leader = records.get(view.leader.node) if view.leader else None
    said = list(leader.advice) if leader else []
    overtaken = verdict is not None and verdict.fault == Fault.NETWORK and not missing.isdisjoint(verdict.nodes)
    if verdict is not None and verdict.remedy and verdict.confidence != "low" and not overtaken:
        who = ", ".join([*(named_rank(rank, view.plan) for rank in verdict.ranks), *verdict.nodes])
        back = lives_after(verdict, records, quarantines)
        todo = verdict.remedy
        if back:
            seated = view.plan is not None and set(back) <= {str(seat.member) for seat in view.plan.seats}
            todo = f"back as {some(back)}{'' if seated else ', let in when ready'}. The logs there, and the kernel's, say why."
        said.insert(0, f"{verdict.fault}{f' ({who})' if who else ''}: {todo} More: elasticrl incidents last.")
    return tuple(said)


def named_rank(rank: int, plan: Plan | None) -> str:
    """With its team, where there are teams: they are the same ranks' in each generation."""
    team = plan.team_of(rank) if plan else None
    return f"rank {rank}" if team is None else f"rank {rank} of team {team}"


def lives_after(
    verdict: Verdict, records: Mapping[str, Record], quarantines: Mapping[str, Quarantine]
) -> tuple[str, ...]:
    """The next lives of nodes that died, if all of those have come back: nobody has to look whether they have power."""
    if verdict.fault != Fault.DEAD_NODE:
        return ()
    there = [records[node].member for node in verdict.nodes if node in records]
    fresh = [each for each in there if not ((kept := quarantines.get(each.node)) and kept.binds(each))]
    return tuple(map(str, fresh)) if len(fresh) == len(verdict.nodes) else ()


def unlogged(records: Mapping[str, Record]) -> Iterator[str]:
    """Whose words are lost, or lie elsewhere: training goes on, but who looks for a fault there will miss them."""
    for node, record in sorted(records.items()):
        if record.unlogged:
            yield f"{node} cannot write its log: {record.unlogged}. Make room there (df), or repair the folder."


def differing(records: Mapping[str, Record]) -> tuple[str, ...]:
    """Who runs another Python or elasticrl than the others. (Another torch or NCCL is a verdict.)"""
    odd = [each for each in versions.odd(versions.claimed(records)) if each.name not in versions.FATAL]
    return (f"{versions.sentence(odd)}. {versions.REMEDY}",) if odd else ()


def state_of(plan: Plan | None, records: Mapping[str, Record], intent: Intent) -> str:
    """The first word of the status."""
    if plan is None:
        return "FORMING"
    if plan.phase is Phase.STOP:
        return "STOPPED" if by_policy(plan) else ENDS.get(plan.exit_code or Outcome.FINISHED.value, "STOPPED")
    works = {
        record.work if record.generation == plan.generation else Work.JOINING
        for seat in plan.seats
        if (record := records.get(seat.member.node)) and record.member == seat.member
    }
    if plan.phase is Phase.TRAIN and works - {Work.TRAINING, Work.DONE}:
        return "RECOVERING" if plan.rung else "GROWING" if plan.grows else "STARTING"
    return PAUSED if plan.phase is Phase.HOLD and intent is Intent.PAUSE else STATES[plan.phase]


def by_policy(plan: Plan) -> bool:
    """The job stopped for one fault, and not because the same one came again and again."""
    return plan.phase is Phase.STOP and plan.exit_code == Outcome.CRASH_LOOP.value and plan.strike is None


def row(
    node: str, record: Record | None, quarantine: Quarantine | None, view: View, now: float, *,
    dead: bool, silent: bool = False, left: Member | None = None,
) -> Row:  # fmt: skip
    """One node's line. `left`: it was asked to leave."""
    seat = view.plan.seat_of.get(record.member) if view.plan and record else None
    rank = view.plan.first_rank(seat.member) if view.plan and seat and view.plan.phase is not Phase.STOP else None
    team = view.plan.team_of(rank) if view.plan and rank is not None else None
    leader = view.leader is not None and view.leader.node == node
    if record is None and silent and view.plan is not None:
        theirs = next(seat for seat in view.plan.seats if seat.member.node == node)
        rank = view.plan.first_rank(theirs.member)
        return Row(
            node=node, member=str(theirs.member), state="unknown", leader=leader, rank=rank, slots=theirs.slots,
            team=view.plan.team_of(rank), teams=theirs.slots // view.plan.team if view.plan.team > 1 else 0,
        )  # fmt: skip
    if record is None and left is not None and view.plan is not None and left in view.plan.seat_of:
        return drained_row(left)
    if record is None:
        return Row(
            node=node, member=node, state="gone", leader=leader, note="no lease (not running, or cut off from etcd)"
        )
    member, slots = str(record.member), record.slots
    taken_s = age(record.taken_at, now)
    taken_s = taken_s if taken_s is not None and taken_s < TAKEN_S else None
    if quarantine is not None and quarantine.binds(record.member) and rank is None:
        state = "lost" if dead else "quarantined"
        return Row(node=node, member=member, state=state, leader=leader, slots=slots, note=quarantine.reason)
    if rank is None:
        state = "leaving" if record.leaving else "spare" if record.warm else "warming up"
        out = sorted(quarantine.beyond(record)) if quarantine is not None else []
        cut = f"no seat until a test of the connection to {', '.join(out[:3])} passes" if out else ""
        return Row(
            node=node, member=member, state=state, leader=leader, slots=slots, taken_s=taken_s, taken=record.taken,
            note=record.problem or cut,
        )  # fmt: skip
    note = record.exit.cause if record.exit else str(record.stall) if record.stall else ""
    whose = record.exit or record.stall
    if whose and whose.slot is not None and view.plan is not None and team is not None:
        note = f"team {view.plan.team_of(rank + whose.slot)}: {note}"
    trains_on = view.plan is not None and view.plan.grows and meanwhile(record.work, record.phase)
    if record.suspects:
        note = "; ".join(filter(None, (note, "receives no heartbeats from " + ", ".join(record.suspects))))
    fresh = record.phase == LOADING  # a process that takes a place: how old its beat is says nothing
    formed = record.phase == MEETING and record.work is Work.TRAINING  # its record was written in just that moment
    return Row(
        node=node,
        member=member,
        state="no worker" if record.work is Work.NONE else "training" if trains_on else str(record.work),
        leader=leader,
        rank=rank,
        slots=slots,
        team=team,
        teams=slots // view.plan.team if view.plan and team is not None else 0,
        step=record.step,
        milestone=str(record.milestone) if record.milestone else "",
        milestone_s=age(record.milestone.read, now) if record.milestone else None,
        phase="" if formed else record.phase,
        beat_s=None if fresh else age(record.beat_at, now),
        taken_s=taken_s,
        taken=record.taken,
        note=note,
    )


def missing_row(missing: Missing, quarantines: Mapping[str, Quarantine], now: float) -> Row:
    """The line of a node that has gone without a word."""
    member = missing.member
    kept_out = quarantines.get(member.node)
    why = kept_out.reason if kept_out and kept_out.member == member else "its lease expired"
    return Row(node=member.node, member=str(member), state="gone", beat_s=age(missing.at, now), note=why)


def drained(plan: Plan | None, drains: Mapping[str, Member]) -> list[Member]:
    """Without whom the plan goes on because an operator wanted that."""
    left = names(plan.causes, Why.LEFT) if plan is not None and plan.phase is not Phase.STOP else frozenset()
    return [member for _, member in sorted(drains.items()) if member in left]


def drained_row(member: Member) -> Row:
    """Its line, until there is another plan."""
    note = "drained by an operator; comes back when elasticrl is started there"
    return Row(node=member.node, member=str(member), state="drained", note=note)


def here_of(rows: Sequence[Row]) -> set[str]:
    """The nodes that are there."""
    return {row.node for row in rows if row.state not in AWAY_STATES}


def not_back(drains: Mapping[str, Member], known: Sequence[Record | Quarantine | Missing]) -> dict[str, Member]:
    """Who was drained, and has not been there again since: what is asked for outlives the node's return."""
    newest: dict[str, int] = {}
    for each in known:
        newest[each.member.node] = max(each.member.incarnation, newest.get(each.member.node, 0))
    return {node: member for node, member in drains.items() if newest.get(node, 0) <= member.incarnation}


def answer(plan: Plan | None, past: Past | None) -> Verdict | None:
    """The verdict that the plan answers, or the corrected one of its incident: who was taken for dead may live. A plan by which
    a gang goes on after a hold has no verdict: then it is that of the hold.
    """
    verdict, last = plan.verdict if plan else None, past.last if past else None
    if plan is None or last is None or plan.phase is Phase.STOP:
        return verdict
    if verdict is None:
        on_gloo = plan.backend != "" and last.verdict.fault == Fault.FABRIC  # for as long as it is
        return last.verdict if last.lasts or on_gloo or last.generation == plan.generation else None
    more = verdict.fault == last.verdict.fault and set(verdict.nodes) < set(
        last.verdict.nodes
    )  # of several plans' faults
    known_better = more or (verdict.fault == Fault.DEAD_NODE and last.verdict.fault == Fault.NETWORK)
    return last.verdict if known_better and last.generation == plan.generation else verdict


def answered(past: Past, plan: Plan | None) -> Past:
    """With the fault that the plan answers, though its incident is not written yet."""
    if plan is None or plan.verdict is None or (past.last and past.last.generation >= plan.generation):
        return past
    before = plan.generation - 1
    return past.after(Broken.of(plan.verdict, at=0.0, generation=plan.generation, broke=before, lasts=True))


def gone(names: Sequence[str], seated: int, needs: int, *, training: bool) -> Iterator[str]:
    """What to do about those who are missing."""
    if not names:
        return
    holds = ". If another node goes first, the job has to wait" if training and seated == needs else ""
    subject, it, node = (
        (f"{names[0]} is", "it", names[0]) if len(names) == 1 else (f"{', '.join(names)} are", "one", "NODE")
    )
    yield f"{subject} gone: start elasticrl there again{holds}. If {it} will not come back: elasticrl drain {node}."


def barely(
    past: Past | None, drains: Mapping[str, Member], rows: Sequence[Row], needs: int, *, training: bool
) -> Iterator[str]:
    """That the job holds if one more goes, where it has had more. (Who configured just so many nodes knows it.)"""
    left = [node for node in sorted(drains) if node not in here_of(rows)]
    if not training or sum(row.state not in {"leaving", "quarantined", *AWAY_STATES} for row in rows) != needs:
        return
    if left:
        was, one = (f"{left[0]} was", "it") if len(left) == 1 else (f"{', '.join(left)} were", "one of them")
        yield f"{was} drained. If another node goes, the job has to wait. Start elasticrl on {one} again, or on another node."
    elif past is not None and past.most > needs:
        few = f"The job has {count(needs, 'node')} left of {past.most}, and needs {needs}"
        yield f"{few}. If another node goes, the job has to wait. Start elasticrl on another node."


def rollout_row(rollout: Rollout) -> Row:
    """A rollout node's line."""
    weights = "no weights yet" if rollout.version is None else f"weights {rollout.version:,}"
    return Row(
        node=rollout.member.node,
        member=str(rollout.member),
        role="rollout",
        state=GENERATES if rollout.up else "no engine",
        note=f"engine at {rollout.address}, {weights}" if rollout.up else rollout.note,
    )


def awaited(rows: tuple[Row, ...], engines: int, *, training: bool) -> tuple[str, ...]:
    """What to do about rollout nodes that are missing."""
    up = sum(row.state == GENERATES for row in rows)
    if not training or up >= engines:
        return ()
    waits = "" if up else " Until there is one, training waits (rollout.wait)."
    return (
        f"{up} of {engines} rollout nodes have an engine: start elasticrl on the others, or see their notes.{waits}",
    )


def age(at: float, now: float) -> float | None:
    """Seconds since then; None if either is not known."""
    return round(max(0.0, now - at), 1) if at and now else None


def advice(
    rows: tuple[Row, ...],
    view: View,
    needs: int,
    drains: Mapping[str, Member],
    *,
    training: bool,
    again: bool = False,
) -> tuple[str, ...]:
    """What an operator should do, or nothing."""
    said = [
        f"{row.node} is out of the plan. See why: elasticrl events {row.node}. Let it back: elasticrl admit {row.node}."
        for row in rows
        if row.state == "quarantined"
    ]
    said += [
        f"{row.node} cannot get its workers ready ({row.note}). Their logs are on that node, under "
        "telemetry.log_dir. It keeps trying."
        for row in rows
        if row.state == "warming up" and row.note
    ]
    said += [
        f"The daemon of {row.node} died and was restarted; its workers kept running. The end of its log says why "
        "(journalctl -u elasticrl, or NODE.daemon.log of elasticrl run)."
        for row in rows
        if row.taken == "died" and row.taken_s is not None
    ]
    present = sum(row.state not in {"quarantined", *AWAY_STATES} for row in rows)
    over = has_ended(view.plan, again=again)
    if not (training or over) and present < needs:
        more = needs - present
        left = [node for node in sorted(drains) if node not in here_of(rows)]
        where = (
            f"on {some(left)} again ({'it was' if len(left) == 1 else 'they were'} drained), or elsewhere"
            if left
            else f"on {'it' if more == 1 else 'them'}"
        )
        said.append(f"{more} more {'node is' if more == 1 else 'nodes are'} needed: start elasticrl {where}.")
    if view.intent == "pause":
        since = max((row.step for row in rows), default=0) - view.committed
        kept = (
            f" {count(since, 'step')} since the commit {'is' if since == 1 else 'are'} in memory: elasticrl stop ends the job "
            "with a save."
            if since > 0
            else ""
        )
        said.append(f"The job is paused. Go on: elasticrl resume.{kept}")
    if view.leader is None and rows and not over:
        said.append("No node leads. If this lasts longer than a lease, check etcd: elasticrl doctor --config FILE.")
    if over and view.plan and view.plan.says(Why.ENDED_AT_ONCE):
        said.append(
            "Fix the script, or its arguments, and start it again. `elasticrl config check` reads it beforehand."
        )
    elif over and view.plan and by_policy(view.plan):
        said.append(
            "The job stopped at this fault because the policy says so. Fix the cause and start the job again: it resumes there."
        )
    elif over and view.plan and view.plan.exit_code == Outcome.CRASH_LOOP.value:
        said.append(
            "The job failed repeatedly without progress. Read the log of the rank named above, fix the cause, start again."
        )
    return tuple(said)
