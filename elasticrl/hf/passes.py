"""A loader of Accelerate that goes on where it stood, for a loop whose state is kept in memory.

    loader = elasticrl.hf.Passes(loader)  # after accelerator.prepare
    kept = elasticrl.keep(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    step = kept.restore()
    for epoch in range(loader.passes, 3):
        for batch in loader:
            ...
            step += 1
            kept.step(step)

The one idea: Accelerate can leave out the first batches of a pass without reading them. All its ranks draw the order of a pass
from one generator, or from the number of the pass. So the place in the pass is enough.
"""

from collections.abc import Iterator
from typing import Any

from elasticrl.runtime.data.standing import Standing


class Passes(Standing):
    """Passes over a loader that `accelerator.prepare` has made. `passes`: so many are over."""

    def __init__(self, loader: Any) -> None:
        super().__init__(getattr(loader, "synchronized_generator", None))
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        from accelerate.utils import synchronize_rng_states

        if (types := getattr(self._loader, "rng_types", None)) and not self.resumes:
            synchronize_rng_states(
                types, self._generator
            )  # as the loader does when a pass begins: all ranks keep the same
        self._loader.set_epoch(self.passes)
        return self.over(self._rest)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def _rest(self, skipped: int) -> Any:
        from accelerate import skip_first_batches

        return skip_first_batches(self._loader, skipped) if skipped else self._loader
