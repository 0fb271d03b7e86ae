"""Scalars: a batch's means and variances do not depend on who had which lanes."""

import random
import statistics

import pytest
import torch

from elasticrl.runtime.digest import Digest, outliers, parting
from elasticrl.runtime.rng import Streams, seed
from elasticrl.runtime.scalars import Moments, Tally, total


def tallies(lanes: int) -> dict[int, Tally]:
    chance = random.Random(lanes)
    found: dict[int, Tally] = {}
    for lane in range(lanes):
        found[lane] = Tally()
        found[lane].add(loss=chance.uniform(0, 9), tokens=lane + 1)
        found[lane].spread("advantage", [chance.gauss(5, 2) for _ in range(3 + lane)])
    return found


def test_moments_are_the_textbook_ones():
    chance = random.Random(3)
    values = [chance.gauss(1e6, 1.0) for _ in range(200)]  # a sum of squares would lose all digits of the variance
    merged = Moments.of(values[:7]) + (Moments() + Moments.of(values[7:90])) + Moments.of(values[90:])
    assert merged.count == 200
    assert merged.mean == pytest.approx(statistics.fmean(values), rel=1e-15)
    assert merged.var() == pytest.approx(statistics.pvariance(values), rel=1e-9)
    assert merged.std(unbiased=True) == pytest.approx(statistics.stdev(values), rel=1e-9)
    assert Moments().var() == Moments.of([]).var() == 0.0


@pytest.mark.parametrize("lanes", [1, 4, 5, 8])
def test_rows_carry_a_tally_over_the_wire_and_the_order_of_arrival_does_not_matter(lanes: int):
    there = tallies(lanes)
    sample = Tally()
    sample.add(tokens=0, loss=0)
    sample.spread("advantage", [])
    back = {lane: sample.like(there[lane].row()) for lane in sorted(there, reverse=True)}
    assert back == there
    assert total(back, lanes) == total(there, lanes)
    assert total(there, lanes).sums["tokens"] == lanes * (lanes + 1) / 2


def test_tensors_are_added_up_as_numbers_are_and_hold_nothing_of_what_made_them():
    weight = torch.rand(4, requires_grad=True)
    losses = [(weight * number).sum() for number in (0.1, 1e9, -3.7)]
    late, soon = Tally(), Tally()
    for loss in losses:
        late.add(loss=loss, right=torch.tensor([3]))
        soon.add(loss=loss.item(), right=3)
    assert all(isinstance(held, torch.Tensor) for held in late.held.values()), "on a GPU, to read one is to wait for it"
    assert late.row() == soon.row()
    assert late.sums == soon.sums
    assert not any(held.requires_grad for held in late.held.values())
    assert (late + soon).sums["right"] == 18.0
    assert soon.like(late.row()) == soon
    with pytest.raises(RuntimeError, match="shape"):
        late.add(loss=torch.zeros(2))


def read_at_once(x: torch.Tensor, mask: torch.Tensor | None) -> Moments:
    """With a wait for each number: what later ones are made from."""
    weight = torch.ones_like(x) if mask is None else mask.double()
    count = weight.sum().item()
    mean = 0.0 if not count else x.mean().item() if mask is None else (x * weight).sum().item() / count
    return Moments(count=count, mean=mean, m2=((x - mean).square() * weight).sum().item())


@pytest.mark.parametrize("masked", [True, False])
def test_tensors_are_spread_where_they_are_and_come_out_as_if_they_were_read_at_once(*, masked: bool):
    torch.manual_seed(5)
    weight = torch.randn(3, 7, requires_grad=True)
    late, soon = Tally(), Moments()
    for values in (weight * 0.1, weight[:0], weight * 1e6, weight * -3.7):
        mask = torch.rand(values.shape) > 0.4 if masked else None
        late.spread("advantage", values, mask)
        soon = soon + read_at_once(values.detach().double(), mask)
    late.spread("advantage", weight, torch.zeros(3, 7))  # of none
    late.spread("advantage", [1.0, 2.5])
    tensors = [part for part in late.spreads["advantage"] if isinstance(part, torch.Tensor)]
    assert len(tensors) == 5, "on a GPU, to read one is to wait for it"
    assert not any(tensor.requires_grad for tensor in tensors)
    assert late.moments["advantage"] == soon + Moments.of([1.0, 2.5]), "to the last bit"
    assert late.like(late.row()).moments == late.moments
    assert (late + late).moments["advantage"].count == 2 * late.moments["advantage"].count


def test_a_missing_lane_or_a_lane_that_tallies_otherwise_is_refused():
    there = tallies(3)
    with pytest.raises(AssertionError, match="out of 4"):
        total(there, 4)
    there[1].add(extra=1)
    with pytest.raises(AssertionError, match="alike"):
        total(there, 3)


def test_a_streams_seed_depends_on_every_name_its_type_and_its_place_and_on_nothing_else():
    names = [("a", 1), ("a1",), (1, "a"), ("a", "1"), ("a", 1, 0), ("a", 1, ""), ("a",), ()]
    assert len({seed(*name) for name in names}) == len(names)
    assert seed("dropout", 3) == 8581050978578907052, "another release draws other numbers: say so in the CHANGELOG"
    assert 0 <= seed("x") < 1 << 63
    with pytest.raises(AssertionError, match="strings and integers"):
        seed(1.5)  # type: ignore[arg-type]


def test_streams_are_named_by_where_they_are_used():
    base = Streams(seed=7, step=12)
    places = [base, base.at(step=13), base.at(update=1), base.at(lane=0), base.at(lane=1), Streams(seed=8, step=12)]
    numbers = {place.number(purpose) for place in places for purpose in ("dropout", "sample")}
    assert len(numbers) == 2 * len(places)
    assert base.at(lane=3).python("x").random() == base.at(step=12, lane=3).python("x").random()


def test_two_runs_part_where_their_digests_first_differ():
    ours = {n: Digest(version=n, sums={"param": n * 7}).hex for n in range(6)}
    theirs = ours | {n: Digest(version=n, sums={"param": 22}).hex for n in (3, 5)}
    assert parting(ours, theirs) == 3
    assert parting(ours, ours) is None
    assert len(set(ours.values())) == 6


def test_the_odd_replica_out_is_named():
    assert outliers([5, 5, 7, 5]) == (2,)
    assert outliers([5, 5, 5]) == ()
    assert outliers([5, 7]) == (0, 1), "of two nobody can say which"
