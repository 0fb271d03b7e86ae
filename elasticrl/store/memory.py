"""An etcd in this process, for tests: the same revisions, transactions, leases and watches, on a clock of your choice.

The one idea: the server is a few dictionaries and a list of what happened at each revision; a watch is a cursor into that
list. So it can be down, lose answers or be compacted exactly when a test wants it, and the tests that run on a real etcd
run on it too.
"""

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import field, replace
from typing import Literal, Self

from elasticrl.base.value import dataclass
from elasticrl.store.protocol import (
    Absent,
    Batch,
    Compare,
    Delete,
    EndpointStatus,
    Entry,
    Event,
    Get,
    Lease,
    LeaseGone,
    Listing,
    Op,
    Put,
    Response,
    Status,
    StoreAmbiguous,
    StoreRefused,
    StoreUnavailable,
    TxnResult,
    Unchanged,
)

# As etcd's defaults.
MAX_OPS = 128
MAX_BYTES = 1536 * 1024
MIN_TTL_S = 2.0


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    until: float
    keys: set[str] = field(default_factory=set)


class MemoryServer:
    """What all `MemoryStore`s on it share. Its keys are whole ones, with the namespace.

    With a clock that is moved by hand, call `wake` after moving it: leases expire then, and watches see it.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.lose: Literal["answer", "request"] | None = None  # of the next transaction that writes; then None again
        self._down = False
        self._ids = itertools.count(7587)
        self._waiting: set[asyncio.Event] = set()
        self.revision = 1
        self.compacted = 0
        self.history: list[tuple[int, tuple[Event, ...]]] = []
        self._entries: dict[str, Entry] = {}
        self._leases: dict[int, _Lease] = {}
        self._now: list[Event] = []  # what the transaction in progress has done

    @property
    def down(self) -> bool:
        """Whether nobody can reach it. No lease expires meanwhile, and all begin anew afterwards, as after a failover."""
        return self._down

    @down.setter
    def down(self, down: bool) -> None:
        self.wake()
        self._down = down
        if not down:
            for lease in self._leases.values():
                lease.until = self.clock() + lease.ttl_s
        self.wake()

    def compact(self, revision: int) -> None:
        """Forget what happened before a revision."""
        if not self.compacted < revision <= self.revision:
            raise StoreRefused(f"revision {revision} is compacted already or still to come (now {self.revision})")
        self.compacted = revision
        self.wake()

    def wake(self) -> None:
        """End the leases whose time is over, and let all watches look."""
        now = self.clock()
        for number in [number for number, lease in self._leases.items() if lease.until <= now and not self._down]:
            self.end(number)
        for waiting in self._waiting:
            waiting.set()

    async def changed(self) -> None:
        """Wait until there may be something new, or a lease ends."""
        waiting = asyncio.Event()
        self._waiting.add(waiting)
        try:
            until = min((lease.until for lease in self._leases.values()), default=math.inf)
            async with asyncio.timeout(None if self._down or until == math.inf else max(0.0, until - self.clock())):
                await waiting.wait()
        except TimeoutError:
            self.wake()
        finally:
            self._waiting.discard(waiting)

    def read(self, scope: str) -> tuple[Entry, ...]:
        """What is in a scope, sorted."""
        if not scope.endswith("/"):
            return (self._entries[scope],) if scope in self._entries else ()
        return tuple(self._entries[key] for key in sorted(self._entries) if key.startswith(scope))

    def apply(self, compares: Sequence[Compare], then: Sequence[Op]) -> TxnResult:
        """A transaction: all of it, at one revision, or nothing."""
        ok = all(map(self._holds, compares))
        ops = then if ok else ()
        self._check(ops)
        before, self._now = self.revision, []
        self.revision += 1
        responses = tuple(map(self._perform, ops))
        if self._now:
            self.history.append((self.revision, tuple(self._now)))
            self.wake()
        else:
            self.revision = before
        return TxnResult(ok=ok, revision=self.revision, responses=responses)

    def grant(self, ttl_s: float) -> tuple[int, float]:
        """A new lease: its id, and its time as the server chose it."""
        ttl_s = max(MIN_TTL_S, float(math.ceil(ttl_s)))
        number = next(self._ids)
        self._leases[number] = _Lease(ttl_s, self.clock() + ttl_s)
        return number, ttl_s

    def renew(self, number: int) -> float:
        """The lease's time begins again; 0 if there is none."""
        lease = self._leases.get(number)
        if lease is None:
            return 0.0
        lease.until = self.clock() + lease.ttl_s
        return lease.ttl_s

    def end(self, number: int) -> None:
        """A lease is over, and its keys with it."""
        lease = self._leases.pop(number, None)
        if lease is not None:
            self.apply((), [Delete(scope=key) for key in sorted(lease.keys)])

    def since(self, revision: int) -> Iterable[tuple[int, tuple[Event, ...]]]:
        """What happened from a revision on."""
        newer = itertools.takewhile(lambda past: past[0] >= revision, reversed(self.history))
        return reversed(list(newer))

    def _holds(self, compare: Compare) -> bool:
        entry = self._entries.get(compare.key)
        match compare:
            case Unchanged(revision=revision):
                return (entry.mod_revision if entry else 0) == revision
            case Absent():
                return entry is None

    def _check(self, ops: Sequence[Op]) -> None:
        """Refuse before anything is changed, as etcd does."""
        puts = [op for op in ops if isinstance(op, Put)]
        keys = {op.key for op in puts}
        if len(ops) > MAX_OPS:
            raise StoreRefused(f"{len(ops)} operations in one transaction; at most {MAX_OPS} are allowed")
        if sum(len(op.value) for op in puts) > MAX_BYTES:
            raise StoreRefused(f"the request is larger than {MAX_BYTES} bytes")
        if len(keys) < len(puts) or any(isinstance(op, Delete) and covers(op.scope, key) for op in ops for key in keys):
            raise StoreRefused("the same key is written twice in one transaction")
        for op in puts:
            if op.lease and op.lease not in self._leases:
                raise LeaseGone("the lease has expired or was revoked; take a new one")

    def _perform(self, op: Op) -> Response:
        match op:
            case Put():
                self._put(op)
                return Response()
            case Delete(scope=scope):
                gone = self.read(scope)
                for entry in gone:
                    self._unlease(self._entries.pop(entry.key))
                    self._now.append(Event(key=entry.key, entry=None, revision=self.revision))
                return Response(deleted=len(gone))
            case Get(scope=scope):
                return Response(entries=self.read(scope))

    def _put(self, op: Put) -> None:
        old = self._entries.get(op.key)
        if old:
            self._unlease(old)
        if op.lease:
            self._leases[op.lease].keys.add(op.key)
        entry = Entry(
            key=op.key,
            value=op.value,
            create_revision=old.create_revision if old else self.revision,
            mod_revision=self.revision,
            lease=op.lease,
        )
        self._entries[op.key] = entry
        self._now.append(Event(key=op.key, entry=entry, revision=self.revision))

    def _unlease(self, entry: Entry) -> None:
        if entry.lease in self._leases:
            self._leases[entry.lease].keys.discard(entry.key)


