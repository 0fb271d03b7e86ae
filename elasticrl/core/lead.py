"""What the leader does: look at everybody's record and keep the plan right.

The idea: a table of rules, asked in order; the first that has something to say writes the next plan or says that the present
one stays. Each rule looks at one `Scene`, in which the facts are already sorted out: who keeps a seat, who has lost it and why,
who could take one.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from elasticrl.core import dossier, straggler
from elasticrl.core.events import Action, Confine, Inspect, Propose
from elasticrl.core.evidence import Evidence, Kind, Sign, bounded, of_exit
from elasticrl.core.follow import plan_of
from elasticrl.core.invariants import check_plan
from elasticrl.core.model import (
    Intent,
    Member,
    Outcome,
    Phase,
    Plan,
    Quarantine,
    Record,
    Role,
    Rung,
    Seat,
    Strike,
    View,
    Work,
    rounds,
)
from elasticrl.core.pairs import Pair, Result, confirm, findings
from elasticrl.core.policy import Act, Answer, Scope, answer
from elasticrl.core.settings import Settings
from elasticrl.core.state import Failures, Finding, Lead, State, Wish
from elasticrl.core.suspect import Conviction, conviction, probe_links, split
from elasticrl.core.verdict import Confidence, Facts, Fault, Verdict, judge

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What becomes of a seat: kept by the running processes (`fresh=False`) or by new ones, or gone, with the reason."""

    seat: Seat | None
    fresh: bool = False
    why: str = ""
    leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A rule's answer: the plan to have (None: the present one stays), whom to confine, when to look again, and why."""

    plan: Plan | None = None
    confine: tuple[Quarantine, ...] = ()
    wake_at: float = inf
    why: str = ""
    verdict: Verdict | None = None  # on what the plan answers
    inspect: bool = False  # ask everybody where his workers are


