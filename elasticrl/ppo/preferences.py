"""DPO, KTO and SFT as a step: given answers, a reference where there is one, an update. The same trainer, other stages and
another loss.

The idea: an answer that was given is a sample that need not be generated. It lies in the buffer in the same rows, so blocks,
mini-batches, lanes and forward passes are those of PPO.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from elasticrl.ppo.flow import compares
from elasticrl.ppo.losses import Entries, Sum, masked, summed
from elasticrl.ppo.preference import dpo_loss, kto_baseline, kto_loss, log_ratios
from elasticrl.ppo.report import passing
from elasticrl.ppo.rollout.inline import left_padded
from elasticrl.ppo.trainer import Trainer
from elasticrl.runtime.scalars import Tally

if TYPE_CHECKING:
    from elasticrl.config.training import Ppo
    from elasticrl.ppo import flow
    from elasticrl.ppo.batches import Rows
    from elasticrl.ppo.prompts import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """One answer of the data; `good` of the chosen one of a pair, which the rejected one follows, and of all for SFT.

    Example: Given(id="0/17+", prompt=(12, 3, 1, 13), answer=(1, 3, 11), good=True)
    """

    id: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    good: bool


class Nothing:
    """In place of prompts that are answered."""

    def __call__(self, step: int, lane: int) -> Sequence[tuple[str, Prompt]]:  # noqa: ARG002
        """None in any lane."""
        return ()

    def made_of(self, step: int) -> str:  # noqa: ARG002
        """Of nothing."""
        return ""


class PreferenceTrainer(Trainer):
    """`given(step, lane)` is the data's cursor; longer prompts and answers than `sizes` has have been left out by it.

    Long because it is a whole `Trainer`, with given answers in place of rollouts.
    """

    ppo: Ppo

    def __init__(self, *args: Any, given: Callable[[int, int], Sequence[Given]], pad: int, **more: Any) -> None:
        super().__init__(*args, feed=Nothing(), **more)
        self.given, self.pad = given, pad
        self.losses = {"actor": {"dpo": self.dpo, "kto": self.kto, "sft": self.sft}[self.ppo.algorithm]}

    def answers(self, _stage: flow.Stage) -> None:
        """The answers of this step."""
        tallies = {}
        for lane in self.run.lanes:
            given = self.given(self.run.streams.step, lane)
            self.run.buffer.ids[lane] = [answer.id for answer in given]
            self.run.buffer.put(lane, good=torch.tensor([answer.good for answer in given]), **self._rows(given))
            tallies[lane] = Tally()
            self._tally_entries(lane, tallies[lane])
        self.run.buffer.facts |= passing(self.run.exchange(tallies))

    def baseline(self, _stage: flow.Stage) -> None:
        """KTO measures gains against how far policy and reference are apart on answers to *other* prompts: each answer under
        its neighbour's prompt, as the policy is before this step's first update.
        """
        swapped = {}
        for lane in self.run.lanes:
            given = self.given(self.run.streams.step, lane)
            prompts = [answer.prompt for answer in given]
            turned = prompts[1:] + prompts[:1]
            swapped[lane] = self._rows([replace(g, prompt=other) for g, other in zip(given, turned, strict=True)])
        tallies: dict[int, Tally] = {}
        found = [
            self._forward_rows(self.run.lanes, swapped, role) for role in (self.roles.policy, self.roles.reference)
        ]
        for (lane, (policy, *_)), (_, (ref, *_)) in zip(*found, strict=True):
            tallies[lane] = Tally()
            tallies[lane].spread("apart", log_ratios(policy, ref, swapped[lane]["mask"]))
        self.run.buffer.facts["baseline"] = kto_baseline(self.run.exchange(tallies).moments["apart"].mean)

    def dpo(self, rows: Rows, entries: Entries, tally: Tally) -> torch.Tensor:
        """Rows 0 and 1 are a pair, and so on; a pair with padding in it is none."""
        ppo, mask = self.ppo, rows["mask"]
        ref = rows["ref_logprobs"] if compares(ppo) else torch.zeros(mask.shape, device=mask.device)
        said = self.said(rows, mask)
        ratios, lengths = log_ratios(said.logprobs, ref, mask), mask.sum(1)
        valid = (lengths > 0)[::2] & (lengths > 0)[1::2]
        term = dpo_loss(
            ratios[::2], ratios[1::2], valid, kind=ppo.preference_loss, beta=ppo.preference_beta, gamma=ppo.simpo_gamma,
            lengths=(lengths[::2], lengths[1::2]),
        )  # fmt: skip
        return self._say(term.loss, term.right, entries, tally) + self.evenly(said, mask, entries, tally)

    def kto(self, rows: Rows, entries: Entries, tally: Tally) -> torch.Tensor:
        """Each answer for itself."""
        ppo, baseline = self.ppo, self.run.buffer.facts["baseline"]
        said = self.said(rows, rows["mask"])
        ratios = log_ratios(said.logprobs, rows["ref_logprobs"], rows["mask"])
        term = kto_loss(
            ratios, rows["good"], rows["mask"].any(1), baseline,
            beta=ppo.preference_beta, weights=(ppo.desirable_weight, ppo.undesirable_weight),
        )  # fmt: skip
        return self._say(term.loss, term.right, entries, tally) + self.evenly(said, rows["mask"], entries, tally)

    def sft(self, rows: Rows, entries: Entries, tally: Tally) -> torch.Tensor:
        """How unlikely the policy finds the answers."""
        how, mask = self.ppo.loss_agg_mode, rows["mask"]
        said = self.said(rows, mask)
        unlikely = -said.logprobs
        tally.add(loss=masked(unlikely, mask).total)
        loss = summed(unlikely, mask, how).over(entries.of(how, most=self.sizes.answer))
        return loss + self.evenly(said, mask, entries, tally)

    def _say(self, loss: Sum, right: Sum, entries: Entries, tally: Tally) -> torch.Tensor:
        tally.add(preference_loss=loss.total, right=right.total)
        return loss.over(entries.tokens)

    def _count(self, mask: torch.Tensor) -> float:
        """Tokens; else pairs, or answers."""
        return super()._count(mask) if self.ppo.algorithm == "sft" else len(mask) / self.sizes.unit

    def _rows(self, given: Sequence[Given]) -> Rows:
        before, after = self.sizes.prompt, self.sizes.answer
        prompts, seen = left_padded([answer.prompt for answer in given], before, self.pad)
        tokens = torch.full((len(given), after), self.pad)
        mask = torch.zeros(len(given), after, dtype=torch.bool)
        for i, answer in enumerate(given):
            tokens[i, : len(answer.answer)] = torch.tensor(answer.answer)
            mask[i, : len(answer.answer)] = True
        return {"tokens": torch.cat([prompts, tokens], 1), "attention": torch.cat([seen, mask], 1), "mask": mask}
