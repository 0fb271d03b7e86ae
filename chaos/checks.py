"""The judge: what a history must not contain, whichever driver wrote it.

The one idea: a check reads facts that an outsider could have seen and knows nothing of the core's guards, so that a guard and
its check cannot be wrong together. Each check is a generator of sentences; no sentence, no violation.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from math import inf

from chaos.case import Case, Check, Complaint, Violation, node_of
from chaos.demands import every_fault_struck, what_was_expected
from chaos.faults import ALL
from chaos.history import (
    Asked,
    Began,
    Bug,
    Committed,
    Confined,
    Died,
    Eased,
    Elected,
    Ended,
    Expired,
    Fact,
    Halted,
    History,
    Left,
    Made,
    Planned,
    Repeated,
    Resumed,
    Saved,
    Sealed,
    Spun,
    Started,
    Struck,
)
from chaos.scenario import Scenario
from chaos.sim.gang import chain_whole
from elasticrl.contract.cause import Why
from elasticrl.contract.model import Phase, Plan, Rung
from elasticrl.contract.verdict import Fault as Class

STANDS = ("hang_worker", "stray_worker")
DEADLY = ("power_cut", "kill_node", "wrong_zone", "wrong_clock")  # to all of a node's processes
STOPPED = 75
WATCH_S = 3.0  # how long a decision may still rest on what was true before
KNOWN_S = 0.5  # until a life that began is known


# ---- the plan


def one_plan_per_generation(case: Case) -> Iterator[Complaint]:
    """Generations strictly rise, and each is written once. Whoever begins beside a store that has lost its data counts anew,
    but with nobody, itself among them, whose workers are in a later gang.
    """
    newest = shown = 0
    runs: dict[str, int] = {}  # in which generation each node's workers are (simulated)
    for fact in case.history:
        if isinstance(fact, Began):
            runs[fact.node] = fact.generation
        elif isinstance(fact, Died | Halted):
            runs.pop(fact.node, None)
        elif isinstance(fact, Left):
            runs.pop(node_of(fact.member), None)
        elif isinstance(fact, Struck):
            shown = 0 if fact.kind == "store_wiped" else shown
            for node in fact.nodes if fact.kind in (*DEADLY, "kill_agent") else ():
                runs.pop(node, None)
        elif isinstance(fact, Planned):
            number = fact.plan.generation
            if number not in (newest + 1, shown + 1) and not (fact.plan.again and number > newest):
                yield fact.at, f"generation {number} was written after {newest}"
            if number <= newest:
                here = (node_of(fact.by), *fact.plan.seated)
                yield from (
                    (fact.at, f"generation {number} was written beside workers of {node} in generation {runs[node]}")
                    for node in here
                    if runs.get(node, 0) > number
                )
            newest, shown = max(newest, number), number


def what_is_written_again_says_so(case: Case) -> Iterator[Complaint]:
    """A plan that the store had lost names that. Who trains forms anew for that cause alone, or starts again as a script; who
    holds goes on as before.
    """
    lost = (Why.STORE_LOST, Why.STORE_SET_BACK)
    for before, fact in pairwise(case.plans):
        plan, trains = fact.plan, fact.plan.phase is Phase.TRAIN
        if not plan.again:
            continue
        causes = [cause.why in lost for cause in plan.causes]
        in_place = case.scenario.shape.settings.means.in_place
        rungs = (Rung.REFORM, Rung.RELOAD) if in_place else (Rung.START, Rung.RESTART)
        if not causes[-1] or (trains and (len(causes) > 1 or plan.rung not in rungs)):
            yield fact.at, f"generation {plan.generation} is written again on rung {plan.rung}: {plan.reason}"
        if not trains and before.plan.phase is plan.phase and plan.rung is not before.plan.rung:
            yield (
                fact.at,
                f"generation {plan.generation} is written again on rung {plan.rung}, it was {before.plan.rung}",
            )


def a_plan_never_forgets_a_commit(case: Case) -> Iterator[Complaint]:
    """A plan resumes from the newest commit there is, also where the store has lost that."""
    lost = 0
    for fact in case.history:
        if isinstance(fact, Struck) and fact.kind == "store_wiped":
            lost = max(
                (each.step for each in case.history if isinstance(each, Committed) and each.at <= fact.at), default=0
            )
        if isinstance(fact, Planned) and fact.plan.resume not in (fact.committed, max(lost, fact.committed)):
            yield (
                fact.at,
                f"generation {fact.plan.generation} resumes {fact.plan.resume}, committed was {fact.committed}",
            )


def survivors_keep_their_order(case: Case) -> Iterator[Complaint]:
    """Whoever is in two plans in a row is before the same others in both. (Whoever writes one for workers whose plan nobody
    knows any more does not know their order.)
    """
    for before, after in pairwise(case.plans):
        if after.plan.again and after.plan.phase is Phase.HOLD:
            continue
        order = [seat.member for seat in before.plan.seats]
        places = {member: i for i, member in enumerate(order)}
        kept = [places[seat.member] for seat in after.plan.seats if seat.member in places]
        if kept != sorted(kept):
            yield after.at, f"generation {after.plan.generation} reorders the survivors of {before.plan.generation}"


def plans_are_sound(case: Case) -> Iterator[Complaint]:
    """Seats are of distinct nodes, within the limits, and none for a quarantined or departed member. No node is named twice."""
    settings = case.scenario.shape.settings
    membership, lanes = settings.membership, settings.lanes
    for fact in case.plans:
        named = [seat.member.node for seat in fact.plan.ring]
        if len(set(named)) != len(named):
            yield fact.at, f"generation {fact.plan.generation} names a node twice"
        if fact.plan.phase in (Phase.TRAIN, Phase.PROBE):
            yield from (
                (fact.at, f"generation {fact.plan.generation}: {fault}")
                for fault in _unsound(fact, membership.min_nodes, membership.max_nodes, lanes, settings.team)
            )


def _unsound(fact: Planned, min_nodes: int, max_nodes: int, lanes: int, team: int) -> Iterator[str]:
    plan = fact.plan
    nodes = [seat.member.node for seat in plan.seats]
    if plan.phase is Phase.TRAIN and not min_nodes <= len(nodes) <= max_nodes:
        yield f"{len(nodes)} seats, limits {min_nodes} and {max_nodes}"
    if plan.world > lanes * team:
        yield f"{plan.world} ranks in teams of {team} for {lanes} lanes"
    if plan.team != team:
        yield f"teams of {plan.team} in a job with teams of {team}"
    if plan.lanes != lanes:
        yield f"{plan.lanes} lanes for a job of {lanes}"
    confined = sorted(str(seat.member) for seat in plan.seats if str(seat.member) in fact.held)
    if confined:
        yield f"seats {', '.join(confined)}, quarantined"
    if plan.phase is Phase.TRAIN and not plan.endpoint:
        yield "no place to meet"
    if not plan.causes:
        yield "no cause"
    if any(cause.said == str(None) for cause in plan.causes):
        yield "a cause of it says what is not known"
    young = [seat for seat in plan.seats if seat.born > plan.generation]
    if young:
        yield f"{young[0].member} born in the future"


def _written_seats(plan: Plan) -> dict[str, int]:
    return {str(seat.member): seat.born for seat in plan.seats}


def only_the_living_are_seated(case: Case) -> Iterator[Complaint]:
    """No seat for a life that was over, or had left, well before the plan was written."""
    over: dict[str, float] = {}
    newest: dict[str, str] = {}
    shown = -inf
    for fact in case.rest:
        if isinstance(fact, Left):
            over[fact.member] = fact.at
        elif isinstance(fact, Struck) and fact.kind in DEADLY:
            over.update({newest[node]: fact.at for node in fact.nodes if node in newest})
        elif isinstance(fact, Started):
            node = node_of(fact.member)
            if newest.get(node, fact.member) != fact.member:
                over.setdefault(newest[node], fact.at)
            newest[node] = fact.member
        elif isinstance(fact, Planned) and fact.plan.again:
            shown = fact.at  # a store that was set back shows the dead, until their leases have run out
        elif isinstance(fact, Planned) and fact.plan.phase is Phase.TRAIN:
            if fact.at < shown + case.scenario.shape.settings.membership.lease_ttl_s + WATCH_S:
                continue
            shape = case.scenario.shape  # news that comes apart is late by as much
            patience = shape.settings.membership.lease_ttl_s + WATCH_S + shape.apart_s + _store_trouble(case, fact.at)
            for seat in fact.plan.seats:
                ended = over.get(str(seat.member))
                if ended is not None and fact.at - ended > patience:
                    yield fact.at, f"generation {fact.plan.generation} seats {seat.member}, over since {ended:.1f} s"


def a_pause_is_heeded(case: Case) -> Iterator[Complaint]:
    """No gang is started long after operators asked for a pause, but to save before its nodes leave."""
    for fact in case.plans:
        if (
            fact.plan.phase is Phase.TRAIN
            and not fact.plan.saves
            and fact.paused_s > WATCH_S + _store_trouble(case, fact.at)
        ):
            yield fact.at, f"generation {fact.plan.generation} trains {fact.paused_s:.1f} s after a pause was asked"


def only_a_leader_writes(case: Case) -> Iterator[Complaint]:
    """Whoever writes a plan holds the leader's office, and its lease by any clock."""
    leader = ""
    for fact in case.rest:
        if isinstance(fact, Elected):
            leader = fact.member
        elif isinstance(fact, Planned):
            if fact.by != leader and not fact.plan.again:
                yield fact.at, f"{fact.by} wrote generation {fact.plan.generation}, the leader was {leader}"
            slack = 0.06 * case.scenario.shape.settings.membership.lease_ttl_s + 0.05
            if fact.lapsed_s > slack:
                yield fact.at, f"{fact.by} led {fact.lapsed_s:.2f} s after its lease may have lapsed"


