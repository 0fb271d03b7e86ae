"""etcd's protocol messages, from a descriptor set that ships as data and is loaded into a pool of our own.

The one idea: generated stubs are tied to the protobuf release that generated them and register themselves in a pool that
the whole process shares, so they break beside another package's protobuf or another package's copy of the same stubs. A
FileDescriptorSet is plain data: it works with every protobuf from 3.20 on, and a private pool cannot clash.

`etcd.proto` is the source; its first lines say how to compile it again.
"""

from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "etcdserverpb"


@cache
def message(name: str) -> Any:
    """The class of a message, for example `message("RangeRequest")`."""
    descriptor = _pool().FindMessageTypeByName(f"{PACKAGE}.{name}")
    if hasattr(message_factory, "GetMessageClass"):
        return message_factory.GetMessageClass(descriptor)
    return message_factory.MessageFactory(_pool()).GetPrototype(descriptor)  # protobuf before 4.22


@cache
def names() -> tuple[str, ...]:
    """The messages there are, sorted."""
    return tuple(sorted(kind.name for kind in _file().message_type))


@cache
def _file() -> Any:
    wire = Path(__file__).with_name("etcd.pb").read_bytes()
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(wire).file
    return file


@cache
def _pool() -> Any:
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(_file().SerializeToString())
    return pool
