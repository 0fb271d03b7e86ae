"""`run_job` on a vault that gives nothing for one restore, once a test has put a file `cut-<node>` beside its faults: the
parameters are on their way over the gang by then.
"""

import os
import sys
from pathlib import Path

import run_job

from elasticrl.runtime.vault.client import Vault
from elasticrl.runtime.vault.errors import VaultError
from elasticrl.runtime.vault.source import Source

gather = Vault.gather


def cut(vault: Vault, *what, **how) -> Source:
    file = Path(sys.argv[sys.argv.index("--faults") + 1]).with_name(f"cut-{os.environ['ELASTICRL_NODE']}")
    if file.exists():
        file.unlink()
        raise VaultError("this vault gives nothing")
    return gather(vault, *what, **how)


def main() -> None:
    Vault.gather = cut  # type: ignore[method-assign] # this process is cut short there
    run_job.main()