def the_innocent_keep_their_office(case: Case) -> Iterator[Complaint]:
    """Nobody takes the leader's office from a member that nothing has befallen."""
    guilty, leader = _Guilt(case), ""
    for fact in case.history:
        guilty.see(fact)
        if isinstance(fact, Struck | Eased) and fact.kind in ("store_wiped", "store_set_back"):
            leader = ""
        elif isinstance(fact, Elected):
            if leader not in ("", fact.member) and not guilty.touched(leader):
                yield fact.at, f"{fact.member} took the office from {leader}, which nothing befell"
            leader = fact.member


def the_innocent_keep_their_seats(case: Case) -> Iterator[Complaint]:
    """A member that nothing has befallen is not put out of the plan, nor are its workers started afresh for others' sake. Who
    was to come into a gang that trains may be left behind where that gang has to form before it has grown, as far as its leader
    can know: one without a seat in it knows by the store alone (found by seed 42003124).
    """
    guilty = _Guilt(case)
    before: Plan | None = None
    formed: dict[int, float] = {}  # when each generation did
    news_s = case.scenario.shape.apart_s + KNOWN_S
    for fact in case.history:
        if isinstance(fact, Resumed):
            formed[fact.generation] = fact.at
        if not isinstance(fact, Planned):
            guilty.see(fact)
            continue
        plan = fact.plan
        if before is not None and plan.phase is not Phase.STOP and before.phase is not Phase.STOP:
            here, there = _written_seats(plan), _written_seats(before)
            untold = fact.by not in there and (guilty.late or fact.at < formed.get(before.generation, inf) + news_s)
            for seat in before.seats:
                member = str(seat.member)
                grown = before.generation in formed and not untold
                if before.grows and seat.born == before.generation and not grown:
                    continue
                if member not in here and not guilty.touched(member):
                    yield (
                        fact.at,
                        f"generation {plan.generation} puts out {member}, which nothing befell: {plan.reason}",
                    )
                elif (
                    case.scenario.shape.settings.means.in_place
                    and _restarts(before, plan, here.get(member))
                    and not (guilty.touched(member) or guilty.misled(fact.by))
                ):
                    yield (
                        fact.at,
                        f"generation {plan.generation} restarts {member}, which nothing befell: {plan.reason}",
                    )
        before = plan
        guilty.see(fact)


