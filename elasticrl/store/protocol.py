"""What elasticrl needs of a store: a few keys with revisions, transactions, leases and watches.

The one idea: everything a caller may rely on is written here and tested once, and the same tests run against the memory
store, our etcd client and the `etcd3` client. Every value is a frozen dataclass; every call ends within the store's
deadlines, either with a value or with a `StoreError`.

A *scope* is how keys are named in reads, deletes and watches: a name that ends in "/" (or is empty) stands for all keys
under it, any other name for that one key. Keys are relative to the store's namespace, so two jobs can share one etcd.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol, Self

from elasticrl.base.value import dataclass


class StoreError(Exception):
    """The tree of what can go wrong with a store.

    StoreError
    ├── StoreUnavailable    no answer within the deadlines; a transaction was not applied, a put may come true yet
    ├── StoreAmbiguous      the answer to a transaction was lost: it may have been applied, now or later; read again first
    ├── StoreRefused        the store understood and said no: permission, size, a malformed request
    │   └── LeaseGone       a key was to be written under a lease that the store does not know any more
    └── StoreStart          an embedded etcd could not be found or started
    """


class StoreUnavailable(StoreError):
    """No answer within the deadlines. A transaction was certainly not applied; a put may come true yet."""


class StoreAmbiguous(StoreError):
    """The answer to a transaction was lost, so it may have been applied, or may be yet: read again before deciding."""


class StoreRefused(StoreError):
    """The store understood the request and refused it; trying again does not help."""


class LeaseGone(StoreRefused):
    """The lease that a key was to be written under has expired or was revoked."""


class StoreStart(StoreError):
    """An embedded etcd could not be found or started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A key as it was at some revision.

    Example: Entry(key="members/n03", value=b'{"v": 1}', create_revision=12, mod_revision=40, lease=7587)
    """

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0  # 0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """All entries of a scope, sorted by key, as they were together at `revision`: watch from `revision + 1`.

    Example: Listing(entries=(Entry(...), Entry(...)), revision=41)
    """

    entries: tuple[Entry, ...]
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One change of one key. `entry` is None for a deletion, also for one by a lease that ended.

    Example: Event(key="members/n03", entry=None, revision=57)
    """

    key: str
    entry: Entry | None
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a watch has seen. A transaction's changes to one scope always come in one batch.

    A batch without events says that nothing else has happened up to `revision`. A batch with `relist` is the last one:
    the history that the watch needed is gone (compacted, or the store itself was set back), so read the scopes again.

    Example: Batch(events=(Event(...),), revision=57)
    """

    events: tuple[Event, ...]
    revision: int
    relist: str | None = None  # why


@dataclass(frozen=True, slots=True, kw_only=True)
class Unchanged:
    """Holds while the key was last written at `revision`; 0: while it does not exist."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """Holds while the key does not exist."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """Write a key; `lease` 0 means that it stays until it is deleted."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """Delete what is in a scope."""

    scope: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Get:
    """Read a scope inside a transaction; for few small keys, as it is not paged."""

    scope: str


Compare = Unchanged | Absent
Op = Put | Delete | Get


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What one operation of a transaction did: `deleted` speaks of a Delete, `entries` of a Get."""

    deleted: int = 0
    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TxnResult:
    """`ok`: every comparison held and `then` was applied at `revision`, with one response per operation; else nothing was.

    Example: TxnResult(ok=True, revision=58, responses=(Response(),))
    """

    ok: bool
    revision: int
    responses: tuple[Response, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A lease as last confirmed. It lives at least until `sent + ttl_s` on this node's monotonic clock.

    It is counted from when the request was *sent*, not from when the answer came: the store counts from somewhere between
    the two, and only the earlier end is safe. `ttl_s` 0: the store does not know this lease (any more).

    Example: Lease(id=7587, ttl_s=10.0, sent=1832.25)
    """

    id: int
    ttl_s: float
    sent: float

    @property
    def held(self) -> bool:
        """Whether the store still knows the lease."""
        return self.ttl_s > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointStatus:
    """One member of the store, as it answered, or why it did not (`problem`).

    Example: EndpointStatus(endpoint="h1:2379", version="3.5.9", leader=True, revision=90, size=20480)
    """

    endpoint: str
    version: str = ""
    leader: bool = False
    revision: int = 0
    size: int = 0  # bytes on disk
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The store's health: every endpoint, and what an operator should know about them."""

    endpoints: tuple[EndpointStatus, ...]
    warnings: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether any endpoint answers."""
        return any(endpoint.problem is None for endpoint in self.endpoints)


class Say(Protocol):
    """Takes a store's log events; structlog's `log.info` is one.

    store.lost      the first try that failed after all was well (endpoint, reason)
    store.back      the first that succeeded again (endpoint, after_s)
    store.resumed   a watch goes on where it was (endpoint, tries)
    store.relist    a watch cannot go on where it was (reason)
    store.no_auth   a username was given, but the server does not use them (username)
    """

    def __call__(self, event: str, /, **fields: object) -> object:
        """Log it."""


class Store(Protocol):
    """A connection to the store, in one namespace. It belongs to one event loop, and to one process: never fork with it open.

    Reads are linearizable: they show every write that was answered before them, whoever made it.
    """

    @property
    def namespace(self) -> str:
        """What precedes every key, for example /elasticrl/ppo-7b/."""

    async def get(self, key: str) -> Entry | None:
        """One key, or None if it does not exist."""

    async def scan(self, scope: str) -> Listing:
        """All keys of a scope at one revision, however many they are."""

    async def put(self, key: str, value: bytes, lease: int = 0) -> int:
        """Write a key and return the revision.

        A lost answer is followed by writing again, and a try that was given up may come true yet, even after a later write
        (a frozen etcd that thaws does that). So a put suits what is written again when it is found to be wrong, as a
        member's own record; a key with several writers, or whose history matters, is written by `txn`.
        """

    async def txn(self, compares: Sequence[Compare], then: Sequence[Op]) -> TxnResult:
        """Apply `then` if every comparison holds, atomically.

        It is tried again only where it is certain that the first try was not applied; where the answer was lost,
        `StoreAmbiguous` is raised.
        """

    async def grant(self, ttl_s: float) -> Lease:
        """A new lease. Renew it at once if much is going on: its time runs already. The store may lengthen a short one."""

    async def keepalive(self, lease: int) -> Lease:
        """Renew a lease; `held` of the answer is False if the store does not know it any more."""

    async def revoke(self, lease: int) -> None:
        """End a lease and delete its keys now. A lease that is already gone is fine."""

    def watch(self, scopes: Sequence[str], from_revision: int) -> AsyncIterator[Batch]:
        """Every change in the scopes from that revision on, none lost and none twice, over any breaks of the connection.

        Changes of one scope come in the order of their revisions; between scopes no order is promised. While the store is
        away the iterator waits. Close it (`contextlib.aclosing`) when you are done.
        """

    async def status(self) -> Status:
        """Ask every endpoint once how it is; endpoints that do not answer are part of the result."""

    async def close(self) -> None:
        """Give back connections and threads. Calls in flight fail."""

    async def __aenter__(self) -> Self:
        """The store itself; it connects when first used."""

    async def __aexit__(self, *exc: object) -> None:
        """Close."""
