"""From scores to advantages, as pure functions of one lane's tensors.

The idea: a response is the sequence of its valid tokens, wherever they stand. Masked positions (padding, a tool's words) are
stepped over as if they were not there: no reward, no value, no decay.

Shapes are [samples, tokens], `mask` is true for the tokens that the policy chose, scores are [samples].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from elasticrl.runtime.scalars import Moments

EPSILON = 1e-8


def last_valid(mask: torch.Tensor) -> torch.Tensor:
    """True at each sample's last valid token; nowhere in a sample without one."""
    remaining = mask.flip(1).cumsum(1).flip(1)
    return mask & (remaining == 1)


def token_rewards(
    scores: torch.Tensor,
    mask: torch.Tensor,
    ended: torch.Tensor,
    *,
    penalty: float = 0.0,
    kl: torch.Tensor | None = None,
    coef: float = 0.0,
) -> torch.Tensor:
    """Scores where they were placed, less the penalty on the last token of a response that did not end by itself (`ended`
    [samples]), less coef x KL on each token. Zero where masked.
    """
    rewards = torch.where(last_valid(mask) & ~ended[:, None], scores - penalty, scores)
    return torch.where(mask, rewards if kl is None else rewards - coef * kl, 0.0)


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation: (advantages, returns), zero where masked. Nothing follows the last valid token.

    Returns are advantages + values *before* any whitening: the critic learns rewards, not their standard scores.
    """
    advantages = torch.zeros_like(values)
    ahead = torch.zeros_like(values[:, 0]) if values.shape[1] else values.new_zeros(len(values))
    following = ahead.clone()  # the value of the next valid token
    for t in reversed(range(values.shape[1])):
        here = mask[:, t]
        gain = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * ahead
        ahead = torch.where(here, gain, ahead)
        following = torch.where(here, values[:, t], following)
        advantages[:, t] = torch.where(here, ahead, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


def whiten(advantages: torch.Tensor, mask: torch.Tensor, moments: Moments) -> torch.Tensor:
    """To mean 0 and variance 1 over the *whole* batch, whose moments these are. A batch of one value stays as it is."""
    if moments.count < 2:
        return advantages
    scale = 1.0 / (moments.var(unbiased=True) + EPSILON) ** 0.5
    return torch.where(mask, (advantages - moments.mean) * scale, 0.0)


def group_advantages(
    scores: torch.Tensor, mask: torch.Tensor, group: int, *, lost: torch.Tensor | None = None
) -> torch.Tensor:
    """GRPO: each score against those of the other answers to its prompt, the same for all tokens of a sample.

    Samples of a group are neighbours: rows 0 to group - 1 are the first. It is divided by the group's standard deviation, which
    favours prompts that are almost always, or almost never, answered well. Samples that are `lost` have no score: the others
    are compared among themselves.
    """
    assert len(scores) % group == 0, f"{len(scores)} samples are not whole groups of {group}"
    groups = scores.view(-1, group)
    if lost is not None and lost.any():
        return torch.where(mask, _gain_of_those_there(groups, ~lost.view(-1, group)).reshape(-1, 1), 0.0)
    gain = groups - groups.mean(1, keepdim=True)
    if group > 1 and len(scores):
        gain = gain / (groups.std(1, keepdim=True) + 1e-4)
    return torch.where(mask, gain.reshape(-1, 1), 0.0)


def _gain_of_those_there(groups: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """As `group_advantages`, where groups differ in size."""
    count = there.sum(1, keepdim=True)
    gain = torch.where(there, groups - (groups * there).sum(1, keepdim=True) / count.clamp(min=1), 0.0)
    std = (gain.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    return torch.where(count > 1, gain / (std + 1e-4), 0.0)


def explained_variance(returns: Moments, errors: Moments) -> float:
    """How much of the returns' variance the values foresaw: 1 is all, 0 as much as their mean does. `errors` are of
    returns - values. NaN-free: 0 where returns do not vary.
    """
    spread = returns.var()
    return 1.0 - errors.var() / spread if spread > 0 else 0.0
