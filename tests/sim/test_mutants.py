"""Each guard of the core, broken in turn, is missed by somebody. The tables are in the output."""

import ast
import subprocess
import sys

import pytest

from chaos.mutants import MUTANTS, ROOT, table
from chaos.mutate import CORE, Felt, breaking, changes, equivalent, hunt, looked, mutants


@pytest.mark.long
@pytest.mark.timeout(1800)  # each mutant has so much of computing, which a busy machine gives it later
def test_every_broken_guard_is_noticed(capsys: pytest.CaptureFixture[str]):
    assert len(MUTANTS) >= 100
    with capsys.disabled():
        missed = table(budget_s=1700.0)
    assert missed == 0


# ---- mutants that nobody has listed


def changed(source):
    node = ast.parse(source).body[0]
    inside = node.value if isinstance(node, ast.Expr) else node
    return [(ast.unparse(new), how) for new, how in changes(inside)]


def test_what_a_mutant_is():
    assert [new for new, _ in changed("a <= b")] == ["a < b"]
    assert [new for new, _ in changed("a and b and c")] == ["b and c", "a and c", "a and b"]
    assert [new for new, _ in changed("not a")] == ["a"]
    assert [new for new, _ in changed("count + 1")] == ["count"]
    assert [new for new, _ in changed("max(a, b)")] == ["min(a, b)"]
    assert [new for new, _ in changed("a if b or c else d")] == ["a if True else d"]
    assert [how for _, how in changed("if a < b:\n    return")] == ["if a < b -> if False", "if a < b -> if True"]


def test_there_are_mutants_of_every_deciding_file_and_each_has_a_name_of_its_own():
    names = [mutant.name for mutant in mutants()]
    assert len(names) == len(set(names)) >= 2000
    assert {name.partition(".")[0] for name in names} == {*(module.rpartition(".")[2] for module in CORE), "store"}


def test_what_is_proven_equal_says_why():
    assert all(equivalent().values())


def test_a_broken_function_is_whole_again_afterwards():
    guard = next(m for m in mutants() if m.name == "follow._leave_held: if not state.leaving -> if True")
    with breaking(guard):
        assert looked("a-held-node-saves-and-leaves")
    assert not looked("a-held-node-saves-and-leaves")


def test_a_mutant_is_noticed_only_where_it_is_felt():
    of = [m for m in mutants() if m.function == "_leave_held"]
    felt = Felt(frozenset(m.name for m in of)).of("all-steps-made")
    assert not felt.intersection(m.name for m in of if "safe or late" in m.name)  # nobody leaves there
    found = {m.name: hunt(m, 60.0, ["all-steps-made"])[0] for m in of}
    assert all(not found[m.name] for m in of if m.name not in felt)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_sample_of_the_mutants_that_nobody_listed(capsys):
    command = [
        sys.executable,
        "-O",
        "-m",
        "chaos.mutate",
        "--sample",
        "97",
        "--seeds",
        "3",
        "--each",
        "5",
        "--least",
        "50",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1700, check=False)
    with capsys.disabled():
        print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout + done.stderr
