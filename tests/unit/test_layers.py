"""Who may import whom. An arrow that is not in this table is a design change, not a fix."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
GROUND = {"base", "contract"}
CORE = {"core", "core/lead", "core/judge", "core/node"}
#: Each package, and what it may import beside itself. Every arrow points to a line above.
ALLOWED: dict[str, set[str]] = {
    "telemetry": set(),
    "base": set(),
    "contract": {"base"},
    "config": GROUND,
    "store": {"base"},
    "core/judge": GROUND,
    "core/node": {*GROUND, "core/judge"},
    "core/lead": {*GROUND, "core/judge", "core/node"},
    "core": {*GROUND, "core/judge", "core/node", "core/lead"},
    "diagnose": {*GROUND, "config", "store", "core/judge", "telemetry"},
    "shell": {*GROUND, *CORE, "store", "telemetry"},
    "status": {*GROUND, "shell", "store"},
    "agent": {*GROUND, "core/node", "diagnose", "shell", "store", "telemetry"},
    "daemon": {*GROUND, *CORE, "config", "store", "diagnose", "shell", "status", "agent", "telemetry"},
    "runtime": {*GROUND, "config", "telemetry"},
    "hf": {"base", "config", "runtime"},
    "lightning": {"runtime"},
    "titan": {"runtime"},
    "ppo": {*GROUND, "config", "core/judge", "runtime", "telemetry"},
    "report": {*GROUND, "diagnose", "runtime"},
    "certificate": {*GROUND, "config", "runtime"},
    "cli": {
        *GROUND, *CORE, "config", "store", "diagnose", "shell", "status", "agent", "daemon", "runtime", "ppo", "report",
        "certificate",
        "telemetry",
    },
}  # fmt: skip


def package(name: str) -> str:
    """Of a module. Of the top level: its own name, and "" for the package itself."""
    parts = name.split(".")[1:]
    return "/".join(parts[:2]) if "/".join(parts[:2]) in ALLOWED else "".join(parts[:1])


def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found.add(node.module or "")
    return found


@pytest.mark.long
def test_packages_import_only_what_lies_below_them() -> None:
    wrong = []
    for path in sorted((ROOT / "elasticrl").rglob("*.py")):
        here = package(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
        for name in sorted(imports(path)):
            there = package(name)
            if name.startswith("elasticrl.") and there not in {here, *ALLOWED.get(here, {there})}:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
            if name.split(".")[0] in ("chaos", "tests", "bench"):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_every_folder_has_a_layer_and_no_layer_imports_one_below_it_in_the_table() -> None:
    folders = {path.parent.name for path in (ROOT / "elasticrl").glob("*/__init__.py")}
    assert folders <= set(ALLOWED)
    order = list(ALLOWED)
    assert all(order.index(below) < order.index(name) for name, some in ALLOWED.items() for below in some)


@pytest.mark.parametrize("folder", ["base", "contract", "core"])
def test_what_decides_imports_the_standard_library_and_what_it_decides_by(folder: str) -> None:
    for path in sorted((ROOT / "elasticrl" / folder).rglob("*.py")):
        foreign = {n for n in imports(path) if n.split(".")[0] not in sys.stdlib_module_names}
        foreign -= {"_typeshed"} | ({"pydantic"} if folder == "contract" else set())
        assert all(package(name) in {*GROUND, *CORE} for name in foreign), (path.name, foreign)
        if folder == "core":
            clocks = {"time", "random", "socket", "threading", "logging", "asyncio", "os", "datetime"}
            assert not clocks & imports(path), f"{path.name} reaches for the outside world"


@pytest.mark.long
def test_no_test_file_imports_another():
    """What several of them need is in a file of its own, which has no tests."""
    found = [
        (path.name, name)
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for name in imports(path)
        if name.rpartition(".")[2].startswith("test_")
    ]
    assert found == []


def test_no_class_name_stands_twice_in_what_the_decisions_are_made_of():
    """One word for one thing: what the core says travels through every other package."""
    where: dict[str, list[str]] = {}
    for path in sorted(
        path for folder in ("base", "contract", "core") for path in (ROOT / "elasticrl" / folder).rglob("*.py")
    ):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(path.name)
    assert {name: files for name, files in where.items() if len(files) > 1} == {}
