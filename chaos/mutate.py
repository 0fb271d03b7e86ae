"""`python -m chaos.mutate`: every decision of the core is broken in turn, by its syntax tree; who notices?

The one idea: nobody lists these mutants, so nobody can forget one. Each comparison, operand, guard, step by one, default and
flag of the deciding files is a mutant with a name that does not depend on its line. What no scenario and no seed notices is
either proven equal in `chaos/equivalent.txt`, by that name and with the reason, or shows what is not watched.
"""

import argparse
import ast
import contextlib
import copy
import importlib
import io
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property, partial
from hashlib import blake2b
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Final

from chaos.mutants import MUTANTS, ROOT

#: Without `node.calm` and `node.rows`, which decide nothing: tests/sim/test_cheap.py compares them with the long way,
#: `node.calm` in every scenario.
CORE: Final = (
    "step", "node.follow", "lead.lead", "lead.lost_seats", "lead.growth", "lead.intents", "lead.probing", "lead.stalls",
    "lead.memory", "lead.strikes", "lead.quarantines", "node.suspect", "node.setback", "lead.shards", "lead.scene",
    "lead.drain", "lead.fallback",
)  # fmt: skip
#: What the store is asked to compare: the simulator's own, since the core only names the revisions.
FENCES: Final = ("campaign", "propose", "restore", "commit", "confine", "inspect", "ask")
#: What these answer is only said, in a plan's reason, a log or a status: nothing is decided by it.
TEXT: Final = (
    "step.notes", "step.reports", "step.found", "step._answered", "follow._advice", "follow.unsaved", "follow.told_now",
    "lost_seats._why_lost", "growth._begins", "growth._lacking", "growth.unready", "quarantines.with_cap", "shards._and",
    "scene.Scene.unlike", "intents.who", "fallback.Cost.__str__", "fallback.measured", "suspect.Detector.late",
)  # fmt: skip
EQUIVALENT: Final = ROOT / "chaos" / "equivalent.txt"
SEEDS: Final = 40  # how far the search goes after the scenarios
EACH_S: Final = 60.0  # of computing, for one mutant's scenarios and seeds
RUN_S: Final = 10.0  # of computing, for one run: one that takes longer does not end by itself

SWAPS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
CALLS: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
Path_ = tuple[tuple[str, int | None], ...]  # from a function's node to the one that is put in place of another


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one function. Example of a name: "follow._commit: workers.saved <= view.committed -> <"."""

    name: str
    module: str
    function: str  # qualified
    line: int
    new: ast.AST
    old: Path_  # where in the module's tree


# ---- making them


def changes(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:  # noqa: C901, PLR0912 - a table of cases
    """What may stand in place of this node, and how that is called."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in SWAPS:
            other = SWAPS[type(op)]()
            yield _but(node, ops=[other]), f"{ast.unparse(node)} -> {_sign(other)}"
        case ast.BoolOp(op=op, values=values):
            word = "and" if isinstance(op, ast.And) else "or"
            for i, value in enumerate(values):
                left = values[:i] + values[i + 1 :]
                new = _but(node, values=left) if len(left) > 1 else left[0]
                yield copy.deepcopy(new), f"{ast.unparse(node)} -> without {word} {ast.unparse(value)}"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield copy.deepcopy(operand), f"{ast.unparse(node)} -> {ast.unparse(operand)}"
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult(), left=first, right=second):
            for side, kept in ((first, second), (second, first)):
                if isinstance(side, ast.Constant) and isinstance(side.value, int | float):
                    yield copy.deepcopy(kept), f"{ast.unparse(node)} -> {ast.unparse(kept)}"
        case ast.If(test=test) | ast.IfExp(test=test):
            if isinstance(test, ast.NamedExpr) or not _names(test):
                for way in _ways(test):
                    yield _but(node, test=_pair(test, way)), f"if {ast.unparse(test)} -> if {way}"
        case ast.comprehension(ifs=ifs):
            for i, test in enumerate(ifs):
                if not _names(test):
                    yield _but(node, ifs=ifs[:i] + ifs[i + 1 :]), f"for ... if {ast.unparse(test)} -> for ..."
        case ast.Call(func=ast.Name(id=name)) if name in CALLS:
            yield _but(node, func=ast.Name(id=CALLS[name], ctx=ast.Load())), f"{ast.unparse(node)} -> {CALLS[name]}"
        case ast.keyword(arg=str(name), value=ast.Constant(value=bool(flag))) if name != "strict":  # (which asserts)
            yield _but(node, value=ast.Constant(value=not flag)), f"{name}={flag} -> {not flag}"
        case ast.arguments():
            yield from _defaults(node)


