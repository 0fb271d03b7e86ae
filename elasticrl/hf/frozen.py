"""Weights that are not trained: the base under adapters, a reference model. Each process reads them by itself.

The one idea: a folder that holds other files on one node would change the bits without a word. So their checksums are a part of
the job's state, and all ranks tell them to each other once in each generation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from zlib_ng.zlib_ng import crc32

from elasticrl.runtime.digest import outliers
from elasticrl.runtime.misuse import Misuse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticrl.runtime.run import Run


class OtherFiles(RuntimeError):
    """This rank has read other model files than the job computes with: it must not go on."""


def checksums(**models: torch.nn.Module | None) -> dict[str, int]:
    """Of all that is not trained, by model."""
    found = {}
    for role, model in models.items():
        total = 0
        for name, param in sorted(model.named_parameters() if model is not None else ()):
            if not param.requires_grad:
                total = crc32(f"{name} {param.dtype} {tuple(param.shape)}".encode(), total)
                total = crc32(param.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy(), total)
        if total:
            found[role] = total
    return found


def compare(run: Run, mine: Mapping[str, int]) -> None:
    """OtherFiles on a rank that has other weights than the job until now, or at its beginning than most ranks. Collective."""
    told = run.tell(dict(mine))
    for role in sorted({role for words in told for role in words}):
        values = [words.get(role, 0) for words in told]
        known = run.progress.frozen.get(role)
        odd = outliers(values) if known is None else tuple(rank for rank, value in enumerate(values) if value != known)
        if not odd:
            continue
        sentence = (
            f"The weights of {role} that are not trained are others on rank {', '.join(map(str, odd))} than "
            f"{'on most ranks' if known is None else 'the job has computed with'}: its files are others. Give every node the "
            "same files, best in a folder of the same name."
        )
        if len(odd) == len(told):
            raise Misuse(sentence)
        if run.rank in odd:
            raise OtherFiles(sentence)
        print(sentence, flush=True)
    run.progress.frozen = dict(mine)
