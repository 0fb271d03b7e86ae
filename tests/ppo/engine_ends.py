"""`elasticrl.ppo`, with sudden ends of the engine beside a worker at places that a test chooses.

A node's file in the folder `$ENGINE_ENDS` says {"phase": "sync", "time": 2}: its engine is killed as its worker enters that
phase for the second time.
"""

import json
import os
import signal
from collections import Counter
from pathlib import Path

from elasticrl.contract.beats import Beat
from elasticrl.ppo import __main__ as ppo
from elasticrl.ppo.rollout.service import ENGINE_LOCK

enter = Beat.phase
entered: Counter[str] = Counter()


def engine() -> int:
    vault = Path(os.environ["ELASTICRL_VAULT"])
    return int((vault.with_name(f"{vault.name}.engine") / ENGINE_LOCK).read_text())


def phase(beat: Beat, name: str) -> None:
    back = beat._left == name  # from a wait for its engine: it was here already
    enter(beat, name)
    entered[name] += not back
    path = Path(os.environ["ENGINE_ENDS"]) / os.environ["ELASTICRL_NODE"]
    if path.exists() and json.loads(path.read_text()) == {"phase": name, "time": entered[name]}:
        os.killpg(engine(), signal.SIGKILL)
        path.rename(f"{path}.struck")


def main() -> None:
    Beat.phase = phase  # type: ignore[method-assign]
    ppo.main()


if __name__ == "__main__":  # as under a daemon
    main()
