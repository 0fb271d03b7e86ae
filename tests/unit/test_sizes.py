"""No file over 600 lines and no class of more than 20 attributes, unless its docstring says why: `Long because ...`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import elasticrl

PACKAGE = Path(elasticrl.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
LINES, ATTRIBUTES = 600, 20
WHY = "Long because "


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def named(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


# Parsed once, before any test has run: a finalizer of theirs that prints a traceback parses too, and CPython 3.11 cannot do so
# inside of another parse.
TREES = {named(path): parsed(path) for path in FILES}


def own(node: ast.ClassDef) -> set[str]:
    """What its methods set of `self`. Fields of a value are a list, and no state that somebody has to follow."""
    targets = [
        target
        for each in ast.walk(node)
        if isinstance(each, ast.Assign | ast.AnnAssign | ast.AugAssign)
        for one in (each.targets if isinstance(each, ast.Assign) else [each.target])
        for target in (one.elts if isinstance(one, ast.Tuple) else [one])
    ]
    return {
        target.attr
        for target in targets
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    }


def above(node: ast.ClassDef, tree: ast.Module) -> Iterator[tuple[ast.ClassDef, ast.Module]]:
    """The classes of this package that it inherits from, each with its module."""
    for name in (base.id for base in node.bases if isinstance(base, ast.Name)):
        froms = (each for each in ast.walk(tree) if isinstance(each, ast.ImportFrom))
        home = next(
            (TREES.get(each.module or "") for each in froms if name in {alias.name for alias in each.names}), tree
        )
        for found in home.body if home else ():
            if isinstance(found, ast.ClassDef) and found.name == name:
                yield found, home or tree


def attributes(node: ast.ClassDef, tree: ast.Module) -> set[str]:
    """Its own, and those that it inherits."""
    return own(node).union(*(attributes(*base) for base in above(node, tree)))


def unexplained(text: str, tree: ast.Module | None = None) -> Iterator[str]:
    tree = tree or ast.parse(text)
    if text.count("\n") > LINES and WHY not in (ast.get_docstring(tree) or ""):
        yield f"{text.count(chr(10))} lines"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and WHY not in (ast.get_docstring(node) or ""):
            held = attributes(node, tree)
            if len(held) > ATTRIBUTES:
                yield f"{node.name} has {len(held)} attributes"


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES])
def test_what_is_large_says_why(path: Path) -> None:
    assert list(unexplained(path.read_text(encoding="utf-8"), TREES[named(path)])) == []


def test_what_is_large_is_found() -> None:
    many = "".join(f"        self.x{i}, self.y{i} = 0, 0\n" for i in range(11))
    text = f"class Big:\n    def __init__(self):\n{many}"
    assert list(unexplained(text)) == ["Big has 22 attributes"]
    inherits = f"class Big:\n    def __init__(self):\n{many}\nclass Small(Big):\n    pass\n"
    assert list(unexplained(inherits)) == ["Big has 22 attributes", "Small has 22 attributes"]
    assert list(unexplained("pass\n" * 601)) == ["601 lines"]
    assert list(unexplained('"""Long because it is one table."""\n' + "pass\n" * 601)) == []
