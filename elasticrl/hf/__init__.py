"""Hugging Face's Trainer and TRL's trainers as jobs of elasticrl: exact on any number of workers, recovered in place.

    class Trainer(elasticrl.hf.Elastic, GRPOTrainer): ...

    trainer = Trainer(model=..., args=GRPOConfig(...), reward_funcs=..., train_dataset=...)
    trainer.train()

A loop of Accelerate calls `prepare` in place of `accelerator.prepare`.

A loop of Accelerate that keeps its state in memory takes its batches from `Passes`.

A script that stays as it is can have a `Callback`, which tells its steps, and go on from the `latest` whole checkpoint.

Start reading at `elastic`. docs/TRAINERS.md says what each trainer gets and loses.
"""

from importlib import import_module
from typing import Any, Final

__all__ = ["Callback", "Elastic", "Passes", "join", "latest", "prepare"]

WHERE: Final = {
    "Callback": "callback",
    "Elastic": "elastic",
    "Passes": "passes",
    "join": "place",
    "latest": "callback",
    "prepare": "prepared",
}


def __getattr__(name: str) -> Any:
    # Not imported at once: transformers takes seconds, and is an extra.
    if name in WHERE:
        return getattr(import_module(f"elasticrl.hf.{WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
