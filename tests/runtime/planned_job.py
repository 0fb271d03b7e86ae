"""Models of transformers that a team shares, held against the same models whole."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn

from elasticrl.runtime.group import form
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.planned import share
from elasticrl.runtime.team import form_team, local

SIZES: dict[str, Any] = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
KINDS = {
    "llama": {}, "mistral": {}, "qwen2": {}, "qwen3": {"head_dim": 8}, "gemma": {"head_dim": 8}, "phi": {},
    "llama-tied": {"tie_word_embeddings": True},
}  # fmt: skip


def whole(kind: str, **more: Any) -> nn.Module:
    name = kind.partition("-")[0]
    torch.manual_seed(5)
    tied = {"tie_word_embeddings": False} if name != "gemma" else {}
    config = transformers.AutoConfig.for_model(name, **{**SIZES, **tied, **KINDS[kind], **more})
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.eval()


def one_pass(model: nn.Module) -> torch.Tensor:
    tokens = torch.randint(1, 67, (5, 9), generator=torch.Generator().manual_seed(1))
    logits = model(input_ids=tokens, use_cache=False).logits
    torch.log_softmax(logits.float(), -1)[..., 3].sum().backward()
    found: torch.Tensor = logits.detach()
    return found


def compare(rank: int, world: int, store: dist.Store, *, generation: int, kind: str) -> dict[str, float]:
    """The greatest differences of logits and of each parameter's gradient, relative to the greatest number in it."""
    gang = form(generation=generation, rank=rank, world=world, store=store)
    limit = timedelta(seconds=30)
    team = form_team(gang.group, world, form_s=limit, limit=limit)
    plain, shared = whole(kind), share(whole(kind), team.mesh("cpu"))
    expected, found = one_pass(plain), one_pass(shared)
    differences = {"logits": _apart(found, expected)}
    theirs = dict(plain.named_parameters())
    for name, param in shared.named_parameters():
        assert param.grad is not None, name
        grad = param.grad
        full = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        differences[name] = _apart(full, theirs[name].grad)
    differences["elements"] = float(sum(local(param).numel() for param in shared.parameters()))
    differences["of"] = float(sum(param.numel() for param in plain.parameters()))
    gang.leave()
    return differences


def refused(rank: int, world: int, store: dist.Store, *, generation: int, **more: Any) -> str:
    """What is said of a model with these sizes."""
    gang = form(generation=generation, rank=rank, world=world, store=store)
    limit = timedelta(seconds=30)
    mesh = form_team(gang.group, world, form_s=limit, limit=limit).mesh("cpu")
    try:
        share(whole("llama", **more), mesh)
    except Misuse as error:
        return str(error)
    finally:
        gang.leave()
    return ""


def _apart(one: torch.Tensor, other: Any) -> float:
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-12))
