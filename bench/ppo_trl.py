"""TRL's PPO trainer on the job that bench/ppo.py describes: run by it, in an environment of its own; imports nothing of ours.

    python bench/ppo_trl.py JOB.json          (or under torchrun, for several workers)

Writes a JSON line for each step: when it was made, and how long its answers were on average.
"""

import json
import os
import sys
import time
import warnings
from pathlib import Path


def main() -> None:
    warnings.filterwarnings("ignore")
    import torch
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        TrainerCallback,
    )
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    made: list[dict[str, float]] = []
    lengths: list[float] = []
    truncate = ppo_trainer.truncate_response

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **more):  # noqa: ARG002 - transformers' signature
            made.append({"made": time.time()} | ({"length": sum(lengths) / len(lengths)} if lengths else {}))
            lengths.clear()

    def truncated(stop, pad, responses):  # what it does, and how long that is
        lengths.append(((responses == stop).cumsum(1) - (responses == stop).long() == 0).sum().item() / len(responses))
        return truncate(stop, pad, responses)

    ppo_trainer.truncate_response = truncated

    def scoring(path: str) -> torch.nn.Module:
        return AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)

    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    rows = [json.loads(line)["prompt"] for line in Path(job["prompts"]).read_text().splitlines()]
    data = Dataset.from_list([{"input_ids": tokenizer(row)["input_ids"]} for row in rows])
    conf = PPOConfig(
        output_dir=job["folder"], use_cpu=True, bf16=False, report_to="none", save_strategy="no", seed=7,
        learning_rate=job["lr"], per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=job["batch"] // job["micro_batch"] // world, num_mini_batches=1,
        num_ppo_epochs=job["epochs"], total_episodes=job["batch"] * job["steps"], response_length=job["max_tokens"],
        local_rollout_forward_batch_size=job["micro_batch"], num_sample_generations=0, temperature=1.0,
        stop_token="eos" if job["ends"] else None, kl_coef=0.05, gradient_checkpointing=False, logging_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = PPOTrainer(
        args=conf,
        processing_class=tokenizer,
        model=AutoModelForCausalLM.from_pretrained(job["model"]),
        ref_model=AutoModelForCausalLM.from_pretrained(job["model"]),
        reward_model=scoring(job["reward"]),
        value_model=scoring(job["reward"]),
        train_dataset=data,
        eval_dataset=data.select(range(job["batch"])),
        callbacks=[Clock()],
    )
    trainer.train()
    if rank == 0:
        Path(job["history"]).write_text("".join(json.dumps(step) + "\n" for step in made))


if __name__ == "__main__":
    main()
