"""Random streams that belong to names, not to processes.

The idea: a stream's seed is a hash of what the numbers are for: the job's seed, the step, the update, the lane, the
purpose. No rank and no world size is in it, and nothing is ever drawn from a stream that lives on, so a change of workers
cannot shift one. Dropout and friends draw from torch's ambient generator; for them `ambient` puts a named stream in its
place and the old one back afterwards.

    streams = Streams(seed=7, step=12, update=0)
    order = streams.torch("shuffle").randperm...        # a generator of its own
    with streams.at(lane=3).ambient("dropout"): loss = model(batch)
"""

from __future__ import annotations

import random
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    import torch

Name = str | int


def seed(*names: Name) -> int:
    """63 bits that depend on every name, its type and its place.

    >>> seed("dropout", 3) == seed("dropout", 3), seed("dropout", 3) == seed("dropout", "3")
    (True, False)
    """
    digest = blake2b(digest_size=8, person=b"elasticrl.rng")
    for name in names:
        assert type(name) in (str, int), f"a stream's name is of strings and integers, not {name!r}"
        word = f"{type(name).__name__[0]}{name}".encode()
        digest.update(len(word).to_bytes(4, "little") + word)
    return int.from_bytes(digest.digest(), "little") >> 1  # torch takes 64 bits, but signed ones in places


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """The streams of one place in the job. `lane` is None for what all ranks draw alike (the order of mini-batches, say).

    Example: Streams(seed=7, step=12, update=0, lane=3)
    """

    seed: int
    step: int = 0
    update: int = 0
    lane: int | None = None

    def at(self, *, step: int | None = None, update: int | None = None, lane: int | None = None) -> Streams:
        """The same job elsewhere."""
        return replace(
            self,
            step=self.step if step is None else step,
            update=self.update if update is None else update,
            lane=self.lane if lane is None else lane,
        )

    def number(self, purpose: str) -> int:
        """The seed of a stream, for engines that take seeds (vLLM's per-request seed)."""
        return seed(self.seed, self.step, self.update, "all" if self.lane is None else self.lane, purpose)

    def torch(self, purpose: str, device: str = "cpu") -> torch.Generator:
        """A torch generator of its own."""
        import torch

        return torch.Generator(device).manual_seed(self.number(purpose))

    def numpy(self, purpose: str) -> np.random.Generator:
        """A numpy generator of its own (Philox, a counter-based one)."""
        import numpy as np

        return np.random.Generator(np.random.Philox(self.number(purpose)))

    def python(self, purpose: str) -> random.Random:
        """A Python generator of its own."""
        return random.Random(self.number(purpose))

    @contextmanager
    def ambient(self, purpose: str) -> Iterator[None]:
        """Makes the ambient generators of python, numpy, torch and the current CUDA device this stream, and puts the old
        ones back. Nests. Backward passes draw nothing, and checkpointed activations keep the state they need.
        """
        import torch

        number = self.number(purpose)
        legacy = sys.modules.get("numpy.random")  # whoever has not imported it draws nothing from it
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        cuda = [torch.cuda.default_generators[torch.cuda.current_device()]] if on_gpu else []
        generators = [torch.default_generator, *cuda]
        states = [generator.get_state() for generator in generators]
        python, numpy_state = random.getstate(), legacy.get_state() if legacy else None
        try:
            for generator in generators:
                generator.manual_seed(number)
            random.seed(number)
            if legacy:
                legacy.seed(number & 0xFFFFFFFF)
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
            random.setstate(python)
            if legacy:
                legacy.set_state(numpy_state)
