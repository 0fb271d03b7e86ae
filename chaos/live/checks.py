"""What only real processes can show, and which of the judge's other checks need nothing but what an outsider sees.

The one idea: a real machine is as fast as its load lets it be, so what is judged by the clock has a budget that the load
multiplies; all else is judged as in the simulator.
"""

from collections.abc import Iterator

from chaos.case import Case, Check, Complaint, Violation
from chaos.checks import EVERYWHERE
from chaos.demands import caused, nothing_lost, ranks_kept, still_at_most
from chaos.history import Eased, History, Loaded, Missed, Proved, Sealed, Struck
from chaos.scenario import Scenario
from elasticrl.contract.model import Phase, Rung

#: Seconds from a fault, or from its end, to the next new step, on a machine of its own. The load of the machine multiplies it.
#: What a fault leaves running goes on at once; what takes the gang's store, disk or operators away costs nothing.
BUDGETS: dict[str, float] = {
    "kill_worker": 4, "crash_worker": 4, "term_worker": 4, "kill_spare": 2, "term_spare": 2, "kill_agent": 5,
    "kill_daemon": 2, "term_daemon": 2, "kill_vault": 6, "term_vault": 6, "lose_vault": 6, "kill_node": 6, "wrong_zone": 6,
    "wrong_clock": 6,
    "power_cut": 8, "oom_worker": 4, "two_daemons": 2, "changed_config": 2, "kill_etcd": 2, "term_etcd": 2, "pause_etcd": 2,
    "slow_store_disk": 2, "store_failover": 2, "store_outage": 2, "store_alone": 2, "store_full": 2, "store_compaction": 2,
    "store_wiped": 8, "store_set_back": 8,
    "cut_store": 12, "disk_full": 2, "disk_read_only": 2, "slow_disk": 2, "corrupt_save": 2, "tear_save": 2, "term_agent": 6,
    "lose_lease": 6, "stop_spare": 2, "pause_daemon": 12, "join_node": 4, "drain": 6, "drain_and_back": 6,
    "kill_engine": 12, "term_engine": 12,
}  # fmt: skip
#: These stand in the way of every step while they last: the clock runs from when they are over.
BLOCKING = (
    "pause", "partition", "stop_worker", "slow_worker", "pause_agent", "pause_node", "pause_vault", "link_down", "cut_link",
    "isolate", "leader_alone", "lossy_node", "mtu_hole", "late_node", "slow_link", "starve_node", "sick_node", "port_taken",
    "pause_engine",
)  # fmt: skip
#: It costs no step itself, but what mends another fault waits for it.
SLOW_TO_MEND = ("slow_store_disk",)
#: And these take a node away: several at once leave too few.
AWAY = ("hang_worker", "power_cut", "kill_node", "wrong_zone", "wrong_clock", "term_agent", "drain", "drain_and_back")
AFTER_S = 20.0  # for those, when they are over: a probe, a quarantine, a reform


def _hang_s(case: Case) -> float:
    """From a hang to the next step: the longest budget of a phase, its confirmation, a fresh process."""
    timeouts = case.scenario.shape.settings.timeouts
    return timeouts.default_phase_s + timeouts.confirm_s + BUDGETS["kill_worker"]


def back_within_budget(case: Case) -> Iterator[Complaint]:
    """After every fault there are new steps within its budget, times the load of the machine; said in the sentence."""
    made: dict[
        tuple[int, int], float
    ] = {}  # a step that is made again after a loss is a step: what may be lost is judged elsewhere
    for fact in case.history:
        if isinstance(fact, Sealed):
            made.setdefault((fact.generation, fact.step), fact.at)
    seals = sorted(made.values())
    stops = [fact.at for fact in case.plans if fact.plan.phase is Phase.STOP]
    eased = {fact.number: fact.at for fact in case.history if isinstance(fact, Eased)}
    busy = _blocked(case, eased)
    # A fault, the clock's beginning, its budget, the load, the limit.
    due: list[tuple[Struck, float, float, float, float]] = []
    factor = 2.0
    for fact in case.history:
        if isinstance(fact, Loaded):
            factor = fact.factor
        if not isinstance(fact, Struck) or fact.kind in ("stop", "crash_loop"):
            continue
        begin = eased.get(fact.number, fact.at) if fact.kind in BLOCKING else fact.at
        budget = _hang_s(case) if fact.kind == "hang_worker" else BUDGETS.get(fact.kind, AFTER_S)
        budget += case.scenario.shape.load_s  # of a fresh process's program
        # Another fault may stand in the way at the same time, and one more as that ends: the clock begins when all are over.
        while others := [end for start, end in busy if start != fact.at and start <= begin + budget and end > begin]:
            begin = max(others)
        due.append((fact, begin, budget, factor, begin + budget * factor))
    for fact, begin, budget, factor, _ in due:
        # What another fault has set off (a probe, the end of a hang) has that one's time, by which it is judged itself.
        limit = max(theirs for _, start, _, _, theirs in due if start <= begin <= theirs)
        after = [at for at in seals if at > begin][1:2]
        if (not after or after[0] > limit) and not any(at <= limit for at in stops):
            said = f"{after[0] - begin:.1f} s" if after else "never"
            yield (
                fact.at,
                f"{fact.kind}: the next steps came after {said}, the budget is {budget:g} s x {factor:g} (load)",
            )


