"""Two ranks put a model together with FSDP2: for passes of autocast, with and without gradients, and for plain ones in between.

Each line is JSON: {"how": "tied", "narrow": true, "kind": "train", "sent": 4096, "bits": "9f86d081..."}. `bits` are of all that
came out, and of the gradients; `sent` are the bytes that this rank handed in. Or, of the models of `LARGE`, {"how": "layers",
"narrow": true, "kind": "frozen", "top": 5149728}: the most memory that a forward pass took at once.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import accumulate, product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._profiler import _EventType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from transformers import LlamaConfig, LlamaForCausalLM

from elasticrl.ppo.__main__ import shards
from elasticrl.ppo.models import Tied, hidden_size

# Weights are nearly all that a pass of few tokens needs memory for.
LARGE = {
    "layers": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "vocab_size": 64},
    "words": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 8192},
}
KINDS = ("frozen", "train", "plain", "train", "plain", "frozen", "train")
WORDS = 45  # so that the last rank's part of the head is filled up
sent: list[int] = []
gather = collectives.DefaultAllGather.__call__


def counting(self: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **more: Any) -> Any:
    sent.append(input_tensor.nbytes)
    return gather(self, output_tensor, input_tensor, *args, **more)


class Apart(nn.Module):
    """Its head computes in float32 whatever the body does."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        found = self.body(nn.functional.one_hot(input_ids % 8, 8).float())
        with torch.autocast("cpu", enabled=False):
            return self.head(found.float())


class RawLayer(nn.Module):
    """It reads a bias by itself, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.body(x)
        return found.float() + nn.functional.softplus(self.body.bias.float())


class Raw(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([RawLayer()])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        found = nn.functional.one_hot(input_ids, 64).float()
        for layer in self.layers:
            found = layer(found)
        return found


def made(how: str) -> nn.Module:
    torch.manual_seed(3)
    if how in LARGE:
        return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, tie_word_embeddings=False, **LARGE[how]))
    if how in ("apart", "raw"):
        return Apart() if how == "apart" else Raw()
    sizes = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=WORDS, num_key_value_heads=1, tie_word_embeddings=how == "tied", **sizes)
    model = LlamaForCausalLM(config)
    if how == "again":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if how != "valued":
        return model
    assert hidden_size(model) == 32
    return Tied(model)


def passes(model: nn.Module, rank: int) -> Iterator[tuple[str, str]]:
    g = torch.Generator().manual_seed(5 + rank)
    for kind in KINDS:
        words = torch.randint(0, WORDS, (3, 9), generator=g)
        narrow = nullcontext() if kind == "plain" else torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
        model.train(kind == "train")
        with torch.set_grad_enabled(kind == "train"), narrow:
            out: Any = model(input_ids=words)
        outs = list(out) if isinstance(out, tuple) else [getattr(out, "logits", out)]
        if kind == "train":
            sum(one.float().square().mean() for one in outs).backward()
        bits = hashlib.sha256()
        for one in outs:
            bits.update(one.detach().float().numpy().tobytes())
        for param in model.parameters():
            if param.grad is not None:
                bits.update(param.grad.to_local().float().numpy().tobytes())
                param.grad = None
        yield kind, bits.hexdigest()[:16]


def tops(model: nn.Module) -> Iterator[tuple[str, int]]:
    for kind in ("frozen", "train") * 2:  # what is made once is there the second time
        model.train(kind == "train")
        with (
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen,
            torch.set_grad_enabled(kind == "train"),
            torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
        ):
            out: Any = model(input_ids=torch.arange(4)[None])
        if kind == "train":
            out.logits.float().square().mean().backward()
        model.zero_grad()
        todo, sizes = list(seen.profiler.kineto_results.experimental_event_tree()), []
        while todo:
            event = todo.pop()
            todo += event.children
            if event.tag == _EventType.Allocation:
                sizes.append((event.start_time_ns, event.extra_fields.alloc_size))
        yield kind, max(accumulate(size for _, size in sorted(sizes)))


def main(folder: str, rank: int, *hows: str) -> None:
    torch.set_num_threads(1)
    collectives.DefaultAllGather.__call__ = counting
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    for how, narrow in product(hows, (False, True)):
        if how in LARGE:
            for kind, top in tops(shards(partial(made, how), narrow=narrow)(mesh)):
                print(json.dumps({"how": how, "narrow": narrow, "kind": kind, "top": top}), flush=True)
            continue
        for kind, bits in passes(shards(partial(made, how), narrow=narrow)(mesh), rank):
            line = {"how": how, "narrow": narrow, "kind": kind, "sent": sum(sent), "bits": bits}
            print(json.dumps(line), flush=True)
            sent.clear()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
