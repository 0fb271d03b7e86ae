"""What no step of a small world may do: the checks of `chaos.checks` that can be told from one step and what came before it.

The one idea: as there, nothing here knows a guard of the core. What a check has to remember of earlier steps is `world.Past`,
a part of the state, so that two ways to one state differ in nothing that a check would tell apart.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from chaos.history import Committed, Confined, Elected, Fact, Planned
from chaos.small.shelf import Held
from chaos.small.world import Rules, Turn, World
from elasticrl.contract.model import Member, Phase, Plan, Rung

Complaint = tuple[str, str]  # which check of `chaos.checks`, and what is wrong
SLACK = 1  # steps of time by which a lease may seem to hold longer than it does


def complaints(rules: Rules, before: World, turn: Turn) -> list[Complaint]:
    """All that is wrong with this step. What is to be remembered of it is put into the world."""
    found: list[Complaint] = [("no_assertion_failed", turn.bug)] if turn.bug else []
    for event in turn.events:
        found += _events(rules, turn, *event)
    for fact in turn.facts:
        found += _facts(rules, before, turn, fact)
    return found


def _remember(turn: Turn, **changes: Any) -> None:
    turn.world = turn.world._replace(past=turn.world.past._replace(**changes))


def _touched(rules: Rules, world: World, node: str) -> bool:
    return world.past.late or bool(world.past.touched >> rules.names.index(node) & 1)


def _holds(rules: Rules, world: World, member: Member) -> bool:
    """Does its lease stand, and has nothing befallen it?"""
    node = rules.names.index(member.node)
    leased = any(lease[:2] == (node, member.incarnation) for lease in world.leases)
    return leased and not world.past.touched >> node & 1


def _facts(rules: Rules, before: World, turn: Turn, fact: Fact) -> Iterator[Complaint]:
    match fact:
        case Elected(member=member):
            leader = rules.value(turn.world.past.leader)
            if leader is not None and str(leader) != member and _holds(rules, before, leader):
                yield "the_innocent_keep_their_office", f"{member} took the office from {leader}, which nothing befell"
            held: Held = rules.value(turn.world.held)
            _remember(turn, leader=rules.of(held.shared.leader))
        case Planned():
            yield from _planned(rules, before, turn, fact)
            _remember(turn, formed=False, began=0)
        case Committed():
            yield from _committed(rules, before, fact)
        case Confined(held=True):
            node = fact.node
            if not _touched(rules, turn.world, node):
                yield "the_innocent_are_not_quarantined", f"{node} was quarantined though nothing befell it"
            now: Held = rules.value(turn.world.held)
            lives = {name: rules.member(i, turn.world.nodes[i].life) for i, name in enumerate(rules.names)}
            bound = [name for name, quarantine in now.quarantines.items() if quarantine.binds(lives[name])]
            if len(bound) > max(1, int(rules.settings.health.quarantine_share * rules.count)):
                yield "quarantines_are_few", f"{', '.join(sorted(bound))} are quarantined at once"


def _planned(rules: Rules, before: World, turn: Turn, fact: Planned) -> Iterator[Complaint]:
    plan, old, number = fact.plan, rules.plan(before), fact.plan.generation
    newest = old.generation if old else 0
    if number != newest + 1 and not (plan.again and number > newest):
        yield "one_plan_per_generation", f"generation {number} was written after {newest}"
    if plan.resume != fact.committed:
        yield (
            "a_plan_never_forgets_a_commit",
            f"generation {number} resumes {plan.resume}, committed was {fact.committed}",
        )
    leader = rules.value(turn.world.past.leader)
    if fact.by != str(leader) and not plan.again:
        yield "only_a_leader_writes", f"{fact.by} wrote generation {number}, the leader was {leader}"
    if fact.lapsed_s > SLACK:
        yield "only_a_leader_writes", f"{fact.by} led {fact.lapsed_s:g} s after its lease may have lapsed"
    if old is not None:
        yield from _follows(rules, before, turn, old, fact)
    yield from _sound(rules, fact)
    if plan.phase is Phase.STOP and not (plan.exit_code == 75 and turn.world.past.asked) and plan.exit_code != 70:
        yield "a_job_ends_for_a_reason", f"generation {number} stops the job with {plan.exit_code}"
    if number > 8 + 8 * (before.past.late + before.past.touched.bit_count()):
        yield "nobody_spins", f"{number} generations"


def _follows(rules: Rules, before: World, turn: Turn, old: Plan, fact: Planned) -> Iterator[Complaint]:
    plan, number, past = fact.plan, fact.plan.generation, turn.world.past
    again = fact.by not in {str(seat.member) for seat in old.ring}  # who begins a job that has ended is another life
    mends = plan.phase is Phase.TRAIN and plan.saves and plan.seat_of.keys() < old.seat_of.keys()
    if old.phase is Phase.STOP and not (plan.again or again or mends):
        yield "nothing_happens_after_the_end", f"generation {number} was written after the job's end"
    places = {seat.member: i for i, seat in enumerate(old.seats)}
    kept = [places[seat.member] for seat in plan.seats if seat.member in places]
    if any(one > other for one, other in pairwise(kept)):
        yield "survivors_keep_their_order", f"generation {number} reorders the survivors of {old.generation}"
    both = old.phase is Phase.TRAIN and plan.phase is Phase.TRAIN
    grown = {seat.member for seat in old.seats} < {seat.member for seat in plan.seats}
    if both and grown and plan.rung is Rung.START and not past.formed:
        yield "growth_waits_for_the_gang", f"generation {number} grows {old.generation}, which had not formed"
    fresh = sum(seat.born == number for seat in plan.seats)
    want = len(plan.seats) if plan.rung >= Rung.RESTART else int(old.rung < plan.rung is Rung.REPLACE)
    if plan.phase is Phase.TRAIN and fresh < want and not plan.again:
        yield (
            "a_rung_does_what_it_says",
            f"generation {number} ({plan.rung.name}) starts {fresh} of {len(plan.seats)} afresh",
        )
    if plan.phase is Phase.TRAIN and plan.rung is Rung.RELOAD and plan.strike is None and old.rung < Rung.RESTART:
        yield "disks_are_the_last_resort", f"generation {number} reads the disk"
    if Phase.STOP not in (plan.phase, old.phase):
        yield from _innocent(rules, before, turn, old, plan)


def _innocent(rules: Rules, before: World, turn: Turn, old: Plan, plan: Plan) -> Iterator[Complaint]:
    here, past = {seat.member: seat.born for seat in plan.seats}, turn.world.past
    for seat in old.seats:
        if (old.grows and not past.formed and seat.born == old.generation) or not _holds(rules, before, seat.member):
            continue
        running = old.phase is plan.phase is Phase.TRAIN and plan.rung <= Rung.REPLACE
        if seat.member not in here:
            what = f"generation {plan.generation} puts out {seat.member}, which nothing befell"
            yield "the_innocent_keep_their_seats", what
        elif running and here[seat.member] == plan.generation and not past.late:
            what = f"generation {plan.generation} restarts {seat.member}, which nothing befell"
            yield "the_innocent_keep_their_seats", what


def _sound(rules: Rules, fact: Planned) -> Iterator[Complaint]:
    plan, membership = fact.plan, rules.settings.membership
    if plan.phase not in (Phase.TRAIN, Phase.PROBE):
        return
    nodes = [seat.member.node for seat in plan.seats]
    wrong = {
        "a node has two seats": len(set(nodes)) < len(nodes),
        f"{len(nodes)} seats": plan.phase is Phase.TRAIN
        and not membership.min_nodes <= len(nodes) <= membership.max_nodes,
        f"{plan.world} ranks": plan.world > rules.settings.lanes,
        "a quarantined member is seated": any(str(seat.member) in fact.held for seat in plan.seats),
        "no place to meet": plan.phase is Phase.TRAIN and not plan.endpoint,
        "no cause": not plan.causes,
        "workers from the future": any(seat.born > plan.generation for seat in plan.seats),
    }
    yield from (("plans_are_sound", f"generation {plan.generation}: {what}") for what, is_so in wrong.items() if is_so)


def _committed(rules: Rules, before: World, fact: Committed) -> Iterator[Complaint]:
    held: Held = rules.value(before.held)
    plan = held.shared.plan
    if fact.step <= held.shared.committed:
        yield "commits_only_rise", f"step {fact.step} was committed after {held.shared.committed}"
    if plan is None or fact.generation != plan.generation:
        newest = plan.generation if plan else 0
        yield "commits_only_rise", f"generation {fact.generation} committed step {fact.step} under plan {newest}"
    if not before.whole >> fact.step & 1:
        yield "commits_only_rise", f"step {fact.step} was committed without a whole save"
    if plan is not None and plan.phase is Phase.TRAIN and plan.generation == fact.generation:
        head = rules.names.index(plan.seats[0].member.node)
        if not before.past.began >> head & 1:
            what = f"step {fact.step} was committed by generation {fact.generation}, which n{head} is not in"
            yield "only_who_has_joined_commits", what


def _events(rules: Rules, turn: Turn, kind: str, what: tuple[object, ...]) -> Iterator[Complaint]:
    match kind, what:
        case "resumed", (Plan() as plan, int() as version, str(), tuple() as seats):
            yield from _resumed(rules, turn, plan, version, seats)
        case "began", (int() as node, Plan() as plan, False):
            name, number = rules.names[node], plan.generation
            if any(seat.member.node == name and seat.born == number for seat in plan.seats):
                yield (
                    "a_seat_is_filled_as_planned",
                    f"{name} reformed for generation {number}, which asked for fresh workers",
                )
        case "halted", (int() as node, int() as generation, int() as under):
            if under < generation:
                ended = f"{rules.names[node]} ended its workers of generation {generation} for plan {under}"
                yield "no_worker_ends_for_an_older_plan", ended
        case "ordered", (int() as node, str() as order, int() as generation):
            yield "orders_are_given_once", f"{rules.names[node]} was told {order} {generation} again at the same moment"
        case "left", (int() as node, int() as code):
            newest = rules.plan(turn.world)
            if code not in ((0, 70, 75) if newest and newest.phase is Phase.STOP else (0,)):
                yield "a_drained_node_leaves_cleanly", f"{rules.names[node]} left with {code}, and the job goes on"


def _resumed(rules: Rules, turn: Turn, plan: Plan, version: int, seats: tuple[int, ...]) -> Iterator[Complaint]:
    past, number = turn.world.past, plan.generation
    if version < plan.resume:
        what = f"generation {number} goes back to {version}, step {plan.resume} was committed"
        yield "no_committed_step_is_made_again", what
    missing = {i for i in past.ring if past.lost >> i & 1 or i not in seats}
    if version < past.sealed and _whole(past.ring, missing, rules.settings.copies) and plan.rung is not Rung.RELOAD:
        yield (
            "no_sealed_step_is_lost",
            f"generation {number} goes back from {past.sealed} to {version}; missing {sorted(missing)}",
        )
    if version != past.sealed:
        _remember(turn, sealed=version, ring=seats, lost=0)


def _whole(ring: Sequence[int], missing: set[int], copies: int) -> bool:
    reach = range(min(copies, len(ring) - 1) + 1)
    return all(any(ring[(i + hop) % len(ring)] not in missing for hop in reach) for i in range(len(ring)))
