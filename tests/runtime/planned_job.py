"""Models of transformers that a team shares, held against the same models whole."""

import ctypes
import gc
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn

from elasticrl.runtime.group import form
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.outline import outlined
from elasticrl.runtime.planned import share
from elasticrl.runtime.reading import read
from elasticrl.runtime.team import form_team, local, part_of
from elasticrl.runtime.tokens import Tokens, check_known, form_tokens
from elasticrl.runtime.vocabulary import log_probs, loss

SIZES: dict[str, Any] = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
KINDS = {
    "llama": {}, "mistral": {}, "qwen2": {}, "qwen3": {"head_dim": 8}, "gemma": {"head_dim": 8}, "phi": {},
    "llama-tied": {"tie_word_embeddings": True},
    "qwen3_moe": {"head_dim": 8, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe-dense": {
        "head_dim": 8, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0],
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
MIXTURES = [kind for kind in KINDS if "num_experts_per_tok" in KINDS[kind]]


def whole(kind: str, attention: str = "eager", **more: Any) -> nn.Module:
    name = kind.partition("-")[0]
    torch.manual_seed(5)
    tied = {"tie_word_embeddings": False} if name != "gemma" else {}
    config = transformers.AutoConfig.for_model(name, **{**SIZES, **tied, **KINDS.get(kind, {}), **more})
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.eval()


def one_pass(
    model: nn.Module, mask: torch.Tensor | None = None, length: int = 9, *, alike: bool = False
) -> dict[str, torch.Tensor]:
    """Logits and an auxiliary loss, of both of which there are gradients then."""
    tokens = torch.randint(1, 67, (5, length), generator=torch.Generator().manual_seed(1))
    tokens = torch.full((5, 1), 7) if alike else tokens
    more = {"output_router_logits": True} if hasattr(model.config, "router_aux_loss_coef") else {}
    out = model(input_ids=tokens, attention_mask=mask, use_cache=False, **more)
    seen = torch.ones_like(tokens) if mask is None else mask
    loss = (torch.log_softmax(out.logits.float(), -1)[..., 3] * seen).sum()
    aux = getattr(out, "aux_loss", torch.zeros(()))
    (loss + 10 * aux).backward()
    return {"logits": out.logits.detach() * seen[..., None], "aux": aux.detach().clone()}


def compare(
    rank: int, world: int, store: dist.Store, *, generation: int, kind: str, experts: str = "", alike: bool = False
) -> dict[str, float]:
    """The greatest differences of logits and of each parameter's gradient, relative to the greatest number in it. `alike`: all
    tokens are the same one and have one expert, so in each layer the other members have none of them.
    """
    gang = form(generation=generation, rank=rank, world=world, store=store)
    limit = timedelta(seconds=30)
    team = form_team(gang.group, world, form_s=limit, limit=limit)
    more = {"num_experts_per_tok": 1} if alike else {}
    plain, shared = whole(kind, **more), share(whole(kind, **more), team.mesh("cpu"))
    for model in (plain, shared) if experts else ():
        model.config._experts_implementation = experts
    expected, found = (one_pass(model, alike=alike) for model in (plain, shared))
    differences = {name: _apart(found[name], expected[name]) for name in expected}
    theirs = dict(plain.named_parameters())
    for name, param in shared.named_parameters():
        assert param.grad is not None or alike, name
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        full = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        differences[name] = _apart(full, theirs[name].grad)
    differences["elements"] = float(sum(local(param).numel() for param in shared.parameters()))
    differences["of"] = float(sum(param.numel() for param in plain.parameters()))
    gang.leave()
    return differences


def refused(rank: int, world: int, store: dist.Store, *, generation: int, kind: str = "llama", **more: Any) -> str:
    """What is said of a model with these sizes."""
    gang = form(generation=generation, rank=rank, world=world, store=store)
    limit = timedelta(seconds=30)
    mesh = form_team(gang.group, world, form_s=limit, limit=limit).mesh("cpu")
    try:
        share(whole(kind, **more), mesh)
    except Misuse as error:
        return str(error)
    finally:
        dist.barrier()  # who is refused at once would leave while another still connects
        gang.leave()
    return ""


def _apart(one: torch.Tensor, other: Any) -> float:
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-12))


