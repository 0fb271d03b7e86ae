"""Models of transformers that teams share, in jobs: experts are dealt to the members, or the tokens of a sequence are."""

import math
import random
import shutil
from pathlib import Path

import pytest
from gang_kit import Nodes, digests
from spoken_job import built

from elasticrl.runtime.checkpoint.load import open_checkpoint
from elasticrl.runtime.checkpoint.place import place
from elasticrl.runtime.checkpoint.shelf import newest_good
from elasticrl.runtime.data.audit import audit

STEPS = 5
EP, CP, BOTH = {"tp": 2}, {"cp": 2}, {"tp": 2, "cp": 2}


def gang(
    folder: Path, kind: str, how: dict[str, int], teams: int, *, strategy: str = "replicated", steps: int = STEPS, **more
) -> Nodes:  # fmt: skip
    """Nodes of one worker each, of which so many in turn are a team."""
    size = how.get("tp", 1) * how.get("cp", 1)
    conf = {"model": how, "node": {"workers": size}}
    return Nodes(
        folder, steps=steps, lanes=3, copies=min(size, size * teams - 1), conf=conf, strategy=strategy,
        program="spoken_job", args=("--kind", kind), **more,
    )  # fmt: skip


def names(how: dict[str, int], teams: int) -> list[str]:
    return [f"n{i}" for i in range(how.get("tp", 1) * how.get("cp", 1) * teams)]


def made(folder: Path, kind: str, how: dict[str, int], teams: int, *, victim: str = "", **more) -> dict[int, str]:
    """Each step's digest. The victim is killed in the middle of it."""
    with gang(folder, kind, how, teams, step_ms=60.0 if victim else 0.0, **more) as nodes:
        present = names(how, teams)
        nodes.plan(*present)
        if victim:
            nodes.until_new(1)
            nodes.kill_worker(victim)
            nodes.plan(*present)
        nodes.until_done()
        found = audit(nodes.run_dir)
        assert found.ok, found.sentence
        return digests(nodes.run_dir)


def losses(folder: Path) -> list[list[float]]:
    """Of the job's log: each update's loss and gradient norm."""
    lines = (folder / "n0-1.log").read_text().splitlines()
    return [[float(word) for word in line.split()[1:]] for line in lines if line.startswith("made ")]


@pytest.mark.parametrize(("kind", "how"), [("qwen3_moe", EP), ("qwen3", CP)])
def test_one_team_and_two_that_lose_a_member_make_the_same_bits_and_save_whole_tensors(
    tmp_path: Path, kind: str, how: dict[str, int]
):
    expected = made(tmp_path / "one", kind, how, 1)
    assert made(tmp_path / "two", kind, how, 2, victim="n2") == expected
    made(tmp_path / "unshared", kind, {}, 1)
    assert losses(tmp_path / "one") == [pytest.approx(each, rel=2e-4) for each in losses(tmp_path / "unshared")], (
        "it is the same training"
    )
    saved = newest_good(place(tmp_path / "two/saves/job"), commit=None, uncommitted=True)
    assert saved is not None
    shapes = {f"model.{name}": tuple(param.shape) for name, param in built(kind, None, fsdp=False).named_parameters()}
    with open_checkpoint(place(tmp_path / "two/saves/job"), saved.manifest.name) as source:
        assert {name: piece.shape for name, piece in source.wholes("model.").items()} == shapes
        elements = sum(piece.numel for piece in source.pieces if piece.name.startswith("model."))
        assert elements == sum(math.prod(shape) for shape in shapes.values()), "a part of the model is kept twice"
        assert (saved.manifest.facts.tp, saved.manifest.facts.cp) == (how.get("tp", 1), how.get("cp", 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how"), [("mixtral", EP), ("qwen3_moe", CP), ("llama", CP), ("qwen2", BOTH), ("qwen3_moe", BOTH)]
)
def test_fsdp_and_replicated_make_the_same_bits_for_one_to_three_teams(tmp_path: Path, kind: str, how: dict[str, int]):
    expected = made(tmp_path / "one", kind, how, 1)
    assert made(tmp_path / "fsdp", kind, how, 2, strategy="fsdp", victim="n1") == expected
    assert made(tmp_path / "two", kind, how, 2, victim="n3") == expected
    if how is not BOTH:
        assert made(tmp_path / "three", kind, how, 3) == expected
        assert made(tmp_path / "odd", kind, how, 3, strategy="fsdp", victim="n1") == expected, "of some a team has none"


@pytest.mark.slow
@pytest.mark.parametrize("how", [EP, CP])
def test_what_one_number_of_teams_has_saved_another_goes_on_from(tmp_path: Path, how: dict[str, int]):
    kind = "qwen3_moe"
    expected = made(tmp_path / "one", kind, how, 1)
    with gang(tmp_path / "more", kind, how, 2, steps=3, strategy="fsdp") as nodes:
        nodes.plan(*names(how, 2))
        nodes.until_done()
    shutil.rmtree(tmp_path / "more" / "vault")
    with gang(tmp_path / "more", kind, how, 1) as nodes:
        nodes.generation, nodes.resume = 5, 3
        nodes.plan(*names(how, 1))
        nodes.until_done()
        assert digests(nodes.run_dir) == expected
    shutil.rmtree(tmp_path / "more" / "vault")
    with gang(tmp_path / "more", kind, BOTH, 1, steps=6) as nodes:
        nodes.generation, nodes.resume = 9, 5
        nodes.plan(*names(BOTH, 1))
        with pytest.raises(AssertionError, match=r"was 1 and is 2: .* Set it back, or continue with --allow"):
            nodes.until_done()


@pytest.mark.slow
@pytest.mark.parametrize(("how", "seed"), [(EP, 1), (CP, 2), (CP, 3), (BOTH, 4)])
def test_kills_of_any_member_cost_no_bit_and_no_sample(tmp_path: Path, how: dict[str, int], seed: int):
    chance, kind, steps = random.Random(seed), "qwen3_moe", 9
    expected = made(tmp_path / "one", kind, how, 1, steps=steps)
    with gang(tmp_path / "two", kind, how, 2, steps=steps, step_ms=30.0) as nodes:
        present = names(how, 2)
        nodes.plan(*present)
        for _ in range(4):
            nodes.until_new(1)
            nodes.kill_worker(chance.choice(present))
            nodes.plan(*present)
        nodes.until_done()
        assert digests(nodes.run_dir) == expected
        found = audit(nodes.run_dir)
        assert found.ok, found.sentence
