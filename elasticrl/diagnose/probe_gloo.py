"""The part of the probe that computes: pairs over gloo, in a process of its own. `probe` starts it and asks.

Its first line of input is the task, which it answers with "ready"; each further one is a time and a partner, answered with
"ok", "late" (the partner did not come in that time), or what happened.
"""

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any, Final

import torch
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as c10d

from elasticrl.diagnose.probe import EVERY_S, LATE, Task, ask_key, resolve, task_of

NUMBERS: Final = 1 << 18  # float32 in the collectives: 1 MiB
#: What a fallback to gloo has to carry (`comm.fallback`).
DTYPES: Final = ("float32", "bfloat16", "float16", "int64")


def collectives(task: Task, peer: str, within_s: float) -> str:
    """All-reduce and all-to-all between the two over gloo, on CPU tensors, with the right result: "ok", or what happened."""
    rank, owner = int(task.me > peer), min(task.me, peer)
    prefix = f"{task.token}/{min(task.me, peer)}/{max(task.me, peer)}"
    try:
        # A partner that is still importing, or has no time left, is not gloo's fault.
        meeting = Keys(task, owner, within_s)
        meeting.set(f"{prefix}/here/{rank}", "1")
        meeting.get(f"{prefix}/here/{1 - rank}")
    except OSError:
        return LATE
    store = Keys(task, owner, task.gloo_s)
    host = resolve(task.nodes[task.me])[1][0]
    options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001 - the only way to name the interface
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]  # noqa: SLF001
    options._timeout = timedelta(seconds=task.gloo_s)  # noqa: SLF001
    doing = "connect"
    try:
        group: Any = c10d.ProcessGroupGloo(c10d.PrefixStore(prefix, store), rank, 2, options)
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
        """As torch's."""
        self._ask(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """As torch's: waits for the key, until the deadline."""
        while (value := self._ask(key, None)) is None:
            if time.monotonic() > self._deadline:
                raise TimeoutError(f"{key} did not appear in time")
            time.sleep(EVERY_S)
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002 - the deadline of the whole counts
        """As torch's."""
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        """As torch's."""
        return all(self._ask(key, None) is not None for key in keys)


def main() -> None:
    """Answer until nobody asks any more."""
    task = task_of(json.loads(sys.stdin.readline()))
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        seconds, _, peer = line.strip().partition(" ")
        print(collectives(task, peer, float(seconds)), flush=True)
    os._exit(0)  # a thread that gloo holds would keep the process


if __name__ == "__main__":
    main()
