"""TRL's GRPOTrainer as bench/grpo.py runs it: as one finds it, kept, or exact. It writes a line for each step it has made."""

import argparse
import os
import random
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import elasticrl.hf

GROUP = 4


def sevens(completions: list[str], **_: Any) -> list[float]:
    """How much of an answer is the digit 7."""
    return [said.count("7") / 16 for said in completions]


class History(TrainerCallback):
    """Writes down when a rank has made a step, as the scripts of tests/levels do."""

    def __init__(self, history: Path, run: Any) -> None:
        self.history, self.run, self.told = history, run, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - Trainer hands them
        if self.run is None:
            rank, world, step = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1"), state.global_step
        else:
            rank, world, step = self.run.rank, self.run.world, self.run.sealed
        if step != self.told:
            with self.history.open("a") as out:
                out.write(f"{time.monotonic():.4f} {os.getpid()} rank {rank} world {world} step {step}\n")
        self.told = step


def newest(folder: Path) -> str | None:
    """Trainer's newest checkpoint that is whole: it writes `trainer_state.json` last."""
    found = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return str(max(found, key=lambda path: int(path.name.partition("-")[2]))) if found else None


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--level", choices=("plain", "kept", "exact"), default="plain")
    options.add_argument("--model", required=True)
    options.add_argument("--save", type=Path, required=True)
    options.add_argument("--history", type=Path, required=True)
    options.add_argument("--tokens", type=int, default=16)
    options.add_argument("--steps", type=int, default=1_000_000)
    asked = options.parse_args()
    base: Any = GRPOTrainer
    callbacks: list[TrainerCallback] = []
    run = None
    if asked.level == "exact":

        class Trainer(elasticrl.hf.Elastic, GRPOTrainer):
            """Exact, in place."""

        base, run = Trainer, elasticrl.hf.join()
    if asked.level == "kept":
        callbacks.append(elasticrl.hf.Callback(keep=True))
    chance = random.Random(1)
    questions = ["".join(chance.choices("0123456789", k=chance.choice((3, 6, 12)))) for _ in range(2000)]
    trainer = base(
        model=asked.model,
        reward_funcs=sevens,
        args=GRPOConfig(
            output_dir=str(asked.save), max_steps=asked.steps, per_device_train_batch_size=GROUP, num_generations=GROUP,
            max_completion_length=asked.tokens, save_strategy="steps" if asked.level == "plain" else "no", save_steps=10,
            save_total_limit=3, report_to=[], use_cpu=True, bf16=False, logging_steps=10, disable_tqdm=True,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list([{"prompt": f"<user>{text}<answer>"} for text in questions]),
        callbacks=[History(asked.history, run), *callbacks],
    )  # fmt: skip
    if asked.level == "exact":
        trainer.train()
    elif asked.level == "kept":
        trainer.train(resume_from_checkpoint=elasticrl.hf.latest(str(asked.save)))
    else:
        trainer.train(resume_from_checkpoint=newest(asked.save))


if __name__ == "__main__":
    main()
