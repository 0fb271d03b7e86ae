"""What lies where in the store, and how it is written: versioned JSON, read with validation.

Everything of a job is under `/elasticrl/<job>/`:

    plan                 the one file of truth
    commit               the newest disk checkpoint
    leader               who leads, under its lease
    intent               what the operators want of the whole job
    look                 the generation whose workers shall say where they are
    where                a number, written whenever an operator asks where all workers are
    answers/<node>       what that node answered, under its lease
    members/<node>       what a member says of itself, under its lease
    quarantine/<node>    who is kept out, and why
    rollout/<node>       what a rollout node says of itself, under its lease
    drain/<node>         the life of a node that was asked to leave
    drained              who was asked last; each drain is fenced by the one before
    lives/<node>         the newest life of a node
    past                 what befell the job so far, for display
    secret               the key that neighbours sign their beats with
"""

import json
import zlib
from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from elasticrl.base.parsed import parsed
from elasticrl.store.settings import namespace as namespace  # noqa: PLC0414 - who knows the keys knows their prefix

PLAN = "plan"
COMMIT = "commit"
LEADER = "leader"
INTENT = "intent"
LOOK = "look"
WHERE = "where"
ANSWERS = "answers/"
MEMBERS = "members/"
QUARANTINES = "quarantine/"
DRAINS = "drain/"
DRAINED = "drained"
LIVES = "lives/"
ROLLOUTS = "rollout/"
PAST = "past"
SECRET = "secret"  # noqa: S105 - the key's name, not a secret

VERSION = 2

# A plan of 4,096 seats is 370 kB, and goes to every one of them: 1.5 GB from etcd for a single death. It shrinks tenfold.
COMPRESS_OVER = 8192  # bytes; below this etcdctl shows what it is
COMPRESSED = b"z1:"
COUNTED = (
    "step",
    "generation",
    "resume",
    "born",
    "incarnation",
    "intent_generation",
)  # what only ever rises, and starts at 0
HIGHEST = 1 << 40  # of these: a wrong one that is higher than all that will come would hold for ever
LARGEST = 64 << 20  # bytes after decompression: what somebody else wrote must not fill our memory

T = TypeVar("T")


def member_key(node: str) -> str:
    """Where a node's record lies."""
    return MEMBERS + node


def answer_key(node: str) -> str:
    """Where a node says where its workers are."""
    return ANSWERS + node


def quarantine_key(node: str) -> str:
    """Where a node's quarantine lies."""
    return QUARANTINES + node


def drain_key(node: str) -> str:
    """Where a node's request to leave lies."""
    return DRAINS + node


def life_key(node: str) -> str:
    """Where a node's newest life lies."""
    return LIVES + node


def rollout_key(node: str) -> str:
    """Where a rollout node's record lies."""
    return ROLLOUTS + node


class Unreadable(ValueError):
    """A value in the store, a trace or a message is not what it should be."""


_adapters: dict[type, TypeAdapter[Any]] = {}


def adapter(kind: type) -> TypeAdapter[Any]:
    """The validator of a type; building one is slow, so each is built once."""
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def dump(value: object) -> bytes:
    """A value of the core's vocabulary as versioned JSON, without what is at its default."""
    plain = adapter(type(value)).dump_python(value, mode="json", exclude_defaults=True)
    text = json.dumps({"v": VERSION, "value": plain}, separators=(",", ":"), sort_keys=True).encode()
    return text if len(text) <= COMPRESS_OVER else COMPRESSED + zlib.compress(text, 1)


def load(kind: type[T], data: bytes | str, where: str) -> T:
    """The value again, or `Unreadable` with the place, what is wrong, and what to do."""
    try:
        envelope = parsed(expand(data) if isinstance(data, bytes) else data, finite=True)
    except (ValueError, zlib.error) as error:
        raise Unreadable(f"{where} is not JSON ({error}); delete the key if no running elasticrl wrote it") from None
    if not isinstance(envelope, dict) or envelope.get("v") != VERSION:
        found = envelope.get("v") if isinstance(envelope, dict) else type(envelope).__name__
        raise Unreadable(
            f"{where} has format {found!r}, this elasticrl reads {VERSION}; run the same version on all nodes"
        )
    try:
        # As JSON, for only there strict means that numbers are numbers, and not also that enums are enums: a step that was
        # written as a text went past every bound, and held for ever.
        value: T = adapter(kind).validate_json(json.dumps(envelope.get("value")), strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(str(part) for part in problem["loc"])[:80]
        raise Unreadable(
            f"{where}: {field}: {problem['msg']}; delete the key if no running elasticrl wrote it"
        ) from None
    for name, number in _counted(value):
        if not -1 <= number < HIGHEST:
            raise Unreadable(
                f"{where}: {name} is {number}, and can only be a number from 0 to {HIGHEST - 1}; "
                "delete the key: no running elasticrl wrote it"
            )
    return value


def _counted(value: object) -> Iterator[tuple[str, int]]:
    """The numbers of a value that only ever rise: its own, and those of the members that it names."""
    if type(value) is int:
        yield "it", value
    for part in (value, getattr(value, "member", None)):
        for name in COUNTED:
            number = getattr(part, name, None)
            if number is not None:
                yield name, number
    for seat in (*getattr(value, "seats", ()), *getattr(value, "spares", ())):
        yield "born", seat.born
        yield "incarnation", seat.member.incarnation


def expand(data: bytes) -> bytes:
    """A large value as it was before it was compressed; any other as it is."""
    if not data.startswith(COMPRESSED):
        return data
    stream = zlib.decompressobj()
    text = stream.decompress(data[len(COMPRESSED) :], LARGEST)
    if not stream.eof:
        raise ValueError(f"it is cut short, or over {LARGEST} bytes large")
    return text