def _restarts(before: Plan, plan: Plan, born: int | None) -> bool:
    """Does this plan give a running seat fresh workers, on a rung that has no need of that?"""
    running = before.phase is Phase.TRAIN and plan.phase is Phase.TRAIN
    # Of a lower number it is by somebody who began beside an empty store: who knows better follows the other.
    known = plan.generation > before.generation
    return running and known and plan.rung <= Rung.REPLACE and born == plan.generation


class _Guilt:
    """Who was touched by anything, so far."""

    def __init__(self, case: Case) -> None:
        settings = case.scenario.shape.settings
        self.nodes: set[str] = set()
        self.gone: dict[str, float] = {}  # since when
        self.loop = False
        self.all = bool(case.scenario.shape.evaluates_every)  # what some steps have and others have not befalls all
        self.seats: frozenset[str] = frozenset()
        self.alien = set(case.scenario.shape.alien)
        self.lossy, self.slow, self.cut, self.shown = _Trouble(), _Trouble(), _Trouble(), _Trouble()
        self.lease_s = settings.membership.lease_ttl_s + 2 * settings.retry_s + WATCH_S
        # What the store brings late may miss the deadline of its rung.
        self.rung_s = settings.recovery.replace_s + 2 * settings.retry_s + WATCH_S
        self.now = 0.0

    def see(self, fact: Fact) -> None:
        """One more fact."""
        self.now = fact.at
        if isinstance(fact, Struck):
            self.nodes.update(fact.nodes)
            self.loop = self.loop or fact.kind in {"crash_loop", "refused_loop"}
        if isinstance(fact, Struck | Eased):
            cut, shown = ("isolate", "lossy_node"), ("stale_view",)
            for trouble, kinds in ((self.lossy, LOSSY), (self.slow, SLOW), (self.cut, cut), (self.shown, shown)):
                trouble.see(fact, kinds)
        elif isinstance(fact, Planned):
            self.seats = frozenset(seat.member.node for seat in fact.plan.seats)
            back = {str(seat.member) for seat in fact.plan.seats}
            if not self.lossy.felt(fact.at, self.lease_s):  # else what ran out once may at any moment again (seed 826)
                self.gone = {m: at for m, at in self.gone.items() if m not in back or fact.at < at + self.lease_s}
        elif isinstance(fact, Ended) and fact.lively:  # live, where one scenario comes after the other: all train again
            self.nodes.clear()
            self.gone.clear()
            self.loop = False
        elif isinstance(fact, Left) or (isinstance(fact, Expired) and self.lossy.felt(fact.at, self.lease_s)):
            # Through a store that loses requests a lease can run out although nobody did anything wrong.
            self.gone[fact.member] = fact.at

    @property
    def late(self) -> bool:
        """Does the store bring things late, or did it until a moment ago?"""
        return self.slow.felt(self.now, self.rung_s)

    def misled(self, writer: str) -> bool:
        """Does this member see late what the store brings, as the store is slow, or as it is shown the past (seed 45004562)?"""
        return self.late or node_of(writer) in self.shown.upon(self.now, self.rung_s)

    def touched(self, member: str) -> bool:
        """Has anything befallen this member or its links? The last one that hears, alone among the deaf, may pass for deaf."""
        deaf = self.cut.upon(self.now, self.lease_s)
        if self.seats & deaf and len(self.seats - deaf) <= 1:
            return True
        return self.all or self.loop or node_of(member) in {*self.nodes, *self.alien} or member in self.gone


LOSSY = ("store_loss", "store_delay", "slow_store_disk")
SLOW = ("store_loss", "store_delay", "store_repeat", "store_outage", "store_failover")


class _Trouble:
    """Faults of some kinds: whether one is felt at a time."""

    def __init__(self) -> None:
        self.active: dict[int, tuple[str, ...]] = {}
        self.until: dict[str, float] = {}  # when the last one of each node ended
        self.ended = -inf

    def see(self, fact: Struck | Eased, kinds: tuple[str, ...]) -> None:
        """One begins or ends."""
        if fact.kind not in kinds:
            return
        if isinstance(fact, Struck) and ALL[fact.kind].for_s is not None:
            self.active[fact.number] = fact.nodes
        else:
            self.until.update(dict.fromkeys(self.active.pop(fact.number, ()), fact.at))
            self.ended = fact.at

    def felt(self, at: float, after_s: float) -> bool:
        """Is one active, or has it ended not long ago?"""
        return bool(self.active) or at < self.ended + after_s

    def upon(self, at: float, after_s: float) -> frozenset[str]:
        """Which nodes feel one."""
        lately = (node for node, ended in self.until.items() if at < ended + after_s)
        return frozenset(lately).union(*self.active.values())


def the_innocent_are_not_quarantined(case: Case) -> Iterator[Complaint]:
    """A node with no fault on itself or on any link it uses is never quarantined."""
    guilty = _Guilt(case)
    for fact in case.history:
        guilty.see(fact)
        if isinstance(fact, Confined) and fact.held and not guilty.touched(fact.member):
            yield fact.at, f"{fact.member} was quarantined though nothing befell it: {fact.cause}"


def quarantines_are_few(case: Case) -> Iterator[Complaint]:
    """Never so many at once that the job cannot go on, nor more than the share allowed (one may always be)."""
    settings = case.scenario.shape.settings
    most = max(1, int(settings.health.quarantine_share * case.scenario.shape.nodes))
    held: dict[str, Confined] = {}
    lives: dict[str, str] = {}
    for fact in case.rest:
        if isinstance(fact, Started):
            lives[node_of(fact.member)] = fact.member
        elif isinstance(fact, Confined):
            held[fact.node] = fact
            bound = [n for n, q in held.items() if q.held and (q.strikes > 2 or lives.get(n) == q.member)]
            if fact.held and fact.node in bound and len(bound) > most:
                yield fact.at, f"{len(bound)} nodes are quarantined at once: {', '.join(sorted(bound))}"


