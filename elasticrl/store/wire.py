"""Between our values and etcd's messages, and between relative keys and whole ones.

The one idea: the namespace is put on and taken off here and nowhere else, so no call can reach outside of it.
"""

from typing import Any

from elasticrl.store.messages import message
from elasticrl.store.protocol import Absent, Compare, Delete, Entry, Event, Get, Op, Put, Response, Unchanged


class Names:
    """Between our values with relative keys and etcd's messages with whole ones."""

    def __init__(self, namespace: str) -> None:
        self._prefix = _encode(namespace)

    def span(self, scope: str) -> tuple[bytes, bytes]:
        """A scope as etcd's [key, range_end); an empty end means the key alone."""
        key = self._prefix + _encode(scope)
        return (key, prefix_end(key)) if scope == "" or scope.endswith("/") else (key, b"")

    def range(self, scope: str, limit: int = 0) -> Any:
        """A request to read a scope."""
        key, end = self.span(scope)
        return message("RangeRequest")(key=key, range_end=end, limit=limit)

    def put(self, op: Put) -> Any:
        """A request to write."""
        return message("PutRequest")(key=self._prefix + _encode(op.key), value=op.value, lease=op.lease)

    def delete(self, scope: str) -> Any:
        """A request to delete a scope."""
        key, end = self.span(scope)
        return message("DeleteRangeRequest")(key=key, range_end=end)

    def compare(self, compare: Compare) -> Any:
        """A comparison; EQUAL is the default, and an absent key has mod revision and create revision 0."""
        kind, key = message("Compare"), self._prefix + _encode(compare.key)
        match compare:
            case Unchanged():
                return kind(key=key, target=kind.MOD, mod_revision=compare.revision)
            case Absent():
                return kind(key=key, target=kind.CREATE, create_revision=0)

    def operation(self, op: Op) -> Any:
        """An operation of a transaction."""
        kind = message("RequestOp")
        match op:
            case Put():
                return kind(request_put=self.put(op))
            case Delete():
                return kind(request_delete_range=self.delete(op.scope))
            case Get():
                return kind(request_range=self.range(op.scope))

    def response(self, response: Any) -> Response:
        """What an operation did."""
        return Response(
            deleted=response.response_delete_range.deleted,
            entries=tuple(map(self.entry, response.response_range.kvs)),
        )

    def entry(self, kv: Any) -> Entry:
        """A key and what etcd knows of it."""
        return Entry(
            key=self.relative(kv.key),
            value=kv.value,
            create_revision=kv.create_revision,
            mod_revision=kv.mod_revision,
            lease=kv.lease,
        )

    def event(self, event: Any) -> Event:
        """A change that a watch has seen."""
        gone = event.type == message("Event").DELETE
        return Event(
            key=self.relative(event.kv.key),
            entry=None if gone else self.entry(event.kv),
            revision=event.kv.mod_revision,
        )

    def relative(self, key: bytes) -> str:
        """A whole key as our callers know it."""
        return key[len(self._prefix) :].decode("utf-8", "surrogateescape")


def _encode(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def prefix_end(prefix: bytes) -> bytes:
    r"""The first key after all keys with a prefix, in etcd's way.

    >>> prefix_end(b"/elasticrl/job/")
    b'/elasticrl/job0'
    """
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\0"
