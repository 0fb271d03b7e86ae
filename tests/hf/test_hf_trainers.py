"""Unchanged scripts of each trainer under real daemons: a worker is killed, one is stopped, a node dies and comes back."""

import os
from pathlib import Path

import pytest

from tests.levels.rides import TRAINERS, models, ride

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("name", TRAINERS)
def test_an_unchanged_script_survives_each_fault_and_ends_with_exit_code_0(folder: Path, name: str) -> None:
    trainer = TRAINERS[name]
    if trainer.lacks and os.environ.get("ELASTICRL_HF") != "required":  # else that it is missing is a failure
        pytest.skip(trainer.lacks)
    assert not trainer.lacks
    costs = {cost.fault: cost for cost in ride(name, models(folder, trainer))}
    assert list(costs) == ["worker", "stopped", *([] if trainer.fixed else ["node"]), "node is back"]
    # A save each tenth step (DDP: each fifth); one that a fault has cut short does not count, nor the steps on the way to it.
    assert all(cost.lost <= 20 for cost in costs.values()), costs