def quarantines_name_the_living(case: Case) -> Iterator[Complaint]:
    """A quarantine is of the life that is to blame: not of one that was over, known to all, before it."""
    newest: dict[str, tuple[str, float]] = {}
    before: dict[str, tuple[str, float]] = {}
    for fact in case.rest:
        if isinstance(fact, Started):
            node = node_of(fact.member)
            if newest.get(node, ("", 0.0))[0] != fact.member:
                before[node] = newest.get(node, (fact.member, fact.at))
                newest[node] = fact.member, fact.at
        elif isinstance(fact, Struck) and fact.kind in {"power_cut", "kill_node"}:
            # Found by seed 315: a life that was over after a tenth of a second, and of which nobody had heard.
            newest |= {
                node: before[node] for node in fact.nodes if node in newest and fact.at < newest[node][1] + KNOWN_S
            }
        elif isinstance(fact, Confined) and fact.held:
            member, since = newest.get(fact.node, (fact.member, 0.0))
            known = since + KNOWN_S + _store_trouble(case, fact.at)
            if member != fact.member and fact.at > known:
                yield fact.at, f"{fact.member} was quarantined, and {member} runs since {since:.1f} s: {fact.cause}"


def nothing_happens_after_the_end(case: Case) -> Iterator[Complaint]:
    """A stopped job stays stopped. Its gang may form once more to save, smaller each time, while all of it are still there and
    nothing is saved; and then it stops.
    """
    stop: Planned | None = None
    left: set[str] = set()
    sealed, resumes = 0, False
    for fact in case.history:
        if isinstance(fact, Struck) and fact.kind == "start_again":
            stop, resumes = None, False
        elif isinstance(fact, Left):
            left.add(fact.member)
        elif isinstance(fact, Sealed):
            sealed = max(sealed, fact.step)
        elif isinstance(fact, Planned):
            told_again = fact.plan.again and fact.plan.phase is Phase.STOP  # to a store that had lost the end
            if stop is not None and not told_again:
                before, after = ({str(seat.member) for seat in each.plan.seats} for each in (stop, fact))
                unsaved = fact.committed < sealed and not left & before and stop.plan.exit_code == STOPPED
                if not (fact.plan.saves and fact.plan.phase is Phase.TRAIN and after < before and unsaved):
                    yield fact.at, f"generation {fact.plan.generation} was written after the job's end"
                stop, resumes = None, True
            if fact.plan.phase is Phase.STOP:
                stop, resumes = fact, False
    if resumes:
        yield case.history[-1].at, "the job was stopped, formed once more to save, and went on"


def a_job_ends_for_a_reason(case: Case) -> Iterator[Complaint]:
    """STOP only when an operator asked, in the moment or by a policy, all steps are made, or the program fails again and again
    at one step.
    """
    settings = case.scenario.shape.settings
    for fact in case.plans:
        plan = fact.plan
        if plan.phase is not Phase.STOP:
            continue
        asked = any(isinstance(f, Asked) and f.verb == "stop" and f.at <= fact.at for f in case.rest)
        made = bool(settings.steps) and fact.committed >= settings.steps
        sealed = (f.step for f in case.rest if isinstance(f, Sealed) and f.at <= fact.at)
        made = made or 0 < case.scenario.shape.script_steps <= max(sealed, default=-1) + 1
        limit = settings.recovery.no_progress_limit
        before = [told for told in case.rest if told.at <= fact.at or _died_under(told, plan.generation - 1)]
        looped = _most_in_vain(before, case.scenario.shape.updates) >= limit
        befell = [f.kind for f in case.rest if isinstance(f, Struck) and f.at <= fact.at]
        ends = plan.causes[0]
        # A program may hang, or its ranks part ways, at one step again and again, too.
        hung = ends.fault is Class.HOST_HANG and sum(kind in STANDS for kind in befell) >= limit
        hung = hung or (ends.fault is Class.DESYNC and "part_ways" in befell)
        struck = plan.strike.cause.why if plan.strike else None
        willed = settings.policy.get("dead_rank") == "stop" and any(isinstance(told, Died) for told in before)
        says_stop = (
            ends.why is Why.POLICY and ends.fault is not None and settings.policy.get(ends.fault.value) == "stop"
        )
        willed = willed or (says_stop and bool(befell))
        # Its program asks for no rank in time; or it would, and stood still before.
        never = case.scenario.shape.load_s > settings.recovery.start_s
        never = never or (struck is Why.UNCALLED and sum(kind in STANDS for kind in befell) >= limit)
        stalled = struck in {Why.STALLED, Why.UNFORMED}  # and nobody to blame, as often as the limit says
        own = any(isinstance(told, Died) and told.own for told in before)
        at_once = ends.why is Why.ENDED_AT_ONCE and own and not settings.means.joins
        refused = ends.why is Why.CRASH_LOOP and "refused_loop" in befell  # nobody's own doing, and nobody had gone
        ill = looped or refused or hung or willed or never or stalled or at_once
        right = {75: asked, 0: made, 70: ill}.get(plan.exit_code or 0, False)
        if not right:
            yield fact.at, f"the job was stopped with {plan.exit_code}: {plan.reason}"


def _died_under(fact: Fact, generation: int) -> bool:
    """Did somebody die under this plan or an earlier one? What answers it may be told before it: each log is read by itself."""
    return isinstance(fact, Died) and fact.generation <= generation


def _most_in_vain(history: Iterable[Fact], updates: int) -> int:
    """How often the program failed by its own doing at most, with the job never beyond the step of the first of these.

    A worker that fails as it starts has no step: it fails where the job had got to (seed 355), or was thrown back to (6616).
    That others have sealed one step more than the one who fails again knows of is no progress (found live).
    """
    most = count = newest = 0
    reached = -1
    for fact in history:
        if isinstance(fact, Sealed):
            newest = fact.step
        elif isinstance(fact, Resumed):
            newest = fact.version // updates
        elif isinstance(fact, Died) and fact.own:
            step = fact.step or newest
            count = 1 if step > reached else count + 1
            reached, most = max(reached, step), max(most, count)
    return most


