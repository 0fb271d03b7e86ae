"""What is asked of a model's logits, part by part of a pass, so that the whole of them is never there.

The idea: with 152,000 words the logits of 8,000 tokens take 5 GB, and their gradient as much again. Two numbers of each token
are wanted. So the head makes these in place of its logits, some tokens at a time, and makes the logits once more in the
backward pass. The parts follow from the pass alone, so bits do not depend on the number of workers.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn.functional import linear

if TYPE_CHECKING:
    from collections.abc import Iterator

# Their logits are what the head makes of the last hidden states, and nothing else happens to them.
KINDS: Final = (
    "LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "PhiForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
)  # fmt: skip


@contextmanager
def by_parts(
    model: nn.Module, tokens: torch.Tensor, temperature: float, *, most: int, entropy: bool, slopes: bool
) -> Iterator[bool]:
    """Inside, a pass whose logits are more than `most` has for them (log-probability, entropy) [samples, tokens, 2] of these
    tokens. True: it does. Without `entropy` that is 0; with `slopes` it has a gradient.
    """
    head = _head(model)
    if not (most and head is not None and tokens.numel() * head.out_features > most):
        yield False
        return
    each = max(most // head.out_features, 1)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Asked.apply(
            hidden, head.weight, head.bias, tokens, temperature or 1.0, each, entropy, slopes
        )  # type: ignore[no-untyped-call]
        return found

    head.forward = forward  # type: ignore[method-assign, assignment]
    try:
        yield True
    finally:
        del head.forward


def _head(model: Any) -> nn.Linear | None:
    """None where its logits are not plainly what comes out of it."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    plain = any(kind.__name__ in KINDS for kind in type(base).__mro__)  # FSDP makes a kind of its own of each
    return head if plain and type(head) is nn.Linear and "forward" not in vars(head) else None


class _Asked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tokens: torch.Tensor,
        temperature: float, each: int, entropy: bool, slopes: bool,
    ) -> torch.Tensor:  # fmt: skip
        kind = hidden.device.type
        narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        flat, words = hidden.reshape(-1, hidden.shape[-1]), tokens.reshape(-1)
        ctx.save_for_backward(flat, weight, bias, words)
        ctx.how = (kind, narrow, temperature, each, slopes, hidden.shape)
        made = []
        with torch.autocast(kind, enabled=False):  # which would multiply probabilities by logits in a narrow type
            head = _narrowed(weight, bias, narrow)
            for at in range(0, len(words), each):
                logits = _logits(flat[at : at + each], *head, temperature)
                own = logits.gather(-1, words[at : at + each, None])[:, 0]
                p, total = _softened(logits)
                entropies = total - torch.linalg.vecdot(p, logits) if entropy else torch.zeros_like(total)
                made.append(torch.stack([own - total, entropies], -1))
        return torch.cat(made).view(*tokens.shape, 2)

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> tuple[Any, ...]:
        flat, weight, bias, words = ctx.saved_tensors
        kind, narrow, temperature, each, slopes, shape = ctx.how
        asked = given[0].reshape(-1, 2)
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        back = torch.empty_like(flat) if of_hidden else None
        # Added up in float32 at least, part after part, and narrowed once.
        sums = torch.zeros_like(weight) if of_weight else None
        shifts = torch.zeros_like(bias) if of_bias else None
        with torch.autocast(kind, enabled=False):
            head = _narrowed(weight, bias, narrow)
            for at in range(0, len(words), each):
                part, slope = flat[at : at + each], asked[at : at + each]
                logits = _logits(part, *head, temperature)
                p, total = _softened(logits)
                if slopes:
                    log_p = logits.sub_(total[:, None])
                    entropy = torch.linalg.vecdot(p, log_p).neg_()
                    grad = log_p.add_(entropy[:, None]).mul_(slope[:, 1:]).add_(slope[:, :1]).mul_(p).neg_()
                else:
                    grad = p.mul_(-slope[:, :1])
                grad[torch.arange(len(grad), device=grad.device), words[at : at + each]] += slope[:, 0]
                grad = (grad / temperature if temperature != 1.0 else grad).to(narrow)
                if back is not None:
                    back[at : at + each] = grad @ head[0]
                if sums is not None and sums.dtype == narrow:
                    sums.addmm_(grad.t(), part.to(narrow))
                elif sums is not None:
                    sums += grad.t() @ part.to(narrow)
                if shifts is not None:
                    shifts += grad.sum(0)
        return (back.view(shape) if back is not None else None), sums, shifts, None, None, None, None, None


def _narrowed(
    weight: torch.Tensor, bias: torch.Tensor | None, narrow: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the head computes with, once for all parts."""
    return weight.to(narrow), bias.to(narrow) if bias is not None else None


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float) -> torch.Tensor:
    """In float32 at least, though computed in a narrow type; a tensor of its own."""
    made = linear(hidden.to(weight.dtype), weight, bias)
    made = made if made.dtype == torch.float64 else made.float()
    return made if temperature == 1.0 else made / temperature


def _softened(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(probabilities, the log of what they were divided by)."""
    p = logits.softmax(-1)
    return p, logits.amax(-1) - p.amax(-1).log()
