"""What the scenario itself demands of its history: that its faults struck, and what it expects to come of them.

The one idea: each demand is a field of `Expect`, and one that is not made is not checked.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import inf

from chaos.case import Case, Complaint, node_of
from chaos.history import (
    Advised,
    Asked,
    Committed,
    Confined,
    Eased,
    Elected,
    Ended,
    Inspected,
    Left,
    Planned,
    Refused,
    Resumed,
    Sealed,
    Started,
    Struck,
    Tested,
)
from elasticrl.contract.cause import Cause
from elasticrl.contract.evidence import Evidence
from elasticrl.contract.model import Phase, Rung


def every_fault_struck(case: Case) -> Iterator[Complaint]:
    """A fault that never struck has tested nothing."""
    if case.scenario.all_must_strike:
        struck = {fact.number for fact in case.history if isinstance(fact, Struck)}
        for number, fault in enumerate(case.scenario.faults):
            if number not in struck:
                yield case.history[-1].at, f"{fault.kind} ({fault.when or fault.at}) never struck"


def what_was_expected(case: Case) -> Iterator[Complaint]:
    """The scenario's own demands."""
    expect, plans, end = case.scenario.expect, case.plans, case.history[-1].at
    n = len(plans)
    first = min((fact.at for fact in case.history if isinstance(fact, Resumed)), default=0.0)
    if expect.generations_at_most is not None and n > expect.generations_at_most:
        yield end, f"{n} generations, expected at most {expect.generations_at_most}"
    if expect.generations_at_least is not None and n < expect.generations_at_least:
        yield end, f"{n} generations, expected at least {expect.generations_at_least}"
    rung = max((fact.plan.rung for fact in plans), default=Rung.START)
    if expect.rungs_at_most is not None and rung > expect.rungs_at_most:
        yield end, f"rung {rung} was taken, expected at most {expect.rungs_at_most}"
    if expect.rungs_at_least is not None and rung < expect.rungs_at_least:
        yield end, f"rung {rung} was taken, expected at least {expect.rungs_at_least}"
    yield from _of_quarantines(case)
    code = plans[-1].plan.exit_code if plans else None
    if expect.exit_code is not None and code != expect.exit_code:
        yield end, f"the job ended with {code}, expected {expect.exit_code}"
    if expect.seats is not None and len(plans[-1].plan.seats) != expect.seats:
        yield end, f"{len(plans[-1].plan.seats)} seats at the end, expected {expect.seats}"
    seated = tuple(seat.member.node for seat in plans[-1].plan.seats) if plans else ()
    if expect.seated is not None and seated != tuple(expect.seated):
        yield end, f"seats of {', '.join(seated)} at the end, expected {', '.join(expect.seated)}"
    fresh = sum(type(f).__name__ == "Began" and getattr(f, "fresh", False) and f.at > first for f in case.history)
    if expect.restarted_at_most is not None and fresh > expect.restarted_at_most:
        yield end, f"{fresh} fresh starts, expected at most {expect.restarted_at_most}"
    yield from _of_plans_and_leaving(case)
    yield from caused(case)
    verdicts = [plan.plan.verdict for plan in plans if plan.plan.verdict]
    told = [sorted(f"{fact.kind.value} {fact.rank}" for fact in verdict.because) for verdict in verdicts]
    if expect.because and sorted(expect.because) not in told:
        yield end, f"verdicts rest on {told}, expected {sorted(expect.because)}"
    sealed = max((f.step for f in case.history if isinstance(f, Sealed)), default=0)
    if expect.steps_at_least is not None and sealed < expect.steps_at_least:
        yield end, f"{sealed} steps, expected at least {expect.steps_at_least}"
    if expect.back_within_s is not None:
        yield from _back_within(case, expect.back_within_s)
    yield from _of_steps(case)


def _written_again(case: Case, limit_s: float) -> Iterator[Complaint]:
    for fact in case.history:
        wiped = isinstance(fact, Struck) and fact.kind == "store_wiped"
        if wiped or (isinstance(fact, Eased) and fact.kind == "store_set_back"):
            again = min((plan.at for plan in case.plans if plan.plan.again and plan.at > fact.at), default=inf)
            if again - fact.at > limit_s:
                yield fact.at, f"the plan was written again after {again - fact.at:.2f} s, expected {limit_s} s"


def caused(case: Case) -> Iterator[Complaint]:
    """Some plan or quarantine has each of the causes that the scenario names; those with a "+" between them are of one plan."""
    plans = [fact.plan for fact in case.plans]
    told = [[(cause, plan.verdict.because if plan.verdict else ()) for cause in plan.causes] for plan in plans]
    told += [[(fact.cause, ())] for fact in case.history if isinstance(fact, Confined)]
    for wanted in filter(None, map(str.strip, case.scenario.expect.caused.split(";"))):
        if not any(all(_one_fits(causes, words) for words in wanted.split("+")) for causes in told):
            yield case.history[-1].at, f"no plan was caused by {wanted!r}"


