"""The small loop that every peer runs: 50 ms steps, float32 weights, six samples a step, a save to disk every 20 steps.

Imports nothing of ours, for it runs in the peers' own environments. Two files say what happened. `history` has a line for each
step that a worker has made, in the form that `chaos.live.local.parse` reads; `samples` says, before a try, what goes into it:

    step 41 generation 3 rank 0 samples 240,243

A step counts with the samples of its last attempt that was made, so both files together tell what was lost or trained twice.
"""

import argparse
import hashlib
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch

BATCH = 6  # samples a step, dealt over the ranks there are
SIZE = 4097
SAVE_EVERY = 20  # steps between saves to disk: one second of work


class Loop:
    """One worker's part. What is the peer's own (who is in, how a sum is made, who restores whom) is the script's."""

    def __init__(self, folder: Path, step_s: float, timeout_s: float) -> None:
        torch.set_num_threads(1)
        self.folder, self.step_s = folder, step_s
        self.timeout = {"timeout": timedelta(seconds=timeout_s)} if timeout_s else {}
        self.node = os.environ["NODE"]
        self.weights = torch.zeros(SIZE)
        self.step = 0
        self.begun = time.monotonic()

    def deal(self, rank: int, world: int) -> list[int]:
        """This rank's samples of the step, whoever else there is."""
        return list(range(self.step * BATCH + rank, (self.step + 1) * BATCH, world))

    def gradient(self, samples: Sequence[int], *, generation: int, rank: int) -> torch.Tensor:
        """Of these samples, summed. A hang that was ordered strikes here, in the training thread."""
        self.begun = time.monotonic()
        if (order := self.folder / f"hang-{self.node}").exists():
            order.unlink()
            time.sleep(3600)  # this is the hang
        told = ",".join(map(str, samples))
        self.write("samples", f"step {self.step + 1} generation {generation} rank {rank} samples {told}")
        total = torch.zeros(SIZE)
        places = torch.arange(SIZE, dtype=torch.float32)
        for sample in samples:
            total += torch.sin(self.weights * 1.7 + places * 0.01 + float(sample))
        return total

    def apply(self, total: torch.Tensor) -> None:
        """The step is made."""
        self.weights -= 0.01 * total / BATCH
        self.step += 1

    def tell(self, *, generation: int, rank: int, world: int) -> None:
        """Say that it was made, and rest until its 50 ms are over."""
        digest = hashlib.sha256(self.weights.numpy().tobytes()).hexdigest()[:8]
        where = f"generation {generation} rank {rank} world {world}"
        self.write(
            "history", f"{time.monotonic():.4f} {self.node} {os.getpid()} step {self.step} {where} digest {digest}"
        )
        time.sleep(max(0.0, self.step_s - (time.monotonic() - self.begun)))

    def write(self, name: str, line: str) -> None:
        """One write each, so lines of several workers do not mix."""
        with (self.folder / name).open("ab", buffering=0) as file:
            file.write(line.encode() + b"\n")

    def save(self) -> None:
        """To the disk that all nodes see, whole or not at all."""
        fresh = self.folder / f"saved.{os.getpid()}"
        torch.save({"step": self.step, "weights": self.weights}, fresh)
        fresh.replace(self.folder / "saved")

    def load(self) -> None:
        """The newest save, if there is one."""
        if (saved := self.folder / "saved").exists():
            found = torch.load(saved)
            self.step, self.weights = found["step"], found["weights"]


def arguments() -> argparse.ArgumentParser:
    """Of every script that runs the loop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--timeout-s", type=float, default=0.0, help="of collectives; 0: the peer's default")
    return parser
