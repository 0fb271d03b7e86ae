"""The package `etcd3` (0.12.0) behind our protocol, for those who have it.

The one idea: the package carries single calls and single watch streams, in threads; everything that makes a store reliable
(deadlines, tries, other endpoints, login, resumed watches) is that of `EtcdStore`, on top. It is not the default because it
needs a thread for every call and watch, and because by itself it does not even import beside a protobuf of this decade:
the stubs it ships are too old, so `package` puts ours in their place first.

What remains missing: it cannot use TLS with the system's authorities, only with a CA file; and it does not ask for large
answers of a watch in fragments, so they are taken whole, however large.
"""

import asyncio
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from functools import cache, partial
from types import ModuleType
from typing import Any

import grpc

from elasticrl.base.value import dataclass
from elasticrl.store import channel
from elasticrl.store.channel import Endpoint, FailedError, Metadata, Rpc
from elasticrl.store.etcd import EtcdStore
from elasticrl.store.faults import judge
from elasticrl.store.messages import message, names
from elasticrl.store.protocol import Batch, Entry, Event, StoreRefused
from elasticrl.store.settings import StoreSettings, target
from elasticrl.store.watching import Marks, WatchStream

_UNARY = (
    channel.RANGE,
    channel.PUT,
    channel.TXN,
    channel.COMPACT,
    channel.GRANT,
    channel.REVOKE,
    channel.STATUS,
    channel.AUTHENTICATE,
)
_STREAMS = (channel.KEEPALIVE, channel.WATCH)
_SERVICES = ("KV", "Lease", "Watch", "Auth", "Maintenance", "Cluster")
_THREADS = 16


@cache
def package() -> Any:
    """The module `etcd3`, over our messages."""
    sys.modules.setdefault("etcd3.etcdrpc", _stubs())
    try:
        import etcd3
        import etcd3.watch
    except ImportError as error:
        raise StoreRefused(
            f"store.client is etcd3, but the package cannot be imported ({error}); install elasticrl[etcd3], or set"
            " store.client to grpc"
        ) from None
    return etcd3


def _stubs() -> ModuleType:
    """What `etcd3.etcdrpc` would be, had it been generated today: the messages, and a stub for each service."""
    module = ModuleType("etcd3.etcdrpc")
    for name in names():
        setattr(module, name, message(name))
    for service in _SERVICES:
        setattr(module, f"{service}Stub", partial(_Stub, service))
    return module


class _Stub:
    """The calls of one service over one channel, as generated code would have them."""

    def __init__(self, service: str, over: Any) -> None:
        for rpc in (*_UNARY, *_STREAMS):
            if rpc.service == service:
                kind = over.stream_stream if rpc in _STREAMS else over.unary_unary
                unpack = message(rpc.response).FromString
                setattr(self, rpc.name, kind(rpc.path, lambda request: request.SerializeToString(), unpack))


@dataclass(eq=False)
class Etcd3Endpoint(Endpoint):
    """One member of etcd, reached through an `Etcd3Client`."""

    _client: Any = None
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_THREADS, thread_name_prefix="elasticrl-etcd3")
    )

    @property
    def client(self) -> Any:
        """The package's client, made when first used."""
        if self._client is None:
            self._client = _client(self.name, self.settings)
        return self._client

    async def call(self, rpc: Rpc, request: Any, within_s: float, metadata: Metadata) -> Any:
        """One try of a call, in a thread."""
        try:
            return await self.in_thread(self._call, rpc, request, within_s, metadata)
        except grpc.RpcError as error:
            raise channel.failed(error, self.name) from None
        except (ValueError, RuntimeError) as error:  # how a closed channel and a closed pool say so
            raise FailedError(judge("CANCELLED", f"the store was closed ({error})"), self.name) from None

    async def in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run something that blocks."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *args))

    async def close(self) -> None:
        """Close the channel; calls in threads end with it."""
        self.cancel_streams()
        if self._client is not None:
            self._client.close()
        self._threads.shutdown(wait=False)

    def _call(self, rpc: Rpc, request: Any, within_s: float, metadata: Metadata) -> Any:
        method = getattr(_stub_of(self.client, rpc), rpc.name)
        if rpc in _STREAMS:
            answer = next(method(iter([request]), within_s, metadata=metadata), None)
            if answer is None:  # a thread's StopIteration cannot be handed to who awaits it, who would wait for ever
                raise FailedError(judge("UNAVAILABLE", "the stream ended without an answer"), self.name)
            return answer
        return method(request, within_s, metadata=metadata)


def _stub_of(client: Any, rpc: Rpc) -> Any:
    match rpc.service:
        case "KV":
            return client.kvstub
        case "Lease":
            return client.leasestub
        case "Maintenance":
            return client.maintenancestub
        case _:
            return _Stub(rpc.service, client.channel)  # its client makes no stub for logins, but in its constructor


