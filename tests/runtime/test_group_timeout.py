"""The group's timeout is the configuration's, not that of its forming: elsewhere such a key was read and reached nothing."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Event

import pytest
import torch
import torch.distributed as dist

from elasticrl.runtime.group import Broken, ElasticGroup, Interrupt, _bounded


def test_a_collective_that_a_rank_never_enters_ends_with_the_timeout_that_was_set_after_forming() -> None:
    store, forming = dist.HashStore(), timedelta(seconds=60)
    flag = Interrupt()
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: ElasticGroup(store, rank, 2, forming, (flag, Interrupt())[rank]), range(2)))
    groups[0].set_timeout(timedelta(seconds=1))
    begin = time.monotonic()
    with pytest.raises(Broken, match="Timed out"):
        groups[0].allreduce([torch.ones(1)]).wait()  # rank 1 never comes
    assert 0.9 < time.monotonic() - begin < 30.0
    assert flag.meter.timeouts == 1  # what `ppo.comm` counts


def test_what_may_block_for_ever_is_given_up_after_its_limit() -> None:
    """As NCCL's meeting does, whose own wait has no end."""
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"meeting was not done within 0\.1 s"):
        _bounded(Event().wait, "meeting", Interrupt(), limit_s=0.1)
    assert time.monotonic() - begin < 5.0
