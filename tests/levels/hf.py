"""A transformers Trainer script as one finds it: a tiny Llama, save_steps, and a resume from the newest whole checkpoint."""

import argparse
import hashlib
import os
import time
from pathlib import Path

import torch
from callbacks import newest
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        tokens = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


class History(TrainerCallback):
    def __init__(self, file, last):
        self.file, self.last = file, last

    def on_step_end(self, args, state, control, **kwargs):  # noqa: ARG002 - Trainer hands them
        time.sleep(0.05)
        with self.file.open("a") as out:
            world = int(os.environ["WORLD_SIZE"])
            line = (
                f"{time.monotonic():.4f} {os.getpid()} rank {os.environ['RANK']} world {world} step {state.global_step}"
            )
            out.write(line + "\n")
        if int(os.environ["RANK"]) == 0:
            found = hashlib.sha256()
            for tensor in kwargs["model"].parameters():
                found.update(tensor.detach().numpy().tobytes())
            with (self.file.parent / "digests").open("a") as out:
                out.write(f"{world} {state.global_step} {found.hexdigest()[:16]}\n")
        if self.last.exists() and state.global_step >= int(self.last.read_text()):
            control.should_training_stop = True


def main():
    asked = argparse.ArgumentParser()
    asked.add_argument("--steps", type=int, default=200)
    asked.add_argument("--save", type=Path, required=True)
    asked.add_argument("--history", type=Path, required=True)
    asked.add_argument("--last", type=Path, default=Path("/nowhere"), help="a file with the number of the last step")
    asked.add_argument("--told", action="store_true")
    asked.add_argument("--kept", action="store_true", help="in memory after each step, and never on the disk")
    args = asked.parse_args()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=32,
        )
    )  # fmt: skip
    callbacks = [History(args.history, args.last)]
    resume = newest(args.save)
    if args.told:
        import elasticrl.hf

        callbacks.append(elasticrl.hf.Callback())
        resume = elasticrl.hf.latest(args.save)
    if args.kept:
        import elasticrl.hf

        callbacks.append(elasticrl.hf.Callback(keep=True))
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(args.save), max_steps=args.steps, per_device_train_batch_size=2, save_steps=10, save_total_limit=3,
            report_to=[], use_cpu=True, logging_steps=10, disable_tqdm=True, dataloader_num_workers=0,
            save_strategy="no" if args.kept else "steps", ddp_find_unused_parameters=args.kept or None,
        ),
        train_dataset=Samples(),
        callbacks=callbacks,
    )  # fmt: skip
    if args.kept:
        resume = elasticrl.hf.latest(args.save)
    trainer.train(resume_from_checkpoint=resume)


if __name__ == "__main__":
    main()
