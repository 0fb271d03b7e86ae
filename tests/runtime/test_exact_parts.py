"""The parts of an exact update, each in one process: rules, sums, digests, streams, and what is refused."""

import gc
import random
import weakref
from itertools import pairwise

import numpy as np
import pytest
import torch
from exact_job import Model, adamw, fresh, sgd
from rule_kit import cut_anywhere
from torch import nn

from elasticrl.runtime.bits import Bits, bits, difference
from elasticrl.runtime.digest import MASK, digest_of
from elasticrl.runtime.lanes import Deal, Turn
from elasticrl.runtime.layout import Layout, Piece, buckets, striped, up
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.optim import SGD, AdamW, apply, follow
from elasticrl.runtime.replicated import Replicated
from elasticrl.runtime.rng import Streams
from elasticrl.runtime.shard import FOLD, Shard
from elasticrl.runtime.strategy import POINTS, clip

RULES = [AdamW(weight_decay=0.1), SGD(), SGD(momentum=0.9, weight_decay=0.1), SGD(momentum=0.9, nesterov=True)]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_rule_does_not_care_where_an_element_lies_nor_how_many_threads_there_are(rule):
    cut_anywhere(rule)


@pytest.mark.parametrize(
    ("rule", "optimizer"),
    [
        (AdamW(lr=0.01, weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
        (
            SGD(lr=0.1, momentum=0.9, weight_decay=0.1),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        ),
        (SGD(lr=0.1, momentum=0.9, nesterov=True), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
    ],
    ids=["adamw", "sgd", "nesterov"],
)
def test_rules_agree_with_torchs_optimizers(rule, optimizer):
    theirs = nn.Parameter(torch.randn(1000, dtype=torch.float64))
    old = torch.zeros(1 + len(rule.slots), 1000, dtype=torch.float64)
    old[0] = theirs.detach()
    stepper = optimizer([theirs])
    for count in range(1, 20):
        theirs.grad = torch.randn(1000, dtype=torch.float64)
        new = torch.empty_like(old)
        apply(rule, old, new, theirs.grad * 4, scale=0.25, count=count)
        old = new
        stepper.step()
    torch.testing.assert_close(old[0], theirs.detach(), rtol=1e-11, atol=1e-11)


def test_a_torch_optimizers_groups_are_followed_as_a_scheduler_changes_them():
    model = Model()
    decayed = [p for name, p in model.named_parameters() if name.endswith("weight")]
    rest = [p for name, p in model.named_parameters() if not name.endswith("weight")]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.2}, {"params": rest, "weight_decay": 0.0}], lr=0.5
    )
    rule_of = follow(optimizer, model)
    assert rule_of("first.0.weight") == AdamW(lr=0.5, weight_decay=0.2)
    assert rule_of("first.0.bias").weight_decay == 0.0
    optimizer.param_groups[0]["lr"] = 0.25
    assert rule_of("table.weight").lr == 0.25
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(Misuse, match=r"AdamW got amsgrad after register\(\): set it where the optimizer is made"):
        rule_of("table.weight")


def test_the_norm_is_the_norm_whatever_the_cut():
    size = 2 * FOLD + 1234
    values = torch.randn(size)
    found = set()
    for cuts in ([], [FOLD + 7], [1, 63, 64, 65, 1000], [FOLD, 2 * FOLD], [size - 1]):
        edges = [0, *cuts, size]
        pieces = tuple((Piece(name="w", shape=(size,), start=lo, stop=hi, at=3),) for lo, hi in pairwise(edges))
        layout = Layout(size=up(size + 3), pieces=pieces)
        row: list[float] = []
        for rank, (piece,) in enumerate(pieces):
            shard = Shard(layout, rank, sgd, dtype=torch.float32, device=torch.device("cpu"))
            shard.grad[piece.there] = values[piece.start : piece.stop]
            row += shard.squares()
        for left, right in shard.sums.adds:
            row[left] += row[right]
        found.add(row[shard.sums.roots[0]])
    assert len(found) == 1
    assert found.pop() == pytest.approx(values.double().square().sum().item(), rel=1e-12)


def test_clipping_is_to_the_norm_and_only_down():
    assert clip(3.0, None) == clip(3.0, 3.0) == clip(0.0, 1.0) == 1.0
    assert 4.0 * clip(4.0, 1.0) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_digest_adds_up_from_any_parts_and_notices_every_bit(dtype: torch.dtype):
    values = torch.randn(70_000).to(dtype)
    whole = digest_of(values, 0, "param", "w")
    for cut in (1, 64, 65_535, 65_536, 65_537):
        assert (digest_of(values[:cut], 0, "param", "w") + digest_of(values[cut:], cut, "param", "w")) & MASK == whole
    assert digest_of(values, 1, "param", "w") != whole
    assert digest_of(values, 0, "param", "v") != whole
    chance = random.Random(0)
    for _ in range(20):
        other = values.clone()
        raw = other.view(torch.uint8).numpy()
        raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        assert digest_of(other, 0, "param", "w") != whole
    two = values.clone()
    two[:2] = -two[:2]
    assert digest_of(two, 0, "param", "w") != whole, "two sign bits do not cancel"


