"""One endpoint of etcd: a channel, what travels over it, and what its failures mean.

The one idea: whatever goes wrong with a try comes out as one exception, `FailedError`, with the fault already judged
(`faults`). What to do about it is decided elsewhere.
"""

import asyncio
from dataclasses import field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from elasticrl.base.value import dataclass
from elasticrl.store.faults import Fate, Fault, judge
from elasticrl.store.messages import message
from elasticrl.store.protocol import StoreRefused
from elasticrl.store.settings import StoreSettings, target

Metadata = tuple[tuple[str, str], ...]

RECEIVE_LIMIT = 4 * 1024 * 1024  # gRPC's own default, made explicit: long listings are paged below it


@dataclass(frozen=True, slots=True)
class Rpc:
    """A remote procedure: its path as plain text, and the message that answers."""

    path: str
    response: str

    @property
    def name(self) -> str:
        """The procedure's name, as in Range."""
        return self.path.rpartition("/")[2]

    @property
    def service(self) -> str:
        """The name of its service, as in KV."""
        return self.path.split("/")[1].rpartition(".")[2]


RANGE = Rpc("/etcdserverpb.KV/Range", "RangeResponse")
PUT = Rpc("/etcdserverpb.KV/Put", "PutResponse")
TXN = Rpc("/etcdserverpb.KV/Txn", "TxnResponse")
COMPACT = Rpc("/etcdserverpb.KV/Compact", "CompactionResponse")
GRANT = Rpc("/etcdserverpb.Lease/LeaseGrant", "LeaseGrantResponse")
REVOKE = Rpc("/etcdserverpb.Lease/LeaseRevoke", "LeaseRevokeResponse")
# A stream, kept open, on which one renewal at a time goes out and comes back: opening one for each costs etcd twice as much,
# which thousands of nodes feel. To the caller it is a call like the others: with a deadline, matched with its answer, and
# moved to another endpoint when it fails.
KEEPALIVE = Rpc("/etcdserverpb.Lease/LeaseKeepAlive", "LeaseKeepAliveResponse")
WATCH = Rpc("/etcdserverpb.Watch/Watch", "WatchResponse")
AUTHENTICATE = Rpc("/etcdserverpb.Auth/Authenticate", "AuthenticateResponse")
STATUS = Rpc("/etcdserverpb.Maintenance/Status", "StatusResponse")


class FailedError(Exception):
    """A try that failed, judged. It never leaves this package."""

    def __init__(self, fault: Fault, endpoint: str) -> None:
        super().__init__(f"{endpoint}: {fault}")
        self.fault = fault
        self.endpoint = endpoint


