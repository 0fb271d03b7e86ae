"""Rules of the probe: when the nodes test each other, what their answers mean, and who goes on.

The one idea: those who can reach each other go on; what is wrong with the ways between them is judged with all else that is
known.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from elasticrl.base.pauses import doubled
from elasticrl.contract.cause import Cause, Why, found
from elasticrl.contract.evidence import Evidence, Sign
from elasticrl.contract.model import Phase, Plan, Quarantine, Rung
from elasticrl.contract.pairs import Result, confirm, findings, turns
from elasticrl.contract.partition import Pair
from elasticrl.contract.verdict import Fault, Known, Verdict
from elasticrl.core.judge.judge import judge
from elasticrl.core.judge.policy import Act, Answer, proven
from elasticrl.core.lead.fallback import cost
from elasticrl.core.lead.findings import answer_to, departed, known
from elasticrl.core.lead.quarantines import capped, confinements, cut_off
from elasticrl.core.lead.scene import Move, Scene
from elasticrl.core.lead.shards import wait_for
from elasticrl.core.lead.strikes import hopeless_by, strike_of, strike_or
from elasticrl.core.node import dossier
from elasticrl.core.node.state import Lead
from elasticrl.core.node.suspect import probe_links, split

TOLD = 64  # ways of a probe that are kept among the facts


def unsure(scene: Scene) -> Move | None:
    """The neighbours accuse each other across a cut: only a probe can tell who is where."""
    if scene.plan is None or scene.plan.phase is not Phase.TRAIN or not scene.conviction.unsure:
        return None
    return Move(plan=scene.write(Phase.PROBE, scene.kept, Cause(why=Why.CUT), strike=scene.plan.strike))


def recheck(scene: Scene) -> Move | None:
    """A gang on gloo in place of NCCL is probed now and then, each time after twice as long."""
    plan, health = scene.plan, scene.settings.health
    if plan is None or plan.phase is not Phase.TRAIN or not plan.backend or not scene.trained:
        return None
    wait_s = doubled(health.quarantine_s, max(0, plan.fallbacks - 1), health.quarantine_max_s)
    due = scene.lead.probes.backend_since + wait_s
    if scene.now < due:
        return Move(wake_at=due)
    return Move(plan=scene.write(Phase.PROBE, scene.kept, Cause(why=Why.RECHECKED), strike=plan.strike))


def probing(scene: Scene) -> Move | None:
    """Under PROBE: wait for the answers, then go on with those who can reach each other."""
    plan = scene.plan
    if plan is None or plan.phase is not Phase.PROBE:
        return None
    seats = tuple(fate.seat for fate in scene.fates if fate.seat)
    asked = [*filter(None, map(scene.record_of, seats)), *scene.spares]
    asked = [record for record in asked if record.answered == plan.generation]
    answers = {record.member.node: record.unreachable for record in asked if record.unreachable is not None}
    due = scene.lead.formation.planned_at + scene.settings.recovery.probe_s
    if len(answers) < len(seats) + len(scene.spares) and scene.now < due:
        return Move(wake_at=due, why="waiting for the nodes to test each other")
    # Who cannot be reached at all is known at once; what is wrong with the way to the others takes longer to find out.
    if not any(answers.values()) and any(record.probing for record in asked) and scene.now < due:
        return Move(wake_at=due, why="waiting for the results of the nodes' connection tests")
    ways = findings((*scene.lead.probes.earlier, *scene.lead.probes.results))
    broken = {node: set(found) for node, found in answers.items()}
    for fact in ways:
        if fact.sign in {Sign.UNREACHABLE, Sign.ONE_WAY} and fact.node in broken:
            broken[fact.node].add(str(fact.peer))
    order = dict.fromkeys((*(seat.member.node for seat in seats), *answers))
    kept = set(split(order, broken, (*probe_links(plan), *plan.pairs)))
    out = tuple(seat for seat in seats if seat.member.node not in kept)
    fates = tuple(
        fate if fate.seat and fate.seat.member.node in kept else replace(fate, seat=None) for fate in scene.fates
    )
    verdict, done = _probed(scene, (*_between(ways, order), *departed(scene)))
    lost = tuple(fate.cause for fate in scene.fates if fate.seat is None and fate.cause)  # during the probe
    # Whose seat is lost meanwhile may alone have a shard: that comes before any further probe.
    if not any(answers.values()) and (again := _confirming(scene, order)):
        wait = wait_for(scene, seats, lost, Rung.REFORM, plan.strike) if lost else None
        return replace(wait or Move(plan=again), verdict=verdict)
    if out and len(seats) == len(plan.seats) and (again := _disagreeing(scene, answers)):
        return Move(plan=again, verdict=verdict)
    if out or len(seats) < len(plan.seats):
        unreached = Cause(why=Why.UNREACHED, who=tuple(seat.member for seat in out))
        causes = (unreached,) if out else lost
        # Found by simulation: a spare that nobody had reached took the place of one that was put out for that.
        astray = {spare.member.node for spare in plan.spares}.difference(kept)
        left = scene.arrange(fates, grow=False, without=astray)
        cuts = {seat.member: cut_ways(seat.member.node, broken, ways) for seat in out}
        if wait := wait_for(scene, left, causes, Rung.REFORM, plan.strike):
            return replace(wait, confine=cut_off(scene, (), cuts), verdict=verdict)
        unwanted = {member: replace(unreached, who=(member,)) for member in unreached.who}
        confine = confinements(scene, unwanted)
        causes += capped(scene, unwanted, confine)
        again = scene.train(left, *causes, rung=Rung.REFORM, strike=plan.strike)
        return Move(plan=again, confine=cut_off(scene, confine, cuts), verdict=verdict)
    if plan.backend:
        return _on_gloo(scene, verdict)
    if verdict is not None and done is not None and (move := _by_the_probe(scene, verdict, done, ways)):
        return move
    # Steps since the last stall speak for the vaults: found live, where a second stall went back to disk for nothing.
    strike = strike_of(plan.strike, next(iter(_unformed(plan)), Cause(why=Why.STALLED)), scene.newest)
    rung = Rung.RESTART if strike.count == 1 else Rung.RELOAD
    reached = Cause(why=Why.ALL_REACHED, said=done.milder if done is not None and done.capped else "")
    causes = (reached, *known(verdict), Cause(why=Why.AFRESH))
    move = strike_or(scene, strike, lambda: scene.train(seats, *causes, rung=rung, strike=strike))
    return replace(move, verdict=verdict)


def cut_ways(node: str, broken: Mapping[str, Collection[str]], ways: Iterable[Evidence]) -> tuple[Pair, ...]:
    """From whom to whom nothing arrives, of all ways to and from this node: one way where that was found, else both."""
    peers = {*broken.get(node, ()), *(other for other, found in broken.items() if node in found)} - {node}
    one_way = {(str(fact.node), str(fact.peer)) for fact in ways if fact.sign is Sign.ONE_WAY}
    pairs = (pair for peer in sorted(peers) for pair in ((node, peer), (peer, node)))
    return tuple(pair for pair in pairs if pair[::-1] not in one_way)


def _between(ways: tuple[Evidence, ...], nodes: Collection[str]) -> tuple[Evidence, ...]:
    """Of those who are there still: that there is no way to one that has died says nothing of the network. Found by a new user,
    who killed two of three nodes at once and was sent to look at the cable between them.
    """
    return tuple(fact for fact in ways if fact.node in nodes and fact.peer in nodes)


def _probed(scene: Scene, ways: tuple[Evidence, ...]) -> tuple[Verdict | None, Answer | None]:
    """What is known of the stall and of the ways between the nodes, together."""
    finding, plan = scene.lead.dossier.finding, scene.plan
    assert plan is not None
    facts = (*(finding.of if finding else ()), *ways)
    if not dossier.speaks(facts):
        return None, None
    verdict = judge(facts, Known(world=plan.world, nodes=plan.node_of))
    carries = bool(ways) and all(fact.sign in {Sign.HEALTHY, Sign.NCCL_BROKEN} for fact in ways)
    return verdict, answer_to(scene, scene.lead, verdict, gloo=carries)


def _on_gloo(scene: Scene, verdict: Verdict | None) -> Move:
    """Back to the gang's own backend only where that was tried, and worked everywhere; else on as before."""
    plan = scene.plan
    assert plan is not None
    tried = {result.node: result.nccl for result in scene.lead.probes.results if result.nccl is not None}
    broken = any(result.nccl not in {None, "ok"} for result in scene.lead.probes.results)
    if not broken and tried.keys() >= {seat.member.node for seat in scene.kept}:
        fresh = scene.train(scene.kept, Cause(why=Why.NCCL_WELL), rung=Rung.REFORM, strike=plan.strike)
        return Move(plan=replace(fresh, backend="", fallbacks=0, usual_s=0.0))
    causes = (Cause(why=Why.NCCL_ILL), *known(verdict))
    fresh = scene.train(scene.kept, *causes, rung=Rung.REFORM, strike=plan.strike)
    # A probe without an answer is repeated after the same time: the next might have found it in order.
    # It is no fault that this plan answers, but still the one by which the gang went on over gloo.
    return Move(plan=replace(fresh, fallbacks=plan.fallbacks + broken))


