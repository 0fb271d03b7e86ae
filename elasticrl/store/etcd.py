"""Our client of etcd's v3 API: the few calls that elasticrl needs, on `grpc.aio`, with a deadline on each.

The one idea: every endpoint has a channel of its own, and all calls go to the one that answered last; a failure moves them,
and the watches with them, on to the next. gRPC's round robin over one channel would send every third call to a frozen
member until its pings notice (7 to 9 s), and could not say which member a watch hangs on. (Among the addresses of one
endpoint's name, gRPC's round robin is what is used.)

What a failure means is decided in `faults`; what travels is in `wire` and `channel`; how a watch survives is in `watching`.
Never fork a process that holds an open store: a child that touches the inherited channel hangs.
"""

import asyncio
import logging
import math
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Self

from elasticrl.base.value import dataclass
from elasticrl.store import channel
from elasticrl.store.channel import Endpoint, FailedError, Login, Metadata, Rpc
from elasticrl.store.faults import Fate, Fault
from elasticrl.store.messages import message
from elasticrl.store.protocol import (
    Batch,
    Compare,
    EndpointStatus,
    Entry,
    Get,
    Lease,
    LeaseGone,
    Listing,
    Op,
    Put,
    Say,
    Status,
    StoreAmbiguous,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    TxnResult,
)
from elasticrl.store.settings import StoreSettings
from elasticrl.store.watching import Marks, WatchStream
from elasticrl.store.wire import Names

_FIRST_PAUSE_S = 0.05
_DRAIN_S = 0.02
_AGAIN = {Fate.UNKNOWN, Fate.NOT_APPLIED}
_log = logging.getLogger(__name__)


def _to_log(event: str, /, **fields: object) -> None:
    _log.info("%s %s", event, fields)


@dataclass(frozen=True, slots=True)
class _Answer:
    message: Any
    sent: float  # when the request that this answers was sent, on the store's clock


