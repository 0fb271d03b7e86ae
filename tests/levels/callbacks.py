"""The lines of steps.py from a trainer of transformers, and its newest checkpoint that is whole."""

import argparse
from pathlib import Path

from steps import made
from transformers import TrainerCallback


class History(TrainerCallback):
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

    def on_step_end(self, args, state, control, **_):  # noqa: ARG002 - Trainer hands them
        control.should_training_stop |= made(self.args, state.global_step)


def newest(folder: Path) -> str | None:
    """`trainer_state.json` is written last. (transformers' `get_last_checkpoint` takes one that a kill has cut short, too.)"""
    found = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return str(max(found, key=lambda path: int(path.name.partition("-")[2]))) if found else None
