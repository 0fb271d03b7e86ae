"""A worker process from its start to its end: get warm, wait for a rank, run the program.

The one idea: the program is run inside a process that has done everything slow already, as if it had been started by torchrun:
as `__main__`, with its arguments and torchrun's variables. torch's own classes start this function and read how it ended.
"""

import ast
import atexit
import contextlib
import importlib
import importlib.util
import json
import os
import runpy
import socket
import sys
import traceback
from pathlib import Path
from typing import Final

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from elasticrl.agent import warm
from elasticrl.base import raised
from elasticrl.base.parent import die_with, pass_over
from elasticrl.base.title import title
from elasticrl.base.value import dataclass
from elasticrl.contract.beats import Beat
from elasticrl.contract.orders import Halt, Place
from elasticrl.contract.seat import OwnSeat, open_log, take_place
from elasticrl.diagnose import witness

LOCAL_RANK: Final = "${local_rank}"  # what torchrun replaces in a script's arguments
CLAIM: Final = "loaded"  # what a script calls when it has loaded all that needs no rank
ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"  # where torch's own handler writes
IDLE_S: Final = 5.0  # a process that has waited so long for a rank is in nobody's way


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a process needs to know before it has a rank."""

    program: tuple[str, ...]
    args: tuple[str, ...]
    page: str
    log: str  # until it has a rank
    witness: str  # the folder where it answers for its stack and its flight recorder
    ahead: str = ""  # the module whose fork() is called before there are threads; "": there is none
    fingerprint: str = ""  # the module with bits() and versions(), of what computes here; "": nobody asks
    joins: bool = True  # the program asks for its rank; else it is one as torchrun runs it
    unset: tuple[str, ...] = ()  # variables that were for the fork server alone
    later: tuple[str, ...] = ()  # modules to import if there is nothing else to do
    load_ahead: bool = False  # and then run the program, as far as it comes without a rank


def main(channel: socket.socket, job: Job) -> None:
    """The whole life of a worker. It never returns: what torch's wrapper would do after it can hang or lose the log."""
    die_with(int(os.environ[warm.PARENT]))
    os.setsid()  # its children can be ended with it
    title("spare")
    open_log(job.log)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        live(channel, job)
        end(0)
    except SystemExit as left:
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
        end(left.code if isinstance(left.code, int) else int(left.code is not None))
    except Exception as error:  # noqa: BLE001 - whatever a program raises; it goes to its log and to the error file
        fail(error)


def fail(error: BaseException) -> None:
    """End by what the program has raised. It ends so too where its disk is full, and where it has taken the error file's name
    from its environment, or put another file there.
    """
    traceback.print_exc()
    with contextlib.suppress(OSError, LookupError, TypeError, ValueError):
        confess(error, Path(os.environ[ERROR_FILE]))
    end(1)


def confess(error: BaseException, file: Path) -> None:
    """As torch's `@record` does, and with the full name of what was raised: two libraries may call theirs alike."""
    get_error_handler().record_exception(error)
    told = json.loads(file.read_text(encoding="utf-8"))
    told["message"]["extraInfo"][raised.KEY] = raised.name_of(error)
    whole = file.with_name(f"{file.name}.whole")  # a disk that fills now leaves torch's words as they are
    whole.write_text(json.dumps(told), encoding="utf-8")
    whole.replace(file)