def _one_fits(causes: Iterable[tuple[Cause, Sequence[Evidence]]], words: str) -> bool:
    return any(fits(cause, words, because) for cause, because in causes)


def fits(cause: Cause, words: str, because: Sequence[Evidence] = ()) -> bool:
    """Is it this cause? Its kind, the nodes that it names, the class of the fault, how often, the setting, and the kinds of
    evidence may be given. What has a "-" before it must not be one of these.

    >>> from elasticrl.contract.cause import Why
    >>> from elasticrl.contract.model import Member
    >>> from elasticrl.contract.verdict import Fault
    >>> cause = Cause(why=Why.FOUND, who=(Member(node="n1", incarnation=3),), fault=Fault.HOST_HANG)
    >>> fits(cause, "found n01 host_hang"), fits(cause, "found n2"), fits(cause, "found -n1")
    (True, False, False)
    """
    nodes = map(_node, (*(member.node for member in cause.who), *cause.nodes))
    known = {cause.why.value, *nodes, str(cause.count), cause.setting}
    known |= {cause.fault.value if cause.fault else "", *(fact.kind.value for fact in because)}
    wanted = set(map(_node, words.split()))
    not_wanted = {word[1:] for word in wanted if word.startswith("-")}
    return known >= {word for word in wanted if not word.startswith("-")} and known.isdisjoint(not_wanted)


def _node(word: str) -> str:
    """A node's name as the lab has it, whose nodes are n1 where the simulator's are n01; any other word as it is.

    >>> _node("n01"), _node("-n01"), _node("network")
    ('n1', '-n1', 'network')
    """
    return re.sub(r"^(-?n)0+(?=\d+$)", r"\1", word)


def _of_steps(case: Case) -> Iterator[Complaint]:
    expect = case.scenario.expect
    looks, end = sum(isinstance(fact, Inspected) for fact in case.history), case.history[-1].at
    if expect.looks_at_most is not None and looks > expect.looks_at_most:
        yield end, f"all were looked at {looks} times, expected at most {expect.looks_at_most}"
    if expect.looks_at_least is not None and looks < expect.looks_at_least:
        yield end, f"all were looked at {looks} times, expected at least {expect.looks_at_least}"
    if expect.ends_saved:
        yield from _ends_saved(case)
    if expect.still_at_most_s is not None:
        yield from still_at_most(case, expect.still_at_most_s)
    if expect.nothing_lost:
        yield from nothing_lost(case)


def _ends_saved(case: Case) -> Iterator[Complaint]:
    last = max((fact.at for fact in case.history if isinstance(fact, Left)), default=0.0)
    before = [fact for fact in case.history if fact.at <= last]
    sealed = max((fact.step for fact in before if isinstance(fact, Sealed)), default=0)
    saved = max((fact.step for fact in before if isinstance(fact, Committed)), default=0)
    if saved < sealed:
        yield last, f"the last node left with step {saved} saved, {sealed} were sealed"


def nothing_lost(case: Case) -> Iterator[Complaint]:
    """No gang goes on from an older version than was ever sealed."""
    newest = 0
    for fact in case.history:
        if isinstance(fact, Sealed):
            newest = max(newest, fact.version)
        elif isinstance(fact, Resumed) and fact.version < newest:
            yield fact.at, f"generation {fact.generation} goes back to update {fact.version}, {newest} was sealed"


def still_at_most(case: Case, limit_s: float) -> Iterator[Complaint]:
    """From its first update to its newest the job was never without a new one for longer."""
    seals = [fact.at for fact in case.history if isinstance(fact, Sealed)]
    for before, after in pairwise(seals):
        if after - before > limit_s:
            yield after, f"no update for {after - before:.1f} s, expected {limit_s:g} s at most"


def _of_quarantines(case: Case) -> Iterator[Complaint]:
    expect, end = case.scenario.expect, case.history[-1].at
    confined = tuple(sorted({f.node for f in case.history if isinstance(f, Confined) and f.held}))
    if expect.quarantined is not None and confined != tuple(sorted(expect.quarantined)):
        yield end, f"quarantined were {confined}, expected {expect.quarantined}"
    strikes = max((f.strikes for f in case.history if isinstance(f, Confined)), default=0)
    if expect.strikes_at_most is not None and strikes > expect.strikes_at_most:
        yield end, f"a node was quarantined for the {strikes}th time, expected at most {expect.strikes_at_most}"
    if expect.kept_out_at_most_s is not None:
        yield from _kept_out(case, expect.kept_out_at_most_s)


