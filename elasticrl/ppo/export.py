"""A checkpoint's actor as a folder that `from_pretrained` reads, by the configuration that it was trained with.

The idea: the model is built as the job builds it, gets the checkpoint's weights, and is written as any model is. So adapters
are merged into what they were trained on, and configuration and tokenizer lie beside the weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticrl.ppo import models
from elasticrl.ppo.frozen import checksum
from elasticrl.runtime.checkpoint.export import staged
from elasticrl.runtime.checkpoint.load import open_checkpoint
from elasticrl.runtime.vault.errors import CheckpointError
from elasticrl.runtime.vault.source import dtype_of

if TYPE_CHECKING:
    from pathlib import Path

    from elasticrl.config import Tree
    from elasticrl.runtime.checkpoint.place import Place

ROLE = "actor."


def export(place: Place, name: str, target: Path, tree: Tree, *, dtype: str | None = None) -> tuple[Path, ...]:
    """Write the actor into the new directory `target`; the files are returned. A tied value head is left out."""
    path = str(tree.model.path)
    try:
        actor = models.actor(tree.model, path, seed=tree.job.seed)
        tokens = models.tokenizer(path)
    except (models.ModelError, OSError, ValueError) as error:
        raise CheckpointError(f"the model of the configuration cannot be built: {error}") from error
    source = open_checkpoint(place, name)
    saved = source.wholes(ROLE)
    trained = {ROLE + each: param for each, param in actor.named_parameters() if param.requires_grad}
    differs = sorted(saved.keys() ^ trained.keys()) or [
        each for each, param in trained.items() if tuple(param.shape) != saved[each].shape
    ]
    if differs:
        raise CheckpointError(
            f"{name} was not written by a job of this configuration: {len(differs)} tensors differ ({differs[0]}, ...). "
            "Name the one that the job was run with."
        )
    made = source.values.get("run", {}).get("frozen", {}).get(ROLE.rstrip("."))
    if made is not None and checksum(actor) != made:
        raise CheckpointError(
            f"The frozen weights of {path} are not those that {name} was trained over: its adapters belong to other ones. "
            "Bring the model's files back that the job was run with."
        )
    source.fill((saved[each], param.data) for each, param in trained.items())
    body: Any = actor.actor if isinstance(actor, models.Tied) else actor
    if hasattr(body, "merge_and_unload"):
        body = body.merge_and_unload()
    with staged(name, target) as staging:
        models.export(body.to(dtype_of(dtype)) if dtype else body, staging, tokens)
    return tuple(sorted(target.iterdir()))
