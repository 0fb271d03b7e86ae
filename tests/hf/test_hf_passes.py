"""A pass over data goes on in its middle: with Accelerate's loaders and with Lightning's."""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

from elasticrl.hf.passes import Passes
from elasticrl.lightning.loader import DataLoader
from elasticrl.runtime.checkpoint.parts import Ambient

ROWS, SIZE = 23, 4
BATCHES = 6


def accelerated(**more: Any) -> Passes:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**more))
    return Passes(accelerator.prepare(torch.utils.data.DataLoader(range(ROWS), batch_size=SIZE, shuffle=True)))


def lightning(**more: Any) -> DataLoader:
    return DataLoader(range(ROWS), batch_size=SIZE, **{"shuffle": True} | more)


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(ROWS))


LOADERS = {
    "accelerate": accelerated,
    "accelerate seeded": lambda: accelerated(use_seedable_sampler=True, data_seed=5),
    "lightning": lightning,
    "lightning with workers": lambda: lightning(num_workers=1),
    "lightning with a generator": lambda: lightning(generator=torch.Generator().manual_seed(3)),
    "lightning with a stream": lambda: DataLoader(Stream(), batch_size=SIZE),
    "lightning without batches": lambda: DataLoader(range(BATCHES), batch_size=None),
}


def read(loader: Iterable[Any], batches: int | None = None) -> list[tuple[list[int], float]]:
    """So many batches, each with a number that the step draws."""
    return [
        (batch.tolist() if hasattr(batch, "tolist") else batch, float(torch.rand(())))
        for batch in islice(loader, batches)
    ]


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize("used", [1, 4])
def test_the_rest_of_a_pass_is_what_it_would_have_been(make: Callable[[], Any], used: int) -> None:
    torch.manual_seed(1)
    whole = make()
    as_if_nothing = read(whole) + read(whole)

    torch.manual_seed(1)
    before = make()
    begun = read(before, used)
    state, random = before.state_dict(), Ambient().state_dict()
    torch.manual_seed(2)  # a new process
    after = make()
    after.load_state_dict(state)
    Ambient().load_state_dict(random)
    assert begun + read(after) + read(after) == as_if_nothing


def test_after_its_last_batch_a_pass_of_accelerate_is_empty_so_that_what_follows_it_is_done() -> None:
    loader = accelerated()
    state = [loader.state_dict() for _ in loader][-1]
    again = accelerated()
    again.load_state_dict(state)
    assert (again.passes, read(again), again.passes, len(read(again))) == (0, [], 1, BATCHES)


def test_after_its_last_batch_a_loader_of_lightnings_begins_a_new_pass_which_lightning_has_counted() -> None:
    loader = lightning()
    state = [loader.state_dict() for _ in loader][-1]
    again = lightning()
    again.load_state_dict(state)
    assert len(read(again)) == BATCHES


def test_a_pass_that_was_left_is_not_gone_on_with() -> None:
    loader = lightning(shuffle=False)
    assert read(loader, 2) != []
    assert read(loader, 1)[0][0] == [0, 1, 2, 3]


def test_nothing_is_read_of_what_was_used() -> None:
    class Asked(list[int]):
        def __getitem__(self, index: Any) -> Any:
            asked.append(index)
            return index

    asked: list[int] = []
    loader = DataLoader(Asked(range(ROWS)), batch_size=SIZE)
    loader.load_state_dict({"passes": 0, "batches": 4, "begun": None, "now": None})
    assert len(read(loader)) == 2
    assert asked == list(range(16, ROWS))
