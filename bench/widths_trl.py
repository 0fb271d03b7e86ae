"""TRL's GRPO trainer on the job that bench/widths.py describes: run by it; imports nothing of ours.

    python bench/widths_trl.py JOB

JOB is JSON. Writes the processor seconds of a step, and what memory it came to. Answers are given through `rollout_func`.
"""

import json
import resource
import sys
import time
import warnings
from itertools import pairwise
from statistics import median

PROMPT, MICRO, GROUP, WARM_UP, STEPS = 128, 8, 4, 1, 1


def main() -> None:
    warnings.filterwarnings("ignore")
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    job = json.loads(sys.argv[1])
    samples, taken, made = job["samples"], [0], []

    class Clock(TrainerCallback):
        def on_step_begin(self, args, state, control, **more):  # noqa: ARG002 - transformers' signature
            made.append(time.process_time())

    def answers(prompts, trainer):  # noqa: ARG001 - TRL's signature
        mine = [samples[(taken[0] + i) % len(samples)] for i in range(len(prompts))]
        taken[0] += len(prompts)
        return {
            "prompt_ids": [[5] * prompt for prompt, _ in mine],
            "completion_ids": [[7] * answer for _, answer in mine],
            "logprobs": [[-8.0] * answer for _, answer in mine],
        }

    batch = len(samples)
    conf = GRPOConfig(
        output_dir=job["folder"] + "/trl", use_cpu=True, bf16=False, report_to="none", save_strategy="no", seed=7, beta=0.05,
        learning_rate=1e-6, per_device_train_batch_size=MICRO, gradient_accumulation_steps=batch // MICRO,
        num_generations=GROUP, max_completion_length=128, max_steps=WARM_UP + STEPS + 1, gradient_checkpointing=False,
        logging_strategy="no", disable_tqdm=True, use_vllm=False, shuffle_dataset=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job["model"]),
        reward_funcs=lambda completions, **_: [float(i % GROUP) for i in range(len(completions))],
        args=conf,
        train_dataset=Dataset.from_list([{"prompt": "1"}] * batch * (STEPS + 2)),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        rollout_func=answers,
        callbacks=[Clock()],
    )
    trainer.train()
    took = [after - before for before, after in pairwise(made)][WARM_UP:]
    width = max(prompt for prompt, _ in samples) + max(answer for _, answer in samples)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    padding = 1 - sum(map(sum, samples)) / (len(samples) * width)  # of the batch: as it pads
    print(json.dumps({"step_s": median(took), "peak_mib": peak, "padding": padding}))


if __name__ == "__main__":
    main()
