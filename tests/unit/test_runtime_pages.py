"""Memory that comes before it is needed: what is written to it then costs no page fault."""

import resource
from collections.abc import Callable

import pytest
import torch
from torch import nn

from elasticrl.runtime import pages
from elasticrl.runtime.lanes import Deal
from elasticrl.runtime.layout import buckets, striped
from elasticrl.runtime.optim import AdamW
from elasticrl.runtime.pages import Touch
from elasticrl.runtime.replicated import Replicated
from elasticrl.runtime.shard import Shard

COUNT = 16 << 20  # elements: 64 MiB, which torch has from the machine for itself
PAGES = COUNT * 4 // 4096


def faults(of: Callable[[], object]) -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    of()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_what_was_touched_is_there_when_it_is_written_to() -> None:
    cold, warm = torch.empty(COUNT), torch.empty(COUNT)
    Touch([warm]).wait(30.0)
    assert faults(lambda: cold.fill_(1.0)) > PAGES // 2
    assert faults(lambda: warm.fill_(1.0)) < PAGES // 8


def test_what_lies_there_already_stays() -> None:
    there = torch.arange(COUNT, dtype=torch.float32)
    Touch([there[5:-7]]).wait(30.0)
    assert torch.equal(there, torch.arange(COUNT, dtype=torch.float32))


def test_little_memory_is_worth_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages.Touch, "_run", lambda _self: pytest.fail("a thread"))
    Touch([torch.empty(1000)]).wait(1.0)


@pytest.mark.parametrize("touched", [False, True])
def test_a_first_update_finds_its_memory(*, touched: bool) -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(COUNT // 4)) for _ in range(4)])
    strategy = Replicated(model, lambda _name: AdamW(), deal=Deal.contiguous(1, 1))
    made = strategy.touch() if touched else None
    if made is not None:
        made.wait(30.0)

    def step() -> None:
        for turn in strategy.turns:
            strategy.begin(turn)
            for param in model:
                param.sum().backward()
            strategy.done()
        strategy.update()

    # A lane's row, and three rows of the next version; what autograd needs comes on top.
    found = faults(step)
    assert found < 3 * PAGES // 2 if touched else found > 3 * PAGES, found
    strategy.close()


def test_memory_of_an_earlier_shard_is_not_touched_again() -> None:
    def shard(world: int, old: Shard | None = None) -> Shard:
        cut = striped(buckets([("p", (12_000,))], 4_000), world)
        return Shard(cut, 0, lambda _name: AdamW(), dtype=torch.float32, device=torch.device("cpu"), old=old)

    first = shard(3)
    size = first.layout.size
    assert [part.numel() for part in first.new()] == [3 * size, size]
    assert not first.new(), "told once"
    again = shard(3, first)
    assert not again.new()
    larger = shard(2, again)
    more = larger.layout.size - size
    found = larger.new()
    assert [part.numel() for part in found] == [3 * more, more]
    assert found[0].data_ptr() == larger.next.data_ptr() + 3 * size * 4, "what lies behind the old one"
