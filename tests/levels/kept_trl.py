"""A script of TRL's as a user writes it, whose state is kept in memory. The model is tiny and fresh."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # it is a program of its own under a daemon

import elasticrl.hf
from tests.hf.hf_job import arguments, base_of, parts
from tests.levels.hf import History


def main():
    asked = argparse.ArgumentParser()
    asked.add_argument("kind", choices=("sft", "dpo", "grpo"))
    asked.add_argument("--model", type=Path, required=True, help="a folder with a tiny model")
    asked.add_argument("--save", type=Path, required=True)
    asked.add_argument("--history", type=Path, required=True)
    asked.add_argument("--last", type=Path, default=Path("/nowhere"))
    asked.add_argument("--steps", type=int, default=100000)
    args = asked.parse_args()
    settings = arguments(args.kind, args.save, max_steps=args.steps, ddp_find_unused_parameters=True)
    trainer = base_of(args.kind)(
        args=settings,
        callbacks=[History(args.history, args.last), elasticrl.hf.Callback(keep=True)],
        **parts(args.kind, args.model),
    )
    trainer.train(resume_from_checkpoint=elasticrl.hf.latest(args.save))


if __name__ == "__main__":
    main()
