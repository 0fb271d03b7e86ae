"""A job without a daemon: whose memory lies in its vault.

The one idea: alone nobody else says who a job is, so its run's folder does. The vault is named after that folder's path, one
process at a time has it, and what lies there goes if the folder is no longer the one that it was made beside.
"""

from __future__ import annotations

import os
import secrets
import weakref
from hashlib import blake2b
from typing import IO, TYPE_CHECKING

from elasticrl.base.owned import made_closed, taken_by
from elasticrl.contract.orders import Place
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.vault.errors import DataError
from elasticrl.runtime.vault.slots import BESIDE, files, prepare

if TYPE_CHECKING:
    from pathlib import Path

    from elasticrl.runtime.keeper import Keeper


_held: weakref.WeakSet[IO[str]] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked child (a data loader's worker) must not keep the run from who begins it again after a kill."""
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_forget_in_child)


def mark(notes_dir: Path) -> str:
    """What tells a run's vault from those of other runs of that name. Short: an engine's socket may lie below it."""
    return blake2b(os.fsencode(notes_dir.absolute()), digest_size=3).hexdigest()


def claim(vault: Path, notes_dir: Path) -> IO[str]:
    """Be the only process of this run, or Misuse: until what is returned is closed. What another run has left goes."""
    try:
        lock = (prepare(vault) / "lock").open("a+", encoding="ascii")
        _held.add(lock)
        try:
            if pid := taken_by(lock):
                raise Misuse(
                    f"another process makes this run ({notes_dir.absolute()}, pid {pid}): end it first, or give this one "
                    "another job.name or checkpoint.dir; for several workers start it with `elasticrl run`"
                )
            _tidy(vault, notes_dir)
        except BaseException:
            lock.close()
            raise
    except OSError as error:
        raise DataError(
            f"The run cannot be begun in {notes_dir.absolute()} ({error.strerror or error}): checkpoint.dir must be a folder "
            "that can be written to."
        ) from error
    return lock


def only_place(keeper: Keeper) -> Place:
    """That of a world of one, in a generation that is newer than all that is known here."""
    shelf, context = keeper.shelf(), keeper.context
    known = [holding.generation for holding in keeper.holdings()] + [entry.generation for entry in shelf]
    generation = max(known, default=0) + 1
    newest = max(shelf, key=lambda entry: (entry.generation, entry.version), default=None)
    saved = newest.version.step if newest else 0  # elsewhere, perhaps: memory here may be older
    return Place(
        generation=generation, born=generation, rank=0, world=1, all_lanes=context.tree.lanes.count, resume=saved,
        nodes=(context.node,),
    )  # fmt: skip


def _tidy(vault: Path, notes_dir: Path) -> None:
    """What lies there belongs to this run."""
    life = _life(notes_dir / BESIDE)
    if life != _read(vault / BESIDE):
        for path, _ in files(vault):
            path.unlink(missing_ok=True)
        (vault / BESIDE).write_text(life, encoding="ascii")


def _life(file: Path) -> str:
    """What this folder's run is known by, made up where it is new."""
    if not (known := _read(file)):
        made_closed(file.parent)
        known = secrets.token_hex(8)
        file.write_text(known, encoding="ascii")
    return known


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return ""
