"""The lines of steps.py from a trainer of transformers."""

import argparse

from steps import made
from transformers import TrainerCallback


class History(TrainerCallback):
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

    def on_step_end(self, args, state, control, **_):  # noqa: ARG002 - Trainer hands them
        control.should_training_stop |= made(self.args, state.global_step)