def _by_the_probe(scene: Scene, verdict: Verdict, done: Answer, ways: Iterable[Evidence]) -> Move | None:
    """All are in reach of each other, and yet a way, or NCCL, is not in order.

    Only what was found on the ways ends the job or puts a node out. Found live: packets that a device had dropped minutes
    before cost a node its seat, and 25 sealed steps with it, after a probe that found every way in order.
    """
    plan = scene.plan
    assert plan is not None
    seats = scene.kept
    if verdict.fault in {Fault.NETWORK, Fault.FABRIC} and (stop := hopeless_by(scene, verdict, done)):
        return stop
    if done.act is Act.FALLBACK:
        price = cost(scene)
        causes = (found(verdict), Cause(why=Why.ON_GLOO), *((Cause(why=Why.PRICE, said=str(price)),) if price else ()))
        fresh = scene.train(seats, *causes, rung=Rung.REFORM, strike=plan.strike)
        usual_s = price.usual_s if price else 0.0
        return Move(plan=replace(fresh, backend="gloo", fallbacks=plan.fallbacks + 1, usual_s=usual_s), verdict=verdict)
    if done.act is Act.QUARANTINE and verdict.fault is Fault.NETWORK:
        ill = {str(node) for way in ways if way.sign is not Sign.HEALTHY for node in (way.node, way.peer)}
        named = ill & {*verdict.nodes}
        if _confined(scene, verdict, named) and (again := _retesting(scene, verdict)):
            return Move(plan=again, verdict=verdict)
        confine = _confined(scene, verdict, named if proven(verdict) else named & _named_before(plan))
        put_out = {quarantine.member for quarantine in confine}
        if put_out:
            fates = tuple(replace(f, seat=None) if f.seat and f.seat.member in put_out else f for f in scene.fates)
            plan = scene.train(scene.arrange(fates, grow=False), found(verdict), rung=Rung.REFORM, strike=plan.strike)
            return Move(plan=plan, confine=confine, verdict=verdict)
    return None


