"""The models of the roles: Hugging Face models of a local folder (or the hub), and the few ways in which PPO asks them.

The idea: no model class of our own where transformers has one. The critic is its token-classification model with one label, the
reward model its sequence-classification model, so `from_pretrained`, `save_pretrained` and every tool around them work.
"""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from http import HTTPStatus
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import transformers
from huggingface_hub import _CACHED_NO_EXIST, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.pytorch_utils import Conv1D
from transformers.utils.peft_utils import find_adapter_config_file

from elasticrl.ppo.losses import wide
from elasticrl.ppo.sizes import may_share
from elasticrl.runtime.outline import outlined
from elasticrl.runtime.reading import (
    Unreadable,
    blocks_of,
    files_of,
    saved_buffers,
    stored_in,
    stored_of_tied,
    whole_shapes,
)
from elasticrl.runtime.reading import fill as read_parts
from elasticrl.runtime.rng import Streams

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from elasticrl.config.training import Lora, Model, Ppo

HEAD_FILE = "value_head.safetensors"
PRODUCTS = (nn.Linear, Conv1D)  # modules whose weights autocast narrows
GENERATION_FILE = "generation_config.json"
EXPERTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
)  # as configurations call their number
FEW = 100  # special tokens that one tokenizer may have and another not


Weights = Literal["read", "later", "filled"]
"""Of a model that is made: read from its files at once; by `fill`, when it is sharded; or filled by somebody with other ones.
The latter two leave them out, where nothing but their values comes from the files."""


class ModelError(ValueError):
    """A model that cannot be loaded, and why."""


