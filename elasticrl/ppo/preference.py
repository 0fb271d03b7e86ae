"""DPO and KTO: losses on given answers, as pure functions of one lane's sequence log-probabilities [pairs] or [samples].

The idea: both need only how much likelier than the reference the policy finds each answer, its log-ratio. They are `Sum`s like
all terms, so that pairs weigh the same in whatever lane they lie.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import logsigmoid

from elasticrl.ppo.losses import Sum, masked


class PreferenceLoss(NamedTuple):
    """A loss, and how often the implied reward ranks answers rightly."""

    loss: Sum
    right: Sum


def log_ratios(policy: torch.Tensor, ref: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[samples], from log-probabilities [samples, tokens]: log policy(answer) - log ref(answer)."""
    return torch.where(mask, policy - ref, 0.0).sum(1)


def dpo_loss(chosen: torch.Tensor, rejected: torch.Tensor, valid: torch.Tensor, *, beta: float = 0.1) -> PreferenceLoss:
    """-log sigmoid(beta x (chosen - rejected)) of log-ratios [pairs]. `valid` [pairs] leaves out padding."""
    margin = torch.where(valid, chosen - rejected, 0.0)
    return PreferenceLoss(masked(-logsigmoid(beta * margin), valid), masked((margin > 0).to(margin.dtype), valid))


def kto_loss(
    ratios: torch.Tensor,
    good: torch.Tensor,
    valid: torch.Tensor,
    baseline: float,
    *,
    beta: float = 0.1,
) -> PreferenceLoss:
    """1 - sigmoid(+-beta x (log-ratio - baseline)), plus for good answers, minus for bad. `baseline` is `kto_baseline` of the
    whole batch.
    """
    sign = torch.where(good, 1.0, -1.0)
    gain = sign * torch.where(valid, ratios - baseline, 0.0)
    return PreferenceLoss(masked(1 - torch.sigmoid(beta * gain), valid), masked((gain > 0).to(gain.dtype), valid))


def kto_baseline(mean_log_ratio: float) -> float:
    """The KL that gains are measured against: the whole batch's mean log-ratio of answers to *other* prompts, at least 0."""
    return max(mean_log_ratio, 0.0)
