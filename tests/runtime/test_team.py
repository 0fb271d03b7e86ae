"""Teams: a model that several workers of a node share has the same bits for any number of teams, through any faults."""

import math
import random
import shutil
from pathlib import Path

import pytest
import run_job
from gang_kit import Nodes, digests

from elasticrl.runtime.checkpoint.load import open_checkpoint
from elasticrl.runtime.checkpoint.place import place
from elasticrl.runtime.checkpoint.shelf import newest_good
from elasticrl.runtime.data.audit import audit

STEPS = 10


def gang(folder: Path, teams: int, *, steps: int = STEPS, tp: int = 2, **options: object) -> Nodes:
    """Nodes of one worker each, of which `tp` in turn are a team: with copies enough for a team that leaves."""
    conf = {"model": {"tp": tp}, "node": {"workers": tp}}
    return Nodes(folder, steps=steps, copies=min(tp, tp * teams - 1), conf=conf, **options)


def names(teams: int, tp: int = 2) -> list[str]:
    return [f"n{i}" for i in range(tp * teams)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    folder = tmp_path_factory.mktemp("one")
    with gang(folder, 1) as nodes:
        nodes.plan(*names(1))
        nodes.until_done()
        found = audit(nodes.run_dir)
        assert found.ok, found.sentence
        return digests(nodes.run_dir)


@pytest.mark.parametrize("teams", [2, 3])
def test_any_number_of_teams_makes_the_same_bits(tmp_path: Path, undisturbed, teams: int):
    with gang(tmp_path, teams) as nodes:
        nodes.plan(*names(teams))
        nodes.until_done()
        assert digests(nodes.run_dir) == undisturbed
        found = audit(nodes.run_dir)
        assert found.ok, found.sentence
        assert found.steps == STEPS
        said = "audit.lanes: nothing is computed twice, since workers are in teams of 2"
        assert [nodes.workers[name].text.count(said) for name in names(teams)] == [1] * (2 * teams)


def made(folder: Path, teams: int, strategy: str, *, kills: bool = False, tp: int = 2) -> dict[int, str]:
    """The digests of a shorter job."""
    with gang(folder, teams, steps=6, strategy=strategy, step_ms=30.0 * kills, tp=tp) as nodes:
        nodes.plan(*names(teams, tp))
        if kills:
            nodes.until_new(1)
            nodes.kill_worker("n2")
            nodes.plan(*names(teams, tp))
        nodes.until_done()
        found = audit(nodes.run_dir)
        assert found.ok, found.sentence
        return digests(nodes.run_dir)


@pytest.fixture(scope="module")
def one_team(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """What one replicated team makes that nothing happens to."""
    return made(tmp_path_factory.mktemp("replicated"), 1, "replicated")


def test_fsdp_over_teams_makes_the_same_bits_as_replicated_for_any_number_of_teams_and_through_a_kill(
    tmp_path: Path, one_team: dict[int, str]
):
    assert made(tmp_path / "one", 1, "fsdp") == one_team
    assert made(tmp_path / "two", 2, "fsdp", kills=True) == one_team


def test_fsdp_over_teams_goes_on_where_they_change_places(tmp_path: Path, one_team: dict[int, str]):
    """A mesh of the same ranks is another one then: torch must not take the groups of the earlier one."""
    with gang(tmp_path / "two", 2, steps=6, strategy="fsdp", step_ms=30.0) as nodes:
        nodes.plan(*names(2))
        nodes.until_new(1)
        nodes.plan("n2", "n3", "n0", "n1")
        nodes.until_done()
        assert digests(nodes.run_dir) == one_team


@pytest.mark.slow
def test_teams_of_four_make_the_same_bits(tmp_path: Path):
    expected = made(tmp_path / "one", 1, "replicated", tp=4)
    assert made(tmp_path / "two", 2, "replicated", tp=4, kills=True) == expected
    assert made(tmp_path / "fsdp", 2, "fsdp", tp=4) == expected


@pytest.mark.slow
def test_fsdp_over_three_teams_makes_the_same_bits(tmp_path: Path):
    assert made(tmp_path / "three", 3, "fsdp", kills=True) == made(tmp_path / "one", 1, "fsdp")


@pytest.mark.parametrize(
    ("strategy", "seed"),
    [
        ("replicated", 1),
        *(pytest.param("replicated", seed, marks=pytest.mark.slow) for seed in (2, 3)),
        *(pytest.param("fsdp", seed, marks=pytest.mark.slow) for seed in (4, 5, 6)),
    ],
)
def test_kills_of_any_member_and_lost_and_new_teams_cost_no_bit_and_no_sample(
    tmp_path: Path, undisturbed, strategy: str, seed: int
):
    """Under fsdp to the bits that a team has under replicated."""
    chance = random.Random(seed)
    deck = ["worker", "worker", "both", "leave", "join"]
    chance.shuffle(deck)
    with gang(tmp_path, 2, step_ms=30.0, strategy=strategy) as nodes:
        present = names(2)
        nodes.plan(*present)
        for drawn in deck:
            nodes.until_new(1)
            team = 2 * chance.randrange(len(present) // 2)
            do = "worker" if drawn == "leave" and len(present) == 2 else drawn
            if do == "worker":
                nodes.kill_worker(chance.choice(present))
            elif do == "both":
                nodes.kill_worker(present[team])
                nodes.kill_worker(present[team + 1])
            elif do == "leave":
                del present[team : team + 2]
            else:
                present += [node for node in names(4) if node not in present][:2]
            nodes.plan(*present)
        nodes.until_done()
        assert digests(nodes.run_dir) == undisturbed
        found = audit(nodes.run_dir)
        assert found.ok, found.sentence


def test_what_teams_save_are_whole_parameters(tmp_path: Path, undisturbed):
    """A checkpoint of two teams reads as one of a model that nobody shares, and one team goes on from it."""
    with gang(tmp_path, 2, steps=5) as nodes:
        nodes.plan(*names(2))
        nodes.until_done()
        saved = newest_good(place(nodes.run_dir), commit=None, uncommitted=True)
        assert saved is not None
    with open_checkpoint(place(nodes.run_dir), saved.manifest.name) as source:
        shapes = {name: tuple(param.shape) for name, param in run_job.whole().named_parameters()}
        assert {name: piece.shape for name, piece in source.wholes("model.").items()} == {
            f"model.{name}": shape for name, shape in shapes.items()
        }
        elements = sum(piece.numel for piece in source.pieces if piece.name.startswith("model."))
        assert elements == sum(math.prod(shape) for shape in shapes.values()), "a part of the model is kept twice"
        assert saved.manifest.facts.tp == 2
    shutil.rmtree(tmp_path / "vault")
    with gang(tmp_path, 1) as nodes:
        nodes.generation = 5
        nodes.resume = 5
        nodes.plan(*names(1))
        nodes.until_done()
        assert digests(nodes.run_dir) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(a, b) for a in (1, 2, 3) for b in (1, 2, 3)])
def test_what_is_saved_by_any_number_of_teams_under_fsdp_is_gone_on_from_by_any_other_under_replicated(
    tmp_path: Path, one_team: dict[int, str], before: int, after: int
):
    with gang(tmp_path / "two", before, steps=3, strategy="fsdp") as nodes:
        nodes.plan(*names(before))
        nodes.until_done()
    shutil.rmtree(tmp_path / "two" / "vault")
    with gang(tmp_path / "two", after, steps=6, strategy="replicated") as nodes:
        nodes.generation, nodes.resume = 5, 3
        nodes.plan(*names(after))
        nodes.until_done()
        assert digests(nodes.run_dir) == one_team


def test_a_flipped_bit_of_one_member_is_found(tmp_path: Path):
    with gang(tmp_path, 2, step_ms=30.0) as nodes:
        nodes.fault(step=3, rank=2, do="corrupt", at="after")
        nodes.plan(*names(2))
        # Of two that differ nobody knows which is right: both end, and either first.
        both, said = [nodes.workers[name] for name in ("n0", "n2")], "memory or processor of this node corrupts"
        nodes.until(lambda: any(said in worker.text for worker in both), "the finding", 60.0)
        nodes.workers["n2"].process.join(60)
        assert said in nodes.workers["n2"].text
