"""What is said in the documentation is what the code does."""

import ast
import doctest
import re
import subprocess
import sys
from dataclasses import asdict, fields, replace
from importlib import import_module
from pathlib import Path

import pytest

from chaos import checks as checked
from chaos import demands
from chaos.mutants import MUTANTS
from chaos.scenario import Expect
from elasticrl.cli import render
from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.evidence import Evidence, Kind, Sign
from elasticrl.contract.model import Commit, Member, Phase, Plan, Quarantine, Record, Rung, Seat, View, Work
from elasticrl.contract.verdict import Known
from elasticrl.core.judge.judge import judge
from elasticrl.status.past import Broken, Past
from elasticrl.status.picture import picture
from elasticrl.telemetry import events, metrics

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("page", "made"), [("EVENTS.md", events.document()), ("METRICS.md", metrics.document())])
def test_the_generated_pages_are_up_to_date(page: str, made: str) -> None:
    assert (ROOT / "docs" / page).read_text(encoding="utf-8") == made


def logged() -> dict[str, list[str]]:
    """Every event name that is written somewhere, with the places: `log.info("name", ...)` and `Say(event="name")`."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "elasticrl").rglob("*.py")):
        if {"agent", "runtime", "contract"} & set(path.parts):
            continue  # agents and workers are processes of their own, with plain logs
        logs = {"emit"} if "ppo" in path.parts else {"info", "exception", "say", "_say"}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            says = [keyword.value for keyword in node.keywords if called == "Say" and keyword.arg == "event"]
            first = node.args[:1] if called in logs else []
            for value in (*says, *first):
                for constant in ast.walk(value):
                    if (
                        isinstance(constant, ast.Constant)
                        and isinstance(constant.value, str)
                        and "%" not in constant.value
                    ):
                        found.setdefault(constant.value, []).append(f"{path.name}:{node.lineno}")
    return found


@pytest.mark.long
def test_every_event_that_is_logged_is_declared_and_every_declared_one_is_logged() -> None:
    written = logged()
    unknown = {name: places for name, places in written.items() if name not in events.BY_NAME}
    assert not unknown
    assert set(events.BY_NAME) - set(written) == set()


def public(path: str, name: str) -> set[str]:
    """The public names of a class, read from its source: to import it would import torch."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    (made,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    names = {node.name for node in made.body if isinstance(node, ast.FunctionDef)}
    names |= {
        node.target.id for node in made.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for node in ast.walk(made):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and getattr(node.value, "id", "") == "self"
        ):
            names.add(node.attr)
    return {name for name in names if not name.startswith("_")}


def test_the_page_of_the_runtime_has_all_that_a_script_may_call() -> None:
    page = (ROOT / "docs" / "RUNTIME.md").read_text(encoding="utf-8")
    run = public("elasticrl/runtime/run.py", "Run")
    told = set(re.findall(r"\brun\.(\w+)", page))
    assert run - told == set()
    assert told - run == set()
    lane = public("elasticrl/runtime/step.py", "Lane")
    assert {name for name in lane if f"lane.{name}" not in page} == {"over"}
    reduced = public("elasticrl/runtime/strategy.py", "Reduced")
    assert {name for name in reduced if f"`{name}`" not in page} == {"notes"}


