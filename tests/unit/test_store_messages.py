"""The descriptor set that ships: it is what `etcd.proto` says, says what etcd says, and keeps to itself."""

import subprocess
import sys
import types
from collections.abc import Iterable
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool

from elasticrl.store import messages

HERE = files("elasticrl.store")


def shape(kinds: Iterable[Any]) -> dict[str, tuple[set[tuple[object, ...]], set[tuple[str, int]]]]:
    """Each message's fields (name, number, type, repeated, the message's name) and enum values, nested ones included."""
    found = {}
    for kind in kinds:
        fields = {
            (f.name, f.number, f.type, f.label == f.LABEL_REPEATED, f.type_name.rpartition(".")[2]) for f in kind.field
        }
        found[kind.name] = fields, {(value.name, value.number) for enum in kind.enum_type for value in enum.value}
        found |= shape(kind.nested_type)
    return found


def shipped() -> Any:
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(HERE.joinpath("etcd.pb").read_bytes()).file
    return file


def test_the_descriptor_set_is_what_the_proto_file_says(tmp_path: Path) -> None:
    out = tmp_path / "fresh.pb"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{HERE}", f"--descriptor_set_out={out}", "etcd.proto"]
    subprocess.run(command, check=True, timeout=60)
    (fresh,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    assert fresh.package == messages.PACKAGE == shipped().package
    assert shape(fresh.message_type) == shape(shipped().message_type)


def test_every_message_has_the_numbers_that_the_etcd3_package_has_for_it() -> None:
    """That package's stubs were generated from etcd's own files; too old to be imported, they can still be read."""
    theirs: dict[str, Any] = {}
    for name in ("kv_pb2", "rpc_pb2"):
        theirs |= shape(descriptor_of(name).message_type)
    ours = shape(shipped().message_type)
    # Newer than that package (2020): watch ids and fragments were added in etcd 3.4, status details as well.
    newer = {
        ("WatchRequest", "progress_request"), ("WatchCreateRequest", "watch_id"), ("WatchCreateRequest", "fragment"),
        ("WatchResponse", "cancel_reason"), ("WatchResponse", "fragment"),
    } | {("StatusResponse", field) for field in ("raftAppliedIndex", "errors", "dbSizeInUse", "isLearner")}  # fmt: skip
    strange = [
        (kind, field[0])
        for kind, (fields, values) in ours.items()
        if kind != "WatchProgressRequest"
        for field in (*fields, *values)
        if field not in theirs[kind][0] | theirs[kind][1]
    ]
    assert set(strange) <= newer


def descriptor_of(module: str) -> Any:
    """The file descriptor inside a generated module, without running the rest of it."""
    found: list[bytes] = []

    class Captured(Exception):
        pass

    def capture(*, serialized_pb: bytes, **_: object) -> None:
        found.append(serialized_pb)
        raise Captured

    (path,) = [path for path in metadata.files("etcd3") or [] if path.name == f"{module}.py"]
    source = Path(str(path.locate())).read_text()
    descriptor = types.SimpleNamespace(FileDescriptor=capture)
    lines = [
        line
        for line in source.splitlines()
        if not line.startswith(("from google", "import kv", "import auth", "_sym_db"))
    ]
    start = next(n for n, line in enumerate(lines) if line.startswith("DESCRIPTOR"))
    code = "\n".join(line for n, line in enumerate(lines) if n >= start or line.startswith(("import sys", "_b=")))
    with pytest.raises(Captured):
        exec(
            compile(code.replace("dependencies=[", "dependencies=[] and ["), module, "exec"),
            {"_descriptor": descriptor},
        )
    return descriptor_pb2.FileDescriptorProto.FromString(found[0])


def test_the_messages_are_not_in_the_pool_that_all_packages_share() -> None:
    assert messages.message("RangeRequest")(key=b"a").SerializeToString() == b"\n\x01a"
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindMessageTypeByName("etcdserverpb.RangeRequest")


def test_all_messages_can_be_made_and_read_back() -> None:
    for name in messages.names():
        kind = messages.message(name)
        assert kind.FromString(kind().SerializeToString()) == kind()
