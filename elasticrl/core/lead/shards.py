"""What is lost with whom: who keeps which shards, and for whom it is worth holding before the job goes back to an older step.

The one idea: each node of a gang keeps its own shard and those of the `copies` nodes before it. When so many are put out at
once that some shard is with them alone, what was made since the newest commit hangs on their coming back: for a lease they may.
"""

from collections.abc import Collection, Sequence

from elasticrl.base.words import some
from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.model import Phase, Rung, Seat, Strike
from elasticrl.contract.ring import keepers
from elasticrl.core.lead.scene import Move, Scene


def lost(
    gang: Sequence[str], here: Collection[str], copies: int, now: Sequence[str] = ()
) -> tuple[frozenset[str], ...]:
    """For each shard that nobody here keeps, those who do. `now`: who has formed a gang since, in rank order; each of them has
    given copies of its own to those behind it there.

    >>> lost(("n0", "n1", "n2", "n3"), {"n0", "n1"}, 1) == (frozenset({"n2", "n3"}),)
    True
    >>> after = ("n0", "n3", "n2")  # n1, whose shard n0 keeps, was lost; n2's, which n1 kept, has been given to n0
    >>> gang = ("n1", "n0", "n3", "n2")
    >>> lost(gang, {"n3", "n2"}, 1, after) == (frozenset({"n0", "n1"}),), lost(gang, {"n0", "n3"}, 1, after)
    (True, ())
    """
    here = set(here)
    missing = [node for node in gang if node not in here]
    before, since = keepers(gang, copies, missing), keepers(now, copies, missing)
    spans = (frozenset((*before[node], *since.get(node, ()))) for node in missing)
    return tuple(span for span in spans if not span & here)


def _lost(scene: Scene, here: Collection[str]) -> tuple[frozenset[str], ...]:
    return lost(scene.gang, here, scene.settings.copies, scene.seated if scene.trained or scene.settled else ())


def awaited(scene: Scene, seats: tuple[Seat, ...], but: Collection[str] = ()) -> tuple[str, ...]:
    """Nodes without which these seats cannot go on from the newest step, and which may come back."""
    here = {seat.member.node for seat in seats}
    missing = _lost(scene, here)
    if not missing or not scene.behind:
        return ()
    out = {*here, *scene.held, *but}
    away = {node for node in scene.gang if node not in out and _may_return(scene, node)}
    if any(not span & away for span in missing):
        return ()  # a shard is gone for good: no waiting brings the step back
    return tuple(sorted(away.intersection(frozenset[str]().union(*missing))))


def _may_return(scene: Scene, node: str) -> bool:
    """Its lease stands; or the store has lost all leases, and says nothing of who is alive for as long as one would last.

    Found in the lab, and by the scenario a-daemon-is-away-as-the-store-loses-all-and-nobody-else-has-its-shard.
    """
    record = scene.records.get(node)
    if record is None:
        return scene.leases_lost
    return not record.leaving


def wait_for(
    scene: Scene, seats: tuple[Seat, ...], causes: tuple[Cause, ...], rung: Rung, strike: Strike | None,
    but: Collection[str] = (),
) -> Move | None:  # fmt: skip
    """Hold, in place of going back to an older step with these seats, for those who were just put out.

    Once for each commit: nodes that come and go would else hold the job for ever.
    """
    plan, committed = scene.plan, scene.view.committed
    if plan is None or plan.waited >= committed or rung is Rung.RELOAD or scene.distrusted:
        return None
    names = awaited(scene, seats, but)
    if not names:
        return None
    # Whose worker is gone is no less waited for, but needs a fresh one: it takes a seat again when it has one.
    kept = tuple(
        f.seat or seat for f, seat in zip(scene.fates, plan.seats, strict=True) if f.seat or _cut_off(scene, seat)
    )
    ttl_s = scene.settings.membership.lease_ttl_s
    sole = Cause(why=Why.SOLE_KEEPERS, nodes=names, step=committed, seconds=ttl_s)
    return Move(plan=scene.write(Phase.HOLD, kept, *causes, sole, rung=rung, strike=strike, waited=committed))


def _cut_off(scene: Scene, seat: Seat) -> bool:
    record = scene.record_of(seat)
    return seat.member.node in scene.conviction.guilty and record is not None and record.member == seat.member


def patience(scene: Scene, seats: tuple[Seat, ...]) -> Move | None:
    """Under HOLD: is it worth waiting for more than these seats?"""
    plan, until = scene.plan, scene.lead.formation.planned_at + scene.settings.membership.lease_ttl_s
    if plan is None or scene.now >= until:
        return None
    if not scene.distrusted and (names := awaited(scene, seats)):
        why = f"holding for {some(names)}, who alone had what was made since step {scene.view.committed}"
        return Move(wake_at=until, why=why)
    out = any(node in scene.apart for node in scene.seated)
    # What a save from before the hold commits meanwhile brings nobody back: `resume` is what was committed as the hold began.
    if plan.waited == plan.resume and (scene.conviction.unsure or out):
        return Move(wake_at=until, why="holding until the separated nodes reach each other again")
    return None


def forgone(scene: Scene, seats: tuple[Seat, ...]) -> tuple[Cause, ...]:
    """What these seats cannot go on from; empty if nothing is lost."""
    missing = _lost(scene, {seat.member.node for seat in seats})
    if not missing or not scene.behind:
        return ()
    names = sorted(frozenset[str]().union(*missing))
    return (Cause(why=Why.FORGONE, nodes=tuple(names), step=scene.view.committed),)
