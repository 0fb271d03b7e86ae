"""Which weights generated a sample: the ledger names them, and so a certificate does."""

import torch

from elasticrl.ppo.elastic import weights_of
from elasticrl.ppo.run import Buffer

IDS = ["0/1.0", "0/1.1", "0/2.0", "0/2.1", "0/3.0", "0/3.1"]


def test_samples_are_of_the_weights_that_were_written_down_with_them() -> None:
    rows = {"rollout_logprobs": torch.zeros(6), "by": torch.tensor([11, 11, 12, 12, 12, 12], dtype=torch.int32)}
    buffer = Buffer(step=12, ids={3: IDS}, rows={3: rows})
    assert weights_of(buffer, 3, IDS[::2]) == {11: ["0/1.0"], 12: ["0/2.0", "0/3.0"]}
    assert weights_of(buffer, 3, IDS[:2]) == {11: IDS[:2]}


def test_samples_that_came_with_the_data_are_of_nobody() -> None:
    buffer = Buffer(step=12, ids={3: IDS}, rows={3: {"chosen": torch.zeros(6)}})
    assert weights_of(buffer, 3, IDS) == {None: IDS}
