"""What is told to a generation while it lives: it ends that one, lets it train on, or is none of its business."""

from dataclasses import replace

import pytest

from elasticrl.config.tree import Tree
from elasticrl.contract.beats import Beat
from elasticrl.contract.orders import Halt, Park, Place
from elasticrl.runtime.context import Context
from elasticrl.runtime.generation import Generation, Worker
from elasticrl.runtime.lanes import Deal

HERE = Place(generation=4, born=1, rank=1, world=2, all_lanes=4, nodes=("n0", "n1"))
LARGER = replace(HERE, generation=5, world=3, nodes=("n0", "n1", "n2"), grows=True, reason="n2 joins")


@pytest.fixture
def worker(tmp_path) -> Worker:
    tree = Tree.model_validate({"job": {"name": "job"}, "checkpoint": {"dir": str(tmp_path)}})
    return Worker(context=Context(tree=tree, node="n1", vault=tmp_path, alone=False), seat=None, beat=Beat())


def begun(worker: Worker, place: Place = HERE) -> Generation:
    return Generation(worker, place, Deal.contiguous(4, place.world), parts_per_lane=1, parted=False)


@pytest.mark.parametrize(
    ("order", "ends"),
    [
        (Halt(generation=4, save=True, reason="drained", within_s=9.0), None),  # with this step
        (Halt(generation=4, save=False, reason="stopped", within_s=9.0), "stopped"),
        (Park(generation=5, reason="n0 died"), "n0 died"),
        (replace(HERE, reason="the one that was taken"), None),
        (replace(HERE, generation=5, reason="n0 died"), "n0 died"),
        (LARGER, None),
        (replace(LARGER, generation=6), "n2 joins"),  # a plan was missed: who knows what that was
    ],
)
def test_only_an_order_to_end_with_the_step_and_a_plan_that_adds_let_a_gang_train_on(worker: Worker, order, ends):
    generation = begun(worker)
    generation.trains = True
    generation.told(order)
    assert generation.flag.reason == ends
    assert generation.added == (order is LARGER)


def test_a_plan_that_adds_to_a_gang_ends_one_that_does_not_train_yet(worker: Worker):
    generation = begun(worker)
    generation.told(LARGER)
    assert generation.flag.reason == "n2 joins"


def test_what_was_told_to_one_generation_is_not_known_to_the_next(worker: Worker):
    first = begun(worker)
    first.trains = True
    first.told(LARGER)
    first.leave()
    second = begun(worker, LARGER)
    first.told(Park(generation=6, reason="n0 died"))  # the watcher's thread was on its way when the next one began
    assert (second.added, second.joined, second.trains, second.flag.reason) == (False, False, False, None)
