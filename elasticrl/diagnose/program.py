"""Whether what workers are to run is on this machine and can be run: found out before one of them is started.

The one idea: a script is read, and never run. What it imports in its first lines is known from its text.
"""

import ast
import os
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Final

from elasticrl.config import Tree
from elasticrl.contract.level import means_of

DYNAMO: Final = "torch._dynamo"
EARLY: Final = "elasticrl.hf.early"
#: What a package imports and prepares at its first use, by its name: found to take seconds of a worker's start.
FIRST_USE: Final = {
    "accelerate": (DYNAMO, EARLY),
    "transformers": (DYNAMO, EARLY),
    "trl": (DYNAMO, EARLY),
    "lightning": (DYNAMO,),
    "elasticrl.hf": ("elasticrl.hf.elastic", "elasticrl.hf.prepared", DYNAMO, EARLY),
}
REMEDY: Final = "name one that is: job.program=..."


def absent(tree: Tree) -> str:
    """Why `job.program` cannot be started here, and what to do; empty if it can, or is a module, which workers look for."""
    program = tree.job.program
    if not program.endswith(".py"):
        return "" if means_of(tree.job.level).joins else _no_module(program)
    if not Path(program).is_file():
        return f"job.program: {program} is not here; {REMEDY}"
    return "" if means_of(tree.job.level).joins else unfit(Path(program))


def _no_module(program: str) -> str:
    """Why a module of this name cannot be run here, as far as that is known without importing it."""
    if program.startswith("-m"):
        return f"job.program: {program} has an option in it; name the module alone: job.program={program[2:].strip()}"
    if os.sep in program or Path(program).is_file():
        return (
            f"job.program: {program} is not a Python file (its name must end with .py), nor a module's name; {REMEDY}"
        )
    if not _found(program.partition(".")[0], Path.cwd()):
        return f"job.program: there is no module {program} here; {REMEDY}"
    file = module_file(program, Path.cwd())
    return unfit(file, Path.cwd()) if file else ""


def module_file(name: str, here: Path) -> Path | None:
    """The file that `python -m NAME` runs in this folder, found without running anything; None if that is not known."""
    first, *rest = name.split(".")
    found = PathFinder.find_spec(first, [str(here)]) or PathFinder.find_spec(first)
    if found is None or not found.origin:
        return None
    place = Path(found.origin)
    if not rest and not found.submodule_search_locations:
        return place
    inner = place.parent.joinpath(*rest)
    files = (inner.with_suffix(".py"), inner / "__main__.py") if rest else (place.parent / "__main__.py",)
    return next((file for file in files if file.is_file()), None)


def unfit(script: Path, here: Path | None = None) -> str:
    """Why a script cannot run here, by its text; empty if nothing speaks against it. `here`: where it finds modules first."""
    try:
        tree = _parsed(script)
    except (SyntaxError, ValueError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        return f"job.program: {script}{where} is not Python that can be run ({said}); mend it, or {REMEDY}"
    except OSError as error:
        return f"job.program: {script} cannot be read ({error.strerror}); make it readable for this user, or {REMEDY}"
    lacking = [name for name in dict.fromkeys(_needed(tree)) if not _found(name, here or script.resolve().parent)]
    if lacking:
        what = f"module {lacking[0]}" if len(lacking) == 1 else f"modules {', '.join(lacking)}"
        return (
            f"job.program: {script} needs the {what}, which {'is' if len(lacking) == 1 else 'are'} not here; install that for "
            f"{sys.executable}, or put it into the script's folder"
        )
    return ""


def imports(program: str) -> tuple[str, ...]:
    """What a program imports before it does anything else, of modules that are installed: "module", or "module:name".

    Found to matter: what a script sets before an import (an environment variable) may decide what that import does, so the list
    ends with the first statement of another kind. Its own folder is left out: a mended module must be read again.
    """
    script = Path(program) if program.endswith(".py") else module_file(program, Path.cwd())
    if script is None:
        return ()
    try:
        tree = _parsed(script)
    except (SyntaxError, ValueError, OSError):
        return ()
    here = script.resolve().parent if program.endswith(".py") else Path.cwd()
    found: list[str] = []
    for node in tree.body:
        match node:
            case ast.Expr(value=ast.Constant()):
                continue
            case ast.ImportFrom(module="__future__"):
                continue
            case ast.Import(names=names):
                found += [name.name for name in names]
            case ast.ImportFrom(module=str(module), names=names, level=0):
                found += [module if name.name == "*" else f"{module}:{name.name}" for name in names]
            case _:
                break
    found = [name for name in found if _installed(name, here)]
    later = [
        more
        for name in found
        for package, more in FIRST_USE.items()
        if f"{name.partition(':')[0]}.".startswith(f"{package}.")
    ]
    return tuple(dict.fromkeys((*found, *chain.from_iterable(later))))


def _parsed(script: Path) -> ast.Module:
    return ast.parse(script.read_bytes(), filename=str(script))


def _needed(tree: ast.Module) -> Iterator[str]:
    """The first names of what is imported at the top of a module, for certain: not under a condition, not in a `try`."""
    for node in tree.body:
        match node:
            case ast.Import(names=names):
                yield from (name.name.partition(".")[0] for name in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module.partition(".")[0]


def _found(name: str, here: Path) -> bool:
    if name in sys.builtin_module_names or PathFinder.find_spec(name, [str(here)]) is not None:
        return True
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _installed(name: str, here: Path) -> bool:
    first = name.partition(":")[0].partition(".")[0]
    return PathFinder.find_spec(first, [str(here)]) is None and _found(first, here)
