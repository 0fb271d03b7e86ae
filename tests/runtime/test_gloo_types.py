"""What gloo of this torch carries: every type of a tensor that a model may have, through every collective that we rely on.

The idea: the two ranks are two threads, each with a group object of its own, so the whole table takes a second.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
WITHIN = timedelta(seconds=20)
Call = Callable[[dist.ProcessGroup, int, torch.dtype], bool]


def values(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(1, 9) + 8 * rank).to(dtype)


def all_gather(group: dist.ProcessGroup, rank: int, dtype: torch.dtype) -> bool:
    out = [torch.zeros(8, dtype=dtype) for _ in range(2)]
    group.allgather([out], [values(rank, dtype)]).wait(WITHIN)
    return all(torch.equal(part, values(r, dtype)) for r, part in enumerate(out))


def all_to_all(group: dist.ProcessGroup, rank: int, dtype: torch.dtype) -> bool:
    out = torch.zeros(8, dtype=dtype)
    group.alltoall_base(out, values(rank, dtype), [4, 4], [4, 4]).wait(WITHIN)
    return torch.equal(out, torch.cat([values(r, dtype)[4 * rank : 4 * rank + 4] for r in range(2)]))


def broadcast(group: dist.ProcessGroup, rank: int, dtype: torch.dtype) -> bool:
    row = values(rank, dtype)
    options = dist.BroadcastOptions()
    options.rootRank = 1
    group.broadcast([row], options).wait(WITHIN)
    return torch.equal(row, values(1, dtype))


def all_reduce(group: dist.ProcessGroup, rank: int, dtype: torch.dtype) -> bool:
    row = values(rank, dtype)
    group.allreduce([row]).wait(WITHIN)
    return torch.equal(row, values(0, dtype) + values(1, dtype))  # small whole numbers: exact in every type


CALLS: dict[str, Call] = {f.__name__: f for f in (all_gather, all_to_all, broadcast, all_reduce)}


@pytest.fixture(scope="module")
def groups() -> list[dist.ProcessGroup]:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, WITHIN), range(2)))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_gloo_carries_every_type_through_every_collective(
    groups: list[dist.ProcessGroup], name: str, dtype: torch.dtype
) -> None:
    with ThreadPoolExecutor(2) as pool:
        arrived = list(pool.map(lambda rank: CALLS[name](groups[rank], rank, dtype), range(2)))
    assert arrived == [True, True]
