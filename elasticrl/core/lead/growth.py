"""Rules for a gang that is whole: it is formed, grows, gives up who is slow, and hears where a vault has moved to."""

from collections.abc import Mapping
from dataclasses import replace

from elasticrl.base.words import count, some
from elasticrl.contract import versions
from elasticrl.contract.cause import Cause, Why, found, told
from elasticrl.contract.model import Phase, Record, Rung, View, Work, rounds
from elasticrl.contract.verdict import Fault, Known
from elasticrl.core.judge.judge import judge
from elasticrl.core.judge.policy import Act
from elasticrl.core.lead.quarantines import confinements
from elasticrl.core.lead.scene import Move, Scene
from elasticrl.core.lead.shards import forgone, patience
from elasticrl.core.node.follow import ALIVE


def form(scene: Scene) -> Move | None:
    """No gang yet, or a held one: begin as soon as enough nodes are there and no more are coming."""
    plan = scene.plan
    if plan is not None and plan.phase is not Phase.HOLD:
        return None
    if scene.grace:  # found by simulation: seats kept for those who might come back went to the dead
        return Move(
            wake_at=scene.grace_until,
            why="this leader is new; waiting for nodes with expired leases to come back",
        )
    if wait := ending(scene) or waking(scene):
        return wait
    seats = scene.arrange(scene.fates)
    need, most = scene.settings.membership.min_nodes, scene.settings.membership.max_nodes
    if len(seats) < need:
        return Move(why=f"{len(seats)} of the {need} required nodes are ready{_lacking(scene)}{unready(scene.records)}")
    back = bool(scene.gang) and {seat.member.node for seat in seats} >= set(scene.gang)
    if len(seats) < most and scene.now < scene.settled_at and (scene.coming or not back):
        return Move(wake_at=scene.settled_at, why=f"{len(seats)} nodes are ready; waiting for more")
    if plan is None:
        return Move(plan=scene.train(seats, _begins(scene.view), rung=Rung.START))
    if wait := patience(scene, seats):
        return wait
    held = {seat.member for seat in plan.seats}
    survivors = any(fate.seat and not fate.fresh for fate in scene.fates)
    rung = Rung.REFORM if survivors else Rung.RESTART
    came = tuple(seat.member for seat in seats if seat.member not in held)
    goes_on = Cause(why=Why.RESUMED if plan.says(Why.PAUSED) else Why.WENT_ON)
    joined = (Cause(why=Why.JOINED, who=came),) if came else ()
    return Move(plan=scene.train(seats, goes_on, *forgone(scene, seats), *joined, rung=rung, strike=plan.strike))


def _lacking(scene: Scene) -> str:
    """Why no more are ready than there are, as far as they differ from the job."""
    others = sum(record.warm and record.bits != scene.bits for record in scene.records.values())
    unlike = f"; {others} compute other bits than the job" if others and scene.settings.exact == "require" else ""
    strange = sum(record.warm and versions.wire(record) != scene.wire for record in scene.records.values())
    unlike += f"; {count(strange, 'node')} of another wire: elasticrl of another version" if strange else ""
    return unlike + ("; it trains on no fewer (membership.fixed)" if scene.settings.membership.fixed else "")


def _begins(view: View) -> Cause:
    """Why there is a plan now, where there was none."""
    if view.plan is None:
        return Cause(why=Why.BEGUN)
    return Cause(why=Why.BEGUN_AGAIN, step=view.committed, said=told(view.plan.causes[:1]))


def ending(scene: Scene) -> Move | None:
    """Under a HOLD that saves: all workers of the gang end, on nodes that stay too. A gang of them would break as they do.

    Found by simulation: a node came as the others saved, was enough, and the gang with it lost its workers a few seconds later.
    """
    plan, due = scene.plan, scene.lead.formation.planned_at + 2 * scene.settings.recovery.drain_s
    if plan is None or not plan.saves or scene.now >= due:
        return None
    records = (scene.record_of(seat) for seat in plan.seats)
    names = [
        str(record.member) for record in records if record and record.member in plan.seat_of and record.work in ALIVE
    ]
    return Move(wake_at=due, why=f"waiting for the last save of {some(names)}") if names else None


def waking(scene: Scene) -> Move | None:
    """Under HOLD: some whose workers have ended get new ones, for no longer than replacing workers may take."""
    until = scene.lead.formation.planned_at + scene.settings.recovery.replace_s
    if scene.plan is None or scene.now >= until:
        return None
    names = [
        str(record.member)
        for fate, seat in zip(scene.fates, scene.plan.seats, strict=True)
        if fate.fresh
        and not fate.seat
        and (record := scene.record_of(seat))
        and record.work is Work.NONE
        and not record.problem
    ]
    return Move(wake_at=until, why=f"waiting for new workers of {', '.join(names[:3])}") if names else None