@dataclass(frozen=True)  # no slots: what is derived from the facts is computed once, on first use
class Scene:
    """One moment as the leader sees it: the facts, and what they amount to."""

    settings: Settings
    view: View
    plan: Plan | None  # None before the first plan, or when a stopped job is wanted again
    lead: Lead
    me: Member
    now: float

    def recalling(self, lead: Lead) -> "Scene":
        """The same moment with newer timers. What was derived without them is not derived again: that is a pass over all."""
        scene = replace(self, lead=lead)
        vars(scene).update({name: value for name, value in vars(self).items() if name in TIMELESS})
        return scene

    @cached_property
    def records(self) -> Mapping[str, Record]:
        """Everybody's record, by node."""
        return self.view.records or {}

    @cached_property
    def conviction(self) -> Conviction:
        """Whom the neighbours hold to be dead or cut off."""
        return conviction(self.view, self.settings.membership.neighbours)

    @cached_property
    def held(self) -> Mapping[str, Quarantine]:
        """Quarantines that apply: the first two bind one life of a node, later ones the node."""
        found = {}
        for node, quarantine in (self.view.quarantines or {}).items():
            record = self.records.get(node)
            if quarantine.held and (quarantine.strikes > 2 or record is None or record.member == quarantine.member):
                found[node] = quarantine
        return found

    @cached_property
    def bits(self) -> str:
        """What decides the job's bits: the fingerprint in its plan, before the first the commonest.

        Found by seed 91: when all seats were lost for a moment, the one node with other bits took the job over.
        """
        if self.plan and self.plan.bits:
            return self.plan.bits
        common = Counter(record.bits for record in self.records.values() if record.bits).most_common()
        return min((bits for bits, n in common if n == common[0][1]), default="")

    @cached_property
    def fates(self) -> tuple[Fate, ...]:
        """One for each seat of the present plan, in rank order."""
        return tuple(self._fate(seat) for seat in self.plan.seats) if self.plan else ()

    @cached_property
    def missing(self) -> int:
        """How many seats' nodes have no record."""
        return sum(seat.member.node not in self.records for seat in self.plan.seats) if self.plan else 0

    @property
    def lapsed(self) -> bool:
        """Did several members have no record when this node began to lead?"""
        return self.lead.lapsed if self.lead.planned_at > -inf else self.missing > 1

    @property
    def grace(self) -> bool:
        """If so, their leases lapsed with the store, likelier than that they died: each is waited for.

        Found by the scenario all-leases-lapse: when all but one were back, the last one was taken for dead.
        """
        return self.lapsed and self.missing > 0 and self.now < self.grace_until

    @property
    def grace_until(self) -> float:
        """When a new leader takes members without a record for dead, however many they are."""
        return self.lead.since + self.settings.membership.rejoin_s

    def _fate(self, seat: Seat) -> Fate:
        assert self.plan is not None
        member, record = seat.member, self.records.get(seat.member.node)
        if accusers := self.conviction.guilty.get(member.node):
            return Fate(seat=None, why=f"{member} is not heard by {' and '.join(accusers[:3])}")
        if record is None:
            return Fate(seat=seat) if self.grace else Fate(seat=None, why=f"{member} died (lease)")
        if record.member != member:
            return Fate(seat=None, why=f"{member} came back as {record.member}")
        if member.node in self.held:
            return Fate(seat=None, why=f"{member} is quarantined: {self.held[member.node].reason}")
        if record.leaving:
            return Fate(seat=None, why=f"{member} leaves", leaving=True)
        if record.generation == self.plan.generation and record.work is Work.FAILED:
            why = f"{member}: {record.exit.cause if record.exit else 'its worker failed'}"
            return Fate(seat=replace(seat, born=self.plan.generation + 1) if record.warm else None, fresh=True, why=why)
        born = record.born if record.generation == self.plan.generation and record.born else seat.born
        return Fate(seat=seat if born == seat.born else replace(seat, born=born))

    @cached_property
    def kept(self) -> tuple[Seat, ...]:
        """The seats that go on, in their order."""
        return tuple(fate.seat for fate in self.fates if fate.seat)

    @cached_property
    def keepers(self) -> frozenset[Member]:
        """Whose seats go on."""
        return frozenset(seat.member for seat in self.kept)

    @cached_property
    def candidates(self) -> tuple[Record, ...]:
        """Who could take a seat now, by name."""
        return tuple(sorted(filter(self.ready, self.records.values()), key=lambda record: record.member))

    def ready(self, record: Record) -> bool:
        """Warm, willing and trusted, and not seated already. (In this order: of thousands, most are seated.)"""
        member, node = record.member, record.member.node
        if not record.warm or record.leaving or record.role is not Role.TRAIN or self._seated(member):
            return False
        readmit_s = self.settings.membership.lease_ttl_s + 1.0
        doubted = self.now < self.lead.doubted.get(member, -inf) + readmit_s
        trusted = node not in self.held and node not in self.conviction.guilty and not doubted
        return trusted and (record.bits == self.bits or self.settings.exact != "require")

    def _seated(self, member: Member) -> bool:
        """Has it a seat that it keeps? A held plan's seats can be taken anew."""
        if self.plan is None or member not in self.plan.seat_of:
            return False
        return self.plan.phase is not Phase.HOLD or member in self.keepers

    def record_of(self, seat: Seat) -> Record | None:
        """What this seat's node says of itself. (Another life of it says nothing under this plan.)"""
        return self.records.get(seat.member.node)

    @property
    def spares(self) -> tuple[Record, ...]:
        """What the plan's spares say of themselves, as long as they are the same lives."""
        spares = self.plan.spares if self.plan else ()

        return tuple(record for spare in spares if (record := self.record_of(spare)) and record.member == spare.member)

    @cached_property
    def doing(self) -> Mapping[Work, tuple[Record, ...]]:
        """What the seats' nodes report under the present generation, in rank order. (One pass over all, for every rule.)"""
        found: dict[Work, list[Record]] = {work: [] for work in Work}
        for seat in self.plan.seats if self.plan else ():
            record = self.record_of(seat)
            if record and self.plan and record.generation == self.plan.generation:
                found[record.work].append(record)
        return {work: tuple(records) for work, records in found.items()}

    def at_work(self, *works: Work) -> bool:
        """Does every seat's node report one of these under the present generation?"""
        return self.plan is not None and sum(len(self.doing[work]) for work in works) == len(self.plan.seats)

    def arrange(self, fates: tuple[Fate, ...], *, grow: bool = True) -> tuple[Seat, ...]:
        """Seats for the next plan: survivors in their order, candidates first in the gaps, then behind."""
        generation = self.view.generation + 1
        membership = self.settings.membership
        waiting = [seat_for(r, generation) for r in self.candidates]
        kept = sum(fate.seat is not None for fate in fates)
        room = membership.max_nodes - kept
        # Spares are held back only from growth: a gap in the gang is what they are there for.
        gaps = len(fates) - kept
        taken = min(
            len(waiting), room, max(gaps, len(waiting) - membership.spares if grow else 0, membership.min_nodes - kept)
        )
        waiting = waiting[: max(taken, 0)]
        seats: list[Seat] = []
        for fate in fates:
            if fate.seat:
                seats.append(fate.seat)
            elif waiting:
                seats.append(waiting.pop(0))
        seats.extend(waiting)
        ranks = 0
        fitting = []
        for seat in seats:  # never more ranks than lanes: a rank without a lane has nothing to do
            if ranks + seat.slots <= self.settings.lanes:
                fitting.append(seat)
                ranks += seat.slots
        return tuple(fitting)

    def write(
        self,
        phase: Phase,
        seats: tuple[Seat, ...],
        why: str,
        rung: Rung = Rung.START,
        *,
        strike: Strike | None = None,
        exit_code: int | None = None,
        pairs: tuple[Pair, ...] = (),
    ) -> Plan:
        """The next plan."""
        here = {seat.member for seat in seats}
        spares = tuple(seat_for(r, 0) for r in self.candidates if r.member not in here)
        offers = (record.endpoint for seat in seats if (record := self.record_of(seat)))
        return Plan(
            generation=self.view.generation + 1,
            phase=phase,
            seats=seats,
            spares=spares,
            resume=self.view.committed,
            rung=rung,
            lanes=self.settings.lanes,
            endpoint=next((endpoint for endpoint in offers if endpoint), ""),  # rank 0's agent may be down (seed 455)
            reason=why,
            strike=strike,
            exit_code=exit_code,
            bits=self.bits,
            pairs=pairs,
            backend=self.plan.backend if self.plan else "",
            fallbacks=self.plan.fallbacks if self.plan else 0,
        )

    def train(self, seats: tuple[Seat, ...], why: str, rung: Rung, *, strike: Strike | None = None) -> Plan:
        """The next plan with these seats, or a hold if they are too few."""
        need = self.settings.membership.min_nodes
        if len(seats) < need:
            return self.write(
                Phase.HOLD, seats, f"{why}; {len(seats)} of the {need} nodes it needs: holding", rung, strike=strike
            )
        if self.plan and self.plan.rung is Rung.RELOAD and not self.trained:
            rung = Rung.RELOAD  # what made us distrust the vaults has not been overcome yet
        if rung >= Rung.RESTART:
            seats = tuple(replace(seat, born=self.view.generation + 1) for seat in seats)
        known = max(len(self.records), len(seats))
        return self.write(Phase.TRAIN, seats, f"{why}; {len(seats)} of {known} nodes train", rung, strike=strike)

    @cached_property
    def trained(self) -> bool:
        """Has every seat got through the first collective of this generation?"""
        if self.plan is None or self.plan.phase is not Phase.TRAIN:
            return False
        return self.at_work(Work.TRAINING, Work.STALLED, Work.PARKED, Work.DONE, Work.FAILED)

    @cached_property
    def deadline(self) -> float:
        """When the present rung has had its time."""
        recovery = self.settings.recovery
        limit = {
            Rung.START: recovery.start_s,
            Rung.REFORM: recovery.reform_s,
            Rung.REPLACE: recovery.replace_s,
            Rung.RESTART: recovery.restart_s,
            Rung.RELOAD: recovery.reload_s,
        }
        return self.lead.planned_at + limit[self.plan.rung if self.plan else Rung.START]

    @cached_property
    def settled_at(self) -> float:
        """When nobody new will have come for long enough."""
        return max(self.lead.ready_at, self.lead.since) + self.settings.membership.settle_s


