"""Worker processes for tests: forked from a server that has imported torch once, so that each costs milliseconds.

`Workers(n)` runs n of them and a store. `run(function, ranks, ...)` calls a module-level function in each as
`function(rank, world, store, **kwargs)` and returns the results in rank order; a worker that dies meanwhile gives None.
"""

import multiprocessing
import os
import time
import traceback
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

from chaos.patience import patience

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

# One list for all tests: whoever is the first in a process starts the server. Of the programs it has what they import, as the
# server does not look below tests/.
PRELOAD = [
    "torch",
    "torch._dynamo",  # which FSDP2 imports at its first use
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "elasticrl.runtime.group",
    "elasticrl.runtime.replicated",
    "elasticrl.runtime.fsdp",
    "elasticrl.runtime.run",
    "elasticrl.runtime.checkpoint.ahead",
    "chaos.live.job",
    "elasticrl.ppo.__main__",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.llama.modeling_llama",
]


def _serve(pipe: Connection, port: int | None) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # With a GPU: all on one, which NCCL allows to those of different hosts.
    os.environ.update(NCCL_HOSTID=str(os.getpid()), NCCL_SOCKET_IFNAME="lo", CUBLAS_WORKSPACE_CONFIG=":4096:8")
    if port is None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipe.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        pipe.send(os.getpid())
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((True, function(*args, store, **kwargs)))
        except BaseException:  # noqa: BLE001 - reported to the test
            pipe.send((False, traceback.format_exc()))


class Workers:
    def __init__(self, count: int) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._all: list[tuple[BaseProcess, Connection]] = []
        self._port = None
        self._port = self._answer(self._start())
        self.pids = [self._answer(i) for i in [self._start() for _ in range(count)]]

    def run(self, function, world: int, *, timeout_s: float = 60.0, answers=None, **kwargs) -> list:
        """Worker i is rank i. Waits for all of them, or for those in `answers` only: a frozen one never does, and what the
        others have to say of a peer's death is their own affair, whether it comes before or after.
        """
        chosen = list(range(world))
        for rank, worker in enumerate(chosen):
            self._all[1 + worker][1].send((function, (rank, world), kwargs))
        deadline = time.monotonic() + patience(timeout_s)
        found: dict[int, object] = {}
        awaited = set(chosen if answers is None else answers)
        while not awaited <= found.keys():
            pending = {1 + rank: rank for rank in chosen if rank not in found}
            sources = {
                source: index for index in pending for source in (self._all[index][1], self._all[index][0].sentinel)
            }
            ready = wait(list(sources), timeout=max(0.0, deadline - time.monotonic()))
            assert ready, f"ranks {sorted(pending.values())} have not answered within {timeout_s} s"
            for index in {sources[source] for source in ready}:
                found[pending[index]] = self._result(index, must_be_good=pending[index] in awaited)
        return [found.get(rank) for rank in chosen]

    def replace(self, worker: int) -> None:
        """A new process in the place of a dead one."""
        self._all[1 + worker][0].join(10)
        fresh = self._start()
        self._all[1 + worker] = self._all.pop(fresh)
        self.pids[worker] = self._answer(1 + worker)

    def close(self) -> None:
        for process, pipe in self._all:
            pipe.close()
            process.kill()
            process.join(10)

    def _start(self) -> int:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self._port), daemon=True)
        process.start()
        theirs.close()
        self._all.append((process, ours))
        return len(self._all) - 1

    def _answer(self, index: int):
        assert self._all[index][1].poll(120), "a worker did not start within 120 s"
        return self._all[index][1].recv()

    def _result(self, index: int, *, must_be_good: bool):
        pipe = self._all[index][1]
        try:
            good, value = pipe.recv() if pipe.poll() else (True, None)
        except EOFError:
            return None
        assert good or not must_be_good, f"worker {index - 1} failed:\n{value}"
        return value if good else None