def _client(endpoint: str, settings: StoreSettings) -> Any:
    address, secure = target(endpoint)
    host, _, port = address.rpartition(":")
    tls = settings.tls
    if secure and not (tls and tls.ca):
        raise StoreRefused(f"etcd3 needs a CA file to reach {endpoint}; set store.tls.ca, or store.client to grpc")
    if tls:
        channel.credentials(settings)  # says in our words which file is missing
    return package().client(
        host=host,
        port=int(port),
        ca_cert=tls.ca if tls else None,
        cert_key=tls.key if tls else None,
        cert_cert=tls.cert if tls else None,
        # The package does not ask for big answers in fragments, so they must be taken as large as they come.
        grpc_options=channel.channel_options(settings, receive_limit=-1),
    )


class _ClosedError(Exception):
    """Ends a watcher's thread, which has no other way out."""


class _OneStream:
    """A watch stub that can be used once and be closed: the package would open a stream again and again without a pause."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self._used = False
        self._call: Any = None

    def Watch(self, requests: Iterator[Any], **how: Any) -> Any:  # noqa: N802 - the name in etcd's API
        """The stream, the first time."""
        if self._used:
            raise _ClosedError
        self._used = True
        self._call = self._stub.Watch(requests, **how)
        return self._call

    def close(self) -> None:
        """End the stream, and with it the thread that reads it."""
        self._used = True
        if self._call is not None:
            self._call.cancel()


class Etcd3Stream(WatchStream):
    """A watch stream carried by the package's `Watcher` and its thread."""

    def __init__(self, endpoint: Endpoint, marks: Marks, within_s: float) -> None:
        super().__init__(endpoint, marks, within_s)
        self._answers: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._stream: _OneStream | None = None

    async def open(self, metadata: Metadata) -> None:
        """Ask for every scope from its mark on."""
        endpoint = self.endpoint
        assert isinstance(endpoint, Etcd3Endpoint)
        # The package keeps the header of a watch's confirmation to itself, so whether the store has been set back is asked.
        answer = await endpoint.call(channel.RANGE, self.marks.names.range("", limit=1), self.within_s, metadata)
        self._stream = _OneStream(_Stub("Watch", endpoint.client.channel))
        endpoint.keep(self)
        watcher = _watcher(self._stream, self.within_s, metadata)
        for index, (key, end) in enumerate(self.marks.spans):
            self.marks.meet(answer.header, index)
            begin = partial(
                watcher.add_callback,
                key,
                partial(self._from_thread, index),
                range_end=end or None,
                start_revision=self.marks.next[index],
                progress_notify=True,
            )
            try:
                await endpoint.in_thread(begin)
            except grpc.RpcError as error:
                raise channel.failed(error, endpoint.name) from None
            except (package().Etcd3Exception, _ClosedError) as error:
                raise FailedError(judge("DEADLINE_EXCEEDED", f"no watch: {error!r}"), endpoint.name) from None

    async def read(self) -> Batch | None:
        """The next batch."""
        index, answer = await self._answers.get()
        if isinstance(answer, package().exceptions.RevisionCompactedError):
            return self.marks.relist(f"the history before revision {answer.compacted_revision} was compacted")
        if isinstance(answer, grpc.RpcError):
            raise channel.failed(answer, self.endpoint.name)
        if isinstance(answer, Exception):
            raise FailedError(judge("CANCELLED", repr(answer)), self.endpoint.name)
        return self.marks.seen(index, [self._event(event) for event in answer.events], answer.header.revision)

    def close(self) -> None:
        """End the stream and its thread."""
        self.endpoint.forget(self)
        if self._stream is not None:
            self._stream.close()

    def cancel(self) -> None:
        """Give up, because another call has found the endpoint dead."""
        self._from_thread(0, ConnectionError("the stream was given up"))

    def _from_thread(self, index: int, answer: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(self._answers.put_nowait, (index, answer))
        except RuntimeError:
            pass  # the loop has ended, and so has whoever was watching

    def _event(self, event: Any) -> Event:
        key = self.marks.names.relative(event.key)
        if isinstance(event, package().events.DeleteEvent):
            return Event(key=key, entry=None, revision=event.mod_revision)
        entry = Entry(
            key=key,
            value=event.value,
            create_revision=event.create_revision,
            mod_revision=event.mod_revision,
            lease=event.lease,
        )
        return Event(key=key, entry=entry, revision=event.mod_revision)


def _watcher(stream: _OneStream, timeout_s: float, metadata: Metadata) -> Any:
    """A `Watcher` of the package whose thread ends with its stream."""

    class Watcher(package().watch.Watcher):  # type: ignore[misc]  # a class of a package without types
        def _run(self) -> None:
            try:
                super()._run()
            except _ClosedError:
                pass

    return Watcher(stream, timeout=timeout_s, metadata=metadata)


class Etcd3Store(EtcdStore):
    """A `Store` over the package `etcd3`."""

    endpoint_type = Etcd3Endpoint
    stream_type = Etcd3Stream
