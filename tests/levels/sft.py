"""TRL's SFTTrainer as one finds it: save_steps, and a resume from the newest whole checkpoint."""

from callbacks import History, newest
from datasets import Dataset
from steps import arguments
from trl import SFTConfig, SFTTrainer


def main():
    args = arguments().parse_args()
    rows = [{"prompt": f"<user>{i}<answer>", "completion": str(i)[::-1]} for i in range(1000, 2000)]
    trainer = SFTTrainer(
        model=str(args.model),
        args=SFTConfig(
            output_dir=str(args.save), max_steps=args.steps, per_device_train_batch_size=2, save_steps=args.every,
            save_total_limit=3, report_to=[], use_cpu=True, bf16=False, max_length=32, logging_steps=10, disable_tqdm=True,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list(rows),
        callbacks=[History(args)],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=newest(args.save))


if __name__ == "__main__":
    main()