def _defaults(node: ast.arguments) -> Iterator[tuple[ast.AST, str]]:
    plain = [arg.arg for arg in (*node.posonlyargs, *node.args)][-len(node.defaults) or len(node.args) :]
    named = [arg.arg for arg in node.kwonlyargs]
    for field, names, found in (("defaults", plain, node.defaults), ("kw_defaults", named, node.kw_defaults)):
        for i, (name, default) in enumerate(zip(names, found, strict=True)):
            if isinstance(default, ast.Constant) and isinstance(default.value, bool | int):
                was = default.value
                other = ast.Constant(value=not was if isinstance(was, bool) else was + 1)
                yield (
                    _but(node, **{field: [*found[:i], other, *found[i + 1 :]]}),
                    f"default {name}={was} -> {other.value!r}",
                )


def _but(node: ast.AST, **fields: object) -> ast.AST:
    """A copy of it that differs in these."""
    new = copy.copy(node)
    for field, value in fields.items():
        setattr(new, field, value)
    return copy.deepcopy(new)


def _ways(test: ast.expr) -> tuple[bool, ...]:
    """Which of its ways is to be tried; where operands are dropped one by one, only the other one is left."""
    if isinstance(test, ast.BoolOp):
        return (isinstance(test.op, ast.Or),)
    return (False, True)


def _names(test: ast.expr) -> bool:
    """Does it give something a name?"""
    return any(isinstance(n, ast.NamedExpr) for n in ast.walk(test))


def _pair(test: ast.expr, value: bool) -> ast.expr:
    """The value, after what the test gives a name to has one."""
    if not isinstance(test, ast.NamedExpr):
        return ast.Constant(value=value)
    word = ast.And() if not value else ast.Or()
    held = ast.BoolOp(op=ast.Or(), values=[copy.deepcopy(test), ast.Constant(value=True)])
    return held if value else ast.BoolOp(op=word, values=[held, ast.Constant(value=False)])


def _sign(op: ast.cmpop) -> str:
    return ast.unparse(ast.Compare(left=ast.Name(id="a"), ops=[op], comparators=[ast.Name(id="b")]))[2:-2]


def _walk(node: ast.AST, path: Path_ = ()) -> Iterator[tuple[ast.AST, Path_]]:
    yield node, path
    for field, value in ast.iter_fields(node):
        if isinstance(value, ast.Assert | ast.JoinedStr) or (field == "test" and _whole(value)):
            continue  # asserts are not run here; what is only said decides nothing; `if` itself has both ways
        if isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, ast.AST) and not isinstance(item, ast.Assert | ast.JoinedStr):
                    yield from _walk(item, (*path, (field, i)))
        elif isinstance(value, ast.AST):
            yield from _walk(value, (*path, (field, None)))


def _whole(test: object) -> bool:
    return isinstance(test, ast.Compare) and isinstance(
        test.ops[0], ast.Eq | ast.NotEq | ast.Is | ast.IsNot | ast.In | ast.NotIn
    )


@cache
def tree(module: str) -> ast.Module:
    """The source of a module."""
    return ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())


def functions(module: str) -> Iterator[tuple[str, ast.AST, Path_]]:
    """Functions and methods, not those inside of others."""
    for i, node in enumerate(tree(module).body):
        if isinstance(node, ast.FunctionDef):
            yield node.name, node, (("body", i),)
        elif isinstance(node, ast.ClassDef):
            for j, inner in enumerate(node.body):
                if isinstance(inner, ast.FunctionDef):
                    yield f"{node.name}.{inner.name}", inner, (("body", i), ("body", j))


