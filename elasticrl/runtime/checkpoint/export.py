"""A model out of a checkpoint as Hugging Face expects it: safetensors files and, if there are several, their index.

The one idea: what has been trained must not need this program to be used.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from elasticrl.runtime.checkpoint.load import open_checkpoint
from elasticrl.runtime.checkpoint.place import Place, explained
from elasticrl.runtime.names import bare
from elasticrl.runtime.vault.errors import CheckpointError
from elasticrl.runtime.vault.piece import Piece
from elasticrl.runtime.vault.source import Source, dtype_of

MAX_BYTES = 5_000_000_000
BODY, HEAD = "actor.", "value_head."  # of elasticrl.ppo's actor with a tied head
ADAPTER = ".lora_"
MODELS = ("model.", "actor.")  # what a model is registered as: by most programs, by elasticrl.ppo


def export(
    place: Place, name: str, target: Path, *, prefix: str | None = None, dtype: str | None = None,
    beside: Iterable[Path] = (), max_bytes: int = MAX_BYTES,
) -> tuple[Path, ...]:  # fmt: skip
    """Write the tensors whose names start with `prefix` (without it) into the new directory `target`; the files are returned.
    None: the first of MODELS that is there.

    `beside`: files to put there as well (config.json, tokenizer.json, ...). The checkpoint is verified first.
    """
    source = open_checkpoint(place, name)
    pieces = model_of(source, name, prefix)
    with staged(name, target) as staging:
        groups = _groups(pieces, max_bytes)
        index: dict[str, str] = {}
        for number, group in enumerate(groups, 1):
            file = "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            tensors: dict[str, torch.Tensor] = {}
            for short in group:
                piece = pieces[short]
                tensor = torch.empty(piece.shape, dtype=dtype_of(piece.dtype))
                source.fill([(piece, tensor)])
                tensors[short] = tensor.to(dtype_of(dtype)) if dtype and tensor.is_floating_point() else tensor
                index[short] = file
            save_file(tensors, staging / file, metadata={"format": "pt"})
        if len(groups) > 1:
            total = sum(piece.nbytes for piece in pieces.values())
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
            (staging / "model.safetensors.index.json").write_text(text)
        for file_beside in beside:
            shutil.copy(file_beside, staging / file_beside.name)
    return tuple(sorted(target.iterdir()))


def model_of(source: Source, name: str, prefix: str | None = None) -> dict[str, Piece]:
    """The tensors of the model in a checkpoint, as they are called when it is exported."""
    known = sorted({piece.name.split(".", 1)[0] + "." for piece in source.pieces})
    chosen = prefix or next((each for each in MODELS if each in known), MODELS[0])
    pieces = _body({bare(full.removeprefix(chosen)): piece for full, piece in source.wholes(chosen).items()})
    if not pieces:
        raise CheckpointError(f"{name} has no tensor whose name starts with {chosen!r}; try one of {', '.join(known)}.")
    if any(ADAPTER in short for short in pieces):
        raise CheckpointError(
            f"{name} has adapters only, which are nothing without the model that they were trained on: name the job's "
            "configuration (--config FILE), and they are merged into it."
        )
    return pieces


@contextmanager
def staged(name: str, target: Path) -> Iterator[Path]:
    """A directory to write into, which becomes `target` when all of it is on the disk."""
    if target.exists():
        raise CheckpointError(f"{target} exists already: export into a new directory.")
    staging = target.with_name(f".{target.name}.exporting")
    with explained(f"Exporting {name}", target):
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        yield staging
        for path in staging.iterdir():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
        staging.rename(target)


def _body(pieces: dict[str, Piece]) -> dict[str, Piece]:
    """Without a value head: an actor that is tied to one lies beside it, one name deeper."""
    if not any(name.startswith(HEAD) for name in pieces):
        return pieces
    return {name.removeprefix(BODY): piece for name, piece in pieces.items() if name.startswith(BODY)}


def _groups(pieces: dict[str, Piece], max_bytes: int) -> list[list[str]]:
    """Names in their order, cut where a file would become too large."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, piece in pieces.items():
        if groups[-1] and size + piece.nbytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += piece.nbytes
    return groups
