"""`elasticrl.ppo`, with sudden ends at places that a test chooses.

A node's file in the folder `$PPO_ENDS` says {"phase": "update", "after_ms": 7}: its worker dies so long after it has entered
that phase, by a signal that nothing catches.
"""

import json
import os
import signal
from pathlib import Path

from elasticrl.agent.beats import Beat
from elasticrl.ppo import __main__ as ppo

enter = Beat.phase


def phase(beat: Beat, name: str) -> None:
    enter(beat, name)
    path = Path(os.environ.get("PPO_ENDS", "/nonexistent")) / os.environ["ELASTICRL_NODE"]
    if path.exists():
        end = json.loads(path.read_text())
        if end["phase"] == name:
            path.unlink()
            signal.setitimer(signal.ITIMER_REAL, end["after_ms"] / 1000)


def main() -> None:
    Beat.phase = phase  # type: ignore[method-assign]
    ppo.main()
