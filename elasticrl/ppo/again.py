"""What frozen models say of a lane, said once more on another node: the reference's log-probabilities, a reward model's scores.

The one idea: no replica's digest holds a frozen model, so a bit that flips in one shows only in what it says. What is compared
is what this step has kept, bit for bit. What is made again is made from the lane's samples, which the rank that has them lends.
"""

from __future__ import annotations

from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

from elasticrl.ppo.rewards import Answer, RewardModel, Weighted, parts_of, placed

if TYPE_CHECKING:
    from elasticrl.ppo.batches import Rows
    from elasticrl.ppo.trainer import Trainer
    from elasticrl.runtime.audited import Result

PART = "part_"  # of a row that has what one of several rewards said


def reference(trainer: Trainer) -> None:
    """The reference's log-probabilities of a lane, if it is their turn. Collective."""
    if trainer.roles.judge is None and not trainer.run.lockstep:
        trainer.run.twice(
            "reference's log-probabilities", lambda lane: partial(_of_reference, trainer, lane), lends=True
        )


def reward(trainer: Trainer) -> None:
    """A reward model's scores of a lane, if it is their turn. Collective."""
    if trainer.scorer is None or trainer.turns:
        return
    for name, part in parts_of(trainer.scorer).items():
        if isinstance(part, RewardModel) and part.judge is None and not part.collective:
            kept = f"{PART}{name}" if isinstance(trainer.scorer, Weighted) else "scores"
            trainer.run.twice("reward model's scores", partial(_scores, trainer, part, kept), lends=True)


def _of_reference(trainer: Trainer, lane: int, *, again: bool) -> str:
    rows = trainer.run.buffer.rows.get(lane, {})
    return _bits(trainer.asked_of_reference(lane) if again else rows["ref_logprobs"])


def _scores(trainer: Trainer, model: RewardModel, row: str, lane: int) -> Result:
    return partial(_of_reward, trainer, model, row, lane)


def _of_reward(trainer: Trainer, model: RewardModel, row: str, lane: int, *, again: bool) -> str:
    rows = trainer.run.buffer.rows.get(lane, {})
    return _bits(_scored(model, row, rows) if again else rows[row])


def _scored(model: RewardModel, row: str, rows: Rows) -> torch.Tensor:
    """As the trainer keeps it. The model sees tokens alone."""
    answers = [
        Answer(id=str(i), prompt="", response="", pieces=(), tokens=tuple(tokens[there].tolist()), ended=True)
        for i, (tokens, there) in enumerate(zip(rows["tokens"], rows["attention"], strict=True))
    ]
    scores = model.score(answers)
    return placed(scores, rows["mask"]) if row == "scores" else torch.tensor(scores)


def _bits(values: torch.Tensor) -> str:
    """The digest of all of its bits."""
    return blake2b(values.contiguous().cpu().numpy().tobytes(), digest_size=8).hexdigest()