@dataclass(eq=False)
class Endpoint:
    """One member of etcd and the channel to it, which is opened when first used."""

    name: str
    settings: StoreSettings
    _channel: Any = None
    _calls: dict[Rpc, Any] = field(default_factory=dict)
    _streams: set[Any] = field(default_factory=set)
    _renewals: Any = None  # the open stream of renewals
    _renewals_as: Metadata = ()  # under this login
    _renewing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _files: tuple[object, ...] = ()  # what the certificates' files were when they were read
    _closing: set[asyncio.Task[None]] = field(default_factory=set)

    async def call(self, rpc: Rpc, request: Any, within_s: float, metadata: Metadata) -> Any:
        """One try of a call."""
        if rpc is KEEPALIVE:
            return await self._renew(request, within_s, metadata)
        if rpc not in self._calls:
            pack, unpack = type(request).SerializeToString, message(rpc.response).FromString
            self._calls[rpc] = self._open().unary_unary(rpc.path, pack, unpack)
        try:
            return await self._calls[rpc](request, timeout=within_s, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise failed(error, self.name) from None
        except (asyncio.CancelledError, grpc.aio.UsageError):
            if cancelled():
                raise
            raise FailedError(judge("CANCELLED", "the store was closed"), self.name) from None

    async def _renew(self, request: Any, within_s: float, metadata: Metadata) -> Any:
        """One renewal. A stream on which anything went wrong is given up: no late answer shall be taken for the next one's."""
        try:
            async with asyncio.timeout(within_s), self._renewing:
                if self._renewals is None or self._renewals_as != metadata:
                    self._end_renewals()
                    self._renewals, self._renewals_as = self._open_renewals(request, metadata), metadata
                try:
                    await self._renewals.write(request)
                    answer = await self._renewals.read()
                except BaseException:
                    self._end_renewals()
                    raise
                if answer is grpc.aio.EOF or request.ID != answer.ID:
                    self._end_renewals()
                    raise FailedError(judge("UNAVAILABLE", "the stream of renewals ended"), self.name)
                return answer
        except TimeoutError:
            raise FailedError(judge("DEADLINE_EXCEEDED", f"no answer within {within_s:.3g} s"), self.name) from None
        except grpc.aio.AioRpcError as error:
            raise failed(error, self.name) from None
        except asyncio.InvalidStateError:  # it ended while nothing was asked of it
            raise FailedError(judge("UNAVAILABLE", "the stream of renewals had ended"), self.name) from None
        except (asyncio.CancelledError, grpc.aio.UsageError):
            if cancelled():
                raise
            raise FailedError(judge("CANCELLED", "the store was closed"), self.name) from None

    def _open_renewals(self, request: Any, metadata: Metadata) -> Any:
        if KEEPALIVE not in self._calls:
            pack, unpack = type(request).SerializeToString, message(KEEPALIVE.response).FromString
            self._calls[KEEPALIVE] = self._open().stream_stream(KEEPALIVE.path, pack, unpack)
        call = self._calls[KEEPALIVE](metadata=metadata)
        self.keep(call)
        return call

    def _end_renewals(self) -> None:
        call, self._renewals = self._renewals, None
        if call is not None:
            self.forget(call)
            call.cancel()

    def stream(self, metadata: Metadata) -> Any:
        """A new stream of watches."""
        if WATCH not in self._calls:
            pack, unpack = message("WatchRequest").SerializeToString, message(WATCH.response).FromString
            self._calls[WATCH] = self._open().stream_stream(WATCH.path, pack, unpack)
        call = self._calls[WATCH](metadata=metadata)
        self.keep(call)
        return call

    def keep(self, call: Any) -> None:
        """Remember a stream, to be given up when the endpoint turns out to be dead."""
        self._streams.add(call)

    def forget(self, call: Any) -> None:
        """The stream has ended."""
        self._streams.discard(call)

    def cancel_streams(self) -> None:
        """Give up all streams on this endpoint; their watches go on elsewhere."""
        for call in tuple(self._streams):
            call.cancel()

    async def close(self) -> None:
        """Close the channel."""
        self.cancel_streams()
        if self._channel is not None:
            await self._channel.close()

    def reread(self) -> None:
        """After a failure: where certificates have been renewed on the disk since they were read, go on with those."""
        if self._channel is None or self._files == stamps(self.settings):
            return
        self._end_renewals()
        self.cancel_streams()
        closing = asyncio.create_task(self._channel.close(), name="old certificates")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        self._channel, self._calls = None, {}

    def _open(self) -> Any:
        if self._channel is None:
            address, secure = target(self.name)
            options = channel_options(self.settings)
            if secure or self.settings.tls:
                self._files = stamps(self.settings)
                self._channel = grpc.aio.secure_channel(address, credentials(self.settings), options=options)
            else:
                self._channel = grpc.aio.insecure_channel(address, options=options)
        return self._channel


class Login:
    """The token of a user: fetched when first needed, and again after the server has forgotten it."""

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._token: str | None = None
        self._lock = asyncio.Lock()
        self.named = settings.username is not None
        self.wanted = self.named  # until a server says that it has no users

    def forget(self) -> None:
        """The server does not accept the token any more, or wants one."""
        self._token, self.wanted = None, self.named

    async def token(self, endpoint: Endpoint) -> str | None:
        """The token, or None where none is needed."""
        async with self._lock:
            if self.wanted and self._token is None:
                self._token = await self._fetch(endpoint)
        return self._token

    async def _fetch(self, endpoint: Endpoint) -> str | None:
        request = message("AuthenticateRequest")(name=self._settings.username, password=self._settings.password)
        within_s = 3 * self._settings.try_timeout_s  # the server hashes passwords slowly on purpose
        try:
            return str((await endpoint.call(AUTHENTICATE, request, within_s, ())).token)
        except FailedError as error:
            fault = error.fault
            if fault.fate is Fate.NO_AUTH:
                self.wanted = False
                return None
            if fault.fate is Fate.UNKNOWN:  # whatever the login was for has certainly not been applied
                fault = Fault(fate=Fate.NOT_APPLIED, code=fault.code, detail=f"login: {fault.detail}")
            raise FailedError(fault, endpoint.name) from None


def failed(error: Any, endpoint: str) -> FailedError:
    """A gRPC error, judged."""
    return FailedError(judge(error.code().name, error.details() or ""), endpoint)


def cancelled() -> bool:
    """Whether the current task is being cancelled. `grpc.aio` raises CancelledError also for a call that *we* cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def channel_options(
    settings: StoreSettings, *, receive_limit: int = RECEIVE_LIMIT
) -> tuple[tuple[str, str | int], ...]:
    """The settings of gRPC that were found to matter."""
    pause_ms = round(settings.pause_s * 1000)
    options: tuple[tuple[str, str | int], ...] = (
        # A frozen or unplugged server is noticed by pings. With the first timeout alone it took 64 s; with the second it
        # is ping + timeout. No pings while no call is open: etcd would hang up on us for that.
        ("grpc.keepalive_time_ms", round(settings.ping_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(settings.ping_timeout_s * 1000)),
        ("grpc.http2.ping_timeout_ms", round(settings.ping_timeout_s * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 0),
        # Back within about a second of the server. gRPC's defaults are up to two minutes between attempts to connect, and
        # 20 s for one attempt.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", pause_ms),
        ("grpc.max_reconnect_backoff_ms", pause_ms),
        ("grpc.dns_min_time_between_resolutions_ms", 2000),
        ("grpc.use_local_subchannel_pool", 1),  # else two stores in one process share a connection, and its backoff
        ("grpc.lb_policy_name", "round_robin"),  # over the addresses of one name
        ("grpc.service_config_disable_resolution", 1),
        ("grpc.enable_retries", 0),  # tenacity tries again, and knows what is safe
        ("grpc.enable_http_proxy", 0),  # a proxy meant for the web would swallow the cluster's own traffic
        ("grpc.max_receive_message_length", receive_limit),
        # gRPC measures the bandwidth with a ping beside every message it gets, which is a third of what a renewal costs etcd.
        # Our messages are small; the window is fixed instead, at what a long listing needs on a fast network.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 1024 * 1024),
    )
    if settings.tls and settings.tls.server_name:
        options += (("grpc.ssl_target_name_override", settings.tls.server_name),)
    return options


def stamps(settings: StoreSettings) -> tuple[object, ...]:
    """By which one sees that a certificate's file is another one now."""
    found: list[object] = []
    for path in (settings.tls.ca, settings.tls.cert, settings.tls.key) if settings.tls else ():
        try:
            status = Path(path).stat() if path else None
        except OSError:
            status = None
        found.append((status.st_mtime_ns, status.st_size, status.st_ino) if status else None)
    return tuple(found)


def credentials(settings: StoreSettings) -> Any:
    """TLS, or mutual TLS where a client certificate is given. Without a CA the system's own are trusted."""
    tls = settings.tls
    return grpc.ssl_channel_credentials(
        root_certificates=_pem(tls.ca if tls else None, "CA"),
        private_key=_pem(tls.key if tls else None, "key"),
        certificate_chain=_pem(tls.cert if tls else None, "certificate"),
    )


def _pem(path: str | None, what: str) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise StoreRefused(
            f"the store's TLS {what} {path} cannot be read ({error.strerror}); check path and rights"
        ) from None