def a_crash_loop_ends(case: Case) -> Iterator[Complaint]:
    """A failure at the same step, without progress, more often than the limit: the job should have stopped."""
    limit = case.scenario.shape.settings.recovery.no_progress_limit
    deaths: dict[int, int] = defaultdict(int)
    sealed = -1
    for fact in case.rest:
        if isinstance(fact, Sealed) and fact.step > sealed:
            sealed = fact.step
            deaths = defaultdict(int, {step: n for step, n in deaths.items() if step >= sealed})
        elif isinstance(fact, Died) and fact.own and "bad prompt" in fact.cause:
            deaths[fact.step] += 1
            if deaths[fact.step] == limit + 2:
                yield fact.at, f"{fact.cause} at step {fact.step} for the {limit + 2}th time, the limit is {limit}"


def a_rung_does_what_it_says(case: Case) -> Iterator[Complaint]:
    """REPLACE, when it is taken, names whose workers are fresh; RESTART and RELOAD start all of them afresh."""
    before = Rung.START
    for fact in case.plans:
        plan = fact.plan
        fresh = sum(seat.born == plan.generation for seat in plan.seats)
        want = len(plan.seats) if plan.rung >= Rung.RESTART else int(before < plan.rung is Rung.REPLACE)
        before = plan.rung
        if plan.phase is Phase.TRAIN and fresh < want and not plan.again:
            yield fact.at, f"generation {plan.generation} ({plan.rung.name}) starts {fresh} of {len(plan.seats)} afresh"


def scripts_begin_afresh(case: Case) -> Iterator[Complaint]:
    """Below job.level exact each gang has fresh processes on all nodes; a restart for growth comes no sooner than allowed."""
    settings, before = case.scenario.shape.settings, None
    if settings.means.in_place:
        return
    for fact in case.history:
        if isinstance(fact, Began) and not fact.fresh:
            yield fact.at, f"{fact.node} was told to go on in generation {fact.generation}"
        if not isinstance(fact, Planned) or fact.plan.phase is not Phase.TRAIN:
            continue
        old = [str(seat.member) for seat in fact.plan.seats if seat.born != fact.plan.generation]
        if old:
            yield fact.at, f"generation {fact.plan.generation} has processes of an earlier one: {', '.join(old)}"
        grows = {cause.why for cause in fact.plan.causes} == {Why.JOINED}
        if before is not None and grows and fact.at < before + settings.membership.grow_every_s - 0.5:
            yield fact.at, f"generation {fact.plan.generation} grows {fact.at - before:.1f} s after the last start"
        before = fact.at


def a_gang_speaks_one_wire(case: Case) -> Iterator[Complaint]:
    """Workers that would not understand each other are not seated together."""
    foreign = set(case.scenario.shape.foreign)
    for fact in case.plans:
        nodes = {seat.member.node for seat in fact.plan.seats}
        if nodes & foreign and nodes - foreign:
            yield (
                fact.at,
                f"generation {fact.plan.generation} seats {min(nodes & foreign)} beside {min(nodes - foreign)}",
            )


def the_job_keeps_its_bits(case: Case) -> Iterator[Complaint]:
    """Who computes other bits than the first gang is never seated."""
    alien = set(case.scenario.shape.alien)
    first = next((fact.plan for fact in case.plans if fact.plan.phase is Phase.TRAIN and fact.plan.seats), None)
    other = first is not None and first.seats[0].member.node in alien
    for fact in case.plans:
        wrong = [seat.member for seat in fact.plan.seats if (seat.member.node in alien) != other]
        if wrong:
            yield fact.at, f"generation {fact.plan.generation} seats {wrong[0]}, which computes other bits"


def growth_waits_for_the_gang(case: Case) -> Iterator[Complaint]:
    """A gang that has not yet formed is not broken up to make it larger. (Of a script nobody knows when it has: there time is
    what counts, see scripts_begin_afresh.)
    """
    if not case.scenario.shape.settings.means.joins:
        return
    resumed: set[int] = set()
    before: Plan | None = None
    for fact in case.rest:
        if isinstance(fact, Resumed):
            resumed.add(fact.generation)
        elif isinstance(fact, Planned):
            plan = fact.plan
            grown = before is not None and {seat.member for seat in before.seats} < {seat.member for seat in plan.seats}
            both = before is not None and before.phase is Phase.TRAIN and plan.phase is Phase.TRAIN
            if before and both and grown and plan.rung is Rung.START and before.generation not in resumed:
                yield fact.at, f"generation {plan.generation} grows {before.generation}, which had not formed"
            before = plan


def a_seat_is_filled_as_planned(case: Case) -> Iterator[Complaint]:
    """Where a plan asks for fresh workers, living ones do not go on: they, or their state, are what it distrusts."""
    fresh: set[tuple[str, int]] = set()
    for fact in case.history:
        if isinstance(fact, Planned):
            born = fact.plan.generation
            fresh.update((seat.member.node, born) for seat in fact.plan.seats if seat.born == born)
            fresh.difference_update((seat.member.node, born) for seat in fact.plan.seats if seat.born != born)
        elif isinstance(fact, Began) and not fact.fresh and (fact.node, fact.generation) in fresh:
            yield fact.at, f"{fact.node} reformed for generation {fact.generation}, which asked for fresh workers"


def orders_are_given_once(case: Case) -> Iterator[Complaint]:
    """What was ordered has its time to work before it is ordered again."""
    for fact in case.rest:
        if isinstance(fact, Repeated):
            yield fact.at, f"{fact.node} was told {fact.order} {fact.times} times in a row"


def no_worker_ends_for_an_older_plan(case: Case) -> Iterator[Complaint]:
    """Workers that have joined a generation are not ended because an earlier plan had no seat for them."""
    for fact in case.rest:
        if isinstance(fact, Halted) and fact.under < fact.generation:
            yield fact.at, f"{fact.node} ended its workers of generation {fact.generation} for plan {fact.under}"


# ---- commits and versions


