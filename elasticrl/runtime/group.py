"""The process group of one generation, which can be left at any moment, whatever a peer does.

The idea: every wait for a gloo collective is a loop of short waits (`Work.wait` with a timeout leaves the work as it was), and
between two of them a flag is looked at that any thread may set (`interrupt`). A wait that is given up is `Interrupted`; its
work, with the tensors that a late peer might still write to, is kept aside until gloo lets go of it, so whoever was interrupted
must go on with fresh buffers.

With NCCL it is the GPU's stream that waits, and the host runs ahead. A kernel that waits for a dead peer looks at no flag: the
communicator is aborted, and then such a kernel simply ends, with garbage for a result and no error. So nothing that came
from a collective is read on the host before `settle`: it waits for the stream in short looks at the flag, and what it lets
through was computed by collectives that nobody had aborted.

    gang = form(generation=14, rank=0, world=2, store=store)   # the default group, for everything in torch
    gang.interrupt("n03/1 died (lease)")                       # from a watcher's thread
    gang.leave()                                               # in place; then form() the next one

Long because gloo and NCCL wait in two ways, which stand beside each other.
"""

# ruff: noqa: SLF001 - a group of our own needs names that torch keeps private; test_group notices when they change
from __future__ import annotations

import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from functools import partialmethod
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as c10d

from elasticrl.runtime.interrupt import SLICE, Asking, Broken, GangError, Interrupt, Interrupted, bounded
from elasticrl.runtime.traffic import tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

LOOK_S = 0.0001  # between two looks at a GPU's stream
REST_S = 10.0  # for a GPU to come to rest once its communicator was aborted
BACKENDS = {"elastic": "elastic", "nccl": "elastic_nccl"}  # a gang's, and what torch calls it
# Works that must be waited for as a whole: a timed-out wait for a message closes its connection, and gloo's reduce-scatter is
# an all-reduce and a copy, both of which happen inside wait().
UNSLICED = frozenset([
    "send", "recv", "recv_anysource", "reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced",
])  # fmt: skip
GLOO_GAVE_UP = "Timed out"  # in what it raises when the group's own timeout has passed
NCCL_FAILED = "NCCL Error"  # in what is raised by those of torch's calls that do not raise DistBackendError
GLOO_SAYS_NOT_YET = "Operation timed out!"  # what Work.wait(timeout) raises while the work goes on undisturbed


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """The newest collective of a rank, for its beat. Of two ranks the one with the lower number holds the other up; the same
    number with another `op` means that they have parted ways.

    Example: Collective(number=88412, op="allreduce", waiting=True)
    """

    number: int
    op: str
    waiting: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """One generation, as seen by one of its ranks. Its group is torch's default group.

    Example: Gang(generation=14, rank=0, world=2, backend="elastic", flag=Interrupt())
    """

    generation: int
    rank: int
    world: int
    backend: str
    flag: Interrupt

    @property
    def group(self) -> dist.ProcessGroup:
        """The group, for those who want it handed to them."""
        return c10d._get_default_group()

    @property
    def collective(self) -> Collective | None:
        """What this rank is at; None where the backend is not ours to ask."""
        group = dist.group.WORLD
        return group.collective if isinstance(group, ElasticGroup) else None

    def interrupt(self, reason: str) -> None:
        """Ends this rank's collectives, now and from now on, with Interrupted. From any thread, any number of times."""
        self.flag.set(reason)
        for group in list(c10d._world.pg_map):  # a team's as well
            if isinstance(group, StreamGroup):
                group.abort()  # a kernel that waits on the GPU looks at no flag

    def leave(self) -> None:
        """Destroys the group at once, stuck or not: the peers' waits end when its sockets close. Where there was a GPU in it,
        none of its kernels runs on afterwards.
        """
        if dist.is_initialized():
            dist.destroy_process_group()
        self.flag.set(f"generation {self.generation} was left")
        if self.backend == "nccl":
            _rest(REST_S)


