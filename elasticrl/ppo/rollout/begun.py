"""The weights that a period of several steps began with, kept while an engine may need them again.

The idea: they are a part of the state, as an average of weights would be. So an engine that is fed again in the middle of a
period, after a fault or from a checkpoint, generates the very samples that it would have generated undisturbed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from elasticrl.runtime.vault.piece import Piece

Params = Callable[
    [], "Iterable[tuple[str, torch.Tensor]]"
]  # what an engine is sent, as it is cut up among the ranks now


class Begun:
    """A copy of the parameters that an engine is sent, cut up as they are. Example: Begun(lambda: sent(actor))"""

    def __init__(self, params: Params) -> None:
        self._params = params
        self.period, self.step, self.version = -1, -1, -1
        self.held: dict[str, torch.Tensor] = {}

    def at(self, period: int, step: int, version: int) -> None:
        """From now on it has the weights that this period began with. Copies those of now at its beginning: `step` began with
        them, and they are of `version`. A job that was given longer periods at a restart comes into the middle of one, so the
        step is not always the period's first.
        """
        if self.period != period:
            self.held = {name: _copied(param.detach()) for name, param in self._params()}
            self.period, self.step, self.version = period, step, version

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        return {"period": self.period, "step": self.step, "version": self.version, "weights": dict(self.held)}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """As it was."""
        self.step, self.version = int(state["step"]), int(state["version"])
        self.period = int(state.get("period", self.step))  # states of earlier versions do not say
        self.held = dict(state["weights"])

    def room(self, wholes: Mapping[str, Piece], /) -> dict[str, torch.Tensor]:
        """As the parameters are cut up now."""
        now = dict(self._params())
        return {name: _copied(now[name.split(".weights.", 1)[1]].detach()) for name in wholes}


def _copied(param: torch.Tensor) -> torch.Tensor:
    """On the host; of what FSDP has cut up this rank's part, where it is."""
    return param.clone() if hasattr(param, "to_local") else param.to("cpu", copy=True)
