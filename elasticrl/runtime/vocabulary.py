"""Log-probabilities of tokens where a team shares a model's head: no member ever has all logits.

    said = log_probs(run.model, tokens, attention_mask=mask)  # [batch, tokens - 1]: of each token, by those before it

The one idea: a token's log-probability needs a few numbers of a member's columns of its row of logits: the greatest one, the
sum of their exponentials, and the token's own logit if it is there. So these are exchanged, and not the columns. Each member
adds up the same numbers in the members' order, so all come to the same bits. It knows the gradient of its columns by itself
then. Where members share tokens (`runtime.tokens`), each puts its part of the places through the head, and what is exchanged
afterwards is a number for each place.

Without a team the same functions compute the same of one process's logits, so that a script has one way for both.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.tokens import Split, Tokens, once
from elasticrl.runtime.torch_names import all_gather_single

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

MARK = "elasticrl_head"  # a head's attribute: how a team shares it
IGNORED = -100  # a label that transformers leaves out
LEFT_OUT = 0  # what stands in its place, of which nothing comes


class Said(NamedTuple):
    """What a model says of tokens, alike on all members. The entropies have a gradient only where it was asked for.

    Example: Said(log_probs=tensor([[-0.31, ...]]), entropy=tensor([[1.2, ...]]), out=...)
    """

    log_probs: torch.Tensor  # [batch, tokens]
    entropy: torch.Tensor  # [batch, tokens], in nats
    out: Any = None  # what the model returned; its logits are this member's alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Of a row of logits what a member has: those of the tokens from `first` on.

    Example: Columns(first=75968, group=..., members=2)
    """

    first: int
    group: dist.ProcessGroup
    members: int


@dataclass(slots=True, kw_only=True, eq=False)
class Head:
    """How a team shares a model's head: by columns, by places, or both."""

    columns: Columns | None = None
    tokens: Tokens | None = None
    apart: bool = False  # in a pass whose logits stay with their members

    def said(
        self, logits: torch.Tensor, tokens: torch.Tensor, *, entropy: bool = True, slopes: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probabilities, entropies) of all `tokens` [rows, places], by the logits of a pass that was `apart`; as `picked`.
        All members ask alike.
        """
        if self.tokens is None:
            return picked(logits, tokens, self.columns, entropy=entropy, slopes=slopes)
        split = Split(tokens=self.tokens, length=tokens.shape[1])
        mine, each = picked(logits, split.mine(tokens), self.columns, entropy=entropy, slopes=slopes)
        log_p = split.together(mine)
        return log_p, split.together(each) if entropy or slopes else torch.zeros_like(log_p)


def head_of(model: nn.Module) -> Head | None:
    """How a team shares the head of that model; None: it does not."""
    head = _head(model)
    return getattr(head, MARK, None) if head is not None else None


def cut_head(model: nn.Module, mesh: DeviceMesh, vocabulary: int) -> None:
    """Of the model's head, which this team has cut and whose output is a DTensor: its logits are put together, but in a pass
    whose logits stay apart.
    """
    from torch.distributed.tensor import Replicate  # half a second of imports, which only teams need

    module, head = _marked(model)
    assert module is not None
    assert head is not None
    each = -(-vocabulary // mesh.size())
    head.columns = Columns(first=each * mesh.get_local_rank(), group=mesh.get_group(), members=mesh.size())

    def gives(_module: nn.Module, _inputs: Any, logits: Any) -> torch.Tensor:
        found = logits if head.apart else logits.redistribute(placements=(Replicate(),), async_op=True)
        return found.to_local()  # type: ignore[no-any-return]

    module.register_forward_hook(gives)


def split_head(model: nn.Module, tokens: Tokens) -> None:
    """In a pass whose logits stay apart a member puts its part of the places through the model's head. What that gets as a
    gradient is a part of the lane's then; in other passes it counts once.
    """
    module, head = _marked(model)
    if module is None or head is None:
        return
    head.tokens = tokens

    def takes(_module: nn.Module, inputs: Any) -> Any:
        if not head.apart:
            return None
        split = Split(tokens=tokens, length=inputs[0].shape[1])
        return (split.taken(inputs[0]), *inputs[1:])

    # First of its hooks: where a team has cut the head too, the next one makes a DTensor of what comes.
    module.register_forward_pre_hook(takes, prepend=True)
    once(module, tokens, when=lambda: not head.apart)


def _marked(model: nn.Module) -> tuple[nn.Module, Head] | tuple[None, None]:
    """The model's head, and how it is shared: from now on it is."""
    module = _head(model)
    if module is None:
        return None, None
    if not hasattr(module, MARK):
        setattr(module, MARK, Head())
    return module, getattr(module, MARK)


def _head(model: nn.Module) -> nn.Module | None:
    asked: Any = getattr(model, "get_output_embeddings", None)
    found: nn.Module | None = asked() if asked is not None else None
    return found


@contextmanager
def logits_apart(model: nn.Module) -> Iterator[Head | None]:
    """Inside, a pass leaves with each member its own logits: give them to `said` of what this yields. None: all are here."""
    head = head_of(model)
    if head is None:
        yield None
        return
    head.apart = True
    try:
        yield head
    finally:
        head.apart = False


