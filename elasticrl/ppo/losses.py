"""The terms of the loss, as pure functions of one lane's tensors.

The idea: a lane never divides. Every term comes as a `Sum`, a total over the lane's valid tokens beside their number, and who
knows the number in the whole mini-batch divides by that. So a token weighs the same in whatever lane it lies, an empty lane
adds zero, and a mean of means cannot happen. A mean of each sample (`summed`) is no exception: a sample is whole in its pass.

The surrogates of a ratio (`SURROGATES`) are one function each; docs/ALGORITHMS.md has their formulas.

Shapes are [samples, tokens] unless said otherwise; `mask` is true for the tokens that the policy chose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

if TYPE_CHECKING:
    from elasticrl.config.training import Ppo

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


class Sum(NamedTuple):
    """A total over what was valid, and how much that was. Example: Sum(total=tensor(12.5), entries=tensor(40))"""

    total: torch.Tensor  # []
    entries: torch.Tensor  # [] int64

    def over(self, count: float) -> torch.Tensor:
        """The lane's part of the global mean; an empty mini-batch has a mean of 0, with gradients of 0."""
        return self.total / max(count, 1.0)


class Entries(NamedTuple):
    """What the terms of a whole mini-batch are divided by. Example: Entries(tokens=4096.0, samples=32.0)"""

    tokens: float  # valid ones; of preferences, pairs or answers
    samples: float  # that have a valid token

    def of(self, aggregation: Aggregation, *, most: int) -> float:
        """The count of an aggregation; `most` tokens are an answer's at most. 1 of nothing."""
        if aggregation == "token-mean":
            return max(self.tokens, 1.0)
        return max(self.samples, 1.0) * (most if aggregation == "seq-mean-token-sum-norm" else 1)


class PolicyLoss(NamedTuple):
    """The surrogate, and what the clipping did."""

    loss: Sum
    clipped: Sum  # tokens whose gradient the clip removed; for cispo, whose weight it cut
    approx_kl: Sum  # (ratio - 1) - log ratio: never negative, unlike the mean log ratio


def masked(values: torch.Tensor, mask: torch.Tensor) -> Sum:
    """The sum over valid entries. What is under the mask may be anything, NaN too."""
    return Sum(torch.where(mask, values, 0.0).sum(), mask.sum())


def summed(values: torch.Tensor, mask: torch.Tensor, aggregation: Aggregation = "token-mean") -> Sum:
    """What a loss adds up to: tokens beside their number, or samples (of those that have a valid token) beside theirs. A sample
    counts as the mean of its tokens, or as their sum.
    """
    found = masked(values, mask)
    if aggregation == "token-mean":
        return found
    if aggregation == "seq-mean-token-mean":
        return Sum((torch.where(mask, values, 0.0).sum(1) / mask.sum(1).clamp(min=1)).sum(), mask.any(1).sum())
    return Sum(found.total, mask.any(1).sum())


def logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities [samples, tokens] of tokens under logits [samples, tokens, vocabulary], in float32 at least."""
    found: torch.Tensor = _Picked.apply(tempered(logits, temperature), tokens, False)[0]  # type: ignore[no-untyped-call]
    return found


def with_entropy(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(`logprobs`, the entropies): these have no gradient."""
    return _Picked.apply(tempered(logits, temperature), tokens, True)  # type: ignore[no-untyped-call, no-any-return]


