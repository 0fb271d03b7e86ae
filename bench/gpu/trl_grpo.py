"""TRL's GRPOTrainer on the job of bench/gpu/job.py: `python -m bench.gpu.trl_grpo DEVICE MODEL PROMPTS HISTORY`. A line for
each step says when it was made.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench.gpu.job import GROUP, SIZES


class Clock(TrainerCallback):
    """Writes down when a step was made."""

    def __init__(self, history: Path) -> None:
        self.history = history

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - Trainer hands them
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        with self.history.open("a") as out:
            out.write(json.dumps({"made": time.time()}) + "\n")


def sevens(completions: list[str], **_: Any) -> list[float]:
    """How much of an answer is the digit 7."""
    return [said.count("7") / (len(said) or 1) for said in completions]


def main() -> None:
    device, model, prompts, history = sys.argv[1], *map(Path, sys.argv[2:5])
    size = SIZES[device]
    rows = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    passes = max(1, size.tokens // size.micro_tokens)
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=sevens,
        args=GRPOConfig(
            output_dir=str(history.with_name("trl-out")), max_steps=size.steps, num_generations=GROUP,
            per_device_train_batch_size=size.batch // passes, gradient_accumulation_steps=passes,
            max_completion_length=size.answer, save_strategy="no", report_to=[], use_cpu=device == "cpu",
            bf16=device == "cuda", gradient_checkpointing=False, disable_tqdm=True, logging_steps=100,
        ),
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock(history)],
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    main()
