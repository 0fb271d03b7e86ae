"""The terms of the loss, as pure functions of one lane's tensors.

The idea: a lane never divides. Every term comes as a `Sum`, a total over the lane's valid tokens beside their number, and who
knows the number in the whole mini-batch divides by that. So a token weighs the same in whatever lane it lies, an empty lane
adds zero, and a mean of means cannot happen.

Shapes are [samples, tokens] unless said otherwise; `mask` is true for the tokens that the policy chose.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Sum(NamedTuple):
    """A total over what was valid, and how much that was. Example: Sum(total=tensor(12.5), entries=tensor(40))"""

    total: torch.Tensor  # []
    entries: torch.Tensor  # [] int64

    def over(self, count: float) -> torch.Tensor:
        """The lane's part of the global mean; an empty mini-batch has a mean of 0, with gradients of 0."""
        return self.total / max(count, 1.0)


class PolicyLoss(NamedTuple):
    """The clipped surrogate, and what the clipping did."""

    loss: Sum
    clipped: Sum  # tokens whose gradient the clip removed
    approx_kl: Sum  # (ratio - 1) - log ratio: never negative, unlike the mean log ratio


def masked(values: torch.Tensor, mask: torch.Tensor) -> Sum:
    """The sum over valid entries. What is under the mask may be anything, NaN too."""
    return Sum(torch.where(mask, values, 0.0).sum(), mask.sum())


def logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities [samples, tokens] of tokens under logits [samples, tokens, vocabulary], in float32 at least."""
    scaled = tempered(logits, temperature)
    return scaled.gather(-1, tokens[..., None]).squeeze(-1) - scaled.logsumexp(-1)


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


def policy_loss(
    new: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    log_ratio_limit: float = 20.0,
    weights: torch.Tensor | None = None,
) -> PolicyLoss:
    """PPO's surrogate. The ratio is clipped to [1 - clip_low, 1 + clip_high]; with `dual_clip` the loss of a negative advantage
    is at most that many times its size, since the plain clip leaves it unbounded. `weights` are `importance_weights`.
    """
    # Masked before exp, not after: the gradient of exp at a padding token could be inf, and 0 x inf is NaN.
    log_ratio = torch.where(mask, new - old, 0.0).clamp(-log_ratio_limit, log_ratio_limit)
    gain = torch.where(mask, advantages, 0.0)
    ratio = log_ratio.exp()
    free = -gain * ratio
    held = -gain * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(free, held)
    if dual_clip is not None:
        loss = torch.where(gain < 0, torch.minimum(loss, -gain * dual_clip), loss)
    if weights is not None:
        loss = loss * weights
    return PolicyLoss(
        loss=masked(loss, mask),
        clipped=masked((held > free).to(loss.dtype), mask),
        approx_kl=masked((ratio - 1 - log_ratio).detach(), mask),
    )


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


def importance_weights(trainer: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, limit: float) -> torch.Tensor:
    """Truncated importance sampling: how much likelier the trainer finds each token than the engine that sampled it did, at
    most `limit`. A constant to the gradient. 1 where masked.
    """
    log_ratio = torch.where(mask, trainer - rollout, 0.0)
    return log_ratio.clamp(-20.0, 20.0).exp().clamp(max=limit).detach()
