"""How the members of a team get what one of them has asked for: samples, scores, an environment's replies, log-probabilities.

The idea: each kind is a few words and its tensors, so nobody reads what another process made of a class.
"""

from __future__ import annotations

from typing import Final

import torch

from elasticrl.ppo.environments import EnvironmentFault
from elasticrl.ppo.rewards import RewardError, Scored
from elasticrl.ppo.rollout.calls import Outcome
from elasticrl.ppo.rollout.engine import EngineFailed, Samples, StaleWeights
from elasticrl.ppo.rollout.tape import plain, taped_of
from elasticrl.runtime.asked import Found, Kind

TENSORS: Final = ("tokens", "attention", "mask", "logprobs", "ended")  # of Samples


def _samples(found: dict[int, Samples]) -> Found:
    return Found(
        words=[[lane, list(its.ids), its.version] for lane, its in found.items()],
        tensors={f"{lane}.{name}": getattr(its, name) for lane, its in found.items() for name in TENSORS},
    )


def _read_samples(found: Found) -> dict[int, Samples]:
    return {
        lane: Samples(
            ids=tuple(ids), version=version, **{name: found.tensors[f"{lane}.{name}"] for name in TENSORS}
        )
        for lane, ids, version in found.words
    }  # fmt: skip


def _scores(found: dict[int, Scored]) -> Found:
    return Found(words=[[lane, its.scores, dict(its.parts)] for lane, its in found.items()])


def _read_scores(found: Found) -> dict[int, Scored]:
    return {lane: Scored(scores=scores, parts=parts) for lane, scores, parts in found.words}


def _verdicts(found: list[torch.Tensor]) -> Found:
    return Found(tensors={str(number): one for number, one in enumerate(found)})


def _outcomes(found: list[Outcome]) -> Found:
    return Found(words=[[its.troubles, its.taped and plain(its.taped)] for its in found])


def _read_outcomes(found: Found) -> list[Outcome]:
    return [Outcome(taped=taped and taped_of(taped), troubles=troubles) for troubles, taped in found.words]


FAILS: Final = (EngineFailed, StaleWeights, RewardError)
SAMPLES: Final = Kind(pack=_samples, unpack=_read_samples, fails=FAILS)
SCORES: Final = Kind(pack=_scores, unpack=_read_scores, fails=FAILS)
OUTCOMES: Final = Kind(pack=_outcomes, unpack=_read_outcomes, fails=(EnvironmentFault,))
VERDICTS: Final = Kind(pack=_verdicts, unpack=lambda found: list(found.tensors.values()), fails=FAILS)