class Tied(nn.Module):
    """An actor with a value head on its last hidden state: one body for both, at half the memory."""

    def __init__(self, actor: nn.Module) -> None:
        super().__init__()
        self.actor = actor
        self.value_head = nn.Linear(hidden_size(actor), 1)
        silence(self.value_head.parameters())

    def forward(self, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits, values); values of all tokens."""
        out: Any = self.actor(**inputs, output_hidden_states=True)
        hidden = out.hidden_states[-1]
        return out.logits, self.value_head(hidden.to(self.value_head.weight.dtype)).squeeze(-1)


def tokenizer(path: str) -> Any:
    """With a padding token; the end-of-sequence token serves where there is none."""
    with quietly():
        found = transformers.AutoTokenizer.from_pretrained(path)
    if found.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of {path} has no end-of-sequence token; set eos_token in its tokenizer_config.json"
        )
    if found.pad_token_id is None:
        found.pad_token = found.eos_token
    return found


def ends(path: str, tokens: Any) -> tuple[int, ...]:
    """The tokens that end an answer: the tokenizer's, and those of the model's GenerationConfig; a chat's turn may end with
    another one (Gemma, Phi-3).
    """
    named = transformers.GenerationConfig.from_pretrained(path).eos_token_id if has(path, GENERATION_FILE) else None
    more = [named] if isinstance(named, int) else named or ()
    return tuple(dict.fromkeys((tokens.eos_token_id, *more)))


def has(path: str, name: str) -> bool:
    """Whether the model's folder, or the hub, has such a file. A hub that is not reached is an error, unless it has said
    before that there is none: transformers takes it for a model without the file, and this node's answers would end otherwise.
    Where nobody is to ask it (HF_HUB_OFFLINE) the cache is the model; what ranks take from theirs is compared.
    """
    if Path(path).is_dir():
        return (Path(path) / name).is_file()
    try:
        hf_hub_download(path, name)
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE or try_to_load_from_cache(path, name) is _CACHED_NO_EXIST:
            return False
        response = getattr(error.__cause__, "response", None)
        if response is not None and response.status_code == HTTPStatus.NOT_FOUND:
            return False  # a mirror that does not speak all of the hub's language
        raise ModelError(
            f"whether {path} has a {name} is not known here: the hub was not reached, and the cache of models does not tell "
            f"({str(error).splitlines()[0]}). Load it once where the hub is reached, say HF_HUB_OFFLINE=1 where nodes have "
            "all of it in their caches, or give all of them the model in a folder."
        ) from error
    except EntryNotFoundError:
        return False
    return True


def check_tokens(tokens: Any, path: str, key: str) -> None:
    """A model beside the actor is given the actor's tokens, which would be garbage to one with another tokenizer, and nothing
    would say so. A folder without a tokenizer of its own is believed, and so are a few special tokens more or less.
    """
    try:
        with quietly():
            theirs = transformers.AutoTokenizer.from_pretrained(path).get_vocab()
    except (OSError, ValueError):
        return
    ours = tokens.get_vocab()
    other = sorted(word for word, number in ours.items() if theirs.get(word, number) != number)
    other = other or sorted(ours.keys() - theirs.keys())[FEW:]
    if other:
        raise ModelError(
            f"{path} ({key}) has another tokenizer than the actor, whose tokens it is given: {len(other)} are others to it "
            f"({other[0]!r}, ...). Name one with the actor's tokenizer; a reward model with its own can be asked by reward.url."
        )


def still(config: Any) -> Any:
    """Without dropout: it would act in updates alone, and their first ratio would not be 1. `model.lora.dropout` is meant."""
    for name, value in vars(config).items():
        if name.endswith(("dropout", "_pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def actor(model: Model, path: str, *, seed: int, weights: Weights = "read") -> nn.Module:
    """The model that is trained, float32; with adapters if the configuration has them, whose base is always read; tied to a
    value head if it says so.
    """
    weights = "read" if model.lora.rank else weights
    found = _load(transformers.AutoModelForCausalLM, path, model, trained=True, weights=weights)
    if model.lora.rank:
        found = with_adapters(found, model.lora, seed)
    if model.value_head == "separate":
        return found
    tied = Tied(found)
    saved = Path(path) / HEAD_FILE
    if saved.is_file():
        tied.value_head.load_state_dict(load_file(saved))
    return tied


def critic(model: Model, path: str, *, weights: Weights = "read") -> nn.Module:
    """A separate critic, float32. A fresh head starts at 0, so that the first values are 0 and not noise."""
    config = transformers.AutoConfig.from_pretrained(path, num_labels=1)
    config.classifier_dropout = 0.0
    kind = transformers.AutoModelForTokenClassification
    return _load(kind, path, model, trained=True, weights=weights, config=config)


def reference(model: Model, path: str, *, weights: Weights = "read") -> nn.Module:
    """What the actor is held near to. Frozen, and bit for bit what an actor with these weights computes."""
    return narrowed(_load(transformers.AutoModelForCausalLM, path, model, trained=False, weights=weights), model)


def reward_model(model: Model, path: str) -> nn.Module:
    """Scores whole answers. Frozen."""
    config = transformers.AutoConfig.from_pretrained(path, num_labels=1)
    narrow = model.dtype == "bfloat16"  # what it says is compared with nothing
    found = _load(
        transformers.AutoModelForSequenceClassification, path, model, trained=False, narrow=narrow, config=config
    )
    if not hasattr(found, "score"):
        raise ModelError(
            f"{path} is a {type(found).__name__}, which has no `score` head; use one on a causal language model"
        )
    return found


def with_adapters(model: nn.Module, lora: Lora, seed: int) -> nn.Module:
    """Low-rank adapters by peft; only these are trained, and the reference is the same model without them."""
    try:
        peft: Any = import_module("peft")
    except ImportError as error:
        raise ModelError("model.lora.rank is set, but peft is not installed: pip install 'elasticrl[lora]'") from error
    targets = list(lora.targets) or "all-linear"
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets, task_type="CAUSAL_LM"
    )
    with Streams(seed=seed).ambient("adapters"):
        return cast("nn.Module", peft.get_peft_model(cast("Any", model), config))


def without_adapters(model: nn.Module) -> AbstractContextManager[None]:
    """Within it the model computes as it did before adapters were trained: the reference, at no memory."""
    return cast("Any", model).disable_adapter() if hasattr(model, "disable_adapter") else nullcontext()


def export(model: nn.Module, folder: str | Path, tokens: Any = None) -> None:
    """Writes a folder that `from_pretrained` reads: adapters merged in, a tied value head beside it."""
    body: Any = model.actor if isinstance(model, Tied) else model
    with quietly():
        if hasattr(body, "merge_adapter"):
            _export_merged(body, folder)
        else:
            body.save_pretrained(folder)
        if tokens is not None:
            tokens.save_pretrained(folder)
    if isinstance(model, Tied):
        save_file(
            {name: value.contiguous() for name, value in model.value_head.state_dict().items()},
            Path(folder) / HEAD_FILE,
        )


def response_logits(model: nn.Module, rows: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits [samples, tokens, vocabulary] from which each response token was drawn, and values if the model is tied.

    Rows are `batches.take`'s. Only these places go through the head, whose output is what takes most memory.
    """
    at, of = _before(rows), rows.get("of")
    more = {} if of is None else {"attention_mask": rows["seen"], "position_ids": rows["position"]}
    with _picking(model, at, of):
        out: Any = model(input_ids=rows["tokens"], use_cache=False, **more)
    if isinstance(model, Tied):
        return out[0], wide(_picked(out[1], at, of))
    return out.logits, None


