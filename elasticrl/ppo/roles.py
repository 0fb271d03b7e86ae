"""The models in their roles, and what each is asked: the policy's log-probabilities, the reference's, the critic's values.

The idea: a question is put to one block of rows and answered for its response tokens, so that who asks need not know how a
model is spread, in which type it computes, or whether the critic is a head of the actor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from elasticrl.ppo import models
from elasticrl.ppo.head import by_parts
from elasticrl.ppo.losses import entropies, logprobs, tempered, unevenness, with_entropy
from elasticrl.runtime.vocabulary import logits_apart

if TYPE_CHECKING:
    from torch import nn

    from elasticrl.config.training import Model
    from elasticrl.ppo.batches import Rows
    from elasticrl.ppo.rewards import Judge


class Said(NamedTuple):
    """What a policy says of response tokens, [samples, tokens] each; values if the model is tied.

    Example: Said(logprobs=tensor([[-0.31, ...]]), entropy=None, values=None)
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor | None  # where it was asked for
    values: torch.Tensor | None
    aux: torch.Tensor | None = None  # [], a mixture's auxiliary loss, where it was asked for


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
    most_logits: int = 0  # of a pass, or the head's answers are made by parts; 0: however many

    @property
    def tied(self) -> bool:
        """The critic is a head of the actor."""
        return isinstance(self.actor, models.Tied)

    def said(
        self,
        model: nn.Module,
        rows: Rows,
        *,
        entropy: bool = False,
        slopes: bool = False,
        counted: torch.Tensor | None = None,
    ) -> Said:
        """Of each response token. With `entropy` there are entropies, and with `slopes` these have a gradient. Where a team
        shares the head nobody has all logits: its members exchange what they come to. With `counted` [samples] there is the
        auxiliary loss of these samples.
        """
        entropy = entropy or slopes
        model.train(torch.is_grad_enabled())
        body = model.actor if isinstance(model, models.Tied) else model
        tokens = response(rows)
        with (
            models.computing(self.model, self.device),
            logits_apart(body) as head,
            models.routed(body, asked=counted is not None) as routers,
            by_parts(
                body,
                tokens,
                self.temperature,
                most=self.most_logits if head is None else 0,
                entropy=entropy,
                slopes=slopes,
            ) as made,
        ):
            logits, values = models.response_logits(model, rows)
        aux = None
        if counted is not None:
            seen = rows["attention"] & counted[:, None]
            aux = unevenness(routers, seen, each=models.experts_each(body.config))
        each: torch.Tensor | None
        if made:
            found, each = logits.unbind(-1)
            each = each if slopes else each.detach()
        elif head is not None:
            found, each = head.said(tempered(logits, self.temperature), tokens, entropy=entropy, slopes=slopes)
        elif entropy and not slopes:
            found, each = with_entropy(logits, tokens, self.temperature)
        else:
            found = logprobs(logits, tokens, self.temperature)
            each = entropies(logits, self.temperature) if slopes else None
        return Said(found, each if entropy else None, values, aux)

    def policy(self, rows: Rows) -> tuple[torch.Tensor, ...]:
        """(log-probabilities [samples, tokens],), with the values if they come in the same pass."""
        found = self.said(self.actor, rows)
        return (found.logprobs,) if found.values is None else (found.logprobs, found.values)

    def reference(self, rows: Rows) -> tuple[torch.Tensor, ...]:
        """(log-probabilities [samples, tokens],)."""
        model = self.ref or self.actor
        with models.without_adapters(model.actor if isinstance(model, models.Tied) else model):
            return (self.said(model, rows).logprobs,)

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
