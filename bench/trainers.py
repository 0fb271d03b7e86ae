"""What faults cost an unchanged script of each trainer at level supervised: seconds to the next step, and steps made again.

    python bench/trainers.py [--only sft,grpo]

Three one-worker nodes on loopback, gloo, tiny models, steps of 50 ms and more, a save each tenth step (DDP: each fifth). One
job per trainer, one fault after the other (tests/levels/rides.py): kill -9 of a worker, SIGSTOP of a worker, kill -9 of a
node, the node's return. The clock stops when all ranks have made a step in the new gang.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["HF_HUB_OFFLINE"] = "1"

from tests.levels.rides import TRAINERS, models, ride


def main() -> int:
    """Print a line for each trainer."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--only", default=",".join(TRAINERS))
    args = asked.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="elasticrl-models-") as folder:
        for name in args.only.split(","):
            if lacks := TRAINERS[name].lacks:
                print(f"{name:14} not here: {lacks}", flush=True)
                continue
            begun = time.monotonic()
            try:
                found = ride(name, models(Path(folder), TRAINERS[name]))
            except AssertionError as error:
                print(f"{name:14} FAILED: {error}", flush=True)
                failed = 1
                continue
            words = "  ".join(f"{one.fault} {one.seconds:.1f} s, {one.lost} lost" for one in found)
            took, load = time.monotonic() - begun, os.getloadavg()[0]
            print(f"{name:14} {words}  (all of it {took:.0f} s, load {load:.1f})", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
