"""Hugging Face's Trainer and TRL's trainers as jobs of elasticrl: exact on any number of workers, recovered in place.

    class Trainer(elasticrl.hf.Elastic, GRPOTrainer): ...

    trainer = Trainer(model=..., args=GRPOConfig(...), reward_funcs=..., train_dataset=...)
    trainer.train()

Start reading at `elastic`. docs/TRAINERS.md says what each trainer gets and loses.
"""

from typing import Any

__all__ = ["Elastic", "join"]


def __getattr__(name: str) -> Any:
    # Not imported at once: transformers takes seconds, and is an extra.
    if name == "Elastic":
        from elasticrl.hf.elastic import Elastic

        return Elastic
    if name == "join":
        from elasticrl.hf.place import join

        return join
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