def log_probs(
    model: nn.Module, input_ids: torch.Tensor, *, temperature: float = 1.0, entropy: bool = False, **inputs: Any
) -> Said:
    """Of each token but the first, by the tokens before it: [batch, tokens - 1]. With `entropy` that has a gradient too."""
    with logits_apart(model) as head, _places(model, lambda hidden: hidden[:, :-1]):
        out = model(input_ids=input_ids, use_cache=False, **inputs)
    logits, tokens = _tempered(out.logits, temperature), input_ids[:, 1:]
    found = head.said(logits, tokens, slopes=entropy) if head else picked(logits, tokens, slopes=entropy)
    return Said(*found, out)


def loss(model: nn.Module, input_ids: torch.Tensor, labels: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """The mean of what `log_probs` makes of the labels, with a minus: the loss that transformers' models have. Labels of -100
    are left out. With `output_router_logits=True` a mixture's auxiliary loss is in it, as in theirs.
    """
    with logits_apart(model) as head, _places(model, lambda hidden: hidden[:, :-1]):
        out = model(input_ids=input_ids, use_cache=False, **inputs)
    wanted = labels[:, 1:]
    counts = wanted != IGNORED
    tokens, logits = wanted.masked_fill(~counts, LEFT_OUT), _tempered(out.logits, 1.0)
    found, _ = head.said(logits, tokens, entropy=False) if head else picked(logits, tokens, entropy=False)
    mean = -torch.where(counts, found, 0.0).sum() / counts.sum().clamp(min=1)
    aux = getattr(out, "aux_loss", None)
    return mean if aux is None else mean + _weight_of_aux(model) * aux


def _weight_of_aux(model: nn.Module) -> float:
    """What a mixture of transformers multiplies its auxiliary loss by."""
    found: float | None = getattr(model, "router_aux_loss_coef", getattr(model, "aux_loss_coef", None))
    if found is None:
        raise Misuse(
            f"{type(model).__name__} returned an auxiliary loss, and has no router_aux_loss_coef to weigh it by. Set that "
            "attribute on the model, or leave output_router_logits out."
        )
    return found


@contextmanager
def _places(model: nn.Module, chosen: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Inside, only these places go through the head."""
    head: Any = _head(model)
    # First of its hooks: the next ones take a member's part of the places, or make a DTensor of them.
    hook = head.register_forward_pre_hook(lambda _, inputs: (chosen(inputs[0]), *inputs[1:]), prepend=True)
    try:
        yield
    finally:
        hook.remove()


def _tempered(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide if temperature == 1.0 else wide / temperature


def picked(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    columns: Columns | None = None,
    *,
    entropy: bool = True,
    slopes: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probabilities, entropies) [...] of tokens [...] under logits [..., columns] in float32 at least. Without `entropy`
    that is 0; with `slopes` it is there, and has a gradient.
    """
    found: tuple[torch.Tensor, torch.Tensor]
    with torch.autocast(logits.device.type, enabled=False):  # which would multiply e by logits in bfloat16
        found = _Picked.apply(logits, tokens, columns, entropy or slopes, slopes)  # type: ignore[no-untyped-call]
    return found


class _Picked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, columns: Columns | None, entropy: bool, slopes: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        at = tokens - (columns.first if columns else 0)
        here = (at >= 0) & (at < logits.shape[-1])
        at = at.clamp(0, logits.shape[-1] - 1)
        most = logits.amax(-1)
        e = (logits - most[..., None]).exp_()
        own = torch.where(here, logits.gather(-1, at[..., None])[..., 0], 0.0)
        mine = torch.stack([most, e.sum(-1), own, *([torch.linalg.vecdot(e, logits)] if entropy else [])])
        # [members, 3 or 4, ...]: each member's greatest logit, and by that its sums
        every = _of_all(mine, columns)
        greatest = every[:, 0].amax(0)
        scales = (every[:, 0] - greatest).exp()
        total, own = _in_order(every[:, 1] * scales), _in_order(every[:, 2])
        log_total = greatest + total.log()
        ctx.slopes = slopes
        part = (most - greatest).exp() / total  # what makes probabilities of e
        each = log_total - _in_order(every[:, 3] * scales) / total if entropy else torch.zeros_like(log_total)
        ctx.save_for_backward(e, part, at, here, *((logits, log_total - each) if slopes else ()))
        if not slopes:
            ctx.mark_non_differentiable(each)
        return own - log_total, each

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        e, part, at, here, *more = ctx.saved_tensors
        slope = given[0]
        grad = e * (-slope * part)[..., None]
        if ctx.slopes:  # of an entropy by a logit: p x (the mean logit by p, less that one)
            logits, mean = more
            grad += (mean[..., None] - logits).mul_(e).mul_((given[1] * part)[..., None])
        flat = grad.view(-1, grad.shape[-1])
        flat[torch.arange(len(flat), device=flat.device), at.reshape(-1)] += torch.where(here, slope, 0.0).reshape(-1)
        return grad, None, None, None, None


def _of_all(mine: torch.Tensor, columns: Columns | None) -> torch.Tensor:
    """[members, ...] of each member's."""
    if columns is None:
        return mine[None]
    come = mine.new_empty(columns.members * len(mine), *mine.shape[1:])
    all_gather_single(come, mine.contiguous(), group=columns.group)
    return come.view(columns.members, *mine.shape)


def _in_order(rows: torch.Tensor) -> torch.Tensor:
    """The sum of rows, the first one first: torch's own sum has an order that follows from shapes."""
    found = rows[0]
    for row in rows[1:]:
        found = found + row
    return found
