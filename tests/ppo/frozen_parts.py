"""A reference that a team shares, through two gangs of the same processes; and answers that members generate."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from elasticrl.config.training import Model
from elasticrl.config.tree import Tree
from elasticrl.ppo import models
from elasticrl.ppo.frozen import Frozen
from elasticrl.ppo.roles import Roles
from elasticrl.ppo.rollout.engine import Request, Sampling
from elasticrl.ppo.rollout.inline import TorchEngine
from elasticrl.runtime.group import form
from elasticrl.runtime.planned import share
from elasticrl.runtime.spread import team_mesh
from elasticrl.runtime.team import form_team
from elasticrl.runtime.tokens import form_tokens


def through_two_gangs(rank: int, world: int, store: dist.Store, *, path: str, how: str, dtype: str) -> dict[str, Any]:
    """What a shared reference says in each gang, and a whole one; how often its files were read; its bytes, and all."""
    limit = timedelta(seconds=30)
    model = {"path": path, how: world, "dtype": dtype}
    conf = Tree.model_validate({"job": {"name": "job"}, "model": model, "node": {"workers": world}})
    frozen, reads = Frozen(conf, "cpu"), 0

    def made(weights: models.Weights = "read") -> torch.nn.Module:
        nonlocal reads
        reads += weights == "read"
        return models.reference(conf.model, path, weights=weights)

    assert frozen.model("ref", made, lambda: made("filled")) is None
    plain = models.reference(Model(path=path, dtype=dtype), path)
    tokens = torch.randint(0, 14, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(3, 5, dtype=torch.bool)
    rows = {"tokens": tokens, "start": torch.full((3,), 3), "mask": mask}
    said = []
    for generation in (1, 2):
        gang = form(generation=generation, rank=rank, world=world, store=store)
        team = form_team(gang.group, world, form_s=limit, limit=limit) if how == "tp" else None
        shares = form_tokens(gang.group, world, cuts=1, form_s=limit, limit=limit) if how == "cp" else None
        base: Any = SimpleNamespace(rank=rank, team_mesh=team_mesh(team, shares, "cpu"))
        ref = frozen.here("ref", base)
        assert ref is not None
        with torch.no_grad():
            said.append(Roles(model=conf.model, actor=plain, ref=ref).reference(rows)[0])
        held = {it.untyped_storage().data_ptr(): it.untyped_storage().nbytes() for it in map(_here, ref.parameters())}
        gang.leave()
    with torch.no_grad():
        expected = Roles(model=conf.model, actor=plain).reference(rows)[0]
    return {
        "same": torch.equal(*said), "apart": float((said[0] - expected).abs().max()), "reads": reads,
        "bytes": sum(held.values()), "of": sum(it.nbytes for it in plain.parameters()),
    }  # fmt: skip


def generated(rank: int, world: int, store: dist.Store, *, path: str) -> tuple[list[int], list[float]]:
    """The tokens, and their log-probabilities, of prompts that go through the model one by one. Members share its tokens."""
    limit = timedelta(seconds=30)
    gang = form(generation=1, rank=rank, world=world, store=store)
    shares = form_tokens(gang.group, world, cuts=1, form_s=limit, limit=limit)
    model = share(models.actor(Model(path=path), path, seed=7), shares.mesh("cpu"))
    engine = TorchEngine(model, Sampling(prompt_tokens=8, max_tokens=6, rows=8, eos=(11,), pad=10))
    asked = [
        Request(id=str(n), prompt=tuple((3 * n + k) % 10 for k in range(1 + n % 8)), seed=n, block=str(n))
        for n in range(40)
    ]
    made = engine.generate(asked, version=0)
    gang.leave()
    return made.tokens.flatten().tolist(), made.logprobs.flatten().tolist()


def _here(param: Any) -> torch.Tensor:
    return param.to_local() if hasattr(param, "placements") else param
