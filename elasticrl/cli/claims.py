"""That one `elasticrl run` alone plays a job here: two would end each other's etcd and vaults.

The one idea: what is locked is what two of them would share, wherever each has its sockets: those lie elsewhere in a session by
ssh than in one by cron, tmux or sudo.
"""

import fcntl
import os
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import typer

from elasticrl.base.owned import made_closed, opened, strange, taken_by
from elasticrl.cli import find
from elasticrl.cli.main import Exit


def refused(why: str) -> typer.Exit:
    """To be raised, once it is said."""
    typer.echo(why, err=True)
    return typer.Exit(Exit.REFUSED)


@contextmanager
def claimed(tree: Any, run_dir: Path, names: list[str]) -> Iterator[None]:
    """Inside, no other run on this machine plays this job, and no daemon that was started by hand has one of these names."""
    job, state = tree.job.name, Path(tree.node.state_dir) / tree.job.name
    with ExitStack() as held:
        try:
            made_closed(Path(tree.telemetry.log_dir) / job)
            (run_dir / job).mkdir(mode=0o700, exist_ok=True)
            claim(held, run_dir / job, job, run_dir)
            with nullcontext() if tree.store.embedded else suppress(OSError):  # else a daemon says what it lacks
                made_closed(state)
                claim(held, state, job, run_dir)
            claim_memory(held, Path(tree.vault.dir) / job, job)
        except OSError as error:
            rule = "telemetry.log_dir and node.state_dir must be yours to write"
            raise refused(f"{error.filename}: {error.strerror}; {rule}") from None
        for name, pid in daemons_of(state):
            if tree.store.embedded or name in names:
                ends = f"elasticrl drain {name} --job {job}, systemctl stop elasticrl, or kill {pid}"
                raise refused(
                    f"a daemon of job {job} runs on this machine already: {name}, process {pid}. End it first ({ends}); or "
                    "give this run a name of its own: job.name=..."
                )
        yield


def claim(held: ExitStack, folder: Path, job: str, run_dir: Path) -> None:
    """Lock a folder until the end of `held`, and say in the lock where the sockets are; refused if another run has it."""
    if strange(folder):
        return  # what somebody else can put there says nothing; whoever uses the folder says so
    lock = held.enter_context(opened(folder / find.RUN_LOCK))
    if said := taken_by(lock, str(run_dir)):
        pid, _, where = said.partition(" ")
        more = f" --run-dir {shlex.quote(where)}" if where not in {"", str(run_dir)} else ""
        asked = f"--job {job}{more}"
        raise refused(
            f"job {job} runs on this machine already, by `elasticrl run` in another session (process {pid}). See it: elasticrl "
            f"status {asked}; end it: elasticrl stop {asked}; or give this one a name of its own: job.name=..."
        )


def claim_memory(held: ExitStack, vaults: Path, job: str) -> None:
    """The same for where a job's vaults are: the folder itself is locked, as a file in it would be left after SIGKILL."""
    try:
        vaults.mkdir(parents=True, mode=0o700, exist_ok=True)
        folder = os.open(vaults, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return  # then no vault can be there; the daemons say so
    held.callback(removed, vaults)
    held.callback(os.close, folder)
    if strange(vaults):
        return
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise refused(
            f"a job {job} runs on this machine already, by `elasticrl run` in another session: its vaults are in {vaults}. "
            "End it first; or give this one a name of its own: job.name=..., or another vault.dir"
        ) from None


def removed(folder: Path) -> None:
    """Unless there is something in it."""
    with suppress(OSError):
        folder.rmdir()


def daemons_of(state: Path) -> Iterator[tuple[str, str]]:
    """The daemons of a job that run on this machine, by their locks in its state: node and process."""
    from elasticrl.daemon.life import LOCK

    for path in sorted(state.glob(f"*/{LOCK}")):
        with suppress(OSError), opened(path) as lock:
            if pid := taken_by(lock):
                yield path.parent.name, pid
