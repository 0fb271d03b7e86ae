"""A script's life in a process of its own that need not import torch first: a child of the fork server that gangs use too."""

import json
import multiprocessing
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forked_workers import PRELOAD

HEAD = """
import torch
import elasticrl.runtime
from elasticrl.runtime.data.cursor import Cursor, SampleId, Walk
from elasticrl.runtime.data.loader import StreamLoader
from elasticrl.runtime.optim import SGD, AdamW
from elasticrl.runtime.vault.slots import pin
from elasticrl.runtime.vault.source import shard_of
"""


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


def start(
    folder: Path, script: str, *args: str, lanes: int = 1, allow: Sequence[str] = (), strategy: str = "replicated"
) -> Life:
    """One life of a script, alone; what it made is in `folder`."""
    conf = {
        "job": {"name": "job", "program": "job.py"}, "store": {"embedded": True}, "node": {"name": "n0"},
        "membership": {"max_nodes": 1}, "lanes": {"count": lanes}, "vault": {"dir": str(folder / "vault")},
        "checkpoint": {"dir": str(folder / "saves"), "every": 1000, "allow": list(allow)},
        "model": {"strategy": strategy},
    }  # fmt: skip
    (folder / "job.yaml").write_text(json.dumps(conf))
    (folder / "job.py").write_text(HEAD + script)
    return live(folder / "job.py", *args)
