"""The other job of the lab: `elasticrl.ppo` itself, with a rollout engine beside each worker, whose phases are places.

It tells and is told as `chaos.live.job`; what it trains is what the configuration says. Reports are left out: nobody reads them
here, and they would be one more way to wait for each other.
"""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import elasticrl
from elasticrl.ppo.__main__ import build
from elasticrl.ppo.rollout.outside import Outside
from elasticrl.ppo.trainer import Trainer
from elasticrl.runtime.strategy import Reduced

sys.path.insert(0, str(Path(__file__).parents[2]))  # a node's workers are told of this file alone

from chaos.live.told import Told, options


def with_places(trainer: Trainer, told: Told) -> None:
    """Each phase of the trainer is a place, before, during and after it; and so is what comes before an update's sums."""
    run = trainer.run
    enter, update = run.phase, run.update

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        step = run.buffer.step
        told.at(f"before {name}", step)
        with enter(name):
            told.during(name, step)
            yield
        told.at(f"after {name}", step)

    def updated(**named: Any) -> Mapping[str, Reduced]:
        told.at("before reduce", run.buffer.step)
        return update(**named)

    run.phase, run.update = phase, updated  # type: ignore[method-assign] # of this one run alone


def main() -> None:
    """Train until told to end, or for job.steps."""
    args = options()
    with elasticrl.runtime.join() as base:
        time.sleep(args.load_s)
        trainer, refresh = build(base)
        told = Told(args.history, base)
        with_places(trainer, told)
        generation = sealed = -1
        for step in base.steps():
            with step:
                begun = time.monotonic()
                if base.generation != generation:
                    generation = base.generation
                    refresh()
                    told.say("began", int(step))
                with told.staged(base.role("actor").live, int(step)):
                    trainer.step(int(step))
                sealed = told.sealed_by(base, sealed)
                time.sleep(max(0.0, args.step_ms / 1000 - (time.monotonic() - begun)))
        if isinstance(trainer.engine, Outside):
            trainer.engine.end()


if __name__ == "__main__":
    main()
