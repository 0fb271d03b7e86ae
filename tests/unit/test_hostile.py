"""Whatever a program, a node or a library writes into a field that is for people: no decision and no verdict changes by it."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from core_kit import record
from diagnosis_kit import NODES, fact, leader, proposed
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.events import Propose
from elasticrl.contract.evidence import (
    HEALTH,
    MISTAKES,
    NOT_ITS_OWN,
    OURS,
    SAVE,
    Evidence,
    Kind,
    Sign,
    mistaken,
    of_exit,
    of_stall,
)
from elasticrl.contract.model import Exit, Member, Phase, Plan, Quarantine, Record, Rollout, Seat, Stall, View, Work
from elasticrl.contract.pairs import Result, findings
from elasticrl.contract.verdict import Known, Verdict
from elasticrl.core.judge.judge import judge
from elasticrl.core.node import dossier
from elasticrl.status.picture import picture
from elasticrl.status.recovery import kind_of

OURS_TOO = sorted(name.rpartition(".")[2] for name in OURS)
#: What would mean something if anybody read it.
WORDS = [
    *OURS_TOO, *sorted(NOT_ITS_OWN), *sorted(MISTAKES), "saving", "in save", "stalled in save", "in outside", "health",
    "refused", "Connection refused", "stalled after 9 bytes", "cannot be read", "in order again", "checkpoint.space: 9 GiB",
    "n01/1", "n01 left", "signal 9 (SIGKILL)", "out of memory", "exit code 1: ", "Xid 79", "{who}", "; ", ": ", "\x1b[31m",
]  # fmt: skip
hostile = st.one_of(
    st.sampled_from(WORDS),
    st.lists(st.sampled_from([*WORDS, " ", "(", ")"]), max_size=5).map("".join),
    st.text(max_size=60),
)
KNOWN = Known(world=3, nodes=dict(enumerate(NODES)), heard=frozenset(range(3)))


def ended(rank: int, **more: object) -> Evidence:
    known = {"generation": 1, "slot": 0, "step": 7, "cause": "x", "own": False, **more}
    return of_exit(Exit(**known), rank=rank, node=f"n{rank:02}", when=9.0)  # type: ignore[arg-type]


def stalled(rank: int, phase: str, *, waiting: bool = False) -> Evidence:
    stall = Stall(slot=0, step=7, phase=phase, for_s=12.0, budget_s=10.0, waiting=waiting)
    return of_stall(stall, rank=rank, node=f"n{rank:02}", when=9.0, generation=1)


FULL = fact(Sign.DISK_FULL, None, None, node="n01", kind=Kind.DISK, source=HEALTH, check="checkpoint.space")
VICTIM = ended(0, raised="torch.distributed.DistNetworkError")
CASES: dict[str, tuple[Evidence, ...]] = {
    "a program's mistake beside a full disk": (FULL, ended(1, own=True, raised="ValueError")),
    "a program's end beside a full disk": (FULL, ended(1, own=True, raised="OSError")),
    "corruption": (ended(1, own=True, raised="elasticrl.runtime.alike.Diverged"), VICTIM),
    "a kill": (ended(1, signal=9), VICTIM),
    "victims alone": (VICTIM, ended(2, raised="BrokenPipeError")),
    "a save on a full disk": (FULL, stalled(1, SAVE), stalled(0, "update", waiting=True)),
    "a hang elsewhere, beside a full disk": (FULL, stalled(1, "save_eval"), stalled(0, "update", waiting=True)),
    "a broken GPU": (fact(Sign.GPU_BROKEN, 1, kind=Kind.XID), VICTIM),
    "a node that is gone": (fact(Sign.NODE_GONE, 1, kind=Kind.NODE), VICTIM),
    "a way that is cut": (fact(Sign.UNREACHABLE, None, kind=Kind.PROBE, node="n00", peer="n01"),),
    "who is elsewhere": (
        fact(Sign.ELSEWHERE, 1, source="faulthandler"), fact(Sign.WAITED, 0, op="all_reduce"),
        fact(Sign.WAITED, 2, op="all_reduce"),
    ),
}  # fmt: skip


def gist(verdict: Verdict) -> tuple[object, ...]:
    return verdict.fault, verdict.ranks, verdict.nodes, verdict.confidence


@settings(deadline=None)
@given(
    st.booleans(),
    st.sampled_from([0, 6, 9, 11, 15]),
    st.sampled_from(["", "ValueError", "train.Diverged", *OURS]),
    hostile,
)
def test_what_an_end_speaks_for_does_not_depend_on_its_words(own: bool, signal: int, raised: str, said: str) -> None:
    plain = Exit(generation=1, slot=0, step=7, cause="", own=own, signal=signal, raised=raised)
    told = replace(plain, cause=said)
    assert of_exit(told).sign is of_exit(plain).sign
    assert mistaken(of_exit(told)) is mistaken(of_exit(plain))
    assert kind_of(told) == kind_of(plain)


@pytest.mark.parametrize("name", CASES)
@settings(deadline=None, max_examples=40)
@given(details=st.lists(hostile, min_size=3, max_size=3), lines=st.lists(hostile, min_size=3, max_size=3))
def test_a_verdict_does_not_depend_on_the_words_of_its_facts(name: str, details: list[str], lines: list[str]) -> None:
    plain = CASES[name]
    told = tuple(replace(f, detail=d, line=n) for f, d, n in zip(plain, details, lines, strict=False))
    assert gist(judge(told, KNOWN)) == gist(judge(plain, KNOWN))
    assert dossier.speaks(told) == dossier.speaks(plain)


@pytest.mark.parametrize("name", CASES)
def test_no_word_that_once_meant_something_changes_a_verdict(name: str) -> None:
    plain = CASES[name]
    for word in WORDS:
        told = [replace(f, detail=word, line=word) for f in plain]
        assert gist(judge(told, KNOWN)) == gist(judge(plain, KNOWN)), word


@settings(deadline=None)
@given(said=hostile, again=hostile)
def test_what_a_machine_says_is_taken_back_by_the_same_check_whatever_the_words(said: str, again: str) -> None:
    known = dossier.file((), [replace(FULL, detail=said)], 1.0)
    well = replace(FULL, sign=Sign.HEALTHY, detail=again)
    assert [f.sign for f in dossier.file(known, [well], 5.0)] == [Sign.HEALTHY]
    other = dossier.file(known, [replace(well, check="shm")], 5.0)
    assert [f.sign for f in other] == [Sign.DISK_FULL, Sign.HEALTHY]


SAID = {"own": True, "raised": "RuntimeError"}
LIVES: dict[str, Callable[[str], Sequence[Record]]] = {
    "a program fails": lambda said: [failed(said, **SAID)],
    "a peer has gone": lambda said: [failed(said, raised="BrokenPipeError")],
    "corruption": lambda said: [failed(said, own=True, raised="elasticrl.runtime.alike.Diverged")],
    "no process is ready": lambda said: [failed(said, warm=False, problem=said, unlogged=said, **SAID)],
    "a fact beside it": lambda said: [
        failed("x", evidence=(fact(Sign.GPU_MEMORY, 1, detail=said, line=said),), **SAID)
    ],
}  # fmt: skip


def failed(said: str, **more: object) -> Record:
    known = {name: more.pop(name) for name in ("own", "raised") if name in more}
    left = Exit(generation=1, slot=0, step=7, cause=said, **{"own": False, **known})  # type: ignore[arg-type]
    return record("n01", **{"work": Work.FAILED, "generation": 1, "born": 1, "exit": left, **more})


def decided(records: Sequence[Record], said: str) -> tuple[object, ...]:
    life = leader()
    life.view = replace(life.view, quarantines={"n09": quarantine(said)})
    life.told(2.0, *records)
    written = proposed(life)
    actions = [type(action) for action, _ in life.state.sent.values() if not isinstance(action, Propose)]
    return (*shape(written), *actions)


def shape(plan: Plan | None) -> tuple[object, ...]:
    if plan is None:
        return ()
    verdict = plan.verdict and gist(plan.verdict)
    strike = plan.strike and (plan.strike.step, plan.strike.count, plan.strike.unblamed)
    return plan.phase, plan.rung, plan.seats, plan.exit_code, plan.kinds, verdict, strike


def quarantine(said: str) -> Quarantine:
    return Quarantine(member=Member(node="n09", incarnation=1), cause=Cause(why=Why.POLICY, said=said))


@pytest.mark.parametrize("name", LIVES)
@settings(deadline=None, max_examples=25)
@given(said=hostile)
def test_no_plan_depends_on_what_a_program_says(name: str, said: str) -> None:
    assert decided(LIVES[name](said), said) == decided(LIVES[name]("x"), "x")


@settings(deadline=None)
@given(said=hostile)
def test_no_state_that_is_shown_depends_on_what_a_program_or_a_node_says(said: str) -> None:
    assume(said)  # that there is something to say may be shown

    def shown(said: str) -> tuple[object, ...]:
        me = Member(node="n01", incarnation=1)
        plan = Plan(generation=1, phase=Phase.TRAIN, seats=(Seat(member=me, born=1),), lanes=4)
        own = failed(said, problem=said, unlogged=said)
        view = View(plan=plan, leader=me, records={"n01": own}, quarantines={"n09": quarantine(said)})
        rollouts = {"r0": Rollout(member=Member(node="r0", incarnation=1), note=said)}
        seen = picture("toy", view, {"n01": own}, {"n09": quarantine(said)}, needs=1, rollouts=rollouts)
        return seen.state, seen.orderly, [(row.node, row.state) for row in seen.rows]

    assert shown(said) == shown("x")


@settings(deadline=None)
@given(st.booleans(), st.booleans(), hostile, hostile)
def test_what_a_probe_says_of_a_way_decides_nothing(refused: bool, begun: bool, tcp: str, gloo: str) -> None:
    assume("ok" not in {tcp, gloo} and tcp and gloo)
    for heard in (0, 9):
        plain = Result(node="n0", peer="n1", sent=9, answered=heard, heard=heard, tcp="x", refused=refused, begun=begun)
        told = replace(plain, tcp=tcp)
        assert [f.sign for f in findings([told])] == [f.sign for f in findings([plain])]
        both = [replace(plain, tcp="ok", gloo="x"), replace(plain, node="n1", peer="n0", tcp="ok", gloo="x")]
        words = [replace(one, gloo=gloo) for one in both]
        assert [f.sign for f in findings(words)] == [f.sign for f in findings(both)]
