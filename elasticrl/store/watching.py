"""One watch over many streams: how far it has come, and the stream that serves it at present.

The one idea: a watch is a set of marks (the next revision of each scope) that outlives streams. A stream is opened at the
marks and moves them; when it breaks, the next one starts where they stand. So nothing is lost and nothing comes twice.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

import grpc.aio

from elasticrl.store.channel import Endpoint, FailedError, Metadata, cancelled, failed
from elasticrl.store.faults import Fate, Fault, judge
from elasticrl.store.messages import message
from elasticrl.store.protocol import Batch, Event
from elasticrl.store.wire import Names

T = TypeVar("T")


class Marks:
    """How far a watch has come, scope by scope."""

    def __init__(self, names: Names, scopes: Sequence[str], from_revision: int) -> None:
        assert from_revision > 0, "a watch begins at a revision of the past, or at the next one"
        self.names = names
        self.spans = [names.span(scope) for scope in scopes]
        self.next = [from_revision] * len(self.spans)
        self.doubt = False  # a stream's server seems older than what we have seen, or belongs to another cluster
        self._cluster = 0

    def meet(self, header: Any, index: int) -> None:
        """A server has confirmed a scope; here is what it said of itself."""
        other = self._cluster not in {0, header.cluster_id}
        self.doubt = self.doubt or other or header.revision < self.next[index] - 1
        self._cluster = self._cluster or header.cluster_id

    def set_back(self, header: Any) -> bool:
        """Whether the doubt was right, by an answer that the whole cluster stands behind: a single server may just lag."""
        self.doubt = False
        return bool(self._cluster != header.cluster_id or header.revision < max(self.next) - 1)

    def seen(self, index: int, events: Sequence[Event], revision: int) -> Batch:
        """A scope's next events. Without events, it is a report that the scope is quiet up to `revision`.

        The server sends such a report down the same queue as events and only for a watcher that has caught up, so it never
        overtakes one.
        """
        upto = events[-1].revision if events else revision
        self.next[index] = max(self.next[index], upto + 1)
        return Batch(events=tuple(events), revision=upto)

    def relist(self, reason: str) -> Batch:
        """The last batch of a watch that cannot go on."""
        return Batch(events=(), revision=max(self.next) - 1, relist=reason)


class WatchStream:
    """One stream on one endpoint, with one watcher for each scope; watcher i + 1 serves scope i."""

    def __init__(self, endpoint: Endpoint, marks: Marks, within_s: float) -> None:
        self.endpoint = endpoint
        self.marks = marks
        self.within_s = within_s
        self._call: Any = None
        self._unconfirmed = set(range(len(marks.spans)))
        self._parts: dict[int, list[Event]] = {}  # events of answers that come in fragments

    async def open(self, metadata: Metadata) -> None:
        """Ask for every scope from its mark on."""
        self._call = self.endpoint.stream(metadata)
        request, create = message("WatchRequest"), message("WatchCreateRequest")
        for index, (key, end) in enumerate(self.marks.spans):
            what = create(
                key=key,
                range_end=end,
                start_revision=self.marks.next[index],
                progress_notify=True,
                watch_id=index + 1,
                fragment=True,
            )
            await self._step(self._call.write(request(create_request=what)))

    async def read(self) -> Batch | None:
        """The next batch; None for an answer that carries none."""
        answer = await self._step(self._call.read())
        if answer is grpc.aio.EOF:
            raise await self._ended()
        index = answer.watch_id - 1
        if answer.canceled:
            return self._canceled(answer)
        if answer.created:
            self._unconfirmed.discard(index)
            self.marks.meet(answer.header, index)
            return None
        if index not in range(len(self.marks.spans)):
            return None  # a report on all watchers together, which nobody asked for
        # Fragments are held back until the last one, so that a transaction is never seen in halves or resumed in its middle.
        parts = self._parts.setdefault(index, [])
        parts += map(self.marks.names.event, answer.events)
        if answer.fragment:
            return None
        return self.marks.seen(index, self._parts.pop(index), answer.header.revision)

    def close(self) -> None:
        """Cancel the stream."""
        if self._call is not None:
            self.endpoint.forget(self._call)
            self._call.cancel()

    def _canceled(self, answer: Any) -> Batch:
        if answer.compact_revision:
            return self.marks.relist(f"the history before revision {answer.compact_revision} was compacted")
        reason = answer.cancel_reason
        # 3.4 and 3.5 say "permission denied" also when it is the login that has expired.
        denied = "permission denied" in reason or "auth token" in reason
        fault = (
            Fault(fate=Fate.TOKEN, code="PERMISSION_DENIED", detail=reason) if denied else judge("CANCELLED", reason)
        )
        raise FailedError(fault, self.endpoint.name)

    async def _step(self, step: Awaitable[T]) -> T:
        """Wait for one step of the stream: with a deadline until all watchers are confirmed, then for ever."""
        try:
            async with asyncio.timeout(self.within_s if self._unconfirmed else None):
                return await step
        except TimeoutError:
            fault = judge("DEADLINE_EXCEEDED", f"the watch was not confirmed within {self.within_s:g} s")
            raise FailedError(fault, self.endpoint.name) from None
        except grpc.aio.AioRpcError as error:
            raise failed(error, self.endpoint.name) from None
        except (asyncio.InvalidStateError, grpc.aio.UsageError):  # written to after it had ended: its status says why
            raise await self._ended() from None
        except asyncio.CancelledError:
            if cancelled():
                raise
            raise FailedError(judge("CANCELLED", "the stream was given up"), self.endpoint.name) from None

    async def _ended(self) -> FailedError:
        code, detail = await self._call.code(), await self._call.details()
        return FailedError(
            judge(code.name if code.name != "OK" else "UNAVAILABLE", detail or "the stream ended"), self.endpoint.name
        )
