"""The sample configurations are ones that the trainer takes: a check of the file alone once passed one that could not start."""

from pathlib import Path

import pytest

from elasticrl.config import load
from elasticrl.ppo.__main__ import check

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("name", sorted(file.stem for file in CONFIGS.glob("*.yaml")))
def test_the_trainer_refuses_nothing_of_a_sample(name: str) -> None:
    tree = load(CONFIGS / f"{name}.yaml", ("model.path=model", "data.path=prompts.jsonl"), {})
    check(tree)
    assert tree.rollout.engine == "torch", "the only engine that .[train] brings"
    assert tree.model.attention == "sdpa", "the only one that needs no package of its own"
    assert (tree.data.format, tree.telemetry.tensorboard, tree.telemetry.wandb) == ("jsonl", None, None)
