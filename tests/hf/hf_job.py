"""A small job of each trainer, for gangs of processes and for jobs under daemons.

    python hf_job.py grpo --folder DIR [--history FILE] [--step-ms 50]

It writes one line to the history for each step that it knows to be sealed, as tests/runtime/run_job.py does.
"""

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # it is a program of its own under a daemon
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import datasets
import transformers

import elasticrl.hf
from elasticrl.ppo import tiny

STEPS, ROWS, GROUP = 12, 6, 3
KINDS = ("plain", "sft", "dpo", "grpo", "reward")


def model_of(folder: Path, kind: str) -> str:
    """A folder with a tiny model and a tokenizer, written once, before any worker begins."""
    named = "reward" if kind == "reward" else "causal"
    place = folder / f"model-{named}"
    return str(place) if place.exists() else tiny.write(place, hidden=32, layers=1, heads=2, kind=named)


def digits(count: int, seed: int = 5) -> list[str]:
    """Prompts of two to four digits."""
    chance = random.Random(seed)
    return ["".join(chance.choices("0123456789", k=chance.choice((2, 3, 4)))) for _ in range(count)]


def rows(kind: str, count: int = 160) -> list[dict[str, Any]]:
    """Digits to be said backwards, as this trainer wants them told."""
    texts = digits(count)
    match kind:
        case "sft":
            return [{"prompt": f"<user>{text}<answer>", "completion": text[::-1]} for text in texts]
        case "dpo" | "reward":
            return [{"prompt": f"<user>{x}<answer>", "chosen": x[::-1], "rejected": x} for x in texts]
        case "grpo":
            return [{"prompt": f"<user>{text}<answer>", "length": len(text)} for text in texts]
    return [{"text": f"<user>{text}<answer>{text[::-1]}<eos>"} for text in texts]


def sevens(completions: list[str], **_: Any) -> list[float]:
    """How much of an answer is the digit 7, and how near it is to four digits."""
    return [said.count("7") / 4 - 0.1 * abs(len(said) - 4) for said in completions]


def answers(prompts: list[str], trainer: Any) -> dict[str, list[list[int]]]:
    """In place of generating: answers that are a function of the prompt and its turn, for who compares two trainers."""
    words = trainer.processing_class
    said = [random.Random(f"{x} {i % GROUP}") for i, x in enumerate(prompts)]
    texts = ["".join(one.choices("0123456789", k=one.choice((1, 2, 3, 4)))) + "<eos>" for one in said]
    found = {"prompt_ids": words(prompts)["input_ids"], "completion_ids": words(texts)["input_ids"]}
    return found | {"logprobs": [[0.0] * len(ids) for ids in found["completion_ids"]]}


def arguments(kind: str, out: Path, **more: Any) -> Any:
    """What a user would write."""
    import trl

    plain: dict[str, Any] = {
        "output_dir": str(out), "per_device_train_batch_size": ROWS, "max_steps": STEPS, "learning_rate": 3e-3,
        "lr_scheduler_type": "cosine", "warmup_steps": 2, "logging_steps": 2, "report_to": [], "use_cpu": True,
        "save_strategy": "no", "disable_tqdm": True, "bf16": False, "seed": 3, "max_grad_norm": 0.5,
        "weight_decay": 0.01, "gradient_checkpointing": False,
    }  # fmt: skip
    of: dict[str, tuple[Any, dict[str, Any]]] = {
        "plain": (transformers.TrainingArguments, {"gradient_checkpointing": True}),
        "sft": (trl.SFTConfig, {"max_length": 32}),
        "dpo": (trl.DPOConfig, {"max_length": 32}),
        "reward": (trl.RewardConfig, {"max_length": 32}),
        "grpo": (
            trl.GRPOConfig,
            {"num_generations": GROUP, "max_completion_length": 5, "beta": 0.02, "learning_rate": 1e-2},
        ),
    }
    made, own = of[kind]
    return made(**{**plain, **own, **more})


def base_of(kind: str) -> Any:
    """The stock trainer."""
    if kind == "plain":
        return transformers.Trainer
    import trl

    return {"sft": trl.SFTTrainer, "dpo": trl.DPOTrainer, "grpo": trl.GRPOTrainer, "reward": trl.RewardTrainer}[kind]


def parts(kind: str, folder: Path, *, evaluates: bool = False, fixed: bool = False) -> dict[str, Any]:
    """Model, data and tokenizer, as both the stock trainer and ours take them."""
    path = model_of(folder, kind)
    dataset = datasets.Dataset.from_list(rows(kind))
    words = transformers.AutoTokenizer.from_pretrained(path)
    given: dict[str, Any] = {"processing_class": words, "model": path}
    if kind == "plain":
        dataset = dataset.map(lambda row: words(row["text"]), remove_columns=["text"])
        given["data_collator"] = transformers.DataCollatorForLanguageModeling(words, mlm=False)
        given["model"] = transformers.AutoModelForCausalLM.from_pretrained(path)
    if kind == "grpo":
        given |= {"reward_funcs": sevens, "rollout_func": answers if fixed else None}
    if evaluates:
        given["eval_dataset"] = dataset.select(range(12))
    return given | {"train_dataset": dataset}


class Teller(transformers.TrainerCallback):
    """What a test wants to see of a worker."""

    def __init__(self, history: str, step_ms: float, stop: int) -> None:
        self.history, self.step_ms, self.stop, self.told = history, step_ms, stop, 0
        self.run = elasticrl.hf.join()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args
        time.sleep(self.step_ms / 1000)
        control.should_training_stop |= state.global_step == self.stop
        self.tell()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.tell()

    def tell(self) -> None:
        run = self.run
        if run.sealed > self.told and self.history:
            words = f"step {run.sealed} generation {run.generation} rank {run.rank} world {run.world}"
            with Path(self.history).open("a") as file:
                file.write(
                    f"{time.monotonic():.4f} {os.environ.get('ELASTICRL_NODE', '')} {os.getpid()} {words} digest "
                    f"{run.sealed_digest or '-'}\n"
                )
        self.told = run.sealed


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("kind", choices=KINDS)
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--history", default="")
    options.add_argument("--save", default="")  # taken from the configuration here
    options.add_argument("--step-ms", type=float, default=0.0)
    options.add_argument("--more", default="{}", help="arguments of the trainer, as JSON")
    options.add_argument("--model-out", type=Path, help="rank 0 writes the model there, and what was logged")
    options.add_argument("--lora", action="store_true")
    options.add_argument("--fixed", action="store_true", help="grpo does not generate")
    options.add_argument("--stop", type=int, default=0, help="a callback ends the training after this step")
    options.add_argument("--stock", action="store_true", help="the trainer as it is, in one process")
    args = options.parse_args()
    more = json.loads(args.more)
    stock = base_of(args.kind)
    if args.stock:
        Trainer = stock  # noqa: N806
    else:

        class Trainer(elasticrl.hf.Elastic, stock):
            pass

    given = parts(args.kind, args.folder, evaluates="eval_strategy" in more, fixed=args.fixed)
    if args.lora:
        import peft

        given["peft_config"] = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    trainer = Trainer(
        args=arguments(args.kind, args.folder / "out", **more),
        callbacks=[] if args.stock else [Teller(args.history, args.step_ms, args.stop)],
        **given,
    )
    trainer.train()
    if args.model_out:
        trainer.save_model(str(args.model_out))
        if trainer.is_world_process_zero():
            (args.model_out / "log.json").write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main()
