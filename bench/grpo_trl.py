"""TRL's GRPO trainer on the job that bench/ppo.py describes: run by it; imports nothing of ours.

    python bench/grpo_trl.py JOB.json          (or under torchrun, for several workers)

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
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    lengths: list[int] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **more):  # noqa: ARG002 - transformers' signature
            if rank == 0:
                with Path(job["history"]).open("a") as history:
                    told = {"made": time.time(), "length": sum(lengths) / len(lengths)}
                    history.write(json.dumps(told) + "\n")
            lengths.clear()

    def reward(completion_ids, **more):  # noqa: ARG001 - TRL's signature
        lengths.extend(map(len, completion_ids))
        return [float(sum(ids) % 7) for ids in completion_ids]

    rows = [json.loads(line)["prompt"] for line in Path(job["prompts"]).read_text().splitlines()]
    conf = GRPOConfig(
        output_dir=job["folder"], use_cpu=True, bf16=False, report_to="none", save_strategy="no", seed=7, beta=0.05,
        learning_rate=job["lr"], per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=job["batch"] // job["micro_batch"] // world, num_generations=job["group"],
        max_completion_length=job["max_tokens"], max_steps=job["steps"], gradient_checkpointing=False,
        logging_strategy="no", disable_tqdm=True, use_vllm=False, num_iterations=job["epochs"],
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job["model"]),
        reward_funcs=reward,
        args=conf,
        train_dataset=Dataset.from_list([{"prompt": row} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[Clock()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
