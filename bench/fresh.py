"""What the memory of a fresh worker costs before its first step: processors and page faults of one rank of a gang.

    python bench/fresh.py [--params 1e8] [--world 3] [--huge] [--json]

A strategy is made around a model, and its part of the state and all parameters are filled, as a restore does: once `filled`,
where nothing of the new memory is zeroed or filled with the model's own values first, and once `zeroed`, as where nothing is
restored. Each has a process to itself. `--huge` asks for huge pages.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.report import Watch, dump, show

WAYS = ("zeroed", "filled")


def measure(way: str, params: int, world: int) -> dict[str, float]:
    """In this process."""
    import torch
    from torch import nn

    from elasticrl.runtime.lanes import Deal
    from elasticrl.runtime.optim import AdamW
    from elasticrl.runtime.replicated import Replicated

    torch.set_num_threads(1)
    sizes = [min(1_000_000, params - at) for at in range(0, params, 1_000_000)]
    model = nn.ParameterList(nn.Parameter(torch.full((size,), 0.5)) for size in sizes)
    kept = torch.full((1_000_000,), 0.25)
    before = resource.getrusage(resource.RUSAGE_SELF)
    deal = Deal.contiguous(2 * world, world)
    strategy = Replicated(model, lambda _: AdamW(), deal=deal, fills=way == "filled")
    for piece in strategy.shard.pieces:
        for row in strategy.shard.state:
            row[piece.there] = kept[: piece.count]
    with torch.no_grad():
        for param in strategy.params:
            param.copy_(kept[: param.numel()])
    after = resource.getrusage(resource.RUSAGE_SELF)
    busy_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"busy_s": busy_s, "faults": after.ru_minflt - before.ru_minflt}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", default="1e8", help="of the model")
    parser.add_argument("--world", type=int, default=3, help="ranks of the gang")
    parser.add_argument("--huge", action="store_true", help="with huge pages")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--way", choices=("zeroed", "filled"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options.way, int(float(options.params)), options.world)))
        return 0
    watch = Watch()
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    env = {**os.environ, "THP_MEM_ALLOC_ENABLE": str(int(options.huge))}
    for _ in range(options.trials):
        for way in WAYS:  # in turn, so that a slow minute of the machine meets both
            command = [
                sys.executable,
                __file__,
                "--params",
                options.params,
                "--world",
                str(options.world),
                "--way",
                way,
            ]
            done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
            found[way].append(json.loads(done.stdout))
            watch.look()
    best = {way: min(each, key=lambda one: one["busy_s"]) for way, each in found.items()}
    if options.json:
        dump({"bench": "fresh", "best": best, "noise": watch.noise(), "machine": watch.machine()})
        return 0
    rows = [(way, f"{one['busy_s']:.2f} s", f"{int(one['faults']):,}") for way, one in best.items()]
    notes = [f"load {os.getloadavg()[0]:.1f}", watch.noise()]
    show(
        "until a fresh rank's state is there (best of all)",
        ("way", "processors", "page faults"),
        rows,
        [n for n in notes if n],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
