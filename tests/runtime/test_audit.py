"""A lane is computed twice, on two nodes: no bit changes by it, and a node that computes wrongly is named before anything is
made of what it computed.
"""

from itertools import product
from pathlib import Path

import pytest
from gang_kit import Nodes, digests, undisturbed_digests

from elasticrl.runtime.audit import drawn, second
from elasticrl.runtime.data.audit import audit
from elasticrl.runtime.lanes import Deal
from elasticrl.runtime.rng import seed

STEPS, LANES, SEED = 20, 12, 7
ALWAYS = {"audit": {"lanes": "1"}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The digests of a gang of one that nothing happens to, by the default rate."""
    return undisturbed_digests(tmp_path_factory.mktemp("alone"), STEPS)


def looked_at(step: int, world: int) -> tuple[int, int, int]:
    """The lane of a step that is computed twice, the rank that carries it, and the one that computes it again."""
    lane = drawn(SEED, "model", step, 0, lanes=LANES, rate="1")
    assert lane is not None
    owner = next(rank for rank, mine in enumerate(Deal.contiguous(LANES, world).carried) if lane in mine)
    chance = seed("audit", SEED, "model", step, 0, "who")
    return lane, owner, second([f"n{rank}" for rank in range(world)], owner, chance)


def where(rank: int, world: int, place: int) -> tuple[int, int]:
    """The first step from 4 on in which this rank has that place (0: it carries the lane, 1: it computes it again); and the
    lane.
    """
    return next(
        (step, looked_at(step, world)[0]) for step in range(4, STEPS) if looked_at(step, world)[1 + place] == rank
    )


def ends_as_if_undisturbed(nodes: Nodes, undisturbed: dict[int, str]) -> None:
    nodes.until_done()
    assert digests(nodes.run_dir) == undisturbed
    found = audit(nodes.run_dir)
    assert found.ok, found.sentence
    assert found.steps == STEPS, found.sentence


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_an_audit_in_each_step_changes_no_bit_and_uses_no_sample_twice(tmp_path: Path, undisturbed, world: int):
    with Nodes(tmp_path, steps=STEPS, copies=min(1, world - 1), conf=ALWAYS) as nodes:
        nodes.plan(*(f"n{i}" for i in range(world)))
        ends_as_if_undisturbed(nodes, undisturbed)
        said = {1: "there is no other rank to do it", 2: "of two nodes that differ"}.get(world, "on another node)")
        assert all(said in worker.text for worker in nodes.workers.values())
        assert not any("silent corruption" in worker.text for worker in nodes.workers.values())


CARRIES, CHECKS = (3, 0), (4, 1)  # workers, and the place of rank 1
OFTEN = [(CARRIES, "gradient", True), (CARRIES, "activation", False), (CHECKS, "weight", True)]
SELDOM = [
    pytest.param(place, what, ever, marks=pytest.mark.slow)
    for place, what, ever in product((CARRIES, CHECKS), ("weight", "activation", "gradient"), (False, True))
    if (place, what, ever) not in OFTEN
]


@pytest.mark.parametrize(("place", "what", "ever"), [*OFTEN, *SELDOM])
def test_a_node_that_computes_wrongly_is_named_and_its_step_is_made_without_it(
    tmp_path: Path, undisturbed, place: tuple[int, int], what: str, *, ever: bool
):
    world, _ = place
    step, lane = where(1, *place)
    with Nodes(tmp_path, steps=STEPS, conf=ALWAYS) as nodes:
        nodes.fault(step=step, rank=1, do=what, lane=lane, ever=ever)
        everybody = [f"n{i}" for i in range(world)]
        nodes.plan(*everybody)
        bad = nodes.workers["n1"]
        bad.process.join(60)
        assert bad.process.exitcode == 1, bad.text[-2000:]
        named = f"lane {lane} of update 0 of step {step} (model) came to different results"
        assert "Miscomputed" in bad.text
        for node in everybody:
            text = nodes.workers[node].text
            assert named in text
            assert "that of rank 1 (n1) stands alone" in text
            assert node == "n1" or nodes.workers[node].process.exitcode is None
        nodes.kill_worker("n1")
        nodes.plan(*(node for node in everybody if node != "n1"))
        ends_as_if_undisturbed(nodes, undisturbed)


@pytest.mark.parametrize("what", ["moment", "rule"])
@pytest.mark.parametrize("world", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_shard_whose_memory_or_update_is_wrong_is_named_before_its_parameters_are_published(
    tmp_path: Path, undisturbed, world: int, what: str
):
    step = next(s for s in range(4, STEPS) if drawn(SEED, "model shard", s, 0, lanes=world, rate="1") == 1)
    others = [f"n{i}" for i in range(world) if i != 1]
    with Nodes(tmp_path, steps=STEPS, step_ms=50.0, conf=ALWAYS) as nodes:
        nodes.fault(step=step, rank=1, do=what, at="update")
        nodes.plan(*sorted([*others, "n1"]))
        bad = nodes.workers["n1"]
        bad.process.join(60)
        assert bad.process.exitcode == 1, bad.text[-2000:]
        assert (
            "Miscomputed: " + {"moment": "The state of model that rank 1 keeps", "rule": "the state of"}[what]
            in bad.text
        )
        assert {nodes.workers[node].process.exitcode for node in others} == {None}
        nodes.kill_worker("n1")
        nodes.plan(*others)
        ends_as_if_undisturbed(nodes, undisturbed)


@pytest.mark.parametrize("skips", [True, False])
def test_a_shard_whose_memory_is_wrong_is_named_also_where_the_update_is_left_out_or_ends_the_job(
    tmp_path: Path, *, skips: bool
):
    step = next(s for s in range(4, STEPS) if drawn(SEED, "model shard", s, 0, lanes=3, rate="1") == 1)
    args = ("--nan", str(step), *(("--skips",) if skips else ()))
    with Nodes(tmp_path, steps=STEPS, step_ms=50.0, conf=ALWAYS, args=args) as nodes:
        nodes.fault(step=step, rank=1, do="moment", at="update")
        nodes.plan("n0", "n1", "n2")
        bad = nodes.workers["n1"]
        bad.process.join(60)
        assert "Miscomputed: The state of model that rank 1 keeps" in bad.text
        others = [nodes.workers[node] for node in ("n0", "n2")]
        assert {worker.process.exitcode for worker in others} == {None}, "it is none of the program's failures"
        nodes.kill_worker("n1")
        nodes.plan("n0", "n2")
        if skips:
            nodes.until_done()
            assert audit(nodes.run_dir).ok
        else:
            for worker in others:
                worker.process.join(60)
                assert f"NotFinite: The norm of the gradient of model is nan in update 0 of step {step}" in worker.text


def test_a_script_that_prepares_the_lanes_that_are_here_is_asked_for_no_other(tmp_path: Path, undisturbed):
    with Nodes(tmp_path, steps=STEPS, conf=ALWAYS, args=("--carried",)) as nodes:
        nodes.plan("n0", "n1")
        ends_as_if_undisturbed(nodes, undisturbed)
        assert all("lanes are not computed twice" in worker.text for worker in nodes.workers.values())


def test_alone_a_device_that_is_wrong_in_the_same_way_each_time_is_not_found(tmp_path: Path):
    with Nodes(tmp_path, steps=STEPS, copies=0, conf=ALWAYS) as nodes:
        nodes.fault(step=4, rank=0, do="gradient", ever=True)
        nodes.plan("n0")
        nodes.until_done()
        assert "is not found" in nodes.workers["n0"].text
        assert "silent corruption" not in nodes.workers["n0"].text


def test_alone_what_happens_once_is_found_by_a_majority_of_three(tmp_path: Path):
    lane, _, _ = looked_at(6, 1)
    with Nodes(tmp_path, steps=STEPS, copies=0, conf=ALWAYS) as nodes:
        nodes.fault(step=6, rank=0, do="gradient", lane=lane)
        nodes.plan("n0")
        nodes.workers["n0"].process.join(60)
        assert "that of rank 0 (n0) stands alone" in nodes.workers["n0"].text


@pytest.mark.parametrize("ever", [False, True], ids=["once", "ever"])
def test_of_two_nodes_who_differs_from_itself_is_named_and_else_nobody(tmp_path: Path, undisturbed, *, ever: bool):
    step, lane = where(1, 2, 0)
    with Nodes(tmp_path, steps=STEPS, conf=ALWAYS) as nodes:
        nodes.fault(step=step, rank=1, do="activation", lane=lane, ever=ever)
        nodes.plan("n0", "n1")
        nodes.workers["n1"].process.join(60)
        texts = [nodes.workers[node].text for node in ("n0", "n1")]
        if ever:
            nodes.workers["n0"].process.join(60)
            assert all("Doubted" in text and "cannot tell which" in text for text in texts)
            return
        assert all("that of rank 1 (n1) stands alone" in text for text in texts)
        nodes.kill_worker("n1")
        nodes.plan("n0", "n1")
        ends_as_if_undisturbed(nodes, undisturbed)
