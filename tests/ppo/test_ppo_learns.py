"""PPO learns: from random weights to answering right, in seconds."""

import pytest
from ppo_job import job, settings

from elasticrl.config.training import Kl
from elasticrl.ppo import tiny

LEARNS = {
    "batch": 128,
    "mini_batch": 32,
    "micro_tokens": 160,
    "epochs": 2,
    "lr": 4e-3,
    "critic_lr": 4e-3,
    "gamma": 0.05,  # each digit is scored for itself: what follows says nothing about it
    "clip_high": 0.5,
    "entropy_coef": 0.2,  # with less it settles for three digits of four
    "kl": Kl(coef=0.002),
}


@pytest.mark.slow  # tests/ppo/test_ppo_elastic.py has the same through six kills
def test_ppo_learns_to_reverse_four_digits(tmp_path):
    """Within 80 steps. Where this was written, seeds 0, 1 and 2 had 0.957, 0.929 and 0.914 as the mean of steps 75 to 79."""
    path = tiny.write(tmp_path, hidden=32, layers=2)
    trainer, _ = job(path, ppo=settings(**LEARNS), lanes=2, steps=80)
    rewards = []
    while len(rewards) < 80 and sum(rewards[-5:]) / 5 <= 0.9:
        rewards.append(trainer.step(len(rewards)).metrics["reward"])
    assert sum(rewards[:5]) / 5 < 0.2, "it knew before"
    assert sum(rewards[-5:]) / 5 > 0.9, rewards