def test_an_ambient_stream_is_the_named_one_nests_and_leaves_no_trace():
    streams = Streams(seed=1, step=2)

    def draw() -> tuple[float, float, float]:
        return torch.rand(1).item(), random.random(), float(np.random.rand())  # noqa: NPY002 - the ambient one is meant

    states = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    with streams.at(lane=3).ambient("dropout"):
        first = draw()
        with streams.at(lane=4).ambient("dropout"):
            other = draw()
        second = draw()
    with streams.at(lane=3).ambient("dropout"):
        assert (draw(), draw()) == (first, second)
    assert other not in (first, second)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert str(np.random.get_state()) == str(states[2])  # noqa: NPY002
    with pytest.raises(ZeroDivisionError), streams.ambient("x"):
        _ = draw()[0] / 0
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(torch.rand(3, generator=streams.torch("a")), torch.rand(3, generator=streams.torch("a")))
    assert streams.numpy("a").random() != streams.numpy("b").random()


def lane(strategy: Replicated, turn: Turn, model: nn.Module) -> None:
    strategy.begin(turn)
    model(torch.randint(23, (9, 6), generator=Streams(seed=1, lane=turn.lane).torch("x"))).sum().backward()
    strategy.done()


def replicated(model: nn.Module, **kwargs) -> Replicated:
    return Replicated(model, adamw, deal=Deal.contiguous(4, 1), **kwargs)


def test_an_update_that_is_given_up_leaves_everything_as_it_was_and_can_be_made_again():
    outcomes = []
    for interrupted in (False, True):
        model = fresh().eval()
        strategy = replicated(model)
        before = [param.detach().clone() for param in model.parameters()]
        for attempt in range(1 + interrupted):
            for turn in strategy.turns:
                lane(strategy, turn, model)
            strategy.update(seal=False)
            if interrupted and attempt == 0:
                assert not torch.equal(before[0], next(model.parameters()))
                strategy.shard.go_to(0)
                strategy.close()
                strategy = replicated(model, shard=strategy.shard)
                strategy.publish()
                assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
                assert strategy.shard.version == 0
        strategy.seal()
        outcomes.append((strategy.digest(), strategy.shard.version))
    assert outcomes[0] == outcomes[1]


def test_rows_of_an_update_that_is_cut_short_between_two_buckets_are_given_on_once_each():
    # Found by kills beside load: two lanes of the next generation shared a row, and the sum of their gradients was another.
    class Cut(Exception):
        pass

    def cut(name: str) -> None:
        if name == "reduce":  # in the middle of the buckets
            raise Cut

    model = fresh().eval()
    strategy = replicated(model, bucket_bytes=2048, point=cut)
    assert len(strategy.buckets) > 2
    for turn in strategy.turns:
        lane(strategy, turn, model)
    with pytest.raises(Cut):
        strategy.update()
    rows = strategy.rows
    strategy.close()
    digests = []
    for kept in (rows, None):
        strategy = replicated(model, bucket_bytes=2048, rows=kept)
        for turn in strategy.turns:
            lane(strategy, turn, model)
        strategy.reduce()
        digests.append(strategy.shard.grad.clone())
        strategy.close()
    assert torch.equal(*digests)


def test_a_strategy_that_is_closed_and_let_go_of_is_gone_at_once():
    model = fresh().eval()
    strategy = replicated(model)
    for turn in strategy.turns[:3]:
        lane(strategy, turn, model)
    gone = weakref.ref(strategy)
    gc.disable()
    try:
        strategy.close()
        del strategy
        assert gone() is None
    finally:
        gc.enable()


def test_a_sealed_version_stays_unchanged_through_the_next_update():
    model = fresh().eval()
    strategy = replicated(model)
    for turn in strategy.turns:
        lane(strategy, turn, model)
    strategy.update()
    sealed, copy = strategy.shard.state, strategy.shard.state.clone()
    for turn in strategy.turns:
        lane(strategy, turn, model)
    strategy.update(seal=False)
    assert torch.equal(sealed, copy), "the vault may copy it meanwhile"


def test_what_is_held_whole_is_known_at_every_moment_of_an_update():
    model = fresh().eval()
    held: list[tuple[str, list[int]]] = []
    strategy = replicated(model, point=lambda name: held.append((name, sorted(strategy.shard.held))))
    for _ in range(2):
        for turn in strategy.turns:
            lane(strategy, turn, model)
        strategy.update()
    first, second = dict(held[: len(POINTS)]), dict(held[len(POINTS) :])
    assert first["before_apply"] == first["apply"] == [0]
    assert first["after_apply"] == first["before_seal"] == [0, 1]
    assert second["before_apply"] == [0, 1], "the sealed one and its predecessor"
    assert second["apply"] == [1], "the predecessor is being written over"
    assert second["after_gather"] == [1, 2]
    strategy.shard.version = 7
    assert sorted(strategy.shard.held) == [7], "restored from elsewhere"


