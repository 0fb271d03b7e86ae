"""The part of the probe that computes: pairs over gloo, and over NCCL, in a process of its own. `probe` starts it and asks.

Its first line of input is the task, which it answers with "ready"; each further one is what carries (gloo, nccl), a time and a
partner, answered with "ok", "late" (the partner did not come in that time, or there is no card here), or what happened. Behind
NCCL's "ok" is the way that it chose, as it said itself.
"""

import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as c10d

from elasticrl.diagnose.probe import EVERY_S, LATE, Task, ask_key, resolve, task_of

NUMBERS: Final = 1 << 18  # float32 in the collectives: 1 MiB
#: What a fallback to gloo has to carry (`comm.fallback`).
DTYPES: Final = ("float32", "bfloat16", "float16", "int64")


#: What NCCL chose, in its own words: "Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0".
_WAY = re.compile(r"\bvia ((?:NET/\w+|P2P|SHM)\b)")


def collectives(task: Task, carrier: str, peer: str, within_s: float) -> str:
    """All-reduce and all-to-all between the two, with the right result: "ok", or what happened."""
    if carrier == "nccl" and not _card():
        return LATE  # which says nothing of the way: the partner hears nothing of us either
    rank, owner = int(task.me > peer), min(task.me, peer)
    prefix = f"{task.token}/{carrier}/{min(task.me, peer)}/{max(task.me, peer)}"
    try:
        # A partner that is still importing, or has no time left, is nobody's fault.
        meeting = Keys(task, owner, within_s)
        meeting.set(f"{prefix}/here/{rank}", "1")
        meeting.get(f"{prefix}/here/{1 - rank}")
    except OSError:
        return LATE
    keys = Keys(task, owner, task.gloo_s)  # held here: torch keeps only the C++ half of a store written in Python
    over = over_nccl if carrier == "nccl" else over_gloo
    return over(task, c10d.PrefixStore(prefix, keys), rank)


def _card() -> bool:
    """Whether there is a card here with room for the round."""
    try:
        return torch.cuda.is_available() and torch.zeros(8 * NUMBERS, device="cuda").numel() > 0
    except RuntimeError:  # torch.OutOfMemoryError is one: workers that wait hold it all
        return False


def over_gloo(task: Task, store: Store, rank: int) -> str:
    """On CPU tensors, of every type that a fallback has to carry."""
    host = resolve(task.nodes[task.me])[1][0]
    options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001 - the only way to name the interface
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]  # noqa: SLF001
    options._timeout = timedelta(seconds=task.gloo_s)  # noqa: SLF001
    doing = "connect"
    try:
        group: Any = c10d.ProcessGroupGloo(store, rank, 2, options)
        for name in DTYPES:
            doing = f"all_reduce of {name}"
            count = NUMBERS if name == "float32" else 64
            tensor = torch.full((count,), rank + 1, dtype=getattr(torch, name))
            group.allreduce([tensor]).wait(timedelta(seconds=task.gloo_s))
            if not bool((tensor == 3).all()):
                return f"{doing} gave a wrong result: data was damaged on the way"
        doing = "all_to_all"
        out, sent = torch.empty(2, NUMBERS // 2), torch.full((2, NUMBERS // 2), float(rank))
        group.alltoall_base(out, sent, [], [], c10d.AllToAllOptions()).wait(timedelta(seconds=task.gloo_s))
        if out[0, 0] != 0 or out[1, 0] != 1:
            return f"{doing} gave a wrong result: data was damaged on the way"
    except (RuntimeError, OSError) as error:  # gloo's own are RuntimeErrors
        return f"{doing}: {str(error).splitlines()[0][:200]}"
    return "ok"


def over_nccl(task: Task, store: Store, rank: int) -> str:
    """On the GPU, by a communicator of the two alone."""
    doing = "connect"
    file = _said()
    begin = file.stat().st_size if file.exists() else 0
    try:
        options: Any = c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=task.gloo_s)  # noqa: SLF001 - torch has no other name for it
        group: Any = c10d.ProcessGroupNCCL(store, rank, 2, options)
        tensor = torch.full((NUMBERS,), rank + 1.0, device="cuda")
        doing = "all_reduce"
        group.allreduce([tensor])
        torch.cuda.synchronize()
        if not bool((tensor == 3).all()):
            return f"{doing} gave a wrong result: data was damaged on the way"
        doing = "all_to_all"
        out, sent = (
            torch.empty(2, NUMBERS // 2, device="cuda"),
            torch.full((2, NUMBERS // 2), float(rank), device="cuda"),
        )
        group.alltoall_base(out, sent, [], [], c10d.AllToAllOptions())
        torch.cuda.synchronize()
        if out[0, 0] != 0 or out[1, 0] != 1:
            return f"{doing} gave a wrong result: data was damaged on the way"
    except (RuntimeError, OSError) as error:  # DistBackendError is one; NCCL's own reason is its last line
        lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith("Exception raised")]
        return f"{doing}: {lines[-1][:200] if lines else type(error).__name__}"
    group.abort()
    with file.open("rb") as said:
        said.seek(begin)
        ways = sorted(set(_WAY.findall(said.read().decode(errors="replace"))))
    return f"ok {'+'.join(ways)}".strip()


class Keys(Store):
    """The store in which two find each other: a dictionary of the first by name, asked over its port.

    Not a TCPStore: that asks the name server for each peer, and a network that is broken has none.
    """

    def __init__(self, task: Task, owner: str, within_s: float) -> None:
        super().__init__()
        self._task, self._owner = task, owner
        self._deadline = time.monotonic() + within_s

    def _ask(self, key: str, value: bytes | None) -> bytes | None:
        return ask_key(self._task, self._owner, key, value)

    def set(self, key: str, value: Any) -> None:
        """Writes at the owner of the store."""
        self._ask(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Waits for the key, until the deadline of the whole test."""
        while (value := self._ask(key, None)) is None:
            if time.monotonic() > self._deadline:
                raise TimeoutError(f"{key} did not appear in time")
            time.sleep(EVERY_S)
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002 - the deadline of the whole counts
        """Waits for each key in turn."""
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        """Whether the owner has all of them now."""
        return all(self._ask(key, None) is not None for key in keys)


@cache
def _said() -> Path:
    """What NCCL says of itself from its first communicator on: in a folder of ours alone, where nobody else writes or reads."""
    file = Path(tempfile.mkdtemp(prefix="elasticrl-probe-"), "nccl")
    os.environ["NCCL_DEBUG_FILE"] = str(file)
    return file


def quiet(env: Mapping[str, str], me: str) -> dict[str, str]:
    """What NCCL needs here: to say which way it chose, where nobody else reads; and not to wait for its own dumps."""
    return {
        "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,NET,P2P,SHM",
        "NCCL_HOSTID": env.get("NCCL_HOSTID", me), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1", "TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_FR_BUFFER_SIZE": "0",
    }  # fmt: skip


def main() -> None:
    """Answer until nobody asks any more."""
    task = task_of(json.loads(sys.stdin.readline()))
    torch.set_num_threads(1)
    os.environ.update(quiet(os.environ, task.me))
    print("ready", flush=True)
    for line in sys.stdin:
        carrier, seconds, peer = line.strip().split(" ", 2)
        print(collectives(task, carrier, peer, float(seconds)), flush=True)
    if _said.cache_info().currsize:
        shutil.rmtree(_said().parent, ignore_errors=True)
    os._exit(0)  # a thread that gloo holds would keep the process


if __name__ == "__main__":
    main()
