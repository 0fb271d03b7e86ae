"""One node's vault: which versions of whose shards are in its memory, and which a newer one pushes out.

The one idea: memory is short, so of each node's shards two versions are held, as in a real vault once a third is being written;
which of them stays is the product's own rule.
"""

from collections.abc import Collection, Mapping

from elasticrl.base.keeping import stays

Key = tuple[int, int]  # a version, and the generation that made it
HELD = 2  # versions of one node's shards


class Vault:
    """The memory, and the process that serves it to other nodes."""

    def __init__(self) -> None:
        self.serves = True  # the process runs: copies come and go, and others may fetch. What is held outlives it
        self._held: dict[str, dict[Key, int]] = {}  # by whose shards: versions, and which shards as a bit mask

    @property
    def empty(self) -> bool:
        """Is there nothing to lose?"""
        return not any(self._held.values())

    def lose(self) -> None:
        """The memory is gone."""
        self._held = {}

    def keep(self, origin: str, key: Key, shards: int, sealed: Collection[Key]) -> None:
        """These shards of `origin`, in the place of what need not stay. What is there under a later number has no future."""
        held = self._held.get(origin, {})
        older = sorted((k for k in held if k < key), reverse=True)
        stay = stays(older, sealed, HELD - 1)
        self._held[origin] = {k: held[k] for k in older if k in stay} | {key: shards}

    def void_after(self, key: Key) -> None:
        """A gang goes on from this version: what came after it has no future."""
        self._held = {
            origin: {k: shards for k, shards in held.items() if k <= key} for origin, held in self._held.items()
        }

    def of(self, origin: str, key: Key) -> int:
        """Which of a node's shards of this version are here."""
        return self._held.get(origin, {}).get(key, 0)

    def all(self) -> Mapping[Key, int]:
        """By version, all shards that are here."""
        found: dict[Key, int] = {}
        for held in self._held.values():
            for key, shards in held.items():
                found[key] = found.get(key, 0) | shards
        return found
