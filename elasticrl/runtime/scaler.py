"""The scale of a loss in float16, as part of a job's state.

    scaler = LossScaler()
    run.register(model=model, optimizer=AdamW(lr=3e-4), scaler=scaler)
    ...
            scaler.scale(loss).backward()
    ...
        scaler.update(run)

The one idea: all ranks know the norm of the whole gradient, so all know alike whether it has overflowed. Such an update is left
out, and the scale falls. torch's GradScaler looks at each process's own gradients, which the runtime has taken by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from elasticrl.runtime.run import Run
    from elasticrl.runtime.strategy import Reduced


class LossScaler:
    """Powers of two: they change no bit of a gradient that neither overflows nor vanishes. Settings as of torch's GradScaler.

    Example: LossScaler(init_scale=65536.0, growth_interval=2000)
    """

    def __init__(
        self, init_scale: float = 65536.0, growth_factor: float = 2.0, backoff_factor: float = 0.5, growth_interval: int = 2000
    ) -> None:  # fmt: skip
        self.value, self._good = init_scale, 0
        self._growth, self._backoff, self._interval = growth_factor, backoff_factor, growth_interval

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, scaled: for its backward pass."""
        return loss * self.value

    def update(self, run: Run, *, max_norm: float | None = None, lr_factor: float = 1.0) -> Reduced | None:
        """In place of `run.update`: the mean over lanes, without the scale. None if the step was cut short; what it returns
        says `skipped` if the gradient has overflowed.
        """
        scale = 1.0 / (run.tree.lanes.count * self.value)
        found = run.update_all(scale=scale, max_norm=max_norm, lr_factor=lr_factor, skips=True)
        if found is None:
            return None
        done = next(iter(found.values()))
        self._good = 0 if done.skipped else self._good + 1
        if done.skipped:
            self.value *= self._backoff
        elif self._good == self._interval:
            self.value, self._good = self.value * self._growth, 0
        return done

    def state_dict(self) -> dict[str, Any]:
        """The scale, and for how many updates it was good."""
        return {"value": self.value, "good": self._good}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """The reverse."""
        self.value, self._good = float(state["value"]), int(state["good"])