def _kept_out(case: Case, limit_s: float) -> Iterator[Complaint]:
    since: dict[str, float] = {}
    for fact in case.history:
        if isinstance(fact, Confined) and fact.held:
            since.setdefault(fact.node, fact.at)
        elif isinstance(fact, Confined) and fact.at - (begun := since.pop(fact.node, fact.at)) > limit_s:
            yield fact.at, f"{fact.node} was kept out for {fact.at - begun:.1f} s, expected at most {limit_s} s"


def _of_plans_and_leaving(case: Case) -> Iterator[Complaint]:
    expect, plans = case.scenario.expect, case.plans
    small = [f for f in plans if f.plan.phase is Phase.TRAIN and len(f.plan.seats) < (expect.seats_never_below or 0)]
    if small:
        yield small[0].at, f"{len(small[0].plan.seats)} seats, expected never below {expect.seats_never_below}"
    led = tuple(node_of(fact.member) for fact in case.history if isinstance(fact, Elected))
    if expect.led_by is not None and led != tuple(expect.led_by):
        yield case.history[-1].at, f"the job was led by {', '.join(led)}, expected {', '.join(expect.led_by)}"
    if expect.written_again_within_s is not None:
        yield from _written_again(case, expect.written_again_within_s)
    writes = sum(fact.writes for fact in case.history if isinstance(fact, Ended))
    if expect.writes_at_most is not None and writes > expect.writes_at_most:
        yield case.history[-1].at, f"{writes} records were written, expected at most {expect.writes_at_most}"
    tests = sum(isinstance(fact, Tested) for fact in case.history)
    if expect.tests_at_most is not None and tests > expect.tests_at_most:
        yield case.history[-1].at, f"cut ways were tested {tests} times, expected at most {expect.tests_at_most}"
    said = [text for fact in case.history if isinstance(fact, Advised) for text in fact.advice]
    if expect.advised and not any(expect.advised in text for text in said):
        yield case.history[-1].at, f"no operator was told {expect.advised!r}, but {said}"
    times = sum(expect.advised in text for text in said)
    if expect.advised_times is not None and times != expect.advised_times:
        yield (
            case.history[-1].at,
            f"operators were told {expect.advised!r} {times} times, expected {expect.advised_times}",
        )
    refused = tuple(fact.node for fact in case.history if isinstance(fact, Refused))
    if expect.refused is not None and refused != tuple(expect.refused):
        yield case.history[-1].at, f"drains of {refused} were refused, expected {expect.refused}"
    if expect.ranks_kept:
        yield from ranks_kept(plans)
    if expect.gone_within_s is not None or expect.left_with_all_saved:
        yield from _leaving(case, expect.gone_within_s, saved=expect.left_with_all_saved)


def ranks_kept(plans: list[Planned]) -> Iterator[Complaint]:
    """While a gang is as large as before, whoever stays in it keeps its rank."""
    for before, after in pairwise(plans):
        places = {seat.member: i for i, seat in enumerate(before.plan.seats)}
        moved = [s.member for i, s in enumerate(after.plan.seats) if places.get(s.member, i) != i]
        if moved and len(before.plan.seats) == len(after.plan.seats):
            yield after.at, f"generation {after.plan.generation} gives {moved[0]} another rank"


def _leaving(case: Case, limit_s: float | None, *, saved: bool) -> Iterator[Complaint]:
    left = {node_of(fact.member): fact.at for fact in case.history if isinstance(fact, Left)}
    sealed = committed = 0
    for fact in case.history:
        if isinstance(fact, Sealed):
            sealed = max(sealed, fact.step)
        elif isinstance(fact, Committed):
            committed = fact.step
        elif isinstance(fact, Left) and saved and committed < sealed:
            yield fact.at, f"{fact.member} left at commit {committed}, step {sealed} was whole"
        elif isinstance(fact, Asked) and fact.verb in ("drain", "stop") and limit_s is not None:
            up = {node_of(f.member) for f in case.history if isinstance(f, Started) and f.at <= fact.at}
            for node in [fact.node] if fact.verb == "drain" else sorted(up):
                took = left.get(node, inf) - fact.at
                if took > limit_s:
                    yield fact.at, f"{node} left {took:.1f} s after the {fact.verb}, expected {limit_s} s"


def _back_within(case: Case, limit_s: float) -> Iterator[Complaint]:
    seals = [fact.at for fact in case.history if isinstance(fact, Sealed)]
    for fact in case.history:
        if isinstance(fact, Struck):
            # The update in flight may still be sealed after the fault; the one after it is what shows recovery.
            after = [at for at in seals if at > fact.at][1:2]
            if not after or after[0] - fact.at > limit_s:
                took = f"{after[0] - fact.at:.2f} s" if after else "never"
                yield fact.at, f"{fact.kind}: back after {took}, expected {limit_s} s"
