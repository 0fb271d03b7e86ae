"""TRL's PPOTrainer (trl.experimental, up to TRL 1.12). It can neither resume nor save in a world over 1, so the script does:
the weights, and how many steps are left. With --kept all of its state is in memory.
"""

import os
from contextlib import suppress

import torch
from callbacks import History
from datasets import Dataset
from kept import digest
from steps import arguments, digested
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
    set_seed,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer

import elasticrl

BATCH = 2  # samples of a rank


class Over(Exception):
    pass


class Saves(History):
    """The trainer counts from 0 each time, and stops for no callback."""

    def __init__(self, args, file, begin):
        super().__init__(args)
        self.file, self.begin = file, begin

    def on_train_begin(self, args, state, control, **_):  # noqa: ARG002 - Trainer hands them
        state.global_step = self.begin

    def on_step_end(self, args, state, control, model=None, **more):
        step = state.global_step
        if state.is_world_process_zero and step % self.args.every == 0:
            fresh = self.file.with_suffix(".new")
            torch.save({"model": model.state_dict(), "step": step}, fresh)
            fresh.replace(self.file)
        super().on_step_end(args, state, control, **more)
        if control.should_training_stop:
            raise Over


class Made(History):
    """As above, but nothing is saved."""

    def on_step_end(self, args, state, control, model=None, optimizer=None, **more):
        digested(self.args, state.global_step, digest(model, optimizer))
        super().on_step_end(args, state, control, **more)
        if control.should_training_stop:
            raise Over


class Kept(TrainerCallback):
    """What docs/TRAINERS.md shows."""

    def __init__(self, trainer):
        trainer.dataloader = elasticrl.hf.Passes(trainer.dataloader)
        self.kept = elasticrl.keep(
            model=trainer.model, optimizer=trainer.optimizer, scheduler=trainer.lr_scheduler, data=trainer.dataloader
        )

    def on_train_begin(self, args, state, control, **_):  # noqa: ARG002 - Trainer hands them
        state.global_step = self.kept.restore()
        state.episode = state.global_step * args.batch_size
        args.num_total_batches -= state.global_step

    def on_step_end(self, args, state, control, **_):  # noqa: ARG002
        self.kept.step(state.global_step)


def main():
    asked = arguments()
    asked.add_argument("--kept", action="store_true")
    args = asked.parse_args()
    set_seed(7)  # the trainer seeds torch alone
    causal, reward, file = args.model / "causal", args.model / "reward", args.save / "newest.pt"
    policy = AutoModelForCausalLM.from_pretrained(causal)
    value = AutoModelForSequenceClassification.from_pretrained(reward, num_labels=1)
    begin = 0
    if file.exists():
        kept = torch.load(file)
        for name, model in (("policy.", policy), ("value_model.", value)):
            found = {key.removeprefix(name): part for key, part in kept["model"].items() if key.startswith(name)}
            model.load_state_dict(found)
        begin = kept["step"]
    words = AutoTokenizer.from_pretrained(causal, padding_side="left")
    rows = Dataset.from_list([{"input_ids": words(f"<user>{i}<answer>")["input_ids"]} for i in range(1000, 2000)])
    trainer = PPOTrainer(
        args=PPOConfig(
            output_dir=str(args.save), total_episodes=(args.steps - begin) * BATCH * int(os.environ["WORLD_SIZE"]),
            per_device_train_batch_size=BATCH, gradient_accumulation_steps=1, num_mini_batches=1, num_ppo_epochs=1,
            response_length=4, save_strategy="no", report_to="none", use_cpu=True, bf16=False, num_sample_generations=0,
            disable_tqdm=True, gradient_checkpointing=False, local_rollout_forward_batch_size=BATCH, logging_steps=10,
        ),
        processing_class=words,
        model=policy,
        ref_model=AutoModelForCausalLM.from_pretrained(causal),
        reward_model=AutoModelForSequenceClassification.from_pretrained(reward, num_labels=1),
        value_model=value,
        train_dataset=rows,
        eval_dataset=rows.select(range(BATCH)),
        callbacks=[Made(args) if args.kept else Saves(args, file, begin)],
    )  # fmt: skip
    if args.kept:
        trainer.add_callback(Kept(trainer))
    with suppress(Over):
        trainer.train()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
