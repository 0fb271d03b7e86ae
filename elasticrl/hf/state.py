"""A trainer's own state as a part of the job's: what a step that comes again begins with, and a process that takes a place.

The weights, the optimizer and the samples' order are the runtime's. Left are TrainerState, what callbacks count, and what has
not been logged yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers.trainer_callback import ExportableState

if TYPE_CHECKING:
    from elasticrl.hf.elastic import Elastic

# Of TrainerState what changes; the rest is from the arguments.
FIELDS: Final = (
    "global_step", "epoch", "num_input_tokens_seen", "total_flos", "best_metric", "best_global_step",
)  # fmt: skip
# Of the trainer.
OWN: Final = ("_total_loss_scalar", "_globalstep_last_logged", "_total_train_tokens", "current_flos")
KEPT: Final = 100  # lines of the log that a new process gets; whoever has lived through more keeps them


class State:
    """The part that is registered."""

    def __init__(self, trainer: Elastic) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        trainer, state = self._trainer, self._trainer.state
        return {
            "fields": {name: getattr(state, name) for name in FIELDS},
            "own": {name: getattr(trainer, name) for name in OWN if hasattr(trainer, name)},
            "log": state.log_history[-KEPT:],
            "loss": float(trainer._tr_loss),  # noqa: SLF001 - here and below: transformers' and TRL's, without public names
            "metrics": {name: list(values) for name, values in self._metrics.items()},
            "callbacks": {name: one.state()["attributes"] for name, one in self._callbacks.items()},
            "stopped": state.max_steps
            if trainer.control.should_training_stop and state.global_step < state.max_steps
            else 0,
        }

    def load_state_dict(self, saved: Mapping[str, Any], /) -> None:
        """The reverse."""
        trainer, state = self._trainer, self._trainer.state
        for name, value in saved["fields"].items():
            setattr(state, name, value)
        for name, value in saved["own"].items():
            setattr(trainer, name, value)
        first = saved["log"][0]["step"] if saved["log"] else state.global_step + 1
        state.log_history = [line for line in state.log_history if line["step"] < first] + list(saved["log"])
        trainer._tr_loss = torch.tensor(saved["loss"], dtype=torch.float64)  # noqa: SLF001
        self._metrics.clear()
        self._metrics.update({name: list(values) for name, values in saved["metrics"].items()})
        for name, one in self._callbacks.items():
            for attribute, value in saved["callbacks"].get(name, {}).items():
                setattr(one, attribute, value)
        # A callback has ended the training. With another max_steps it goes on.
        over = saved["stopped"] == state.max_steps
        trainer.run.end(state.global_step if over else state.max_steps)

    @property
    def _callbacks(self) -> dict[str, Any]:
        trainer = self._trainer
        stateful = (
            one for one in (*trainer.callback_handler.callbacks, trainer.control) if isinstance(one, ExportableState)
        )
        return {f"{type(one).__name__}.{i}": one for i, one in enumerate(stateful)}

    @property
    def _metrics(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = getattr(self._trainer, "_metrics", {}).get("train", {})
        return found
