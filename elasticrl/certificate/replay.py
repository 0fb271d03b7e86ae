"""Computes certified steps again, from the checkpoint before them, with one worker, and compares the bits.

The one idea: a run that was begun in another folder, from a copy of one checkpoint, is a run like any other. So the job's own
program computes, and what is compared is what it writes of each step; it is ended when it has come far enough.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from elasticrl.certificate.form import Certificate
from elasticrl.certificate.make import Uncertain
from elasticrl.config import Tree, digest, dumps
from elasticrl.runtime.checkpoint.place import place
from elasticrl.runtime.checkpoint.shelf import read_manifest
from elasticrl.runtime.chronicle import History, compare
from elasticrl.runtime.chronicle import read as read_digests
from elasticrl.runtime.context import CONFIG, NODE, VAULT
from elasticrl.runtime.vault.errors import StateError

LOOK_S: Final = 0.1
TAIL: Final = 2000  # letters of what the program said last
NO_SAVE: Final = 1_000_000_000  # steps


def steps_of(text: str) -> tuple[int, int]:
    """What `--replay` names: A..B, or one step.

    >>> steps_of("300..310"), steps_of("7")
    ((300, 310), (7, 7))
    """
    first, _, last = text.partition("..")
    found = int(first), int(last or first)
    if not 0 <= found[0] <= found[1]:
        raise ValueError(text)
    return found


def replay(body: Certificate, run: Path, tree: Tree, first: int, last: int, *, within_s: float) -> tuple[str, ...]:
    """What differs in the states after `first` to `last` steps; nothing if all bits are the same. Uncertain if they cannot be
    computed again.
    """
    wanted = {state.step: state.digest for state in body.states if first <= state.step <= last}
    if not wanted:
        raise Uncertain(
            f"the certificate has no digest of steps {first} to {last}; its last is of {body.states[-1].step}"
        )
    configs = {each.config for each in body.generations if each.config}
    if configs and digest(tree) not in configs:
        raise Uncertain("the configuration is not the run's: its hash is none of those in the certificate")
    with _folder() as folder:
        begun = _copy(body, run, folder / "saves" / tree.job.name, first)
        with _program(tree, folder, body.kind) as program:
            found = _await(program, folder / "saves" / tree.job.name, max(wanted), within_s, folder / "output")
    certified = History(steps=wanted, kind=body.kind, bits=body.bits)
    again = History(steps={s: d for s, d in found.steps.items() if s in wanted}, kind=found.kind, bits=found.bits)
    compared = compare(certified, again)
    if compared.ok and compared.steps == len(wanted):
        return ()
    return (f"steps {first} to {last} were computed again from step {begun}: {compared.sentence}",)


@contextmanager
def _folder() -> Iterator[Path]:
    found = Path(tempfile.mkdtemp(prefix="elasticrl-replay-"))
    try:
        yield found
    finally:
        shutil.rmtree(found, ignore_errors=True)


def _copy(body: Certificate, run: Path, into: Path, first: int) -> int:
    """Puts the newest certified checkpoint before this step there; the step. From the beginning if there is none."""
    links = {state.step: state.link for state in body.states}
    fit = []
    with suppress(StateError, OSError):
        for name in place(run).names():
            manifest = read_manifest(place(run), name)
            step = manifest.version.step
            if step < first and not manifest.version.update and manifest.chain == links.get(step):
                fit.append((step, name))
    if not fit:
        return 0
    step, name = max(fit)
    into.mkdir(parents=True, mode=0o700)
    shutil.copytree(run / name, into / name)
    return step


@contextmanager
def _program(tree: Tree, folder: Path, kind: str) -> Iterator[subprocess.Popen[bytes]]:
    """The job's program, alone, in this folder; it ends with the block."""
    changed = {
        "checkpoint": {
            "dir": str(folder / "saves"),
            "every": NO_SAVE,
            "keep_every": 0,
            "keep_best": False,
            "shared": True,
        },
        "evaluate": {"every": 0, "at_start": False},  # no bit depends on it, and its prompts may not be here
        "vault": {"dir": str(folder / "vault")},
        "node": {"state_dir": str(folder / "state")},
        "telemetry": {"log_dir": str(folder / "log"), "tensorboard": None, "wandb": None, "mlflow": None},
        "lanes": {"digest": kind},
    }
    other = tree.model_copy(
        update={name: getattr(tree, name).model_copy(update=values) for name, values in changed.items()}
    )
    config = folder / "config.json"
    config.write_text(dumps(other), encoding="utf-8")
    env = {name: value for name, value in os.environ.items() if name not in (VAULT, NODE)}
    env |= {CONFIG: str(config), "OMP_NUM_THREADS": str(tree.lanes.threads), **dict(tree.agent.env)}
    program = [tree.job.program] if tree.job.program.endswith(".py") else ["-m", tree.job.program]
    with (folder / "output").open("wb") as out:
        found = subprocess.Popen(
            [sys.executable, *program, *tree.job.args],
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield found
    finally:
        with suppress(ProcessLookupError):
            os.killpg(found.pid, signal.SIGKILL)
        found.wait()


def _await(program: subprocess.Popen[bytes], run: Path, last: int, within_s: float, output: Path) -> History:
    """What the program has written of its steps, once it has come to the last."""
    limit = time.monotonic() + within_s
    while True:
        over = program.poll()
        with suppress(StateError, OSError):
            found = read_digests(run)
            if last in found.steps:
                return found
        if over is not None or time.monotonic() > limit:
            tail = output.read_bytes()[-TAIL:].decode(errors="replace")
            how = f"ended with exit code {over}" if over is not None else f"was not there within {within_s:g} s"
            raise Uncertain(f"the job's program {how} before step {last} was computed again. It said last: {tail}")
        time.sleep(LOOK_S)