def form(
    *, generation: int, rank: int, world: int, store: Store, backend: Literal["elastic", "nccl"] = "elastic",
    form_s: float = 30.0, timeout_s: float = 1800.0, flag: Interrupt | None = None,
) -> Gang:  # fmt: skip
    """Joins a generation's group and makes it torch's default group.

    The store must outlive the workers (a daemon's or the plan's), since rank 0 may be the one that dies. Pass `flag` to be
    able to interrupt the forming too: a peer of the plan may die before it gets here.
    """
    global _live  # noqa: PLW0603 - torch's default group is one per process, and so is this
    assert not dist.is_initialized(), "leave() the old generation before forming the next"
    gang = Gang(generation=generation, rank=rank, world=world, backend=backend, flag=flag or Interrupt())
    _live = gang.flag
    doing = f"forming generation {generation} ({world} ranks)"
    gang.flag.check(doing)
    asking = Asking(store, gang.flag, timedelta(seconds=form_s))
    _asking.append(asking)  # torch keeps only the C++ half of a store written in Python
    # torch numbers its groups, the number is part of the keys in the store, and forming that fails uses one up: who has tried
    # once more than the others would wait for them under another key.
    c10d._world.group_count = 0
    try:
        prefixed, limit = c10d.PrefixStore(f"g{generation}/", asking), timedelta(seconds=form_s)
        dist.init_process_group(BACKENDS[backend], store=prefixed, rank=rank, world_size=world, timeout=limit)
    except GangError:
        raise
    except (RuntimeError, ValueError, TimeoutError) as error:  # torch's and gloo's own are RuntimeErrors
        raise Broken(f"{doing} failed after at most {form_s:g} s: {error}") from error
    gang.group.set_timeout(timedelta(seconds=timeout_s))
    return gang


_live = Interrupt()
_asking: deque[Asking] = deque(maxlen=2)


class Wait(dist.Work):
    """A gloo work whose wait can be interrupted. `land` brings what came to where it was asked for."""

    def __init__(
        self, inner: dist.Work, op: str, doing: str, flag: Interrupt, *, sliced: bool, land: Callable[[], None] = lambda: None
    ) -> None:  # fmt: skip
        super().__init__()
        self._land = land
        self._inner, self._op, self._doing, self._flag, self._sliced = inner, op, doing, flag, sliced
        self._over = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True when done. Without a timeout, gloo's own (the group's) ends it."""
        begun = time.perf_counter()
        try:
            return self._wait(timeout)
        finally:
            self._flag.meter.waited(self._op, time.perf_counter() - begun)

    def _wait(self, timeout: timedelta | None) -> bool:
        deadline = time.monotonic() + timeout.total_seconds() if timeout else None
        late = False
        while True:
            try:
                self._over = (
                    self._inner.wait(SLICE) if self._sliced else bounded(self._inner.wait, self._doing, self._flag)
                )
            except RuntimeError as error:
                # When we leave, the others' connections break: then our decision is the cause, not what gloo says of it.
                self._flag.check(self._doing)
                if GLOO_SAYS_NOT_YET not in str(error):
                    self._flag.meter.timeouts += GLOO_GAVE_UP in str(error)
                    self._flag.set(f"a peer broke {self._doing}")  # no use in waiting for this generation's other works
                    raise Broken(f"{self._doing} was broken by a peer: {error}") from error
            else:
                if late:
                    self._flag.on_wait(None)
                if self._over:
                    self._land()
                    self._land = lambda: None
                    self._flag.on_done()
                return self._over
            if not late:
                late = True
                self._flag.on_wait(self._doing)
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self._doing} is still going on after {timeout}")

    @property
    def waiting(self) -> str | None:
        """What a GPU waits for, where it is a GPU that does."""
        return None

    def is_completed(self) -> bool:
        """As torch's; but some works only notice that they are when they are waited for."""
        return self._over or (self._sliced and self._inner.is_completed())

    def is_success(self) -> bool:
        """What the inner work says."""
        return self._inner.is_success()

    def exception(self) -> Any:
        """What the inner work has raised, if it has."""
        return self._inner.exception()

    def get_future(self) -> torch.futures.Future[Any]:
        """The inner work's. Waiting for it cannot be interrupted."""
        return self._inner.get_future()

    def result(self) -> list[torch.Tensor]:
        """The tensors of the inner work."""
        return self._inner.result()

    def synchronize(self) -> None:
        """Waits, and can be interrupted."""
        self.wait()


