"""Whether what workers are to run is on this machine: found out before one of them is started."""

from pathlib import Path

from elasticrl.config import Tree


def absent(tree: Tree) -> str:
    """Why `job.program` cannot be started here, and what to do; empty if it can, or is a module, which workers look for."""
    program = tree.job.program
    if not program.endswith(".py") or Path(program).is_file():
        return ""
    return f"job.program: {program} is not here; name one that is: job.program=..."