def seat_for(record: Record, born: int) -> Seat:
    """A seat for whoever says this of itself."""
    return Seat(
        member=record.member,
        born=born,
        slots=record.slots,
        beat=record.beat,
        echo=record.echo,
        vault=record.vault,
        probe=record.probe,
    )


# What a Scene derives without its timers. (`candidates` asks who is doubted; the newly doubted are convicted, so are none.)
TIMELESS = frozenset(
    {"records", "conviction", "held", "bits", "fates", "kept", "keepers", "candidates", "doing", "missing"}
)


def lead(state: State, now: float) -> tuple[State, Wish]:
    """The leader's wishes, and its timers after this moment."""
    assert state.lead is not None
    if state.view.records is None or state.view.quarantines is None:
        return state, Wish(reason="leading; waiting to see all records")
    scene = Scene(state.settings, state.view, plan_of(state), state.lead, state.me, now)
    memory = remember(scene, deaf=deaf(state, now))
    memory = investigate(scene, memory, state.evidence)
    scene = scene.recalling(memory)
    move = next((move for rule in RULES if (move := rule(scene)) is not None), Move())
    release, wake_at = guard(scene)
    actions: list[Action] = [
        Confine(quarantine=quarantine, if_leader=state.view.leader_revision) for quarantine in (*move.confine, *release)
    ]
    if move.plan is not None:
        view = state.view
        plan = replace(move.plan, verdict=brief(move.verdict)) if move.verdict else move.plan
        check_plan(view, plan)
        actions.append(
            Propose(
                plan=plan,
                if_plan=view.plan_revision,
                if_commit=view.commit_revision,
                if_leader=view.leader_revision,
            )
        )
    if move.inspect:
        actions.append(Inspect(generation=state.view.generation, if_leader=state.view.leader_revision))
    graced = scene.grace_until if scene.grace else inf
    return state.but(lead=memory), Wish(tuple(actions), min(wake_at, move.wake_at, graced), move.why)


def deaf(state: State, now: float) -> bool:
    """Is an answer of the store overdue? Then the members' silence says nothing about them."""
    return now > state.leased + state.settings.membership.keepalive_s + state.settings.retry_s


def remember(scene: Scene, *, deaf: bool) -> Lead:
    """The leader's timers, brought up to this moment.

    A leader that is deaf begins to wait anew. Found by seed 1305: after an outage a gang that had trained all along was put
    out for not having joined in time, because its records had not come through.
    """
    lead, now = scene.lead, scene.now
    ready = frozenset(record.member for record in scene.candidates)
    stalled = bool(scene.doing[Work.STALLED] or scene.doing[Work.PARKED])
    doubted = {
        member: at for member, at in lead.doubted.items() if now < at + 10 * scene.settings.membership.lease_ttl_s
    }
    for node in scene.conviction.guilty:
        if node in scene.records:
            doubted[scene.records[node].member] = now
    failures = dict(lead.failures)
    for record in scene.doing[Work.FAILED]:
        node, left, last = record.member.node, record.exit, failures.get(record.member.node)
        if left is None or left.generation != record.generation:
            continue
        if last is None or left.step > last.step:
            failures[node] = Failures(generation=left.generation, step=left.step, count=1)
        elif last.generation < left.generation:
            failures[node] = replace(last, generation=left.generation, count=last.count + 1)
    new_plan = scene.view.generation != lead.generation
    results = _results(scene) if scene.plan and scene.plan.phase is Phase.PROBE else ()
    begins = stalled and (lead.stalled_at is None or new_plan or deaf)
    put_out = tuple(at for at in lead.put_out if now < at + HOUR_S) if lead.put_out else ()
    return Lead(
        since=lead.since,
        generation=scene.view.generation,
        planned_at=now if new_plan or deaf else lead.planned_at,
        lapsed=scene.lapsed,
        ready=ready,
        ready_at=now if ready - lead.ready else lead.ready_at,
        stalled_at=None if not stalled else now if begins else lead.stalled_at,
        asked=scene.view.look_revision if begins else lead.asked,
        doubted=doubted,
        confined={node: lead.confined.get(node, now) for node in scene.held},
        failures=failures,
        gang=scene.view.generation if scene.plan and scene.plan.phase is Phase.TRAIN else lead.gang,
        facts=lead.facts,
        read=lead.read,
        finding=lead.finding,
        let_back={
            node: at
            for node in {**lead.confined, **lead.let_back}
            if node not in scene.held and now < (at := lead.let_back.get(node, now)) + 2 * dossier.KEPT_S
        },
        results=results,
        earlier=lead.earlier if not new_plan else lead.results if scene.plan and scene.plan.pairs else (),
        put_out=(*put_out, *(now for node in scene.held if node not in lead.confined)),
        paces={} if new_plan else lead.paces,
        history=() if new_plan else lead.history,
        slow=() if new_plan else lead.slow,
        backend_since=inf if scene.plan is None or not scene.plan.backend else min(lead.backend_since, now),
    )


# ---- what has been found out


def investigate(scene: Scene, lead: Lead, own: dossier.Facts) -> Lead:
    """File what is new, judge it, and know what would be done about it."""
    records, now = scene.records, scene.now
    fresh: list[Evidence] = [*own, *_derived(scene)]
    if records is not lead.read:
        changed = (record for node, record in records.items() if record is not lead.read.get(node))
        fresh += [fact for record in changed for fact in record.evidence]
    if fresh or lead.facts:
        facts = dossier.file(lead.facts, fresh, now, kept_s=1.25 * dossier.KEPT_S)
        lead = replace(lead, facts=facts, finding=_judged(scene, lead, facts))
    return replace(_paced(scene, lead), read=records) if records is not lead.read else lead