def test_a_parameter_that_some_lane_does_not_use_counts_as_zero_there():
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(3))

    model = Picky()
    strategy = replicated(model)
    for turn in strategy.turns:
        strategy.begin(turn)
        (model.a.sum() * (turn.lane + 1) + (model.b.sum() if turn.lane == 2 else 0)).backward()
        strategy.done()
    strategy.reduce()
    grads = {piece.name: strategy.shard.grad[piece.there].tolist() for piece in strategy.shard.pieces}
    assert grads == {"a": [10.0] * 5, "b": [1.0] * 3}


def test_all_points_are_passed_in_order():
    passed: list[str] = []
    model = fresh().eval()
    strategy = replicated(model, point=passed.append)
    for turn in strategy.turns:
        lane(strategy, turn, model)
    strategy.update()
    assert tuple(passed) == POINTS


def test_misuse_is_refused_in_words():
    model = fresh()
    strategy = replicated(model)
    with pytest.raises(RuntimeError, match="backward pass outside of a lane"):
        model(torch.zeros(9, 6, dtype=torch.long)).sum().backward()
    strategy.close()
    strategy = replicated(model)
    with pytest.raises(AssertionError, match="next turn of rank 0"):
        strategy.begin(Turn(lane=1, ghost=False))
    strategy.begin(strategy.turns[0])
    model(torch.zeros(9, 6, dtype=torch.long)).sum().backward()
    with pytest.raises(RuntimeError, match="lane 0 ran backward twice"):
        model(torch.zeros(9, 6, dtype=torch.long)).sum().backward()
    strategy.close()
    strategy = replicated(model)
    with pytest.raises(AssertionError, match="0 of 4 lanes are done"):
        strategy.reduce()
    with pytest.raises(ValueError, match="one dtype"):
        replicated(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double()))


def test_a_difference_in_bits_is_said_in_words():
    ours = bits()
    assert difference(ours, bits()) is None
    assert Bits.parse(str(ours)) == ours
    torch.set_num_threads(2)
    theirs = bits()
    said = difference(theirs, ours)
    assert said is not None
    assert said.startswith("computes other bits: torch threads 2 instead of 1")
    assert theirs.probe != ours.probe, "the probe sees it as well"
    values = {**{f: getattr(ours, f) for f in Bits.__slots__}, "probe": "0" * 16}
    assert "no setting differs" in str(difference(Bits(**values), ours))
    assert "device Other instead of" in str(difference(Bits(**{**values, "device": "Other"}), ours))
    assert difference(Bits(**{**values, "device": "Other", "probe": ours.probe}), ours) is None


@pytest.mark.parametrize("fills", [False, True])
def test_a_shard_that_is_cut_anew_takes_what_it_had_and_says_what_it_lacks(*, fills: bool):
    params = [("a", (1000,)), ("b", (37, 11)), ("c", (5,))]
    rule = AdamW()

    def shard(world: int, rank: int, old: Shard | None = None) -> Shard:
        cut = striped(buckets(params, 700), world)
        return Shard(cut, rank, lambda _: rule, dtype=torch.float32, device=torch.device("cpu"), old=old, fills=fills)

    for before, rank, after, now in (
        (3, 0, 2, 0),
        (3, 1, 2, 1),
        (2, 0, 3, 1),
        (2, 1, 3, 2),
        (1, 0, 4, 3),
        (4, 2, 1, 0),
    ):
        old = shard(before, rank)
        for piece in old.pieces:
            for row in range(3):
                old.state[row, piece.there] = torch.arange(piece.start, piece.stop) + 10_000.0 * row
        old.version = 7
        for spent in (old.next, old.grad):
            spent.fill_(float("nan"))
        new = shard(after, now, old)
        lacks = new.take_over(old, 7)
        new.clear()
        for row, piece in lacks:
            assert fills or not new.state[row, piece.there].any(), "it is nowhere here"
            new.state[row, piece.there] = torch.arange(piece.start, piece.stop) + 10_000.0 * row
        covered = torch.zeros(new.layout.size, dtype=torch.bool)
        for piece in new.pieces:
            covered[piece.there] = True
            for row in range(3):
                assert torch.equal(new.state[row, piece.there], torch.arange(piece.start, piece.stop) + 10_000.0 * row)
        assert not new.state[:, ~covered].any()
        assert not new.next[:, ~covered].any()
        assert fills or not new.grad.any()
        both = {(piece.name, n) for piece in old.pieces for n in range(piece.start, piece.stop)}
        mine = {(piece.name, n) for piece in new.pieces for n in range(piece.start, piece.stop)}
        assert {(p.name, n) for _, p in lacks for n in range(p.start, p.stop)} == mine - both
