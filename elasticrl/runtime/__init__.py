"""The worker's runtime: lanes, strategies, vault, checkpoints, data, and `join`, which puts them together.

A script needs `elasticrl.runtime.join`, a cursor (`runtime.data.cursor`) and a rule (`runtime.optim`); start reading at `run`.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    # Not imported at once: the vault server and the command line import parts of this package without torch.
    if name == "join":
        from elasticrl.runtime.run import join

        return join
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
