"""A small job of each trainer, for gangs of processes and for jobs under daemons.

    python hf_job.py grpo --folder DIR [--history FILE] [--step-ms 50]

It writes one line to the history for each step that it knows to be sealed, as tests/runtime/run_job.py does.
"""

import argparse
import os
import random
import sys
import time
from collections.abc import Callable
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


def parts(kind: str, folder: Path, data: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Model, data and tokenizer, as both the stock trainer and ours take them."""
    path = model_of(folder, kind)
    dataset = datasets.Dataset.from_list(rows(kind) if data is None else data)
    given: dict[str, Any] = {"processing_class": transformers.AutoTokenizer.from_pretrained(path)}
    if kind == "plain":
        words = given["processing_class"]
        dataset = dataset.map(lambda row: words(row["text"]), remove_columns=["text"])
        given["data_collator"] = transformers.DataCollatorForLanguageModeling(words, mlm=False)
        return given | {"model": transformers.AutoModelForCausalLM.from_pretrained(path), "train_dataset": dataset}
    if kind == "grpo":
        given["reward_funcs"] = sevens
    return given | {"model": path, "train_dataset": dataset}


class Teller(transformers.TrainerCallback):
    """What a test wants to see of a worker."""

    def __init__(self, history: str, step_ms: float) -> None:
        self.history, self.step_ms, self.told = history, step_ms, 0
        self.run = elasticrl.hf.join()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        time.sleep(self.step_ms / 1000)
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


def trainer(kind: str, folder: Path, *, callbacks: tuple[Any, ...] = (), more: dict[str, Any] | None = None) -> Any:
    """Ours."""
    base = base_of(kind)

    class Trainer(elasticrl.hf.Elastic, base):
        pass

    return Trainer(
        args=arguments(kind, folder / "out", **(more or {})), callbacks=list(callbacks), **parts(kind, folder)
    )


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("kind", choices=KINDS)
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--history", default="")
    options.add_argument("--save", default="")  # taken from the configuration here
    options.add_argument("--step-ms", type=float, default=0.0)
    options.add_argument("--more", default="", help="arguments of the trainer, as NAME=VALUE,NAME=VALUE")
    options.add_argument("--model-out", type=Path)
    args = options.parse_args()
    pairs = (word.partition("=") for word in args.more.split(",") if word)
    more = {name: int(value) if value.isdigit() else value for name, _, value in pairs}
    made: Callable[[], Any] = lambda: trainer(  # noqa: E731
        args.kind, args.folder, callbacks=(Teller(args.history, args.step_ms),), more=more
    )
    found = made()
    found.train()
    if args.model_out:
        found.save_model(str(args.model_out))


if __name__ == "__main__":
    main()
