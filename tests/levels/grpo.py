"""TRL's GRPOTrainer as one finds it: save_steps, and a resume from the newest whole checkpoint."""

from callbacks import History, newest
from datasets import Dataset
from steps import arguments
from trl import GRPOConfig, GRPOTrainer


def sevens(completions, **_):
    return [said.count("7") / 4 for said in completions]


def main():
    args = arguments().parse_args()
    trainer = GRPOTrainer(
        model=str(args.model),
        reward_funcs=sevens,
        args=GRPOConfig(
            output_dir=str(args.save), max_steps=args.steps, per_device_train_batch_size=2, save_steps=args.every,
            save_total_limit=3, report_to=[], use_cpu=True, bf16=False, num_generations=2, max_completion_length=4,
            logging_steps=10, disable_tqdm=True, gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list([{"prompt": f"<user>{i}<answer>"} for i in range(1000, 2000)]),
        callbacks=[History(args)],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=newest(args.save))


if __name__ == "__main__":
    main()
