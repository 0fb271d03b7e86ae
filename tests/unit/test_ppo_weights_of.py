"""Which weights generated a sample: the ledger names them, and so a certificate does."""

import torch

from elasticrl.ppo.elastic import weights_of
from elasticrl.ppo.run import Buffer
from elasticrl.ppo.staleness import ON_TIME, Staleness

IDS = ["0/1.0", "0/1.1", "0/2.0", "0/2.1", "0/3.0", "0/3.1"]


def test_samples_are_of_the_weights_that_their_step_began_with() -> None:
    buffer = Buffer(step=12, ids={3: IDS}, rows={3: {"rollout_logprobs": torch.zeros(6)}})
    assert weights_of(buffer, 3, IDS[::2], step=12, part=2, staleness=ON_TIME) == {12: IDS[::2]}


def test_what_was_generated_ahead_is_of_the_weights_that_its_period_began_with() -> None:
    facts = {"ahead_behind": 4.0}
    buffer = Buffer(step=12, ids={3: IDS}, rows={3: {"rollout_logprobs": torch.zeros(6)}}, facts=facts)
    half, longer = Staleness(steps=1, share=0.5), Staleness(steps=5)
    assert weights_of(buffer, 3, IDS[::2], step=12, part=2, staleness=half) == {11: ["0/1.0"], 12: ["0/2.0", "0/3.0"]}
    assert weights_of(buffer, 3, IDS[::2], step=12, part=2, staleness=longer) == {10: IDS[::2]}


def test_samples_that_came_with_the_data_are_of_nobody() -> None:
    buffer = Buffer(step=12, ids={3: IDS}, rows={3: {"chosen": torch.zeros(6)}})
    assert weights_of(buffer, 3, IDS, step=12, part=1, staleness=ON_TIME) == {None: IDS}
