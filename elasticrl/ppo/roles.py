"""The models in their roles, and what each is asked: the policy's log-probabilities, the reference's, the critic's values.

The idea: a question is put to one block of rows and answered for its response tokens, so that who asks need not know how a
model is spread, in which type it computes, or whether the critic is a head of the actor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from elasticrl.ppo import models
from elasticrl.ppo.losses import logprobs

if TYPE_CHECKING:
    from torch import nn

    from elasticrl.config.training import Model
    from elasticrl.ppo.batches import Rows
    from elasticrl.ppo.rewards import Judge


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Without `ref` and `judge` the reference is the actor without its adapters.

    Example: Roles(model=config.model, actor=actor, critic=critic, ref=reference, tokenizer=tokenizer)
    """

    model: Model
    actor: nn.Module
    critic: nn.Module | None = None
    ref: nn.Module | None = None
    judge: Judge | None = None  # where the reference lives elsewhere
    tokenizer: Any = None
    device: str = "cpu"
    temperature: float = 1.0

    @property
    def tied(self) -> bool:
        """The critic is a head of the actor."""
        return isinstance(self.actor, models.Tied)

    def logits(self, model: nn.Module, rows: Rows) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of each response token's place; and values, if the model is tied."""
        model.train(torch.is_grad_enabled())
        with models.computing(self.model, self.device):
            return models.response_logits(model, rows)

    def policy(self, rows: Rows) -> tuple[torch.Tensor, ...]:
        """(log-probabilities [samples, tokens],), with the values if they come in the same pass."""
        logits, values = self.logits(self.actor, rows)
        found = logprobs(logits, response(rows), self.temperature)
        return (found,) if values is None else (found, values)

    def reference(self, rows: Rows) -> tuple[torch.Tensor, ...]:
        """(log-probabilities [samples, tokens],)."""
        model = self.ref or self.actor
        with models.without_adapters(model.actor if isinstance(model, models.Tied) else model):
            return (logprobs(self.logits(model, rows)[0], response(rows), self.temperature),)

    def values(self, rows: Rows) -> tuple[torch.Tensor, ...]:
        """(a separate critic's values [samples, tokens],)."""
        assert self.critic is not None
        self.critic.train(torch.is_grad_enabled())
        with models.computing(self.model, self.device):
            return (models.response_values(self.critic, rows),)


def response(rows: Rows) -> torch.Tensor:
    """[samples, answer]: the tokens of each response, from those of the whole sample."""
    if "response" in rows:
        return rows["response"]
    ahead = torch.arange(rows["mask"].shape[1], device=rows["start"].device)
    return rows["tokens"].gather(1, (rows["start"][:, None] + ahead).clamp(max=rows["tokens"].shape[1] - 1))