class Alone(Wait):
    """A collective of one: done before anybody waits for it."""

    def __init__(self, op: str, doing: str, flag: Interrupt) -> None:
        super().__init__(None, op, doing, flag, sliced=True)  # type: ignore[arg-type] # and never looked at
        self._over = True

    def _wait(self, timeout: timedelta | None) -> bool:  # noqa: ARG002 - as torch's
        self._flag.check(self._doing)
        return True

    def is_success(self) -> bool:
        """Always: nobody else was asked."""
        return True

    def exception(self) -> Any:
        """Never one."""
        return None

    def get_future(self) -> torch.futures.Future[Any]:
        """One that is done."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([])
        return future

    def result(self) -> list[torch.Tensor]:
        """No tensors of its own: the caller's are the result."""
        return []


class StreamWait(Wait):
    """An NCCL work: the stream waits for it, and the host does not."""

    def __init__(self, inner: dist.Work | None, op: str, doing: str, flag: Interrupt, ready: Any) -> None:
        super().__init__(inner, op, doing, flag, sliced=True)  # type: ignore[arg-type] # and looked at before it is used
        self._ready = ready
        # torch gives no work for a collective that is not asynchronous: the present stream is the one it runs on.
        self._done = _event() if inner is None else None

    @property
    def waiting(self) -> str | None:
        """What the GPU waits for: everything that this rank brings to it is computed, and it is not done."""
        return self._doing if self._ready.query() and not self.is_completed() else None

    def _wait(self, timeout: timedelta | None) -> bool:  # noqa: ARG002 - the stream has no deadline; `settle` has the flag
        self._flag.check(self._doing)
        try:
            if self._inner is not None:
                self._inner.wait()
        except dist.DistBackendError as error:
            self._flag.check(self._doing)
            self._flag.set(f"a peer broke {self._doing}")
            raise Broken(f"{self._doing} was broken by a peer: {error}") from error
        return True

    def is_completed(self) -> bool:
        """Whether the stream has got through it. The host has not waited."""
        return bool(self._done.query() if self._done is not None else self._inner.is_completed())


