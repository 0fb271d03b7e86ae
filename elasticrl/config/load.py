"""File, environment and command line to one tree, or to everything that is wrong with them.

The one idea: all three are read as YAML nodes by the same walk, each leaf replacing the one before and remembering its
origin; so an unknown key, a bad value and a broken relation look the same wherever they come from. A finding never stops
the reading: values that are in doubt are put aside, the others are checked against each other as if those were fine.
"""

import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field
from functools import cache
from pathlib import Path
from types import MappingProxyType

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from yaml.nodes import MappingNode, Node, ScalarNode

from elasticrl.base.value import dataclass
from elasticrl.config.finding import DEFAULT, ConfigError, Finding, Origin, in_order
from elasticrl.config.relations import OUR_TRAINER, RELATIONS, Relation
from elasticrl.config.section import DURATION_MARK, Leaf, Section, extra_leaf, leaf_of, leaves, open_sections, sections
from elasticrl.config.source import NULL, STR, Unreadable, compose, flow, line_of, pairs, plain, read_file
from elasticrl.config.tree import Tree, put, values
from elasticrl.config.tree import leaf as leaf_at
from elasticrl.contract.model import misnamed

PREFIX = "ELASTICRL__"
RUNTIMES = frozenset({"disks"})  # phases that the runtime begins by itself, of any script; update and save are keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What came of a file: the tree unless a finding is an error, and where each value that is no default was written."""

    file: str
    tree: Tree | None
    findings: tuple[Finding, ...]
    origins: Mapping[str, Origin]  # by key; entries of a mapping by key and name: agent.env.FOO

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that refuse the configuration."""
        return tuple(finding for finding in self.findings if finding.level == "error")


def load(path: Path | str, overrides: Iterable[str] = (), environ: Mapping[str, str] | None = None) -> Tree:
    """The tree; raises ConfigError with all findings where there is none."""
    loaded = read(path, overrides, environ)
    if loaded.tree is None:
        raise ConfigError(loaded.errors)
    return loaded.tree


def read(path: Path | str, overrides: Iterable[str] = (), environ: Mapping[str, str] | None = None) -> Loaded:
    """All there is to know of a file under these overrides (`ppo.lr=1e-5`) and this environment (this process's, if None)."""
    path = Path(path)
    sheet = _Sheet(file=str(path))
    node = read_file(path)
    if isinstance(node, Finding):
        return Loaded(file=str(path), tree=None, findings=(node,), origins={})
    sheet.take(node, "", lambda place: Origin(source="file", name=str(path), line=line_of(place)))
    for name, text in sorted((os.environ if environ is None else environ).items()):
        if name.startswith(PREFIX):
            sheet.override(_env_path(name), text, Origin(source="environment", name=name))
    for override in overrides:
        key, equals, text = override.partition("=")
        if equals:
            sheet.override(key.strip().split("."), text, Origin(source="command line"))
        else:
            sheet.report(_NOT_AN_OVERRIDE, Origin(source="command line"), "", f"{flow(override)} has no =")
    tree = sheet.settle()
    findings = in_order(sheet.findings)
    refused = any(finding.level == "error" for finding in findings)
    return Loaded(
        file=str(path), tree=None if refused else tree, findings=findings, origins=MappingProxyType(sheet.origins)
    )


def _env_path(name: str) -> list[str]:
    """ELASTICRL__PPO__LR is ppo.lr. The names under a mapping, such as agent.env, keep their case and their underscores."""
    path = name.removeprefix(PREFIX).split("__")
    for length in range(1, len(path)):
        leaf = leaves(Tree).get(".".join(path[:length]).lower())
        if leaf is not None and leaf.mapping:
            return [*leaf.path, "__".join(path[length:])]
    return [part.lower() for part in path]


@dataclass(frozen=True, slots=True)
class _Rule:
    rule: str
    remedy: str


_NOT_AN_OVERRIDE = _Rule("must be an override", "Write it as key=value, such as ppo.lr=1e-5.")
_NOT_A_SECTION = _Rule("must be a section", "Write its keys below it, one to a line, indented by two spaces.")
_NOT_A_WORD = _Rule("must have plain words as keys", "Write each key as one word, without brackets.")
_NO_SECRET = _Rule(
    "must not be written in a file or an argument",
    "Remove it there (and change it, if others could read it); set {variable} in the environment, or {key}_file.",
)

MANY = 100  # unknown keys that are told one by one: to look for what each was meant to be takes a millisecond
LONGEST = 60  # letters of a key that may have been meant to be another


@dataclass(slots=True)
class _Sheet:
    """What has been read so far."""

    file: str
    raw: dict[str, object] = field(default_factory=dict)  # by the key of the leaf
    origins: dict[str, Origin] = field(default_factory=dict)
    lines: dict[str, Origin] = field(default_factory=dict)  # of sections
    doubtful: set[str] = field(default_factory=set)  # keys whose value no relation may rest on
    meant: set[str] = field(default_factory=set)  # keys that an unknown one was probably meant to be
    misfits: dict[str, Finding] = field(
        default_factory=dict
    )  # by key; a later source may put a good value in its place
    findings: list[Finding] = field(default_factory=list)
    strangers: list[Origin] = field(default_factory=list)  # unknown keys, as often as there are some

    def report(self, rule: _Rule, where: Origin, key: str, values: str) -> None:
        self.findings.append(Finding(where=where, key=key, rule=rule.rule, values=values, remedy=rule.remedy))

    def override(self, path: list[str], text: str, origin: Origin) -> None:
        """One value from outside of the file, as if a file had nothing else in it."""
        node = compose(text, origin)
        if isinstance(node, Finding):
            leaf = leaves(Tree).get(".".join(path))
            # A password may be any text; what it looks like is nobody's business, the message's least of all.
            if leaf is None or not leaf.secret:
                self.findings.append(node)
                return
            node = ScalarNode(STR, text)
        elif (leaf := leaves(Tree).get(".".join(path))) is not None and leaf.secret:
            node = ScalarNode(STR, text)
        node = node or ScalarNode(NULL, "")
        for name in reversed(path):
            node = MappingNode("", [(ScalarNode(STR, name), node)])
        self.take(node, "", lambda _: origin)

    def take(self, node: Node, prefix: str, place: Callable[[Node], Origin]) -> None:
        """The keys of one section."""
        if isinstance(node, ScalarNode) and node.tag == NULL:
            return  # a section whose keys are all commented out
        if not isinstance(node, MappingNode):
            self.report(_NOT_A_SECTION, place(node), prefix, f"{_shown(node)} is not")
            return
        first: dict[str, Origin] = {}
        for key_node, value in pairs(node):
            where = place(key_node)
            if not isinstance(key_node, ScalarNode):
                self.report(_NOT_A_WORD, where, prefix, f"{_shown(key_node)} is not one")
                continue
            key = f"{prefix}.{key_node.value}".lstrip(".")
            if key in first:
                self.twice(key, first[key], where)
            elif "." in key_node.value:
                self.dotted(key, prefix, where)
            elif key in _sections():
                self.lines[key] = where
                self.take(value, key, place)
            elif (leaf := leaves(Tree).get(key)) is not None:
                self.put(leaf, value, where, place)
            elif (kind := open_sections(Tree).get(prefix)) is not None and not _is_field(kind, key_node.value):
                self.phase(extra_leaf(kind, key), value, where, place)
            else:
                self.unknown(key, prefix, where)
            first.setdefault(key, where)

    def phase(self, leaf: Leaf, node: Node, where: Origin, place: Callable[[Node], Origin]) -> None:
        """One of a script's own."""
        if why := misnamed(leaf.path[-1]):
            self.doubtful.add(leaf.key)
            remedy = "Give it the name that the script calls run.phase with, such as evaluate."
            self.report(_Rule("must be the name of a phase", remedy), where, _cut(leaf.key), why)
            return
        self.put(leaf, node, where, place)

    def put(self, leaf: Leaf, node: Node, where: Origin, place: Callable[[Node], Origin]) -> None:
        """The value of one leaf."""
        if leaf.secret and where.source != "environment":
            self.doubtful.add(leaf.key)
            variable = PREFIX + "__".join(leaf.path).upper()
            rule = _Rule(_NO_SECRET.rule, _NO_SECRET.remedy.format(variable=variable, key=leaf.key))
            self.report(rule, where, leaf.key, "others can read it there")
            return
        if leaf.mapping and isinstance(node, MappingNode):
            self.put_entries(leaf, node, place)
            return
        if leaf.mapping and isinstance(node, ScalarNode) and node.tag == NULL:
            return  # as with sections: all of its names are commented out
        try:
            value = plain(node, textual=leaf.textual)
        except Unreadable as why:
            self.misfit(leaf, leaf.key, where, str(why))
            return
        if leaf.unit and isinstance(value, int | float):
            self.misfit(leaf, leaf.key, where, f"{flow(value)} has no unit", remedy=_with_unit(leaf, value))
            return
        self.doubtful.discard(leaf.key)
        self.misfits.pop(leaf.key, None)
        self.raw[leaf.key] = value
        self.origins[leaf.key] = where

    def put_entries(self, leaf: Leaf, node: MappingNode, place: Callable[[Node], Origin]) -> None:
        """A mapping's entries join those of the sources before."""
        known = self.raw.get(leaf.key)
        entries: dict[str, object] = dict(known) if isinstance(known, Mapping) else {}
        first: dict[str, Origin] = {}
        for key_node, value in pairs(node):
            where = place(key_node)
            if not isinstance(key_node, ScalarNode):
                self.report(_NOT_A_WORD, where, leaf.key, f"{_shown(key_node)} is not one")
                continue
            key = f"{leaf.key}.{key_node.value}"
            if key in first:
                self.twice(key, first[key], where)
                continue
            first[key] = self.origins[key] = where
            try:
                entries[key_node.value] = plain(value, textual=True, depth=0)
            except Unreadable as why:
                self.misfit(leaf, key, where, str(why))
        self.raw[leaf.key] = entries
        self.origins.setdefault(leaf.key, next(iter(first.values()), DEFAULT))

    def twice(self, key: str, first: Origin, where: Origin) -> None:
        self.doubtful.add(key)
        values = f"line {first.line} and line {where.line} both have it" if where.line else "it is there twice"
        self.report(_Rule("must be given once", "Remove one of the two."), where, key, values)

    def unknown(self, key: str, prefix: str, where: Origin) -> None:
        """A key that is not there, with the nearest that is."""
        self.doubtful.add(key)
        self.strangers.append(where)
        if len(self.strangers) > MANY:
            return
        near = _nearest(key, prefix)
        if near is None:
            remedy = "Remove it; `elasticrl config schema --markdown` lists all keys."
            self.report(_Rule("must be a known key", remedy), where, _cut(key), "no known key is like it")
            return
        self.meant.add(near)
        moved = near.rpartition(".")[0] != prefix
        word = near if moved else near.rpartition(".")[2]
        how = f"Write it as {word}" if moved else f"Rename it to {word}"
        self.report(_Rule("must be a known key", f"{how}, or remove it."), where, key, f"the nearest is {word}")

    def dotted(self, key: str, prefix: str, where: Origin) -> None:
        """A key written as on the command line."""
        if key not in leaves(Tree):
            self.unknown(key, prefix, where)
            return
        self.doubtful.add(key)
        section, _, name = key.rpartition(".")
        rule = _Rule("must be a known key", f"Write {name} below {section}, indented.")
        self.report(rule, where, key, f"in a file, {name} is a key of the section {section}")

    def misfit(self, leaf: Leaf, key: str, where: Origin, values: str, remedy: str | None = None) -> None:
        self.doubtful.add(leaf.key)
        self.raw.pop(leaf.key, None)
        if leaf.required:
            self.raw[leaf.key] = leaf.example
        self.misfits[key] = Finding(
            where=where, key=key, rule=f"must be {leaf.rule}", values=values, remedy=remedy or _example(leaf)
        )

    def settle(self) -> Tree:
        """Values against their types, then against each other. What is wrong gives way to a default, to go on with."""
        try:
            tree = self.build()
        except ValidationError as error:
            for detail in error.errors(include_url=False, include_context=False):
                self.mistyped(detail)
            tree = self.build()
        self.doubtful |= {key for key in leaves(Tree) if key not in self.origins and self.was_meant(key)}
        self.findings += self.misfits.values()
        if more := self.strangers[MANY:]:
            rule = _Rule("must have known keys only", "See that it is a configuration of elasticrl.")
            self.report(rule, more[0], "", f"{len(more)} more keys from here on are none")
        self.findings += self.strange(tree)
        self.findings += [
            self.broken(relation, tree)
            for relation in RELATIONS
            if self.doubtful.isdisjoint(relation.keys) and relation.broken(tree)
        ]
        return tree

    def strange(self, tree: Tree) -> Iterator[Finding]:
        """Phases that nobody but a script can begin, where they look like an error. Warnings: a script may call them so."""
        known, ours = _keys_of("timeouts.phase"), tree.job.program == OUR_TRAINER
        for name in sorted(set(tree.timeouts.phase.model_extra or ()) - RUNTIMES):
            key, near = f"timeouts.phase.{name}", difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            if not near and not ours:
                continue
            values = f"no phase of {OUR_TRAINER} is called so" + (f"; the nearest is {near[0]}" if near else "")
            rename = f"Rename it to {near[0]}" if near else "Remove it"
            yield Finding(
                where=self.origins.get(key, DEFAULT),
                key=key,
                rule=f"has no effect with {OUR_TRAINER}" if ours else "should be a phase that the script begins",
                values=values,
                remedy=f"{rename}." if ours else f'{rename}, unless the script has run.phase("{name}").',
                level="warning",
            )

    def was_meant(self, key: str) -> bool:
        return any(key == meant or key.startswith(f"{meant}.") for meant in self.meant)

    def build(self) -> Tree:
        root: dict[str, object] = {key: {} for key, field_ in Tree.model_fields.items() if field_.is_required()}
        for key, value in self.raw.items():
            put(root, leaf_at(key).path, value)
        return Tree.model_validate(root)

    def mistyped(self, detail: ErrorDetails) -> None:
        """Pydantic says where; the leaf knows what it must be."""
        leaf = _leaf_at(detail["loc"])
        if detail["type"] == "missing" and detail["loc"] == leaf.path:
            self.raw[leaf.key] = leaf.example
            if not self.was_meant(leaf.key):  # else the key that was written instead is reported
                section = ".".join(leaf.path[:-1])
                where = self.lines.get(section, Origin(source="file", name=self.file))
                remedy = f"Write it under {section}, for example {leaf.path[-1]}: {leaf.example}."
                self.report(_Rule("must be given", remedy), where, leaf.key, "it has no default")
            return
        if leaf.key not in self.raw:
            return  # another of its errors was here first
        value = self.raw[leaf.key]
        key = leaf.key
        if leaf.mapping and isinstance(value, Mapping) and len(detail["loc"]) > len(leaf.path):
            entry = str(detail["loc"][len(leaf.path)])
            key, value = f"{key}.{entry}", value.get(entry)
        where = self.origins.get(key, DEFAULT)
        self.misfit(
            leaf, key, where, "the value is not" if leaf.secret else f"{_cut(flow(value))} is not", _remedy(leaf, value)
        )

    def broken(self, relation: Relation, tree: Tree) -> Finding:
        known = values(tree)
        beside = {key.rpartition(".")[0] for key in relation.keys} & open_sections(Tree).keys()
        names = [key for key in self.origins if key.rpartition(".")[0] in beside and key not in leaves(Tree)]
        written = [self.origins[key] for key in (*relation.keys, *names) if key in self.origins]
        silent = [key for key in relation.keys if key not in self.origins and _is_number(known[key])]
        why, remedy = relation.says(tree)
        if written and 0 < len(silent) <= 3:  # which of the numbers are defaults; a longer list tells nobody anything
            why += f"; {_and(silent)} {'is' if len(silent) == 1 else 'are'} not set"
        return Finding(
            where=written[0] if written else Origin(source="file", name=self.file),
            key=relation.keys[0],
            rule=relation.rule,
            values=why,
            remedy=remedy,
            level=relation.level,
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@cache
def _sections() -> frozenset[str]:
    return frozenset(key for key, _ in sections(Tree) if key)


def _leaf_at(loc: tuple[int | str, ...]) -> Leaf:
    keys = (".".join(map(str, loc[:length])) for length in range(1, len(loc) + 1))
    return next(leaf for key in keys if (leaf := leaf_of(Tree, key)) is not None)


def _keys_of(section: str) -> list[str]:
    return [leaf.path[-1] for leaf in leaves(Tree).values() if leaf.key == f"{section}.{leaf.path[-1]}"]


def _is_field(kind: type[Section], name: str) -> bool:
    """It is what the code calls a field, as `rollout_s`: no name beside the fields."""
    return name in kind.model_fields


def _nearest(key: str, prefix: str) -> str | None:
    """The key that was meant: a like one in the same section, else one of the same or a like name anywhere."""
    name = key.rpartition(".")[2]
    if len(name) > LONGEST:
        return None
    known = [*sorted(_sections()), *leaves(Tree)]
    beside = [candidate for candidate in known if candidate.rpartition(".")[0] == prefix]
    for candidates, likeness in ((beside, 0.6), (known, 0.8)):
        names = {candidate.rpartition(".")[2]: candidate for candidate in reversed(candidates)}
        if near := difflib.get_close_matches(name, names, n=1, cutoff=likeness):
            return names[near[0]]
    return None


def _shown(node: Node) -> str:
    try:
        return _cut(flow(plain(node)))
    except Unreadable as why:
        return str(why)


def _cut(text: str) -> str:
    text = re.sub(r"://[^\s/]*@", "://...@", text)  # there may be a password
    return text if len(text) <= 60 else text[:57] + "..."


def _and(words: list[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def _with_unit(leaf: Leaf, value: float) -> str:
    unit = "s" if DURATION_MARK in leaf.marks else leaf.example.lstrip("0123456789.")
    return f"Write its unit behind it, for example {leaf.path[-1]}: {flow(value)}{unit}."


def _remedy(leaf: Leaf, value: object) -> str | None:
    if leaf.choices and isinstance(value, str):
        near = difflib.get_close_matches(value, leaf.choices, n=1)
        return f"Write {leaf.path[-1]}: {near[0]}." if near else None
    if leaf.unit:
        return f"Write a number with its unit, for example {leaf.path[-1]}: {leaf.example}."
    return None


def _example(leaf: Leaf) -> str:
    of = " (the default)" if not leaf.required and leaf.default is not None else ""
    return f"Write for example {leaf.path[-1]}: {leaf.example}{of}."
