"""DeepSpeed's ZeRO, stages 1 and 2, two workers on one card: close to the exact strategy, through a kill."""

from pathlib import Path

import pytest

from bench.gpu.bits import NCCL
from bench.gpu.say import Say, begin

STEPS = 8


def losses_of(folder: Path, strategy: str, world: int, stage: int = 1) -> dict[int, float]:
    """Of each step. A worker is killed, if there is another."""
    import test_zero

    names = [f"n{number}" for number in range(world)]
    with test_zero.nodes(folder, strategy, copies=world - 1, stage=stage, steps=STEPS) as gang:
        gang.plan(*names)
        if world > 1:
            gang.until_sealed(2)
            gang.kill_worker("n1")
            gang.plan(*names)
        gang.until_done()
        return test_zero.losses(folder)


def main(say: Say) -> None:
    if not say.has("DeepSpeed", "deepspeed"):
        return
    exact: dict[int, float] = {}
    with say.check("the exact strategy, one worker", on_card=NCCL):
        exact = losses_of(say.folder / "exact", "replicated", 1)
    for stage in (1, 2):
        with say.check(f"ZeRO {stage}, two workers, one killed: close", on_card=NCCL):
            assert losses_of(say.folder / f"zero{stage}", "deepspeed", 2, stage) == pytest.approx(exact, rel=1e-5)


if __name__ == "__main__":
    begin(main)