def test_the_picture_on_the_first_screen_is_what_status_prints() -> None:
    now = 1_764_000_000.0
    members = [Member(node=f"n0{n}", incarnation=1) for n in range(8)]
    out = members[3]
    silent = Cause(why=Why.SILENT, who=(out,), nodes=("n02", "n04"))
    gone = Evidence(kind=Kind.NODE, sign=Sign.NODE_GONE, node="n03", generation=13)
    lives = judge([gone, replace(gone, sign=Sign.UNHEARD)], Known(world=8, nodes={}))  # as its incident is told anew
    plan = Plan(
        generation=14, phase=Phase.TRAIN, rung=Rung.REFORM, causes=(silent,),
        seats=tuple(Seat(member=each, born=1) for each in members if each != out),
        verdict=judge([gone], Known(world=8, nodes={})),
    )  # fmt: skip
    works = {"work": Work.TRAINING, "generation": 14, "phase": "rollout"}
    records = {each.node: Record(member=each, step=1284, beat_at=now - 0.4, **works) for each in members}
    records["n01"] = replace(records["n01"], step=1283, beat_at=now - 3.6)
    records["n03"] = Record(member=out, warm=True)
    last = Broken(
        at=now - 41.0,
        verdict=lives,
        said=lives.said,
        generation=14,
        broke=13,
        seconds=0.98,
        steps=0,
        rung="reform",
    )
    seen = picture(
        "ppo-7b",
        View(plan=plan, leader=members[0], commit=Commit(step=1280, generation=13, written=now - 12.0)),
        records, {"n03": Quarantine(member=out, cause=silent)},
        past=Past(began=now - 13_020.0, faults=3, last=last), needs=4, now=now, planned_s=40.0,
    )  # fmt: skip
    said = render.status(asdict(seen), colour=False)
    shown = re.sub(r"(?m)(^  n0[24567]/1 .*\n)+", "  ...\n", said)  # the page leaves out who is like the others
    assert shown.count("  ...\n") == 2
    shown = re.sub(r"(?m)^(.{,130}) .*$", lambda row: f"{row[1]} ..." if len(row[0]) > 140 else row[0], shown)
    assert shown in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_command_line_starts_without_the_heavy_packages() -> None:
    script = """
import sys
from dataclasses import asdict, fields, replace
from elasticrl.cli.main import build
build(["status"])
import elasticrl.cli.operate, elasticrl.daemon.client, elasticrl.cli.render
heavy = [name for name in ("torch", "pydantic", "grpc", "numpy", "rich") if name in sys.modules]
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.long
def test_a_daemons_start_imports_nothing_that_it_has_no_use_for_yet(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "job: {name: j, program: a.py}\nstore: {endpoints: ['etcd-1:2379']}\n"
        f"node: {{run_dir: {tmp_path}, state_dir: {tmp_path}}}\n"
    )
    script = f"""
import sys
from dataclasses import asdict, fields, replace
from elasticrl.cli import main, node
from elasticrl.config import load
from elasticrl.daemon.history import History
from elasticrl.daemon.main import Daemon
from elasticrl.store import etcd
from elasticrl.telemetry.log import set_up
Daemon(load({str(tmp_path / "job.yaml")!r}), log=set_up(), history=History())
later = [f"elasticrl.diagnose.{{name}}" for name in "doctor environment health incident logs recorder scene stacks".split()]
others = "torch numpy typer click rich jsonschema prometheus_client http.server".split()
print([name for name in (*others, *later, "elasticrl.daemon.web", "elasticrl.store.embedded") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


SHOWN = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for package in ("elasticrl", "bench", "chaos")
    for path in (ROOT / package).rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("module", SHOWN)
def test_an_example_in_a_docstring_is_what_comes_out(module: str) -> None:
    found = doctest.testmod(import_module(module))
    assert (found.attempted > 0, found.failed) == (True, 0)


def test_readme_and_makefile_say_alike_how_long_the_tests_take() -> None:
    said = {
        name: re.findall(r"about ten minutes|about an hour", (ROOT / name).read_text(encoding="utf-8"))[:2]
        for name in ("README.md", "Makefile")
    }
    assert said["README.md"] == said["Makefile"] == ["about ten minutes", "about an hour"]


def test_each_invariant_of_the_protocol_has_a_check_and_a_mutant_that_exist() -> None:
    text = (ROOT / "docs" / "PROTOCOL.md").read_text(encoding="utf-8")
    numbers = re.findall(r"(?m)^(\d+)\. \*\*", text)
    table = text.partition("## Which check")[2].partition("\n## ")[0]
    rows = re.findall(r"(?m)^\| (\d+) \| (.+) \| (.+) \|$", table)
    assert [number for number, _, _ in rows] == numbers
    checks = {name for place in (checked, demands) for name in vars(place)} | {field.name for field in fields(Expect)}
    mutants = {mutant.name for mutant in MUTANTS}
    for number, check, mutant in rows:
        named = [name for name in re.findall(r"`([\w./]+)`", check) if "/" not in name]
        assert named, number
        assert set(named) <= checks, number
        broken = re.findall(r"\*([^*]+)\*", mutant)
        assert broken, number
        assert set(broken) <= mutants, number
