"""What a script hands over to be kept: what is taken, what is given back, in which world, and what is refused."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elasticrl
from elasticrl.runtime.checkpoint.parts import Parts
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.script_state import Own, heads, parts_of, unlike
from elasticrl.runtime.vault.client import Vault
from elasticrl.runtime.vault.errors import StateError
from elasticrl.runtime.vault.holdings import newest_whole
from elasticrl.runtime.vault.version import Version


class Thing:
    """Anything with a state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any, /) -> None:
        self.state = state


def trained(seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 19), nn.BatchNorm1d(19), nn.Linear(19, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.randn(4, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def through_memory(folder: Path, ranks: list[Parts], back: list[Parts]) -> None:
    """Kept by each of these ranks, in vaults of their own folder, and given back to those."""
    vaults = [Vault(folder, job="j", node="n", writer=f"w{rank}") for rank in range(len(ranks))]
    try:
        for rank, parts in enumerate(ranks):
            content = parts.capture(rank, len(ranks))
            ticket = vaults[rank].snapshot(content, version=Version(4), generation=1, shard=rank, world=len(ranks))
            ticket.wait_sealed(20.0)
        torch.rand(3)
        for parts in back:
            whole = newest_whole(vaults[0].holdings(), here="n")
            assert whole is not None
            with vaults[0].gather(whole, parts.needs) as source:
                parts.restore(source)
    finally:
        for vault in vaults:
            vault.close()


def test_what_was_kept_by_three_ranks_comes_back_to_two_and_to_four(tmp_path: Path) -> None:
    said: list[str] = []
    own = [{"at": rank, "t": torch.full((3,), rank), "pair": (1, None, b"x", float("inf"))} for rank in range(3)]
    model, optimizer = trained(3, 4)

    def parts(rank: int, seed: int, steps: int, sampler: Thing) -> tuple[Parts, nn.Module, torch.optim.Optimizer]:
        model, optimizer = trained(seed, steps)
        given = {"optimizer": optimizer, "model": model, "sampler": sampler, "same": Thing({"epoch": 7 * steps})}
        return parts_of(given, rank, random=True, say=said.append), model, optimizer

    kept = [parts(rank, 3, 4, Thing(own[rank]))[0] for rank in range(3)]
    for world in (2, 4):
        samplers = [Thing({"at": "begin"}) for _ in range(world)]
        back = [parts(rank, 9, 0, samplers[rank]) for rank in range(world)]
        torch.manual_seed(99 + world)
        state = torch.get_rng_state()
        through_memory(tmp_path / str(world), kept, [each for each, _, _ in back])
        for _, other, its in back:
            assert str(other.state_dict()) == str(model.state_dict())
            assert str(its.state_dict()) == str(optimizer.state_dict())
        assert torch.equal(torch.get_rng_state(), state)
        assert [s.state["at"] for s in samplers] == [0, 1, 2, "begin"][:world]
        assert torch.equal(samplers[1].state["t"], torch.full((3,), 1))
        assert samplers[0].state["pair"] == (1, None, b"x", float("inf"))
    assert said == ["sampler differed from rank to rank: rank 3 is new and begins with its own"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            {"sampler": Thing({"state": {"foo": Thing(1)}})},
            "sampler.state.foo is a .*test_script_state.Thing, which could only be kept by pickling",
        ),
        ({"sampler": Thing({"state": [{1, 2}]})}, "sampler.state.0 is a builtins.set"),
        ({"sampler": Thing({("a", 1): 2})}, r"sampler has a key \('a', 1\)"),
        ({"sampler": Thing({"t": torch.zeros(5_000_000)})}, "has tensors of 20 MB"),
        ({"sampler": Thing({"t": torch.eye(3).to_sparse()})}, "sampler.t is a Tensor"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_its_path(given: dict[str, object], why: str) -> None:
    with pytest.raises((StateError, Misuse), match=why):
        parts_of(given, 0, random=False, say=print).capture(0, 1)


def test_what_has_no_state_is_refused() -> None:
    with pytest.raises(Misuse, match="sampler is a int without state_dict and load_state_dict"):
        parts_of({"sampler": 3}, 0, random=False, say=print)


def test_frozen_parameters_may_be_left_to_the_script(tmp_path: Path) -> None:
    one, other = trained(1, 0)[0], trained(2, 0)[0]
    for model in (one, other):
        model[0].requires_grad_(False)
    frozen = other[0].weight.clone()
    kept, back = (parts_of({"model": model}, 0, random=False, say=print, frozen=False) for model in (one, other))
    through_memory(tmp_path, [kept], [back])
    assert torch.equal(other[0].weight, frozen)
    assert torch.equal(other[2].weight, one[2].weight)


def test_ranks_whose_parameters_differ_are_found() -> None:
    rows = [heads({"model": trained(seed, 0)[0]}) for seed in (1, 1, 2)]
    assert unlike(rows[:2]) == ""
    assert "model.0.weight is not the same on rank 0 and on rank 2" in unlike(rows)


def test_other_parts_than_were_kept_are_refused(tmp_path: Path) -> None:
    one = parts_of({"model": trained(1, 0)[0]}, 0, random=False, say=print)
    more = parts_of({"model": trained(1, 0)[0], "ema": Thing({})}, 0, random=False, say=print)
    with pytest.raises(StateError, match="ema would start anew"):
        through_memory(tmp_path, [one], [more])


def test_outside_of_elasticrl_nothing_is_kept_and_bad_calls_are_refused() -> None:
    assert "ELASTICRL_JOB" not in os.environ
    model, optimizer = trained(1, 1)
    kept = elasticrl.keep(model=model, optimizer=optimizer)
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: elasticrl.keep(model=model), "called twice"),
        (lambda: elasticrl.keep(model=model, every=0), "every is 0"),
    ]
    try:
        assert kept.restore() == 0
        kept.step(1)
        for call, why in refused:
            with pytest.raises(Misuse, match=why):
                call()
    finally:
        kept.close()


def test_an_own_part_of_one_world_is_read_in_a_larger_one_if_all_agreed() -> None:
    thing = Thing({"epoch": 0})
    values = {
        key: value for rank in (0, 1) for key, value in Own("s", Thing({"epoch": 3}), rank, print).values().items()
    }
    Own("s", thing, 2, print).restored(values)
    assert thing.state == {"epoch": 3}