def only_who_has_joined_commits(case: Case) -> Iterator[Complaint]:
    """A generation that trains is not committed for by a node whose workers are not in it. A gang that has made all steps joins
    none that would add to it, and commits under that plan whatever it has saved (found by seeds 140 and 41000591, with news
    that came apart).
    """
    heads: dict[int, str] = {}
    first = {fact.plan.seats[0].member.node for fact in case.plans if fact.plan.seats}
    joined: set[tuple[str, int]] = set()  # of those that head some gang
    ended: set[int] = set()  # generations that add to a gang, which may have ended before
    all_made: set[int] = set()  # generations that have made the last step there is
    last = case.scenario.shape.settings.steps * case.scenario.shape.updates
    for fact in case.history:
        if isinstance(fact, Planned) and fact.plan.phase is Phase.TRAIN and fact.plan.seats:
            heads[fact.plan.generation] = fact.plan.seats[0].member.node
            if fact.plan.grows and (heads[fact.plan.generation], fact.plan.generation - 1) in joined:
                ended.add(fact.plan.generation)
        elif isinstance(fact, Began) and fact.node in first:
            joined.add((fact.node, fact.generation))
        elif isinstance(fact, Sealed | Made) and fact.version == last:
            all_made.add(fact.generation)
        elif isinstance(fact, Committed) and fact.generation in heads:
            head = heads[fact.generation]
            done = fact.generation in ended and fact.generation - 1 in all_made
            if (head, fact.generation) not in joined and not done:
                yield fact.at, f"step {fact.step} was committed by generation {fact.generation}, which {head} is not in"


def commits_only_rise(case: Case) -> Iterator[Complaint]:
    """Each commit is of a later step, by the newest generation, and of a save that is whole."""
    step = generation = 0
    manifest, lost = "", False  # a store that has lost its data may be told the newest of its commits once more
    whole = {fact.manifest: fact for fact in case.rest if isinstance(fact, Saved) and fact.whole}
    for fact in case.rest:
        if isinstance(fact, Planned):
            generation = max(generation, fact.plan.generation)
        elif isinstance(fact, Struck | Eased):
            lost = lost or fact.kind in ("store_wiped", "store_set_back")
        elif isinstance(fact, Committed):
            if fact.step <= step and not (lost and fact.manifest == manifest):
                yield fact.at, f"step {fact.step} was committed after {step}"
            if fact.generation != generation and not lost:  # a store that was set back knows of none of the later plans
                yield fact.at, f"generation {fact.generation} committed step {fact.step} under plan {generation}"
            save = whole.get(fact.manifest)
            if save is None or save.step != fact.step or save.at > fact.at:
                yield fact.at, f"step {fact.step} was committed without a whole save ({fact.manifest})"
            step, manifest, lost = max(step, fact.step), fact.manifest, False


def no_sample_is_lost_or_used_twice(case: Case) -> Iterator[Complaint]:
    """Each rank carries its own lanes and together they carry all; each update follows the one before it."""
    lanes = case.scenario.shape.settings.lanes
    version: dict[int, int] = {}
    for fact in case.rest:
        if isinstance(fact, Resumed):
            carried = [lane for first, end in fact.ranges for lane in range(first, end)]
            if carried != list(range(lanes)):
                yield fact.at, f"generation {fact.generation} carries lanes {fact.ranges}, not each of {lanes} once"
            version[fact.generation] = fact.version
        elif isinstance(fact, Sealed | Made):
            if fact.version != version.get(fact.generation, -2) + 1:
                yield (
                    fact.at,
                    f"generation {fact.generation} made {fact.version} after {version.get(fact.generation)}",
                )
            version[fact.generation] = fact.version


def the_bits_are_the_same(case: Case) -> Iterator[Complaint]:
    """Every version, wherever it was made or read, is the undisturbed run's."""
    lanes = case.scenario.shape.settings.lanes
    digests = [""]
    for fact in case.rest:
        if isinstance(fact, Resumed | Sealed | Saved):
            while len(digests) <= fact.version:
                digests.append(chain_whole(digests[-1], len(digests), lanes))
            if fact.digest != digests[fact.version]:
                yield (
                    fact.at,
                    f"version {fact.version} has digest {fact.digest}, undisturbed it is {digests[fact.version]}",
                )


def no_committed_step_is_made_again(case: Case) -> Iterator[Complaint]:
    """A gang goes on from the newest commit that its plan knew, or later, unless that checkpoint rotted."""
    updates = case.scenario.shape.updates
    resume: dict[int, int] = {}
    rotten = 0  # so many commits until what was hit is none that anybody goes on from
    for fact in case.rest:
        if isinstance(fact, Planned):
            resume[fact.plan.generation] = fact.plan.resume
        elif isinstance(fact, Struck):
            rotten = (
                2 if fact.kind in ("corrupt_save", "tear_save") else rotten
            )  # what was hit may not be committed yet
        elif isinstance(fact, Committed):
            rotten = max(0, rotten - 1)
        elif isinstance(fact, Resumed) and fact.version < resume[fact.generation] * updates and not rotten:
            yield (
                fact.at,
                f"generation {fact.generation} goes back to {fact.version}, step {resume[fact.generation]} was committed",
            )


TOLD_S = 0.3  # the longest from when a version is sealed until the last worker has told it


