"""Each trainer makes the same bits on one worker, two and three, and through kills; every sample is used exactly once."""

from pathlib import Path

import hf_job
import pytest
from gang_kit import Nodes, digests

from elasticrl.runtime.data.audit import audit

STEPS = hf_job.STEPS


def nodes(folder: Path, kind: str, models: Path, *, copies: int = 1, step_ms: float = 0.0, more: str = "") -> Nodes:
    made = Nodes(folder, steps=STEPS, lanes=5, copies=copies, program="hf_job")
    made.args = [kind, "--folder", str(models), "--step-ms", str(step_ms), "--more", more]
    return made


def proof(run_dir: Path) -> None:
    found = audit(run_dir)
    assert found.ok, found.sentence
    assert found.steps == STEPS, found.sentence


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in hf_job.KINDS:
        hf_job.model_of(folder, kind)
    return folder


@pytest.fixture(scope="module")
def undisturbed(models: Path, tmp_path_factory: pytest.TempPathFactory):
    """By trainer, the digests of a gang of one that nothing happens to."""
    found: dict[str, dict[int, str]] = {}

    def of(kind: str) -> dict[int, str]:
        if kind not in found:
            with nodes(tmp_path_factory.mktemp(kind), kind, models, copies=0) as alone:
                alone.plan("n0")
                alone.until_done()
                proof(alone.run_dir)
                found[kind] = digests(alone.run_dir)
        return found[kind]

    return of


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", hf_job.KINDS)
def test_any_number_of_workers_makes_the_same_bits(tmp_path: Path, models, undisturbed, kind: str, world: int):
    with nodes(tmp_path, kind, models) as gang:
        gang.plan(*(f"n{i}" for i in range(world)))
        gang.until_done()
        assert digests(gang.run_dir) == undisturbed(kind)
        proof(gang.run_dir)


@pytest.mark.parametrize("kind", hf_job.KINDS)
def test_kills_joins_and_leaves_cost_no_bit_and_no_sample(tmp_path: Path, models, undisturbed, kind: str):
    with nodes(tmp_path, kind, models, step_ms=100.0) as gang:
        gang.plan("n0", "n1", "n2")
        gang.until_new(1)
        survivor = gang.workers["n2"].process.pid
        for victim in ("n1", "n0"):  # of any rank, and of the one that logs
            gang.kill_worker(victim)
            gang.plan("n0", "n1", "n2")
            gang.until_new(1)
        gang.lose("n1")
        gang.plan("n0", "n2")
        gang.until_new(1)
        assert gang.workers["n2"].process.pid == survivor
        gang.plan("n2", "n0", "n3")
        gang.until_done()
        assert digests(gang.run_dir) == undisturbed(kind)
        proof(gang.run_dir)