def split(
    rank: int, world: int, store: dist.Store, *, generation: int, kind: str, cuts: int = 1, pad: str = "", length: int = 9,
    attention: str = "eager", checkpointing: bool = False, **sizes: Any,
) -> dict[str, float]:  # fmt: skip
    """The same where members share tokens, of each parameter's gradient added up over them; `pad`: on which side some rows are
    shorter.
    """
    gang = form(generation=generation, rank=rank, world=world, store=store)
    limit = timedelta(seconds=30)
    team = form_team(gang.group, cuts, form_s=limit, limit=limit) if cuts > 1 else None
    tokens = form_tokens(gang.group, world // cuts, cuts=cuts, form_s=limit, limit=limit)
    plain = whole(kind, attention, **sizes)
    shared = share(whole(kind, attention, **sizes), tokens.on(team.mesh("cpu")) if team else tokens.mesh("cpu"))
    if checkpointing:
        shared.train()
        shared.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    check_known(shared, "model", tokens)
    mask = None
    if pad:
        at, short = torch.arange(length), torch.tensor([0, 1, 3, 5, length - 1])[:, None]
        mask = (at >= short if pad == "left" else at < length - short).long()
    expected, found = one_pass(plain, mask, length), one_pass(shared, mask, length)
    differences = {name: _apart(found[name], expected[name]) for name in expected}
    theirs = dict(plain.named_parameters())
    for name, param in shared.named_parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        full = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        summed = full.clone()
        dist.all_reduce(summed, group=tokens.group)
        differences[name] = _apart(summed, theirs[name].grad)
    with torch.no_grad():
        differences["cached"] = _apart(*(model(expected["logits"].argmax(-1)).logits for model in (shared, plain)))
    gang.leave()
    return differences


def adapted(model: nn.Module, **more: Any) -> nn.Module:
    """With adapters on all projections, none of which is 0."""
    import peft

    torch.manual_seed(6)
    made: Any = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules="all-linear", **more))
    for name, param in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, std=0.3)
    found: nn.Module = made
    return found


def groups(world: int, cuts: int) -> tuple[Any, Tokens | None]:
    """The mesh that a builder is given in a gang that has formed, of members that cut a model up into so many parts, and share
    tokens where there are more of them.
    """
    limit = timedelta(seconds=30)
    everyone: Any = dist.group.WORLD
    team = form_team(everyone, cuts, form_s=limit, limit=limit) if cuts > 1 else None
    if cuts == world:
        assert team is not None
        return team.mesh("cpu"), None
    tokens = form_tokens(everyone, world // cuts, cuts=cuts, form_s=limit, limit=limit)
    return (tokens.on(team.mesh("cpu")) if team else tokens.mesh("cpu")), tokens


def scored(
    rank: int, world: int, store: dist.Store, *, generation: int, kind: str, cuts: int, length: int = 9, wide: bool = False,
    lora: bool = False, **sizes: Any,
) -> dict[str, float]:  # fmt: skip
    """How far log-probabilities, entropies, loss and all gradients are from those that one process makes of whole logits."""
    gang = form(generation=generation, rank=rank, world=world, store=store)
    mesh, members = groups(world, cuts)
    dtype = torch.float64 if wide else torch.float32
    plain, shared = (whole(kind, "sdpa", **sizes).to(dtype) for _ in range(2))  # eager attention rounds to float32
    if lora:
        plain, shared = adapted(plain), adapted(shared)
    shared = share(shared, mesh)
    tokens = torch.randint(1, 67, (5, length), generator=torch.Generator().manual_seed(1))
    weights = torch.rand(5, length - 1, generator=torch.Generator().manual_seed(2), dtype=dtype)
    labels = tokens.masked_fill(torch.arange(length) < 3, -100)
    logits = plain(input_ids=tokens, use_cache=False).logits[:, :-1]
    p = (logits / 0.7).log_softmax(-1)
    expected = {"log_probs": p.gather(-1, tokens[:, 1:, None])[..., 0], "entropy": -(p.exp() * p).sum(-1)}
    expected["loss"] = nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:])
    more: dict[str, Any] = {}
    if kind in MIXTURES:  # transformers' own, with the auxiliary loss
        more = {
            "output_router_logits": True,
            "attention_mask": (torch.arange(length) < length - 2).long().expand(5, -1),
        }
        expected["loss"] = plain(input_ids=tokens, labels=labels, use_cache=False, **more).loss
    said = log_probs(shared, tokens, temperature=0.7, entropy=True)
    found = {"log_probs": said.log_probs, "entropy": said.entropy, "loss": loss(shared, tokens, labels, **more)}
    for one in (expected, found):
        ((one["log_probs"] + 0.3 * one["entropy"]).mul(weights).sum() + one["loss"]).backward()
    differences = {name: _apart(found[name].detach(), expected[name].detach()) for name in expected}
    differences["columns"] = float(said.out.logits.shape[-1])
    differences["places"] = float(said.out.logits.shape[1])
    theirs = dict(plain.named_parameters())
    for name, param in shared.named_parameters():
        if not param.requires_grad:
            continue
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        full = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
        if members is not None:
            dist.all_reduce(full, group=members.group)
        differences[name] = _apart(full, theirs[name].grad)
    with torch.no_grad():  # another pass is as ever
        differences["logits"] = _apart(*(model(tokens, use_cache=False).logits for model in (shared, plain)))
    gang.leave()
    return differences


