"""Rules for seats that are lost: who goes on without them, in which processes, and who is kept out.

The one idea: `losses` answers what has happened to the gang; `late`, that nothing has happened by its rung's deadline.
"""

from collections.abc import Collection
from dataclasses import replace

from elasticrl.contract.cause import Cause, Why, found
from elasticrl.contract.evidence import Evidence, Kind, Sign
from elasticrl.contract.model import JOIN, LOADING, Exit, Member, Outcome, Phase, Rung, Seat, Work
from elasticrl.contract.verdict import Fault, Known, Verdict
from elasticrl.core.judge.judge import judge
from elasticrl.core.judge.policy import Act
from elasticrl.core.lead.findings import known
from elasticrl.core.lead.quarantines import capped, confinements, cut_off
from elasticrl.core.lead.scene import BACK_TTLS, Move, Scene
from elasticrl.core.lead.shards import wait_for
from elasticrl.core.lead.stalls import said
from elasticrl.core.lead.strikes import explained, hopeless, strike_of, strike_or, worst
from elasticrl.core.node.rows import Fate

PASSED_BY = 3  # so many steps a gang makes at most between the coming of those whom it waits for and its parting


def losses(scene: Scene) -> Move | None:
    """Seats whose node or worker is gone, or must not go on."""
    plan = scene.plan
    if plan is None or plan.phase is not Phase.TRAIN:
        return None
    condemned = _condemned(scene)
    if not condemned and not scene.amiss:
        return None
    if spared := _leaves_too_few(scene):
        return spared
    before = strike = None if scene.lasted else plan.strike
    failed = [record for record in scene.doing[Work.FAILED] if record.member not in scene.on_their_way]
    own = next((record.exit for record in failed if record.exit and record.exit.own), None)
    ended = own or _unblamed(scene)
    if ended:
        # A worker that fails as it starts has no step: what counts is how far the job had got.
        cause, step = Cause(why=Why.FAILED, said=ended.cause, raised=ended.raised), max(ended.step, scene.newest)
        strike = strike_of(strike, cause, step, own=ended.own, unblamed=not ended.own)
        due, limit = _known_by(scene), scene.settings.recovery.no_progress_limit
        if not own and worst(strike) >= limit and scene.now < due:
            return Move(
                wake_at=due, why="every worker that ended reports a lost peer; waiting to learn which one was lost"
            )
    elif _blamed(scene):
        strike = explained(strike)
    sick = {seat.member: _sick(scene, fate, seat) for fate, seat in zip(scene.fates, plan.seats, strict=True)}
    unwanted = {member: cause for member, cause in sick.items() if cause} | condemned
    confine = confinements(scene, unwanted)
    confined = {quarantine.member for quarantine in confine}
    if not own and confined.intersection(record.member for record in failed):
        strike = before  # the others try it once without the one that may have caused it
    stays = [(f, s) for f, s in zip(scene.fates, plan.seats, strict=True) if s.member not in scene.left_behind]
    fates = tuple(replace(f, seat=None) if f.seat and s.member in confined else f for f, s in stays)
    survivors = sum(bool(fate.seat and not fate.fresh) for fate in fates)
    rung = Rung.RESTART if not survivors else Rung.REPLACE if any(f.seat and f.fresh for f in fates) else Rung.REFORM
    if own and (stop := _at_once(scene)):
        return stop
    if own and strike and strike.count - strike.unblamed > 1:
        rung = Rung.RELOAD  # the state itself may be what fails: go back to what is on disk
    causes, verdict = _why_lost(scene, condemned)
    causes += capped(scene, unwanted, confine)
    lost = {s.member for f, s in zip(scene.fates, plan.seats, strict=True) if f.seat is None or f.fresh}
    if not scene.on_their_way.issuperset(lost) and (stop := hopeless(scene)):
        return stop
    seats = scene.arrange(fates, grow=False)
    guilty = scene.conviction.guilty
    cuts = {
        s.member: tuple((s.member.node, a) for a in guilty[s.member.node])
        for s in plan.seats
        if s.member.node in guilty
    }
    unfit = {member.node for member in confined if member.node not in scene.conviction.guilty}
    if wait := wait_for(scene, seats, causes, rung, strike, but=unfit):
        return replace(wait, confine=cut_off(scene, (), cuts), verdict=verdict)
    move = strike_or(scene, strike, lambda: scene.train(seats, *causes, rung=rung, strike=strike))
    return replace(move, confine=cut_off(scene, confine, cuts), verdict=verdict)


