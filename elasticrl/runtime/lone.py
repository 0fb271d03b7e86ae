"""A job without a daemon: whose memory lies in its vault.

The one idea: alone nobody else says who a job is, so its run's folder does. The vault is named after that folder's path, one
process at a time has it, and what lies there goes if the folder is no longer the one that it was made beside.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from hashlib import blake2b
from typing import IO, TYPE_CHECKING

from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.vault.slots import BESIDE, files, prepare

if TYPE_CHECKING:
    from pathlib import Path


def mark(notes_dir: Path) -> str:
    """What tells a run's vault from those of other runs of that name."""
    return blake2b(os.fsencode(notes_dir.absolute()), digest_size=4).hexdigest()


def claim(vault: Path, notes_dir: Path) -> IO[str]:
    """Be the only process of this run, or Misuse: until what is returned is closed. What another run has left goes."""
    prepare(vault)
    lock = (vault / "lock").open("a+", encoding="ascii")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        pid = lock.read().strip() or "unknown"
        lock.close()
        raise Misuse(
            f"another process makes this run ({notes_dir}, pid {pid}): end it first, or give this one another job.name or "
            "checkpoint.dir; for several workers start it with `elasticrl run`"
        ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    if _life(notes_dir / BESIDE) != _read(vault / BESIDE):
        for path, _ in files(vault):
            path.unlink(missing_ok=True)
        (vault / BESIDE).write_text(_life(notes_dir / BESIDE), encoding="ascii")
    return lock


def _life(file: Path) -> str:
    """What this folder's run is known by, made up where it is new."""
    if not (known := _read(file)):
        file.parent.mkdir(parents=True, exist_ok=True)
        known = secrets.token_hex(8)
        file.write_text(known, encoding="ascii")
    return known


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return ""
