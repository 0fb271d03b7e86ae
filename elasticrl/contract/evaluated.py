"""What an evaluation found: for who makes it, and for who reads it in a run's history."""

from collections.abc import Mapping
from dataclasses import field

from elasticrl.base.value import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """An answer to be looked at. Example: Sample(prompt="3141", answer="1413", score=1.0, parts={"correct": 1.0})"""

    prompt: str
    answer: str
    score: float
    parts: Mapping[str, float] = field(default_factory=dict)  # what each of several rewards said


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What is known of the weights after `step` steps.

    Example: Evaluated(step=20, figures={"score": 0.71, "pass@1": 0.6}, samples=(Sample(...),))
    """

    step: int
    figures: Mapping[str, float]
    samples: tuple[Sample, ...] = ()