def _unblamed(scene: Scene) -> Exit | None:
    """How a worker ended that says that a peer is gone, where all that is lost ended so, and nobody is known to have gone.

    Found by reading: a program that was refused by a server of its own was started again for ever.
    """
    lost = [fate for fate in scene.fates if fate.seat is None or fate.fresh]
    failed = [record for record in scene.doing[Work.FAILED] if record.member not in scene.on_their_way]
    there = [record for record in scene.ranked if record]
    if not failed or any(fate.cause is None or fate.cause.why is not Why.FAILED for fate in lost):
        return None
    if any(record.suspects or (record.stall and not record.stall.waiting) for record in there):
        return None
    return failed[0].exit if all(map(scene.suffered, failed)) else None


def _blamed(scene: Scene) -> bool:
    """Is somebody known to have gone, so that its peers' ends were its doing?"""
    gone = any(fate.cause and fate.cause.why in {Why.SILENT, Why.EXPIRED, Why.REBORN} for fate in scene.fates)
    return gone or not all(map(scene.suffered, scene.doing[Work.FAILED]))


def _known_by(scene: Scene) -> float:
    """When it would be known of somebody that it has gone: its lease has run out by then."""
    settings = scene.settings
    since = scene.now if scene.lead.ends.failed_at is None else scene.lead.ends.failed_at
    return since + max(settings.membership.lease_ttl_s, settings.timeouts.confirm_s)


AT_ONCE_S = (
    15.0  # a script that fails within this time of its first start has a mistake in its arguments or its imports
)


def _at_once(scene: Scene) -> Move | None:
    """A script has failed as it was started for the first time in this run. It would fail again: the job ends, and says why."""
    plan, now = scene.plan, scene.now
    assert plan is not None
    first = plan.says(Why.BEGUN, Why.BEGUN_AGAIN)
    lasted_s = now - scene.lead.formation.planned_at
    if scene.settings.means.joins or not first or lasted_s > AT_ONCE_S or scene.progressed:
        return None
    failed = min(
        (record for record in scene.doing[Work.FAILED] if record.exit and record.exit.own and not record.exit.signal),
        key=lambda record: record.member,
        default=None,
    )
    if failed is None or failed.exit is None:
        return None
    cause = Cause(why=Why.ENDED_AT_ONCE, who=(failed.member,), seconds=lasted_s, said=failed.exit.cause)
    _, verdict = _why_lost(scene, ())
    stop = scene.write(Phase.STOP, plan.seats, cause, strike=plan.strike, exit_code=Outcome.CRASH_LOOP.value)
    return Move(plan=stop, verdict=verdict)


def _condemned(scene: Scene) -> dict[Member, Cause]:
    """Seated members whose node the verdict proves unfit, and that policy and caps let us keep out."""
    finding, plan = scene.lead.dossier.finding, scene.plan
    if finding is None or plan is None or finding.answer.act is not Act.QUARANTINE:
        return {}
    if not finding.condemns:
        return {}
    members = {seat.member: found(finding.verdict) for seat in plan.seats if seat.member.node in finding.verdict.nodes}
    return {quarantine.member: quarantine.cause for quarantine in confinements(scene, members)}


def _why_lost(scene: Scene, condemned: Collection[Member]) -> tuple[tuple[Cause, ...], Verdict | None]:
    """Each loss: by the verdict where it is the one that it speaks of, and what it names beside them."""
    plan, finding = scene.plan, scene.lead.dossier.finding
    assert plan is not None
    verdict = finding.verdict if finding is not None else None
    sure = known(verdict)
    causes, told = list[Cause](), False
    for fate, seat in zip(scene.fates, plan.seats, strict=True):
        named = bool(sure) and verdict is not None and seat.member.node in verdict.nodes
        if verdict is not None and named and not told and (fate.fresh or seat.member in condemned):
            cause = replace(found(verdict), who=(seat.member,), said=verdict.cause)
            if (own := fate.cause) is not None and own.why is Why.FAILED:
                cause = replace(cause, signal=own.signal, count=own.count, of=own.of)
            causes.append(cause)
            told = True
        elif fate.cause:
            told = told or (named and verdict is not None and verdict.fault is Fault.DEAD_NODE)
            causes.append(fate.cause)
    return (*causes, *(() if told else sure)), verdict


