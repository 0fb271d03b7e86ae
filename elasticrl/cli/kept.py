"""Which committed checkpoints of a job there are, for `daemon.adopt`: the daemon itself knows nothing of their format."""

from typing import Any

from elasticrl.core.adopt import Kept
from elasticrl.daemon.adopt import Look, Lost


def checkpoints(tree: Any) -> Look:
    """Looks where this configuration's job keeps its checkpoints."""
    where = f"{tree.checkpoint.dir.rstrip('/')}/{tree.job.name}"

    def look(verify: bool) -> Kept | None:
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
