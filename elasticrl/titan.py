"""A torchtitan Trainer whose state is in memory after each step.

    class Trainer(elasticrl.titan.Kept, torchtitan.trainer.Trainer):
        pass

    Trainer(config).train()

The one idea: Trainer begins by asking its checkpointer for the newest checkpoint. Here what is in memory is compared with the
steps on the disk, and the newer one is loaded. All that it trains has `state_dict`, or is cut as DTensors.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from elasticrl.runtime import kept

if TYPE_CHECKING:
    from collections.abc import Mapping

_Trainer: Any = object  # torchtitan's comes behind it
STEP: Final = "step-"  # a folder of torchtitan's


class Kept(_Trainer):  # type: ignore[misc]
    """Stands before torchtitan's Trainer. `keep_every`: steps from one that is kept to the next."""

    keep_every = 1
    step: int

    def train(self) -> None:
        """Trainer's, which goes on from memory."""
        models = {f"model{number}": part for number, part in enumerate(self.model_parts)}
        optimizers = {f"optimizer{number}": each for number, each in enumerate(self.optimizers)}
        self._kept = kept.keep(
            every=self.keep_every, **models, **optimizers, schedulers=self.lr_schedulers, train=Train(self),
            data=Data(self.dataloader),
        )  # fmt: skip
        load = self.checkpointer.load

        def newer(step: int = -1) -> Any:
            memory = kept.memory()
            whole = memory.newest() if memory else None
            here = whole.version.step if whole else 0
            found = load(step=step) if not here or here < on_disk(getattr(self.checkpointer, "folder", None)) else True
            if here > self.step:
                self.step = self._kept.restore()
            return found

        self.checkpointer.load = newer
        super().train()

    def train_step(self, data_iterator: Any) -> None:
        """Trainer's."""
        super().train_step(data_iterator)
        self._kept.step(self.step)


class Train:
    """What Trainer counts."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Numbers."""
        return dict(self._trainer.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """The reverse."""
        self._trainer.load_state_dict(state_dict)


class Data:
    """A rank's place in its share of the data. At another size the shares are others."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        """torchtitan's, and how many shares there are."""
        return {"shares": self._loader.dp_world_size, "state": self._loader.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """It refuses the state of another size."""
        if state_dict["shares"] == self._loader.dp_world_size:
            self._loader.load_state_dict(state_dict["state"])
        else:
            before, now = state_dict["shares"], self._loader.dp_world_size
            print(f"elasticrl: the data was cut for {before} ranks: it begins anew for {now}", file=sys.stderr)


def on_disk(folder: str | None) -> int:
    """The newest step that has a folder, whole or not. None: nothing is saved there."""
    steps = [path.name.removeprefix(STEP) for path in Path(folder).glob(f"{STEP}*")] if folder else []
    return max((int(step) for step in steps if step.isdecimal()), default=0)
