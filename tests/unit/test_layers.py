"""Who may import whom. An arrow that is not in this table is a design change, not a fix."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
ALLOWED = {
    "core": {"core"},
    "config": {"config", "core"},
    "store": {"store", "core"},
    "telemetry": {"telemetry"},
    "shell": {"shell", "store", "core", "telemetry"},
    "agent": {"agent", "diagnose", "store", "core", "config", "telemetry", "shell"},
    "diagnose": {"diagnose", "store", "core", "config", "telemetry"},
    "daemon": {"daemon", "agent", "diagnose", "shell", "store", "core", "config", "telemetry"},
    "runtime": {"runtime", "core", "config", "telemetry"},
    "ppo": {"ppo", "runtime", "core", "config", "telemetry"},
    "hf": {"hf", "runtime", "config", "core"},
    "report": {"report", "runtime", "diagnose", "core"},
    "cli": {
        "cli",
        "report",
        "daemon",
        "agent",
        "diagnose",
        "shell",
        "store",
        "core",
        "config",
        "telemetry",
        "runtime",
        "ppo",
    },
}


# A worker and its agent speak by a page of memory and lines on a socket. Both ends of each are one file, which lies with the
# agent and imports nothing but the standard library. So does the file by which a process ends with the one that started it, and
# the one that says whose a folder is.
SHARED = {f"elasticrl.agent.{name}" for name in ("beats", "seat", "parent", "owned", "title")}


# Who reads what somebody left in a folder opens it by the same few lines, which import nothing but the standard library.
OPENS = "elasticrl.base.regular"


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


def test_layers_import_only_what_lies_below_them():
    wrong = []
    for path in sorted((ROOT / "elasticrl").rglob("*.py")):
        layer = path.relative_to(ROOT / "elasticrl").parts[0]
        for name in sorted(imports(path)):
            parts = name.split(".")
            if (layer == "runtime" and name in SHARED) or (layer != "core" and name == OPENS):
                continue
            if layer in ALLOWED and parts[0] == "elasticrl" and len(parts) > 1 and parts[1] not in ALLOWED[layer]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
            if parts[0] in ("chaos", "tests", "bench"):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_every_folder_has_a_layer():
    folders = {path.parent.name for path in (ROOT / "elasticrl").glob("*/__init__.py")}
    assert folders <= set(ALLOWED)


def test_the_core_imports_the_standard_library_and_itself_alone():
    for path in sorted((ROOT / "elasticrl" / "core").glob("*.py")):
        foreign = {n for n in imports(path) if n.split(".")[0] not in sys.stdlib_module_names}
        assert all(name.startswith("elasticrl.core") for name in foreign), (path.name, foreign)
        clocks = {"time", "random", "socket", "threading", "logging", "asyncio", "os", "datetime"}
        assert not clocks & imports(path), f"{path.name} reaches for the outside world"


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
    for path in sorted((ROOT / "elasticrl" / "core").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(path.name)
    assert {name: files for name, files in where.items() if len(files) > 1} == {}