@cache
def mutants() -> tuple[Mutant, ...]:
    """All of them, in the order of the sources."""
    found: list[Mutant] = []
    seen: Counter[str] = Counter()
    for module in (*(f"elasticrl.core.{name}" for name in CORE), "chaos.sim.store"):
        short = module.rpartition(".")[2]
        for name, function, where in functions(module):
            if (short == "store" and name.partition(".")[2] not in FENCES) or f"{short}.{name}" in TEXT:
                continue
            for node, path in _walk(function):
                for new, how in changes(node):
                    title = f"{short}.{name}: {how}"
                    seen[title] += 1
                    title += f" #{seen[title]}" if seen[title] > 1 else ""
                    line = next((n.lineno for n in ast.walk(node) if hasattr(n, "lineno")), function.lineno)  # type: ignore[attr-defined]
                    found.append(Mutant(title, module, name, line, new, (*where, *path)))
    return tuple(found)


# ---- how one is broken


def _live(module: ModuleType, name: str) -> FunctionType:
    """The function itself, in whatever it is wrapped."""
    found: object = module
    for part in name.split("."):
        found = vars(found)[part]
    if isinstance(found, property):
        found = found.fget
    elif isinstance(found, cached_property):
        found = found.func
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    if isinstance(found, classmethod | staticmethod):
        found = found.__func__
    assert isinstance(found, FunctionType), name
    return found


def _broken(mutant: Mutant) -> tuple[CodeType, tuple[object, ...] | None, dict[str, object] | None]:
    """The code and the defaults of the broken function."""
    whole = copy.deepcopy(tree(mutant.module))
    at = _get(whole, mutant.old[:-1])
    field, i = mutant.old[-1]
    if i is None:
        setattr(at, field, mutant.new)
    else:
        getattr(at, field)[i] = mutant.new
    ast.fix_missing_locations(whole)
    code = compile(whole, mutant.module, "exec")
    code = _find(code, mutant.function)
    live = _live(importlib.import_module(mutant.module), mutant.function)
    defaults, named = live.__defaults__, live.__kwdefaults__
    if isinstance(mutant.new, ast.arguments):
        defaults = tuple(map(_value, mutant.new.defaults)) or None
        pairs = zip(mutant.new.kwonlyargs, mutant.new.kw_defaults, strict=True)
        named = {arg.arg: _value(node) for arg, node in pairs if node is not None}
    return code, defaults, named


def _find(code: CodeType, function: str) -> CodeType:
    for part in function.split("."):
        code = next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == part)
    return code


def _value(node: ast.expr) -> object:
    if isinstance(node, ast.Constant):
        return node.value
    from elasticrl.contract.model import Rung

    return eval(compile(ast.Expression(body=node), "default", "eval"), {"Rung": Rung})


@contextlib.contextmanager
def breaking(mutant: Mutant) -> Iterator[None]:
    """The function is broken meanwhile, in this process."""
    live = _live(importlib.import_module(mutant.module), mutant.function)
    before = live.__code__, live.__defaults__, live.__kwdefaults__
    live.__code__, live.__defaults__, live.__kwdefaults__ = _broken(mutant)
    _forget()
    try:
        yield
    finally:
        live.__code__, live.__defaults__, live.__kwdefaults__ = before
        _forget()