def no_sealed_step_is_lost(case: Case) -> Iterator[Complaint]:  # noqa: C901 - a table of facts
    """While each shard has a living copy among them, a gang goes on from the newest version that was sealed.

    Real workers tell one after the other that a version is sealed, and some time after it is: what was lost meanwhile may have
    held it. What a gang seals after a later one has formed is of a branch that was left, where any of it could not know that
    (found by seed 46000054: one that was cut from the store alone trained on). So is a gang that forms under an earlier number,
    or under the same once more: by who began beside a store that had lost its data.
    """
    if case.scenario.shape.script_saves > 1:
        return  # what a script has not saved is lost with its processes
    copies = case.scenario.shape.settings.copies
    newest, ring = -1, tuple[str, ...]()  # of whom sealed it, in rank order
    lost: dict[str, float] = {}
    plans = {fact.plan.generation: fact.plan for fact in case.plans}
    gangs: dict[int, tuple[str, ...]] = {}
    twice: set[int] = set()  # numbers that two gangs have had
    deaf = _Deaf(case)
    for fact in case.rest:
        if isinstance(fact, Struck | Eased):
            deaf.see(fact)
        if isinstance(fact, Struck) and fact.kind in (*DEADLY, "lose_vault"):
            lost.update(dict.fromkeys(fact.nodes, fact.at))
        elif isinstance(fact, Left):
            lost[node_of(fact.member)] = fact.at
        elif isinstance(fact, Sealed):
            # (Of what real workers tell late it is not known which was first.)
            left = fact.generation < max(gangs) and (
                fact.after is not None or deaf.among(gangs[fact.generation], fact.at)
            )
            if fact.version > newest and not left and fact.generation not in twice:
                newest, ring = fact.version, gangs[fact.generation]
                since = fact.at - TOLD_S if fact.after is None else min(fact.after, fact.at - TOLD_S)
                lost = {node: at for node, at in lost.items() if at > since}
        elif isinstance(fact, Resumed):
            if gangs.setdefault(fact.generation, fact.nodes) != fact.nodes:
                twice.add(fact.generation)
            if fact.generation in twice or fact.generation < max(gangs):
                continue
            gangs[fact.generation] = fact.nodes
            missing = {node for node in ring if node in lost or node not in fact.nodes}
            reload = plans[fact.generation].rung is Rung.RELOAD
            if fact.version < newest and _whole(ring, missing, copies) and not reload:
                yield (
                    fact.at,
                    f"generation {fact.generation} goes back from {newest} to {fact.version}; missing {sorted(missing)}",
                )
            if fact.version != newest:  # else it lies as it was sealed, until the next is
                newest, ring, lost = fact.version, fact.nodes, {}


class _Deaf:
    """Which nodes do not know what the store shows, or did not until a moment ago."""

    def __init__(self, case: Case) -> None:
        settings = case.scenario.shape.settings
        self.store, self.own = _Trouble(), _Trouble()
        self.after_s = settings.membership.lease_ttl_s + 2 * settings.retry_s + WATCH_S

    def see(self, fact: Struck | Eased) -> None:
        """A fault begins or ends."""
        self.store.see(fact, (*SLOW, "store_compaction", "store_wiped", "store_set_back"))
        self.own.see(fact, ("cut_store", "stale_view", "kill_daemon", "pause_daemon", "pause_node", "kill_agent"))

    def among(self, nodes: Collection[str], at: float) -> bool:
        """Is any of these one?"""
        return self.store.felt(at, self.after_s) or not self.own.upon(at, self.after_s).isdisjoint(nodes)


def _whole(ring: Sequence[str], missing: Collection[str], copies: int) -> bool:
    """Whether each node's shard lies with one who is not missing: itself, or one of the `copies` behind it."""
    reach = range(min(copies, len(ring) - 1) + 1)
    return all(any(ring[(i + hop) % len(ring)] not in missing for hop in reach) for i in range(len(ring)))


def disks_are_the_last_resort(case: Case) -> Iterator[Complaint]:
    """Rung 4 only after the program failed by its own doing, or the rungs below it did not help."""
    before: Plan | None = None
    for fact in case.plans:
        plan = fact.plan
        if plan.phase is Phase.TRAIN and plan.rung is Rung.RELOAD:
            failed = plan.strike is not None
            if not failed and (before is None or before.rung < Rung.RESTART):
                yield fact.at, f"generation {plan.generation} reads the disk: {plan.reason}"
        before = plan


# ---- life


def _formed(case: Case, at: float) -> bool:
    """Had the newest gang formed by then?"""
    plans = [fact.plan.generation for fact in case.plans if fact.at <= at]
    return any(isinstance(f, Resumed) and f.at <= at and f.generation == plans[-1] for f in case.rest if plans)


def a_hang_is_ended(case: Case) -> Iterator[Complaint]:
    """A worker that stands still is dealt with within its phase's budget, when nothing else is wrong."""
    struck = [fact for fact in case.rest if isinstance(fact, Struck)]
    settings = case.scenario.shape.settings
    if not settings.means.joins and not settings.timeouts.quiet_s:
        return  # nobody has promised to see it
    for fact in struck:
        if fact.kind != "hang_worker" or any(
            f.kind not in ("hang_worker", "slow_worker", "kill_worker") for f in struck
        ):
            continue
        limit = settings.timeouts.default_phase_s + settings.timeouts.confirm_s + 3
        limit += 2 * case.scenario.shape.step_s * max(1.0, *(6.0 for f in struck if f.kind == "slow_worker"), 1.0)
        if not _formed(case, fact.at) or "forming" in fact.detail or "reform" in fact.detail:
            # It has no phase yet: its rung's deadline speaks (seed 1015), a longer one where all begin afresh (seed 45001997).
            recovery = settings.recovery
            *_, rung = Rung.START, *(plan.plan.rung for plan in case.plans if plan.at <= fact.at)
            afresh = {Rung.RESTART: recovery.restart_s, Rung.RELOAD: recovery.reload_s}.get(rung, 0.0)
            limit += max(recovery.start_s, recovery.reform_s, recovery.replace_s, afresh)
        later = [f for f in case.rest if fact.at < f.at <= fact.at + limit]
        seen = any(isinstance(f, Planned | Died) for f in later)
        if next((plan.plan.phase is Phase.STOP for plan in reversed(case.plans) if plan.at <= fact.at), False):
            # Its node ends it with the others as the job ends (seed 47000520).
            seen = seen or any(isinstance(f, Halted) and f.node in fact.nodes for f in later)
        end = case.rest[-1].at
        if not seen and end > fact.at + limit:
            yield fact.at, f"{fact.nodes[0]} hung, and nothing was done about it within {limit:.1f} s"


def a_drained_node_leaves_cleanly(case: Case) -> Iterator[Complaint]:
    """Asked to leave, a node leaves with code 0 in its time, and is in no later plan in this life."""
    over = False
    for fact in case.rest:
        if isinstance(fact, Planned):
            over = over or fact.plan.phase is Phase.STOP
        elif isinstance(fact, Left) and fact.code not in ((0, 70, 75) if over else (0,)):
            yield fact.at, f"{fact.member} left with {fact.code}{'' if over else ', and the job goes on'}"


