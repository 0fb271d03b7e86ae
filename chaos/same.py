"""`python -m chaos.same`: one digest for each scenario and seed, over all that was decided and all that happened in its run.

The one idea: what only makes a run cheaper leaves every line as it is, so two lists of before and after are compared by `diff`.
"""

import argparse
import sys
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from chaos.history import line
from chaos.run import SCENARIOS
from chaos.scenario import Scenario, draw, load
from chaos.sim.drive import Run
from chaos.sim.node import Node
from elasticrl.contract.events import Event
from elasticrl.core.node.state import Decision


def digest(scenario: Scenario, seed: str) -> str:
    """Of each event at each node: when it came, what was done about it, when the node wakes next; and of the history."""
    run, found = Run(scenario, seed), blake2b(digest_size=8)

    def look(node: Node, event: Event, decision: Decision) -> None:
        at, kind = run.world.now, type(event).__name__
        found.update(f"{at!r} {node.name} {kind} {decision.wake_at!r} {decision.actions!r}\n".encode())

    run.world.overseer = look
    result = run.drive()
    for fact in result.history:
        found.update(line(fact).encode())
    return f"{found.hexdigest()} {result.steps} {result.events}"


def runs(seeds: range) -> Iterator[tuple[str, Scenario, str]]:
    """All scenario files, then the seeds."""
    for path in sorted(SCENARIOS.glob("*.yaml")):
        scenario = load(path)
        yield path.stem, scenario, scenario.seed
    for seed in seeds:
        yield str(seed), draw(seed, None), str(seed)


def main(argv: list[str] | None = None) -> int:
    """Print a line for each."""
    parser = argparse.ArgumentParser(prog="python -m chaos.same", description=__doc__)
    parser.add_argument("--seeds", type=int, default=300, help="so many, beside all scenario files")
    parser.add_argument("--out", type=Path, help="to this file instead of the terminal")
    args = parser.parse_args(argv)
    out = args.out.open("w") if args.out else sys.stdout
    with out:
        for name, scenario, seed in runs(range(args.seeds)):
            print(digest(scenario, seed), name, file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