def response_values(model: nn.Module, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A separate critic's values [samples, tokens] of the states in which each response token was chosen."""
    out: Any = model(input_ids=rows["tokens"], use_cache=False)
    return wide(_picked(out.logits[:, :, 0], _before(rows)))


def whole_scores(model: nn.Module, tokens: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
    """A reward model's scores [samples], read at the last attended token (never by comparing with a padding token, which may
    be the end-of-sequence token too). Padding is on the right.
    """
    body: Any = model
    hidden = body.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    last = (attention.long() * torch.arange(attention.shape[1], device=attention.device)).argmax(1)
    return cast("torch.Tensor", body.score(hidden[torch.arange(len(tokens), device=last.device), last])[:, 0].float())


def _before(rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[samples, answer]: the place before each token of the response, where it was drawn from."""
    if "before" in rows:
        return rows["before"]
    ahead = torch.arange(rows["mask"].shape[1], device=rows["start"].device)
    return (rows["start"][:, None] - 1 + ahead).clamp(max=rows["tokens"].shape[1] - 1)


def _picked(values: torch.Tensor, at: torch.Tensor, of: torch.Tensor | None = None) -> torch.Tensor:
    """[samples, answer, ...] of [rows, tokens, ...]; `of`: the row of each sample, if several share one."""
    rows = torch.arange(len(at), device=at.device) if of is None else of
    return values[rows[:, None], at]


@contextmanager
def _picking(model: nn.Module, at: torch.Tensor, of: torch.Tensor | None) -> Iterator[None]:
    """Inside, the head sees the hidden states of these places alone. As a hook, since what a model does to its logits behind
    the head is its own affair, and a head that is sharded is whole inside of the model's pass only.
    """
    body: Any = model.actor if isinstance(model, Tied) else model
    # First of its hooks: where a team shares the head, the next one makes a DTensor of what comes.
    hook = body.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: (_picked(inputs[0], at, of), *inputs[1:]), prepend=True
    )
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def routed(body: nn.Module, *, asked: bool) -> Iterator[list[torch.Tensor]]:
    """Inside, what the routers of a mixture say in a pass, of each layer [rows x tokens, experts], if it is `asked`."""
    found: list[torch.Tensor] = []
    ways = (
        (
            body.register_forward_pre_hook(
                lambda _m, args, more: (args, {**more, "output_router_logits": True}), with_kwargs=True
            ),
            body.register_forward_hook(lambda _m, _args, out: found.extend(_router_logits(out))),
        )
        if asked
        else ()
    )
    try:
        yield found
    finally:
        for hook in ways:
            hook.remove()


def _router_logits(out: Any) -> Sequence[torch.Tensor]:
    """Of a pass that was asked for them, or ModelError: some models have a mixture's settings, and do not tell."""
    found: Sequence[torch.Tensor] | None = getattr(out, "router_logits", None)
    if not found:
        raise ModelError(
            "ppo.router_aux_coef is set, and this model tells nothing of its routers although its configuration has an "
            "auxiliary loss: set it to 0"
        )
    return found


def experts_each(config: Any) -> int:
    """To how many experts a mixture sends a token; 0 of models whose routers transformers says nothing of."""
    text = config.get_text_config()
    return int(getattr(text, "num_experts_per_tok", 0) or 0) if hasattr(text, "router_aux_loss_coef") else 0


def check_routed(model: Model) -> None:
    """Whether `ppo.router_aux_coef` can mean something there, or ModelError."""
    if not experts_each(transformers.AutoConfig.from_pretrained(str(model.path))):
        raise ModelError(
            f"ppo.router_aux_coef is set, and {model.path} is no mixture of experts whose auxiliary loss transformers knows "
            "(its configuration has no router_aux_loss_coef and num_experts_per_tok). Set it to 0."
        )


def computing(model: Model, device: str) -> AbstractContextManager[Any]:
    """The type to compute in: trained weights stay float32, matrix products of bfloat16 are autocast's. It keeps nothing it
    has cast: a pass needs each weight once, and of a model that FSDP cuts up all of it would stay on each card. Autograd does
    keep it, until the backward pass has read it.
    """
    narrow = model.dtype == "bfloat16"
    return torch.autocast(device, torch.bfloat16, cache_enabled=False) if narrow else nullcontext()


def narrowed(found: nn.Module, model: Model) -> nn.Module:
    """In bfloat16, if that is what is computed in, whatever `computing` would make bfloat16 in each pass anyway: the weights of
    matrix products that nothing else reads. All else stays float32, as it does in what is trained, and so do experts.
    """
    if model.dtype != "bfloat16":
        return found
    read = Counter(param for module in found.modules() for param in module.parameters(recurse=False))
    for module in found.modules():
        if isinstance(module, PRODUCTS) and all(read[param] == 1 for param in module.parameters()):
            module.to(torch.bfloat16)
    return found


def shares(path: str, model: Model, ppo: Ppo, lanes: int, *, prompt: int, answer: int) -> bool:
    """Whether samples of a group may be one row of a pass: see `sizes.may_share`. The model must take a mask and positions as
    they come, in all of its layers.
    """
    configs: list[Any] = [transformers.AutoConfig.from_pretrained(it) for it in {path, str(model.ref_path or path)}]
    hidden = min(config.get_text_config().hidden_size for config in configs)
    return (
        model.attention == "sdpa"
        and all(map(_plain, configs))
        and may_share(ppo, lanes, prompt=prompt, answer=answer, hidden=hidden)
    )


def _plain(config: Any) -> bool:
    """Does the model of this configuration take a mask and positions as they come, in all of its layers?"""
    text = config.get_text_config()
    turned = getattr(text, "rope_parameters", None) or {}
    whole = all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)
    return whole and "rope_theta" in turned and "mrope_section" not in turned and not getattr(text, "alibi", False)


def steady(config: Any) -> bool:
    """Does a token's log-probability depend on the tokens before it alone, but for rounding? Not where frequencies follow the
    length of a call (`longrope`, `dynamic`), nor in a mixture, where a row's experts may change with the rows beside it.
    """
    if config is None:
        return True
    text = config.get_text_config()
    mixture = any((getattr(text, name, 0) or 0) > 1 for name in EXPERTS)
    kinds = str(getattr(text, "rope_parameters", None) or {})
    return not mixture and "longrope" not in kinds and "dynamic" not in kinds


def has_experts(path: str) -> bool:
    """Is it a mixture of experts? What one of those says of a row depends, in its last bits, on the rows beside it."""
    config: Any = transformers.AutoConfig.from_pretrained(path).get_text_config()
    return any((getattr(config, name, 0) or 0) > 1 for name in EXPERTS)


def hidden_size(model: nn.Module) -> int:
    """The width of the last hidden state."""
    return int(cast("Any", model).config.hidden_size)


def silence(params: Iterable[nn.Parameter]) -> None:
    """Sets a head's weights to 0."""
    with torch.no_grad():
        for param in params:
            param.zero_()


@contextmanager
def quietly() -> Iterator[None]:
    """Without transformers' progress bars and tables, which no log can read, and without what DeepSpeed says of cards: where it
    is installed a model that is saved imports it.
    """
    told: Any = transformers.utils.logging
    level, bars = told.get_verbosity(), told.is_progress_bar_enabled()
    deepspeed = logging.getLogger("DeepSpeed")
    told.set_verbosity_error()
    told.disable_progress_bar()
    deepspeed.addFilter(_is_error)
    try:
        yield
    finally:
        deepspeed.removeFilter(_is_error)
        told.set_verbosity(level)
        if bars:
            told.enable_progress_bar()


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _load(
    kind: Any, path: str, model: Model, *, trained: bool, narrow: bool = False, weights: Weights = "read", **more: Any
) -> nn.Module:
    dtype = torch.bfloat16 if narrow else torch.float32
    info: Any = {"missing_keys": ()}
    try:
        with quietly():
            if trained or weights != "read":
                config = more.get("config") or transformers.AutoConfig.from_pretrained(path)
                more["config"] = still(config) if trained else config
            found = _outline(kind, path, model, more["config"], weights) if weights != "read" else None
            if found is None:
                found, info = kind.from_pretrained(
                    path, dtype=dtype, attn_implementation=model.attention, output_loading_info=True, **more
                )
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"{path} cannot be loaded as {kind.__name__}: {error}") from error
    if getattr(found, "_is_stateful", False):
        raise ModelError(
            f"{path} is a {type(found).__name__}, whose layers carry a state from token to token: padding and rows that are "
            "generated in blocks would change it. Use a model that attends to tokens only"
        )
    missing = sorted(name for name in info["missing_keys"] if not _is_head(name))
    if missing:
        raise ModelError(f"{path} lacks {len(missing)} weights of a {type(found).__name__} ({missing[0]}, ...)")
    if (
        trained and info["missing_keys"]
    ):  # perhaps the bias alone: a reward model's head has none, and its weight is kept
        silence(found.get_parameter(name) for name in info["missing_keys"])
    elif info["missing_keys"]:
        raise ModelError(
            f"{path} has no score head, so it is not a reward model; train one, or name another in reward.model"
        )
    if trained and model.gradient_checkpointing:
        found.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found.requires_grad_(trained)
    return cast("nn.Module", found.eval())


def _outline(kind: Any, path: str, model: Model, config: Any, weights: Weights) -> Any:
    """The model without its weights; None where it would not be the one that is read, or cannot be filled as `weights` says."""
    if any(_more(part) for part in (config, config.get_text_config())) or find_adapter_config_file(path):
        return None  # quantized, other files, an adapter beside them
    with outlined():
        found = kind.from_config(deepcopy(config), dtype=torch.float32, attn_implementation=model.attention)
    if saved_buffers(found):
        return None
    if weights == "later" or found.all_tied_weights_keys:
        blocks = blocks_of(found, stored_in(_files(path)))
        if blocks is None:
            return None  # its files hold something that is made otherwise
        if any(number != 1 for number in stored_of_tied(found, blocks).values()):
            return None
        shapes = {name: tuple(param.shape) for name, param in found.named_parameters()}
        there = {name: shape for name, shape in shapes.items() if _is_head(name)} | whole_shapes(blocks)
        if weights == "later" and any(there.get(name) != shape for name, shape in shapes.items()):
            return None
    if found.can_generate() and has(path, GENERATION_FILE):
        found.generation_config = transformers.GenerationConfig.from_pretrained(path)  # which `export` writes
    return found


def fill(model: nn.Module, path: str) -> None:
    """The weights of a model that was made for "later", and then sharded, or shared by a team: each rank reads its own part of
    each, and nothing else.
    """
    body: Any = model.actor if isinstance(model, Tied) else model
    files = _files(path)
    try:
        blocks = blocks_of(body, stored_in(files, codes=True))
        lacks = read_parts(dict(body.named_parameters()), blocks or {}, files)
    except Unreadable as error:
        raise ModelError(str(error)) from error
    if lacks := {name for name in lacks if not _is_head(name)}:
        raise ModelError(f"{path} lacks {len(lacks)} weights that it had as the model was made ({min(lacks)}, ...)")


def _more(config: Any) -> bool:
    """Whether weights are not just read from a model's files: they are quantized, or it names files of its own choice."""
    return any(getattr(config, name, None) is not None for name in ("quantization_config", "transformers_weights"))


def _files(path: str) -> Sequence[Path]:
    """Those of a model's weights in safetensors, as far as they are here."""
    return files_of(Path(path) if Path(path).is_dir() else Path(hf_hub_download(path, "config.json")).parent)


def _is_head(name: str) -> bool:
    """A head that a folder may lack: a fresh one begins at 0."""
    return name.startswith("score.")


def _export_merged(body: Any, folder: str | Path) -> None:
    """With the adapters added into the weights, and taken out again: the run goes on with them apart."""
    body.merge_adapter()
    try:
        plain = {
            n.replace(".base_layer.", "."): v
            for n, v in body.get_base_model().state_dict().items()
            if ".lora_" not in n
        }
        body.get_base_model().save_pretrained(folder, state_dict=plain)
    finally:
        body.unmerge_adapter()
