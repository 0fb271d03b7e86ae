"""From scores to advantages, as pure functions of one lane's tensors.

The idea: a response is the sequence of its valid tokens, wherever they stand. Masked positions (padding, a tool's words) are
stepped over as if they were not there: no reward, no value, no decay.

Shapes are [samples, tokens], `mask` is true for the tokens that the policy chose, scores are [samples].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from elasticrl.config.training import Ppo
    from elasticrl.runtime.scalars import Moments

EPSILON = 1e-8
GROUP_EPSILON = 1e-4  # as TRL; beside the standard deviation of scores
WHITENED = ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")  # where `ppo.whiten` says so


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
    overlong: torch.Tensor | None = None,
    kl: torch.Tensor | None = None,
    coef: float = 0.0,
) -> torch.Tensor:
    """Scores where they were placed, less the penalty on the last token of a response that did not end by itself (`ended`
    [samples]), less `overlong` [samples] on the last token, less coef x KL on each token. Zero where masked.
    """
    last = last_valid(mask)
    rewards = torch.where(last & ~ended[:, None], scores - penalty, scores)
    if overlong is not None:
        rewards = torch.where(last, rewards - overlong[:, None].to(rewards.dtype), rewards)
    return torch.where(mask, rewards if kl is None else rewards - coef * kl, 0.0)


def overlong_penalties(mask: torch.Tensor, *, most: int, buffer: int, factor: float) -> torch.Tensor:
    """DAPO's soft overlong punishment [samples]: 0 up to `most` - `buffer` tokens, then in a line up to `factor` at `most`."""
    return factor * ((mask.sum(1).double() - (most - buffer)) / buffer).clamp(min=0.0)


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


def contested(scores: torch.Tensor, group: int, lost: torch.Tensor | None = None) -> torch.Tensor:
    """Whether each sample is in a group whose scores are not all alike [samples]: of the others there is nothing to learn."""
    groups, there = _groups(scores, group), _there(scores, group, lost)
    least = torch.where(there, groups, torch.inf).amin(1)
    return (torch.where(there, groups, -torch.inf).amax(1) > least).repeat_interleave(group)


def without_critic(
    rewards: torch.Tensor, mask: torch.Tensor, ppo: Ppo, lost: torch.Tensor | None = None
) -> torch.Tensor:
    """The advantages of an algorithm that has no critic, from the rewards of each token. reinforce_plus_plus has a return for
    each token; the others have a baseline from the group's scores. Samples that are `lost` [samples] have no score: the others
    are compared among themselves.
    """
    if ppo.algorithm == "reinforce_plus_plus":
        return gae(rewards, torch.zeros_like(rewards), mask, gamma=ppo.gamma, lam=1.0)[0]
    return of_all_tokens(gains(rewards.sum(1), mask.sum(1), ppo, lost), mask, lost)


def gains(scores: torch.Tensor, lengths: torch.Tensor, ppo: Ppo, lost: torch.Tensor | None = None) -> torch.Tensor:
    """What each sample [samples] has over its group, by an algorithm that has a baseline from the group's scores. `lengths` are
    the samples' tokens.
    """
    if ppo.algorithm == "rloo":
        return leave_one_out(scores, ppo.group, lost=lost)
    if ppo.algorithm == "opo":
        return less_weighted_mean(scores, lengths, ppo.group, lost=lost)
    scaled = ppo.algorithm == "grpo" and ppo.scale_rewards == "group"
    return group_gains(scores, ppo.group, scaled=scaled, lost=lost)


def group_gains(
    scores: torch.Tensor, group: int, *, scaled: bool = True, lost: torch.Tensor | None = None
) -> torch.Tensor:
    """GRPO: each score against those of the other answers to its prompt.

    Samples of a group are neighbours: rows 0 to group - 1 are the first. `scaled` divides by the group's standard deviation,
    which favours prompts that are almost always, or almost never, answered well; Dr.GRPO leaves it out.
    """
    groups, there = _groups(scores, group), _there(scores, group, lost)
    count = there.sum(1, keepdim=True)
    gain = groups - torch.where(there, groups, 0.0).sum(1, keepdim=True) / count.clamp(min=1)
    if scaled and group > 1:
        squares = torch.where(there, gain, 0.0).square().sum(1, keepdim=True)
        gain = gain / ((squares / (count - 1).clamp(min=1)).sqrt() + GROUP_EPSILON)
    return (torch.where(count > 1, gain, 0.0) if group > 1 else gain).reshape(-1)


def leave_one_out(scores: torch.Tensor, group: int, *, lost: torch.Tensor | None = None) -> torch.Tensor:
    """RLOO: each score less the mean of the *other* answers to its prompt."""
    groups, there = _groups(scores, group), _there(scores, group, lost)
    count = there.sum(1, keepdim=True)
    others = torch.where(there, groups, 0.0).sum(1, keepdim=True) - groups
    gain = groups - others / (count - 1).clamp(min=1)
    return torch.where(count > 1, gain, 0.0).reshape(-1)


def less_weighted_mean(
    scores: torch.Tensor, lengths: torch.Tensor, group: int, *, lost: torch.Tensor | None = None
) -> torch.Tensor:
    """OPO: each score less the group's mean, in which an answer weighs as many times as it has tokens: the baseline of least
    variance, where tokens' gradients are alike.
    """
    groups, there = _groups(scores, group), _there(scores, group, lost)
    weights = torch.where(there, lengths.view(-1, group), 0).to(scores.dtype)
    mean = torch.where(there, groups * weights, 0.0).sum(1, keepdim=True) / weights.sum(1, keepdim=True).clamp(min=1.0)
    return (groups - mean).reshape(-1)


def of_all_tokens(gain: torch.Tensor, mask: torch.Tensor, lost: torch.Tensor | None = None) -> torch.Tensor:
    """[samples, tokens]: a sample's gain is the advantage of each of its tokens. What is `lost` has none."""
    chosen = mask if lost is None else mask & ~lost[:, None]
    return torch.where(chosen, gain[:, None], 0.0)


def over_batch(advantages: torch.Tensor, scores: Moments) -> torch.Tensor:
    """Divided by the standard deviation of the scores of the *whole* batch."""
    return advantages / (scores.std(unbiased=True) + GROUP_EPSILON)


def _groups(scores: torch.Tensor, group: int) -> torch.Tensor:
    assert len(scores) % group == 0, f"{len(scores)} samples are not whole groups of {group}"
    return scores.view(-1, group)


def _there(scores: torch.Tensor, group: int, lost: torch.Tensor | None) -> torch.Tensor:
    return torch.ones_like(scores, dtype=torch.bool).view(-1, group) if lost is None else ~lost.view(-1, group)


def explained_variance(returns: Moments, errors: Moments) -> float:
    """How much of the returns' variance the values foresaw: 1 is all, 0 as much as their mean does. `errors` are of
    returns - values. NaN-free: 0 where returns do not vary.
    """
    spread = returns.var()
    return 1.0 - errors.var() / spread if spread > 0 else 0.0
