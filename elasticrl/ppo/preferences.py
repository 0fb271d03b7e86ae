"""DPO and KTO as a step: given answers, a reference, an update. The same trainer, other stages and another loss.

The idea: an answer that was given is a sample that need not be generated. It lies in the buffer in the same rows, so blocks,
mini-batches, lanes and forward passes are those of PPO.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from elasticrl.ppo.losses import Sum
from elasticrl.ppo.preference import dpo_loss, kto_baseline, kto_loss, log_ratios
from elasticrl.ppo.report import passing
from elasticrl.ppo.rollout.inline import left_padded
from elasticrl.ppo.trainer import Trainer
from elasticrl.runtime.scalars import Tally

if TYPE_CHECKING:
    from elasticrl.config.training import Ppo
    from elasticrl.ppo import flow
    from elasticrl.ppo.batches import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """One answer of the data. For DPO the chosen and the rejected one of a pair follow each other.

    Example: Given(id="0/17+", prompt=(12, 3, 1, 13), answer=(1, 3, 11), good=True)
    """

    id: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    good: bool


class PreferenceTrainer(Trainer):
    """`answers(step, lane)` is the data's cursor; longer prompts and answers than `sizes` has have been left out by it."""

    ppo: Ppo

    def __init__(self, *args: Any, answers: Any, pad: int, **more: Any) -> None:
        super().__init__(*args, feed=lambda _step, _lane: [], **more)
        self.answers, self.pad = answers, pad
        self.losses = {"actor": self.dpo if self.ppo.algorithm == "dpo" else self.kto}

    def ref(self, stage: flow.Stage) -> None:
        """The answers of this step, and the reference's log-probabilities of them."""
        for lane in self.run.lanes:
            given: Sequence[Given] = self.answers(self.run.streams.step, lane)
            self.run.buffer.ids[lane] = [answer.id for answer in given]
            self.run.buffer.put(lane, good=torch.tensor([answer.good for answer in given]), **self._rows(given))
        super().ref(stage)
        if self.ppo.algorithm == "dpo":
            self._count()

    def baseline(self, _stage: flow.Stage) -> None:
        """KTO measures gains against how far policy and reference are apart on answers to *other* prompts: each answer under
        its neighbour's prompt, as the policy is before this step's first update.
        """
        swapped = {}
        for lane in self.run.lanes:
            given: Sequence[Given] = self.answers(self.run.streams.step, lane)
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
        self._count()

    def dpo(self, rows: Rows, entries: float, tally: Tally) -> torch.Tensor:
        """Rows 0 and 1 are a pair, and so on; a pair with padding in it is none."""
        ratios = self._ratios(rows)
        valid = rows["mask"].any(1)
        term = dpo_loss(ratios[::2], ratios[1::2], valid[::2] & valid[1::2], beta=self.ppo.preference_beta)
        return self._say(term.loss, term.right, entries, tally)

    def kto(self, rows: Rows, entries: float, tally: Tally) -> torch.Tensor:
        """Each answer for itself."""
        baseline = self.run.buffer.facts["baseline"]
        valid = rows["mask"].any(1)
        term = kto_loss(self._ratios(rows), rows["good"], valid, baseline, beta=self.ppo.preference_beta)
        return self._say(term.loss, term.right, entries, tally)

    def _ratios(self, rows: Rows) -> torch.Tensor:
        return log_ratios(self.roles.policy(rows)[0], rows["ref_logprobs"], rows["mask"])

    def _say(self, loss: Sum, right: Sum, entries: float, tally: Tally) -> torch.Tensor:
        tally.add(preference_loss=loss.total, right=right.total)
        return loss.over(entries)

    def _count(self) -> None:
        tallies = {lane: Tally() for lane in self.run.lanes}
        for lane, tally in tallies.items():
            self._tally_entries(lane, tally)
        self.run.buffer.facts |= passing(self.run.exchange(tallies))

    def _entries(self, mask: torch.Tensor) -> float:
        """Pairs, or answers."""
        return len(mask) / self.sizes.unit

    def _rows(self, given: Sequence[Given]) -> Rows:
        before, after = self.sizes.prompt, self.sizes.answer
        prompts, seen = left_padded([answer.prompt for answer in given], before, self.pad)
        tokens = torch.full((len(given), after), self.pad)
        mask = torch.zeros(len(given), after, dtype=torch.bool)
        for i, answer in enumerate(given):
            tokens[i, : len(answer.answer)] = torch.tensor(answer.answer)
            mask[i, : len(answer.answer)] = True
        return {"tokens": torch.cat([prompts, tokens], 1), "attention": torch.cat([seen, mask], 1), "mask": mask}