def _derived(scene: Scene) -> tuple[Evidence, ...]:
    """What the records amount to beside what they say: who failed, and who is not there any more."""
    plan = scene.plan
    if plan is None or plan.phase is not Phase.TRAIN:
        return ()
    found = []
    for fate, seat in zip(scene.fates, plan.seats, strict=True):
        if fate.seat is not None and not fate.fresh:
            continue
        record = scene.record_of(seat)
        node, generation = seat.member.node, plan.generation
        if node in scene.conviction.guilty or record is None or record.member != seat.member:
            found.append(dossier.gone(node, fate.why.removeprefix(f"{seat.member} "), generation, None))
        elif record.work is Work.FAILED and record.exit is not None and record.exit.generation == generation:
            rank = plan.first_rank(seat.member) + record.exit.slot
            found.append(of_exit(record.exit, rank=rank, node=node))
    return tuple(found)


def _judged(scene: Scene, lead: Lead, facts: dossier.Facts) -> Finding | None:
    """The verdict on the present gang, and the answer to it."""
    plan = scene.plan
    if plan is None:
        return None
    nodes = dossier.by_rank((seat.member.node, seat.slots) for seat in plan.seats)
    gang = lead.gang or plan.generation - 1
    # Who was let back has paid for what was known of it then. Found by the scenario a-gpu-falls-off-the-bus.
    facts = tuple(fact for fact in facts if fact.generation is not None or _new(fact, lead)) if lead.let_back else facts
    chosen = dossier.concerning(facts, range(gang, plan.generation + 1), frozenset(nodes.values()))
    if not dossier.speaks(chosen):
        return None
    if lead.finding is not None and lead.finding.of == chosen:
        return lead.finding
    verdict = judge(chosen, Facts(world=plan.world, nodes=nodes))
    return Finding(of=chosen, verdict=verdict, answer=_answer(scene, lead, verdict, gloo=False))


def _new(fact: Evidence, lead: Lead) -> bool:
    over = lead.let_back.get(fact.node) if fact.node is not None else None
    return over is None or (fact.when or 0.0) > over


def _answer(scene: Scene, lead: Lead, verdict: Verdict, *, gloo: bool) -> Answer:
    """What the operator's words, and the caps on them, make of a verdict."""
    settings = scene.settings
    words = {fault: Act(settings.policy[fault]) for fault in Fault if fault in settings.policy}
    scope = Scope(
        known=len(scene.records),
        min_nodes=settings.membership.min_nodes,
        held=frozenset(scene.held),
        recent=len(lead.put_out),
        share=settings.health.quarantine_share,
        gloo=gloo and settings.fallback == "gloo",
    )
    return answer(verdict, words, scope)


def brief(verdict: Verdict) -> Verdict:
    """As it goes into a plan, which every node reads."""
    return replace(verdict, because=tuple(bounded(fact, 120) for fact in verdict.because[:6]))


def _paced(scene: Scene, lead: Lead) -> Lead:
    """One more row of how long everybody's phases took, once all have said it anew; and who is slow by the last of them."""
    plan, health = scene.plan, scene.settings.health
    if plan is None or plan.phase is not Phase.TRAIN or len(plan.seats) < 2:
        return lead
    fresh = {}
    for record in scene.doing[Work.TRAINING]:
        before = lead.read.get(record.member.node)
        if record.pace and (before is None or before.pace != record.pace):
            fresh[record.member.node] = record.pace
    if not fresh:
        return lead
    paces = {**lead.paces, **fresh}
    if len(paces) < len(plan.seats):
        return replace(lead, paces=paces)
    row: dict[int, dict[str, float]] = {}
    rank = 0
    for seat in plan.seats:
        for pace in paces.get(seat.member.node, ()):
            row.setdefault(rank + pace.slot, {})[pace.phase] = pace.seconds
        rank += seat.slots
    history = (*lead.history, row)[-4 * health.straggler_steps :]
    slow = straggler.slow(history, z=health.straggler_z, steps=health.straggler_steps)
    nodes = dossier.by_rank((seat.member.node, seat.slots) for seat in plan.seats)
    return replace(lead, paces={}, history=history, slow=straggler.evidence(slow, nodes))


# ---- the rules, in the order in which they are asked


def over(scene: Scene) -> Move | None:
    """A stopped job stays stopped."""
    if scene.plan and scene.plan.phase is Phase.STOP:
        return Move()
    return None


def asked_to_stop(scene: Scene) -> Move | None:
    """An operator wants the job to end. (What was asked before an earlier stop has been answered by it.)"""
    view = scene.view
    if view.intent is not Intent.STOP or (
        scene.plan is None and view.plan and view.intent_generation < view.plan.generation
    ):
        return None
    seats = scene.kept
    plan = scene.write(Phase.STOP, seats, "stopped by an operator", exit_code=Outcome.STOPPED.value)
    return Move(plan=plan)


def finished(scene: Scene) -> Move | None:
    """All steps are made, and the last is on disk."""
    plan = scene.plan
    if plan is None or not plan.seats or not scene.at_work(Work.DONE):
        return None
    if scene.view.committed < scene.settings.steps:
        return Move(why="all steps are made; the last checkpoint is being committed")
    done = scene.write(
        Phase.STOP, plan.seats, f"all {scene.view.committed} steps are made", exit_code=Outcome.FINISHED.value
    )
    return Move(plan=done)


def asked_to_pause(scene: Scene) -> Move | None:
    """An operator wants the job to wait."""
    if scene.view.intent is not Intent.PAUSE:
        return None
    if scene.plan is None or scene.plan.phase is Phase.HOLD:
        return Move(why="paused by an operator")
    return Move(plan=scene.write(Phase.HOLD, scene.kept, "paused by an operator", strike=scene.plan.strike))


