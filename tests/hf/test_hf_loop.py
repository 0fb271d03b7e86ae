"""A loop of Accelerate with `elasticrl.hf.prepare`: the same bits on one worker, two and three, and through kills."""

import re
from collections.abc import Iterator
from pathlib import Path

import loop_job
import pytest
from gang_kit import Nodes, digests

from elasticrl.runtime.data.audit import audit

pytestmark = pytest.mark.timeout(600)
LANES = 5
STEPS = loop_job.EPOCHS * (loop_job.SAMPLES // (LANES * loop_job.BATCH))


def nodes(folder: Path, *, copies: int = 1, step_ms: float = 0.0) -> Nodes:
    made = Nodes(folder, steps=0, lanes=LANES, copies=copies, program="loop_job")
    made.args = ["--step-ms", str(step_ms), "--ends", str(folder)]
    return made


def proof(gang: Nodes) -> dict[int, str]:
    """Each sample of each epoch was used once; the digests."""
    used = audit(gang.run_dir)
    assert used.ok, used.sentence
    assert (used.steps, used.samples) == (STEPS, STEPS * LANES * loop_job.BATCH)
    return dict(digests(gang.run_dir))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, str]]:
    with nodes(tmp_path_factory.mktemp("alone"), copies=0) as gang:
        gang.plan("n0")
        gang.until_done()
        yield proof(gang)


def test_few_lines_of_a_usual_loop_are_changed() -> None:
    text = Path(loop_job.__file__).read_text()
    assert len(re.findall(r"  # \d$", text, re.MULTILINE)) <= 5


@pytest.mark.parametrize("world", [2, 3])
def test_any_number_of_workers_makes_the_same_bits(tmp_path: Path, undisturbed: dict[int, str], world: int) -> None:
    with nodes(tmp_path) as gang:
        gang.plan(*(f"n{i}" for i in range(world)))
        gang.until_done()
        assert proof(gang) == undisturbed


def test_kills_joins_and_leaves_cost_no_bit_and_no_sample(tmp_path: Path, undisturbed: dict[int, str]) -> None:
    with nodes(tmp_path, step_ms=100.0) as gang:
        gang.plan("n0", "n1", "n2")
        gang.until_new(1)
        survivor = gang.workers["n2"].process.pid
        for victim in ("n1", "n0"):
            gang.kill_worker(victim)
            gang.plan("n0", "n1", "n2")
            gang.until_new(1)
        gang.lose("n1")
        gang.plan("n0", "n2")
        gang.until_new(1)
        assert gang.workers["n2"].process.pid == survivor
        gang.plan("n2", "n0", "n3")  # one that comes late finds the first epochs over
        gang.until_done()
        assert proof(gang) == undisturbed


def test_all_that_is_refused_is_said_at_once(tmp_path: Path) -> None:
    import torch
    from torch.utils.data import DataLoader

    from elasticrl.hf.prepared import _check
    from elasticrl.runtime.misuse import Misuse

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adagrad(model.parameters())
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    loader = DataLoader(range(8), batch_size=None)  # type: ignore[arg-type]
    run = Nodes(tmp_path, program="loop_job")
    with pytest.raises(Misuse) as caught:
        _check(run, loader, plateau)  # type: ignore[arg-type] # of a run it reads the configuration alone
    for word in ("batch_size", "ReduceLROnPlateau"):
        assert word in str(caught.value)