def results_of(scene: Scene) -> tuple[Result, ...]:
    """What the members have found on the way to each other in the present probe: each speaks for itself."""
    said = (record for record in scene.records.values() if record.answered == scene.view.generation)
    return tuple(r for record in said for r in record.probed if r.node == record.member.node)


def remembered(lead: Lead, now: float) -> dossier.Filed:
    """What the probe that is over has found, among the facts: the incident that it was made for is judged again with them.

    Of the ways that are well only those that tell which end of a broken one is at fault: a large gang's would leave no room.
    """
    ways = findings(lead.probes.results)
    ill = {name for way in ways if way.sign is not Sign.HEALTHY for name in (way.node, way.peer)}
    near = sorted((way for way in ways if ill & {way.node, way.peer}), key=lambda way: way.sign is Sign.HEALTHY)
    fresh = [replace(way, generation=lead.formation.generation) for way in near[:TOLD]]
    return lead.dossier.with_(fresh, now) if fresh else lead.dossier.facts


def _confirming(scene: Scene, names: Iterable[str]) -> Plan | None:
    """Where the tested pairs fall into pieces, a second probe across tells a partition from some links. Once."""
    plan, results = scene.plan, scene.lead.probes.results
    if plan is None or plan.pairs or not results:
        return None
    tested = {frozenset(pair) for pair in probe_links(plan)}
    pairs = tuple(pair for pair in confirm(names, results) if frozenset(pair) not in tested)
    if not pairs:
        return None
    return scene.write(
        Phase.PROBE, scene.kept, Cause(why=Why.PIECES), *_unformed(plan), strike=plan.strike, pairs=pairs
    )


