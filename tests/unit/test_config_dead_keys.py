"""No dead keys: each key of the schema is read by code outside of `config/`, or waits for a part that is not built yet.

A read is an attribute of that name on something that is known to be that section: named like it (`tree.store.prefix`,
`store.prefix`), assigned from it (`m = tree.membership`), or annotated with its class (`settings: Membership`). So
`path.name` does not keep `node.name` alive. Files count that import the configuration or are handed one; for the keys that
`to_core` hands on, all files do, because there the core's settings have the same names.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from config_kit import RENAMED

from elasticrl.config.section import leaves, sections
from elasticrl.config.tree import Tree

PACKAGE = Path(__file__).parents[2] / "elasticrl"

#: Keys that nothing reads yet, by the part that will. Delete a word here when the test says that it is read.
WAITING: dict[str, str] = {}

Read = tuple[str, str]  # section and attribute, as ("membership", "lease_ttl_s")

#: What the core calls the keys that it is handed: job.name is ("settings", "job").
IN_CORE: dict[str, Read] = {}
for _name, _key in RENAMED.items():
    _section, _, _attribute = f"settings.{_name}".rpartition(".")
    for _leaf in leaves(Tree):
        if _leaf == _key or _leaf.startswith(f"{_key}."):
            IN_CORE[_leaf] = (_section.removeprefix("settings."), _attribute)
for _leaf in leaves(Tree).values():
    if _leaf.path[0] in {"membership", "recovery", "health", "timeouts"} and _leaf.key not in IN_CORE:
        IN_CORE[_leaf.key] = (_leaf.path[0], _leaf.attribute)

SECTION_OF_CLASS: dict[str, set[str]] = defaultdict(set)
for _key, _kind in sections(Tree):
    SECTION_OF_CLASS[_kind.__name__].add(_key.rpartition(".")[2])
SECTION_OF_CLASS["Settings"].add("settings")
SECTIONS = {name for names in SECTION_OF_CLASS.values() for name in names}


def reads(tree: ast.AST) -> set[Read]:
    """All (section, attribute) pairs that this module reads."""
    aliases = _aliases(tree)
    found: set[Read] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = _last(node.value)
            found |= {(section, node.attr) for section in {name, *aliases.get(name, ())} & SECTIONS}
    return found


def _aliases(tree: ast.AST) -> dict[str, set[str]]:
    """Names for sections in this module, by annotation or assignment; twice, for an alias of an alias."""
    known: dict[str, set[str]] = defaultdict(set)
    for name, annotation in _annotated(tree):
        for word in ast.walk(annotation):
            text = word.value if isinstance(word, ast.Constant) else _last(word)
            known[name] |= SECTION_OF_CLASS.get(str(text).rpartition(".")[2], set())
    for _ in range(2):
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    known_pairs = zip(_flat(target), _flat(node.value), strict=False)
                    for left, right in known_pairs:
                        source = _last(right)
                        known[_last(left)] |= known.get(source, set()) | ({source} & SECTIONS)
    return known


def _annotated(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            yield _last(node.target), node.annotation
        elif isinstance(node, ast.arg) and node.annotation is not None:
            yield node.arg, node.annotation


def _flat(node: ast.expr) -> Iterable[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _knows_config(tree: ast.AST) -> bool:
    """Does it import the configuration, or is it handed one (`context.tree`)?"""
    if any(isinstance(node, ast.Attribute) and node.attr in {"tree", "_tree"} for node in ast.walk(tree)):
        return True
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return any(f"{module}.".startswith("elasticrl.config.") for module in modules)


def living(files: Iterable[Path]) -> set[str]:
    """The keys that these files read."""
    anywhere: set[Read] = set()
    knowing: set[Read] = set()
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        found = reads(tree)
        anywhere |= found
        knowing |= found if _knows_config(tree) else set()
    alive = {key for key, read in IN_CORE.items() if read in anywhere}
    for leaf in leaves(Tree).values():
        # Roles share one class, and one reader for all of them may name the role by a variable.
        names = {leaf.path[-2]} | ({"placement"} if leaf.path[0] == "placement" else set())
        if any((name, leaf.attribute) in knowing for name in names):
            alive.add(leaf.key)
    return alive


def outside() -> list[Path]:
    config = PACKAGE / "config"
    own = {PACKAGE / "contract" / "settings.py"}
    return sorted(file for file in PACKAGE.rglob("*.py") if config not in file.parents and file not in own)


@pytest.mark.long
def test_every_key_is_read_outside_of_config_or_waits_for_a_part_that_will() -> None:
    waiting = {key for keys in WAITING.values() for key in keys.split()}
    alive = living(outside())
    dead = [key for key in leaves(Tree) if key not in alive and key not in waiting]
    assert not dead, f"nothing outside of elasticrl/config reads these, so delete them, or read them: {' '.join(dead)}"


@pytest.mark.long
def test_no_key_waits_that_is_read_already() -> None:
    waiting = [key for keys in WAITING.values() for key in keys.split()]
    assert len(waiting) == len(set(waiting))
    assert set(waiting) <= set(leaves(Tree))
    read = sorted(living(outside()) & set(waiting))
    assert not read, f"these are read now, so delete them from WAITING: {' '.join(read)}"


def test_the_scan_tells_a_read_from_a_like_name(tmp_path: Path) -> None:
    file = tmp_path / "reader.py"
    file.write_text(
        """
from elasticrl.config import Tree
from elasticrl.config.cluster import Vault
from elasticrl.config.training import Kl

class Holder:
    kept: "Vault"
    def __init__(self, t: Tree, kl: Kl | None, path):
        self._rollout = t.rollout.vllm
        beats, store = t.membership, t.store
        self.all = (beats.beat_s, store.tls.ca, t.ppo.lr, self.kept.every, kl.coef, self._rollout.max_num_seqs)
        path.name, t.job, store.prefix_, t.data.path
        store.retry_s = 1
"""
    )
    assert living([file]) == {
        "membership.beat", "store.tls.ca", "ppo.lr", "vault.every", "ppo.kl.coef", "rollout.vllm.max_num_seqs", "data.path",
    }  # fmt: skip
    core = tmp_path / "core.py"
    core.write_text(
        "def f(state, timeouts: Timeouts):\n    return state.settings.lanes, timeouts.phase_s, state.store.prefix\n"
    )
    assert living([core]) == {"lanes.count"} | {key for key in leaves(Tree) if key.startswith("timeouts.phase.")}