def _forget() -> None:
    """What the core has kept of earlier answers."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("elasticrl.core.", "elasticrl.contract.", "elasticrl.base.")):
            for value in vars(module).values():
                if callable(getattr(value, "cache_clear", None)):
                    value.cache_clear()


# ---- where a mutant is felt

IMPURE: Final = {"pop", "add", "append", "update", "setdefault", "discard", "extend", "remove"}


class Felt:
    """One run of the whole core, in which each mutant is computed beside what it would replace: where it never has another
    value, the run with it is the run without it.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self.at: dict[tuple[str, Path_], list[tuple[int, Mutant]]] = {}
        for i, mutant in enumerate(mutants()):
            if mutant.name in names:
                self.at.setdefault((mutant.module, mutant.old), []).append((i, mutant))
        self.found: set[int] = set()

    # What the instrumented source calls.

    def value(
        self, numbers: tuple[int, ...], old: Callable[[], object], new: tuple[Callable[[], object], ...]
    ) -> object:
        """The old value."""
        value = old()
        for number, other in zip(numbers, new, strict=True):
            if number not in self.found:
                try:
                    is_new = other()
                    same = is_new is value or (type(is_new) is type(value) and is_new == value)
                except Exception:  # noqa: BLE001 - it would have failed here
                    same = False
                if not same:
                    self.found.add(number)
        return value

    def test(self, numbers: tuple[int, ...], value: object, others: tuple[bool, ...]) -> object:
        """A condition that may be another."""
        self.found.update(number for number, other in zip(numbers, others, strict=True) if bool(value) is not other)
        return value

    def reached(self, numbers: tuple[int, ...]) -> bool:
        """The run comes here: nothing more is known."""
        self.found.update(numbers)
        return True

    # Making it.

    def source(self, module: str, node: ast.AST, path: Path_) -> ast.AST:
        """This node with its children instrumented, and then itself."""
        for field, value in ast.iter_fields(node):
            if isinstance(value, list):
                for i, item in enumerate(value):
                    if isinstance(item, ast.AST) and not isinstance(item, ast.Assert | ast.JoinedStr):
                        value[i] = self.source(module, item, (*path, (field, i)))
            elif isinstance(value, ast.AST) and not isinstance(value, ast.Assert | ast.JoinedStr):
                setattr(node, field, self.source(module, value, (*path, (field, None))))
        here = self.at.get((module, path), ())
        return self._felt(node, here) if here else node

    def _felt(self, node: ast.AST, here: Sequence[tuple[int, Mutant]]) -> ast.AST:
        numbers = ast.Tuple(elts=[ast.Constant(value=i) for i, _ in here], ctx=ast.Load())
        match node:
            case ast.If(test=test) | ast.IfExp(test=test):
                node.test = _call("test", numbers, test, _flags(" -> if True" in m.name for _, m in here))
            case ast.comprehension(ifs=ifs):
                for i, mutant in here:
                    j = next(j for j in range(len(ifs)) if _dropped(mutant, j))
                    ifs[j] = _call(
                        "test", ast.Tuple(elts=[ast.Constant(value=i)], ctx=ast.Load()), ifs[j], _flags([True])
                    )
            case ast.keyword():
                node.value = _both(numbers, node.value)
            case ast.arguments():
                pass  # (see `of`)
            case ast.expr() if _plain(node) and all(_plain(m.new) for _, m in here):
                new = ast.Tuple(elts=[_lambda(copy.deepcopy(m.new)) for _, m in here], ctx=ast.Load())
                return _call("value", numbers, _lambda(node), new)
            case ast.expr():
                return _both(numbers, node)
        return node

    @cached_property
    def codes(self) -> tuple[tuple[FunctionType, CodeType], ...]:
        """Each function, and its instrumented code."""
        found = []
        for name in sorted({module for module, _ in self.at}):
            module, whole = importlib.import_module(name), copy.deepcopy(tree(name))
            vars(module)["__felt__"] = self
            for _, function, path in functions(name):
                at, (field, i) = _get(whole, path[:-1]), path[-1]
                getattr(at, field)[i] = self.source(name, copy.deepcopy(function), path)
            code = compile(ast.fix_missing_locations(whole), name, "exec")
            found += [(_live(module, function), _find(code, function)) for function, _, _ in functions(name)]
        return tuple(found)

    def of(self, place: str) -> frozenset[str]:
        """The mutants that a run feels. (The default of a parameter counts as felt.)"""
        signal.signal(signal.SIGVTALRM, _too_long)
        self.found = {i for i, m in enumerate(mutants()) if isinstance(m.new, ast.arguments) and m.name in self.names}
        before = [(live, live.__code__) for live, _ in self.codes]
        for live, code in self.codes:
            live.__code__ = code
        _forget()
        try:
            wrong = looked(place)
        finally:
            for live, code in before:
                live.__code__ = code
            _forget()
        if wrong:
            raise RuntimeError(f"{place} does not hold as it is: {wrong}")
        return frozenset(mutants()[i].name for i in self.found)


def _get(at: ast.AST, path: Path_) -> ast.AST:
    for field, i in path:
        value = getattr(at, field)
        at = value if i is None else value[i]
    return at


def _dropped(mutant: Mutant, j: int) -> bool:
    whole = _get(tree(mutant.module), mutant.old)
    assert isinstance(whole, ast.comprehension)
    return mutant.name.partition(" -> for ...")[0].endswith(f"for ... if {ast.unparse(whole.ifs[j])}")


def _plain(node: ast.AST) -> bool:
    """May it be computed twice, and in a function of its own?"""
    return not any(
        isinstance(n, ast.NamedExpr) or (isinstance(n, ast.Attribute) and n.attr in IMPURE) for n in ast.walk(node)
    )


