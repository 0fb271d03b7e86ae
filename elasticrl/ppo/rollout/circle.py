"""A circle: the writer of the weights and its engines in one group, over NCCL or gloo, in which one sends and all receive.

The idea: it is faster, and never needed. A group breaks as a whole when one of its engines dies or its network lets nothing
through; then each engine gets the set over the connection that it has anyway (`feeder`). Over that connection, which is signed,
came the page with the checksums too, so what came through a circle is checked as what came piece by piece.

Who forms it is told where its store is, its rank, and how long each wait may take. Rank 0 writes.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from elasticrl.base.address import join, split
from elasticrl.base.listening import listening
from elasticrl.ppo.rollout.weights import PIECE, Torn
from elasticrl.runtime.group import ElasticGroup, StreamGroup
from elasticrl.runtime.interrupt import Asking, GangError, Interrupt, reach

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from elasticrl.ppo.rollout.weights import Incoming

Transport = Literal["nccl", "gloo"]

PROBE: Final = 1 << 20  # bytes by which a way is timed
#: What a circle's end may raise: our own decision, a peer's death, a deadline, a network that does not let it form.
FAILURES: Final = (GangError, RuntimeError, ValueError, TimeoutError, OSError)


class Circle:
    """One end of it. Its `flag`, set by any thread, ends whatever this end waits for."""

    def __init__(
        self, transport: Transport, store: Store, rank: int, world: int, *, host: str, within_s: float, flag: Interrupt
    ) -> None:
        self.transport, self.flag = transport, flag
        if transport == "nccl" and not torch.cuda.is_available():
            raise RuntimeError("there is no GPU here")
        self._device = torch.device("cuda", torch.cuda.current_device()) if transport == "nccl" else torch.device("cpu")
        limit = timedelta(seconds=within_s)
        self._store = Asking(store, flag, limit)  # torch keeps only the C++ half of a store written in Python
        if transport == "nccl":
            self._group: ElasticGroup = StreamGroup(self._store, rank, world, limit, flag)
        else:
            self._group = ElasticGroup(self._store, rank, world, limit, flag, at=host)

    def probe(self) -> float:
        """Seconds for `PROBE` bytes to all, and a word back from each. All ends call it."""
        for _ in range(2):  # the first one makes the connections
            start = time.perf_counter()
            self._broadcast(torch.zeros(PROBE, dtype=torch.uint8, device=self._device))
            word = torch.zeros(1, device=self._device)
            self._group.allreduce([word], dist.AllreduceOptions()).wait()
            self._group.settle()
        return time.perf_counter() - start

    def give(self, pieces: Iterable[bytes]) -> None:
        """The writer's end. Each but the last has PIECE bytes."""
        for piece in pieces:
            self._broadcast(torch.frombuffer(bytearray(piece), dtype=torch.uint8).to(self._device))

    def take(self, nbytes: int) -> Iterator[memoryview]:
        """An engine's end, until so many have come. Each piece is gone with the next."""
        for at in range(0, nbytes, PIECE):
            buffer = torch.empty(min(PIECE, nbytes - at), dtype=torch.uint8, device=self._device)
            self._broadcast(buffer)
            yield buffer.cpu().numpy().data

    def leave(self) -> None:
        """From this end at once, whatever the others do."""
        self._group.shutdown()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([tensor], options).wait()
        self._group.settle()


class Guest:
    """An engine's end: a thread of its own that does one thing after the other, so that the engine goes on meanwhile."""

    def __init__(self, told: dict[str, Any], host: str) -> None:
        self._flag = Interrupt()
        self._pool = ThreadPoolExecutor(1, "circle")
        self._circle: Future[Circle] = self._pool.submit(self._form, told, host)
        self._taken: Future[None] | None = None

    def take(self, incoming: Incoming) -> None:
        """The set that is sent next."""
        self._taken = self._pool.submit(self._take, incoming)

    def done(self, within_s: float) -> None:
        """All of it was taken. Torn if not."""
        if self._taken is None:
            raise Torn("nothing was announced in this circle")
        try:
            self._taken.result(within_s)
        except (*FAILURES, FutureTimeout) as error:
            raise Torn(f"the circle broke: {str(error) or type(error).__name__}") from error

    def leave(self) -> None:
        """From any thread; returns at once."""
        self._flag.set("the engine left")
        self._pool.submit(self._leave)
        self._pool.shutdown(wait=False)

    def _form(self, told: dict[str, Any], host: str) -> Circle:
        at, port = split(told["store"])
        store = reach(at, port, self._flag, told["within_s"])
        circle = Circle(
            told["transport"], store, told["rank"], told["world"], host=host, within_s=told["within_s"], flag=self._flag
        )
        circle.probe()
        return circle

    def _take(self, incoming: Incoming) -> None:
        for piece in self._circle.result().take(incoming.nbytes):
            incoming.take(piece)

    def _leave(self) -> None:
        with suppress(*FAILURES):
            self._circle.result().leave()


def open_store(host: str) -> tuple[Store, str]:
    """For one circle to meet in: on this host's address, on a port nobody else has."""
    opened, port = listening(host, 64)
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=opened)
    return store, join(host, port)