def _blocked(case: Case, eased: dict[int, float]) -> list[tuple[float, float]]:
    """When steps were not to be expected: faults that block, and what is at hand when several nodes are gone at once."""
    held = [
        (fact.at, eased.get(fact.number, fact.at))
        for fact in case.history
        if isinstance(fact, Struck) and fact.kind in (*BLOCKING, *AWAY)
    ]
    several = [span for span in held if sum(a <= span[1] and b >= span[0] for a, b in held) > 1]
    blocking = [
        (fact.at, eased.get(fact.number, fact.at))
        for fact in case.history
        if isinstance(fact, Struck) and fact.kind in (*BLOCKING, *SLOW_TO_MEND)
    ]
    return several + blocking


def every_fault_proved(case: Case) -> Iterator[Complaint]:
    """A fault that was put in and did nothing has tested nothing."""
    for fact in case.history:
        if isinstance(fact, Missed):
            yield fact.at, f"{fact.kind} did not strike: {fact.why}"


def each_step_has_one_digest(case: Case) -> Iterator[Complaint]:
    """Whoever made a step, and however often, it has the same bits."""
    known: dict[int, str] = {}
    for fact in case.history:
        if isinstance(fact, Sealed) and fact.digest and known.setdefault(fact.step, fact.digest) != fact.digest:
            yield fact.at, f"step {fact.step} has digests {known[fact.step]} and {fact.digest}"


def what_the_end_shows(case: Case) -> Iterator[Complaint]:
    """The audit is exact, the bits are the undisturbed run's, and nothing is left."""
    for fact in case.history:
        if isinstance(fact, Proved) and not fact.ok:
            yield fact.at, f"{fact.what}: {fact.sentence}"


def expected_live(case: Case) -> Iterator[Complaint]:
    """Of a scenario's own demands those that hold for any machine: not times, nor counts that its pace decides."""
    expect, plans, end = case.scenario.expect, case.plans, case.history[-1].at
    code = plans[-1].plan.exit_code if plans else None
    if expect.exit_code is not None and code != expect.exit_code:
        yield end, f"the job ended with {code}, expected {expect.exit_code}"
    rung = max((fact.plan.rung for fact in plans), default=Rung.START)
    if expect.rungs_at_most is not None and rung > expect.rungs_at_most:
        yield end, f"rung {rung} was taken, expected at most {expect.rungs_at_most}"
    yield from caused(case)
    if expect.still_at_most_s is not None:
        slowest = max((fact.factor for fact in case.history if isinstance(fact, Loaded)), default=2.0)
        yield from still_at_most(case, expect.still_at_most_s * slowest)
    if expect.nothing_lost:
        yield from nothing_lost(case)
    if expect.ranks_kept:
        yield from ranks_kept(plans)


LIVE_CHECKS: tuple[Check, ...] = (
    *EVERYWHERE,
    each_step_has_one_digest,
    back_within_budget,
    every_fault_proved,
    what_the_end_shows,
)


def judge_live(scenario: Scenario, history: History, *, since: float = 0.0, first: int = 0) -> list[Violation]:
    """Every violation of a live run from `since` on: all of the history is read, as what was before decides what may be now.

    `first` is the number of the scenario's first fault.
    """
    case = Case(scenario, history)
    found = [Violation(check=check.__name__, at=at, what=what) for check in LIVE_CHECKS for at, what in check(case)]
    mine = [fact for fact in history if fact.at >= since]
    own = Case(scenario, mine)
    if mine:
        found += [Violation(check="expected_live", at=at, what=what) for at, what in expected_live(own)]
    struck = {fact.number for fact in mine if isinstance(fact, Struck | Missed)}
    found += [
        Violation(
            check="every_fault_struck", at=mine[-1].at, what=f"{fault.kind} ({fault.when or fault.at}) never struck"
        )
        for number, fault in enumerate(scenario.faults, first)
        if mine and number not in struck
    ]
    return sorted((v for v in found if v.at >= since), key=lambda violation: violation.at)