def _lambda(body: ast.AST) -> ast.Lambda:
    nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.Lambda(args=nothing, body=body)  # type: ignore[arg-type]


def _flags(flags: Iterable[bool]) -> ast.expr:
    return ast.Tuple(elts=[ast.Constant(value=flag) for flag in flags], ctx=ast.Load())


def _call(name: str, *args: ast.AST) -> ast.expr:
    of = ast.Attribute(value=ast.Name(id="__felt__", ctx=ast.Load()), attr=name, ctx=ast.Load())
    return ast.Call(func=of, args=list(args), keywords=[])  # type: ignore[arg-type]


def _both(numbers: ast.expr, node: ast.expr) -> ast.expr:
    pair = ast.Tuple(elts=[_call("reached", numbers), node], ctx=ast.Load())
    return ast.Subscript(value=pair, slice=ast.Constant(value=1), ctx=ast.Load())


@cache
def _felt_by(names: frozenset[str]) -> Felt:
    return Felt(names)


def felt(place: str, names: frozenset[str]) -> frozenset[str]:
    """The mutants, of these, that one run feels."""
    return _felt_by(names).of(place)


# ---- looking


NOWHERE: Final = "no run in which its value is another"


class TooLong(BaseException):
    """A run that does not end."""


def _too_long(*_: object) -> None:
    raise TooLong


def places(seeds: int) -> Iterator[str]:
    """Scenarios, those first that notice most of the listed mutants, then seeds."""
    often = Counter(mutant.caught_by for mutant in MUTANTS)
    names = sorted((path.stem for path in (ROOT / "chaos" / "scenarios").glob("*.yaml")), key=lambda n: (-often[n], n))
    yield from names
    yield from (str(seed) for seed in range(seeds))


@cache
def scenario(place: str) -> object:
    """Of a name or a seed."""
    from chaos.scenario import draw, load

    return draw(int(place)) if place.isdigit() else load(ROOT / "chaos" / "scenarios" / f"{place}.yaml")


def looked(place: str) -> str:
    """What is wrong with a run; empty if nothing is."""
    from chaos.scenario import Scenario
    from chaos.sim.drive import run

    what = scenario(place)
    assert isinstance(what, Scenario)
    signal.setitimer(signal.ITIMER_VIRTUAL, RUN_S)
    try:
        found = run(what, what.seed).violations
    except TooLong:
        return "does not end"
    except Exception as error:  # noqa: BLE001 - a mutant that crashes has been noticed
        return f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return f"{found[0].check}: {found[0].what}" if found else ""


def hunt(mutant: Mutant, budget_s: float, felt: Collection[str]) -> tuple[str, str]:
    """Who notices this mutant, and what: the first of the scenarios and seeds in which it is felt."""
    signal.signal(signal.SIGVTALRM, _too_long)
    begun = time.process_time()
    with breaking(mutant):
        for place in felt:
            if time.process_time() - begun > budget_s:
                return "", "no time left"
            if what := looked(place):
                return place, what
    return "", "" if felt else NOWHERE


UNIT: Final = tuple(sorted(str(path) for path in (ROOT / "tests" / "unit").glob("test_core_*.py")))


def by_unit_tests(mutant: Mutant) -> bool:
    """Does a unit test of the core notice it? In a process of its own, which the tests may leave as they like."""
    child = os.fork()
    if child == 0:
        import pytest

        with (
            breaking(mutant),
            Path(os.devnull).open("w") as nowhere,
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *UNIT])
        os._exit(int(code != 0))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def equivalent() -> dict[str, str]:
    """The mutants that are proven to change nothing, each with the reason."""
    rows = (line.partition("  # ") for line in EQUIVALENT.read_text().splitlines() if line and not line.startswith("#"))
    return {name.strip(): why.strip() for name, _, why in rows}


def one(mutant: Mutant, felt: Sequence[str], *, budget_s: float, unit: bool) -> tuple[str, str, str]:
    """A mutant's name, who notices it, and what."""
    place, what = hunt(mutant, budget_s, felt)
    if not place and unit and by_unit_tests(mutant):
        return mutant.name, "unit", what
    return mutant.name, place, what


def asked(name: str, felt: Sequence[str], budget_s: float, unit: bool) -> tuple[str, str, str]:
    """The same in another process, which makes its own mutants."""
    return one(next(m for m in mutants() if m.name == name), felt, budget_s=budget_s, unit=unit)


