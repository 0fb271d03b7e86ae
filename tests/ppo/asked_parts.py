"""What a team does for log-probabilities, with entropies and without them."""

from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elasticrl.config.training import Model
from elasticrl.ppo import models
from elasticrl.ppo.roles import Roles
from elasticrl.runtime.group import form
from elasticrl.runtime.planned import share
from elasticrl.runtime.spread import team_mesh
from elasticrl.runtime.team import form_team, local
from elasticrl.runtime.tokens import form_tokens


class Work(TorchDispatchMode):
    """What is done inside: operations on tensors of so many columns, and numbers that collectives were given."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns, self.looks, self.sent = columns, 0, 0

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self.looks += any(it.dim() > 1 and it.shape[-1] == self.columns for it in given)
        if func.namespace in ("c10d", "_c10d_functional"):
            self.sent += sum(it.numel() for it in given)
        return func(*args, **(kwargs or {}))


def asked(rank: int, world: int, store: dist.Store, *, path: str, how: str, words: int) -> list[dict[str, Any]]:
    """What an update's pass comes to, and takes: with entropies, and without them."""
    limit = timedelta(seconds=30)
    gang = form(generation=1, rank=rank, world=world, store=store)
    team = form_team(gang.group, world, form_s=limit, limit=limit) if how == "tp" else None
    tokens = form_tokens(gang.group, world, cuts=1, form_s=limit, limit=limit) if how == "cp" else None
    model = Model(path=path)
    mesh = team_mesh(team, tokens, "cpu")
    assert mesh is not None
    actor = share(models.actor(model, path, seed=0), mesh)
    g = torch.Generator().manual_seed(1)
    rows = {
        "tokens": torch.randint(0, words, (3, 9), generator=g), "start": torch.full((3,), 4),
        "mask": torch.ones(3, 5, dtype=torch.bool),
    }  # fmt: skip
    columns = -(-words // world) if how == "tp" else words
    columns = min(columns, words - columns * rank) if how == "tp" else columns
    found = []
    for entropy in (True, False):
        actor.zero_grad()
        with Work(columns) as work:
            said = Roles(model=model, actor=actor).said(actor, rows, entropy=entropy)
        said.logprobs.sum().backward()
        grads = {name: local(param.grad).clone() for name, param in actor.named_parameters() if param.grad is not None}
        found.append({"said": said, "grads": grads, "looks": work.looks, "sent": work.sent})
    gang.leave()
    return [
        {
            "entropy": each["said"].entropy is not None and bool((each["said"].entropy > 0).all()),
            "looks": each["looks"], "sent": each["sent"],
            "same": torch.equal(each["said"].logprobs, found[0]["said"].logprobs)
            and all(torch.equal(grad, found[0]["grads"][name]) for name, grad in each["grads"].items()),
        }
        for each in found
    ]  # fmt: skip