class MemoryStore:
    """A `Store` on a `MemoryServer`."""

    def __init__(self, server: MemoryServer | None = None, *, namespace: str = "/") -> None:
        if not (namespace.startswith("/") and namespace.endswith("/")):
            raise StoreRefused(f"the store's namespace {namespace!r} must begin and end with '/', as '/elasticrl/job/'")
        self.server = server or MemoryServer()
        self._namespace = namespace
        self._closed = False

    @property
    def namespace(self) -> str:
        """What precedes every key."""
        return self._namespace

    async def get(self, key: str) -> Entry | None:
        """One key, or None."""
        await self._arrive()
        found = self.server.read(self._whole(key)) if key else ()
        return self._mine(found[0]) if found else None

    async def scan(self, scope: str) -> Listing:
        """All keys of a scope."""
        await self._arrive()
        entries = self.server.read(self._whole(scope))
        return Listing(entries=tuple(map(self._mine, entries)), revision=self.server.revision)

    async def put(self, key: str, value: bytes, lease: int = 0) -> int:
        """Write a key; return the revision."""
        await self._arrive()
        return self.server.apply((), [Put(key=self._whole(key), value=value, lease=lease)]).revision

    async def txn(self, compares: Sequence[Compare], then: Sequence[Op]) -> TxnResult:
        """One atomic transaction."""
        await self._arrive()
        lose = None
        if not all(isinstance(op, Get) for op in then):
            lose, self.server.lose = self.server.lose, None
        if lose != "request":
            whole = [replace(compare, key=self._whole(compare.key)) for compare in compares]
            result = self.server.apply(whole, list(map(self._op, then)))
        if lose:
            raise StoreAmbiguous(f"the {lose} of a transaction was lost; read again before deciding")
        return replace(result, responses=tuple(map(self._response, result.responses)))

    async def grant(self, ttl_s: float) -> Lease:
        """A new lease."""
        await self._arrive()
        sent = self.server.clock()
        number, ttl_s = self.server.grant(ttl_s)
        return Lease(id=number, ttl_s=ttl_s, sent=sent)

    async def keepalive(self, lease: int) -> Lease:
        """Renew a lease."""
        await self._arrive()
        return Lease(id=lease, sent=self.server.clock(), ttl_s=self.server.renew(lease))

    async def revoke(self, lease: int) -> None:
        """End a lease."""
        await self._arrive()
        self.server.end(lease)

    async def compact(self, revision: int) -> None:
        """Forget history before a revision."""
        await self._arrive()
        self.server.compact(revision)

    async def watch(self, scopes: Sequence[str], from_revision: int) -> AsyncIterator[Batch]:
        """Every change from a revision on."""
        assert from_revision > 0, "a watch begins at a revision of the past, or at the next one"
        server, following = self.server, from_revision
        whole = list(map(self._whole, scopes))
        while not self._closed:
            reason = None if server.down else self._lost(following)
            if reason:
                yield Batch(events=(), revision=following - 1, relist=reason)
                return
            news = [] if server.down else list(server.since(following))
            events = [event for _, all_ in news for event in all_ if any(covers(scope, event.key) for scope in whole)]
            if news:
                following = news[-1][0] + 1
            if events:
                yield Batch(events=tuple(map(self._event, events)), revision=events[-1].revision)
            else:
                await server.changed()
        raise StoreUnavailable("the store was closed during a watch")

    async def status(self) -> Status:
        """The server, asked once."""
        server = self.server
        problem = "it is down" if server.down else None
        return Status(
            endpoints=(
                EndpointStatus(
                    endpoint="memory", version="memory", leader=not problem, revision=server.revision, problem=problem
                ),
            )
        )

    async def close(self) -> None:
        """End what is in progress."""
        self._closed = True
        self.server.wake()

    async def __aenter__(self) -> Self:
        """The store itself."""
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close."""
        await self.close()

    async def _arrive(self) -> None:
        """A call reaches the server, or does not; others get their turn, as they do while a real call travels."""
        await asyncio.sleep(0)
        if self._closed or self.server.down:
            raise StoreUnavailable(
                "the store was closed" if self._closed else "no answer from the memory store: it is down"
            )
        self.server.wake()

    def _lost(self, following: int) -> str | None:
        """Why a watch cannot go on, if it cannot."""
        if following < self.server.compacted:
            return f"the history before revision {self.server.compacted} was compacted"
        return None

    def _whole(self, key: str) -> str:
        return self._namespace + key

    def _mine(self, entry: Entry) -> Entry:
        return replace(entry, key=entry.key.removeprefix(self._namespace))

    def _event(self, event: Event) -> Event:
        entry = self._mine(event.entry) if event.entry else None
        return replace(event, key=event.key.removeprefix(self._namespace), entry=entry)

    def _op(self, op: Op) -> Op:
        if isinstance(op, Put):
            return replace(op, key=self._whole(op.key))
        return replace(op, scope=self._whole(op.scope))

    def _response(self, response: Response) -> Response:
        return replace(response, entries=tuple(map(self._mine, response.entries)))


def covers(scope: str, key: str) -> bool:
    """Whether a scope holds a key.

    >>> covers("members/", "members/n3"), covers("plan", "plans")
    (True, False)
    """
    return key.startswith(scope) if scope.endswith("/") else key == scope
