"""Causes are values: nothing reads their sentences back, whatever a program has written into them."""

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticrl.base.words import past
from elasticrl.contract.cause import SENTENCES, Cause, Why, culprits, goes_on, names, orderly, sentence, told
from elasticrl.contract.model import Member, Phase, Plan, Record, Rung, Seat, View, Work
from elasticrl.core.node import dossier
from elasticrl.shell import keys
from elasticrl.status.past import Roster
from elasticrl.status.picture import picture

ROOT = Path(__file__).parents[2]
N0, N1 = (Member(node=f"n{n}", incarnation=1) for n in range(2))
READS = {"startswith", "endswith", "split", "rsplit", "partition", "rpartition", "removeprefix", "removesuffix", "find"}
SAID = {"reason", "said", "detail", "why", "cause", "tcp"}  # fields, and variables, that bear a sentence
#: Who may look into one, and why. Nobody here decides about a job by it.
READERS = {
    "elasticrl/base/parsed.py": "the text of a file that is parsed",
    "elasticrl/cli/claims.py": "what a lock file says",
    "elasticrl/cli/init.py": "shortens a sentence for people",
    "elasticrl/cli/torchrun.py": "an environment variable's value",
    "elasticrl/config/relations.py": "shortens a sentence for people",
    "elasticrl/contract/verdict.py": "adds the names of nodes that a sentence lacks",
    "elasticrl/core/judge/network.py": "NCCL's own words lead to another remedy, for people",
    "elasticrl/diagnose/afar_probe.py": "a table of processes by number",
    "elasticrl/diagnose/exceptions.py": "the words of others' libraries: they become signs there",
    "elasticrl/diagnose/incident.py": "a table of facts by their texts",
    "elasticrl/diagnose/progress.py": "a set of what was said before",
    "elasticrl/diagnose/units.py": "what systemctl prints",
    "elasticrl/ppo/rollout/server_process.py": "does not say a thing twice",
    "elasticrl/runtime/generation.py": "a set of what was said before",
    "elasticrl/runtime/misuse.py": "torch's own words: they become a hint for people",
    "elasticrl/store/watching.py": "etcd's own words",
    "chaos/checks.py": "what the simulator itself has written",
    "bench/gpu/found.py": "puts lines of text into one",
    "bench/gpu/timeouts.py": "a measurement of torch's own words",
}
OURS = [*SENTENCES.values(), "n1/1 left; training on 1 node", "paused by root", "going on", "signal 6 (SIGABRT)"]


def is_a_sentence(node: ast.AST) -> bool:
    """Is it `x.reason`, `reason`, `x["reason"]` or `x.get("reason")`?"""
    match node:
        case ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(value=name)) | ast.Name(id=name):
            return name in SAID
        case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=name), *_]):
            return name in SAID
        case ast.Call(func=ast.Name(id="str"), args=[inner]):
            return is_a_sentence(inner)
    return False


def read_back(tree: ast.AST) -> Iterator[int]:
    """Lines that look into a sentence."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(ops=ops, comparators=others) if any(isinstance(op, ast.In | ast.NotIn) for op in ops):
                if any(map(is_a_sentence, others)):
                    yield node.lineno
            case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in READS and is_a_sentence(value):
                yield node.lineno
            case ast.Call(func=ast.Attribute(attr="search" | "match" | "fullmatch" | "findall" | "sub"), args=args):
                if any(map(is_a_sentence, args)):
                    yield node.lineno


@pytest.mark.long
@pytest.mark.parametrize("package", ["elasticrl", "chaos", "bench"])
def test_nothing_reads_a_sentence_back(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line in read_back(ast.parse(path.read_text(encoding="utf-8")))
        if str(path.relative_to(ROOT)) not in READERS
    ]
    assert found == []


@pytest.mark.parametrize("name", READERS)
def test_who_may_look_into_a_sentence_does(name: str) -> None:
    assert any(read_back(ast.parse((ROOT / name).read_text(encoding="utf-8")))), "it need not be listed any more"


@pytest.mark.parametrize(
    "line",
    ['"left" in plan.reason', 'plan.reason.startswith("going")', 'line["reason"].split("; ")', 're.search("x", a.reason)',
     'str(line.get("reason", "")).partition(":")', '"refused" in str(view.tcp)', 'fact.detail.startswith(SAVING)',
     'FIGURES.sub("#", each.said)', 'why.removeprefix("it ")', 'UNREADABLE not in self.why'],
)  # fmt: skip
def test_who_reads_a_sentence_back_is_seen(line: str) -> None:
    assert list(read_back(ast.parse(line))) == [1]


def test_each_kind_has_a_sentence_that_can_be_said() -> None:
    assert SENTENCES.keys() == set(Why)
    full = Cause(
        why=Why.FOUND, who=(N0, N1), nodes=("n2", "n3"), step=7, count=2, of=3, seconds=1.5, setting="a.b", said="x"
    )
    for why in Why:
        for cause in (Cause(why=why), replace(full, why=why)):
            assert "{" not in sentence(cause)


def test_of_many_causes_the_first_are_named_and_the_rest_are_counted() -> None:
    lost = [Cause(why=Why.EXPIRED, who=(Member(node=f"n{n}", incarnation=1),)) for n in range(9)]
    assert told(lost).endswith("n2/1 was lost (its lease expired); and 6 more causes")
    assert told(lost[:4]).count("was lost") == 4


hostile = st.one_of(
    st.sampled_from(OURS),
    st.lists(st.sampled_from([*OURS, "; ", "n1/1", "{who}", "{0}", "\x1b[31m", "\n"]), max_size=4).map("".join),
    st.text(max_size=60),
)


@settings(deadline=None)
@given(said=hostile)
def test_what_a_program_says_changes_no_decision_and_no_picture(said: str) -> None:
    cause = Cause(why=Why.FAILED, who=(N1,), said=said)
    plan = Plan(
        generation=3, phase=Phase.TRAIN, rung=Rung.REPLACE, seats=(Seat(member=N0, born=1), Seat(member=N1, born=3)),
        causes=(cause,), lanes=4,
    )  # fmt: skip
    assert (plan.kinds, orderly(plan.kinds), goes_on(plan.kinds)) == (("failed",), False, False)
    assert names(plan.causes, Why.LEFT) == frozenset()
    assert culprits(plan.causes) == ("n1",)
    assert not dossier.parted(plan)
    view = View(plan=plan, leader=N0, records={"n0": Record(member=N0)})
    moves = Roster().look(view)
    assert moves is not None
    assert moves.went == (N1,), "it has left in order, says its program"
    seen = picture("toy", view, {"n0": Record(member=N0, work=Work.JOINING, generation=3)}, {}, needs=1)
    assert (seen.state, seen.orderly) == ("RECOVERING", False)
    assert [row.state for row in seen.rows if row.node == "n1"] == ["gone"]
    assert "recovering from" in past({"uptime_s": 9.0, "faults": 0, "state": seen.state, "orderly": seen.orderly})
    assert keys.load(Plan, keys.dump(plan), "plan") == plan
