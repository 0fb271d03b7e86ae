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


def dpo_loss(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    valid: torch.Tensor,
    *,
    kind: str = "sigmoid",
    beta: float = 0.1,
    gamma: float = 0.0,
    lengths: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> PreferenceLoss:
    """Of log-ratios [pairs]; for ipo and simpo, which want means over tokens, with the `lengths` of both. simpo takes
    log-probabilities in place of log-ratios. `valid` [pairs] leaves out padding.

    With margin = chosen - rejected: sigmoid is -log sigmoid(beta x margin); hinge is max(0, 1 - beta x margin); ipo is
    (margin - 1 / (2 beta))^2; simpo is -log sigmoid(beta x margin - gamma).
    """
    if kind in ("ipo", "simpo"):
        assert lengths is not None, f"{kind} wants means over tokens"
        chosen, rejected = (x / n.clamp(min=1) for x, n in zip((chosen, rejected), lengths, strict=True))
    margin = torch.where(valid, chosen - rejected, 0.0)
    match kind:
        case "hinge":
            loss = (1 - beta * margin).clamp(min=0.0)
        case "ipo":
            loss = (margin - 1 / (2 * beta)).square()
        case _:
            loss = -logsigmoid(beta * margin - (gamma if kind == "simpo" else 0.0))
    return PreferenceLoss(masked(loss, valid), masked((margin > 0).to(margin.dtype), valid))


def kto_loss(
    ratios: torch.Tensor,
    good: torch.Tensor,
    valid: torch.Tensor,
    baseline: float,
    *,
    beta: float = 0.1,
    weights: tuple[float, float] = (1.0, 1.0),
) -> PreferenceLoss:
    """1 - sigmoid(+-beta x (log-ratio - baseline)), plus for good answers, minus for bad, times the weight of (good, bad) ones.
    `baseline` is `kto_baseline` of the whole batch.
    """
    sign = torch.where(good, 1.0, -1.0)
    weight = ratios.new_tensor(weights)[(~good).long()]
    gain = sign * torch.where(valid, ratios - baseline, 0.0)
    return PreferenceLoss(
        masked(weight * (1 - torch.sigmoid(beta * gain)), valid), masked((gain > 0).to(gain.dtype), valid)
    )


def kto_baseline(mean_log_ratio: float) -> float:
    """The KL that gains are measured against: the whole batch's mean log-ratio of answers to *other* prompts, at least 0."""
    return max(mean_log_ratio, 0.0)
