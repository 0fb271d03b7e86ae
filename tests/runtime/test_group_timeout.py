"""The group's timeout is the configuration's, not that of its forming: elsewhere such a key was read and reached nothing."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Event, Lock

import pytest
import torch
import torch.distributed as dist

from chaos.patience import patience
from elasticrl.runtime import group
from elasticrl.runtime.group import ElasticGroup, StreamGroup
from elasticrl.runtime.interrupt import Broken, Interrupt, Interrupted, bounded


def test_a_collective_that_a_rank_never_enters_ends_with_the_timeout_that_was_set_after_forming() -> None:
    store, forming = dist.HashStore(), timedelta(seconds=60)
    flag = Interrupt()
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: ElasticGroup(store, rank, 2, forming, (flag, Interrupt())[rank]), range(2)))
    groups[0].set_timeout(timedelta(seconds=1))
    begin = time.monotonic()
    with pytest.raises(Broken, match="Timed out"):
        groups[0].allreduce([torch.ones(1)]).wait()  # rank 1 never comes
    assert 0.9 < time.monotonic() - begin < patience(30.0)
    assert flag.meter.timeouts == 1  # what `ppo.comm` counts


def test_what_may_block_for_ever_is_given_up_after_its_limit() -> None:
    """As NCCL's meeting does, whose own wait has no end."""
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"meeting was not done within 0\.1 s"):
        bounded(Event().wait, "meeting", Interrupt(), limit_s=0.1)
    assert time.monotonic() - begin < patience(5.0)


class Card:
    """A GPU that stands in a collective for ever, as CUDA's event and NCCL's work show it."""

    waiting = "allreduce 7 of rank 0"

    def query(self) -> bool:
        return False

    is_completed = query


def on_card(monkeypatch: pytest.MonkeyPatch, flag: Interrupt) -> StreamGroup:
    monkeypatch.setattr(StreamGroup, "_connect", ElasticGroup._connect)
    monkeypatch.setattr(group, "_event", Card)
    found = StreamGroup(dist.HashStore(), 0, 1, timedelta(seconds=60), flag)
    found._limit, found._ending = timedelta(seconds=1), Lock()
    found._pending = [Card()]
    return found


def test_a_collective_that_stands_on_a_card_ends_with_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    flag, waits = Interrupt(), []
    flag.on_wait = waits.append
    begin = time.monotonic()
    with pytest.raises(Broken, match="allreduce 7 of rank 0 was broken by a peer: Timed out after 0:00:01"):
        on_card(monkeypatch, flag).settle()
    assert 0.9 < time.monotonic() - begin < patience(30.0)
    assert flag.meter.timeouts == 1
    assert waits == ["allreduce 7 of rank 0"]


def test_a_wait_for_a_card_ends_as_soon_as_the_gang_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    flag, entered = Interrupt(), Event()
    flag.on_wait = lambda _doing: entered.set()
    stuck = on_card(monkeypatch, flag)
    stuck._limit = timedelta(seconds=60)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stuck.settle)
        assert entered.wait(10.0)
        flag.set("the plan changed")
        with pytest.raises(Interrupted, match="the plan changed"):
            waiting.result(timeout=5.0)
    assert flag.meter.timeouts == 0