def live(channel: socket.socket, job: Job) -> None:
    """Get warm, wait for a rank, run the program."""
    if warm.failure:
        print(warm.failure, file=sys.stderr)
        raise ImportError(warm.failure.strip().rpartition("\n")[2])
    if job.ahead:
        importlib.import_module(job.ahead).fork()
    pass_over()
    for name in job.unset:
        os.environ.pop(name, None)
    witness.stand(Path(job.witness))
    get_error_handler().initialize()
    seat = OwnSeat(channel, Beat(Path(job.page)))
    told = importlib.import_module(job.fingerprint) if job.fingerprint else None
    seat.ready(*((str(told.bits()), str(told.versions())) if told else ()))
    if seat.expect(IDLE_S) is None:
        warm.load_later(job.later)
        why = unfit(job) if job.load_ahead else ""
        if job.load_ahead and not why and seat.expect(0.0) is None:
            seat.begin_early(script=not job.joins)
            run(job.program, job.args)
            return
        if why:
            print(f"elasticrl: nothing is loaded ahead (agent.load_ahead): {why}", file=sys.stderr)
    order = seat.expect()
    if isinstance(order, Place):
        take_place(order)  # what the program prints before it looks at its seat belongs there too
    if isinstance(order, Halt):
        return
    args = job.args
    if not job.joins:
        seat.begin()
        args = own_args(args, os.environ["LOCAL_RANK"])
    run(job.program, args)


def unfit(job: Job) -> str:
    """Why this program may not begin before it has a rank; "": it may."""
    if any(LOCAL_RANK in arg for arg in job.args):
        return f"the arguments name {LOCAL_RANK}"
    if not job.joins and not calls(source_of(job.program), CLAIM):
        return f"the script's own file does not call elasticrl.{CLAIM}(), so it would train without a rank"
    return ""


def source_of(program: tuple[str, ...]) -> str:
    """The text of the program's own file, "" if there is none."""
    path: str | None = program[0]
    try:
        if program[0] == "-m":
            spec = importlib.util.find_spec(program[1])
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{program[1]}.__main__")
            path = spec.origin if spec else None
        return Path(path or "").read_text(encoding="utf-8", errors="replace")
    except (OSError, ImportError, ValueError):
        return ""


def calls(source: str, name: str) -> bool:
    """Does this source call that function of elasticrl?

    >>> calls("import elasticrl as e; e.loaded()", "loaded"), calls("print('loaded')", "loaded")
    (True, False)
    """
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError):
        return False
    here: set[str] = set()  # what stands for the package, and what for the function
    for node in nodes:
        if isinstance(node, ast.Import):
            here |= {alias.asname or "elasticrl" for alias in node.names if alias.name == "elasticrl"}
        if isinstance(node, ast.ImportFrom) and node.module == "elasticrl":
            here |= {f".{alias.asname or name}" for alias in node.names if alias.name == name}
    called = {node.func for node in nodes if isinstance(node, ast.Call)}
    return any(
        (
            isinstance(func, ast.Attribute)
            and func.attr == name
            and isinstance(func.value, ast.Name)
            and func.value.id in here
        )
        or (isinstance(func, ast.Name) and f".{func.id}" in here)
        for func in called
    )


def own_args(args: tuple[str, ...], local_rank: str) -> tuple[str, ...]:
    """A script's arguments on one rank, as torchrun would give them.

    >>> own_args(("--device", "cuda:${local_rank}"), "3")
    ('--device', 'cuda:3')
    """
    return tuple(arg.replace(LOCAL_RANK, local_rank) for arg in args)


def run(program: tuple[str, ...], args: tuple[str, ...]) -> None:
    """As `python PROGRAM ARGS` would."""
    if program[0] == "-m":
        sys.argv = [program[1], *args]
        if sys.flags.safe_path:
            sys.path.insert(0, str(Path.cwd()))
        # It may have been imported beforehand, for what it imports: runpy would warn of that in every worker's log.
        sys.modules.pop(f"{program[1].removesuffix('.__main__')}.__main__", None)
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [program[0], *args]
        sys.path.insert(0, str(Path(program[0]).resolve().parent))
        runpy.run_path(program[0], run_name="__main__")


def end(code: int) -> None:
    """Leave at once: what is registered to run at exit runs, and what hangs in a library's own clean-up cannot."""
    try:
        atexit._run_exitfuncs()  # noqa: SLF001 - multiprocessing's children run none, and programs count on theirs
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)
