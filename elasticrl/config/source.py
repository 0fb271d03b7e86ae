"""Text to YAML nodes that know their line, and nodes to plain values. What cannot be read becomes a finding.

The one idea: we stop at PyYAML's *nodes*. Its dictionaries have forgotten lines and duplicate keys, and its YAML 1.1
scalars surprise people: `no` is false, `1e-5` is a text, `12:30` is 750. Here a plain scalar is what YAML 1.2 says.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

import yaml
from yaml.composer import Composer
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from elasticrl.config.finding import Finding, Origin

_TAG = "tag:yaml.org,2002:"
NULL, BOOL, INT, FLOAT, STR = (_TAG + name for name in ("null", "bool", "int", "float", "str"))
MERGE = "<<"


class _Core(BaseResolver):
    """YAML 1.2's core schema for plain scalars."""


for _tag, _pattern, _first in (
    (NULL, r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    (BOOL, r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    (INT, r"[-+]?[0-9]+", list("-+0123456789")),
    (FLOAT, r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    (FLOAT, r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
):
    _Core.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), _first)


class _Loader(Reader, Scanner, Parser, Composer, _Core):
    """PyYAML's own pipeline as far as nodes, with our scalars."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        _Core.__init__(self)


def read_file(path: Path) -> Node | Finding:
    """The file's one document, or why there is none."""
    origin = Origin(source="file", name=str(path))
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = (error.strerror or "it cannot be read").lower()
        return _broken(origin, "must be a file that can be read", reason, "Check the path and its permissions.")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        return _broken(
            _at(origin, line),
            "must be UTF-8 text",
            f"byte 0x{data[error.start]:02x} at offset {error.start} is not",
            "Save the file as UTF-8.",
        )
    node = compose(text, origin)
    if node is None or (isinstance(node, ScalarNode) and node.tag == NULL):
        remedy = "Write at least the section job; configs/one-machine.yaml is an example."
        return _broken(origin, "must have content", "the file is empty", remedy)
    return node


def compose(text: str, origin: Origin) -> Node | Finding | None:
    """One YAML document as nodes; None if there is nothing in it."""
    try:
        # PyYAML's stubs do not know that a loader may be assembled from its parts.
        return _Loader(text).get_single_node()
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        return _broken(
            _at(origin, line),
            "must be printable text",
            f"the character U+{_code(error.character):04X} is not",
            "Remove it, or write it as an escape in double quotes.",
        )
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = origin if mark is None else _at(origin, mark.line + 1)
        column = 1 if mark is None else mark.column + 1
        problem = " ".join(f"{error.problem or error.context or 'not YAML'}".split())
        return _broken(where, "must be YAML", f"column {column}: {problem}", _remedy(problem))
    except RecursionError:
        return _broken(origin, "must be YAML", "it is nested too deeply to be read", "Flatten it.")


def _code(character: object) -> int:
    return character if isinstance(character, int) else ord(str(character))


_REMEDIES = (
    (r"'\\t'", "Indent with spaces instead of tabs."),
    (r"mapping values are not allowed", "Check the indentation, and quote a text that contains ': '."),
    (r"another document", "Keep one document to a file: remove the line ---."),
    (r"undefined alias", "Define the anchor (&name) above its first use (*name)."),
    (r"quoted scalar|end of stream", "Close the quotes."),
    (r"block (mapping|end|collection)", "Indent the keys of one section alike, and write each as `key: value`."),
    (r"flow (mapping|sequence)|',' or", "Close the bracket."),
)


def _remedy(problem: str) -> str:
    return next((remedy for pattern, remedy in _REMEDIES if re.search(pattern, problem)), "Correct the syntax there.")


def _broken(origin: Origin, rule: str, values: str, remedy: str) -> Finding:
    return Finding(where=origin, key="", rule=rule, values=values, remedy=remedy)


def _at(origin: Origin, line: int) -> Origin:
    return Origin(source=origin.source, name=origin.name, line=line if origin.source == "file" else None)


def line_of(node: Node) -> int:
    """The node's line, from 1."""
    return int(node.start_mark.line) + 1


def pairs(node: MappingNode) -> list[tuple[Node, Node]]:
    """A mapping's own keys and values, duplicates included, then those it merges in with `<<` and does not have itself."""
    found: list[tuple[Node, Node]] = [(key, value) for key, value in node.value if not _merges(key)]
    known = {_name(key) for key, _ in found}
    todo: list[Node] = [value for key, value in node.value if _merges(key)]
    seen: list[Node] = [node]  # an alias may lead in a circle
    while todo:
        source = todo.pop(0)
        if any(source is one for one in seen):
            continue
        seen.append(source)
        if isinstance(source, SequenceNode):
            todo[:0] = source.value
        elif isinstance(source, MappingNode):
            own = [(key, value) for key, value in source.value if not _merges(key) and _name(key) not in known]
            found += own
            known |= {_name(key) for key, _ in own}
            todo[:0] = [value for key, value in source.value if _merges(key)]
    return found


def _merges(key: Node) -> bool:
    return isinstance(key, ScalarNode) and key.value == MERGE and key.style is None


def _name(key: Node) -> object:
    return key.value if isinstance(key, ScalarNode) else id(key)


class Unreadable(ValueError):
    """A node has no plain value that any key could take."""


def plain(node: Node, *, textual: bool = False, depth: int = 1) -> object:
    """The node's value: None, bool, int, float, str, or a tuple of these. `textual` keeps scalars as they are written.

    No key takes a deeper value, and a bound on the depth also bounds what aliases of aliases can unfold to.
    """
    if isinstance(node, ScalarNode):
        return _scalar(node, textual=textual)
    if depth == 0:
        raise Unreadable("lists or mappings inside of one another")
    if isinstance(node, SequenceNode) and node.tag == _TAG + "seq":
        return tuple(plain(item, textual=textual, depth=depth - 1) for item in node.value)
    if isinstance(node, MappingNode):
        raise Unreadable("a mapping")
    raise Unreadable(f"the tag {_short(node.tag)}")


def _short(tag: str) -> str:
    return tag.replace(_TAG, "!!")


def _scalar(node: ScalarNode, *, textual: bool) -> object:
    text = str(node.value)
    if node.tag == NULL:
        return None
    if node.tag == STR or (textual and node.tag in {BOOL, INT, FLOAT}):
        return text
    if node.tag == BOOL:
        return text.lower() == "true"
    if node.tag == INT:
        # Python refuses to parse integers of more than 4300 digits, and none is meant here.
        return int(text) if len(text) < 40 else float(text)
    if node.tag == FLOAT:
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    raise Unreadable(f"the tag {_short(node.tag)}")


_BARE = re.compile(r"[A-Za-z0-9/.][A-Za-z0-9/._+@-]*(:[A-Za-z0-9/._+@-]+)*")


def flow(value: object) -> str:
    """A plain value in YAML's one-line form; words stay bare where they are read back as the same word.

    >>> print(flow(["a", 1, 1e-06, None, True, "true", "on: x", "etcd-1:2379"]))
    [a, 1, 1e-06, null, true, "true", "on: x", etcd-1:2379]
    """
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{flow(key)}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str) and _BARE.fullmatch(value) and _reads_as_text(value):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}".replace("inf", ".inf").replace("nan", ".nan")
    text = json.dumps(value, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in text)


def _reads_as_text(word: str) -> bool:
    resolved: str = _Core().resolve(ScalarNode, word, (True, False))  # type: ignore[no-untyped-call] # PyYAML's stubs
    return resolved == STR