class EtcdStore:
    """A `Store` on etcd 3.4 or later."""

    # What carries calls and watches; `etcd3_client` puts that package in their place.
    endpoint_type: type[Endpoint] = Endpoint
    stream_type: type[WatchStream] = WatchStream

    def __init__(
        self,
        settings: StoreSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        say: Say | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._say: Say = say or _to_log
        self._names = Names(settings.namespace)
        self._endpoints = [self.endpoint_type(name, settings) for name in settings.endpoints]
        # Where to begin is left to chance, so that a thousand nodes do not all begin at the first member.
        self._at = random.randrange(len(self._endpoints))
        self._login = Login(settings)
        self._lost_at: float | None = None
        self._closed = False

    @property
    def namespace(self) -> str:
        """What precedes every key."""
        return self._settings.namespace

    async def get(self, key: str) -> Entry | None:
        """One key, or None."""
        answer = await self._call(channel.RANGE, self._names.range(key), repeat=True)
        return self._names.entry(answer.message.kvs[0]) if answer.message.kvs else None

    async def scan(self, scope: str) -> Listing:
        """All keys of a scope at one revision, in as many requests as their size asks for."""
        limit = self._settings.page
        kvs: list[Any] = []
        request = self._names.range(scope, limit=limit)
        while True:
            try:
                page = (await self._try_all(channel.RANGE, request, repeat=True)).message
            except FailedError as failed:
                if failed.fault.fate is Fate.TOO_BIG and request.limit > 1:
                    request.limit = max(1, request.limit // 4)
                elif failed.fault.fate is Fate.COMPACTED:  # the listing took too long: begin again at a newer revision
                    kvs, request = [], self._names.range(scope, limit=limit)
                else:
                    raise self._explain(failed, channel.RANGE, repeat=True) from None
                continue
            kvs += page.kvs
            request.revision = request.revision or page.header.revision
            if not page.more:
                return Listing(entries=tuple(map(self._names.entry, kvs)), revision=request.revision)
            request.key = page.kvs[-1].key + b"\0"

    async def put(self, key: str, value: bytes, lease: int = 0) -> int:
        """Write a key; return the revision."""
        request = self._names.put(Put(key=key, value=value, lease=lease))
        return int((await self._call(channel.PUT, request, repeat=True)).message.header.revision)

    async def txn(self, compares: Sequence[Compare], then: Sequence[Op]) -> TxnResult:
        """One atomic transaction, never applied twice."""
        request = message("TxnRequest")(
            compare=map(self._names.compare, compares),
            success=map(self._names.operation, then),
        )
        only_reads = all(isinstance(op, Get) for op in then)
        answer = (await self._call(channel.TXN, request, repeat=only_reads)).message
        return TxnResult(
            ok=answer.succeeded,
            revision=answer.header.revision,
            responses=tuple(map(self._names.response, answer.responses)),
        )

    async def grant(self, ttl_s: float) -> Lease:
        """A new lease. We choose its id, so that a grant whose answer was lost can be repeated without leaving an orphan."""
        request = message("LeaseGrantRequest")(TTL=math.ceil(ttl_s), ID=1 + secrets.randbelow(2**62))
        sent = self._clock()  # of the first try: it may be the one that was applied
        try:
            ttl = (await self._try_all(channel.GRANT, request, repeat=True)).message.TTL
        except FailedError as failed:
            if failed.fault.fate is not Fate.LEASE_EXISTS:
                raise self._explain(failed, channel.GRANT, repeat=True) from None
            ttl = request.TTL
        return Lease(id=request.ID, ttl_s=float(ttl), sent=sent)

    async def keepalive(self, lease: int) -> Lease:
        """Renew a lease."""
        answer = await self._call(channel.KEEPALIVE, message("LeaseKeepAliveRequest")(ID=lease), repeat=True)
        return Lease(id=lease, ttl_s=float(max(0, answer.message.TTL)), sent=answer.sent)

    async def revoke(self, lease: int) -> None:
        """End a lease; one that is gone already is fine."""
        try:
            await self._try_all(channel.REVOKE, message("LeaseRevokeRequest")(ID=lease), repeat=True)
        except FailedError as failed:
            if failed.fault.fate is not Fate.LEASE_GONE:
                raise self._explain(failed, channel.REVOKE, repeat=True) from None

    async def compact(self, revision: int) -> None:
        """Forget history before a revision. Production servers do this by themselves; tests and tools call it."""
        await self._call(channel.COMPACT, message("CompactionRequest")(revision=revision, physical=True), repeat=False)

    async def watch(self, scopes: Sequence[str], from_revision: int) -> AsyncIterator[Batch]:
        """Every change from a revision on, over any number of broken streams."""
        marks = Marks(self._names, scopes, from_revision)
        tries, denied = 0, False
        while True:
            endpoint = self._endpoint
            stream = self.stream_type(endpoint, marks, self._settings.try_timeout_s)
            try:
                await stream.open(await self._metadata(endpoint))
                while True:
                    batch = await self._next(stream, marks)
                    if tries:
                        self._say("store.resumed", endpoint=endpoint.name, tries=tries)
                    tries, denied = 0, False
                    if batch:
                        yield batch
                        if batch.relist:
                            return
            except FailedError as failed:
                if self._closed or failed.fault.fate not in {*_AGAIN, Fate.TOKEN} or denied:
                    raise self._explain(failed, channel.WATCH, repeat=True) from None
                self._failed_at(endpoint, failed.fault)
                tries, denied = tries + 1, failed.fault.fate is Fate.TOKEN
            finally:
                stream.close()
            await asyncio.sleep(max(_FIRST_PAUSE_S, self._pause(tries)))

    async def status(self) -> Status:
        """Every endpoint, asked once."""
        try:
            metadata = await self._metadata(self._endpoint)
        except FailedError:
            metadata = ()
        found = await asyncio.gather(*(self._status_of(endpoint, metadata) for endpoint in self._endpoints))
        return Status(
            endpoints=tuple(status for status, _ in found),
            warnings=tuple(f"etcd at {status.endpoint}: {note}" for status, notes in found for note in notes),
        )

    async def close(self) -> None:
        """Close all channels. Calls and watches in progress end with `StoreUnavailable`."""
        self._closed = True
        await asyncio.gather(*(endpoint.close() for endpoint in self._endpoints))
        # gRPC's own thread hands back cancelled calls a moment later. Where the loop is closed by then, nothing is lost, but
        # it says so as an error in the log of the next loop of this process.
        await asyncio.sleep(_DRAIN_S)

    async def __aenter__(self) -> Self:
        """The store itself; it connects when first used."""
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close."""
        await self.close()

    async def _call(self, rpc: Rpc, request: Any, *, repeat: bool) -> _Answer:
        """A call with all its tries; a failure comes out as the store's own error."""
        try:
            return await self._try_all(rpc, request, repeat=repeat)
        except FailedError as failed:
            raise self._explain(failed, rpc, repeat=repeat) from None

    async def _try_all(self, rpc: Rpc, request: Any, *, repeat: bool) -> _Answer:
        """Try until there is an answer or the time is over; without `repeat`, only while certainly nothing was applied."""
        until = self._clock() + self._settings.timeout_s
        try:
            return await self._try_once(rpc, request, until)  # nearly always all: what follows costs as much as a call
        except FailedError as failed:
            first = [failed]
        import tenacity

        async def once() -> _Answer:
            if first:
                raise first.pop()
            return await self._try_once(rpc, request, until)

        again = (
            {Fate.NOT_APPLIED} | ({Fate.UNKNOWN} if repeat else set()) | ({Fate.TOKEN} if self._login.named else set())
        )
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(
                lambda error: isinstance(error, FailedError) and error.fault.fate in again and not self._closed
            ),
            wait=lambda state: self._pause(state.attempt_number),
            stop=tenacity.stop_before_delay(until - self._clock()),
            reraise=True,
        )
        return await retrying(once)

    async def _try_once(self, rpc: Rpc, request: Any, until: float) -> _Answer:
        endpoint = self._endpoint
        try:
            metadata = await self._metadata(endpoint)
            sent = self._clock()
            within_s = max(0.001, min(self._settings.try_timeout_s, until - sent))  # gRPC takes no deadline in the past
            answer = _Answer(await endpoint.call(rpc, request, within_s, metadata), sent)
        except FailedError as failed:
            if failed.fault.fate in {*_AGAIN, Fate.TOKEN}:
                self._failed_at(endpoint, failed.fault)
            raise
        if self._lost_at is not None:
            self._say("store.back", endpoint=endpoint.name, after_s=round(self._clock() - self._lost_at, 3))
            self._lost_at = None
        return answer

    async def _next(self, stream: WatchStream, marks: Marks) -> Batch | None:
        batch = None if marks.doubt else await stream.read()
        if marks.doubt:
            answer = await self._try_all(channel.RANGE, self._names.range("", limit=1), repeat=True)
            if marks.set_back(answer.message.header):
                batch = marks.relist("the store was set back to an older state, or another one has taken its place")
        if batch and batch.relist:
            self._say("store.relist", reason=batch.relist)
        return batch

    @property
    def _endpoint(self) -> Endpoint:
        return self._endpoints[self._at]

    def _failed_at(self, endpoint: Endpoint, fault: Fault) -> None:
        """Go on at the next endpoint. One that missed a deadline is taken for frozen, so its watches come along."""
        if fault.fate is Fate.TOKEN:
            self._login.forget()
            return
        endpoint.reread()
        if endpoint is self._endpoint:
            self._at = (self._at + 1) % len(self._endpoints)
        if fault.code == "DEADLINE_EXCEEDED" and len(self._endpoints) > 1:
            endpoint.cancel_streams()
        if self._lost_at is None and not self._closed:
            self._lost_at = self._clock()
            self._say("store.lost", endpoint=endpoint.name, reason=str(fault))

    def _pause(self, failures: int) -> float:
        """At once to an endpoint not yet tried; after each round a pause that doubles, half of it left to chance."""
        rounds, within = divmod(failures, len(self._endpoints))
        if within:
            return 0.0
        return min(self._settings.pause_s, _FIRST_PAUSE_S * 2.0 ** min(rounds, 16)) * random.uniform(0.5, 1.0)

    def _explain(self, failed: FailedError, rpc: Rpc, *, repeat: bool) -> StoreError:
        """The sentence for whoever called."""
        fate = failed.fault.fate
        if self._closed:
            return StoreUnavailable(f"the store was closed during {rpc.name}")
        if fate is Fate.LEASE_GONE:
            return LeaseGone(f"etcd refused {rpc.name}: the lease has expired or was revoked; take a new one")
        if fate is Fate.UNKNOWN and not repeat:
            return StoreAmbiguous(
                f"the answer to {rpc.name} was lost ({failed}); it may have been applied, so read again before deciding"
            )
        if fate in _AGAIN:
            return StoreUnavailable(
                f"no answer to {rpc.name} from {', '.join(self._settings.endpoints)} within {self._settings.timeout_s:g} s"
                f" (last: {failed}); check that etcd runs, has a quorum and can be reached from here"
            )
        return StoreRefused(f"etcd at {failed.endpoint} refused {rpc.name} in {self.namespace}: {failed.fault}")

    async def _metadata(self, endpoint: Endpoint) -> Metadata:
        """The login, and `hasleader`: a member cut off from its leader refuses at once instead of letting us wait."""
        wanted = self._login.wanted
        token = await self._login.token(endpoint)
        if wanted and not self._login.wanted:
            self._say("store.no_auth", username=self._settings.username)
        return (("hasleader", "true"), ("token", token)) if token else (("hasleader", "true"),)

    async def _status_of(self, endpoint: Endpoint, metadata: Metadata) -> tuple[EndpointStatus, list[str]]:
        try:
            request = message("StatusRequest")()
            answer = await endpoint.call(channel.STATUS, request, self._settings.try_timeout_s, metadata)
        except FailedError as failed:
            return EndpointStatus(endpoint=endpoint.name, problem=str(failed.fault)), []
        found = EndpointStatus(
            endpoint=endpoint.name,
            version=answer.version,
            leader=answer.leader == answer.header.member_id,
            revision=answer.header.revision,
            size=answer.dbSize,
        )
        warning = version_warning(answer.version)
        return found, [*answer.errors, *([f"version {answer.version} {warning}"] if warning else [])]


def version_warning(version: str) -> str | None:
    """What an operator must know about a server's version, or None.

    >>> version_warning("3.5.9")
    >>> version_warning("3.3.27")
    'is older than 3.4, the oldest supported; upgrade it'
    """
    try:
        parts = tuple(map(int, version.partition("-")[0].split(".")))
    except ValueError:
        return "is not a version we can read; 3.4 and later are supported"
    if parts < (3, 4):
        return "is older than 3.4, the oldest supported; upgrade it"
    if (3, 5, 0) <= parts <= (3, 5, 2):
        return "can corrupt data when killed under load (3.5.0 to 3.5.2); use it for development only, or upgrade it"
    return None
