"""A script's life in a process of its own that need not import torch first: a child of the fork server that gangs use too."""

import multiprocessing
import os
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

from forked_workers import PRELOAD


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """How it ended, and what it said."""

    returncode: int | None
    stdout: str
    stderr: str


def _live(script: str, args: list[str], out: str, err: str) -> None:
    for path, number in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.chdir(Path(script).parent)
    sys.argv = [script, *args]
    runpy.run_path(script, run_name="__main__")
    sys.stdout.flush()


def live(script: Path, *args: str, within_s: float = 120.0) -> Life:
    """Run it to its end, in its own folder."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    out, err = script.with_suffix(".out"), script.with_suffix(".err")
    process = context.Process(target=_live, args=(str(script), list(args), str(out), str(err)))
    process.start()
    process.join(within_s)
    if process.exitcode is None:
        process.kill()
        process.join()
    return Life(returncode=process.exitcode, stdout=out.read_text(), stderr=err.read_text())
