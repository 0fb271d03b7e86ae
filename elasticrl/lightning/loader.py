"""A DataLoader with a state, which Lightning saves and loads with its own: a pass goes on in its middle.

The one idea: Lightning asks each loader for `state_dict` where it has one. It makes the loader anew to give it a sampler for
its ranks, so what is kept is the place and not the sampler.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import islice
from typing import Any

from torch.utils import data

from elasticrl.runtime.data.standing import Standing


class DataLoader(data.DataLoader[Any]):
    """torch's, which knows where it stands."""

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""
        return self._standing.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """The next pass is the rest of this one, or a new one if all of it was used: Lightning has counted it then."""
        self._standing.load_state_dict(state_dict)
        if not isinstance(self.dataset, data.IterableDataset):
            self._standing.forget(len(self))

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override] # it is only iterated
        return self._standing.over(self._rest)

    @cached_property
    def _standing(self) -> Standing:
        return Standing(self.generator)

    def _rest(self, skipped: int) -> Iterator[Any]:
        """Of a stream, or with a sampler of batches that is not torch's own, those that were used are read and dropped."""
        batches = self.batch_sampler
        if type(batches) is not data.BatchSampler or isinstance(self.dataset, data.IterableDataset):
            return islice(super().__iter__(), skipped, None)
        if not isinstance(batches.sampler, Shortened):
            batches.sampler = Shortened(batches.sampler)
        batches.sampler.first = skipped * batches.batch_size
        return super().__iter__()


class Shortened(data.Sampler[Any]):
    """A sampler whose next pass begins later."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.first = inner, 0

    def __iter__(self) -> Iterator[Any]:
        first, self.first = self.first, 0
        return islice(iter(self.inner), first, None)

    def __len__(self) -> int:
        return len(self.inner)