def chosen(sample: int, only: Sequence[str]) -> list[Mutant]:
    """All, or one of so many by a hash of its name, so that new code does not move the others."""
    some = [m for m in mutants() if not only or any(part in m.name for part in only)]
    return [m for m in some if int(blake2b(m.name.encode(), digest_size=4).hexdigest(), 16) % sample == 0]


def felt_in(names: frozenset[str], seeds: int, pool: ProcessPoolExecutor) -> dict[str, list[str]]:
    """Where each mutant is felt, in the order to look. It is kept under out/ as long as no source and no scenario changes."""
    globs = (
        "elasticrl/base/*.py",
        "elasticrl/contract/*.py",
        "elasticrl/core/**/*.py",
        "chaos/*.py",
        "chaos/sim/*.py",
        "chaos/scenarios/*.yaml",
    )
    sources = sorted(path for glob in globs for path in ROOT.glob(glob))
    told = b"".join(path.read_bytes() for path in sources) + f"{sorted(names)} {seeds}".encode()
    kept = ROOT / "out" / "chaos" / f"felt-{blake2b(told, digest_size=8).hexdigest()}.json"
    if kept.exists():
        before: dict[str, list[str]] = json.loads(kept.read_text())
        return before
    where: dict[str, list[str]] = {name: [] for name in names}
    for place, found in zip(places(seeds), pool.map(partial(felt, names=names), places(seeds)), strict=True):
        for name in found:
            where[name].append(place)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(where, sort_keys=True))
    return where


def table(args: argparse.Namespace) -> int:
    """Break each in turn; print who noticed; 1 if too few were noticed."""
    known, some, begun = equivalent(), chosen(args.sample, args.only), time.monotonic()
    for name in sorted(known.keys() - {m.name for m in mutants()}):
        print(f"equivalent.txt names what is no mutant (any more): {name}")
    tried = [m.name for m in some if m.name not in known]
    counts: Counter[str] = Counter()
    with ProcessPoolExecutor(args.workers) as pool:
        where = felt_in(frozenset(tried), args.seeds, pool)
        hunts = pool.map(partial(asked, budget_s=args.each, unit=args.unit), tried, [where[name] for name in tried])
        for name, place, what in hunts:
            who = kind_of(place, what)
            counts[who] += 1
            if args.verbose or not place or place == "unit":
                print(f"{place or '-':<40} {name}  {what[:100]}", flush=True)
    noticed = len(tried) - counts["nothing"] - counts["nothing, nor felt"]
    equal = len(some) - len(tried)
    print(f"\n{len(mutants())} mutants, {len(some)} tried, {equal} proven equal, {time.monotonic() - begun:.0f} s")
    for who in ("scenarios", "seeds", "unit tests only", "nothing", "nothing, nor felt"):
        print(f"  noticed by {who:<20}{counts[who]:>6}")
    return 1 if noticed < args.least / 100 * len(tried) else 0


def kind_of(place: str, what: str) -> str:
    """Who has noticed it: a row of the table."""
    if not place:
        return "nothing, nor felt" if what == NOWHERE else "nothing"
    return "unit tests only" if place == "unit" else "seeds" if place.isdigit() else "scenarios"


def main(argv: list[str] | None = None) -> int:
    """Parse, act, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chaos.mutate", description=__doc__)
    parser.add_argument("--sample", type=int, default=1, help="only one mutant of so many")
    parser.add_argument("--only", action="append", default=[], help="only mutants with this in their names")
    parser.add_argument("--each", type=float, default=EACH_S, help="seconds of computing for one mutant")
    parser.add_argument("--unit", action="store_true", help="ask the core's unit tests, too, where all else is silent")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many seeds are looked at after the scenarios")
    parser.add_argument("--least", type=float, default=100.0, help="per cent that have to be noticed")
    parser.add_argument("--list", action="store_true", help="print the names, and do nothing")
    parser.add_argument("--verbose", action="store_true", help="print each")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    if args.list:
        print("\n".join(m.name for m in chosen(args.sample, args.only)))
        return 0
    return table(args)


if __name__ == "__main__":
    if not sys.flags.optimize:  # the core's own asserts would notice what the judge has to
        os.execv(sys.executable, [sys.executable, "-O", "-m", "chaos.mutate", *sys.argv[1:]])
    sys.exit(main())