def peak_bytes(
    rank: int, world: int, store: dist.Store, *, generation: int, words: int, places: int, cuts: int
) -> tuple[int, int]:
    """What a pass through a head of so many words takes at most, and its backward pass: whole logits, and a member's."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed is no longer resident
    libc.malloc_trim(0)
    gang = form(generation=generation, rank=rank, world=world, store=store)
    mesh, _ = groups(world, cuts)
    model = share(whole("llama", vocab_size=words, num_hidden_layers=1), mesh)
    tokens = torch.randint(1, words, (1, places + 1), generator=torch.Generator().manual_seed(1))

    def gathered() -> torch.Tensor:
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).sum()

    def apart() -> torch.Tensor:
        return log_probs(model, tokens).log_probs.sum()

    found = []
    for way in (gathered, apart):
        way().backward()  # what is made once
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident()
        way().backward()
        found.append(_resident() - before)
    gang.leave()
    return found[0], found[1]


def read_parts(
    rank: int, world: int, store: dist.Store, *, generation: int, kind: str, folder: str, cuts: int = 2, **sizes: Any
) -> tuple[int, int, list[str]]:
    """The memory of a member that has built a model whole, and of one that has read its part; and the names of parameters that
    are others then. The files are of bfloat16: a process takes memory of its own for what it makes float32.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 16)
    gang = form(generation=generation, rank=rank, world=world, store=store)
    mesh, _ = groups(world, cuts)
    if rank == 0:
        whole(kind, **sizes).bfloat16().save_pretrained(folder)
    dist.barrier()
    taken = []
    for _ in range(2):  # the first time makes what is made once
        before = _own()
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        taken.append(_own() - before)
        shared = share(plain, mesh)
        before = _own()
        with outlined():
            config = transformers.AutoConfig.from_pretrained(folder)
            mine = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        read(share(mine, mesh), folder)
        taken.append(_own() - before)
    theirs, here = (dict(model.named_parameters()) for model in (shared, mine))
    odd = [name for name in theirs.keys() & here.keys() if not torch.equal(local(here[name]), local(theirs[name]))]
    odd += theirs.keys() ^ here.keys()  # a head that is tied has no name of its own
    gang.leave()
    return taken[2], taken[3], odd


def read_sharded(rank: int, world: int, store: dist.Store, *, generation: int, kind: str, folder: str) -> list[str]:
    """The names of parameters of which this rank has read something else than the file has, where FSDP2 has cut the model."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    gang = form(generation=generation, rank=rank, world=world, store=store)
    plain = whole(kind)
    if rank == 0:
        plain.save_pretrained(folder)
    dist.barrier()
    with outlined():
        mine: Any = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    mesh = DeviceMesh.from_group(gang.group, "cpu", mesh_dim_names=("dp",))
    for layer in mine.model.layers:
        fully_shard(layer, mesh=mesh)
    read(fully_shard(mine, mesh=mesh), folder)
    theirs = dict(plain.named_parameters())
    odd = [
        name for name, param in mine.named_parameters() if not torch.equal(local(param), theirs[name][part_of(param)])
    ]
    gang.leave()
    return odd


def _own() -> int:
    """The memory that this process has to itself: no pages of files."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def _resident() -> int:
    """The most memory that this process has had since it was told to forget."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def kept_bytes(rank: int, world: int, store: dist.Store, *, generation: int, length: int) -> tuple[int, int]:
    """What autograd keeps of a pass through the layers: whole, and where members share its tokens."""
    gang = form(generation=generation, rank=rank, world=world, store=store)
    limit = timedelta(seconds=30)
    tokens = form_tokens(gang.group, world, cuts=1, form_s=limit, limit=limit)
    found = []
    deep = {"num_hidden_layers": 4}
    for model in (whole("llama", "sdpa", **deep), share(whole("llama", "sdpa", **deep), tokens.mesh("cpu"))):
        held: dict[int, int] = {}
        own = {param.untyped_storage().data_ptr() for param in model.parameters()}

        def keep(one: torch.Tensor, held: dict[int, int] = held, own: set[int] = own) -> torch.Tensor:
            memory = one.untyped_storage()
            if memory.data_ptr() not in own:
                held[memory.data_ptr()] = memory.nbytes()
            return one

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
            out = model.model(input_ids=torch.ones(2, length, dtype=torch.long)).last_hidden_state
        found.append(sum(held.values()))
        out.sum().backward()
    gang.leave()
    return found[0], found[1]


def refused_tokens(rank: int, world: int, store: dist.Store, *, generation: int, kind: str, **more: Any) -> str:
    """What is said of a model whose tokens are to be shared."""
    gang = form(generation=generation, rank=rank, world=world, store=store)
    limit = timedelta(seconds=30)
    tokens = form_tokens(gang.group, world, cuts=1, form_s=limit, limit=limit)
    try:
        model = share(whole(kind, **more), tokens.mesh("cpu"))
        model.head = nn.Linear(2, 2)
        check_known(model, "model", tokens)
    except Misuse as error:
        return str(error)
    finally:
        dist.barrier()  # who is refused at once would leave while another still connects
        gang.leave()
    return ""