class ElasticGroup(dist.ProcessGroup):
    """Gloo behind interruptible waits; c10d, FSDP2, DTensor and DCP use it like any other group.

    A gang of one has no gloo until it needs one: gloo's thread wakes a hundred times a second for as long as it lives, which
    was a third of what a daemon costs a worker that shares its processor with all else.
    """

    _lazy = True

    def __init__(self, store: Store, rank: int, size: int, limit: timedelta, flag: Interrupt, *, at: str = "") -> None:
        super().__init__(rank, size)  # type: ignore[call-arg] # the stubs know only one of its constructors
        self._flag = flag
        self._pending: list[Wait] = []
        self._number, self._op = 0, "none"
        self._name = self._desc = ""
        self._at = at  # which of this machine's addresses gloo takes; "": as GLOO_SOCKET_IFNAME or its name has it
        self._limit, self._left = limit, False
        self._later: Callable[[], dist.ProcessGroup] = lambda: self._connect(store, rank, size, self._limit)
        self._inner: dist.ProcessGroup | None = None if self._lazy and size == 1 else self._later()

    def _connect(self, store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
        return bounded(lambda: _gloo(store, rank, size, timeout, self._at), "connecting", self._flag)

    @property
    def collective(self) -> Collective:
        """What this rank is at."""
        waiting = any(not work.is_completed() for work in self._pending)
        return Collective(number=self._number, op=self._op, waiting=waiting)

    def _run(self, op: str, *args: Any, **options: Any) -> Wait:
        self._flag.check(op)
        assert not self._left, f"{op} on a group that was left"
        self._pending = [work for work in self._pending if not work.is_completed()]
        self._number, self._op = self._number + 1, op
        doing = f"{op} {self._number} of rank {self.rank()}"
        if self._inner is None and op in ALONE:
            self._flag.meter.begun(op, args, rank=self.rank(), world=self.size())
            ALONE[op](args)
            return Alone(op, doing, self._flag)
        if self._inner is None:
            self._inner = self._later()
        wait = self._begin(self._inner, op, doing, args, options)
        self._flag.meter.begun(op, args, rank=self.rank(), world=self.size())
        self._pending.append(wait)
        return wait

    def _begin(self, inner: dist.ProcessGroup, op: str, doing: str, args: Any, options: Any) -> Wait:
        land, sent = _staged(op, args)
        work = getattr(inner, op)(*sent, **options)
        return Wait(work, op, doing, self._flag, sliced=op not in UNSLICED, land=land)

    def settle(self) -> None:
        """Until what was waited for is there, for the host to read. Here whoever waited has it."""

    def shutdown(self) -> None:
        """Lets go of gloo, so that the peers' waits end. Where it is stuck, a thread waits for it in our place."""
        held: list[Any] = [self._inner, *self._pending]
        clean = self._flag.reason is None and not self.collective.waiting
        self._pending, self._inner, self._left = [], None, True
        if not clean:
            # gloo's destructor joins its threads (without the GIL): 20 ms after a peer's death, and until the group's
            # timeout where one is stuck. Neither is worth waiting for.
            threading.Thread(target=held.clear, name="elasticrl-reaper", daemon=True).start()

    abort = shutdown

    def set_timeout(self, timeout: timedelta) -> None:
        """The limit of a collective that gloo or NCCL itself sets."""
        self._limit = timeout
        if self._inner is not None:
            self._inner.set_timeout(timeout)

    # torch asks a group for its names by these, in Python and, by the second spelling, from compiled code.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        """The name, for compiled code."""
        return self._name

    group_name = property(getGroupName)

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802
        """The description, for compiled code."""
        return self._desc

    group_desc = property(getGroupDesc)

    def getBackendName(self) -> str:  # noqa: N802
        """The backend, for compiled code."""
        return BACKENDS["elastic"]


class StreamGroup(ElasticGroup):
    """NCCL behind the same: the stream's waits, and `settle` for the host's. Tensors on the host go over a gloo of its own,
    made when the first of them comes.
    """

    _lazy = False  # who has a GPU has no such thread
    _nccl: Any = None  # torch's backend; None once it was told to end
    _host: ElasticGroup | None = None

    def _connect(self, store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
        # NCCL's own way to end a broken communicator is not asked for: kernels would end with garbage, and nobody told.
        # Nor are dumps: the watchdog would wait a minute for them, and holds up an abort while it does.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"
        os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "1"
        # A connection that is made when it is first needed would be waited for in the middle of a call, for a dead peer too.
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
        device = torch.device("cuda", torch.cuda.current_device())
        self._ending = threading.Lock()
        self._place = (c10d.PrefixStore("host/", store), rank, size)

        def connect() -> dist.ProcessGroup:
            torch.cuda.set_device(device)
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._nccl = nccl = c10d.ProcessGroupNCCL(store, rank, size, options)
            group = dist.ProcessGroup(store, rank, size)
            group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
            group._register_backend(device, dist.ProcessGroup.BackendType.NCCL, nccl)
            nccl.eager_connect_single_device(device)
            return group

        try:
            # NCCL's own meeting has no deadline, and only the store that it begins with knows of the flag.
            return bounded(connect, "connecting", self._flag, limit_s=timeout.total_seconds())
        except (GangError, TimeoutError):
            self.abort()
            raise

    def _begin(self, inner: dist.ProcessGroup, op: str, doing: str, args: Any, options: Any) -> Wait:
        tensors = tensors_of(args)
        if op == "barrier" or (tensors and not any(tensor.is_cuda for tensor in tensors)):
            if op == "barrier":  # NCCL's own blocks the host, and ends with an abort as if everybody had come
                self.settle()
            return self._on_host()._run(op, *args, **options)
        ready = _event()
        try:
            work = getattr(inner, op)(*args, **options)
        except RuntimeError as error:
            if not isinstance(error, dist.DistBackendError) and NCCL_FAILED not in str(error):
                raise
            raise self._broken(doing, error) from error
        return StreamWait(work, op, doing, self._flag, ready)

    def settle(self) -> None:
        """Until the GPU has computed what it was asked for so far. What is read then no aborted collective had a hand in."""
        event = _event()
        begun = time.perf_counter()
        looked = held = begun
        told, doing = False, f"the GPU of rank {self.rank()}"
        while not event.query():
            now = time.perf_counter()
            self._flag.check(doing)
            if now - looked > SLICE.total_seconds():
                looked = now
                if (failed := self._failed()) is not None:
                    raise self._broken(doing, failed)
                held_up = next((work.waiting for work in self._pending if not work.is_completed()), None)
                if held_up is not None and not told:
                    told, doing, held = True, held_up, now
                    self._flag.on_wait(doing)
                if told and now - held > self._limit.total_seconds():  # nobody in NCCL ends it
                    self._flag.meter.timeouts += 1
                    raise self._broken(doing, f"Timed out after {self._limit}")
            time.sleep(LOOK_S)  # between looks: a blocking wait would look at no flag
        self._flag.check(doing)
        if told:
            self._flag.on_wait(None)
        self._flag.on_done()
        self._flag.meter.waited(self._op, time.perf_counter() - begun)

    def _on_host(self) -> ElasticGroup:
        self._host = self._host or ElasticGroup(*self._place, self._limit, self._flag)
        return self._host

    def _failed(self) -> str | None:
        """What NCCL says is wrong. It never ends a kernel for it."""
        if (nccl := self._nccl) is None:
            return None
        said = nccl.get_error()
        return None if said == type(said).SUCCESS else str(said)

    def _broken(self, doing: str, error: object) -> GangError:
        """What to raise: our own decision, if there is one, is the cause of whatever NCCL says."""
        if self._flag.reason is not None:
            return Interrupted(f"{doing} was given up: {self._flag.reason}")
        self._flag.set(f"a peer broke {doing}")
        self.abort()
        return Broken(f"{doing} was broken by a peer: {error}")

    def abort(self) -> None:
        """Ends what waits on the GPU. From any thread, any number of times; returns at once."""
        if (nccl := self._take()) is not None:
            threading.Thread(target=nccl.abort, name="elasticrl-reaper", daemon=True).start()

    def shutdown(self) -> None:
        """Lets go of NCCL: at once after a fault; else when the peers have all that this rank sent them."""
        if self._flag.reason is None and (nccl := self._take()) is not None:
            ending = threading.Thread(target=nccl.shutdown, name="elasticrl-reaper", daemon=True)
            ending.start()
            ending.join(REST_S)
            if ending.is_alive():
                threading.Thread(target=nccl.abort, name="elasticrl-reaper", daemon=True).start()
        self.abort()
        if self._host is not None:
            self._host.shutdown()
        super().shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        """Of this group, and of the one on the host beside it."""
        super().set_timeout(timeout)
        if self._host is not None:
            self._host.set_timeout(timeout)

    def _take(self) -> Any:
        with self._ending:
            nccl, self._nccl = self._nccl, None
            return nccl


def _copied(args: Sequence[Any]) -> None:
    """What one rank gathers is what it gave."""
    args[0].view(-1).copy_(args[1].view(-1))


def _nothing(_args: Sequence[Any]) -> None:
    """Of one rank the sum is there already."""


# What a gang of one does by itself; anything else it asks a gloo for.
ALONE: Mapping[str, Callable[[Sequence[Any]], None]] = {
    "all_gather_single": _copied, "_allgather_base": _copied, "allreduce": _nothing, "broadcast": _nothing, "barrier": _nothing,
}  # fmt: skip

# What torch calls on a group, whatever its version: 2.13 renamed some (compiled code calls the old names still), and 2.14 added
# some. A release that has others is noticed by tests/runtime/test_group.py.
COLLECTIVES = [
    *sorted(UNSLICED), "allreduce", "allreduce_coalesced", "broadcast", "reduce", "gather", "gather_single",
    "gather_into_tensor", "scatter", "barrier", "allgather", "allgather_coalesced", "alltoall", "all_gather_single",
    "_allgather_base", "all_gather_single_coalesced", "allgather_into_tensor_coalesced", "all_to_all_single", "alltoall_base",
]  # fmt: skip


for _op in COLLECTIVES:
    setattr(ElasticGroup, _op, partialmethod(ElasticGroup._run, _op))


def _gloo(store: Store, rank: int, size: int, timeout: timedelta, host: str) -> dist.ProcessGroup:
    """A plain group over gloo, connected to every peer. Wrapped once more, since only a ProcessGroup has all collectives."""
    if host:
        options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined] # the stubs lack it
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timeout
        backend = c10d.ProcessGroupGloo(store, rank, size, options)
    else:
        backend = c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def settle(group: dist.ProcessGroup | None) -> None:
    """Until what came over this group can be read on the host."""
    if isinstance(group, ElasticGroup):
        group.settle()


def _staged(op: str, args: Sequence[Any]) -> tuple[Callable[[], None], Sequence[Any]]:
    """The same call with copies on the host of a GPU's tensors, and what brings them back: for an NCCL that does not work."""
    if not any(tensor.is_cuda for tensor in tensors_of(args)):
        return (lambda: None), args

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.cpu()
        return [copied(item) for item in value] if isinstance(value, list | tuple) else value

    sent = [copied(value) for value in args]

    def land() -> None:
        for there, here in zip(tensors_of(sent[0]), tensors_of(args[0]), strict=True):
            here.copy_(there)

    return (land if op != "send" else lambda: None), sent


def _event() -> Any:
    """A mark behind all that the GPU was asked for so far."""
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch has not annotated it
    event.record()
    return event


def _rest(limit_s: float) -> None:
    """Until this process's GPU has nothing to do any more."""
    device = torch.cuda.current_device()  # a thread has one of its own
    rest = threading.Thread(target=torch.cuda.synchronize, args=(device,), name="elasticrl-rest", daemon=True)
    rest.start()
    rest.join(limit_s)
    if rest.is_alive():
        raise RuntimeError(
            f"The GPU is still busy {limit_s:g} s after its communicator was aborted: this process cannot train on, and a "
            "fresh one takes its place. If it happens again, look for the GPU's errors in the kernel log (`elasticrl doctor`)."
        )


def _maker(kind: type[ElasticGroup]) -> Callable[[Store, int, int, timedelta], ElasticGroup]:
    return lambda store, rank, size, timeout: kind(store, rank, size, timeout, _live)


dist.Backend.register_backend(BACKENDS["elastic"], _maker(ElasticGroup), devices=["cpu", "cuda"])
dist.Backend.register_backend(BACKENDS["nccl"], _maker(StreamGroup), devices=["cuda"])
