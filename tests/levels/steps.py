"""What the scripts of these tests write down for the test: a line for each step. A test may ask for an end."""

import argparse
import os
import time
from pathlib import Path


def arguments() -> argparse.ArgumentParser:
    """What each of the scripts takes."""
    asked = argparse.ArgumentParser()
    asked.add_argument("--steps", type=int, default=200)
    asked.add_argument("--every", type=int, default=10)
    asked.add_argument("--model", type=Path, default=Path("/nowhere"), help="a folder with a model and its tokenizer")
    asked.add_argument("--save", type=Path, required=True)
    asked.add_argument("--history", type=Path, required=True)
    asked.add_argument("--last", type=Path, default=Path("/nowhere"), help="a file with the number of the last step")
    return asked


def digested(args: argparse.Namespace, step: int, digest: str) -> None:
    """Rank 0 writes down what the state is after a step."""
    if os.environ["RANK"] == "0":
        with (args.history.parent / "digests").open("a") as out:
            out.write(f"{os.environ['WORLD_SIZE']} {step} {digest}\n")


def made(args: argparse.Namespace, step: int) -> bool:
    """A step was made; was it the last one?"""
    time.sleep(0.05)
    where = f"rank {os.environ['RANK']} world {os.environ['WORLD_SIZE']} step {step}"
    with args.history.open("a") as out:
        out.write(f"{time.monotonic():.4f} {os.getpid()} {where}\n")
    return args.last.exists() and step >= int(args.last.read_text())