def _leaves_too_few(scene: Scene) -> Move | None:
    """When a leaving node cannot be spared, the gang holds, saves, and only then lets it go.

    A gang that is only forming has nothing in hand to save: it may form first. Found on three nodes that were stopped at one
    stroke: the first could be spared, the others held in the middle of the reform, and left a minute later without a save.
    """
    if (unspared := stranding(scene)) is None:
        return None
    assert scene.plan is not None
    forms = scene.behind and not scene.trained and not scene.still_trains  # one that is to grow trains on, and can save
    if forms and scene.now < scene.deadline and not any(f.fresh for f in scene.fates):
        return Move(wake_at=scene.deadline, why=f"{unspared}; forming first, to save")
    return Move(plan=scene.write(Phase.HOLD, scene.plan.seats, unspared, strike=scene.plan.strike, saves=True))


def stranding(scene: Scene) -> Cause | None:
    """Nodes leave that the others cannot spare, and nothing else is wrong."""
    leaving = [fate.cause.who[0] for fate in scene.fates if fate.cause and fate.leaving]
    if not leaving or any(fate.seat is None and not fate.leaving for fate in scene.fates):
        return None
    if len(scene.arrange(scene.fates, grow=False)) >= scene.settings.membership.min_nodes:
        return None
    return Cause(why=Why.UNSPARED, who=tuple(leaving))


def _sick(scene: Scene, fate: Fate, seat: Seat) -> Cause | None:
    """Why this seat's node, which is up, should be kept out for a while; None if it should not."""
    if (record := scene.record_of(seat)) is None:
        return None
    if seat.member.node in scene.conviction.guilty:
        return fate.cause
    failures = scene.lead.custody.failures.get(seat.member.node)
    counts = fate.fresh and scene.blames_its_node(record)
    if counts and failures and failures.count >= scene.settings.health.node_strikes:
        return Cause(why=Why.FAILED_AGAIN, who=(seat.member,), count=failures.count, step=failures.step)
    return None


def _broken_up(scene: Scene) -> Move | None:
    """Who has left a gang before it had formed does not come back to it: the others would wait for nothing.

    Once, it forms again as it is: something was missed by a moment. A gang that breaks up twice at once is probed. Found live:
    a vault that was away for the 0.3 s in which a gang formed cost 25 s. After a hold nothing has broken up before.
    """
    plan, lead = scene.plan, scene.lead
    assert plan is not None
    if said(scene):
        return None  # one has said why it left, and it will not form
    due = (scene.now if lead.stalls.since is None else lead.stalls.since) + scene.settings.timeouts.confirm_s
    if scene.now < due:
        return Move(
            wake_at=due, why="workers left before their group had formed; waiting to learn which one is at fault"
        )
    if lead.formation.formed < plan.generation - 1 and not plan.says(Why.WENT_ON, Why.RESUMED):
        again = Cause(why=Why.BROKE_FORMING, count=2)
        return Move(plan=scene.write(Phase.PROBE, scene.kept, again, strike=plan.strike))
    rung = max(plan.rung, Rung.REFORM) if plan.grows else plan.rung
    once = Cause(why=Why.BROKE_FORMING, count=1)
    return Move(plan=scene.train(scene.kept, once, rung=rung, strike=plan.strike))


def _silent(scene: Scene) -> tuple[Seat, ...]:
    """Seats whose node has not heard of the plan, as far as is known."""
    plan = scene.plan
    seats = plan.seats if plan else ()
    return tuple(s for s in seats if not ((r := scene.record_of(s)) and r.generation >= scene.view.generation))


def _ungrown(scene: Scene) -> Move | None:
    """What becomes of a gang that trains on while newcomers load, and *parts* (leaves its group, to form the larger one) later.

    If it stalls, it parts at once, and goes on with who is there. Who does not come in time is kept out for a while. When all
    are there it parts at its next state that is kept, however far that is. Once it has parted this says nothing: `late` does.
    """
    plan = scene.plan
    assert plan is not None
    lead, left = scene.lead, scene.left_behind
    stalled = scene.stalled_before_it_grew
    if (stalled or scene.broken_before_it_grew) and lead.stalls.since is not None:
        due = max(lead.stalls.since, scene.patient_until) + scene.settings.timeouts.confirm_s
        if scene.now < due:
            return Move(wake_at=due, why="workers are stalled; waiting to learn which one is at fault")
        first = next(iter(stalled), None)
        cause = Cause(why=Why.BROKE_GROWING)
        if first is not None:
            cause = Cause(why=Why.STALLED_GROWING, who=(first.member,), said=str(first.stall))
        return Move(plan=scene.train(scene.staying, cause, rung=Rung.REFORM, strike=plan.strike))
    if scene.now < scene.deadline:
        return Move(wake_at=scene.deadline, why=plan.reason)
    if overdue := frozenset(seat.member for seat in _silent(scene)) or left:
        cause = Cause(why=Why.UNJOINED, who=tuple(sorted(overdue)), setting="recovery.start")
        unwanted = dict.fromkeys(overdue, cause)
        confine = confinements(scene, unwanted)
        seats = tuple(seat for seat in scene.staying if seat.member not in overdue)
        causes = (cause, *capped(scene, unwanted, confine))
        return Move(plan=scene.train(seats, *causes, rung=Rung.REFORM, strike=plan.strike), confine=confine)
    if not scene.still_trains:
        return None
    if lead.formation.there is None or scene.newest < lead.formation.there + PASSED_BY:
        return Move(why=plan.reason)
    return Move(plan=scene.train(scene.kept, Cause(why=Why.UNPARTED), rung=Rung.REFORM, strike=plan.strike))


