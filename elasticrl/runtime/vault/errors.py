"""What can go wrong with state, as one tree. A message says what happened to what, what was expected, and what to do.

StateError
├── VaultError            memory snapshots and their copies
│   ├── NoRoom              there is no memory for another file
│   └── CopiesLate          not all buddies have a version yet
├── CheckpointError       disk checkpoints
│   ├── CheckpointCorrupt   a file is missing, torn or changed: step back to an older one
│   │   ├── CheckpointUnread    reading it fails: nobody knows whether it is good
│   │   └── BlockCorrupt        found by who reads a part of it, and told to all
│   ├── CheckpointRefused   the checkpoint is good, but this run, or version, is not the one that wrote it
│   └── CheckpointStorage   the disk is full, read-only or gone: training goes on, the commit ages
└── DataError             cursor, loader and ledger
"""


class StateError(Exception):
    """State could not be kept, found or trusted."""


class VaultError(StateError):
    """A snapshot could not be taken, copied or fetched."""


class NoRoom(VaultError):
    """There is no memory for a file of the vault."""


class CopiesLate(VaultError):
    """Not all buddies have a version yet; so much was sent to those until now."""

    def __init__(self, why: str, *, moved_bytes: int) -> None:
        super().__init__(why)
        self.moved_bytes = moved_bytes


class CheckpointError(StateError):
    """A disk checkpoint could not be written or read."""


class CheckpointCorrupt(CheckpointError):
    """A checkpoint's bytes are not those that were written."""


class CheckpointUnread(CheckpointCorrupt):
    """Whether they are is not known: reading it fails today."""


class BlockCorrupt(CheckpointCorrupt):
    """Some rank has read what was not written, at a URL. All ranks know it, and nothing was changed yet."""


class CheckpointRefused(CheckpointError):
    """A checkpoint that this run must not continue from as it is configured."""


class Outlived(CheckpointRefused):
    """This process has made steps, and the job goes back to its beginning, where it cannot go: a fresh one begins anew."""


class CheckpointStorage(CheckpointError):
    """The place where checkpoints go does not take them."""


class DataError(StateError):
    """Samples could not be named, loaded or accounted for."""