def probing(scene: Scene) -> Move | None:
    """Under PROBE: wait for the answers, then go on with those who can reach each other."""
    plan = scene.plan
    if plan is None or plan.phase is not Phase.PROBE:
        return None
    seats = tuple(fate.seat for fate in scene.fates if fate.seat)
    asked = [*filter(None, map(scene.record_of, seats)), *scene.spares]
    asked = [record for record in asked if record.answered == plan.generation]
    answers = {record.member.node: record.unreachable for record in asked if record.unreachable is not None}
    due = scene.lead.planned_at + scene.settings.recovery.probe_s
    if len(answers) < len(seats) + len(scene.spares) and scene.now < due:
        return Move(wake_at=due, why="waiting for the members' probes")
    # Who cannot be reached at all is known at once; what is wrong with the way to the others takes longer to find out.
    if not any(answers.values()) and any(record.probing for record in asked) and scene.now < due:
        return Move(wake_at=due, why="waiting for what the members find on the way to each other")
    ways = findings((*scene.lead.earlier, *scene.lead.results))
    broken = {node: set(found or ()) for node, found in answers.items()}
    for fact in ways:
        if fact.sign in {Sign.UNREACHABLE, Sign.ONE_WAY} and fact.node in broken:
            broken[fact.node].add(str(fact.peer))
    order = dict.fromkeys((*(seat.member.node for seat in seats), *answers))
    kept = set(split(order, broken))
    out = tuple(seat for seat in seats if seat.member.node not in kept)
    fates = tuple(
        fate if fate.seat and fate.seat.member.node in kept else replace(fate, seat=None) for fate in scene.fates
    )
    verdict, done = _probed(scene, ways)
    if not any(answers.values()) and (again := _confirming(scene, order)):
        return Move(plan=again, verdict=verdict)
    if out or len(seats) < len(plan.seats):
        names = ", ".join(str(seat.member) for seat in out) or "nobody new"
        why = f"the probes find {names} out of reach of the others"
        confine = confinements(scene, {seat.member: "out of reach of its peers in a probe" for seat in out})
        return Move(
            plan=scene.train(scene.arrange(fates, grow=False), why, Rung.REFORM, strike=plan.strike),
            confine=confine,
            verdict=verdict,
        )
    if plan.backend:
        return _on_gloo(scene, verdict)
    if verdict is not None and done is not None and (move := _by_the_probe(scene, verdict, done.act)):
        return move
    # Steps since the last stall speak for the vaults: found live, where a second stall went back to disk for nothing.
    step = max((record.step for record in map(scene.record_of, seats) if record), default=scene.view.committed)
    strike = strike_of(plan.strike, "a stall with every node in reach", step)
    rung = Rung.RESTART if strike.count == 1 else Rung.RELOAD
    why = with_cause("the probes find every node in reach", verdict) + "; starting all workers afresh"
    move = _strike_or(scene, strike, lambda: scene.train(seats, why, rung, strike=strike))
    return replace(move, verdict=verdict)


def _probed(scene: Scene, ways: tuple[Evidence, ...]) -> tuple[Verdict | None, Answer | None]:
    """What is known of the stall and of the ways between the nodes, together."""
    finding, plan = scene.lead.finding, scene.plan
    facts = (*(finding.of if finding else ()), *ways)
    if plan is None or not dossier.speaks(facts):
        return None, None
    nodes = dossier.by_rank((seat.member.node, seat.slots) for seat in plan.seats)
    verdict = judge(facts, Facts(world=plan.world, nodes=nodes))
    carries = bool(ways) and all(fact.sign in {Sign.HEALTHY, Sign.NCCL_BROKEN} for fact in ways)
    return verdict, _answer(scene, scene.lead, verdict, gloo=carries)


def _on_gloo(scene: Scene, verdict: Verdict | None) -> Move:
    """Back to the gang's own backend only where that was tried, and worked everywhere; else on as before."""
    plan = scene.plan
    assert plan is not None
    tried = [result.nccl for result in scene.lead.results if result.nccl is not None]
    if tried and all(said == "ok" for said in tried):
        fresh = scene.train(
            scene.kept, "the probes find NCCL in order: back from gloo", Rung.REFORM, strike=plan.strike
        )
        return Move(plan=replace(fresh, backend="", fallbacks=0))
    why = with_cause("NCCL is not found in order: staying on gloo", verdict)
    fresh = scene.train(scene.kept, why, Rung.REFORM, strike=plan.strike)
    return Move(plan=replace(fresh, fallbacks=plan.fallbacks + 1), verdict=verdict)


def _by_the_probe(scene: Scene, verdict: Verdict, act: Act) -> Move | None:
    """All are in reach of each other, and yet a way, or NCCL, is not in order."""
    plan = scene.plan
    assert plan is not None
    seats = scene.kept
    if act is Act.FALLBACK:
        why = f"{verdict.said}: going on over gloo, which is slower, until a probe finds NCCL in order"
        fresh = scene.train(seats, why, Rung.REFORM, strike=plan.strike)
        return Move(plan=replace(fresh, backend="gloo", fallbacks=plan.fallbacks + 1), verdict=verdict)
    if act is Act.QUARANTINE and verdict.fault is Fault.NETWORK:
        members = {seat.member: verdict.said for seat in seats if seat.member.node in verdict.nodes}
        confine = confinements(scene, members)
        put_out = {quarantine.member for quarantine in confine}
        if put_out:
            fates = tuple(replace(f, seat=None) if f.seat and f.seat.member in put_out else f for f in scene.fates)
            plan = scene.train(scene.arrange(fates, grow=False), verdict.said, Rung.REFORM, strike=plan.strike)
            return Move(plan=plan, confine=confine, verdict=verdict)
    return None


def _results(scene: Scene) -> tuple[Result, ...]:
    """What the members have found on the way to each other in the present probe."""
    generation = scene.view.generation
    return tuple(r for record in scene.records.values() if record.answered == generation for r in record.probed)


