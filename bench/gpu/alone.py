"""So many steps of `elasticrl.ppo`, and what they took: bench/gpu/steps.py runs `python -m bench.gpu.alone CONFIG OUT STEPS`.

It ends in the middle of its job, so that no gigabytes of state are written to a disk at its end.
"""

import json
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from elasticrl.ppo.__main__ import main as train
from elasticrl.ppo.trainer import Trainer
from elasticrl.runtime.keeper import Keeper

stalls: list[float] = []
stalling = Keeper._stalling  # noqa: SLF001 - nobody else knows what the training thread waits for


@contextmanager
def timed(keeper: Keeper) -> Iterator[None]:
    """What the training thread waits for a snapshot is noted."""
    begun = time.perf_counter()
    with stalling(keeper):
        yield
    stalls.append(time.perf_counter() - begun)


class Enough(Exception):
    """All steps that are asked for were made."""


step = Trainer.step


def counted(trainer: Trainer, number: int) -> object:
    """A step, if it is asked for."""
    if int(number) >= int(sys.argv[3]):
        raise Enough
    return step(trainer, number)


def main() -> None:
    Keeper._stalling = timed  # type: ignore[method-assign]  # noqa: SLF001 - as above
    Trainer.step = counted  # type: ignore[method-assign, assignment]
    with suppress(Enough):
        train(sys.argv[1])
    card = torch.cuda.is_initialized()
    used = torch.cuda.max_memory_allocated() if card else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    held = torch.cuda.max_memory_reserved() if card else used
    Path(sys.argv[2]).write_text(
        json.dumps({"used": used, "held": held, "stalled_s": sum(stalls), "stalls": len(stalls)})
    )


if __name__ == "__main__":
    main()