class _Picked(torch.autograd.Function):
    """The logits go over the vocabulary, so whoever touches them once more takes longer than all that is done with what is left
    of them: their softmax is made once, and serves for all results and for the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        p = logits.softmax(-1)
        total = logits.amax(-1) - p.amax(-1).log()  # the log of the sum, by the likeliest: it is never small
        found = logits.gather(-1, tokens[..., None]).squeeze(-1) - total
        ctx.save_for_backward(p, tokens)
        if not entropy:
            return found, None
        entropies = total - torch.linalg.vecdot(p, logits)
        ctx.mark_non_differentiable(entropies)
        return found, entropies

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        p, tokens = ctx.saved_tensors
        slope = given[0]
        grad = p * -slope[..., None]
        flat = grad.view(-1, grad.shape[-1])
        flat[torch.arange(len(flat), device=flat.device), tokens.reshape(-1)] += slope.reshape(-1)
        return grad, None, None


def unevenness(routers: Sequence[torch.Tensor], seen: torch.Tensor, *, each: int) -> torch.Tensor:
    """The auxiliary loss of Switch Transformer, of a mixture whose routers said these logits [tokens, experts], one of each
    layer, and send a token to `each` experts: `each` where all experts are used alike, and more elsewhere. Of the tokens that
    were `seen`; 0 of none.
    """
    weight, experts = seen.reshape(-1).float(), routers[0].shape[-1]
    sent, likely = weight.new_zeros(experts), weight.new_zeros(experts)
    for logits in routers:
        p = logits.float().softmax(-1)
        chosen = p.topk(each, -1).indices.reshape(-1)
        # Whole numbers, so their order does not matter.
        sent = sent + torch.zeros_like(sent).scatter_add_(0, chosen, weight.repeat_interleave(each))
        likely = likely + (p * weight[:, None]).sum(0)
    count = len(routers) * weight.sum().clamp(min=1)
    return experts * (sent / count * (likely / count)).sum()


def entropies(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """The entropy [samples, tokens] of each token's distribution, in nats."""
    log_p = tempered(logits, temperature).log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def tempered(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """The logits that are sampled from: the trainer must score tokens by the distribution they were drawn from."""
    return wide(logits) if temperature in (0.0, 1.0) else wide(logits) / temperature


def wide(values: torch.Tensor) -> torch.Tensor:
    """In float32 at least."""
    return values if values.dtype == torch.float64 else values.float()


class Surrogate(NamedTuple):
    """[samples, tokens] each."""

    loss: torch.Tensor
    clipped: torch.Tensor  # true where the clip bit


def policy_loss(
    new: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    ppo: Ppo,
    weights: torch.Tensor | None = None,
) -> PolicyLoss:
    """The surrogate that `ppo.loss_mode` names, of the ratio of new over old policy. `weights` are `importance_weights`."""
    # Masked before exp, not after: the gradient of exp at a padding token could be inf, and 0 x inf is NaN.
    log_ratio = torch.where(mask, new - old, 0.0).clamp(-ppo.log_ratio_limit, ppo.log_ratio_limit)
    gain = torch.where(mask, advantages, 0.0)
    loss, clipped = SURROGATES[ppo.loss_mode](log_ratio, torch.where(mask, new, 0.0), gain, mask, ppo)
    if weights is not None:
        loss = loss * weights
    return PolicyLoss(
        loss=summed(loss, mask, ppo.loss_agg_mode),
        clipped=masked(clipped.to(loss.dtype), mask),
        approx_kl=masked((log_ratio.exp() - 1 - log_ratio).detach(), mask),
    )


def _clip(log_ratio: torch.Tensor, _new: torch.Tensor, gain: torch.Tensor, _mask: torch.Tensor, ppo: Ppo) -> Surrogate:
    """PPO's. The ratio is clipped to [1 - clip_low, 1 + clip_high]; with `dual_clip` the loss of a negative advantage is at
    most that many times its size, since the plain clip leaves it unbounded.
    """
    ratio = log_ratio.exp()
    free = -gain * ratio
    held = -gain * ratio.clamp(1 - ppo.clip_low, 1 + ppo.clip_high)
    loss = torch.maximum(free, held)
    if ppo.dual_clip is not None:
        loss = torch.where(gain < 0, torch.minimum(loss, -gain * ppo.dual_clip), loss)
    return Surrogate(loss, held > free)


def _gspo(log_ratio: torch.Tensor, new: torch.Tensor, gain: torch.Tensor, mask: torch.Tensor, ppo: Ppo) -> Surrogate:
    """PPO's, of the sample's ratio: the geometric mean of its tokens'. As GSPO-token, whose gradient is GSPO's where the tokens
    of a sample have one advantage: the value is the sample's, and the gradient is each token's own.
    """
    of_sample = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return _clip(of_sample.detach() + (new - new.detach()), new, gain, mask, ppo)


def _geo_mean(
    log_ratio: torch.Tensor, _new: torch.Tensor, gain: torch.Tensor, mask: torch.Tensor, ppo: Ppo
) -> Surrogate:
    """GMPO: the geometric mean of the tokens' ratios, each clipped before: its log to [-clip_low, clip_high]."""
    held = log_ratio.clamp(-ppo.clip_low, ppo.clip_high)
    least = torch.where(gain < 0, torch.maximum(log_ratio, held), torch.minimum(log_ratio, held))
    of_sample = least.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return Surrogate(-gain * of_sample.exp(), least != log_ratio)


def _cispo(log_ratio: torch.Tensor, new: torch.Tensor, gain: torch.Tensor, _mask: torch.Tensor, ppo: Ppo) -> Surrogate:
    """The clipped ratio is a constant weight of the token's log-probability: no token's gradient is lost."""
    ratio = log_ratio.exp().detach()
    weight = ratio.clamp(1 - ppo.clip_low, 1 + ppo.clip_high)
    return Surrogate(-weight * gain * new, ratio != weight)


def _sapo(log_ratio: torch.Tensor, _new: torch.Tensor, gain: torch.Tensor, _mask: torch.Tensor, ppo: Ppo) -> Surrogate:
    """A soft gate in place of a clip: the gradient fades as the ratio leaves 1, sooner for a negative advantage."""
    tau = gain.new_tensor((ppo.tau_pos, ppo.tau_neg))[(gain <= 0).long()]
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau
    return Surrogate(-gate * gain, torch.zeros_like(gain, dtype=torch.bool))


SURROGATES: Mapping[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Ppo], Surrogate]] = {
    "vanilla": _clip, "gspo": _gspo, "geo_mean": _geo_mean, "cispo": _cispo, "sapo": _sapo,
}  # fmt: skip


def value_loss(
    new: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, *, clip: float | None = 0.2
) -> Sum:
    """Half the squared error; with `clip` the larger of it and that of the value kept within `clip` of the old one."""
    new, old, returns = (torch.where(mask, x, 0.0) for x in (new, old, returns))
    error = (new - returns).square()
    if clip is not None:
        near = old + (new - old).clamp(-clip, clip)
        error = torch.maximum(error, (near - returns).square())
    return masked(0.5 * error, mask)


def importance_weights(
    trainer: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, ppo: Ppo, limit: float
) -> torch.Tensor:
    """Importance sampling: how much likelier the trainer finds each token, or each answer, than the engine that sampled it did.
    Bounded as `ppo.importance_mode` says. A constant to the gradient. 1 where masked.
    """
    log_ratio, low = torch.where(mask, trainer - rollout, 0.0), ppo.importance_floor
    if ppo.importance_mode.startswith("sequence"):
        log_ratio = log_ratio.sum(1, keepdim=True).expand_as(mask)
    ratio = log_ratio.clamp(-20.0, 20.0).exp()
    if ppo.importance_mode.endswith("truncate"):
        ratio = ratio.clamp(low, limit)
    else:
        ratio = torch.where((ratio >= low) & (ratio <= limit), ratio, 0.0)
    return torch.where(mask, ratio, 1.0).detach()
