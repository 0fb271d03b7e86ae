"""Which committed checkpoints of a job there are, for `daemon.adopt`: the daemon itself knows nothing of their format.

Where each node has a disk of its own, this one's are looked at: what one node has a part of was committed for all.
"""

import socket
from pathlib import Path
from typing import Any

from elasticrl.config import run_dir
from elasticrl.core.node.adopt import Kept
from elasticrl.daemon.adopt import Look, Lost


def checkpoints(tree: Any) -> Look:
    """Looks where this configuration's job keeps its checkpoints."""

    def look(verify: bool) -> Kept | None:
        found = [kept for where in places(tree) if (kept := look_at(where, verify)) is not None]
        return max(found, key=lambda kept: (kept.step, kept.generation), default=None)

    def look_at(where: str, verify: bool) -> Kept | None:
        from elasticrl.runtime.checkpoint.place import place
        from elasticrl.runtime.checkpoint.shelf import listing, newest_good
        from elasticrl.runtime.vault.errors import StateError

        try:
            entries = listing(place(where))
            # What another job committed was brought here on purpose, for a new job to begin with.
            own = [
                entry
                for entry in entries
                if entry.committed and entry.manifest and entry.manifest.facts.job == tree.job.name
            ]
            good = newest_good(place(where)) if own and verify else None
        except StateError as error:
            raise Lost(str(error)) from None
        if not own:
            return None
        name = good.manifest.name if good else own[0].name
        chosen = next(entry for entry in entries if entry.name == name)
        newest = max(entry.generation for entry in entries)
        return Kept(place=where, name=name, step=chosen.version.step, generation=chosen.generation, newest=newest)

    return look


def places(tree: Any) -> list[str]:
    """Where this machine has checkpoints of the job: in one directory, or in one for each node whose disk it is."""
    node = tree.node.name or socket.gethostname()
    where = run_dir(tree, node)
    if tree.checkpoint.shared or "://" in where:
        return [where]
    return sorted(map(str, Path(where).parent.glob("*/"))) or [where]