def unready(records: Mapping[str, Record]) -> str:
    """Who cannot get ready, and why: of many that say the same, one speaks."""
    alike: dict[str, list[str]] = {}
    for node, record in sorted(records.items()):
        if record.problem and not record.warm:
            alike.setdefault(record.problem, []).append(node)
    first = min(alike.items(), key=lambda item: (-len(item[1]), item[1]), default=None)
    if first is None:
        return ""
    others = sum(map(len, alike.values())) - 1
    return f"; {first[1][0]}{f' and {others} more' if others else ''} cannot get ready: {first[0]}"


def grow(scene: Scene) -> Move | None:
    """More nodes are ready than seated, and seating them makes steps shorter."""
    plan = scene.plan
    if plan is None or plan.phase is not Phase.TRAIN or not scene.candidates:
        return None
    seats = scene.arrange(scene.fates)
    came = len(seats) - len(plan.seats)
    lanes, team = scene.settings.lanes, scene.settings.team
    before, after = plan.world // team, sum(seat.slots for seat in seats) // team
    if came <= 0:
        return None
    if scene.settings.membership.grow == "useful" and rounds(lanes, after) >= rounds(lanes, before):
        return None
    if scene.coming and scene.now < scene.settled_at:  # (the gang has formed: else `late` would have had the word)
        return Move(wake_at=scene.settled_at, why=f"{came} more nodes are ready; waiting for more")
    if not scene.settings.means.in_place:
        due = scene.lead.formation.planned_at + scene.settings.membership.grow_every_s
        if scene.now < due:  # each growth is a restart of all
            return Move(wake_at=due, why=f"{plan.reason}; {count(came, 'more node')} ready, added at the next restart")
    new = tuple(seat.member for seat in seats if seat.member not in plan.seat_of)
    return Move(plan=scene.train(seats, Cause(why=Why.JOINED, who=new), rung=Rung.START, strike=plan.strike))


def ease(scene: Scene) -> Move | None:
    """A rank is slow, and the operator wants more than to hear of it: a spare node takes its node's place, or it is kept out.

    Each node is given up for it once in a leader's life: else two slow ones would take turns.
    """
    plan, slow = scene.plan, scene.lead.paces.slow[:1]
    act = scene.settings.policy.get(Fault.STRAGGLER, Act.REPORT)
    if plan is None or not slow or not scene.trained or act not in {Act.REPLACE, Act.QUARANTINE}:
        return None
    seat = next(seat for seat in plan.seats if seat.member.node == slow[0].node)
    if seat.member.node in scene.lead.paces.eased:
        return None
    verdict = judge(slow, Known(world=plan.world, nodes=plan.node_of))
    confine = confinements(scene, {seat.member: found(verdict)}) if act == Act.QUARANTINE else ()
    if not confine and all(record.member.node in scene.lead.paces.eased for record in scene.candidates):
        return None
    fates = tuple(replace(f, seat=None) if s is seat else f for f, s in zip(scene.fates, plan.seats, strict=True))
    seats = scene.arrange(fates, grow=False, without=scene.lead.paces.eased)
    eased = scene.train(seats, found(verdict), rung=Rung.REFORM, strike=plan.strike)
    return Move(plan=eased, confine=confine, verdict=verdict)


def moved(scene: Scene) -> Move | None:
    """A vault answers elsewhere than the plan says: copies would wait for it for ever, so all hear where it is now.

    A gang that still forms hears it too, and goes on as it was to. Found live: it looked for shards at the old port until its
    rung's deadline, and all were probed and started afresh.
    """
    plan = scene.plan
    if plan is None or plan.phase is not Phase.TRAIN or not scene.settings.means.in_place:
        return None
    of = zip(plan.seats, scene.ranked, strict=True)
    gone = tuple(s.member for s, r in of if r and r.vault != s.vault and scene.vault_of(s) != s.vault)
    cause = Cause(why=Why.VAULT_MOVED, who=gone)
    newcomers = {seat.member for seat in plan.seats if seat.born == plan.generation}
    if newcomers.issuperset(gone) and (scene.still_trains or scene.on_their_way.issuperset(gone)):
        return None  # nobody; or those without whom the gang trains: once it has grown, all hear it
    if scene.trained or plan.grows:
        return Move(plan=scene.train(scene.staying, cause, rung=Rung.REFORM, strike=plan.strike))
    again = scene.write(Phase.TRAIN, plan.seats, cause, rung=plan.rung, strike=plan.strike, saves=plan.saves)
    return Move(plan=again)
