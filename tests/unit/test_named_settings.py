"""A sentence that tells somebody to set `section.key` names a key that exists."""

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@cache
def sections() -> dict[str, frozenset[str]]:
    """Every section of the schema that has keys, with their names."""
    schema = json.loads((ROOT / "configs/schema.json").read_text())
    named = {name: entry["$ref"].rpartition("/")[2] for name, entry in schema["properties"].items() if "$ref" in entry}
    return {name: frozenset(schema["$defs"][kind]["properties"]) for name, kind in named.items()}


def sentences(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each string that has a space in it: not the names of events and files, and not docstrings, which name
    modules.
    """
    tree = ast.parse(source)
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside | docs:
            text = node.value
        else:
            continue
        if " " in text:
            yield node.lineno, text


def unknown(text: str) -> list[str]:
    """The settings that a sentence names and the schema does not have."""
    known = sections()
    dotted = re.compile(rf"(?<![\w./-])({'|'.join(known)})\.([a-z_][a-z_0-9]*)")
    found = [(match[0], match[1], match[2]) for match in dotted.finditer(text)]
    return [word for word, section, key in found if key not in known[section]]


@pytest.mark.long
def test_a_sentence_names_only_settings_that_exist() -> None:
    wrong = [
        f"{module.relative_to(ROOT)}:{line}: {word}"
        for module in sorted((ROOT / "elasticrl").rglob("*.py"))
        for line, text in sentences(module.read_text())
        for word in unknown(text)
    ]
    assert wrong == [], "no such key in configs/schema.json: say what to set instead, or what argument it is"


def test_a_setting_that_does_not_exist_is_found_in_a_sentence_and_in_nothing_else() -> None:
    source = '"""Read data.epochs."""\nraise E(f"Step {n} is too far. Raise data.epochs, or ppo.epochs.")\nlog("data.epochs")\n'
    assert [(line, unknown(text)) for line, text in sentences(source)] == [(2, ["data.epochs"])]