def _unjoined(scene: Scene) -> Move | None:
    """No program has asked for its rank: that is the program's own doing, and a probe would find nothing. Found by a new user,
    whose program never called `join()`: it was started anew for ever, each time for another deadline, which no strike counted.
    """
    plan = scene.plan
    assert plan is not None
    loading = [record for record in scene.doing[Work.JOINING] if record.phase == LOADING]
    if len(loading) < len(plan.seats):
        return None
    what = f"the program had not called {JOIN} within recovery.start"
    fact = Evidence(
        kind=Kind.BEAT, sign=Sign.UNJOINED, ranks=tuple(range(plan.world)), detail=what, source="beats",
        generation=plan.generation,
    )  # fmt: skip
    verdict = judge((fact,), Known(world=plan.world, nodes=plan.node_of))
    strike = strike_of(plan.strike, Cause(why=Why.UNCALLED), scene.newest, own=True)
    rung = Rung.RESTART if strike.count == 1 else Rung.RELOAD
    move = strike_or(scene, strike, lambda: scene.train(scene.kept, found(verdict), rung=rung, strike=strike))
    return replace(move, verdict=verdict)


def late(scene: Scene) -> Move | None:
    """What follows a rung whose deadline has passed: after reform replace; later, who is missing is left out, or a probe."""
    plan = scene.plan
    if plan is None or plan.phase is not Phase.TRAIN or scene.trained:
        return None
    parked = scene.doing[Work.PARKED]
    if any(record.member not in scene.on_their_way for record in parked):
        return _broken_up(scene)
    if not scene.grown and (move := _ungrown(scene)):
        return move
    if scene.now < scene.deadline:
        return Move(wake_at=scene.deadline)
    silent = _silent(scene)
    # A group forms with all, or not at all: where somebody trains, all have joined, and the others' news is late. (A script of
    # which no `join()` tells trains from its first line.) Found by simulation: a store that lost half of all requests cost a
    # node that trained its seat.
    told_by = scene.deadline + BACK_TTLS * scene.settings.membership.lease_ttl_s
    if scene.settings.means.joins and scene.doing[Work.TRAINING] and scene.now < told_by:
        return Move(wake_at=told_by, why="workers train; waiting for the news of all")
    setting = f"recovery.{plan.rung.name.lower()}"
    if not silent and (move := _unjoined(scene)):
        return move
    if not silent:
        unformed = Cause(why=Why.UNFORMED, setting=setting)
        return Move(plan=scene.write(Phase.PROBE, scene.kept, unformed, strike=plan.strike))
    cause = Cause(why=Why.UNJOINED, who=tuple(seat.member for seat in silent), setting=setting)
    if plan.rung is Rung.REFORM:
        born = scene.view.generation + 1
        seats = tuple(replace(s, born=born) if s in silent else s for s in scene.kept)
        return Move(plan=scene.train(seats, cause, rung=Rung.REPLACE, strike=plan.strike))
    unwanted = dict.fromkeys(cause.who, cause)
    confine = confinements(scene, unwanted)
    causes = (cause, *capped(scene, unwanted, confine))
    fates = tuple(replace(f, seat=None) if s in silent else f for f, s in zip(scene.fates, plan.seats, strict=True))
    rung = max(plan.rung, Rung.REFORM)
    seats = scene.arrange(fates, grow=False)
    return Move(plan=scene.train(seats, *causes, rung=rung, strike=plan.strike), confine=confine)
