"""TRL's GRPOTrainer under elasticrl: the same bits on one worker or many, whatever dies on the way.

    python docs/examples/trl_grpo.py                     alone, one process, no daemon
    elasticrl run --nodes 3 docs/examples/trl_grpo.py    three local nodes, with faults survived

What is elasticrl's is marked with (*); the rest is what one writes for TRL anyway. Without --model the script makes a tiny
model that knows the digits only, and teaches it to answer with the first digit of a question, four times.
"""

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import elasticrl.hf  # (*)
from elasticrl.ppo import tiny


class Trainer(elasticrl.hf.Elastic, GRPOTrainer):  # (*) with this line the process takes its place in the job
    """TRL's, as a job of elasticrl."""


def repeats(completions: list[str], first: list[str], **_: Any) -> list[float]:
    """For each answer, how much of it is the digit that was asked for."""
    return [said.count(digit) / max(4, len(said)) for said, digit in zip(completions, first, strict=True)]


def main() -> None:
    """One job."""
    options = argparse.ArgumentParser()
    options.add_argument("--model", help="a folder in Hugging Face's layout, the same on all nodes")
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--out", default="run/trl-grpo")
    args = options.parse_args()

    chance = random.Random(1)
    questions = ["".join(chance.choices("0123456789", k=3)) for _ in range(500)]
    data = Dataset.from_list([{"prompt": f"<user>{text}<answer>", "first": text[0]} for text in questions])
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=args.model or tiny.write(Path(folder) / "model"),
            args=GRPOConfig(
                output_dir=args.out,
                per_device_train_batch_size=8,  # of a lane: here two questions with four answers each
                num_generations=4,
                max_completion_length=4,
                max_steps=args.steps,
                learning_rate=4e-3,
                logging_steps=5,
                save_strategy="no",  # the job's own checkpoints are kept: checkpoint.every
                report_to=[],
                bf16=False,
            ),
            reward_funcs=repeats,
            train_dataset=data,
        )
        trainer.train()  # goes on where the job is
        trainer.save_model()  # rank 0 writes, the others come back at once


if __name__ == "__main__":
    main()
