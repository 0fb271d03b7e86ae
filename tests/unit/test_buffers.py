"""The buffers of a trained model: which of them may change, what a new worker's are compared with, and how much is read."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elasticrl.ppo.idle import Idle
from elasticrl.runtime import buffers
from elasticrl.runtime.buffers import PART, Buffers
from elasticrl.runtime.misuse import Misuse


class Rope(nn.Module):
    """As transformers' are: each call puts the frequencies that it needs in place of those there are."""

    def __init__(self, rope_type: str = "longrope") -> None:
        super().__init__()
        self.rope_type = rope_type
        self.register_buffer("inv_freq", torch.arange(4.0), persistent=False)

    def forward(self, length: int) -> None:
        self.register_buffer("inv_freq", torch.arange(4.0) / (1 + (length > 8)), persistent=False)


def begun(model: nn.Module) -> Buffers:
    found = Buffers("actor")
    found.begin(model, ())
    return found


def test_a_buffer_that_is_made_by_a_pass_is_none_that_was_built():
    def built() -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_buffer("mask", None, persistent=False)
        return model

    model = built()
    survivor = begun(model)
    model.mask = torch.ones(2, 2)
    survivor.check()
    assert survivor.begin(model, ()) == Buffers("actor").begin(built(), ()) == ""
    model.mask = torch.zeros(2, 2)
    survivor.check()


def test_a_buffer_that_a_pass_has_dropped_is_still_one_that_was_built():
    model = Rope()
    survivor = begun(model)
    model.inv_freq = None
    survivor.check()
    assert survivor.begin(model, ()) == Buffers("actor").begin(Rope(), ()) != ""


def test_what_a_pass_puts_in_place_of_a_buffer_may_be_one_other_through_all_generations():
    model = Rope()
    found = begun(model)
    for length in (4, 9, 4, 9, 9):
        model(length)
        found.check()
    told = found.begin(model, ())  # as it is after a fault, with the longer ones in place
    assert told == Buffers("actor").begin(Rope(), ())
    for length in (4, 9):
        model(length)
        found.check()


def test_the_first_pass_that_puts_another_in_place_may_end_in_a_fault():
    model = Rope()
    found = begun(model)
    model(9)
    found.end()
    found.begin(model, ())
    model(4)
    found.check()


def goes_on(model: Rope) -> None:
    model.inv_freq = model.inv_freq * 0.9


def in_place(model: Rope) -> None:
    model.inv_freq.mul_(0.5)


def in_place_uncounted(model: Rope) -> None:
    model.inv_freq.data.mul_(0.5)


@pytest.mark.parametrize("change", [goes_on, in_place, in_place_uncounted])
def test_a_buffer_that_goes_on_from_its_last_value_or_is_written_to_is_refused(change: Callable[[Rope], None]):
    model = Rope()
    found = begun(model)

    def steps() -> None:
        for _ in range(2):
            change(model)
            found.check()

    with pytest.raises(Misuse, match="The buffer inv_freq of actor has changed"):
        steps()


def test_frequencies_that_remember_the_longest_text_are_refused():
    model = Rope("dynamic")
    found = begun(model)
    model(9)
    with pytest.raises(Misuse, match="The buffer inv_freq of actor has changed"):
        found.check()


def test_a_buffer_that_is_saved_may_not_be_replaced_by_another():
    model = nn.Module()
    model.register_buffer("mean", torch.zeros(2))
    found = begun(model)
    model.mean = torch.ones(2)
    with pytest.raises(Misuse, match="The buffer mean of actor has changed"):
        found.check()


def test_another_model_is_held_to_what_the_first_was_built_with():
    found = begun(Rope())
    other = Rope()
    other(9)
    with pytest.raises(Misuse, match="The buffer inv_freq of actor has changed"):
        found.begin(other, ())


def test_a_state_that_has_the_buffer_is_looked_for_by_its_storage():
    model = nn.Module()
    model.register_buffer("mean", torch.zeros(2))
    found = Buffers("actor")
    assert found.begin(model, {model.mean.untyped_storage().data_ptr()}) == ""
    model.mean += 1
    found.check()


def test_of_buffers_that_nothing_tells_to_have_changed_little_is_read_in_a_step(monkeypatch: pytest.MonkeyPatch):
    model = nn.Module()
    model.register_buffer("mask", torch.zeros(3 * PART, dtype=torch.bool))
    model.register_buffer("table", torch.zeros(PART // 4))
    found = begun(model)
    idle = Idle({"actor": model}, host="nowhere")  # so that what is on the CPU is moved, as from a GPU
    read: list[int] = []
    real: Any = buffers.crc32
    monkeypatch.setattr(buffers, "crc32", lambda data, *more: (read.append(len(data)), real(data, *more))[1])
    for step in range(20):
        read.clear()
        with idle.but("ref"):
            assert not model.mask.untyped_storage().nbytes()
        found.check()
        assert PART <= sum(read) < PART + 100
        assert idle.moves == {"actor": step + 1}

    def steps() -> None:
        for _ in range(3 * 2):
            found.check()

    model.mask.data[2 * PART + 5] = True  # uncounted
    with pytest.raises(Misuse, match="The buffer mask of actor has changed"):
        steps()
