"""The divergence from the reference: estimators of it, and the coefficient that weighs it.

The idea: the coefficient of a step is a function of what is recorded, not of how often it was asked for. The controller keeps
the step it last measured and the coefficient before and after, so a step that is run again after a fault finds the
coefficient it had, and measuring it twice changes nothing.

Estimators take log-probabilities [samples, tokens] of the same tokens by policy and reference. k1 is unbiased and may be
negative; k3 has the same mean, less variance, and is never negative. Neither's gradient is the divergence's in the mean (k1's
is 0): k2's is. So k1+ and k3+ have the value of k1 and k3 and the gradient of k2 (straight through).
"""

from __future__ import annotations

from typing import Any

import torch


def k1(policy: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """The log of policy over reference: for the reward."""
    return policy - ref


def k3(policy: torch.Tensor, ref: torch.Tensor, mask: torch.Tensor, *, limit: float = 10.0) -> torch.Tensor:
    """The ratio - 1 - log ratio of reference over policy: for the loss. Clamped to `limit`, and 0 where masked."""
    log_ratio = torch.where(mask, ref - policy, 0.0).clamp(-20.0, 20.0)
    return (log_ratio.exp() - 1 - log_ratio).clamp(max=limit)


def k2(policy: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """Half the squared log ratio: biased, with the right gradient."""
    return 0.5 * (policy - ref).square()


def estimate(
    kind: str, policy: torch.Tensor, ref: torch.Tensor, mask: torch.Tensor, *, limit: float = 10.0
) -> torch.Tensor:
    """The estimator of this name: k1, k2, k3, or k1+ and k3+. 0 where masked."""
    policy, ref = torch.where(mask, policy, 0.0), torch.where(mask, ref, 0.0)
    value = {
        "k1": lambda: k1(policy, ref), "k2": lambda: k2(policy, ref), "k3": lambda: k3(policy, ref, mask, limit=limit),
    }[kind.removesuffix("+")]()  # fmt: skip
    if not kind.endswith("+"):
        return value
    slope = k2(policy, ref)
    return slope - slope.detach() + value.detach()


class Coefficient:
    """The weight of the KL term; fixed without a target, else steered towards it (Ziegler et al., 2019). Training state.

    Example: Coefficient(0.05, target=6.0, horizon=10_000).observe(step=0, kl=7.1, samples=64)
    """

    def __init__(self, start: float, *, target: float | None = None, horizon: float = 10_000.0) -> None:
        self.target, self.horizon = target, horizon
        self._step, self._before, self._after = -1, start, start

    def of(self, step: int) -> float:
        """The coefficient that step's rewards are made with."""
        assert step >= self._step, f"the coefficient of step {step} is forgotten: step {self._step} was measured since"
        return self._before if step == self._step else self._after

    def observe(self, *, step: int, kl: float, samples: int) -> None:
        """This step's mean KL over the whole batch, in the target's unit; the next step's coefficient follows from it."""
        before = self.of(step)
        after = before
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            # A batch beyond the horizon counts as the horizon: by a fifth at most in a step, and never below 0.
            after = before * (1 + error * min(samples, self.horizon) / self.horizon)
        self._step, self._before, self._after = step, before, after

    def state_dict(self) -> dict[str, Any]:
        """Example: {"step": 12, "before": 0.05, "after": 0.0501}"""
        return {"step": self._step, "before": self._before, "after": self._after}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up where the saved one was. One that is fixed is what the configuration says now."""
        self._step = int(state["step"])
        if self.target is not None:
            self._before, self._after = float(state["before"]), float(state["after"])