def _confirming(scene: Scene, names: Iterable[str]) -> Plan | None:
    """Where the tested pairs fall into pieces, a second probe across tells a partition from some links. Once."""
    plan, results = scene.plan, scene.lead.results
    if plan is None or plan.pairs or not results:
        return None
    tested = {frozenset(pair) for pair in probe_links(plan)}
    pairs = tuple(pair for pair in confirm(names, results) if frozenset(pair) not in tested)
    if not pairs:
        return None
    why = "the ways between the nodes have fallen into pieces: probing across"
    return scene.write(Phase.PROBE, scene.kept, why, plan.rung, strike=plan.strike, pairs=pairs)


def with_cause(why: str, verdict: Verdict | None) -> str:
    """A reason with what is known of its cause, where that is more than a guess."""
    if verdict is None or verdict.fault is Fault.UNKNOWN or verdict.confidence is Confidence.LOW:
        return why
    return f"{why}; {verdict.said}"


def losses(scene: Scene) -> Move | None:
    """Seats whose node or worker is gone, or must not go on."""
    plan = scene.plan
    if plan is None or plan.phase is not Phase.TRAIN:
        return None
    condemned = _condemned(scene)
    if not condemned and all(fate.seat and not fate.fresh for fate in scene.fates):
        return None
    if spared := _leaves_too_few(scene):
        return spared
    strike = plan.strike
    own = next((record.exit for record in scene.doing[Work.FAILED] if record.exit and record.exit.own), None)
    if own:
        strike = strike_of(plan.strike, own.cause, own.step)
    sick = {seat.member: _sick(scene, fate, seat) for fate, seat in zip(scene.fates, plan.seats, strict=True)}
    confine = confinements(scene, {member: reason for member, reason in sick.items() if reason} | condemned)
    confined = {quarantine.member for quarantine in confine}
    fates = tuple(replace(f, seat=None) if f.seat and f.seat.member in confined else f for f in scene.fates)
    survivors = sum(bool(fate.seat and not fate.fresh) for fate in fates)
    rung = Rung.RESTART if not survivors else Rung.REPLACE if any(f.seat and f.fresh for f in fates) else Rung.REFORM
    if strike is not plan.strike and strike and strike.count > 1:
        rung = Rung.RELOAD  # the state itself may be what fails: go back to what is on disk
    why, verdict = _why_lost(scene, condemned)
    if stop := _hopeless(scene):
        return stop
    move = _strike_or(scene, strike, lambda: scene.train(scene.arrange(fates, grow=False), why, rung, strike=strike))
    return replace(move, confine=confine, verdict=verdict)


def _condemned(scene: Scene) -> dict[Member, str]:
    """Seated members whose node the verdict proves unfit, and that policy and caps let us keep out."""
    finding, plan = scene.lead.finding, scene.plan
    if finding is None or plan is None or finding.answer.act is not Act.QUARANTINE:
        return {}
    if finding.verdict.confidence is not Confidence.HIGH or finding.verdict.fault is Fault.DEAD_NODE:
        return {}
    members = {seat.member: finding.verdict.said for seat in plan.seats if seat.member.node in finding.verdict.nodes}
    return {quarantine.member: quarantine.reason for quarantine in confinements(scene, members)}


def _why_lost(scene: Scene, condemned: Mapping[Member, str]) -> tuple[str, Verdict | None]:
    """Each loss in words: by the verdict where it is the one that it speaks of, and what it names beside them."""
    plan, finding = scene.plan, scene.lead.finding
    assert plan is not None
    verdict = finding.verdict if finding is not None else None
    known = verdict is not None and verdict.fault is not Fault.UNKNOWN and verdict.confidence is not Confidence.LOW
    said, told = [], False
    for fate, seat in zip(scene.fates, plan.seats, strict=True):
        named = known and verdict is not None and seat.member.node in verdict.nodes
        if verdict is not None and named and not told and (fate.fresh or seat.member in condemned):
            said.append(f"{seat.member}: {verdict.cause}")
            told = True
        elif fate.why:
            told = told or (bool(named) and verdict is not None and verdict.fault is Fault.DEAD_NODE)
            said.append(fate.why)
    why = "; ".join(said[:3])
    return why if told else with_cause(why, verdict), verdict


def _hopeless(scene: Scene) -> Move | None:
    """The job stops: what is proven broke it, and the operator has said that going on would only burn the cluster."""
    finding = scene.lead.finding
    if finding is None or finding.answer.act is not Act.STOP or finding.verdict.confidence is not Confidence.HIGH:
        return None
    seats = scene.plan.seats if scene.plan else ()
    plan = scene.write(Phase.STOP, seats, finding.answer.reason, exit_code=Outcome.CRASH_LOOP.value)
    return Move(plan=plan, verdict=finding.verdict)


def unsure(scene: Scene) -> Move | None:
    """The neighbours accuse each other across a cut: only a probe can tell who is where."""
    if scene.plan is None or scene.plan.phase is not Phase.TRAIN or not scene.conviction.unsure:
        return None
    why = "neighbours on both sides of a cut accuse each other: probing"
    return Move(plan=scene.write(Phase.PROBE, scene.kept, why, scene.plan.rung, strike=scene.plan.strike))


def late(scene: Scene) -> Move | None:
    """A rung that is not done by its deadline falls to the next."""
    plan = scene.plan
    if plan is None or plan.phase is not Phase.TRAIN or scene.trained:
        return None
    if scene.now < scene.deadline:
        return Move(wake_at=scene.deadline)
    silent = tuple(s for s in plan.seats if not ((r := scene.record_of(s)) and r.generation >= plan.generation))
    if not silent:
        why = f"the gang did not form within its {plan.rung.name.lower()} budget: probing"
        return Move(plan=scene.write(Phase.PROBE, scene.kept, why, plan.rung, strike=plan.strike))
    names = ", ".join(str(seat.member) for seat in silent[:3])
    why = f"{names} did not join within its {plan.rung.name.lower()} budget"
    if plan.rung is Rung.REFORM:
        born = scene.view.generation + 1
        seats = tuple(replace(s, born=born) if s in silent else s for s in scene.kept)
        return Move(plan=scene.train(seats, why, Rung.REPLACE, strike=plan.strike))
    confine = confinements(scene, {seat.member: why for seat in silent})
    fates = tuple(replace(f, seat=None) if s in silent else f for f, s in zip(scene.fates, plan.seats, strict=True))
    rung = max(plan.rung, Rung.REFORM)
    return Move(plan=scene.train(scene.arrange(fates, grow=False), why, rung, strike=plan.strike), confine=confine)


