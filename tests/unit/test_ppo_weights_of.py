"""Which weights generated a sample: the ledger names them, and so a certificate does."""

import torch

from elasticrl.ppo.elastic import weights_of
from elasticrl.ppo.run import Buffer

IDS = ["0/1.0", "0/1.1", "0/2.0", "0/2.1", "0/3.0", "0/3.1"]


def test_samples_are_of_the_weights_that_their_step_began_with() -> None:
    buffer = Buffer(step=12, ids={3: IDS}, rows={3: {"rollout_logprobs": torch.zeros(6)}})
    assert weights_of(buffer, 3, IDS[::2], step=12, group=2) == {12: IDS[::2]}


def test_half_of_the_groups_were_generated_ahead_by_the_weights_before() -> None:
    facts = {"ahead_behind": 4.0}
    buffer = Buffer(step=12, ids={3: IDS}, rows={3: {"rollout_logprobs": torch.zeros(6)}}, facts=facts)
    assert weights_of(buffer, 3, IDS[::2], step=12, group=2) == {11: ["0/1.0"], 12: ["0/2.0", "0/3.0"]}


def test_samples_that_came_with_the_data_are_of_nobody() -> None:
    buffer = Buffer(step=12, ids={3: IDS}, rows={3: {"chosen": torch.zeros(6)}})
    assert weights_of(buffer, 3, IDS, step=12, group=1) == {None: IDS}
