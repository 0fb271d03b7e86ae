"""Bounded staleness under random schedules: engines that are late, die, leave and join change no bit and no age of a sample."""

import argparse
from pathlib import Path

import pytest

from bench.staleness import played

SCHEDULES = 5


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("behind", [0, 1, 2, 4])
def test_each_staleness_has_one_digest_whatever_its_engines_do(
    tmp_path_factory: pytest.TempPathFactory, behind: int
) -> None:
    folder = Path(tmp_path_factory.mktemp("s"))  # a short path: engines listen below it
    args = argparse.Namespace(
        engines=2, steps=12, behind=str(behind), chaos=SCHEDULES, schedules=SCHEDULES, seed=11, answer=8, first=0,
        gap_s=(0.2, 1.0), most=6, json=True,
    )  # fmt: skip
    runs, alike = played(folder, args)
    assert alike == {behind: True}
    assert len(runs) == 1 + SCHEDULES
    assert all(run.once for run in runs), "each sample once, by one set of weights, as old at most as it may be"
    assert {run.oldest for run in runs} == {behind}
    for kind in ("stopped", "killed", "left"):
        assert sum(getattr(run, kind) for run in runs), f"no engine was {kind}"