def stuck(scene: Scene) -> Move | None:
    """Members wait in a collective, or have left a broken one, and nobody has been found to blame."""
    plan = scene.plan
    if plan is None or plan.phase is not Phase.TRAIN or scene.lead.stalled_at is None:
        return None
    due = scene.lead.stalled_at + scene.settings.timeouts.confirm_s
    # Who has only left a broken group was not stalled: there the loss that broke it is found by itself.
    ask = bool(scene.doing[Work.STALLED]) and scene.view.look_revision <= scene.lead.asked
    if scene.now < due:
        return Move(wake_at=due, why="members have stalled; waiting for the one that is to blame", inspect=ask)
    patience = due + scene.settings.timeouts.dump_s
    if scene.now < patience and (why := _looked_at(scene)):
        return Move(wake_at=patience, why=why, inspect=ask)
    if stop := _hopeless(scene):
        return stop
    finding = scene.lead.finding
    if finding is not None and (move := _known(scene, finding)):
        return move
    verdict = finding.verdict if finding else None
    why = with_cause("members have stalled with nobody to blame", verdict) + ": probing"
    return Move(plan=scene.write(Phase.PROBE, scene.kept, why, plan.rung, strike=plan.strike), verdict=verdict)


def _looked_at(scene: Scene) -> str:
    """What is awaited before the scene of the stall is cleared: a look at each stalled node, or the end of its culprit."""
    plan = scene.plan
    assert plan is not None
    if not scene.doing[Work.STALLED]:
        return ""
    view = scene.view
    seen = (*scene.doing[Work.STALLED], *scene.doing[Work.TRAINING])
    if view.look_revision <= scene.lead.asked or any(record.looked < view.look_revision for record in seen):
        return "members have stalled; all workers are being looked at"
    blamed = {
        fact.node
        for fact in scene.lead.facts
        if fact.generation == plan.generation
        and fact.kind is Kind.BEAT
        and fact.sign in {Sign.STOPPED, Sign.HOST_STUCK}
    }
    still = [record for record in scene.doing[Work.TRAINING] if record.member.node in blamed]
    return f"{still[0].member} has the one that is to blame; waiting for its end" if still else ""


def _known(scene: Scene, finding: Finding) -> Move | None:
    """The scene has proven what it was: no probe is needed. Ranks that parted ways form their gang anew, where they may; a
    rank that is elsewhere gets a fresh process.
    """
    plan, verdict = scene.plan, finding.verdict
    assert plan is not None
    if verdict.confidence is not Confidence.HIGH:
        return None
    step = max((record.step for record in map(scene.record_of, plan.seats) if record), default=scene.view.committed)
    strike = strike_of(plan.strike, f"{verdict.fault.value}: {finding.answer.act.value}", step)
    why = verdict.said
    if verdict.fault is Fault.DESYNC:
        rung = Rung.REFORM if strike.count == 1 else Rung.RESTART
        move = _strike_or(scene, strike, lambda: scene.train(scene.kept, why, rung, strike=strike))
        return replace(move, verdict=verdict)
    if verdict.fault is not Fault.HOST_HANG or not verdict.ranks or finding.answer.act is Act.REPORT:
        return None
    born = scene.view.generation + 1
    sick = {
        seat.member
        for seat in plan.seats
        if {plan.first_rank(seat.member) + slot for slot in range(seat.slots)} & set(verdict.ranks)
    }
    warm = all(record.warm for seat in plan.seats if seat.member in sick and (record := scene.record_of(seat)))
    if not warm or len(sick) == len(plan.seats):
        return None
    seats = tuple(replace(seat, born=born) if seat.member in sick else seat for seat in scene.kept)
    move = _strike_or(scene, strike, lambda: scene.train(seats, why, Rung.REPLACE, strike=strike))
    return replace(move, verdict=verdict)


def recheck(scene: Scene) -> Move | None:
    """A gang on gloo in place of NCCL is probed now and then, each time after twice as long."""
    plan, health = scene.plan, scene.settings.health
    if plan is None or plan.phase is not Phase.TRAIN or not plan.backend or not scene.trained:
        return None
    wait_s = min(health.quarantine_max_s, health.quarantine_s * 2 ** max(0, plan.fallbacks - 1))
    due = scene.lead.backend_since + wait_s
    if scene.now < due:
        return Move(wake_at=due)
    why = "on gloo: probing whether NCCL is in order again"
    return Move(plan=scene.write(Phase.PROBE, scene.kept, why, plan.rung, strike=plan.strike))


def moved(scene: Scene) -> Move | None:
    """A vault answers elsewhere than the plan says: copies would wait for it for ever, so all hear where it is now."""
    plan = scene.plan
    if plan is None or plan.phase is not Phase.TRAIN or not scene.trained:
        return None
    found = {s.member: r.vault for s in plan.seats if (r := scene.record_of(s)) and r.vault and r.vault != s.vault}
    if not found:
        return None
    seats = tuple(replace(s, vault=found.get(s.member, s.vault)) for s in scene.kept)
    why = f"the vault of {', '.join(map(str, found))} answers at another port"
    return Move(plan=scene.train(seats, why, Rung.REFORM, strike=plan.strike))