def nobody_spins(case: Case) -> Iterator[Complaint]:
    """No core is asked more often than what happens can explain."""
    for fact in case.rest:
        if isinstance(fact, Spun):
            yield fact.at, f"{fact.node} made {fact.steps} steps in one second"
    budget = (
        6
        + 8 * sum(isinstance(f, Struck | Eased) for f in case.rest)
        + sum(isinstance(f, Died | Started | Asked) for f in case.rest) * 4
    )
    if len(case.plans) > budget:
        yield case.plans[-1].at, f"{len(case.plans)} generations; what happened explains {budget}"


def no_assertion_failed(case: Case) -> Iterator[Complaint]:
    """The core's own invariants held."""
    for fact in case.rest:
        if isinstance(fact, Bug):
            yield fact.at, f"{fact.node}: {fact.error}"


def the_job_is_well_again(case: Case) -> Iterator[Complaint]:
    """After the healing: one stable plan with all healthy nodes in it, steps and commits advancing; or a proper end."""
    for fact in case.rest:
        if isinstance(fact, Ended) and not fact.lively and not _resume_lost(case):
            yield fact.at, fact.lacks


def _resume_lost(case: Case) -> bool:
    """Did the store lose that operators took a pause back, before anybody could see it? Then it is to be asked again."""
    if not case.plans or not case.plans[-1].plan.says(Why.PAUSED):
        return False
    asked = [fact.at for fact in case.history if isinstance(fact, Asked) and fact.verb == "resume"]
    lost = (
        fact.at
        for fact in case.history
        if (isinstance(fact, Struck) and fact.kind == "store_wiped")
        or (isinstance(fact, Eased) and fact.kind == "store_set_back")
    )
    news_s = case.scenario.shape.apart_s + 2 * case.scenario.shape.watch_s
    return any(0.0 <= at - max((a for a in asked if a <= at), default=-inf) <= news_s for at in lost)


def _store_trouble(case: Case, until: float) -> float:
    """Seconds before `until` in which the store or some node's way to it was troubled: decisions may rest on older views."""
    trouble = (
        "store_outage",
        "store_failover",
        "store_loss",
        "store_delay",
        "cut_store",
        "stale_view",
        "pause_daemon",
        "pause_node",
        "store_repeat",
    )
    struck = (fact for fact in case.faults if isinstance(fact, Struck))
    begun = {fact.number: fact for fact in struck if fact.kind in trouble and fact.at <= until}
    ended = {fact.number: fact.at for fact in case.faults if isinstance(fact, Eased)}
    ttl_s = case.scenario.shape.settings.membership.lease_ttl_s
    again = [fact.at for fact in case.plans if fact.plan.again and fact.at <= until]  # what was set back shows the dead
    return sum(min(until - at, ttl_s) for at in again) + sum(
        min(ended.get(n, fact.at + 2.0 if ALL[fact.kind].for_s is None else until) + 2.0, until) - fact.at
        for n, fact in begun.items()
    )


#: What an outsider sees is enough for these: of real nodes they are asked as well.
EVERYWHERE: tuple[Check, ...] = (
    one_plan_per_generation,
    what_is_written_again_says_so,
    a_plan_never_forgets_a_commit,
    survivors_keep_their_order,
    plans_are_sound,
    the_innocent_are_not_quarantined,
    quarantines_name_the_living,
    nothing_happens_after_the_end,
    a_job_ends_for_a_reason,
    a_crash_loop_ends,
    a_rung_does_what_it_says,
    scripts_begin_afresh,
    growth_waits_for_the_gang,
    commits_only_rise,
    no_committed_step_is_made_again,
    no_sealed_step_is_lost,
    disks_are_the_last_resort,
    no_assertion_failed,
    the_job_is_well_again,
)
CHECKS: tuple[Check, ...] = (
    *EVERYWHERE,
    only_the_living_are_seated,
    a_pause_is_heeded,
    only_a_leader_writes,
    the_innocent_keep_their_office,
    the_innocent_keep_their_seats,
    quarantines_are_few,
    the_job_keeps_its_bits,
    a_gang_speaks_one_wire,
    a_seat_is_filled_as_planned,
    orders_are_given_once,
    no_worker_ends_for_an_older_plan,
    only_who_has_joined_commits,
    no_sample_is_lost_or_used_twice,
    the_bits_are_the_same,
    a_hang_is_ended,
    a_drained_node_leaves_cleanly,
    nobody_spins,
    every_fault_struck,
    what_was_expected,
)


def known(scenario: Scenario, history: History) -> History:
    """The history without plans that the store lost while their news was on its way, and that no worker was told of: nobody
    has seen them, and another plan may bear their number (found by seed 47000098). The very same plan may: a repeated request
    writes it again, and who was told of it is told nothing new.
    """
    news_s = scenario.shape.apart_s + 2 * scenario.shape.watch_s
    losses = [
        fact.at
        for fact in history
        if (isinstance(fact, Struck) and fact.kind == "store_wiped")
        or (isinstance(fact, Eased) and fact.kind == "store_set_back")
    ]
    if not losses:
        return history
    plans = [fact for fact in history if isinstance(fact, Planned)]
    told = {fact.generation: fact.at for fact in reversed(history) if isinstance(fact, Began)}  # when one was first
    unseen = {
        id(fact)
        for fact, later in pairwise(plans)
        if not later.plan.again
        and later.plan.generation <= fact.plan.generation
        and any(fact.at <= at <= min(fact.at + news_s, later.at) for at in losses)
        and (told.get(fact.plan.generation, inf) > later.at or later.plan == fact.plan)
    }
    return [fact for fact in history if id(fact) not in unseen]


def judge(scenario: Scenario, history: History) -> list[Violation]:
    """Every violation in this history, in the order of time."""
    case = Case(scenario, known(scenario, history))
    found = [Violation(check=check.__name__, at=at, what=what) for check in CHECKS for at, what in check(case)]
    return sorted(found, key=lambda violation: violation.at)


__all__ = ["CHECKS", "judge"]