def _retesting(scene: Scene, verdict: Verdict) -> Plan | None:
    """Where ways of a node fail and others of it pass, the network may have changed while they were tested. Before the nodes at
    both ends of those that failed are put out, all ways of these nodes are tested once more.

    Found by simulation: large frames were lost no more when some had tested and others had not, and innocents were put out.
    """
    plan = scene.plan
    if plan is None or proven(verdict) or plan.says(Why.RETESTED):
        return None
    named = frozenset(verdict.nodes)
    pairs = (pair for pair in (*probe_links(plan), *plan.pairs) if not named.isdisjoint(pair))
    in_turn = tuple(pair for turn in turns(pairs) for pair in turn)  # else the last node waits for all others
    cause = Cause(why=Why.RETESTED, nodes=verdict.nodes)
    return scene.write(Phase.PROBE, scene.kept, cause, *_unformed(plan), strike=plan.strike, pairs=in_turn)


def _confined(scene: Scene, verdict: Verdict, nodes: Collection[str]) -> tuple[Quarantine, ...]:
    members = {seat.member: found(verdict) for seat in scene.kept if seat.member.node in nodes}
    return confinements(scene, members)


def _named_before(plan: Plan) -> frozenset[str]:
    """Whom the test before had named, after which the plan was written. Whom only one of two tests names is not put out: the
    network changes faster than it is tested.

    Found by simulation: large frames were lost from the middle of a test to the middle of the next, and innocents were put out.
    """
    return frozenset(node for cause in plan.causes if cause.why is Why.RETESTED for node in cause.nodes)


def _disagreeing(scene: Scene, answers: Mapping[str, Collection[str]]) -> Plan | None:
    """Where one end has reached the other and not the other way round, though each waits for an answer, the network has changed
    as they tested. Before anybody is put out for that, all test once more. (Whom nobody has reached has gone meanwhile.)

    Found by chaos.spans: a node was cut off, and was not any more when it tested itself; the other end was put out.
    """
    plan = scene.plan
    assert plan is not None
    if plan.says(Why.RETESTED):
        return None
    tested = {pair for a, b in plan.pairs or probe_links(plan) for pair in ((a, b), (b, a))}
    reached = {b for a, b in tested if a in answers and b not in answers[a]}
    doubtful = sorted(
        b for a, b in tested if b in reached and b in answers.get(a, ()) and a not in answers.get(b, (a,))
    )
    if not doubtful:
        return None
    cause = Cause(why=Why.RETESTED, nodes=tuple(dict.fromkeys(doubtful)))
    return scene.write(Phase.PROBE, scene.kept, cause, *_unformed(plan), strike=plan.strike)


def _unformed(plan: Plan) -> tuple[Cause, ...]:
    """That a gang could not form, where that is what its nodes are probed for: that is counted otherwise than a stall."""
    return tuple(cause for cause in plan.causes if cause.why is Why.UNFORMED)