def form(scene: Scene) -> Move | None:
    """No gang yet, or a held one: begin as soon as enough nodes are there and no more are coming."""
    plan = scene.plan
    if plan is not None and plan.phase is not Phase.HOLD:
        return None
    if scene.grace:  # found by seed 839: seats kept for those who might come back went to the dead
        return Move(wake_at=scene.grace_until, why="a new leader; waiting whether members without a record come back")
    seats = scene.arrange(scene.fates)
    need, most = scene.settings.membership.min_nodes, scene.settings.membership.max_nodes
    if len(seats) < need:
        others = sum(record.warm and record.bits != scene.bits for record in scene.records.values())
        unlike = f"; {others} compute other bits than the job" if others and scene.settings.exact == "require" else ""
        return Move(why=f"{len(seats)} of the {need} nodes it needs are ready{unlike}")
    if len(seats) < most and scene.now < scene.settled_at:
        return Move(wake_at=scene.settled_at, why=f"{len(seats)} nodes are ready; waiting whether more come")
    if plan is None:
        return Move(plan=scene.train(seats, "first plan", Rung.START))
    held = {seat.member for seat in plan.seats}
    survivors = any(fate.seat and not fate.fresh for fate in scene.fates)
    rung = Rung.REFORM if survivors else Rung.RESTART
    came = sum(seat.member not in held for seat in seats)
    return Move(
        plan=scene.train(seats, f"going on, {came} nodes joined" if came else "going on", rung, strike=plan.strike)
    )


def grow(scene: Scene) -> Move | None:
    """More nodes are ready than seated, and seating them makes steps shorter."""
    plan = scene.plan
    if plan is None or plan.phase is not Phase.TRAIN or not scene.candidates:
        return None
    seats = scene.arrange(scene.fates)
    came = len(seats) - len(plan.seats)
    lanes, before, after = scene.settings.lanes, plan.world, sum(seat.slots for seat in seats)
    if came <= 0:
        return None
    if scene.settings.membership.grow == "useful" and rounds(lanes, after) >= rounds(lanes, before):
        return None
    if scene.now < scene.settled_at:  # (the gang has formed: else `late` would have had the word)
        return Move(wake_at=scene.settled_at, why=f"{came} more nodes are ready; waiting whether more come")
    return Move(plan=scene.train(seats, f"{came} nodes joined", Rung.START, strike=plan.strike))


Rule = Callable[[Scene], Move | None]
RULES: tuple[Rule, ...] = (
    over,
    asked_to_stop,
    finished,
    asked_to_pause,
    probing,
    losses,
    unsure,
    late,
    moved,
    stuck,
    form,
    grow,
    recheck,
)


# ---- what the rules share


def strike_of(before: Strike | None, cause: str, step: int) -> Strike:
    """The same failure at the same step again, or a first one.

    Found by seed 1188: a worker that failed of something else in between must not make a crash loop look new.
    """
    if before and (before.cause, before.step) == (cause, step):
        return replace(before, count=before.count + 1)
    if before and before.count > 1 and step <= before.step:
        return before
    return Strike(cause=cause, step=step, count=1)


def _strike_or(scene: Scene, strike: Strike | None, go_on: Callable[[], Plan]) -> Move:
    limit = scene.settings.recovery.no_progress_limit
    if strike is None or strike.count < limit:
        return Move(plan=go_on())
    why = f"crash loop: {strike.cause}, {strike.count} times at step {strike.step} without progress"
    seats = scene.plan.seats if scene.plan else ()
    return Move(plan=scene.write(Phase.STOP, seats, why, strike=strike, exit_code=Outcome.CRASH_LOOP.value))


def _leaves_too_few(scene: Scene) -> Move | None:
    """When a leaving node cannot be spared, the gang holds, saves, and only then lets it go."""
    leaving = [fate for fate in scene.fates if fate.leaving]
    if not leaving or any(fate.seat is None and not fate.leaving for fate in scene.fates):
        return None
    assert scene.plan is not None
    if len(scene.arrange(scene.fates, grow=False)) >= scene.settings.membership.min_nodes:
        return None
    why = f"{leaving[0].why}, and without it too few are left: holding to save"
    return Move(plan=scene.write(Phase.HOLD, scene.plan.seats, why, strike=scene.plan.strike))


def _sick(scene: Scene, fate: Fate, seat: Seat) -> str:
    """Why this seat's node, which is up, should be kept out for a while; empty if it should not."""
    if scene.record_of(seat) is None:
        return ""
    if seat.member.node in scene.conviction.guilty:
        return fate.why
    failures = scene.lead.failures.get(seat.member.node)
    if fate.fresh and failures and failures.count >= scene.settings.health.node_strikes:
        return f"its worker failed {failures.count} times at step {failures.step}"
    return ""


def confinements(scene: Scene, reasons: Mapping[Member, str]) -> tuple[Quarantine, ...]:
    """Quarantines for these members, as long as enough are left and not too many are put away.

    Found by seed 243: each was weighed by itself, so a partition put away nine nodes of twelve at one stroke.
    """
    health, known, held = scene.settings.health, len(scene.records), len(scene.held)
    most = min(known - scene.settings.membership.min_nodes, max(1, int(health.quarantine_share * known)))
    room = max(0, most - held)
    fresh = [member for member in reasons if member.node not in scene.held and member.node in scene.records]
    before = scene.view.quarantines or {}
    return tuple(
        Quarantine(
            member=member,
            reason=reasons[member],
            strikes=before[member.node].strikes + 1 if member.node in before else 1,
        )
        for member in fresh[:room]
    )


def guard(scene: Scene) -> tuple[tuple[Quarantine, ...], float]:
    """Let those go who have served their time; each further quarantine of a node lasts twice as long."""
    health = scene.settings.health
    wake_at = inf
    released = []
    for node, quarantine in sorted(scene.held.items()):
        served_at = scene.lead.confined[node] + min(
            health.quarantine_max_s, health.quarantine_s * 2 ** (quarantine.strikes - 1)
        )
        if scene.now >= served_at:
            released.append(replace(quarantine, held=False))
        else:
            wake_at = min(wake_at, served_at)
    return tuple(released), wake_at
